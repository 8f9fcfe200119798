"""Ulysses: an all-to-all from shards of the sequence to shards of the heads, and back.

Heads are independent in attention, so a rank with full sequences of H/n heads runs the reference
attention unchanged:

    x_BsHK -> x_BShK  of q, k and v,   y_BShK = core(q, k, v),   y_BShK -> y_BsHK

Backward is the same four all-to-alls in reverse. In the contiguous layout work is equal on all
ranks, and the shards concatenate to the sequence in order: use that layout.

With grouped-query attention n may not divide the G key and value heads. Each is then sent in
copies, lcm(G, n) heads in all, so that every rank has the keys and values of its query heads.

Bytes: an all-to-all sends (n-1)/n of the rank's tensor. Forward sends two tensors of q's size and
two of K's size, and so does backward: less than a ring as n grows, but grouped-query attention
shrinks K and V only. The degree is at most the number of heads. USP (two-dimensional context
parallelism: Ulysses inside groups of ranks, a ring across them) goes beyond that
(:func:`split_axis`, :func:`ulysses_ring_attention`).

Letters: lower-case s and h are S and H divided by the axis. Sources: Jacobs et al. 2023
(arXiv:2309.14509); Fang and Zhao 2024 (USP, arXiv:2405.07719).
"""

from __future__ import annotations

from math import lcm

from torch import Tensor

from course_lib import comm
from course_lib.cp.layout import CONTIGUOUS, Nested, SequenceLayout, in_order
from course_lib.cp.ring import ring_attention
from course_lib.mesh import Axis, across_axis, sub_axis
from course_lib.model import AttentionCore, causal_attention


def ulysses_attention(
    q_BsHK: Tensor,
    k_BsGK: Tensor,
    v_BsGK: Tensor,
    axis: Axis,
    layout: SequenceLayout = CONTIGUOUS,
    core: AttentionCore = causal_attention,
) -> Tensor:
    """Return the attention (B, s, H, K); ``core`` runs on full sequences of some heads.

    Rows are the rank's contiguous positions. Raises ValueError when the axis size does not divide
    the query heads, and for a layout whose shards do not concatenate in order.
    """
    heads, kv_heads = q_BsHK.shape[2], k_BsGK.shape[2]
    if heads % axis.size:
        raise ValueError(
            f"axis {axis.name} of {axis.size} ranks does not divide {heads} query heads, and "
            "Ulysses gives each rank whole heads: choose a divisor, a ring, or both (USP)"
        )
    if not in_order(layout, axis.size):
        raise ValueError(
            f"axis {axis.name}: expected a layout whose shards concatenate to the sequence in "
            f"order, got {layout.name}, and the causal mask would be wrong: use cp.CONTIGUOUS, "
            "with which Ulysses has equal work on all ranks"
        )
    copies = lcm(kv_heads, axis.size) // kv_heads
    q_BShK = comm.all_to_all(q_BsHK, axis, split_dim=2, join_dim=1)
    k_BSgK, v_BSgK = (
        comm.all_to_all(x.repeat_interleave(copies, dim=2), axis, split_dim=2, join_dim=1)
        for x in (k_BsGK, v_BsGK)
    )
    return comm.all_to_all(core(q_BShK, k_BSgK, v_BSgK), axis, split_dim=1, join_dim=2)


# --- USP: Ulysses inside groups of ranks, a ring across them -------------------------------------


def split_axis(axis: Axis, heads: int) -> tuple[Axis, Axis]:
    """Split ``axis`` in two for USP: groups of ``heads`` neighbors, and a ring across the groups.

    Neighbors split the heads, because an all-to-all needs the fast links; the ring overlaps with
    arithmetic. It creates process groups, as ``make_mesh`` does: call it once, on every rank.
    """
    heads_axis = sub_axis(axis, heads, f"{axis.name}_heads")
    return heads_axis, across_axis(axis, heads, f"{axis.name}_ring")


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
    """Return the attention of USP: Ulysses over ``heads_axis`` around a ring over ``ring_axis``.

    :func:`split_axis` made both axes from ``axis``; ``layout`` is :func:`course_lib.cp.nested` of
    the ring's layout. Raises ValueError where they do not agree.
    """
    if not isinstance(layout, Nested) or layout.heads != heads_axis.size:
        raise ValueError(
            f"axis {axis.name}: expected the layout cp.nested(ring's layout, {heads_axis.size}) "
            f"for a ring across groups of {heads_axis.size} neighbors, got {layout.name}"
        )
    if axis.size != heads_axis.size * ring_axis.size:
        raise ValueError(
            f"expected axis {axis.name} to have {heads_axis.size} x {ring_axis.size} ranks, got "
            f"{axis.size}: take both axes from split_axis({axis.name}, ...)"
        )

    def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(q, k, v, ring_axis, layout.ring)

    return ulysses_attention(q_BsHK, k_BsGK, v_BsGK, heads_axis, core=ring)
