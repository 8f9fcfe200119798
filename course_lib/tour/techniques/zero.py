"""The tour's rows of ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from course_lib import dp, zero
from course_lib.formulas.held import buckets, sharded_state_bytes
from course_lib.mesh import Mesh, make_mesh
from course_lib.model import (
    Decoder,
    block_parameter_count,
    parameter_count,
    parameter_sizes,
)
from course_lib.tour.technique import (
    Job,
    Report,
    Technique,
    adam,
    replica_peak_bytes,
)
from course_lib.trace.memory import SavedActivations, state_bytes

RANKS = 4
BUCKET_BYTES = 200_000  # about one block of the small model
MakeZero = Callable[[Decoder, Mesh], zero.Sharded]


def train_zero(job: Job, make_zero: MakeZero, micro_batches: int) -> Report:
    """Train with the loop of data parallelism; ZeRO replaces the sync and the optimizer."""
    mesh, model = make_mesh(), job.model()
    dp.broadcast_parameters(model, mesh.dp)
    z = make_zero(model, mesh)
    buffers = z.buffers if isinstance(z, zero.Zero3) else []
    losses = []
    for step in range(job.steps):
        tokens, targets = job.rows(step, mesh.dp)
        cut = list(zip(tokens.chunk(micro_batches), targets.chunk(micro_batches), strict=True))
        mesh.count_from_here()
        with SavedActivations(model, buffers) as saved:
            loss = dp.train_step(model.loss_sum, cut, z, z)
        losses.append(float(loss))
    return Report(losses, state_bytes(model, z.optimizer), saved.peak)


def flats(stage: int, job: Job) -> Sequence[int]:
    """Return the elements of each flat parameter: root and blocks in stage 3, else buckets."""
    config = job.config
    if stage == 3:
        block = block_parameter_count(config)
        return [parameter_count(config) - config.layers * block, *[block] * config.layers]
    return buckets(parameter_sizes(config)[::-1], BUCKET_BYTES // config.dtype.itemsize)


def zero_bytes(stage: int, job: Job, micro_batches: int) -> dict[str, Fraction]:
    """Return the bytes that all ranks together send in one step, by axis."""
    sent = zero.wire_bytes(
        stage,
        flats(stage, job),
        RANKS,
        dtype=job.config.dtype,
        micro_batches=micro_batches,
        gathered_once=(0, job.config.layers) if stage == 3 else (),
    )
    return {"dp": RANKS * sent}


def zero_state_bytes(stage: int, job: Job) -> int:
    """Return the state bytes: sharded state, gradients of the shards, and Adam's counters."""
    return sharded_state_bytes(stage, flats(stage, job), RANKS, job.config.dtype)


def row(stage: int, sentence: str, make_zero: MakeZero, micro_batches: int = 1) -> Technique:
    """Return a row of lesson 04 on four ranks."""
    return Technique(
        name=f"zero-{stage}",
        lesson="04",
        sentence=sentence,
        mesh={"dp": RANKS},
        train=lambda job: train_zero(job, make_zero, micro_batches),
        formula=lambda job: zero_bytes(stage, job, micro_batches),
        state_formula=lambda job: zero_state_bytes(stage, job),
        peak_activation_formula=lambda job: replica_peak_bytes(job, RANKS, micro_batches),
    )


ZERO = [
    row(
        1,
        "Gradients are reduce-scattered, each rank updates a quarter of the weights, and an "
        "all-gather sends them to all ranks: the bytes of data parallelism, with a quarter of its "
        "optimizer state.",
        lambda model, mesh: zero.Zero1(model.parameters(), mesh.dp, adam, BUCKET_BYTES),
    ),
    row(
        2,
        "Gradients are sharded too: each bucket is reduce-scattered and freed as soon as backward "
        "has filled it, in each of two micro-batches.",
        lambda model, mesh: zero.Zero2(model.parameters(), mesh.dp, adam, BUCKET_BYTES),
        micro_batches=2,
    ),
    row(
        3,
        "Parameters are sharded too: each block is gathered before its forward and its backward, "
        "while its neighbor computes, and freed afterwards.",
        lambda model, mesh: zero.Zero3(model, list(model.blocks), mesh.dp, adam),
    ),
]
