"""Flat parameters: many parameters in one 1-D tensor, which is split into one equal shard per rank.

FSDP1 calls this a FlatParameter. Letters in names: F is the number of elements of the flat tensor,
padding included; n is the number of ranks; f = F/n is the length of a shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from course_lib import comm
from course_lib.formulas.zero import padded
from course_lib.mesh import Axis
from course_lib.model import accumulation_dtype


class FlatParameter:
    """Parameters of one dtype in one flat tensor, split into n shards; the last one is padded.

    The model computes with ``full_F``: its parameters are views into it. This rank's optimizer
    updates ``shard`` (f). With bfloat16 parameters the shard stores float32 master weights:
    bfloat16 has 8 bits of precision, so an update below 1/256 of a weight would be lost. Otherwise
    it is a view of this rank's slice of ``full_F`` and needs no memory.
    ``shard.grad`` is this rank's shard of the gradient, summed over the ranks, in shard's dtype.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], axis: Axis, name: str) -> None:
        self.parameters, self.axis, self.name = list(parameters), axis, name
        self.elements = sum(parameter.numel() for parameter in self.parameters)
        values = comm.flatten(self.parameters)
        self.full_F = values.new_zeros(padded(self.elements, axis.size))
        self.full_F[: self.elements] = values
        self._set_values(self.views(self.full_F))
        own_f = self.full_F.chunk(axis.size)[axis.rank]
        self.shard = nn.Parameter(own_f.to(accumulation_dtype(own_f.dtype)))
        self.shares_memory = self.shard.dtype == own_f.dtype  # with the parameters
        self._gradient_F: Tensor | None = None
        self._gradient_views: dict[nn.Parameter, Tensor] = {}  # into _gradient_F
        self._missing = set(self.parameters)  # parameters whose gradient is not collected yet
        self._versions = self._versions_now()

    @property
    def complete(self) -> bool:
        """Whether the gradient of every parameter has been collected."""
        return not self._missing

    def views(self, flat_F: Tensor) -> list[Tensor]:
        """Return one view into a flat tensor per parameter, in its shape, without the padding."""
        return comm.unflatten(flat_F[: self.elements], self.parameters)

    def parameter_slices(self, values_f: Tensor) -> Iterator[tuple[nn.Parameter, int, Tensor]]:
        """Yield (parameter, index of its first element here, values) for a tensor like the shard.

        The tensor may be the shard itself or a moment of the optimizer. Padding is left out.
        """
        first = self.axis.rank * len(values_f)
        for parameter in self.parameters:
            begin, end = max(first, 0), min(first + len(values_f), parameter.numel())
            if begin < end:
                yield parameter, begin, values_f[begin - first : end - first]
            first -= parameter.numel()

    def _set_values(self, values: Sequence[Tensor]) -> None:
        """Make each parameter refer to its tensor in ``values``, without a copy."""
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value

    def start_gather(self) -> comm.Handle:
        """Start the all-gather that fills ``full_F``, and so the parameters, from all shards."""
        shard_f = self.shard.detach().to(self.full_F.dtype)
        return comm.start_all_gather_flat(self.full_F, shard_f, self.axis, self.name)

    def collect(self, parameter: nn.Parameter) -> None:
        """Move ``parameter.grad`` into the flat gradient, or add it to what is already there."""
        assert parameter.grad is not None, "called when autograd has computed it"
        self._make_gradient()
        if parameter in self._missing:
            self._gradient_views[parameter].copy_(parameter.grad)
            self._missing.discard(parameter)
        else:
            self._gradient_views[parameter].add_(parameter.grad)
        parameter.grad = None

    def _make_gradient(self) -> Tensor:
        """Return the flat gradient; allocate it for the first parameter's gradient."""
        if self._gradient_F is None:
            self._gradient_F = torch.empty_like(self.full_F, dtype=self.shard.dtype)
            views = self.views(self._gradient_F)
            self._gradient_views = dict(zip(self.parameters, views, strict=True))
        return self._gradient_F

    def start_reduce(self) -> comm.Handle:
        """Start the reduce-scatter of the flat gradient and drop the references to it.

        A parameter that this rank did not use contributes zeros, and so does the padding.
        """
        gradient_F = self._make_gradient()
        for parameter in self._missing:
            self._gradient_views[parameter].zero_()
        gradient_F[self.elements :].zero_()
        self.drop_gradient()
        return comm.start_reduce_scatter(gradient_F, self.axis, label=self.name)

    def drop_gradient(self) -> None:
        """Drop the flat gradient and everything that backward has put into it."""
        self._gradient_F, self._gradient_views = None, {}
        self._missing = set(self.parameters)

    def add_to_shard_gradient(self, sum_f: Tensor) -> None:
        """Add the result of a reduce-scatter to ``shard.grad``."""
        if self.shard.grad is None:
            self.shard.grad = sum_f
        else:
            self.shard.grad += sum_f

    # A tensor counts the writes to it in _version. Gathers write to full_F, which is not counted.

    def _versions_now(self) -> list[int]:
        return [parameter._version for parameter in self.parameters]

    @property
    def written(self) -> bool:
        """Whether a parameter was written to since the shard was last equal to it."""
        return not self.shares_memory and self._versions != self._versions_now()

    @torch.no_grad()
    def sync_shard(self) -> None:
        """Copy the values of the parameters into the shard."""
        self.shard.copy_(self.full_F.chunk(self.axis.size)[self.axis.rank])
        self._versions = self._versions_now()


class ShardedFlatParameter(FlatParameter):
    """A flat parameter whose full tensor has memory from :meth:`start_gather` to :meth:`free` only.

    The storage is resized and never replaced, because autograd saved views into it for backward.
    These have the right values again after the next gather. In between, a parameter has its shape
    and reads as NaN. Frozen parameters are sharded too; they have no gradient and need no master
    weights.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], axis: Axis, name: str) -> None:
        super().__init__(parameters, axis, name)
        self.frozen = not parameters[0].requires_grad
        own_f = self.full_F.chunk(axis.size)[axis.rank] if self.frozen else self.shard.detach()
        self.shard = nn.Parameter(own_f.clone(), requires_grad=not self.frozen)
        self.shares_memory = False
        self._views, self._bytes = self.views(self.full_F), self.full_F.nbytes
        nan = self.full_F.new_full((), float("nan"))
        self._without_memory = [nan.expand(parameter.shape) for parameter in parameters]
        self.free()

    def start_gather(self) -> comm.Handle:
        """Allocate the parameters and start to fill them."""
        self.full_F.untyped_storage().resize_(self._bytes)
        self._set_values(self._views)
        return super().start_gather()

    def sync_shard(self) -> None:
        """Copy the values of the parameters, which must be gathered, into the shard."""
        if not self.full_F.untyped_storage().nbytes():
            raise RuntimeError(
                f"the parameters of {self.name} have no memory now: write to them and call "
                "sync_shards() inside `with z.gathered():`"
            )
        super().sync_shard()

    def free(self) -> None:
        """Free the memory of the parameters."""
        self.full_F.untyped_storage().resize_(0)
        self._set_values(self._without_memory)


class OneReduceScatter:
    """Reduce-scatters of flat gradients, at most one in flight, because each needs memory."""

    def __init__(self) -> None:
        self._in_flight: tuple[FlatParameter, comm.Handle] | None = None

    def start(self, flat: FlatParameter) -> None:
        """Wait for the previous reduce-scatter, then start the one of ``flat``."""
        self.wait()
        self._in_flight = flat, flat.start_reduce()

    def wait(self) -> None:
        """Wait for the reduce-scatter in flight, if any, and add its result to the shard's."""
        if self._in_flight is not None:
            flat, handle = self._in_flight
            flat.add_to_shard_gradient(handle.wait())
            self._in_flight = None
