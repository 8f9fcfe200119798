"""The tour's first row: one process, and a plain loop."""

from __future__ import annotations

from course_lib.mesh import make_mesh
from course_lib.tour.technique import STEPS, Report, Technique, parts, rows
from course_lib.trace.memory import SavedActivations, state_bytes


def train_serial() -> Report:
    """The twin that everything is compared with: one process and a plain loop."""
    mesh = make_mesh()
    model, optimizer = parts()
    losses = []
    for step in range(STEPS):
        tokens, targets = rows(step, mesh)
        optimizer.zero_grad()
        with SavedActivations(model) as saved:
            total, count = model.loss_sum(tokens, targets)
            (total / count).backward()
        optimizer.step()
        losses.append(float(total.detach() / count))
    return Report(losses, state_bytes(model, optimizer), saved.peak)


SERIAL = Technique(
    name="serial",
    lesson="00",
    sentence="One process trains on the whole batch: the twin that every row without experts must "
    "equal.",
    mesh={},
    train=train_serial,
    formula=dict,
)
