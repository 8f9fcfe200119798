"""What the tour trains: one entry for each technique, a way to train and a formula for its bytes.

A technique joins the tour by adding an entry to :data:`TECHNIQUES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import prod

import torch

from course_lib import dp, pp
from course_lib.data import batch
from course_lib.mesh import Mesh, make_mesh
from course_lib.model import Decoder, build_model, parameter_count, tiny_config
from course_lib.schedule import Schedule, make
from course_lib.trace.memory import SavedActivations, StateBytes, state_bytes

STEPS = 8
BATCH, SEQ = 8, 64  # sequences of all ranks together, and positions of each
BUCKET_BYTES = 200_000  # about one block of the small model
LEARNING_RATE = 3e-3
CONFIG = tiny_config(max_seq_len=SEQ)
MakeSync = Callable[[Decoder, Mesh], dp.GradientSync]


@dataclass(frozen=True)
class Report:
    """What one rank has to say after training. Its ledger holds the last step alone."""

    losses: list[float]
    state: StateBytes
    peak_activation_bytes: int


@dataclass(frozen=True)
class Technique:
    """``train`` runs on every rank of ``mesh``; ``formula`` is what all ranks together send on
    each axis in one optimizer step, in bytes, from shapes alone."""

    name: str
    lesson: str
    sentence: str
    mesh: Mapping[str, int]
    train: Callable[[], Report]
    formula: Callable[[], dict[str, Fraction]]

    @property
    def ranks(self) -> int:
        """How many ranks it needs."""
        return prod(self.mesh.values())


def parts() -> tuple[Decoder, torch.optim.Optimizer]:
    """The same model and optimizer for every technique."""
    model = build_model(CONFIG, seed=0)
    return model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def rows(step: int, mesh: Mesh) -> dp.Batch:
    """This rank's share of the batch of ``step``."""
    return batch(
        step, seed=0, batch_size=BATCH, seq_len=SEQ, dp_rank=mesh.dp.rank, dp_size=mesh.dp.size
    )


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


def train_data_parallel(make_sync: MakeSync, micro_batches: int = 1) -> Report:
    """Each rank trains on its rows; ``make_sync`` decides how gradients are summed."""
    mesh = make_mesh()
    model, optimizer = parts()
    dp.start_equal(model, mesh.dp)
    sync = make_sync(model, mesh)
    losses = []
    for step in range(STEPS):
        tokens, targets = rows(step, mesh)
        cut = list(zip(tokens.chunk(micro_batches), targets.chunk(micro_batches), strict=True))
        mesh.ledger.clear()
        with SavedActivations(model) as saved:
            loss = dp.train_step(model.loss_sum, cut, sync, optimizer)
        losses.append(float(loss))
    return Report(losses, state_bytes(model, optimizer), saved.peak)


def data_parallel_bytes(n: int) -> dict[str, Fraction]:
    """All ``n`` ranks together, one step, from the shapes in the config alone."""
    parameter_bytes = parameter_count(CONFIG) * CONFIG.dtype.itemsize
    return {"dp": n * dp.wire_bytes(parameter_bytes, n)}


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


def overlapped(model: Decoder, mesh: Mesh) -> dp.GradientSync:
    """Buckets of about one block each, sent while backward goes on."""
    return dp.Overlapped(model.parameters(), mesh.dp, BUCKET_BYTES)


def data_parallel(
    name: str, sentence: str, make_sync: MakeSync, micro_batches: int = 1
) -> Technique:
    """A row of lesson 03, on four ranks."""
    return Technique(
        name=name,
        lesson="03",
        sentence=sentence,
        mesh={"dp": 4},
        train=lambda: train_data_parallel(make_sync, micro_batches),
        formula=lambda: data_parallel_bytes(4),
    )


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


TECHNIQUES = [
    Technique(
        name="serial",
        lesson="00",
        sentence="One process trains on the whole batch: the twin that every other row must equal.",
        mesh={},
        train=train_serial,
        formula=dict,
    ),
    data_parallel(
        "dp-naive",
        "Every rank holds the model and a quarter of the batch; after backward one all-reduce for "
        "each parameter adds the gradients.",
        lambda model, mesh: dp.Naive(model.parameters(), mesh.dp),
    ),
    data_parallel(
        "dp-bucketed",
        "The same bytes in a few large messages instead of many small ones.",
        lambda model, mesh: dp.Bucketed(model.parameters(), mesh.dp, BUCKET_BYTES),
    ),
    data_parallel(
        "dp-overlapped",
        "Each bucket leaves as soon as backward has filled it, so that most of the communication "
        "hides behind the arithmetic.",
        overlapped,
    ),
    data_parallel(
        "dp-accumulated",
        "Two micro-batches a step: half the activations, and still one sum of gradients.",
        overlapped,
        micro_batches=2,
    ),
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
