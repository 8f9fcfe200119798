"""The two halves of a pair of linear layers, each built from a serial one.

========  ==============================  ============================  =======================
          holds                           forward                       backward
========  ==============================  ============================  =======================
column    W_FtD: F/t output features      y_Ft = enter(x_D) W_FtD^T     dx = enter'(dy W)
row       W_DFt: F/t input features       y_D = leave(x_Ft W_DFt^T)     dx_Ft = leave'(dy) W
========  ==============================  ============================  =======================

The pair (enter, leave) is an argument: copy and reduce are Megatron's f and g; sequence
parallelism gives another pair. Where several column linears read one input (q, k and v; gate and
up), it enters once, at their module, and the linears take it as it is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from course_lib import comm
from course_lib.comm.operators import Move
from course_lib.mesh import Axis, sub_axis
from course_lib.tp.shards import own_part


def as_it_is(x: Tensor, axis: Axis) -> Tensor:
    """The operator of an input that has entered already."""
    return x


def apply_weight(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x weight^T + bias``. Where ``x`` says from which shard it was gathered, backward keeps
    that shard instead of ``x`` and gathers again for the weight's gradient."""
    origin = comm.source(x)
    if origin is None or not torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    origin.readers += 1
    return _GatheringLinear.apply(x, weight, bias, origin.shard, origin)


class _GatheringLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, shard: Tensor, origin):
        ctx.save_for_backward(weight, shard)
        ctx.origin = origin
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        weight, _ = ctx.saved_tensors
        x = ctx.origin.read()  # every reader reads, so that all ranks gather
        rows, (wants_x, wants_weight, wants_bias, *_) = dy.flatten(0, -2), ctx.needs_input_grad
        return (
            dy @ weight if wants_x else None,
            rows.t() @ x.flatten(0, -2) if wants_weight else None,
            rows.sum(0) if wants_bias else None,
            None,
            None,
        )


class ColumnLinear(nn.Module):
    """``linear`` with this rank's share of the output features; its bias is cut with them."""

    def __init__(self, linear: nn.Linear, axis: Axis, enter: Move = as_it_is) -> None:
        super().__init__()
        _check_cut(linear, "out_features", axis)
        self.axis, self.enter = axis, enter
        self.weight = own_part(linear.weight, axis, dim=0)
        self.bias = None if linear.bias is None else own_part(linear.bias, axis, dim=0)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) to (..., F/t)."""
        return apply_weight(self.enter(x, self.axis), self.weight, self.bias)


class RowLinear(nn.Module):
    """``linear`` with this rank's share of the input features; its bias stays whole.

    The bias is added after the sum: before it, every rank would add it, t times in all.
    """

    def __init__(self, linear: nn.Linear, axis: Axis, leave: Move = comm.reduce) -> None:
        super().__init__()
        _check_cut(linear, "in_features", axis)
        self.axis, self.leave = axis, leave
        self.weight = own_part(linear.weight, axis, dim=1)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """x (..., F/t) to (..., D)."""
        y = self.leave(F.linear(x, self.weight), self.axis)
        return y if self.bias is None else y + self.bias


class KeyValueLinear(nn.Module):
    """The k or v projection of grouped-query attention, cut by its ``heads`` of keys and values.

    With fewer heads than ranks, neighbours hold the same head and use it for their own queries.
    Each then has a part of its gradient: :func:`~course_lib.tp.shards.sum_shared_gradients`.
    """

    def __init__(self, linear: nn.Linear, axis: Axis, heads: int) -> None:
        super().__init__()
        parts = min(heads, axis.size)
        if heads % parts or axis.size % parts:
            raise ValueError(
                f"kv_heads={heads} on axis {axis.name} of {axis.size} ranks: one must divide the "
                "other, so that each rank has whole heads or shares one; choose another number "
                "of ranks"
            )
        sharers = sub_axis(axis, axis.size // parts, f"{axis.name}_kv")
        self.weight = own_part(linear.weight, axis, 0, parts)
        self.bias = None if linear.bias is None else own_part(linear.bias, axis, 0, parts)
        for parameter in self.parameters():
            parameter.tp_sharers = sharers if sharers.size > 1 else None  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D), entered already, to (..., heads on this rank * K)."""
        return apply_weight(x, self.weight, self.bias)


def _check_cut(linear: nn.Linear, which: str, axis: Axis) -> None:
    features = getattr(linear, which)
    if features % axis.size:
        raise ValueError(
            f"{which}={features} cannot be cut into {axis.size} equal parts for the ranks of axis "
            f"{axis.name}: choose sizes that {axis.size} divides, or another number of ranks"
        )
