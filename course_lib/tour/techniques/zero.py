"""The tour's rows of ZeRO."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import torch
from torch import nn

from course_lib import dp, zero
from course_lib.mesh import Mesh, make_mesh
from course_lib.model import Decoder, block_parameter_count, parameter_count
from course_lib.tour.technique import CONFIG, LEARNING_RATE, STEPS, Report, Technique, parts, rows
from course_lib.trace.memory import SavedActivations, state_bytes

RANKS = 4
BUCKET_BYTES = 200_000  # about one block of the small model
MakeZero = Callable[[Decoder, Mesh], zero.Sharded]


def adam(shards: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of every row, of this rank's shards."""
    return torch.optim.AdamW(shards, lr=LEARNING_RATE)


def train_zero(make_zero: MakeZero, micro_batches: int) -> Report:
    """The loop of data parallelism: ZeRO stands where the sync and the optimizer stand there."""
    mesh = make_mesh()
    model, _ = parts()
    dp.start_equal(model, mesh.dp)
    z = make_zero(model, mesh)
    buffers = z.buffers if isinstance(z, zero.Zero3) else []
    losses = []
    for step in range(STEPS):
        tokens, targets = rows(step, mesh)
        cut = list(zip(tokens.chunk(micro_batches), targets.chunk(micro_batches), strict=True))
        mesh.ledger.clear()
        with SavedActivations(model, buffers) as saved:
            loss = dp.train_step(model.loss_sum, cut, z, z)
        losses.append(float(loss))
    return Report(losses, state_bytes(model, z.optimizer), saved.peak)


def zero_bytes(stage: int, micro_batches: int) -> dict[str, Fraction]:
    """All ranks together, one step, from the shapes in the config alone."""
    whole, block = parameter_count(CONFIG), block_parameter_count(CONFIG)
    elements = [whole - CONFIG.layers * block, *[block] * CONFIG.layers] if stage == 3 else [whole]
    sent = zero.wire_bytes(
        stage,
        elements,
        RANKS,
        dtype=CONFIG.dtype,
        micro_batches=micro_batches,
        kept=(0, CONFIG.layers) if stage == 3 else (),
    )
    return {"dp": RANKS * sent}


def row(stage: int, sentence: str, make_zero: MakeZero, micro_batches: int = 1) -> Technique:
    """A row of lesson 04, on four ranks."""
    return Technique(
        name=f"zero-{stage}",
        lesson="04",
        sentence=sentence,
        mesh={"dp": RANKS},
        train=lambda: train_zero(make_zero, micro_batches),
        formula=lambda: zero_bytes(stage, micro_batches),
    )


ZERO = [
    row(
        1,
        "Gradients are reduce-scattered, every rank updates a quarter of the weights, and an "
        "all-gather makes them whole: the bytes of data parallelism, a quarter of its optimizer.",
        lambda model, mesh: zero.Zero1(model.parameters(), mesh.dp, adam, BUCKET_BYTES),
    ),
    row(
        2,
        "Gradients too are kept in quarters: each bucket is scattered and freed as soon as "
        "backward has filled it, in each of two micro-batches.",
        lambda model, mesh: zero.Zero2(model.parameters(), mesh.dp, adam, BUCKET_BYTES),
        micro_batches=2,
    ),
    row(
        3,
        "Parameters too: each block is gathered before its forward and its backward, while its "
        "neighbour computes, and freed after.",
        lambda model, mesh: zero.Zero3(model, list(model.blocks), mesh.dp, adam),
    ),
]
