"""How a pipeline divides the layers, and the bytes that a step sends, by formula."""

from __future__ import annotations

from course_lib.formulas.parameters import Sizes
from course_lib.schedule import Schedule


def partition(layers: int, stages: int) -> list[int]:
    """Return the number of layers per stage: as even as possible, the first ones have one more."""
    if not 1 <= stages <= layers:
        raise ValueError(
            f"{layers} layers cannot be split into {stages} stages of at least one layer each; "
            "choose fewer ranks or chunks, or more layers"
        )
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def stage_boundaries(schedule: Schedule) -> int:
    """Count neighboring stages on different ranks: pv-1 in a looped placement, 2(p-1) in a V."""
    pairs = zip(schedule.placement, schedule.placement[1:], strict=False)
    return sum(here != there for here, there in pairs)


def wire_bytes(schedule: Schedule, activation_bytes: int, tied_bytes: int = 0) -> int:
    """Return the bytes that all ranks of the axis together send in a step.

    ``activation_bytes`` is B S D times the element size, for all micro-batches and for the rows
    that a rank has between stages (S/t under sequence, S/c under context parallelism).
    ``tied_bytes`` is the size of the tied embedding, or of a rank's shard of it; 0 if untied.
    """
    two_copies = schedule.placement[0] != schedule.placement[-1]
    return 2 * stage_boundaries(schedule) * activation_bytes + 2 * tied_bytes * two_copies


def saved_for_wgrad(
    config: Sizes,
    sequences: int,
    seq_len: int,
    first: int = 0,
    end: int | None = None,
    *,
    tp: int = 1,
) -> int:
    """Return the bytes that blocks ``first`` to ``end - 1`` save between I and W, from shapes.

    These are x and dy of every linear; q, k and v share one x, and so do gate and up. The head's
    dy has the size of all logits. The ranks of ``tp`` divide dy of column linears, and x of row
    linears.
    """
    end = config.layers if end is None else end
    kv_features = config.kv_heads * config.head_dim
    inner = 3 if config.family == "llama" else 2  # of size ffn: dy of up (and gate), x of down
    block = 4 * config.hidden + (2 * config.hidden + 2 * kv_features + inner * config.ffn) // tp
    head = config.hidden + config.vocab // tp if end == config.layers else 0
    return sequences * seq_len * ((end - first) * block + head) * config.dtype.itemsize
