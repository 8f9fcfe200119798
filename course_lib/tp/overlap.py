"""Sequence parallelism whose gathers and scatters overlap with the matrix products beside them.

A product can start only after the gather of its input, and a scatter only after the product, so a
rank either computes or communicates. Split into blocks of S/t rows, the two overlap. Where rows
enter, a rank multiplies one block while it receives the next. Where partial sums leave, it
multiplies one block while the sum of the previous block is sent:

========  ===========================================  ======================================
          forward                                      backward
========  ===========================================  ======================================
columns   y[r] = x[r] W^T when block r arrives         dx[r] = ring sum of dy[r] W
row       y[r] = ring sum of x[r] W^T                  dx[r] = dy[r] W when block r arrives
========  ===========================================  ======================================

dW = dy^T x is one product of the gathered tensors. The bytes are those of the two collectives. The
ring adds in another order, so results equal the plain form up to rounding. Use it in a plan:
``parallelize(model, axis, sp.REGION, overlapped(LLAMA))``.
Source: Wang et al. 2023, doi:10.1145/3567955.3567959.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from course_lib import comm
from course_lib.mesh import Axis
from course_lib.model import Attention
from course_lib.model.layers import MLP, SwiGLU
from course_lib.tp.layers import ColumnLinear, RowLinear
from course_lib.tp.plan import Cut, Entry, enters, row

S = 1  # the dim of x_BSD that the ranks divide


def ring_gather(x_BScD: Tensor, weights: Sequence[Tensor], axis: Axis) -> list[Tensor]:
    """Return the gathered x_BSD and its product with each weight, block by block as they arrive."""
    blocks = {}
    for owner, block in comm.ring(x_BScD, axis):
        blocks[owner] = [block, *(block @ weight for weight in weights)]
    in_order = (blocks[rank] for rank in range(axis.size))
    return [torch.cat(shards, S) for shards in zip(*in_order, strict=True)]


def ring_scatter(xs_BSF: Sequence[Tensor], weights: Sequence[Tensor], axis: Axis) -> Tensor:
    """Return this rank's rows of the sum of ``x @ weight`` over all pairs and all ranks.

    The sum for one rank starts at the next rank and is sent once around the ring. Each rank
    computes its own summand while it receives the sum.
    """

    def summand(number: int) -> Tensor:
        blocks = (x.chunk(axis.size, S)[number] for x in xs_BSF)
        first, *others = (block @ weight for block, weight in zip(blocks, weights, strict=True))
        return sum(others, start=first)

    total = summand((axis.rank - 1) % axis.size)
    for turn in range(2, axis.size + 1):
        arriving = comm.start_exchange(axis, [(total, axis.next)], [(total, axis.previous)])
        own = summand((axis.rank - turn) % axis.size)
        total = own + arriving.wait()[0]
    return total


def _weight_gradient(dy_BSF: Tensor, x_BSD: Tensor) -> Tensor:
    return dy_BSF.flatten(0, 1).t() @ x_BSD.flatten(0, 1)


class _Columns(torch.autograd.Function):
    """Return y_BSFt, the product of the gathered x_BScD and W_FtD, for each of the weights."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, x_BScD: Tensor, *weights_FtD: Tensor) -> Any:
        x_BSD, *products = ring_gather(x_BScD, [weight.t() for weight in weights_FtD], axis)
        ctx.axis = axis
        ctx.save_for_backward(x_BSD, *weights_FtD)
        return tuple(products)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys_BSFt: Tensor) -> tuple[Any, ...]:
        x_BSD, *weights_FtD = ctx.saved_tensors
        wants_x = ctx.needs_input_grad[1]
        dx_BScD = ring_scatter(dys_BSFt, weights_FtD, ctx.axis) if wants_x else None
        return None, dx_BScD, *(_weight_gradient(dy_BSFt, x_BSD) for dy_BSFt in dys_BSFt)


class _Row(torch.autograd.Function):
    """Return y_BScD, this rank's rows of the product of x_BSFt and W_DFt, summed over ranks."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, x_BSFt: Tensor, weight_DFt: Tensor) -> Tensor:
        ctx.axis = axis
        ctx.save_for_backward(x_BSFt, weight_DFt)
        return ring_scatter([x_BSFt], [weight_DFt.t()], axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BScD: Tensor) -> tuple[Any, ...]:
        x_BSFt, weight_DFt = ctx.saved_tensors
        dy_BSD, dx_BSFt = ring_gather(dy_BScD, [weight_DFt], ctx.axis)
        return None, dx_BSFt, _weight_gradient(dy_BSD, x_BSFt)


class RingRowLinear(RowLinear):
    """:class:`~course_lib.tp.layers.RowLinear` that scatters as it multiplies."""

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's rows (B, S/t, D) of x (B, S, F/t)."""
        y = _Row.apply(self.axis, x, self.weight)
        return y if self.bias is None else y + self.bias


def ring_row(linear: nn.Linear, cut: Cut) -> nn.Module:
    """:func:`~course_lib.tp.plan.row`, overlapped."""
    return RingRowLinear(linear, cut.axis)


def ring_columns(x_BScD: Tensor, linears: Sequence[ColumnLinear], axis: Axis) -> list[Tensor]:
    """``Region.columns``, overlapped: all linears multiply each block of rows as it arrives."""
    ys_BSFt = _Columns.apply(axis, x_BScD, *(linear.weight for linear in linears))
    pairs = zip(ys_BSFt, linears, strict=True)
    return [y if linear.bias is None else y + linear.bias for y, linear in pairs]


def ring_enters(module: Attention | SwiGLU | MLP, cut: Cut) -> nn.Module:
    """:func:`~course_lib.tp.plan.enters`, overlapped."""
    if not cut.by_rows:
        raise ValueError(
            "expected a region in which ranks divide the rows, because an overlapped plan gathers "
            "them, got one without: give it the region sp.REGION"
        )
    module.columns = partial(ring_columns, axis=cut.axis)
    return module


def overlapped(plan: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return ``plan`` with overlapped gathers and scatters inside the blocks."""
    rings: dict[Entry, Entry] = {enters: ring_enters, row: ring_row}
    return {key: rings.get(entry, entry) for key, entry in plan.items()}
