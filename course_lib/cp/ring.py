"""Ring attention: keys and values travel round a ring, one block a turn, past everyone's queries.

A rank holds three blocks of keys and values at most, its own, one in hand and one that arrives, so
that memory does not grow with the number of ranks. Forward, rank r, turn t = 0..n-1:

    merge(attention(q_r, kv_(r-t)))     while kv_(r-t) travels on to rank r+1

Backward turns the same ring once more: each turn gives a share of dq_r, which stays, and of
dkv_(r-t), which must get home to rank r-t. That gradient follows its block one turn behind,
every rank it passes adding its own share, and travels while the next block is computed.

Bytes a rank sends, in units of all ranks' K and V: (n-1)/n forward, as much again backward, and
dK, dV, whose accumulators have a bytes an element where K and V have b. That is a/b for n turns
where they start at home and go all the way round: (3n-2)/n together with a = b. But the home
rank's own share need not travel. Here it stays, dK, dV start at the next rank and take n-1 turns
to get home: 3(n-1)/n together with a = b (:func:`ring_wire_bytes`).

Source: Liu et al. 2023 (arXiv:2310.01889); Brandon et al. 2023 (arXiv:2311.09431) on balance.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from course_lib import comm
from course_lib.cp.blockwise import Kernel, accumulator, attend, attend_backward, kernel_for
from course_lib.cp.layout import ZIGZAG, SequenceLayout, view_of
from course_lib.mesh import Axis
from course_lib.model import ModelConfig


def ring_wire_bytes(
    config: ModelConfig, batch: int, seq_len: int, n: int, *, forwards: int = 1
) -> Fraction:
    """Bytes a rank sends in all layers, forward and backward, for ``batch`` whole sequences.

    ``forwards`` of the attention for each backward: 2 where it is recomputed.
    """
    kv_elements = 2 * batch * seq_len * config.kv_heads * config.head_dim
    width = (forwards + 1) * config.dtype.itemsize + accumulator(config.dtype).itemsize
    return Fraction(config.layers * (n - 1) * kv_elements * width, n)


def ring_saved_bytes(config: ModelConfig, batch: int, seq_len: int, n: int) -> int:
    """Bytes that a rank keeps from forward to backward in one layer's attention.

    q, out, K and V of its own positions, and a log-sum-exp for every row and head: 1/n of what
    one process keeps.
    """
    rows = batch * seq_len // n
    features = 2 * (config.heads + config.kv_heads) * config.head_dim
    return rows * (
        features * config.dtype.itemsize + config.heads * accumulator(config.dtype).itemsize
    )


class RingAttention(torch.autograd.Function):
    """Use :func:`ring_attention`."""

    @staticmethod
    def forward(ctx, q, k, v, axis: Axis, layout: SequenceLayout, kernel: Kernel) -> Tensor:
        kv_2BsGK = torch.stack((k, v))
        ctx.axis, ctx.kernel, ctx.visible = axis, kernel, view_of(axis, layout, q.shape[1])
        out, lse = attend(q, comm.ring(kv_2BsGK, axis), ctx.visible, kernel)
        ctx.save_for_backward(q, kv_2BsGK, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor):
        axis = ctx.axis
        q, kv, out, lse = ctx.saved_tensors
        dq = torch.zeros_like(q, dtype=accumulator(q.dtype))
        home = travelling = None
        blocks = comm.ring(kv, axis)
        for whose, dkv in attend_backward(dq, (dout, q, out, lse), blocks, ctx.visible, ctx.kernel):
            if whose == axis.rank:
                home = dkv
                continue
            if travelling is not None:  # this block's gradient, from the ranks it has passed
                dkv += travelling.wait()[0]
            travelling = comm.start_exchange(axis, [(dkv, axis.next)], [(dkv, axis.previous)])
        assert home is not None
        if travelling is not None:
            home += travelling.wait()[0]
        dk, dv = home.to(kv.dtype)
        return dq.to(q.dtype), dk, dv, None, None, None


def ring_attention(
    q_BsHK: Tensor,
    k_BsGK: Tensor,
    v_BsGK: Tensor,
    axis: Axis,
    layout: SequenceLayout = ZIGZAG,
    kernel: Kernel | None = None,
) -> Tensor:
    """Causal attention (B, s, H, K) of this rank's rows on the rows of all ranks.

    All three hold the rank's positions as ``layout`` orders them, RoPE applied. Raises ValueError
    when the rows are no equal chunks.
    """
    kernel = kernel or kernel_for(q_BsHK)
    return RingAttention.apply(q_BsHK, k_BsGK, v_BsGK, axis, layout, kernel)
