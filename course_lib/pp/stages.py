"""The stages of a model, and the bytes that a step sends, by formula."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from course_lib.model import Decoder
from course_lib.schedule import Schedule


def partition(layers: int, stages: int) -> list[int]:
    """Return the number of layers per stage: as even as possible, the first ones have one more."""
    if not 1 <= stages <= layers:
        raise ValueError(
            f"{layers} layers cannot be split into {stages} stages of at least one layer each; "
            "choose fewer ranks or chunks, or more layers"
        )
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def make_stages(
    model: Decoder, schedule: Schedule, rank: int, layers: Sequence[int] | None = None
) -> dict[int, Decoder]:
    """Return the stages of ``rank`` by number; ``layers`` counts the blocks of each stage.

    The stages share the weights of ``model``. Raises ValueError when ``layers`` does not add up.
    """
    total = len(model.blocks)
    layers = partition(total, schedule.stages) if layers is None else layers
    if len(layers) != schedule.stages or sum(layers) != total or min(layers) < 1:
        raise ValueError(
            f"expected {schedule.stages} stages of at least one layer, {total} layers in all, got "
            f"layers={list(layers)}"
        )
    ends = [sum(layers[: stage + 1]) for stage in range(schedule.stages)]
    return {
        stage: model.stage(ends[stage] - layers[stage], ends[stage])
        for stage in schedule.stages_of(rank)
    }


def parameters(stages: Mapping[int, Decoder]) -> list[nn.Parameter]:
    """Return the parameters of this rank's stages, each once, for its optimizer."""
    return list(dict.fromkeys(p for stage in stages.values() for p in stage.parameters()))


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
