"""Attention of some queries on some keys, and how to merge the results of several blocks of keys.

The softmax over several blocks of keys needs only the output and the log-sum-exp (lse) of the
scores of each block. With blocks 1 and 2,

    out = w out_1 + (1 - w) out_2,   w = exp(lse_1) / (exp(lse_1) + exp(lse_2))

(:func:`merge`; never with exponentials of scores, which overflow). Backward of one block needs out
and lse of the full row, and nothing else of the other blocks. With p = exp(q k^T - lse):

    dv = p^T dout,   ds = p * (dout v^T - sum(dout * out)),   dq = ds k,   dk = ds^T q

so the gradients of the blocks add up. Accumulators are float32 at least, or every block adds a
rounding error of bfloat16. Sources: Milakov and Gimelshein 2018 (arXiv:1805.02867), Dao et al.
2022 (arXiv:2205.14135), Liu et al. 2023 (arXiv:2310.01889).

Letters: B sequences, s queries, t keys, H query heads, G key and value heads, R = H/G query heads
per key head, K features per head; kv_2BtGK has keys and values in one tensor, sent as one message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from course_lib.cp.layout import Tile
from course_lib.model import accumulation_dtype

aten = torch.ops.aten


class Kernel(NamedTuple):
    """The functions that compute one block, forward and backward.

    ``forward(q_BsHK, k_BtGK, v_BtGK, causal)`` returns (out_BsHK, lse_BsH).
    ``backward(dout, q, k, v, out, lse, causal)`` returns (dq, dk, dv); out and lse cover the full
    rows, over all blocks. A causal block is computed ``strip`` rows at a time; None: all at once.
    """

    forward: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]
    ]
    strip: int | None = None


# --- the kernel to read: any device, any dtype, memory s * t ------------------------------------


def _scores(q_BsHK: Tensor, k_BtGK: Tensor, causal: bool) -> Tensor:
    """Return q k^T / sqrt(K) as (B, G, R, s, t), with -inf for masked keys."""
    q_BsGRK = q_BsHK.unflatten(2, (k_BtGK.shape[2], -1))
    scores = torch.einsum("bsgrk,btgk->bgrst", q_BsGRK, k_BtGK) * q_BsHK.shape[-1] ** -0.5
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores


def _plain_forward(
    q_BsHK: Tensor, k_BtGK: Tensor, v_BtGK: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    wide = accumulation_dtype(q_BsHK.dtype)
    scores = _scores(q_BsHK.to(wide), k_BtGK.to(wide), causal)
    lse_BGRs = scores.logsumexp(-1)
    p_BGRst = (scores - lse_BGRs[..., None]).exp()
    out_BsGRK = torch.einsum("bgrst,btgk->bsgrk", p_BGRst, v_BtGK.to(wide))
    return out_BsGRK.flatten(2, 3).to(q_BsHK.dtype), lse_BGRs.flatten(1, 2).transpose(1, 2)


def _plain_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_BsH: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    wide, groups = accumulation_dtype(q.dtype), (k.shape[2], -1)
    dout, q, k, v, out = (x.to(wide) for x in (dout, q, k, v, out))
    lse_BGRs = lse_BsH.transpose(1, 2).unflatten(1, groups)
    p_BGRst = (_scores(q, k, causal) - lse_BGRs[..., None]).exp()
    dout_BsGRK, q_BsGRK = dout.unflatten(2, groups), q.unflatten(2, groups)
    dv = torch.einsum("bgrst,bsgrk->btgk", p_BGRst, dout_BsGRK)
    dp_BGRst = torch.einsum("bsgrk,btgk->bgrst", dout_BsGRK, v)
    delta_BGRs = (dout * out).sum(-1).transpose(1, 2).unflatten(1, groups)
    ds_BGRst = p_BGRst * (dp_BGRst - delta_BGRs[..., None]) * q.shape[-1] ** -0.5
    dq_BsGRK = torch.einsum("bgrst,btgk->bsgrk", ds_BGRst, k)
    dk = torch.einsum("bgrst,bsgrk->btgk", ds_BGRst, q_BsGRK)
    return dq_BsGRK.flatten(2, 3), dk, dv


PLAIN = Kernel(_plain_forward, _plain_backward, strip=128)


# --- torch's own kernels: the same numbers, 2 to 4 times as fast, no memory of s * t ------------


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [tensor.transpose(1, 2) for tensor in tensors]


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*_heads_first(q, k, v), 0.0, causal)
    return out.transpose(1, 2), lse.transpose(1, 2)


def _cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *_heads_first(dout, q, k, v, out, lse), 0.0, causal
    )
    dq, dk, dv = _heads_first(*gradients)
    return dq, dk, dv


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(*_heads_first(q, k, v), 0.0, causal)
    return out.transpose(1, 2), lse.transpose(1, 2)


def _cuda_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, out, lse = _heads_first(dout, q, k, v, out, lse)
    lse = lse.contiguous()  # the kernel does not ask for its strides
    lengths = None, None, q.shape[2], k.shape[2]
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # random state: no dropout
    gradients = aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, *lengths, 0.0, causal, unused, unused
    )
    dq, dk, dv = _heads_first(*gradients)
    return dq, dk, dv


FLASH_CPU = Kernel(_cpu_forward, _cpu_backward, strip=128)
FLASH_CUDA = Kernel(_cuda_forward, _cuda_backward)


def kernel_for(q_BsHK: Tensor) -> Kernel:
    """Return the fastest kernel for this device and dtype that also returns the log-sum-exp."""
    if q_BsHK.device.type == "cpu":
        return FLASH_CPU
    half = q_BsHK.dtype in (torch.bfloat16, torch.float16)
    if q_BsHK.device.type == "cuda" and half and q_BsHK.shape[-1] in range(8, 257, 8):
        return FLASH_CUDA
    return PLAIN


# --- blocks ------------------------------------------------------------------------------------

Blocks = Iterable[tuple[int, Tensor]]  # (source rank, kv_2BtGK), as they arrive
Visible = Callable[[int], Tile | None]  # the tile of this rank's queries and a rank's keys


def _strips(tile: Tile | None, strip: int | None) -> Iterator[Tile]:
    """Split a causal tile into strips of rows: each sees its own keys and all earlier ones.

    The CPU kernel takes 512 keys at a time and computes scores that the mask then hides. Strips
    avoid most of that work, and the plain kernel's scores have strip * t elements, not s * t.
    """
    if tile is None:
        return
    if strip is None or not tile.causal:
        yield tile
        return
    for first in range(0, tile.queries.stop, strip):
        rows = slice(first, min(first + strip, tile.queries.stop))
        yield Tile(rows, rows, causal=True)
        if first:
            yield Tile(rows, slice(0, first), causal=False)


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Add a block to the running (out_BsHK, lse_BsH), in place; lse is -inf before any block."""
    weight_BsH1 = torch.sigmoid(block_lse - lse)[..., None]
    out.lerp_(block_out.to(out.dtype), weight_BsH1)
    lse.copy_(torch.logaddexp(lse, block_lse))


def attend(q: Tensor, blocks: Blocks, visible: Visible, kernel: Kernel) -> tuple[Tensor, Tensor]:
    """Return (out_BsHK, lse_BsH), the attention of ``q`` (B, s, H, K) on all ``blocks``."""
    wide = accumulation_dtype(q.dtype)
    out = torch.zeros_like(q, dtype=wide, memory_format=torch.contiguous_format)
    lse = q.new_full(q.shape[:-1], float("-inf"), dtype=wide)
    for source, (k, v) in blocks:
        for tile in _strips(visible(source), kernel.strip):
            rows, keys = (slice(None), tile.queries), (slice(None), tile.keys)
            block = kernel.forward(q[rows], k[keys], v[keys], tile.causal)
            merge(out[rows], lse[rows], *block)
        del k, v  # before the ring allocates the next block
    return out.to(q.dtype), lse


def attend_backward(
    dq: Tensor,
    row_state: tuple[Tensor, Tensor, Tensor, Tensor],
    blocks: Blocks,
    visible: Visible,
    kernel: Kernel,
) -> Iterator[tuple[int, Tensor]]:
    """Yield (source rank, dkv_2BtGK), the gradient of each block; add to ``dq`` in place.

    ``row_state`` is (dout, q, out, lse) of this rank's rows. Gradients are in ``dq``'s dtype.
    """
    for source, kv in blocks:
        dkv = torch.zeros_like(kv, dtype=dq.dtype)
        for tile in _strips(visible(source), kernel.strip):
            rows, keys = (slice(None), tile.queries), (slice(None), tile.keys)
            dout, q, out, lse = (x[rows] for x in row_state)
            dq_rows, dk, dv = kernel.backward(
                dout, q, kv[0][keys], kv[1][keys], out, lse, tile.causal
            )
            dq[rows] += dq_rows
            dkv[0][keys] += dk
            dkv[1][keys] += dv
        yield source, dkv
        del kv, dkv  # before the ring allocates the next block
