"""The tour's rows of pipelines."""

from __future__ import annotations

from fractions import Fraction

import torch

from course_lib import pp
from course_lib.mesh import make_mesh
from course_lib.model import build_model
from course_lib.schedule import Schedule, make
from course_lib.tour.technique import (
    BATCH,
    CONFIG,
    LEARNING_RATE,
    SEQ,
    STEPS,
    Report,
    Technique,
    rows,
)
from course_lib.trace.memory import SavedActivations, state_bytes

MICRO_BATCHES = 4


def train_pipeline(schedule: Schedule) -> Report:
    """Each rank holds a quarter of the layers and does its row of ``schedule``."""
    mesh = make_mesh(pp=schedule.ranks)
    model = build_model(CONFIG, seed=0)
    stages = pp.cut(model, schedule, mesh.pp.rank)
    optimizer = torch.optim.AdamW(pp.parameters(stages), lr=LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        tokens, targets = rows(step, mesh)
        m = schedule.microbatches
        cut = list(zip(tokens.chunk(m), targets.chunk(m), strict=True))
        mesh.ledger.clear()
        with SavedActivations(*stages.values()) as saved:
            loss = pp.train_step(schedule, stages, mesh, cut, optimizer)
        losses.append(float(loss))
    return Report(losses, state_bytes(stages.values(), optimizer), saved.peak)


def pipeline_bytes(schedule: Schedule) -> dict[str, Fraction]:
    """All ranks together, one step: activations there, gradients back, over every boundary."""
    activation_bytes = BATCH * SEQ * CONFIG.hidden * CONFIG.dtype.itemsize
    return {"pp": Fraction(pp.wire_bytes(schedule, activation_bytes))}


def pipeline(schedule: str, sentence: str) -> Technique:
    """A row of lesson 07, on four ranks."""
    return Technique(
        name=f"pp-{schedule}",
        lesson="07",
        sentence=sentence,
        mesh={"pp": 4},
        train=lambda: train_pipeline(make(schedule, 4, MICRO_BATCHES)),
        formula=lambda: pipeline_bytes(make(schedule, 4, MICRO_BATCHES)),
    )


PIPELINES = [
    pipeline(
        "gpipe",
        "Every rank holds one layer in four; four micro-batches go forward through all, then "
        "back, and only activations travel.",
    ),
    pipeline(
        "1f1b",
        "The same messages, but each backward comes as early as it can, so that later ranks keep "
        "fewer activations.",
    ),
]
