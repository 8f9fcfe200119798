"""Bytes that inference sends and stores, from shapes and counts alone, for any batching.

``tokens`` counts the tokens that pass through the model, and ``chosen`` those that it generates: a
request with a prompt of S and m new tokens has S + m - 1 and m.

====  =====================================================  ===========================
axis  a decoded token sends                                  bytes per
====  =====================================================  ===========================
dp    0                                                      replicas share nothing
tp    2L + 1 all-reduces of D, one all-gather of a pair      rank: tp_wire_bytes
pp    D to each next stage, 8 bytes to each earlier one      axis: pp_wire_bytes
cp    L all-gathers of H (K + 1)                             rank: decode_wire_bytes
ep    K D there and back in each layer, if elsewhere         rank: even_ep_wire_bytes
====  =====================================================  ===========================
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from course_lib.formulas import ep
from course_lib.formulas.parameters import Sizes, accumulation_itemsize, padded_rows
from course_lib.ledger import wire

TOKEN_BYTES = 8


class Request(Protocol):
    """The counts of a :class:`course_lib.inference.Request`."""

    @property
    def kv_positions(self) -> int:
        """Positions in the cache."""

    @property
    def max_new_tokens(self) -> int:
        """Tokens to generate."""


class Sampling(Protocol):
    """The settings of :class:`course_lib.inference.Sampling` that decide what the ranks send."""

    @property
    def cuts(self) -> bool:
        """Whether top-k or top-p excludes tokens."""

    @property
    def top_k(self) -> int | None:
        """Number of candidates; None for all."""


class Chunked(Protocol):
    """The count in a :class:`course_lib.cp.SequenceLayout`."""

    @property
    def per_rank(self) -> int:
        """Chunks of the sequence per rank."""


@dataclass(frozen=True)
class Chunks:
    """The lengths of a layout."""

    per_rank: int


ZIGZAG = Chunks(2)


def padded(length: int, n: int, layout: Chunked) -> int:
    """Return the prompt's length with the padding that makes its chunks equal."""
    pieces = layout.per_rank * n
    return -(-length // pieces) * pieces


def cache_bytes(
    config: Sizes,
    slots: int,
    capacity: int,
    *,
    layers: int | None = None,
    tp: int = 1,
    cp: int = 1,
) -> int:
    """Return the bytes of K and V on one rank: 2 L N T/cp G/tp K b.

    Tensor parallelism divides the heads, and each rank holds at least one: fewer heads than ranks
    are stored in copies. Context parallelism divides the rows. ``layers`` counts the layers of the
    rank's stage. A replica of data parallelism has slots for its own requests only.
    """
    layers = config.layers if layers is None else layers
    row_bytes = max(config.kv_heads // tp, 1) * config.head_dim * config.dtype.itemsize
    return 2 * layers * slots * (capacity // cp) * row_bytes


def counts(requests: Iterable[Request]) -> tuple[int, int]:
    """Return (tokens through the model, tokens chosen) when no request stops early."""
    requests = list(requests)
    return sum(r.kv_positions for r in requests), sum(r.max_new_tokens for r in requests)


def busy_share(groups: int, stages: int) -> Fraction:
    """Return the share of the ticks of a round in which a stage works."""
    return Fraction(groups, max(groups, stages))


def tp_wire_bytes(
    config: Sizes, tokens: int, chosen: int, n: int, sampling: Sampling | None = None
) -> Fraction:
    """Return the bytes per rank of tp: two all-reduces per layer, the embedding's, the choice."""
    row = config.hidden * config.dtype.itemsize
    layers = (2 * config.layers + 1) * wire("all_reduce", tokens * row, n)
    return layers + sampling_wire_bytes(config, chosen, n, sampling)


def sampling_wire_bytes(
    config: Sizes, chosen: int, n: int, sampling: Sampling | None = None
) -> Fraction:
    """Return the bytes per rank of a sharded head to choose: pairs, and candidates."""
    numbers = 2
    if sampling is not None and sampling.cuts:
        rows = padded_rows(config.vocab, n)
        numbers += min(sampling.top_k or rows, rows)
    itemsize = accumulation_itemsize(config.dtype)
    return wire("all_gather", chosen * numbers * itemsize, n)


def pp_wire_bytes(config: Sizes, tokens: int, chosen: int, n: int) -> Fraction:
    """Return the bytes that all n ranks together send.

    ``tokens`` cross n-1 stage boundaries, and the ``chosen`` ones are sent to n-1 ranks.
    """
    row = config.hidden * config.dtype.itemsize
    return Fraction((n - 1) * (tokens * row + chosen * TOKEN_BYTES))


def prefill_wire_bytes(config: Sizes, prompt: int, n: int, layout: Chunked = ZIGZAG) -> Fraction:
    """Return the bytes per rank of cp for one prompt: K and V to all ranks, the first token."""
    rows = padded(prompt, n, layout)
    return moved_cache_wire_bytes(config, rows, n) + wire("broadcast", TOKEN_BYTES, n)


def decode_wire_bytes(config: Sizes, tokens: int, n: int) -> Fraction:
    """Return the bytes per rank of cp to decode ``tokens``: parts of attention in every layer."""
    itemsize = accumulation_itemsize(config.dtype)
    part = config.heads * (config.head_dim + 1) * itemsize
    return config.layers * wire("all_gather", tokens * part, n)


def moved_cache_wire_bytes(config: Sizes, rows: int, n: int) -> Fraction:
    """Return the bytes per rank to gather a cache of ``rows`` positions once instead."""
    return wire("all_gather", cache_bytes(config, 1, rows), n) / n


def even_ep_wire_bytes(config: Sizes, tokens: int | Fraction, top_k: int, n: int) -> Fraction:
    """Return the bytes per rank of ep when the pairs of its ``tokens`` are spread evenly.

    Half of a training step's, since there is no backward.
    """
    row = config.hidden * config.dtype.itemsize
    return config.layers * ep.even_wire_bytes(tokens, top_k, row, n) / 2
