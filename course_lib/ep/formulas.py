"""What expert parallelism costs, from counts and shapes. n is the size of the axis ep."""

from __future__ import annotations

from fractions import Fraction

from course_lib.ep.moe import Load, MoE
from course_lib.model import ModelConfig, parameter_count


def wire_bytes(load: Load, rank: int, row_bytes: int) -> Fraction:
    """Bytes that ``rank`` sends for one layer, forward and backward: exact, from the counts.

    Dispatch and the backward of combine send the rows of its own pairs whose expert is elsewhere;
    combine and the backward of dispatch send back the rows of other ranks' pairs. Over all ranks
    it is four times the pairs whose expert is elsewhere, times D b.
    """
    own = len(load.kept[0]) // len(load.kept)
    mine = range(rank * own, (rank + 1) * own)
    leaving = sum(count for e, count in enumerate(load.kept[rank]) if e not in mine)
    arriving = sum(row[e] for r, row in enumerate(load.kept) for e in mine if r != rank)
    return Fraction(2 * (leaving + arriving) * row_bytes)


def even_wire_bytes(tokens: int, choices: int, row_bytes: int, n: int) -> Fraction:
    """The same for one layer when every rank has ``tokens`` and its pairs go to all ranks alike."""
    return 4 * Fraction(n - 1, n) * tokens * choices * row_bytes


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


def kept_by_layer(config: ModelConfig, layer: MoE, tokens: int, load: Load, rank: int) -> int:
    """Bytes that autograd keeps of one expert-parallel layer on ``rank``, without shared expert.

    For each of its ``tokens`` the router's input and probabilities, and the rows that came back
    for its C choices; for each row that its experts compute the input and the inner features. The
    latter are other ranks' pairs too: the busiest rank needs the most memory.
    """
    experts, choices = layer.router.out_features, layer.choices
    b = config.dtype.itemsize
    wide, index = max(b, 4), 8
    router = tokens * (config.hidden + experts) * wide + experts * wide + tokens * choices * index
    if wide > b:
        router += experts * config.hidden * wide  # its weight in float32
    if choices > 1:
        router += tokens * (choices + 1) * wide  # the division by their sum
    order = (tokens * choices + sum(load.kept[rank])) * index  # where rows come from, and go
    inner = (4 if config.family == "llama" else 2) * config.ffn
    computed = load.by_rank[rank] * (config.hidden + inner) * b
    return router + order + computed + tokens * choices * (config.hidden + 1) * b
