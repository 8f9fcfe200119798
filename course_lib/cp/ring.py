"""Ring attention: ranks send keys and values around a ring, one block per turn.

In forward a rank stores at most three blocks of K and V: its own, the one that it computes with
and the one that it receives. Backward also stores up to four blocks of dK and dV, in float32 at
least. Neither number depends on the number of ranks. Forward on rank r, turn
t = 0..n-1:

    merge(attention(q_r, kv_(r-t)))     while rank r sends kv_(r-t) to rank r+1

Backward sends K and V around the same ring once more. Each turn computes a term of dq_r, which
stays on rank r, and a term of dkv_(r-t), which must get back to rank r-t. That gradient follows
its block one turn later. Every rank on the way adds its own term, and sends the sum while it
computes the next block.

Bytes that a rank sends, in units of all ranks' K and V: (n-1)/n in forward, as much in backward,
and dK, dV, whose accumulators have a bytes per element where K and V have b. If dK, dV started on
their own rank and took n turns, they would cost a/b: (3n-2)/n in all with a = b. But the rank's
own term need not be sent. Here dK, dV start at the next rank and take n-1 turns: 3(n-1)/n in all
with a = b (:func:`course_lib.cp.ring_wire_bytes`).

Source: Liu et al. 2023 (arXiv:2310.01889); Brandon et al. 2023 (arXiv:2311.09431) on balance.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from course_lib import comm
from course_lib.cp.blockwise import Kernel, attend, attend_backward, kernel_for
from course_lib.cp.layout import ZIGZAG, SequenceLayout, visible_here
from course_lib.mesh import Axis
from course_lib.model import accumulation_dtype


class RingAttention(torch.autograd.Function):
    """The autograd function of :func:`ring_attention`, which chooses the kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        axis: Axis,
        layout: SequenceLayout,
        kernel: Kernel,
    ) -> Tensor:
        kv_2BsGK = torch.stack((k, v))
        ctx.axis, ctx.kernel, ctx.visible = axis, kernel, visible_here(axis, layout, q.shape[1])
        out, lse = attend(q, comm.ring(kv_2BsGK, axis), ctx.visible, kernel)
        ctx.save_for_backward(q, kv_2BsGK, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        axis = ctx.axis
        q, kv, out, lse = ctx.saved_tensors
        dq = torch.zeros_like(q, dtype=accumulation_dtype(q.dtype))
        own = in_flight = None
        blocks = comm.ring(kv, axis)
        rows = (dout, q, out, lse)
        for source, dkv in attend_backward(dq, rows, blocks, ctx.visible, ctx.kernel):
            if source == axis.rank:
                own = dkv
                continue
            if in_flight is not None:  # the terms of this gradient from the ranks before
                dkv += in_flight.wait()[0]
            in_flight = comm.start_exchange(axis, [(dkv, axis.next)], [(dkv, axis.previous)])
        assert own is not None
        if in_flight is not None:
            own += in_flight.wait()[0]
        dk, dv = own.to(kv.dtype)
        return dq.to(q.dtype), dk, dv, None, None, None


def ring_attention(
    q_BsHK: Tensor,
    k_BsGK: Tensor,
    v_BsGK: Tensor,
    axis: Axis,
    layout: SequenceLayout = ZIGZAG,
    kernel: Kernel | None = None,
) -> Tensor:
    """Return the causal attention (B, s, H, K) of this rank's rows on the rows of all ranks.

    All three tensors have the rank's positions in the order of ``layout``, with RoPE applied.
    Raises ValueError when the rows cannot be split into equal chunks.
    """
    kernel = kernel or kernel_for(q_BsHK)
    return RingAttention.apply(q_BsHK, k_BsGK, v_BsGK, axis, layout, kernel)
