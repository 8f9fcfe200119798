"""The tour's rows of data parallelism."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from course_lib import dp
from course_lib.mesh import Mesh, make_mesh
from course_lib.model import Decoder, parameter_count
from course_lib.tour.technique import CONFIG, STEPS, Report, Technique, parts, rows
from course_lib.trace.memory import SavedActivations, state_bytes

BUCKET_BYTES = 200_000  # about one block of the small model
MakeSync = Callable[[Decoder, Mesh], dp.GradientSync]


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


DATA_PARALLEL = [
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
]
