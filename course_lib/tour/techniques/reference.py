"""The tour's first row: one process and a plain training loop."""

from __future__ import annotations

from course_lib.mesh import make_mesh
from course_lib.tour.technique import (
    Job,
    Report,
    Technique,
    adam,
    replica_peak_bytes,
    whole_state_bytes,
)
from course_lib.trace.memory import SavedActivations, state_bytes


def train_reference(job: Job) -> Report:
    """Train the single-process reference, with which the other rows are compared."""
    mesh, model = make_mesh(), job.model()
    optimizer = adam(model.parameters())
    losses = []
    for step in range(job.steps):
        tokens, targets = job.rows(step, mesh.dp)
        optimizer.zero_grad()
        with SavedActivations(model) as saved:
            total, count = model.loss_sum(tokens, targets)
            (total / count).backward()
        optimizer.step()
        losses.append(float(total.detach() / count))
    return Report(losses, state_bytes(model, optimizer), saved.peak)


SINGLE_PROCESS = Technique(
    name="serial",
    lesson="00",
    sentence="One process trains on the whole batch: the reference that every row without experts "
    "must equal.",
    mesh={},
    train=train_reference,
    formula=lambda job: {},
    state_formula=whole_state_bytes,
    peak_activation_formula=lambda job: replica_peak_bytes(job, 1),
)
