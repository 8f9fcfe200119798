"""Bytes that context parallelism sends and saves, from shapes alone. n is the size of the axis."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import lcm
from typing import TypeVar

from course_lib.formulas.moves import ring
from course_lib.formulas.parameters import Sizes, accumulation_itemsize
from course_lib.formulas.recompute import saved_by_stage

Config = TypeVar("Config", bound=Sizes)


def ring_wire_bytes(
    config: Sizes, sequences: int, seq_len: int, n: int, *, forwards: int = 1
) -> Fraction:
    """Return the bytes that a rank sends in all layers in a step.

    ``forwards`` counts the forward passes per backward: 2 where attention is recomputed.
    """
    own = Fraction(2 * sequences * seq_len * config.kv_heads * config.head_dim, n)
    wide = accumulation_itemsize(config.dtype)
    return config.layers * ring(own * config.dtype.itemsize, own * wide, n).wire(forwards)


def ring_saved_bytes(config: Sizes, sequences: int, seq_len: int, n: int) -> int:
    """Return the bytes that a rank saves for backward in one layer's attention.

    It saves q, out, K and V of its own positions, and one log-sum-exp per row and head: 1/n of
    what one process saves.
    """
    rows, wide = sequences * seq_len // n, accumulation_itemsize(config.dtype)
    features = 2 * (config.heads + config.kv_heads) * config.head_dim
    return rows * (features * config.dtype.itemsize + config.heads * wide)


def gather_wire_bytes(
    config: Sizes,
    sequences: int,
    seq_len: int,
    n: int,
    *,
    save_gathered: bool = True,
    forwards: int = 1,
) -> Fraction:
    """Return the bytes that a rank sends in all layers in a step.

    A rank sends as much as in a ring if backward gathers K and V again. With ``save_gathered`` it
    sends them only in the forward pass.
    """
    passes = forwards - 1 if save_gathered else forwards
    return ring_wire_bytes(config, sequences, seq_len, n, forwards=passes)


def gather_saved_bytes(
    config: Sizes, sequences: int, seq_len: int, n: int, *, save_gathered: bool = True
) -> int:
    """Return the bytes that a rank saves for backward in one layer's attention.

    A rank saves as much as in a ring, and with ``save_gathered`` also K and V of the other ranks.
    """
    kv_bytes = 2 * sequences * seq_len * config.kv_heads * config.head_dim * config.dtype.itemsize
    others = kv_bytes * (n - 1) // n if save_gathered else 0
    return ring_saved_bytes(config, sequences, seq_len, n) + others


def ulysses_wire_bytes(
    config: Sizes, sequences: int, seq_len: int, n: int, *, forwards: int = 1
) -> Fraction:
    """Return the bytes that a rank sends in all layers in a step."""
    heads = 2 * config.heads + 2 * lcm(config.kv_heads, n)
    shard = Fraction(sequences * seq_len * heads * config.head_dim * config.dtype.itemsize, n)
    return (forwards + 1) * config.layers * shard * Fraction(n - 1, n)


def ulysses_saved_bytes(config: Sizes, sequences: int, seq_len: int, n: int) -> int:
    """Return the bytes that a rank saves for backward in one layer's attention.

    It saves q, out, K and V of full sequences and 1/n of the heads, and one log-sum-exp per row
    and head. The next linear saves the output after its all-to-all, which is not counted here.
    """
    return ring_saved_bytes(_ulysses_shard(config, n), sequences, seq_len, 1)


def shard_of_heads(config: Config, n: int, kv_heads: int) -> Config:
    """Return ``config`` with the sizes of one of ``n`` ranks' attention: H/n query heads."""
    hidden, heads = config.hidden // n, config.heads // n
    return replace(config, hidden=hidden, heads=heads, kv_heads=kv_heads)


def _ulysses_shard(config: Config, n: int) -> Config:
    """Return the sizes of a rank's attention in Ulysses, with lcm(G, n)/n heads of K and V."""
    return shard_of_heads(config, n, lcm(config.kv_heads, n) // n)


def ulysses_ring_wire_bytes(
    config: Sizes, sequences: int, seq_len: int, heads: int, ring: int, *, forwards: int = 1
) -> tuple[Fraction, Fraction]:
    """Return the bytes that a rank sends in all layers over the heads axis, and over the ring axis.

    The first sends 1/ring of every sequence, the second K and V of 1/heads of the heads.
    """
    own = _ulysses_shard(config, heads)
    return (
        ulysses_wire_bytes(config, sequences, seq_len // ring, heads, forwards=forwards),
        ring_wire_bytes(own, sequences, seq_len, ring, forwards=forwards),
    )


def ulysses_ring_saved_bytes(
    config: Sizes, sequences: int, seq_len: int, heads: int, ring: int
) -> int:
    """Return the bytes that a rank saves in one layer: a ring's with 1/heads of the heads."""
    return ring_saved_bytes(_ulysses_shard(config, heads), sequences, seq_len, ring)


def saved_bytes(
    config: Sizes,
    sequences: int,
    seq_len: int,
    n: int,
    attention_bytes: int,
    *,
    output_copied: bool = False,
) -> int:
    """Return the bytes that a rank saves in one forward, ``attention_bytes`` of each attention.

    Tokens and targets are not counted. Outside attention a rank saves as much as one process saves
    for sequences of S/n. The next linear saves the output of attention, which ``attention_bytes``
    already counts. With ``output_copied`` it is another tensor and counts too: Ulysses sends the
    output back by all-to-all.
    """
    reference = ring_saved_bytes(config, sequences, seq_len, n)
    output = sequences * seq_len * config.heads * config.head_dim * config.dtype.itemsize // n
    more = attention_bytes - reference + (output if output_copied else 0)
    return saved_by_stage(config, sequences, seq_len // n) + config.layers * more
