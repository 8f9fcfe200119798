"""Bytes that tensor parallelism sends and saves, from shapes alone. n is the size of the axis."""

from __future__ import annotations

from fractions import Fraction

from course_lib.formulas import recompute
from course_lib.formulas.moves import entering, leaving, loss, wire_of
from course_lib.formulas.parameters import (
    Sizes,
    accumulation_itemsize,
    padded_rows,
    parameter_sizes,
)
from course_lib.formulas.recompute import ID_BYTES, saved_by_block
from course_lib.ledger import wire


def wire_bytes(
    config: Sizes,
    sequences: int,
    seq_len: int,
    n: int,
    *,
    forwards: int = 1,
    shards: int = 1,
) -> Fraction:
    """Return the bytes that a rank sends per optimizer step: activations, loss, shared heads.

    Each layer makes two all-reduces of x_BSD per forward (``forwards=2`` with full recomputation)
    and two in backward. The embedding makes one in forward, the head one in backward. For one
    forward these are (8 layers + 4) (n-1)/n B S D b bytes. ``shards`` as in
    :func:`shared_head_bytes`. All parameters are trained; if the first layers are frozen, backward
    ends earlier and sends less.
    """
    x_bytes = sequences * seq_len * config.hidden * config.dtype.itemsize
    enter, leave = entering(x_bytes, n), leaving(x_bytes, n)
    return (
        2 * config.layers * (enter.wire(forwards) + leave.wire(forwards))
        + leave.wire()
        + enter.wire()
        + loss_bytes(config, sequences * seq_len, n)
        + shared_head_bytes(config, n, shards=shards)
    )


def loss_bytes(config: Sizes, tokens: int, n: int) -> Fraction:
    """Return the bytes of three all-reduces of one number per token, in float32 at least."""
    return wire_of(loss(tokens, accumulation_itemsize(config.dtype), n))


def shared_head_bytes(
    config: Sizes, n: int, *, shards: int = 1, itemsize: int | None = None
) -> Fraction:
    """Return the bytes of the gradient sum over the KV replication group, for all layers.

    A layer has one key head and one value head per rank. All parameters are trained. With ZeRO over
    ``shards`` ranks each rank sums its own shards only, and this is the average over these ranks.
    ``itemsize`` is that of the gradients, by default the parameters'.
    """
    if config.kv_heads >= n:
        return Fraction(0)
    payload = shared_head_parameters(config) * (itemsize or config.dtype.itemsize)
    return wire("all_reduce", payload, n // config.kv_heads) / shards


def shared_head_parameters(config: Sizes) -> int:
    """Return the parameters of one key head and one value head, of all layers."""
    return 2 * config.layers * config.head_dim * (config.hidden + (config.family == "gpt"))


def parameters_per_rank(config: Sizes, n: int) -> int:
    """Return the parameter count per rank: matrices and vocabulary are sharded, the rest is not."""
    return sum(parameter_sizes(config, n=n))


def saved_per_block(config: Sizes, sequences: int, seq_len: int, n: int) -> int:
    """Return the bytes that a rank saves for one block: a shard inside regions, all outside."""
    saved = saved_by_block(config, sequences, seq_len)
    keys_values = saved.keys_values // min(n, config.kv_heads)
    replicated = saved.outside + saved.masks + saved.entered + saved.rope_cache
    return replicated + saved.inside // n + keys_values


def saved_bytes(config: Sizes, sequences: int, seq_len: int, n: int) -> int:
    """Return the bytes that a rank saves in one forward: blocks, embedding and LM head.

    Tokens and targets are not counted. Tensors of the vocabulary are sharded:
    :func:`saved_by_vocabulary`.
    """
    saved = recompute.saved_outside_blocks(config, sequences, seq_len)
    outside = saved.positions + saved.mask + saved.norm + saved.entered
    blocks = config.layers * saved_per_block(config, sequences, seq_len, n)
    return blocks + outside + saved_by_vocabulary(config, sequences * seq_len, n)


def saved_by_vocabulary(config: Sizes, tokens: int, n: int) -> int:
    """Return the bytes that a rank saves for the embedding and loss of its vocabulary shard.

    The loss saves the softmax of the rank's columns in float32 at least, the row of each target,
    and two masks of one byte: whether this rank owns the row, and whether the target counts. On the
    last rank the head also saves a mask of its padding, if there is any.
    """
    rows = padded_rows(config.vocab, n)
    wide = accumulation_itemsize(config.dtype)
    padding = rows if config.vocab % n else 0
    return saved_by_embedding(tokens) + tokens * (rows * wide + ID_BYTES + 2) + padding


def saved_by_embedding(tokens: int) -> int:
    """Return the bytes that the embedding saves: each token's row, and a mask of one byte."""
    return tokens * (ID_BYTES + 1)
