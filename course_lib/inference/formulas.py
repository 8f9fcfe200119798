"""What inference sends, from shapes and counts alone; no matter how requests were batched.

``tokens`` went through the model and ``chosen`` came out: of a request with a prompt of S and m
new tokens, S + m - 1 and m.

==========  =========================================================  ==========================
axis        a decoded token sends                                      per
==========  =========================================================  ==========================
dp          0                                                          replicas share nothing
tp          2L + 1 all-reduces of D, one all-gather of a pair          rank: tensor_bytes
pp          D to each next stage, 8 bytes to each earlier one          axis: pipeline_bytes
cp          L all-gathers of H (K + 1)                                 rank: decode_bytes
ep          C D there and back in each layer, if elsewhere             rank: expert_bytes
==========  =========================================================  ==========================
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

from course_lib import ep
from course_lib.inference.sampling import Sampling, sampling_bytes
from course_lib.inference.scheduler import Request
from course_lib.ledger import wire
from course_lib.model import ModelConfig


def counts(requests: Iterable[Request]) -> tuple[int, int]:
    """(tokens that go through the model, tokens chosen) when no request stops early."""
    requests = list(requests)
    return sum(r.kv_positions for r in requests), sum(r.max_new_tokens for r in requests)


def tensor_bytes(
    config: ModelConfig, tokens: int, chosen: int, n: int, sampling: Sampling | None = None
) -> Fraction:
    """Bytes a rank of tp sends: two all-reduces a layer, the embedding's, and the choice."""
    row = config.hidden * config.dtype.itemsize
    layers = (2 * config.layers + 1) * wire("all_reduce", tokens * row, n)
    return layers + sampling_bytes(config, chosen, n, sampling)


def expert_bytes(loads: Sequence[ep.Load], rank: int, row_bytes: int) -> Fraction:
    """Bytes that ``rank`` of ep sends in forwards whose layers had these ``loads``.

    Half of a training step's: there is no backward.
    """
    return sum((ep.wire_bytes(load, rank, row_bytes) / 2 for load in loads), Fraction(0))


def even_expert_bytes(config: ModelConfig, tokens: int, choices: int, n: int) -> Fraction:
    """The same in all layers when the pairs of the rank's ``tokens`` go to all ranks alike."""
    row = config.hidden * config.dtype.itemsize
    return config.layers * ep.even_wire_bytes(tokens, choices, row, n) / 2
