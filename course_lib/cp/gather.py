"""All-gather attention: every rank gathers the keys and values of all ranks, then computes.

One collective replaces n - 1 turns of a ring. With grouped-query attention K and V are smaller
than q and much smaller than the scores, so Llama 3 accepts n times the K and V memory of a ring.
Each rank computes partial sums of the gradients of K and V. A reduce-scatter adds them up and sends
each rank its own.

Bytes that a rank sends, in units of all ranks' K and V: (n-1)/n in forward; a/b (n-1)/n in
backward, where accumulators have a bytes per element and K and V have b; and (n-1)/n more when K
and V are gathered again in backward instead of saved.

Source: Llama Team 2024 (arXiv:2407.21783), section 3.3.2.
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


class GatherAttention(torch.autograd.Function):
    """The autograd function of :func:`gather_attention`, which chooses the kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        axis: Axis,
        layout: SequenceLayout,
        kernel: Kernel,
        save_gathered: bool,
    ) -> Tensor:
        ctx.axis, ctx.kernel, ctx.visible = axis, kernel, visible_here(axis, layout, q.shape[1])
        own_12BsGK = torch.stack((k, v))[None]
        all_n2BsGK = comm.all_gather(own_12BsGK, axis)
        out, lse = attend(q, enumerate(all_n2BsGK), ctx.visible, kernel)
        ctx.save_gathered = save_gathered
        ctx.save_for_backward(q, all_n2BsGK if save_gathered else own_12BsGK, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        q, kv, out, lse = ctx.saved_tensors
        gathered = kv if ctx.save_gathered else comm.all_gather(kv, ctx.axis)
        dq = torch.zeros_like(q, dtype=accumulation_dtype(q.dtype))
        partial_sums = torch.empty_like(gathered, dtype=dq.dtype)
        rows, blocks = (dout, q, out, lse), enumerate(gathered)
        for source, dkv in attend_backward(dq, rows, blocks, ctx.visible, ctx.kernel):
            partial_sums[source] = dkv
        dk, dv = comm.reduce_scatter(partial_sums, ctx.axis)[0].to(kv.dtype)
        return dq.to(q.dtype), dk, dv, None, None, None, None


def gather_attention(
    q_BsHK: Tensor,
    k_BsGK: Tensor,
    v_BsGK: Tensor,
    axis: Axis,
    layout: SequenceLayout = ZIGZAG,
    kernel: Kernel | None = None,
    *,
    save_gathered: bool = True,
) -> Tensor:
    """Return the causal attention (B, s, H, K) of this rank's rows on the rows of all ranks.

    Arguments as for :func:`course_lib.cp.ring.ring_attention`. With ``save_gathered`` the gathered
    K and V are saved for backward; otherwise backward gathers them again.
    """
    kernel = kernel or kernel_for(q_BsHK)
    return GatherAttention.apply(q_BsHK, k_BsGK, v_BsGK, axis, layout, kernel, save_gathered)
