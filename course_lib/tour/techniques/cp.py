"""The tour's rows of context parallelism."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial

from torch import Tensor

from course_lib import cp, dp
from course_lib.mesh import Axis, make_mesh
from course_lib.model import AttentionCore, parameter_count
from course_lib.tour.technique import (
    BATCH,
    CONFIG,
    SEQ,
    STEPS,
    Report,
    Technique,
    parts,
    rows,
)
from course_lib.trace.memory import SavedActivations, state_bytes

RANKS = 4
MakeCore = Callable[[Axis], AttentionCore]


def train_context_parallel(make_core: MakeCore, layout: cp.SequenceLayout) -> Report:
    """Each rank holds a quarter of every sequence; gradients are summed as in data parallelism."""
    mesh = make_mesh(cp=RANKS)
    model, optimizer = parts()
    cp.parallelize(model, make_core(mesh.cp))
    sync = dp.Bucketed(model.parameters(), mesh.dp_cp)
    losses = []
    for step in range(STEPS):
        tokens, targets, positions = cp.shard(*rows(step, mesh), mesh.cp, layout)

        def loss_sum(
            tokens: Tensor, targets: Tensor, positions: Tensor = positions
        ) -> tuple[Tensor, Tensor]:
            return model.cross_entropy(model(tokens, positions), targets)

        mesh.ledger.clear()
        with SavedActivations(model) as saved:
            loss = dp.train_step(loss_sum, [(tokens, targets)], sync, optimizer)
        losses.append(float(loss))
    return Report(losses, state_bytes(model, optimizer), saved.peak)


def context_parallel(
    name: str,
    sentence: str,
    make_core: MakeCore,
    layout: cp.SequenceLayout,
    wire_bytes: Callable[..., Fraction],
) -> Technique:
    """A row of lesson 09, on four ranks; all of them together send the sums of ``formula``."""
    parameter_bytes = parameter_count(CONFIG) * CONFIG.dtype.itemsize
    return Technique(
        name=name,
        lesson="09",
        sentence=sentence,
        mesh={"cp": RANKS},
        train=lambda: train_context_parallel(make_core, layout),
        formula=lambda: {
            "cp": RANKS * wire_bytes(CONFIG, BATCH, SEQ, RANKS),
            "dp_cp": RANKS * dp.wire_bytes(parameter_bytes, RANKS),
        },
    )


CONTEXT_PARALLEL = [
    context_parallel(
        "cp-ring",
        "Every rank holds an early and a late piece of every sequence; keys and values travel "
        "round a ring past everyone's queries.",
        lambda axis: partial(cp.ring_attention, axis=axis, layout=cp.ZIGZAG),
        cp.ZIGZAG,
        cp.ring_wire_bytes,
    ),
    context_parallel(
        "cp-gather",
        "The same pieces, but every rank gathers all keys and values at once, and keeps them.",
        lambda axis: partial(cp.gather_attention, axis=axis, layout=cp.ZIGZAG),
        cp.ZIGZAG,
        cp.gather_wire_bytes,
    ),
    context_parallel(
        "cp-ulysses",
        "Around attention, all-to-all from a quarter of the positions to a quarter of the heads, "
        "and back.",
        lambda axis: partial(cp.ulysses_attention, axis=axis),
        cp.CONTIGUOUS,
        cp.ulysses_wire_bytes,
    ),
]
