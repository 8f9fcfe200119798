"""Parallel operators: pairs of a forward and a backward collective, as one autograd function.

The backward of an operator is the transpose of its forward, and which transpose is right depends
on what the tensor *is* on the axis (replicated, sharded, or a partial sum). The table below is
the whole of it. Compare Megatron-LM's ``*_region`` functions (f and g: arXiv:1909.08053, section 3;
their sequence parallel pair: arXiv:2205.05198, section 4.2.2).

====================  ==============  ==============  =====================================
operator              forward         backward        from -> to
====================  ==============  ==============  =====================================
copy_to (f)           identity        all_reduce      replicated -> used differently
reduce_from (g)       all_reduce      identity        partial sums -> replicated
scatter_to            own shard       all_gather      replicated, used alike -> shard
gather_from           all_gather      own shard       shard -> full, used alike
gather_from_sequence  all_gather      reduce_scatter  shard -> full, used differently
reduce_scatter_to     reduce_scatter  all_gather      partial sums -> shard
all_to_all            all_to_all      all_to_all      shards of one dim -> shards of another
all_to_all_v          all_to_all_v    all_to_all_v    rows here -> rows where they belong
====================  ==============  ==============  =====================================

gather_from and gather_from_sequence have the same forward. Using gather_from where each rank uses
the full tensor differently is the classic mistake: outputs are right and gradients are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from course_lib.comm.collectives import (
    all_gather,
    all_reduce,
    checked_shard,
    exchange_rows,
    exchange_shards,
    reduce_scatter,
)
from course_lib.mesh import Axis

Move = Callable[[Tensor, Axis], Tensor]


class _Pair(torch.autograd.Function):
    """Apply ``forward_move`` going forward and ``backward_move`` to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, forward_move: Move, backward_move: Move) -> Tensor:
        ctx.axis, ctx.backward_move = axis, backward_move
        return forward_move(x, axis)

    @staticmethod
    @once_differentiable  # the moves carry no gradient of their own: say so, never be wrong
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.backward_move(gradient, ctx.axis), None, None, None


def _identity(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)


def own_shard(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """This rank's shard of ``x`` along ``dim``. Nothing is sent.

    A copy (n > 1), so that the full tensor can be freed. Carries no gradient.
    """
    dim = checked_shard(x, dim, "own_shard", axis)
    if axis.size == 1:
        return x.detach()
    mine = x.detach().chunk(axis.size, dim)[axis.rank]
    return mine.clone(memory_format=torch.contiguous_format)


def _along(move: Callable[[Tensor, Axis, int], Tensor], dim: int) -> Move:
    return lambda x, axis: move(x, axis, dim)


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Megatron's f: a replicated tensor enters a region in which the ranks use it differently."""
    return _Pair.apply(x, axis, _identity, all_reduce)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Megatron's g: partial sums leave that region as their sum."""
    return _Pair.apply(x, axis, all_reduce, _identity)


def scatter_to(x: Tensor, axis: Axis, dim: int = -1) -> Tensor:
    """This rank's shard of a tensor that all ranks hold."""
    return _Pair.apply(x, axis, _along(own_shard, dim), _along(all_gather, dim))


def gather_from(x: Tensor, axis: Axis, dim: int = -1) -> Tensor:
    """Shards become the full tensor, which every rank goes on to use in the same way."""
    return _Pair.apply(x, axis, _along(all_gather, dim), _along(own_shard, dim))


def gather_from_sequence(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Shards become the full tensor, which every rank uses differently."""
    return _Pair.apply(x, axis, _along(all_gather, dim), _along(reduce_scatter, dim))


def reduce_scatter_to(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Partial sums of a full tensor become this rank's shard of their sum."""
    return _Pair.apply(x, axis, _along(reduce_scatter, dim), _along(all_gather, dim))


def all_to_all(x: Tensor, axis: Axis, split_dim: int = 0, join_dim: int = 0) -> Tensor:
    """Split ``x`` along ``split_dim``, send shard r to rank r and join along ``join_dim``.

    x [.., n*a, .., b, ..] -> [.., a, .., n*b, ..]. Each rank sends (n-1)/n S, in backward again.
    """
    return _Pair.apply(
        x,
        axis,
        lambda t, a: exchange_shards(t, a, split_dim, join_dim),
        lambda t, a: exchange_shards(t, a, join_dim, split_dim),
    )


def all_to_all_v(
    x: Tensor, axis: Axis, send_counts: Sequence[int], receive_counts: Sequence[int]
) -> Tensor:
    """Send the first ``send_counts[0]`` rows of ``x`` to rank 0, the next to rank 1, and so on.

    x [sum(send_counts), ..] -> [sum(receive_counts), ..], in rank order. ``receive_counts[r]`` must
    be what rank r sends here. Each rank sends the bytes of the rows that leave it; backward takes
    each row's gradient back to where the row came from.
    """
    return _Pair.apply(
        x,
        axis,
        lambda t, a: exchange_rows(t, a, send_counts, receive_counts),
        lambda t, a: exchange_rows(t, a, receive_counts, send_counts),
    )


@dataclass(frozen=True)
class Region:
    """How an activation x_BSD enters and leaves a region in which the ranks divide the work.

    Inside, every rank has all positions and computes its shard; what leaves is a partial sum.
    ``rows`` takes from a tensor whose first dim is S the rows that a rank holds outside.
    """

    enter: Move
    leave: Move
    rows: Move

    def columns(
        self, x: Tensor, linears: Iterable[Callable[..., Tensor]], axis: Axis
    ) -> list[Tensor]:
        """Let ``x`` enter once for all ``linears`` that read it; return their outputs."""
        entered = self.enter(x, axis)
        return [linear(entered) for linear in linears]


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # x, weight, bias -> x weight^T + bias


def apply_weight(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, product: Product = F.linear
) -> Tensor:
    """Return ``product(x, weight, bias)``. A TorchFunctionMode sees the call, as of F.linear."""
    if has_torch_function((x, weight)):
        return handle_torch_function(apply_weight, (x, weight), x, weight, bias, product)
    return product(x, weight, bias)
