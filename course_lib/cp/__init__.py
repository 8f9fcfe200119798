"""Context parallelism: every rank holds the whole model and some positions of every sequence.

All layers but attention treat positions one by one and stay as they are. Attention gets another
:attr:`~course_lib.model.Attention.core`, by one of three ways to the same numbers:

* :func:`ring_attention`: K and V travel past the queries, block by block.
* :func:`gather_attention`: every rank gathers all K and V.
* :func:`ulysses_attention`: all-to-all to whole sequences of some heads, and back.

::

    cp.parallelize(model, cp.ring_attention, mesh.cp, cp.ZIGZAG)
    tokens, targets, positions = cp.shard(tokens, targets, mesh.cp, cp.ZIGZAG)
    total, _ = model.cross_entropy(model(tokens, positions), targets)

Where there are more ranks than heads, a grid of ranks does both, Ulysses in its runs of
neighbours and a ring through them::

    heads, ring = cp.split_axis(mesh.cp, 2)
    both = partial(cp.ulysses_ring_attention, heads_axis=heads, ring_axis=ring)
    cp.parallelize(model, both, mesh.cp, cp.nested(cp.ZIGZAG, 2))

Ranks of the axis have seen different tokens: parameter gradients are sums over ``mesh.dp_cp``, of
losses divided by the number of tokens of all its ranks, as in data parallelism.
"""

from course_lib.cp.gather import gather_attention, gather_saved_bytes, gather_wire_bytes
from course_lib.cp.layout import (
    CONTIGUOUS,
    ZIGZAG,
    Nested,
    SequenceLayout,
    imbalance,
    nested,
    pairs,
    positions,
    shard,
)
from course_lib.cp.model import ParallelAttention, kept_per_block, parallelize
from course_lib.cp.ring import ring_attention, ring_saved_bytes, ring_wire_bytes
from course_lib.cp.ulysses import (
    split_axis,
    ulysses_attention,
    ulysses_ring_attention,
    ulysses_ring_saved_bytes,
    ulysses_ring_wire_bytes,
    ulysses_saved_bytes,
    ulysses_wire_bytes,
)

__all__ = [
    "CONTIGUOUS",
    "ZIGZAG",
    "Nested",
    "ParallelAttention",
    "SequenceLayout",
    "gather_attention",
    "gather_saved_bytes",
    "gather_wire_bytes",
    "imbalance",
    "kept_per_block",
    "nested",
    "pairs",
    "parallelize",
    "positions",
    "ring_attention",
    "ring_saved_bytes",
    "ring_wire_bytes",
    "shard",
    "split_axis",
    "ulysses_attention",
    "ulysses_ring_attention",
    "ulysses_ring_saved_bytes",
    "ulysses_ring_wire_bytes",
    "ulysses_saved_bytes",
    "ulysses_wire_bytes",
]
