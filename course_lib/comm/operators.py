"""Parallel operators: pairs of a forward and a backward collective, as one autograd function.

The backward of an operator is the transpose of its forward, and which transpose is right depends
on what the tensor *is* on the axis (replicated, sharded, or a partial sum). The table below is
the whole of it; names as in Megatron-LM (f and g: arXiv:1909.08053, section 3; their sequence
parallel pair: arXiv:2205.05198, section 4.2.2).

=========  ======================  ======================  ===========================
operator   forward                 backward                from -> to
=========  ======================  ======================  ===========================
copy (f)   identity                all_reduce              replicated -> used differently
reduce (g) all_reduce              identity                partial sums -> replicated
gather     all_gather              own shard               shard -> full, used alike
shard      own shard               all_gather              full, used alike -> shard
unshard    all_gather              reduce_scatter          shard -> full, used differently
reshard    reduce_scatter          all_gather              partial sums -> shard
=========  ======================  ======================  ===========================

gather and unshard have the same forward. Taking gather's backward where each rank uses the full
tensor differently is the classic mistake: outputs are right and gradients are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from course_lib.comm.call import checked_piece
from course_lib.comm.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_uneven,
    reduce_scatter,
)
from course_lib.mesh import Axis

Move = Callable[[Tensor, Axis], Tensor]


class _Pair(torch.autograd.Function):
    """Apply ``forward_move`` going forward and ``backward_move`` to the gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis, forward_move: Move, backward_move: Move) -> Tensor:
        ctx.axis, ctx.backward_move = axis, backward_move
        return forward_move(x, axis)

    @staticmethod
    @once_differentiable  # the moves carry no gradient of their own: say so, never be wrong
    def backward(ctx, gradient: Tensor):
        return ctx.backward_move(gradient, ctx.axis), None, None, None


def _identity(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)


def own_shard(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """This rank's piece of ``x`` cut along ``dim`` into as many as the axis has ranks.

    A copy (n > 1), so that the full tensor can be freed. Nothing travels.
    """
    dim = checked_piece(x, dim, "own_shard", axis)
    if axis.size == 1:
        return x.detach()
    mine = x.detach().chunk(axis.size, dim)[axis.rank]
    return mine.clone(memory_format=torch.contiguous_format)


def _along(move: Callable[[Tensor, Axis, int], Tensor], dim: int) -> Move:
    return lambda x, axis: move(x, axis, dim)


def copy(x: Tensor, axis: Axis) -> Tensor:
    """Megatron's f: a replicated tensor enters a region where every rank goes its own way."""
    return _Pair.apply(x, axis, _identity, all_reduce)


def reduce(x: Tensor, axis: Axis) -> Tensor:
    """Megatron's g: partial sums leave that region as their sum."""
    return _Pair.apply(x, axis, all_reduce, _identity)


def gather(x: Tensor, axis: Axis, dim: int = -1) -> Tensor:
    """Shards become the full tensor, which every rank goes on to use in the same way."""
    return _Pair.apply(x, axis, _along(all_gather, dim), _along(own_shard, dim))


def shard(x: Tensor, axis: Axis, dim: int = -1) -> Tensor:
    """Keep this rank's shard of a tensor that all ranks hold."""
    return _Pair.apply(x, axis, _along(own_shard, dim), _along(all_gather, dim))


def unshard(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Shards become the full tensor, which every rank uses differently."""
    return _Pair.apply(x, axis, _along(all_gather, dim), _along(reduce_scatter, dim))


def reshard(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Partial sums of a full tensor become this rank's shard of their sum."""
    return _Pair.apply(x, axis, _along(reduce_scatter, dim), _along(all_gather, dim))


def swap(x: Tensor, axis: Axis, split_dim: int, join_dim: int) -> Tensor:
    """all_to_all from shards of ``join_dim`` to shards of ``split_dim``; backward swaps back."""
    return _Pair.apply(
        x,
        axis,
        lambda t, a: all_to_all(t, a, split_dim, join_dim),
        lambda t, a: all_to_all(t, a, join_dim, split_dim),
    )


def swap_rows(
    x: Tensor, axis: Axis, send_counts: Sequence[int], receive_counts: Sequence[int]
) -> Tensor:
    """all_to_all_uneven; backward takes each row's gradient back to where the row came from."""
    return _Pair.apply(
        x,
        axis,
        lambda t, a: all_to_all_uneven(t, a, send_counts, receive_counts),
        lambda t, a: all_to_all_uneven(t, a, receive_counts, send_counts),
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
