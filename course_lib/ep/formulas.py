"""What expert parallelism costs, from counts and shapes. n is the size of the axis ep."""

from __future__ import annotations

from fractions import Fraction

from course_lib.ep.moe import Load, MoE
from course_lib.model import ModelConfig, parameter_count
from course_lib.recompute import saved_by_block


def wire_bytes(load: Load, rank: int, row_bytes: int) -> Fraction:
    """Bytes that ``rank`` sends for one layer, forward and backward: exact, from the counts.

    Dispatch and the backward of combine send the rows of its own pairs whose expert is elsewhere;
    combine and the backward of dispatch send back the rows of other ranks' pairs. Over all ranks
    it is four times the pairs whose expert is elsewhere, times D b.
    Something before the layer is trained: where its input needs no gradient, dispatch has no
    backward, and less is sent.
    """
    own = len(load.kept[0]) // len(load.kept)
    mine = range(rank * own, (rank + 1) * own)
    leaving = sum(count for e, count in enumerate(load.kept[rank]) if e not in mine)
    arriving = sum(row[e] for r, row in enumerate(load.kept) for e in mine if r != rank)
    return Fraction(2 * (leaving + arriving) * row_bytes)


def even_wire_bytes(tokens: int, top_k: int, row_bytes: int, n: int) -> Fraction:
    """The same for one layer when every rank has ``tokens`` and its pairs go to all ranks alike."""
    return 4 * Fraction(n - 1, n) * tokens * top_k * row_bytes


def mlp_parameters(config: ModelConfig) -> int:
    """Those of one expert."""
    if config.family == "llama":
        return 3 * config.hidden * config.ffn
    return 2 * config.hidden * config.ffn + config.ffn + config.hidden


def parameters_per_rank(
    config: ModelConfig, experts: int, n: int, *, shared: bool = False
) -> tuple[int, int]:
    """(of the experts, of all else) that a rank holds: E/n experts, and a router, a layer."""
    mlp = mlp_parameters(config)
    rest = parameter_count(config) + config.layers * (
        config.hidden * experts + (0 if shared else -mlp)
    )
    return config.layers * experts // n * mlp, rest


def saved_by_layer(config: ModelConfig, layer: MoE, tokens: int, load: Load, rank: int) -> int:
    """Bytes that autograd keeps of one expert-parallel layer on ``rank``, without shared expert.

    For each of its ``tokens``: the router's input and probabilities, and the rows that its top_k
    experts returned. For each row that its experts compute: the input and the inner features. These
    rows come from other ranks too, so the busiest rank needs the most memory.
    """
    b, index, pairs = config.dtype.itemsize, 8, tokens * layer.top_k
    order = (pairs + sum(load.kept[rank])) * index  # where rows come from, and go
    computed = load.by_rank[rank] * (config.hidden + _inner(config)) * b
    back = pairs * (config.hidden + 1) * b
    return _saved_by_router(config, layer, tokens) + order + computed + back


def saved_by_serial_layer(config: ModelConfig, layer: MoE, tokens: int) -> int:
    """The same of the layer of one process, which loops over its experts, without capacity.

    For each pair of a token and an expert the two numbers of its place and its weight, the
    expert's input and inner features, its output, and that once more weighted.
    """
    b, index = config.dtype.itemsize, 8
    pair = 2 * index + (3 * config.hidden + _inner(config) + 1) * b
    return _saved_by_router(config, layer, tokens) + tokens * layer.top_k * pair


def saved_beside_experts(config: ModelConfig, sequences: int, seq_len: int) -> int:
    """Bytes kept of a block without its MLP, and without what enters that: the router keeps it."""
    tokens = sequences * seq_len
    mlp = tokens * (config.hidden + _inner(config)) * config.dtype.itemsize
    return saved_by_block(config, sequences, seq_len).total - mlp


def _inner(config: ModelConfig) -> int:
    """Features that an MLP keeps of each token between its linears."""
    return (4 if config.family == "llama" else 2) * config.ffn


def _saved_by_router(config: ModelConfig, layer: MoE, tokens: int) -> int:
    experts, top_k = layer.router.out_features, layer.top_k
    b = config.dtype.itemsize
    wide, index = max(b, 4), 8
    kept = tokens * (config.hidden + experts) * wide + experts * wide + tokens * top_k * index
    if wide > b:
        kept += experts * config.hidden * wide  # its weight in float32
    if top_k > 1:
        kept += tokens * (top_k + 1) * wide  # the division by their sum
    return kept
