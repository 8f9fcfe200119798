"""Context parallelism: every rank has the whole model and some positions of every sequence.

All layers but attention compute each position on its own and do not change. Attention gets another
:attr:`~course_lib.model.Attention.core`, one of three that compute the same numbers:

* :func:`ring_attention`: ranks send K and V around a ring, block by block.
* :func:`gather_attention`: every rank gathers all K and V.
* :func:`ulysses_attention`: an all-to-all to full sequences of some heads, and one back.

::

    cp.parallelize(model, cp.ring_attention, mesh.cp, cp.ZIGZAG)
    tokens, targets, positions = cp.shard(tokens, targets, mesh.cp, cp.ZIGZAG)
    total, _ = model.cross_entropy(model(tokens, positions), targets)

Where there are more ranks than heads, USP (two-dimensional context parallelism) uses Ulysses in
groups of neighbors and a ring across the groups::

    heads, ring = cp.split_axis(mesh.cp, 2)
    both = partial(cp.ulysses_ring_attention, heads_axis=heads, ring_axis=ring)
    cp.parallelize(model, both, mesh.cp, cp.nested(cp.ZIGZAG, 2))

The ranks of the axis compute different tokens. So parameter gradients are summed over
``mesh.dp_cp``, of losses divided by the number of tokens of all its ranks, as in data parallelism.
"""

from course_lib.cp.gather import gather_attention
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
from course_lib.cp.model import ParallelAttention, parallelize
from course_lib.cp.ring import ring_attention
from course_lib.cp.ulysses import split_axis, ulysses_attention, ulysses_ring_attention
from course_lib.formulas.cp import (
    gather_saved_bytes,
    gather_wire_bytes,
    ring_saved_bytes,
    ring_wire_bytes,
    saved_bytes,
    ulysses_ring_saved_bytes,
    ulysses_ring_wire_bytes,
    ulysses_saved_bytes,
    ulysses_wire_bytes,
)
