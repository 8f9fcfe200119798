"""Flat shards: parameters laid end to end, of which every rank owns one equal piece.

Letters in names: F elements of a flat tensor, padding included, n ranks, f = F/n a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from course_lib import comm
from course_lib.mesh import Axis

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def padded(elements: int, n: int) -> int:
    """The smallest multiple of ``n`` that holds ``elements``: F."""
    return -(-elements // n) * n


def reduce_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which gradients are summed and weights are updated: float32 at least.

    bfloat16 has 8 bits of precision: an update below 1/256 of a weight would be lost for ever.
    """
    return torch.promote_types(dtype, torch.float32)


class Flat:
    """Parameters of one dtype laid end to end and cut into n shards, the last one padded.

    ``full_F`` holds what the model computes with; the parameters are views into it.
    ``shard`` (f) is what this rank's optimizer updates: master weights in float32 when the
    parameters are bfloat16, else its very piece of ``full_F``, so that nothing is kept twice.
    ``shard.grad`` is this rank's piece of the gradient, summed over the ranks, in shard's dtype.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], axis: Axis, name: str) -> None:
        self.parameters, self.axis, self.name = list(parameters), axis, name
        self.elements = sum(parameter.numel() for parameter in self.parameters)
        values = comm.flatten(self.parameters)
        self.full_F = values.new_zeros(padded(self.elements, axis.size))
        self.full_F[: self.elements] = values
        self._show(self.views(self.full_F))
        mine = self.full_F.chunk(axis.size)[axis.rank]
        self.shard = nn.Parameter(mine.to(reduce_dtype(mine.dtype)))
        self._gradient_F: Tensor | None = None
        self._places: dict[nn.Parameter, Tensor] = {}  # of each gradient, in the flat one
        self._missing = set(self.parameters)  # whose gradient has not come yet

    @property
    def complete(self) -> bool:
        """Whether every parameter's gradient has come."""
        return not self._missing

    def views(self, flat_F: Tensor) -> list[Tensor]:
        """The parameters' parts of a flat tensor, in their shapes; the padding is in none."""
        return comm.unflatten(flat_F[: self.elements], self.parameters)

    def own_parts(self, values_f: Tensor) -> Iterator[tuple[nn.Parameter, int, Tensor]]:
        """(parameter, number of its first element here, values) of a tensor cut as the shard is.

        The tensor may be the shard itself or a moment of the optimizer. Padding is left out.
        """
        first = self.axis.rank * len(values_f)
        for parameter in self.parameters:
            begin, end = max(first, 0), min(first + len(values_f), parameter.numel())
            if begin < end:
                yield parameter, begin, values_f[begin - first : end - first]
            first -= parameter.numel()

    def _show(self, values: Sequence[Tensor]) -> None:
        """Let the parameters be ``values`` from now on."""
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value

    def start_gather(self) -> comm.Handle:
        """Begin to fill ``full_F``, and with it the parameters, from all ranks' shards."""
        shard_f = self.shard.detach().to(self.full_F.dtype)
        return comm.start_all_gather_flat(self.full_F, shard_f, self.axis, self.name)

    def collect(self, parameter: nn.Parameter) -> None:
        """Move ``parameter.grad`` into the flat gradient; what is there already is added to."""
        assert parameter.grad is not None, "called when autograd has made it"
        self._make_gradient()
        if parameter in self._missing:
            self._places[parameter].copy_(parameter.grad)
            self._missing.discard(parameter)
        else:
            self._places[parameter].add_(parameter.grad)
        parameter.grad = None

    def _make_gradient(self) -> Tensor:
        """The flat gradient; it lives from the first parameter's gradient to the landing."""
        if self._gradient_F is None:
            self._gradient_F = torch.empty_like(self.full_F, dtype=self.shard.dtype)
            self._places = dict(zip(self.parameters, self.views(self._gradient_F), strict=True))
        return self._gradient_F

    def start_reduce(self) -> comm.Handle:
        """Begin the reduce-scatter of the flat gradient, and let go of it.

        A parameter that this rank did not use counts as zeros, and so does the padding.
        """
        gradient_F = self._make_gradient()
        for parameter in self._missing:
            self._places[parameter].zero_()
        gradient_F[self.elements :].zero_()
        self._gradient_F, self._places, self._missing = None, {}, set(self.parameters)
        return comm.start_reduce_scatter(gradient_F, self.axis, label=self.name)

    def receive(self, sum_f: Tensor) -> None:
        """Add what a reduce-scatter gave to ``shard.grad``."""
        if self.shard.grad is None:
            self.shard.grad = sum_f
        else:
            self.shard.grad += sum_f


class Sharded:
    """What the stages share: the optimizer on this rank's shards, and the norm over all of them.

    It stands where a gradient sync stands and where an optimizer does: ``zero_grad()``, a backward
    for each micro-batch (all but the last each in a ``with z.accumulate():``), ``finish()``,
    ``clip()``, ``step()``. Gradients are summed over the ranks: divide each loss by the tokens of
    *all* ranks. Ranks must start with equal weights. ``parameter.grad`` is None outside backward.

    The optimizer sees flat shards, so it must treat every element alike: AdamW and SGD do, those
    with a norm or a factor for each matrix (LAMB, Adafactor) do not.
    """

    def __init__(self, flats: Sequence[Flat], axis: Axis, make_optimizer: MakeOptimizer) -> None:
        if not flats:
            raise ValueError("no parameter requires a gradient: there is nothing to shard")
        self.flats, self.axis = list(flats), axis
        self.optimizer = make_optimizer([flat.shard for flat in self.flats])
        self._flat_of = {p: flat for flat in self.flats for p in flat.parameters}
        self._hooks = [p.register_post_accumulate_grad_hook(self._ready) for p in self._flat_of]
        self._in_flight: tuple[Flat, comm.Handle] | None = None

    def _ready(self, parameter: nn.Parameter) -> None:
        """Called by autograd when ``parameter.grad`` is complete for this backward."""
        self._flat_of[parameter].collect(parameter)

    def _send(self, flat: Flat) -> None:
        """Start a reduce-scatter when the one before has landed: one at a time has memory."""
        self._land()
        self._in_flight = flat, flat.start_reduce()

    def _land(self) -> None:
        if self._in_flight is not None:
            flat, handle = self._in_flight
            flat.receive(handle.wait())
            self._in_flight = None

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Around one backward that is not the last of its step."""
        yield

    def finish(self) -> None:
        """After the last backward: from here on every ``shard.grad`` is complete."""
        raise NotImplementedError

    def held_gradients(self) -> list[comm.Held]:
        """The runs of summed gradients that this rank holds, 1-D and in shard's dtype.

        For sums and norms over other axes (tp, pp), after ``finish()``: what is written to them is
        what ``step()`` uses. In the order of the flats, the same on all ranks of those axes.
        Raises ValueError when no backward has been finished.
        """
        gradients = [(flat, flat.shard.grad) for flat in self.flats]
        if all(gradient is None for _, gradient in gradients):
            raise ValueError("no gradients in any shard: call it after backward and finish()")
        return [
            comm.Held(parameter, run)
            for flat, gradient in gradients
            if gradient is not None
            for parameter, _, run in flat.own_parts(gradient)
        ]

    def clip(self, max_norm: float) -> Tensor:
        """Scale all gradients down together to a global norm of at most ``max_norm``.

        Returns the norm before: every element is in one shard of one rank, so that the squares
        of the shards' norms add up (one all-reduce of one number, as control). Where parameters
        are cut over other axes too: ``tp.clip_gradients(z.held_gradients(), ..., over=[axis])``.
        """
        comm.refuse_cut(self._flat_of)
        held = self.held_gradients()
        norm = comm.squared_norm(held, [self.axis]).sqrt()
        comm.clip_gradients(held, norm, max_norm)
        return norm

    def step(self) -> None:
        """Update this rank's shards, and let the parameters follow."""
        self.optimizer.step()
        self.refresh()

    def refresh(self) -> None:
        """Let the parameters follow shards that were written."""

    @property
    def every_flat(self) -> list[Flat]:
        """The flats, and those of frozen parameters where these are sharded too."""
        return self.flats

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        self.optimizer.zero_grad()

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
