"""How a pipeline divides the layers, and the bytes that a step sends, by formula."""

from __future__ import annotations

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
