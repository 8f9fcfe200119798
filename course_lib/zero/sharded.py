"""The optimizer of the shards, which all stages of ZeRO share, with the global norm over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from course_lib import comm
from course_lib.mesh import Axis
from course_lib.zero.flat import FlatParameter, OneReduceScatter

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Sharded:
    """The optimizer on this rank's shards, and the norm over all of them.

    It replaces both the gradient sync and the optimizer of data parallelism: ``zero_grad()``, one
    backward per micro-batch (all but the last each in a ``with z.accumulate():``), ``finish()``,
    ``clip()``, ``step()``. Gradients are summed over the ranks: divide each loss by the tokens of
    *all* ranks. Ranks must start with equal weights. ``parameter.grad`` is None outside backward.

    The optimizer sees flat shards, so it must treat every element alike. AdamW and SGD do;
    optimizers with a norm or a factor per matrix (LAMB, Adafactor) do not.
    """

    def __init__(
        self, flats: Sequence[FlatParameter], axis: Axis, make_optimizer: MakeOptimizer
    ) -> None:
        if not flats:
            raise ValueError("no parameter requires a gradient: there is nothing to shard")
        self.flats, self.axis = list(flats), axis
        self.optimizer = make_optimizer([flat.shard for flat in self.flats])
        self._flat_of = {p: flat for flat in self.flats for p in flat.parameters}
        self._hooks = comm.on_gradient(self._flat_of, self._ready)
        self._reduction = OneReduceScatter()

    def _ready(self, parameter: nn.Parameter) -> None:
        """Handle ``parameter.grad``; autograd calls it when the gradient is complete.

        The gradient is None in the input half of a split backward.
        """
        raise NotImplementedError

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Run one backward that is not the last of its step inside."""
        yield

    def finish(self) -> None:
        """Complete every ``shard.grad``; call it after the last backward."""
        raise NotImplementedError

    def held_gradients(self) -> list[comm.Held]:
        """Return the slices of summed gradients that this rank stores, 1-D and in shard's dtype.

        Sums and norms over other axes (tp, pp) take them after ``finish()``, and ``step()`` uses
        what is written to them. They are in the order of the flat parameters, which is the same on
        all ranks of those axes. Raises ValueError before a backward and finish().
        """
        gradients = [(flat, flat.shard.grad) for flat in self.flats]
        if all(gradient is None for _, gradient in gradients):
            raise ValueError("no gradients in any shard: call it after backward and finish()")
        return [
            comm.Held(parameter, values, (self.axis,))
            for flat, gradient in gradients
            if gradient is not None
            for parameter, _, values in flat.parameter_slices(gradient)
        ]

    def clip(self, max_norm: float) -> Tensor:
        """Scale all gradients down together to a global norm of at most ``max_norm``.

        Returns the norm before. Raises ValueError if parameters are sharded over another axis too:
        call ``comm.clip_grad_norm(z.held_gradients(), [z.axis, mesh.tp], max_norm)`` instead.
        """
        return comm.clip_grad_norm(self.held_gradients(), [self.axis], max_norm)

    def step(self) -> None:
        """Update this rank's shards, then the parameters.

        Raises RuntimeError when parameters that have master weights were written to: see
        :meth:`sync_shards`.
        """
        if any(flat.written for flat in self.flats):
            raise RuntimeError(
                "parameters were written to (load_state_dict?) after the master weights were made "
                "from them, and a step would undo that: call sync_shards() after writing"
            )
        self.optimizer.step()
        self.refresh()

    def sync_shards(self) -> None:
        """Copy the parameters into the shards; call it on every rank after you write to them.

        It is needed after ``model.load_state_dict`` and the like, because in bfloat16 the float32
        master weights are a separate copy. The optimizer's moments do not change.
        """
        for flat in self.every_flat:
            flat.sync_shard()

    def refresh(self) -> None:
        """Update the parameters after a write to the shards."""

    @property
    def every_flat(self) -> Sequence[FlatParameter]:
        """All flat parameters, including the frozen ones where these are sharded too."""
        return self.flats

    def zero_grad(self) -> None:
        """Drop the gradients of the step before."""
        self.optimizer.zero_grad()

    def reset(self) -> None:
        """Drop the state of a step that an error in forward or backward interrupted.

        Call it on all ranks, which must have stopped at the same place: it waits for the collective
        in flight. Weights and the optimizer's state are those after the last ``step()``.
        """
        self._reduction.wait()
        for flat in self.flats:
            flat.drop_gradient()
        self.zero_grad()

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
