"""Flat shards: parameters laid end to end, of which every rank owns one equal piece.

Letters in names: F elements of a flat tensor, padding included, n ranks, f = F/n a shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from course_lib import comm
from course_lib.mesh import Axis


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
        self.shares_memory = self.shard.dtype == mine.dtype  # with the parameters
        self._gradient_F: Tensor | None = None
        self._places: dict[nn.Parameter, Tensor] = {}  # of each gradient, in the flat one
        self._missing = set(self.parameters)  # whose gradient has not come yet
        self._versions = self._versions_now()

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
        self.forget()
        return comm.start_reduce_scatter(gradient_F, self.axis, label=self.name)

    def forget(self) -> None:
        """Let go of what backward has put into the flat gradient."""
        self._gradient_F, self._places, self._missing = None, {}, set(self.parameters)

    def receive(self, sum_f: Tensor) -> None:
        """Add what a reduce-scatter gave to ``shard.grad``."""
        if self.shard.grad is None:
            self.shard.grad = sum_f
        else:
            self.shard.grad += sum_f

    # Tensors count the writes to them; what we gather goes around the parameters, into full_F.

    def _versions_now(self) -> list[int]:
        return [parameter._version for parameter in self.parameters]

    @property
    def written(self) -> bool:
        """Whether somebody wrote to a parameter, and the shard does not have it."""
        return not self.shares_memory and self._versions != self._versions_now()

    @torch.no_grad()
    def adopt(self) -> None:
        """Let the shard take its values from the parameters."""
        self.shard.copy_(self.full_F.chunk(self.axis.size)[self.axis.rank])
        self._versions = self._versions_now()
