"""Context parallelism: every rank holds the whole model and some positions of every sequence.

All layers but attention treat positions one by one and stay as they are. Attention gets another
:attr:`~course_lib.model.Attention.core`, by one of three ways to the same numbers:

* :func:`ring_attention`: K and V travel past the queries, block by block.
* :func:`gather_attention`: every rank gathers all K and V.
* :func:`ulysses_attention`: all-to-all to whole sequences of some heads, and back.

::

    tokens, targets, positions = cp.shard(tokens, targets, mesh.cp, cp.ZIGZAG)
    cp.parallelize(model, partial(cp.ring_attention, axis=mesh.cp, layout=cp.ZIGZAG))
    total, _ = model.cross_entropy(model(tokens, positions), targets)

Ranks of the axis have seen different tokens: parameter gradients are sums over ``mesh.dp_cp``, of
losses divided by the number of tokens of all its ranks, as in data parallelism.
"""

from course_lib.cp.gather import gather_attention, gather_saved_bytes, gather_wire_bytes
from course_lib.cp.layout import (
    CONTIGUOUS,
    ZIGZAG,
    SequenceLayout,
    imbalance,
    pairs,
    positions,
    shard,
)
from course_lib.cp.model import parallelize
from course_lib.cp.ring import ring_attention, ring_saved_bytes, ring_wire_bytes
from course_lib.cp.ulysses import (
    ulysses_attention,
    ulysses_ring_attention,
    ulysses_saved_bytes,
    ulysses_wire_bytes,
)

__all__ = [
    "CONTIGUOUS",
    "ZIGZAG",
    "SequenceLayout",
    "gather_attention",
    "gather_saved_bytes",
    "gather_wire_bytes",
    "imbalance",
    "pairs",
    "parallelize",
    "positions",
    "ring_attention",
    "ring_saved_bytes",
    "ring_wire_bytes",
    "shard",
    "ulysses_attention",
    "ulysses_ring_attention",
    "ulysses_saved_bytes",
    "ulysses_wire_bytes",
]
