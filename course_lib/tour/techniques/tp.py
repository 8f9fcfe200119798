"""The tour's rows of tensor and sequence parallelism, which cut the same layers."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import torch

from course_lib import comm, recompute, sp, tp
from course_lib.comm.operators import Region
from course_lib.mesh import make_mesh
from course_lib.model import Decoder, build_model
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
from course_lib.tp import formulas
from course_lib.trace.memory import SavedActivations, state_bytes

RANKS = 4
Change = Callable[[Decoder], None]


def train_tensor_parallel(region: Region, *changes: Change) -> Report:
    """Every rank has the whole batch and a quarter of every layer."""
    mesh = make_mesh(tp=RANKS)
    model = tp.parallelize(build_model(CONFIG, seed=0), mesh.tp, region)
    for change in changes:
        change(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        mesh.ledger.clear()
        optimizer.zero_grad()
        with SavedActivations(model) as saved:
            total, count = model.loss_sum(*rows(step, mesh))
            (total / count).backward()
        if region != tp.REGION:  # equal, not the same: it came from another process
            sp.sum_gradients(comm.held_gradients(model.parameters()), mesh.tp)
        optimizer.step()
        losses.append(float(total.detach() / count))
    return Report(losses, state_bytes(model, optimizer), saved.peak)


def by_rows(*, again: bool = False, forwards: int = 1) -> Fraction:
    """What a rank sends in a step of sequence parallelism, its loss included."""
    rows_bytes = sp.wire_bytes(CONFIG, BATCH, SEQ, RANKS, again=again, forwards=forwards)
    return rows_bytes + formulas.loss_bytes(CONFIG, BATCH * SEQ, RANKS)


def tensor_parallel(
    name: str,
    lesson: str,
    sentence: str,
    wire_bytes: Callable[[], Fraction],
    region: Region,
    *changes: Change,
) -> Technique:
    """A row on four ranks, each of which sends ``wire_bytes``."""
    return Technique(
        name=name,
        lesson=lesson,
        sentence=sentence,
        mesh={"tp": RANKS},
        train=lambda: train_tensor_parallel(region, *changes),
        formula=lambda: {"tp": RANKS * wire_bytes()},
    )


TENSOR_PARALLEL = [
    tensor_parallel(
        "tp",
        "05",
        "Every rank holds a quarter of every matrix and of the vocabulary; attention and MLP each "
        "cost one all-reduce forward and one backward.",
        lambda: formulas.wire_bytes(CONFIG, BATCH, SEQ, RANKS),
        tp.REGION,
    ),
    tensor_parallel(
        "sp",
        "06",
        "Between those layers a rank holds a quarter of the positions: gather and scatter send "
        "what the all-reduces did, and norms keep a quarter.",
        by_rows,
        sp.REGION,
    ),
    tensor_parallel(
        "sp-again",
        "06",
        "The same, but what was gathered is let go and gathered once more in backward: a quarter "
        "more bytes, and nothing kept whole.",
        lambda: by_rows(again=True),
        sp.GATHER_AGAIN,
    ),
    tensor_parallel(
        "sp-recomputed",
        "06",
        "Every block keeps its input alone, and runs forward once more in backward, its messages "
        "included.",
        lambda: by_rows(forwards=2),
        sp.REGION,
        recompute.full,
    ),
]
