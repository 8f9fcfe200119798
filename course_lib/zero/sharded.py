"""What the stages of ZeRO share: the optimizer of the shards, held gradients, the norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from course_lib import comm
from course_lib.mesh import Axis
from course_lib.zero.flat import Flat

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Sharded:
    """The optimizer on this rank's shards, and the norm over all of them.

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
        self._hooks = comm.on_gradient(self._flat_of, self._ready)
        self._in_flight: tuple[Flat, comm.Handle] | None = None

    def _ready(self, parameter: nn.Parameter) -> None:
        """Called by autograd when ``parameter.grad`` is complete for this backward.

        It is None in the half of a backward that puts the gradients of weights off to the other.
        """
        if parameter.grad is not None:
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
            comm.Held(parameter, run, (self.axis,))
            for flat, gradient in gradients
            if gradient is not None
            for parameter, _, run in flat.own_parts(gradient)
        ]

    def clip(self, max_norm: float) -> Tensor:
        """Scale all gradients down together to a global norm of at most ``max_norm``.

        Returns the norm before. Where parameters are sharded over other axes too, call
        ``comm.clip_grad_norm(z.held_gradients(), [z.axis, mesh.tp], max_norm)``: this is refused.
        """
        return comm.clip_grad_norm(self.held_gradients(), [self.axis], max_norm)

    def step(self) -> None:
        """Update this rank's shards, and let the parameters follow.

        Raises RuntimeError when somebody wrote to parameters that have master weights: see
        :meth:`adopt`.
        """
        if any(flat.written for flat in self.flats):
            raise RuntimeError(
                "parameters were written to (load_state_dict?) since the master weights were made "
                "from them, and a step would undo that: call adopt() after writing"
            )
        self.optimizer.step()
        self.refresh()

    def adopt(self) -> None:
        """Let the shards take what was written to the parameters, on every rank alike.

        Call it after ``model.load_state_dict`` and the like: in bfloat16 the float32 master
        weights know nothing of it. The optimizer's moments stay as they are.
        """
        for flat in self.every_flat:
            flat.adopt()

    def refresh(self) -> None:
        """Let the parameters follow shards that were written."""

    @property
    def every_flat(self) -> list[Flat]:
        """The flats, and those of frozen parameters where these are sharded too."""
        return self.flats

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        self.optimizer.zero_grad()

    def reset(self) -> None:
        """Forget a step that broke off, such as by an error in forward or backward.

        Call it on all ranks, which must have broken off at the same place: what is in flight is
        waited for. Weights and the optimizer's state are those after the last ``step()``.
        """
        self._land()
        for flat in self.flats:
            flat.forget()
        self.zero_grad()

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
