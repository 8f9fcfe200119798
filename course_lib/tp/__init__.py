"""Tensor parallelism: every rank holds a shard of every layer (Megatron-LM).

Shoeybi et al. 2019, arXiv:1909.08053. A *column* linear holds some output features, a *row* linear
some input features. A column linear followed by a row linear needs no communication in between:
each rank computes its shard of the inner features, and one all-reduce adds the partial sums. So
attention (q, k, v columns by heads, o row) and the MLP (up columns, down row) each cost one
all-reduce forward, where x leaves, and one backward, where it entered: four per layer.

=============  ===========================================================
layers         ColumnLinear, RowLinear, VocabEmbedding, VocabHead, loss_sum, RankDropout
plan           parallelize: a plan as data, applied to a single-process model
overlap        the gather and the scatter as rings between matrix products
formulas       bytes sent, parameters per rank, saved activations: course_lib.formulas.tp
=============  ===========================================================

Letters: a lower-case letter after a capital one marks a dimension divided by the axis: ``W_FtD``
holds F/t rows. B, S, D, V, H, G, K, F as in :mod:`course_lib.model`.
"""

from course_lib.formulas import tp as formulas
from course_lib.formulas.tp import parameters_per_rank, saved_bytes, saved_per_block, wire_bytes
from course_lib.tp.layers import (
    REGION,
    ColumnLinear,
    RankDropout,
    RowLinear,
    VocabEmbedding,
    VocabHead,
    loss_sum,
    sum_shared_gradients,
)
from course_lib.tp.overlap import overlapped
from course_lib.tp.plan import GPT, LLAMA, parallelize, plan_for
