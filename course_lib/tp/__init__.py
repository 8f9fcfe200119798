"""Tensor parallelism: every rank holds a share of every layer (Megatron-LM).

Shoeybi et al. 2019, arXiv:1909.08053. A *column* linear holds some output features, a *row* linear
some input features. Column then row needs no communication between them: each rank computes its
share of the inner features, and the partial sums are added once, at the end. So attention (q, k, v
columns by heads, o row) and the MLP (up columns, down row) each cost one all-reduce forward, where
they leave, and one backward, where they enter: four a layer.

=============  ===========================================================
linear         ColumnLinear, RowLinear
vocabulary     VocabEmbedding, VocabHead, loss_sum (never gathers logits)
plan           parallelize: a plan as data, applied to the serial model
dropout        RankDropout: other masks on other ranks
overlap        the gather and the scatter as rings between matrix products
formulas       bytes sent, parameters held, activations kept
=============  ===========================================================

Letters: a lower-case letter after a capital one marks a dimension divided by the axis: ``W_FtD``
holds F/t rows. B, S, D, V, H, G, K, F as in :mod:`course_lib.model`.
"""

from course_lib.tp.dropout import RankDropout
from course_lib.tp.linear import ColumnLinear, RowLinear, key_value_sharers
from course_lib.tp.overlap import overlapped
from course_lib.tp.plan import GPT, LLAMA, REGION, parallelize, plan_for
from course_lib.tp.shards import clip_gradients, squared_norm, sum_shared_gradients
from course_lib.tp.vocabulary import VocabEmbedding, VocabHead, loss_sum

__all__ = [
    "GPT",
    "LLAMA",
    "REGION",
    "ColumnLinear",
    "RankDropout",
    "RowLinear",
    "VocabEmbedding",
    "VocabHead",
    "clip_gradients",
    "key_value_sharers",
    "loss_sum",
    "overlapped",
    "parallelize",
    "plan_for",
    "squared_norm",
    "sum_shared_gradients",
]
