"""The tour's rows of context parallelism."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial

from torch import Tensor

from course_lib import cp, dp
from course_lib.formulas.held import COUNT_BYTES
from course_lib.mesh import Axis, make_mesh
from course_lib.recompute import ID_BYTES
from course_lib.tour.technique import (
    Job,
    Report,
    Technique,
    adam,
    whole_state_bytes,
)
from course_lib.trace.memory import SavedActivations, state_bytes

RANKS, HEADS = 4, 2  # USP: two neighboring ranks split the heads
MakeAttention = Callable[[Axis], cp.ParallelAttention]


def train_context_parallel(
    job: Job, make_attention: MakeAttention, layout: cp.SequenceLayout
) -> Report:
    """Train with a quarter of every sequence per rank; sum gradients as in data parallelism."""
    mesh, model = make_mesh(cp=RANKS), job.model()
    optimizer = adam(model.parameters())
    cp.parallelize(model, make_attention(mesh.cp), mesh.cp, layout)
    sync = dp.Bucketed(model.parameters(), mesh.dp_cp)
    losses = []
    for step in range(job.steps):
        tokens, targets, positions = cp.shard(*job.rows(step, mesh.dp), mesh.cp, layout)

        def loss_sum(
            tokens: Tensor, targets: Tensor, positions: Tensor = positions
        ) -> tuple[Tensor, Tensor]:
            return model.cross_entropy(model(tokens, positions), targets)

        mesh.count_from_here()
        with SavedActivations(model) as saved:
            loss = dp.train_step(loss_sum, [(tokens, targets)], sync, optimizer)
        losses.append(float(loss))
    return Report(losses, state_bytes(model, optimizer), saved.peak)


def usp(axis: Axis) -> cp.ParallelAttention:
    """Return USP attention: Ulysses between neighboring ranks, and a ring between the pairs."""
    heads_axis, ring_axis = cp.split_axis(axis, HEADS)
    return partial(cp.ulysses_ring_attention, heads_axis=heads_axis, ring_axis=ring_axis)


def sent_by_usp(job: Job) -> dict[str, Fraction]:
    """Return the bytes that all ranks together send on each axis of USP."""
    sizes = job.config, job.sequences, job.seq_len, HEADS, RANKS // HEADS
    heads, ring = cp.ulysses_ring_wire_bytes(*sizes)
    return {"cp_heads": RANKS * heads, "cp_ring": RANKS * ring}


def sent_by(wire_bytes: Callable[..., Fraction]) -> Callable[[Job], dict[str, Fraction]]:
    """Return a function for the bytes that all ranks together send on the axis cp."""
    return lambda job: {"cp": RANKS * wire_bytes(job.config, job.sequences, job.seq_len, RANKS)}


def saved_activations(job: Job, attention_bytes: int, *, output_copied: bool = False) -> int:
    """Return the saved bytes of one rank whose attention saves ``attention_bytes`` per layer."""
    saved = cp.saved_bytes(
        job.config,
        job.sequences,
        job.seq_len,
        RANKS,
        attention_bytes,
        output_copied=output_copied,
    )
    return saved + 2 * ID_BYTES * job.sequences * job.seq_len // RANKS + COUNT_BYTES


def context_parallel(
    name: str,
    sentence: str,
    make_attention: MakeAttention,
    layout: cp.SequenceLayout,
    sent: Callable[[Job], dict[str, Fraction]],
    saved: Callable[..., int],
    *,
    output_copied: bool = False,
) -> Technique:
    """Return a row of lesson 09 on four ranks, which together send ``sent`` and the gradients."""

    def formula(job: Job) -> dict[str, Fraction]:
        gradients = RANKS * dp.wire_bytes(job.parameter_bytes, RANKS)
        return sent(job) | {"dp_cp": gradients}

    def peak(job: Job) -> int:
        in_attention = saved(job.config, job.sequences, job.seq_len, RANKS)
        return saved_activations(job, in_attention, output_copied=output_copied)

    return Technique(
        name=name,
        lesson="09",
        sentence=sentence,
        mesh={"cp": RANKS},
        train=lambda job: train_context_parallel(job, make_attention, layout),
        formula=formula,
        state_formula=whole_state_bytes,
        peak_activation_formula=peak,
    )


CONTEXT_PARALLEL = [
    context_parallel(
        "cp-ring",
        "Each rank has an early and a late chunk of every sequence. The keys and values are sent "
        "around a ring, so that each rank sees all of them.",
        lambda axis: cp.ring_attention,
        cp.ZIGZAG,
        sent_by(cp.ring_wire_bytes),
        cp.ring_saved_bytes,
    ),
    context_parallel(
        "cp-gather",
        "The same chunks, but each rank gathers all keys and values at once and saves them for "
        "backward.",
        lambda axis: cp.gather_attention,
        cp.ZIGZAG,
        sent_by(cp.gather_wire_bytes),
        cp.gather_saved_bytes,
    ),
    context_parallel(
        "cp-ulysses",
        "An all-to-all before attention changes a quarter of the positions into a quarter of the "
        "heads; another after attention changes it back.",
        lambda axis: cp.ulysses_attention,
        cp.CONTIGUOUS,
        sent_by(cp.ulysses_wire_bytes),
        cp.ulysses_saved_bytes,
        output_copied=True,
    ),
    context_parallel(
        "cp-ulysses-ring",
        "Each pair of neighboring ranks splits the heads by all-to-all. The keys and values of "
        "each half are sent between the two pairs.",
        usp,
        cp.nested(cp.ZIGZAG, HEADS),
        sent_by_usp,
        lambda config, sequences, seq_len, n: cp.ulysses_ring_saved_bytes(
            config, sequences, seq_len, HEADS, n // HEADS
        ),
        output_copied=True,
    ),
]
