"""The stages of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from course_lib.formulas.pp import partition
from course_lib.model import Decoder
from course_lib.schedule import Schedule


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
