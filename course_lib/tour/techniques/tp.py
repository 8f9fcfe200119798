"""The tour's rows of tensor and sequence parallelism, which shard the same layers."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from course_lib import comm, recompute, sp, tp
from course_lib.comm.operators import Region
from course_lib.formulas.held import COUNT_BYTES, COUNTER_BYTES
from course_lib.mesh import make_mesh
from course_lib.model import Decoder, parameter_sizes
from course_lib.tour.technique import (
    Job,
    Report,
    Technique,
    adam,
)
from course_lib.tp import formulas
from course_lib.trace.memory import SavedActivations, state_bytes

RANKS = 4
Change = Callable[[Decoder], None]


def train_tensor_parallel(job: Job, region: Region, *changes: Change) -> Report:
    """Train with the whole batch and a quarter of every layer on each rank."""
    mesh = make_mesh(tp=RANKS)
    model = tp.parallelize(job.model(), mesh.tp, region)
    for change in changes:
        change(model)
    optimizer = adam(model.parameters())
    losses = []
    for step in range(job.steps):
        mesh.count_from_here()
        optimizer.zero_grad()
        with SavedActivations(model) as saved:
            total, count = model.loss_sum(*job.rows(step, mesh.dp))
            (total / count).backward()
        held = comm.held_gradients(model.parameters())
        tp.sum_shared_gradients(held)
        if region != tp.REGION:  # equal to tp.REGION, but not identical: it was unpickled
            sp.sum_gradients(held, mesh.tp)
        optimizer.step()
        losses.append(float(total.detach() / count))
    return Report(losses, state_bytes(model, optimizer), saved.peak)


# --- formulas: all ranks store and send the same number of bytes ---------------------------------


def sent_whole(job: Job) -> dict[str, Fraction]:
    """Return the bytes of tensor parallelism by axis, including the loss and shared KV heads."""
    shared = RANKS * formulas.shared_head_bytes(job.config, RANKS)
    whole = RANKS * formulas.wire_bytes(job.config, job.sequences, job.seq_len, RANKS)
    return {"tp": whole - shared} | ({"tp_kv": shared} if shared else {})


def sent_by_rows(job: Job, *, again: bool = False, forwards: int = 1) -> dict[str, Fraction]:
    """Return the bytes of sequence parallelism by axis, including the loss and shared KV heads."""
    config, tokens = job.config, job.sequences * job.seq_len
    rows = sp.wire_bytes(config, job.sequences, job.seq_len, RANKS, again=again, forwards=forwards)
    shared = RANKS * formulas.shared_head_bytes(config, RANKS)
    whole = RANKS * (rows + formulas.loss_bytes(config, tokens, RANKS))
    return {"tp": whole} | ({"tp_kv": shared} if shared else {})


def state(job: Job) -> int:
    """Return the state bytes: four times the sharded matrices and replicated norms, and a counter
    per tensor."""
    held = formulas.parameters_per_rank(job.config, RANKS)
    return 4 * held * job.width + COUNTER_BYTES * len(parameter_sizes(job.config))


def kept_whole(job: Job) -> int:
    """Return the saved bytes of all blocks, the embedding and the LM head."""
    return formulas.saved_bytes(job.config, job.sequences, job.seq_len, RANKS) + COUNT_BYTES


def saved_by_rows(job: Job, *, again: bool = False) -> int:
    """Return the saved bytes when the positions are sharded outside the layers."""
    vocabulary = formulas.saved_by_vocabulary(job.config, job.sequences * job.seq_len, RANKS)
    rows = sp.saved_bytes(job.config, job.sequences, job.seq_len, RANKS, again=again)
    return rows + vocabulary + COUNT_BYTES


def kept_recomputed(job: Job) -> int:
    """Return the peak of the saved bytes with full recomputation.

    The inputs of all blocks are saved. In addition, there are either the activations of embedding
    and LM head or, after backward has freed those of head and loss, the recomputed activations of
    the last block, without its input.
    """
    config = job.config
    rows_bytes = job.sequences * job.seq_len // RANKS * config.hidden * job.width
    positions = job.seq_len * recompute.ID_BYTES
    inputs = config.layers * rows_bytes + positions
    shape = config, job.sequences, job.seq_len, RANKS
    vocabulary = formulas.saved_by_vocabulary(config, job.sequences * job.seq_len, RANKS)
    outside = sp.saved_outside_blocks(*shape) + vocabulary + COUNT_BYTES
    embedding = formulas.saved_by_embedding(job.sequences * job.seq_len)
    reference = recompute.saved_outside_blocks(config, job.sequences, job.seq_len)
    embedding += reference.positions // RANKS
    return inputs + max(outside, embedding + sp.saved_per_block(*shape) - rows_bytes)


def tensor_parallel(
    name: str,
    lesson: str,
    sentence: str,
    region: Region,
    sent: Callable[[Job], dict[str, Fraction]],
    kept: Callable[[Job], int],
    *changes: Change,
) -> Technique:
    """Return a row on four ranks, with formulas for the bytes sent and saved for backward."""
    return Technique(
        name=name,
        lesson=lesson,
        sentence=sentence,
        mesh={"tp": RANKS},
        train=lambda job: train_tensor_parallel(job, region, *changes),
        formula=sent,
        state_formula=state,
        peak_activation_formula=kept,
    )


TENSOR_PARALLEL = [
    tensor_parallel(
        "tp",
        "05",
        "Each rank has a quarter of every matrix and of the vocabulary. Attention and MLP each "
        "need one all-reduce in forward and one in backward.",
        tp.REGION,
        sent_whole,
        kept_whole,
    ),
    tensor_parallel(
        "sp",
        "06",
        "Between those layers each rank has a quarter of the positions. All-gather and "
        "reduce-scatter send as many bytes as the all-reduces, and norms save a quarter.",
        sp.REGION,
        sent_by_rows,
        saved_by_rows,
    ),
    tensor_parallel(
        "sp-again",
        "06",
        "The same, but gathered activations are freed and gathered again in backward: a quarter "
        "more bytes are sent, and only shards are saved.",
        sp.GATHER_AGAIN,
        lambda job: sent_by_rows(job, again=True),
        lambda job: saved_by_rows(job, again=True),
    ),
    tensor_parallel(
        "sp-recomputed",
        "06",
        "Each block saves only its input and runs its forward again in backward, including its "
        "messages.",
        sp.REGION,
        lambda job: sent_by_rows(job, forwards=2),
        kept_recomputed,
        recompute.full,
    ),
]
