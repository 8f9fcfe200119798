"""Sequence parallelism: outside the tensor-parallel regions each rank stores S/t of the positions.

Megatron's, by Korthikanti et al. 2022, arXiv:2205.05198. Tensor parallelism replicates norms,
dropout and residuals on every rank. Here each rank stores x_BScD. x is gathered where it enters a
region; the partial sums are reduce-scattered where it leaves:

========  ========================  ========================
          forward                   backward
========  ========================  ========================
enter     all-gather over S         reduce-scatter over S
leave     reduce-scatter over S     all-gather over S
========  ========================  ========================

An all-reduce is a reduce-scatter and an all-gather, so sequence parallelism sends as many bytes as
tensor parallelism if autograd saves the gathered inputs. One sum is new. The gradient of a
replicated parameter (norm, row bias, positions) covers only this rank's rows, so it must be summed
over the axis (:func:`sum_gradients`).

Two variants. With :data:`REGION` autograd saves the gathered input of each region, all of it on
every rank. With :data:`GATHER_AGAIN` it saves this rank's rows and gathers them once more in
backward: less memory, 1.25 times the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from course_lib import comm
from course_lib.comm import Held
from course_lib.comm.collectives import check_equal_shards
from course_lib.comm.operators import Region
from course_lib.formulas.sp import (  # noqa: F401  its formulas are exported
    replicated_parameters,
    saved_bytes,
    saved_outside_blocks,
    saved_per_block,
    wire_bytes,
)
from course_lib.mesh import Axis

S = 1  # the dim of x_BSD that the ranks divide


def enter(x_BScD: Tensor, axis: Axis) -> Tensor:
    """All-gather. Backward sums the gradients of all ranks; each rank receives its rows."""
    return comm.gather_from_sequence(x_BScD, axis, S)


def leave(x_BSD: Tensor, axis: Axis) -> Tensor:
    """Reduce-scatter of partial sums; backward gathers."""
    positions = x_BSD.shape[S]
    check_equal_shards(f"a sequence of {positions} positions", positions, "leave", axis)
    return comm.reduce_scatter_to(x_BSD, axis, S)


def own_rows(positions_S: Tensor, axis: Axis) -> Tensor:
    """Return the positions of this rank's rows."""
    return comm.own_shard(positions_S, axis)


REGION = Region(enter, leave, own_rows)


class _Again:
    """The gather in backward, one for all the linears that read x (q, k and v)."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.in_flight: comm.Handle | None = None

    def start(self, x_BScD: Tensor) -> comm.Handle:
        """Start it, unless another linear has."""
        if self.in_flight is None:
            self.in_flight = comm.start_all_gather(x_BScD, self.axis, S)
        return self.in_flight


class _EnterAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BScD: Tensor, again: _Again) -> Tensor:
        ctx.again = again
        return comm.all_gather(x_BScD, again.axis, S)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_BSD: Tensor) -> tuple[Any, ...]:
        ctx.again.in_flight = None  # dx is complete: every linear has used x
        return comm.reduce_scatter(dx_BSD, ctx.again.axis, S), None


class _GatheringLinear(torch.autograd.Function):
    """``x weight^T + bias``, which saves this rank's rows of x alone."""

    @staticmethod
    def forward(
        ctx: Any, x_BSD: Tensor, weight: Tensor, bias: Tensor | None, x_BScD: Tensor, again: _Again
    ) -> Tensor:
        ctx.save_for_backward(weight, x_BScD)
        ctx.again = again
        return F.linear(x_BSD, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BSF: Tensor) -> tuple[Any, ...]:
        weight_FD, x_BScD = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        gathered = ctx.again.start(x_BScD) if wants_weight else None
        dx_BSD = dy_BSF @ weight_FD if wants_x else None  # during the gather
        dy_TF = dy_BSF.flatten(0, 1)
        dw_FD = dy_TF.t() @ gathered.wait().flatten(0, 1) if gathered else None
        return dx_BSD, dw_FD, dy_TF.sum(0) if wants_bias else None, None, None


class GatherAgain(Region):
    """The linears save this rank's rows of x and gather them again in backward."""

    def columns(
        self, x: Tensor, linears: Iterable[Callable[..., Tensor]], axis: Axis
    ) -> list[Tensor]:
        """Gather ``x`` once for all ``linears``, which must take a ``product``."""
        if axis.size == 1 or not torch.is_grad_enabled():
            return super().columns(x, linears, axis)
        again, rows = _Again(axis), x.detach()
        x_BSD = _EnterAgain.apply(x, again)

        def product(x_BSD: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return _GatheringLinear.apply(x_BSD, weight, bias, rows, again)

        return [linear(x_BSD, product) for linear in linears]


GATHER_AGAIN = GatherAgain(enter, leave, own_rows)


def sum_gradients(held: Iterable[Held], axis: Axis) -> None:
    """Add up the gradients of replicated parameters: each rank has them for its own rows only.

    One flat all-reduce. Call it once per step, after the last backward and the sum (or ZeRO's
    reduce-scatter) over data parallelism. Forgetting it is the classic mistake: the norm weights
    of the ranks drift apart and the loss still falls.
    """
    replicated = [one for one in held if not comm.is_sharded(one.parameter, axis)]
    comm.sum_gradients(replicated, axis)
