"""Bytes that expert parallelism sends and saves, from counts and shapes. n is the size of ep."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

from course_lib.formulas.moves import dispatch
from course_lib.formulas.parameters import (
    Sizes,
    accumulation_itemsize,
    mlp_parameters,
    parameter_count,
)
from course_lib.formulas.recompute import ID_BYTES, saved_by_stage


class Load(Protocol):
    """Pairs of a token and an expert in one layer; :class:`course_lib.ep.Load` counts them."""

    @property
    def kept(self) -> Sequence[Sequence[int]]:
        """Pairs within capacity, [rank][expert]."""

    @property
    def by_rank(self) -> Sequence[int]:
        """Pairs that each rank computes."""


def wire_bytes(load: Load, rank: int, row_bytes: int) -> Fraction:
    """Return the bytes that ``rank`` sends for one layer, forward and backward, from the counts.

    Dispatch and the backward of combine send the rows of the rank's own pairs to experts on other
    ranks; combine and the backward of dispatch return the rows of other ranks' pairs. The sum over
    all ranks is four times the pairs with an expert on another rank, times D b.
    The input of the layer must need a gradient; otherwise dispatch has no backward.
    """
    own = len(load.kept[0]) // len(load.kept)
    mine = range(rank * own, (rank + 1) * own)
    leaving = sum(count for e, count in enumerate(load.kept[rank]) if e not in mine)
    arriving = sum(row[e] for r, row in enumerate(load.kept) for e in mine if r != rank)
    return Fraction(2 * (leaving + arriving) * row_bytes)


def even_wire_bytes(tokens: int | Fraction, top_k: int, row_bytes: int, n: int) -> Fraction:
    """Return the same for a rank with ``tokens`` whose pairs are spread evenly over all ranks."""
    return dispatch(Fraction(tokens) * top_k * row_bytes, n).wire()


def parameters_per_rank(
    config: Sizes, experts: int, n: int, *, shared: bool = False
) -> tuple[int, int]:
    """Return (experts', other) parameters of a rank: E/n experts and a router per layer."""
    mlp = mlp_parameters(config)
    added = config.hidden * experts - (0 if shared else mlp)  # to each layer
    return config.layers * experts // n * mlp, parameter_count(config) + config.layers * added


def saved_bytes(
    config: Sizes, sequences: int, seq_len: int, loads: Sequence[Load], rank: int, top_k: int
) -> int:
    """Return the bytes that ``rank`` saves in one forward; ``loads`` has one load per layer.

    Tokens and targets are not counted, and there is no shared expert.
    """
    tokens = sequences * seq_len
    layers = sum(saved_per_layer(config, tokens, load, rank, top_k) for load in loads)
    return _saved_beside_experts(config, sequences, seq_len) + layers


def saved_per_layer(config: Sizes, tokens: int, load: Load, rank: int, top_k: int) -> int:
    """Return the bytes that ``rank`` saves for router and experts of one layer.

    For each of its ``tokens``: the router's input and probabilities, and the rows that its top_k
    experts returned. For each row that its experts compute: the input and the inner features. These
    rows come from other ranks too, so the busiest rank needs the most memory.
    """
    b, pairs = config.dtype.itemsize, tokens * top_k
    order = (pairs + sum(load.kept[rank])) * ID_BYTES  # where rows come from, and go
    computed = load.by_rank[rank] * (config.hidden + _inner(config)) * b
    back = pairs * (config.hidden + 1) * b
    return _saved_by_router(config, tokens, len(load.kept[0]), top_k) + order + computed + back


def reference_saved_bytes(
    config: Sizes, sequences: int, seq_len: int, experts: int, top_k: int
) -> int:
    """Return the bytes that one process saves in one forward, in a loop over experts.

    For each pair of a token and an expert: two indices and a weight, the expert's input, inner
    features and output, and the weighted output. There is no capacity and no shared expert.
    """
    tokens = sequences * seq_len
    pair = 2 * ID_BYTES + (3 * config.hidden + _inner(config) + 1) * config.dtype.itemsize
    layer = _saved_by_router(config, tokens, experts, top_k) + tokens * top_k * pair
    return _saved_beside_experts(config, sequences, seq_len) + config.layers * layer


def _saved_beside_experts(config: Sizes, sequences: int, seq_len: int) -> int:
    """Return the bytes saved for a model without its MLPs and their inputs (the routers' too)."""
    mlp = sequences * seq_len * (config.hidden + _inner(config)) * config.dtype.itemsize
    return saved_by_stage(config, sequences, seq_len) - config.layers * mlp


def _inner(config: Sizes) -> int:
    """Features that an MLP saves per token between its linears."""
    return (4 if config.family == "llama" else 2) * config.ffn


def _saved_by_router(config: Sizes, tokens: int, experts: int, top_k: int) -> int:
    wide = accumulation_itemsize(config.dtype)
    numbers = tokens * (config.hidden + experts) + experts
    if wide > config.dtype.itemsize:
        numbers += experts * config.hidden  # its weight in float32
    if top_k > 1:
        numbers += tokens * (top_k + 1)  # the division by their sum
    return numbers * wide + tokens * top_k * ID_BYTES
