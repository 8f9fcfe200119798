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

import torch.nn.functional as F
from torch import Tensor, nn

from course_lib import comm
from course_lib.comm.operators import Move, apply_weight
from course_lib.mesh import Axis, sub_axis
from course_lib.tp.shards import own_part


def as_it_is(x: Tensor, axis: Axis) -> Tensor:
    """The operator of an input that has entered already."""
    return x


class ColumnLinear(nn.Module):
    """``linear`` with this rank's share of the output features; its bias is cut with them.

    ``sharers``, an axis of neighbours, hold the same features: the heads of keys and values where
    they are fewer than the ranks. Each of them uses the head for its own queries and so has a part
    of its gradient: :func:`~course_lib.tp.shards.sum_shared_gradients`.
    """

    def __init__(
        self,
        linear: nn.Linear,
        axis: Axis,
        enter: Move = as_it_is,
        sharers: Axis | None = None,
    ) -> None:
        super().__init__()
        _check_cut(linear, "out_features", axis, axis.size // (sharers.size if sharers else 1))
        self.axis, self.enter = axis, enter
        self.weight = own_part(linear.weight, axis, 0, sharers)
        self.bias = None if linear.bias is None else own_part(linear.bias, axis, 0, sharers)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) to (..., F/t)."""
        return apply_weight(self.enter(x, self.axis), self.weight, self.bias)


def key_value_sharers(axis: Axis, kv_heads: int) -> Axis:
    """The ranks of ``axis`` that hold the same head of keys and values; this one alone if there
    is a head for everyone. Makes groups: call it on every rank of the world, once.
    """
    holders = min(kv_heads, axis.size)
    if kv_heads % holders or axis.size % holders:
        raise ValueError(
            f"kv_heads={kv_heads} on axis {axis.name} of {axis.size} ranks: one must divide the "
            "other, so that each rank has whole heads or shares one; choose another number of "
            "ranks"
        )
    return sub_axis(axis, axis.size // holders, f"{axis.name}_kv")


class RowLinear(nn.Module):
    """``linear`` with this rank's share of the input features; its bias stays whole.

    The bias is added after the sum: before it, every rank would add it, t times in all.
    """

    def __init__(self, linear: nn.Linear, axis: Axis, leave: Move = comm.reduce_from) -> None:
        super().__init__()
        _check_cut(linear, "in_features", axis, axis.size)
        self.axis, self.leave = axis, leave
        self.weight = own_part(linear.weight, axis, dim=1)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """x (..., F/t) to (..., D)."""
        y = self.leave(F.linear(x, self.weight), self.axis)
        return y if self.bias is None else y + self.bias


def _check_cut(linear: nn.Linear, which: str, axis: Axis, parts: int) -> None:
    features = getattr(linear, which)
    if features % parts:
        raise ValueError(
            f"{which}={features} cannot be cut into {parts} equal parts for the {axis.size} ranks "
            f"of axis {axis.name}: choose sizes that {parts} divides, or another number of ranks"
        )
