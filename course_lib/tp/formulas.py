"""What tensor parallelism costs, from shapes alone. n is the size of the axis, x an activation."""

from __future__ import annotations

from fractions import Fraction

import torch

from course_lib.ledger import wire
from course_lib.model import ModelConfig
from course_lib.recompute import ID_BYTES, kept_by_block
from course_lib.recompute import kept_at_ends as kept_at_serial_ends
from course_lib.tp.layers import padded_rows


def wire_bytes(
    config: ModelConfig,
    sequences: int,
    seq_len: int,
    n: int,
    *,
    forwards: int = 1,
    shards: int = 1,
) -> Fraction:
    """Bytes a rank sends per optimizer step on ``sequences``: activations, loss, shared heads.

    Two all-reduces of x_BSD a layer in every forward (``forwards=2`` with full recomputation) and
    two in backward, one where the embedding leaves, one where the head enters. With one forward
    (8 layers + 4) (n-1)/n B S D b in all. ``shards`` as in :func:`shared_head_bytes`.
    All parameters are trained: where early ones are frozen backward ends sooner and sends less.
    """
    x_bytes = sequences * seq_len * config.hidden * config.dtype.itemsize
    moves = 2 * config.layers * (forwards + 1) + 2
    return (
        moves * wire("all_reduce", x_bytes, n)
        + loss_bytes(config, sequences * seq_len, n)
        + shared_head_bytes(config, n, shards=shards)
    )


def loss_bytes(config: ModelConfig, tokens: int, n: int) -> Fraction:
    """Three all-reduces of one number a token, in float32 at least."""
    itemsize = torch.promote_types(config.dtype, torch.float32).itemsize
    return 3 * wire("all_reduce", tokens * itemsize, n)


def shared_head_bytes(config: ModelConfig, n: int, *, shards: int = 1) -> Fraction:
    """The gradients of one key and one value head a layer, over the ranks that share it.

    All of them trained. Under ZeRO over ``shards`` ranks each sums the runs that it holds: then
    it is the average over these ranks.
    """
    if config.kv_heads >= n:
        return Fraction(0)
    head = config.head_dim * (config.hidden + (config.family == "gpt"))
    payload = 2 * config.layers * head * config.dtype.itemsize
    return wire("all_reduce", payload, n // config.kv_heads) / shards


def parameters_per_rank(config: ModelConfig, n: int) -> int:
    """How many a rank holds: its share of matrices and vocabulary, and norms and ends whole."""
    hidden, gpt = config.hidden, config.family == "gpt"
    kv_features = max(config.kv_heads // n, 1) * config.head_dim
    attention = 2 * hidden * hidden // n + 2 * hidden * kv_features
    ffn = (2 if gpt else 3) * hidden * config.ffn // n
    biases = hidden // n + 2 * kv_features + config.ffn // n + 2 * hidden if gpt else 0
    norms = 2 * hidden * (2 if gpt else 1)
    vocabulary = padded_rows(config.vocab, n) * hidden * (1 if config.tied else 2)
    ends = norms // 2 + (config.max_seq_len * hidden if gpt else 0)
    return vocabulary + config.layers * (attention + ffn + biases + norms) + ends


def kept_per_block(config: ModelConfig, sequences: int, seq_len: int, n: int) -> int:
    """Bytes that a rank keeps of one block for backward: whole outside, a share inside."""
    kept = kept_by_block(config, sequences, seq_len)
    keys_values = kept.keys_values // min(n, config.kv_heads)
    whole = kept.outside + kept.masks + kept.entered + kept.tables
    return whole + kept.inside // n + keys_values


def kept_at_ends(config: ModelConfig, sequences: int, seq_len: int, n: int) -> int:
    """Bytes that a rank keeps before the first block and after the last: all but the vocabulary's
    own is whole."""
    ends = kept_at_serial_ends(config, sequences, seq_len)
    whole = ends.positions + ends.mask + ends.norm + ends.entered
    return whole + kept_by_vocabulary(config, sequences * seq_len, n)


def kept_by_vocabulary(config: ModelConfig, tokens: int, n: int) -> int:
    """Bytes that a rank keeps of embedding and loss for its part of the vocabulary.

    The loss keeps the softmax of its words in float32 at least, and of each target its row and,
    one byte each, whether it is here and whether it counts. The head keeps which of its rows are
    padding, where some are: on the last rank.
    """
    rows = padded_rows(config.vocab, n)
    wide = torch.promote_types(config.dtype, torch.float32).itemsize
    padding = rows if config.vocab % n else 0
    return kept_by_embedding(tokens) + tokens * (rows * wide + ID_BYTES + 2) + padding


def kept_by_embedding(tokens: int) -> int:
    """Bytes that a rank keeps of the tokens: which row each is, and, one byte, whether here."""
    return tokens * (ID_BYTES + 1)
