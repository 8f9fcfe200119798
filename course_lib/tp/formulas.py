"""What tensor parallelism costs, from shapes alone. n is the size of the axis, x an activation."""

from __future__ import annotations

from fractions import Fraction

from course_lib import recompute
from course_lib.ledger import wire
from course_lib.model import ModelConfig, accumulation_dtype
from course_lib.recompute import ID_BYTES, saved_by_block
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
    """Return the bytes per rank and optimizer step: activations, loss, shared heads.

    Two all-reduces of x_BSD per layer in every forward (``forwards=2`` with full recomputation) and
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
    """Return the bytes of three all-reduces of one number per token, in float32 at least."""
    itemsize = accumulation_dtype(config.dtype).itemsize
    return 3 * wire("all_reduce", tokens * itemsize, n)


def shared_head_bytes(config: ModelConfig, n: int, *, shards: int = 1) -> Fraction:
    """Return the bytes of the sum over the KV replication group: a key and a value head per layer.

    All parameters are trained. Under ZeRO over ``shards`` ranks each sums its shards: then it is
    the average over these ranks.
    """
    if config.kv_heads >= n:
        return Fraction(0)
    head = config.head_dim * (config.hidden + (config.family == "gpt"))
    payload = 2 * config.layers * head * config.dtype.itemsize
    return wire("all_reduce", payload, n // config.kv_heads) / shards


def parameters_per_rank(config: ModelConfig, n: int) -> int:
    """Return how many a rank holds: shards of matrices and vocabulary, all of the rest."""
    hidden, gpt = config.hidden, config.family == "gpt"
    kv_features = max(config.kv_heads // n, 1) * config.head_dim
    attention = 2 * hidden * hidden // n + 2 * hidden * kv_features
    ffn = (2 if gpt else 3) * hidden * config.ffn // n
    biases = hidden // n + 2 * kv_features + config.ffn // n + 2 * hidden if gpt else 0
    norms = 2 * hidden * (2 if gpt else 1)
    vocabulary = padded_rows(config.vocab, n) * hidden * (1 if config.tied else 2)
    rest = norms // 2 + (config.max_seq_len * hidden if gpt else 0)  # final norm, positions
    return vocabulary + config.layers * (attention + ffn + biases + norms) + rest


def saved_per_block(config: ModelConfig, sequences: int, seq_len: int, n: int) -> int:
    """Return the bytes that a rank saves for one block: all of it outside, a shard inside."""
    saved = saved_by_block(config, sequences, seq_len)
    keys_values = saved.keys_values // min(n, config.kv_heads)
    replicated = saved.outside + saved.masks + saved.entered + saved.rope_cache
    return replicated + saved.inside // n + keys_values


def saved_bytes(config: ModelConfig, sequences: int, seq_len: int, n: int) -> int:
    """Return the bytes that a rank saves in one forward: blocks, embedding and LM head.

    Tokens and targets are not counted. Of embedding and LM head the vocabulary's are sharded.
    """
    saved = recompute.saved_outside_blocks(config, sequences, seq_len)
    outside = saved.positions + saved.mask + saved.norm + saved.entered
    blocks = config.layers * saved_per_block(config, sequences, seq_len, n)
    return blocks + outside + saved_by_vocabulary(config, sequences * seq_len, n)


def saved_by_vocabulary(config: ModelConfig, tokens: int, n: int) -> int:
    """Return the bytes that a rank saves for embedding and loss of its shard of the vocabulary.

    The loss saves the softmax of the rank's words in float32 at least, the row of each target, and
    two masks of one byte: whether this rank has the row, and whether the target counts. The head
    saves a mask of its padding, where there is some: on the last rank.
    """
    rows = padded_rows(config.vocab, n)
    wide = accumulation_dtype(config.dtype).itemsize
    padding = rows if config.vocab % n else 0
    return saved_by_embedding(tokens) + tokens * (rows * wide + ID_BYTES + 2) + padding


def saved_by_embedding(tokens: int) -> int:
    """Return the bytes saved of the tokens: the row of each, and a mask of one byte."""
    return tokens * (ID_BYTES + 1)
