"""What inference sends, from shapes and counts alone; no matter how requests were batched.

``tokens`` went through the model and ``chosen`` came out: of a request with a prompt of S and m
new tokens, S + m - 1 and m.

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
from fractions import Fraction

from course_lib import cp, ep
from course_lib.inference.cache import cache_bytes
from course_lib.inference.context import padded
from course_lib.inference.sampling import Sampling
from course_lib.inference.scheduler import Request
from course_lib.ledger import wire
from course_lib.model import ModelConfig, accumulation_dtype
from course_lib.tp.layers import padded_rows

TOKEN_BYTES = 8


def counts(requests: Iterable[Request]) -> tuple[int, int]:
    """Return (tokens through the model, tokens chosen) when no request stops early."""
    requests = list(requests)
    return sum(r.kv_positions for r in requests), sum(r.max_new_tokens for r in requests)


def busy_share(groups: int, stages: int) -> Fraction:
    """Return the share of the ticks of a round in which a stage works."""
    return Fraction(groups, max(groups, stages))


def tp_wire_bytes(
    config: ModelConfig, tokens: int, chosen: int, n: int, sampling: Sampling | None = None
) -> Fraction:
    """Return the bytes per rank of tp: two all-reduces per layer, the embedding's, the choice."""
    row = config.hidden * config.dtype.itemsize
    layers = (2 * config.layers + 1) * wire("all_reduce", tokens * row, n)
    return layers + sampling_wire_bytes(config, chosen, n, sampling)


def sampling_wire_bytes(
    config: ModelConfig, chosen: int, n: int, sampling: Sampling | None = None
) -> Fraction:
    """Return the bytes per rank of a sharded head to choose: pairs, and candidates."""
    numbers = 2
    if sampling is not None and sampling.cuts:
        rows = padded_rows(config.vocab, n)
        numbers += min(sampling.top_k or rows, rows)
    itemsize = accumulation_dtype(config.dtype).itemsize
    return wire("all_gather", chosen * numbers * itemsize, n)


def pp_wire_bytes(config: ModelConfig, tokens: int, chosen: int, n: int) -> Fraction:
    """Return the bytes of all n ranks: ``tokens`` cross n-1 stage boundaries, and the ``chosen``
    ones are sent to n-1 ranks."""
    row = config.hidden * config.dtype.itemsize
    return Fraction((n - 1) * (tokens * row + chosen * TOKEN_BYTES))


def prefill_wire_bytes(
    config: ModelConfig, prompt: int, n: int, layout: cp.SequenceLayout = cp.ZIGZAG
) -> Fraction:
    """Return the bytes per rank of cp for one prompt: K and V to all ranks, the first token."""
    rows = padded(prompt, n, layout)
    return moved_cache_wire_bytes(config, rows, n) + wire("broadcast", TOKEN_BYTES, n)


def decode_wire_bytes(config: ModelConfig, tokens: int, n: int) -> Fraction:
    """Return the bytes per rank of cp to decode ``tokens``: parts of attention in every layer."""
    itemsize = accumulation_dtype(config.dtype).itemsize
    part = config.heads * (config.head_dim + 1) * itemsize
    return config.layers * wire("all_gather", tokens * part, n)


def moved_cache_wire_bytes(config: ModelConfig, rows: int, n: int) -> Fraction:
    """Return the bytes per rank if a cache of ``rows`` positions were gathered instead, once."""
    return wire("all_gather", cache_bytes(config, 1, rows), n) / n


def even_ep_wire_bytes(config: ModelConfig, tokens: int | Fraction, top_k: int, n: int) -> Fraction:
    """Return the bytes per rank of ep when the pairs of its ``tokens`` go to all ranks alike.

    Half of a training step's, since there is no backward.
    """
    row = config.hidden * config.dtype.itemsize
    return config.layers * ep.even_wire_bytes(tokens, top_k, row, n) / 2
