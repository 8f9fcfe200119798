"""Cutting the model into stages; what a step sends, by formula."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from course_lib.model import Decoder
from course_lib.schedule import Schedule


def partition(layers: int, stages: int) -> list[int]:
    """How many layers each stage gets: as even as can be, the first ones one more."""
    if not 1 <= stages <= layers:
        raise ValueError(
            f"{layers} layers cannot be cut into {stages} stages of at least one layer each; "
            "take fewer ranks or chunks, or more layers"
        )
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def cut(
    model: Decoder, schedule: Schedule, rank: int, layers: Sequence[int] | None = None
) -> dict[int, Decoder]:
    """The stages that ``rank`` holds, by number; ``layers`` says how many blocks each stage has.

    The slices share the weights of ``model``. Raises ValueError when ``layers`` does not add up.
    """
    total = len(model.blocks)
    layers = partition(total, schedule.stages) if layers is None else layers
    if len(layers) != schedule.stages or sum(layers) != total or min(layers) < 1:
        raise ValueError(
            f"layers={list(layers)}: {schedule.stages} stages of at least one layer are wanted, "
            f"{total} layers in all"
        )
    ends = [sum(layers[: stage + 1]) for stage in range(schedule.stages)]
    return {
        stage: model.stage(ends[stage] - layers[stage], ends[stage])
        for stage in schedule.stages_of(rank)
    }


def parameters(stages: Mapping[int, Decoder]) -> list[nn.Parameter]:
    """The parameters of this rank's stages, each once: what its optimizer is given."""
    return list(dict.fromkeys(p for stage in stages.values() for p in stage.parameters()))


def hops(schedule: Schedule) -> int:
    """Pairs of neighbouring stages on different ranks: pv-1 looped, 2(p-1) in a V."""
    pairs = zip(schedule.placement, schedule.placement[1:], strict=False)
    return sum(here != there for here, there in pairs)


def wire_bytes(schedule: Schedule, activation_bytes: int, tied_bytes: int = 0) -> int:
    """Bytes that all ranks of the axis together send in a step.

    ``activation_bytes`` is B S D times the element size, of all micro-batches together, and of
    the rows that a rank has between stages (S/t under sequence, S/c under context parallelism);
    ``tied_bytes`` the size of the tied embedding, or of a rank's part of it, 0 if it is not tied.
    """
    ends_apart = schedule.placement[0] != schedule.placement[-1]
    return 2 * hops(schedule) * activation_bytes + 2 * tied_bytes * ends_apart
