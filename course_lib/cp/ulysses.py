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
The degree is bounded by the number of heads; a ring inside goes beyond (:func:`split_axis`,
:func:`ulysses_ring_attention`).

Letters: lower-case s and h are S and H divided by the axis. Sources: Jacobs et al. 2023
(arXiv:2309.14509); Fang and Zhao 2024 (arXiv:2405.07719) on both together.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import lcm

from torch import Tensor

from course_lib import comm
from course_lib.cp.layout import CONTIGUOUS, Nested, SequenceLayout, in_order
from course_lib.cp.ring import ring_attention, ring_saved_bytes, ring_wire_bytes
from course_lib.mesh import Axis, across_axis, sub_axis
from course_lib.model import AttentionCore, ModelConfig, causal_attention


def ulysses_wire_bytes(
    config: ModelConfig, batch: int, seq_len: int, n: int, *, forwards: int = 1
) -> Fraction:
    """Bytes a rank sends in all layers, forward and backward, for ``batch`` whole sequences."""
    heads = 2 * config.heads + 2 * lcm(config.kv_heads, n)
    shard = Fraction(batch * seq_len * heads * config.head_dim * config.dtype.itemsize, n)
    return (forwards + 1) * config.layers * shard * Fraction(n - 1, n)


def ulysses_saved_bytes(config: ModelConfig, batch: int, seq_len: int, n: int) -> int:
    """Bytes that a rank keeps from forward to backward in one layer's attention.

    q, out, K and V of whole sequences and 1/n of the heads, and a log-sum-exp for each row and
    head. The output, swapped back, is one more copy of out: what the next layer keeps of it.
    """
    return ring_saved_bytes(share_of_heads(config, n), batch, seq_len, 1)


def share_of_heads(config: ModelConfig, n: int) -> ModelConfig:
    """The sizes of the attention that each of ``n`` ranks computes: H/n heads, lcm(G, n)/n of K
    and V, copies included."""
    return replace(
        config,
        hidden=config.hidden // n,
        heads=config.heads // n,
        kv_heads=lcm(config.kv_heads, n) // n,
    )


def ulysses_attention(
    q_BsHK: Tensor,
    k_BsGK: Tensor,
    v_BsGK: Tensor,
    axis: Axis,
    layout: SequenceLayout = CONTIGUOUS,
    core: AttentionCore = causal_attention,
) -> Tensor:
    """Attention (B, s, H, K); ``core`` is what runs on whole sequences of some heads.

    Rows are the rank's contiguous positions. Raises ValueError when the axis does not divide the
    query heads, and for a layout whose shards do not join to the sequence in order.
    """
    heads, kv_heads = q_BsHK.shape[2], k_BsGK.shape[2]
    if heads % axis.size:
        raise ValueError(
            f"axis {axis.name} of {axis.size} ranks does not divide {heads} query heads: Ulysses "
            "gives each rank whole heads; take a divisor, or a ring, or both together"
        )
    if not in_order(layout, axis.size):
        raise ValueError(
            f"axis {axis.name}: the {layout.name} layout's shards do not join to the sequence in "
            "order, and the causal mask would be of other positions: Ulysses wants "
            "cp.CONTIGUOUS, which divides its work evenly"
        )
    copies = lcm(kv_heads, axis.size) // kv_heads
    q_BShK = comm.all_to_all(q_BsHK, axis, split_dim=2, join_dim=1)
    k_BSgK, v_BSgK = (
        comm.all_to_all(x.repeat_interleave(copies, dim=2), axis, split_dim=2, join_dim=1)
        for x in (k_BsGK, v_BsGK)
    )
    return comm.all_to_all(core(q_BShK, k_BSgK, v_BSgK), axis, split_dim=1, join_dim=2)


# --- Ulysses and ring: a grid of ranks -----------------------------------------------------------


def split_axis(axis: Axis, heads: int) -> tuple[Axis, Axis]:
    """``axis`` as a grid: its runs of ``heads`` neighbours, and a ring through all runs.

    Neighbours share out heads, for all-to-all wants the fast links; the ring hides behind
    arithmetic. It makes groups, as ``make_mesh`` does: call it on every rank of the world, once.
    """
    return sub_axis(axis, heads, f"{axis.name}_heads"), across_axis(
        axis, heads, f"{axis.name}_ring"
    )


def ulysses_ring_attention(
    q_BsHK: Tensor,
    k_BsGK: Tensor,
    v_BsGK: Tensor,
    axis: Axis,
    layout: Nested,
    *,
    heads_axis: Axis,
    ring_axis: Axis,
) -> Tensor:
    """Both: Ulysses over ``heads_axis`` makes of its ranks' rows one shard of a ring.

    ``axis`` is what :func:`split_axis` made the other two of, ``layout`` is
    :func:`course_lib.cp.nested` of the ring's layout. Raises ValueError where they do not agree.
    """
    if not isinstance(layout, Nested) or layout.heads != heads_axis.size:
        raise ValueError(
            f"axis {axis.name}: rows lie in the {layout.name} layout, and a ring through runs of "
            f"{heads_axis.size} neighbours wants cp.nested(ring's layout, {heads_axis.size})"
        )
    if axis.size != heads_axis.size * ring_axis.size:
        raise ValueError(
            f"axis {axis.name} of {axis.size} ranks is no grid of {heads_axis.size} x "
            f"{ring_axis.size}: take both axes from split_axis({axis.name}, ...)"
        )

    def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(q, k, v, ring_axis, layout.ring)

    return ulysses_attention(q_BsHK, k_BsGK, v_BsGK, heads_axis, core=ring)


def ulysses_ring_wire_bytes(
    config: ModelConfig, batch: int, seq_len: int, heads: int, ring: int, *, forwards: int = 1
) -> tuple[Fraction, Fraction]:
    """Bytes a rank sends in all layers over the axis of heads, and over that of the ring.

    The first swaps 1/ring of every sequence, the second turns K and V of 1/heads of the heads.
    """
    share = share_of_heads(config, heads)
    return (
        ulysses_wire_bytes(config, batch, seq_len // ring, heads, forwards=forwards),
        ring_wire_bytes(share, batch, seq_len, ring, forwards=forwards),
    )


def ulysses_ring_saved_bytes(
    config: ModelConfig, batch: int, seq_len: int, heads: int, ring: int
) -> int:
    """Bytes that a rank keeps in one layer's attention: a ring's of 1/heads of the heads."""
    return ring_saved_bytes(share_of_heads(config, heads), batch, seq_len, ring)
