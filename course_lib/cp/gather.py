"""All-gather attention: every rank gets everybody's keys and values, then computes on its own.

One collective instead of n - 1 turns. With grouped-query attention K and V are small beside q and
the scores, so that Llama 3 pays for them in full: n times the K and V memory of a ring. Gradients
of K and V are partial sums on every rank, which a reduce-scatter adds up and takes home.

Bytes a rank sends, in units of all ranks' K and V: (n-1)/n forward, a/b (n-1)/n backward where
accumulators have a bytes an element and K and V have b, and (n-1)/n more when K and V are
gathered again in backward instead of kept.

Source: Llama Team 2024 (arXiv:2407.21783), section 3.3.2.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from course_lib import comm
from course_lib.cp.blockwise import Kernel, accumulator, attend, attend_backward, kernel_for
from course_lib.cp.layout import ZIGZAG, SequenceLayout, view_of
from course_lib.cp.ring import ring_saved_bytes
from course_lib.mesh import Axis
from course_lib.model import ModelConfig


def gather_wire_bytes(
    config: ModelConfig,
    batch: int,
    seq_len: int,
    n: int,
    *,
    keep: bool = True,
    forwards: int = 1,
) -> Fraction:
    """Bytes a rank sends in all layers, forward and backward, for ``batch`` whole sequences."""
    kv_elements = 2 * batch * seq_len * config.kv_heads * config.head_dim
    gathers = forwards if keep else forwards + 1
    width = gathers * config.dtype.itemsize + accumulator(config.dtype).itemsize
    return Fraction(config.layers * (n - 1) * kv_elements * width, n)


def gather_saved_bytes(
    config: ModelConfig, batch: int, seq_len: int, n: int, *, keep: bool = True
) -> int:
    """Bytes that a rank keeps from forward to backward in one layer's attention.

    As a ring, and with ``keep`` also the K and V of the n-1 other ranks.
    """
    kv_bytes = 2 * batch * seq_len * config.kv_heads * config.head_dim * config.dtype.itemsize
    others = kv_bytes * (n - 1) // n if keep else 0
    return ring_saved_bytes(config, batch, seq_len, n) + others


class GatherAttention(torch.autograd.Function):
    """Use :func:`gather_attention`."""

    @staticmethod
    def forward(
        ctx, q, k, v, axis: Axis, layout: SequenceLayout, kernel: Kernel, keep: bool
    ) -> Tensor:
        ctx.axis, ctx.kernel, ctx.visible = axis, kernel, view_of(axis, layout, q.shape[1])
        mine = torch.stack((k, v))[None]
        everyones_n2BsGK = comm.all_gather(mine, axis)
        out, lse = attend(q, _own_first(everyones_n2BsGK, axis), ctx.visible, kernel)
        ctx.keep = keep
        ctx.save_for_backward(q, everyones_n2BsGK if keep else mine, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor):
        q, kv, out, lse = ctx.saved_tensors
        everyones = kv if ctx.keep else comm.all_gather(kv, ctx.axis)
        dq = torch.zeros_like(q, dtype=accumulator(q.dtype))
        partial = torch.empty_like(everyones, dtype=dq.dtype)
        blocks = _own_first(everyones, ctx.axis)
        for whose, dkv in attend_backward(dq, (dout, q, out, lse), blocks, ctx.visible, ctx.kernel):
            partial[whose] = dkv
        dk, dv = comm.reduce_scatter(partial, ctx.axis)[0].to(kv.dtype)
        return dq.to(q.dtype), dk, dv, None, None, None, None


def _own_first(everyones: Tensor, axis: Axis) -> list[tuple[int, Tensor]]:
    order = [(axis.rank - turn) % axis.size for turn in range(axis.size)]
    return [(whose, everyones[whose]) for whose in order]


def gather_attention(
    q_BsHK: Tensor,
    k_BsGK: Tensor,
    v_BsGK: Tensor,
    axis: Axis,
    layout: SequenceLayout = ZIGZAG,
    kernel: Kernel | None = None,
    *,
    keep: bool = True,
) -> Tensor:
    """Causal attention (B, s, H, K) of this rank's rows on the rows of all ranks.

    As :func:`course_lib.cp.ring.ring_attention`. ``keep`` the gathered K and V for backward, or
    gather them again.
    """
    kernel = kernel or kernel_for(q_BsHK)
    return GatherAttention.apply(q_BsHK, k_BsGK, v_BsGK, axis, layout, kernel, keep)
