"""The tour's rows of data parallelism."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from course_lib import dp
from course_lib.mesh import Mesh, make_mesh
from course_lib.model import Decoder
from course_lib.tour.technique import (
    Job,
    Report,
    Technique,
    adam,
    replica_peak_bytes,
    whole_state_bytes,
)
from course_lib.trace.memory import SavedActivations, state_bytes

RANKS = 4
BUCKET_BYTES = 200_000  # about one block of the small model
MakeSync = Callable[[Decoder, Mesh], dp.GradientSync]


def train_data_parallel(job: Job, make_sync: MakeSync, micro_batches: int = 1) -> Report:
    """Train on the rows of each rank; ``make_sync`` makes the object that sums the gradients."""
    mesh, model = make_mesh(), job.model()
    optimizer = adam(model.parameters())
    dp.broadcast_parameters(model, mesh.dp)
    sync = make_sync(model, mesh)
    losses = []
    for step in range(job.steps):
        tokens, targets = job.rows(step, mesh.dp)
        cut = list(zip(tokens.chunk(micro_batches), targets.chunk(micro_batches), strict=True))
        mesh.count_from_here()
        with SavedActivations(model) as saved:
            loss = dp.train_step(model.loss_sum, cut, sync, optimizer)
        losses.append(float(loss))
    return Report(losses, state_bytes(model, optimizer), saved.peak)


def data_parallel_bytes(job: Job) -> dict[str, Fraction]:
    """Return the bytes that all ranks together send in one step, by axis."""
    return {"dp": RANKS * dp.wire_bytes(job.parameter_bytes, RANKS)}


def overlapped(model: Decoder, mesh: Mesh) -> dp.GradientSync:
    """Return a sync with buckets of about one block each, which are sent during backward."""
    return dp.Overlapped(model.parameters(), mesh.dp, BUCKET_BYTES)


def data_parallel(
    name: str, sentence: str, make_sync: MakeSync, micro_batches: int = 1
) -> Technique:
    """Return a row of lesson 03 on four ranks."""
    return Technique(
        name=name,
        lesson="03",
        sentence=sentence,
        mesh={"dp": RANKS},
        train=lambda job: train_data_parallel(job, make_sync, micro_batches),
        formula=data_parallel_bytes,
        state_formula=whole_state_bytes,
        peak_activation_formula=lambda job: replica_peak_bytes(job, RANKS, micro_batches),
    )


DATA_PARALLEL = [
    data_parallel(
        "dp-naive",
        "Each rank has the model and a quarter of the batch. After backward, one all-reduce per "
        "parameter sums the gradients.",
        lambda model, mesh: dp.Naive(model.parameters(), mesh.dp),
    ),
    data_parallel(
        "dp-bucketed",
        "The same bytes in a few large messages instead of many small ones.",
        lambda model, mesh: dp.Bucketed(model.parameters(), mesh.dp, BUCKET_BYTES),
    ),
    data_parallel(
        "dp-overlapped",
        "Each bucket is sent as soon as backward has filled it, so that most of the communication "
        "overlaps with the arithmetic.",
        overlapped,
    ),
    data_parallel(
        "dp-accumulated",
        "Two micro-batches per step: half the activations, and still one sum of gradients.",
        overlapped,
        micro_batches=2,
    ),
]
