"""Ulysses: by all-to-all from a part of the sequence to a part of the heads, and back.

Heads do not know of one another, so that a rank that holds whole sequences for H/n of the heads
runs the serial attention unchanged:

    x_BsHK -> x_BShK  of q, k and v,   y_BShK = core(q, k, v),   y_BShK -> y_BsHK

and backward is the same four exchanges in reverse. Work is equal on all ranks in the contiguous
layout: use that one, whose shards join to the sequence in order.

Grouped query: where n does not divide the G key and value heads, each is sent in copies, lcm(G, n)
heads in all, so that every rank has the ones that its query heads look at.

Bytes: an all-to-all sends (n-1)/n of the rank's tensor. Two of q's size and two of K's size in
forward, the same in backward: less than a ring as n grows, but grouped query shrinks K and V only.
The degree is bounded by the number of heads; a ring inside (:func:`ulysses_ring_attention`) goes
beyond.

Letters: lower-case s and h are S and H divided by the axis. Sources: Jacobs et al. 2023
(arXiv:2309.14509); Fang and Zhao 2024 (arXiv:2405.07719) on both together.
"""

from __future__ import annotations

from fractions import Fraction
from math import lcm

from torch import Tensor

from course_lib import comm
from course_lib.cp.blockwise import accumulator
from course_lib.cp.layout import ZIGZAG, SequenceLayout
from course_lib.cp.ring import ring_attention
from course_lib.mesh import Axis
from course_lib.model import AttentionCore, ModelConfig, causal_attention


def ulysses_wire_bytes(config: ModelConfig, batch: int, seq_len: int, n: int) -> Fraction:
    """Bytes a rank sends in all layers, forward and backward, for ``batch`` whole sequences."""
    heads = 2 * config.heads + 2 * lcm(config.kv_heads, n)
    shard = Fraction(batch * seq_len * heads * config.head_dim * config.dtype.itemsize, n)
    return 2 * config.layers * shard * Fraction(n - 1, n)


def ulysses_saved_bytes(config: ModelConfig, batch: int, seq_len: int, n: int) -> int:
    """Bytes that a rank keeps from forward to backward in one layer's attention.

    q, out, K and V of whole sequences and 1/n of the heads, and a log-sum-exp for each row and
    head. The output, swapped back, is one more copy of out: what the next layer keeps of it.
    """
    heads = 2 * config.heads + 2 * lcm(config.kv_heads, n)
    features = heads * config.head_dim * config.dtype.itemsize
    lse = config.heads * accumulator(config.dtype).itemsize
    return batch * seq_len * (features + lse) // n


def ulysses_attention(
    q_BsHK: Tensor,
    k_BsGK: Tensor,
    v_BsGK: Tensor,
    axis: Axis,
    core: AttentionCore = causal_attention,
) -> Tensor:
    """Attention (B, s, H, K); ``core`` is what runs on whole sequences of some heads.

    Rows are the rank's contiguous positions. Raises ValueError when the axis does not divide the
    query heads.
    """
    heads, kv_heads = q_BsHK.shape[2], k_BsGK.shape[2]
    if heads % axis.size:
        raise ValueError(
            f"axis {axis.name} of {axis.size} ranks does not divide {heads} query heads: Ulysses "
            "gives each rank whole heads; take a divisor, or a ring, or both together"
        )
    copies = lcm(kv_heads, axis.size) // kv_heads
    q_BShK = comm.swap(q_BsHK, axis, split_dim=2, join_dim=1)
    k_BSgK, v_BSgK = (
        comm.swap(x.repeat_interleave(copies, dim=2), axis, split_dim=2, join_dim=1)
        for x in (k_BsGK, v_BsGK)
    )
    return comm.swap(core(q_BShK, k_BSgK, v_BSgK), axis, split_dim=1, join_dim=2)


def ulysses_ring_attention(
    q_BsHK: Tensor,
    k_BsGK: Tensor,
    v_BsGK: Tensor,
    heads_axis: Axis,
    ring_axis: Axis,
    layout: SequenceLayout = ZIGZAG,
) -> Tensor:
    """Both: Ulysses over ``heads_axis`` makes of its ranks' rows one shard of a ring.

    Positions are cut over ``ring_axis`` by ``layout``, then over ``heads_axis`` contiguously.
    """

    def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(q, k, v, ring_axis, layout)

    return ulysses_attention(q_BsHK, k_BsGK, v_BsGK, heads_axis, ring)
