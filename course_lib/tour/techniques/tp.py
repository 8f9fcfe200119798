"""The tour's rows of tensor and sequence parallelism, which cut the same layers."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from course_lib import comm, recompute, sp, tp
from course_lib.comm.operators import Region
from course_lib.mesh import make_mesh
from course_lib.model import Decoder, parameter_sizes
from course_lib.tour.technique import (
    COUNT_BYTES,
    COUNTER_BYTES,
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
    """Every rank has the whole batch and a quarter of every layer."""
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
        if region != tp.REGION:  # equal, not the same: it came from another process
            sp.sum_gradients(held, mesh.tp)
        optimizer.step()
        losses.append(float(total.detach() / count))
    return Report(losses, state_bytes(model, optimizer), saved.peak)


# --- formulas: all ranks hold and send alike -----------------------------------------------------


def sent_whole(job: Job) -> dict[str, Fraction]:
    """By tensor parallelism, its loss and shared heads included."""
    shared = RANKS * formulas.shared_head_bytes(job.config, RANKS)
    whole = RANKS * formulas.wire_bytes(job.config, job.sequences, job.seq_len, RANKS)
    return {"tp": whole - shared} | ({"tp_kv": shared} if shared else {})


def sent_by_rows(job: Job, *, again: bool = False, forwards: int = 1) -> dict[str, Fraction]:
    """By sequence parallelism, its loss and shared heads included."""
    config, tokens = job.config, job.sequences * job.seq_len
    rows = sp.wire_bytes(config, job.sequences, job.seq_len, RANKS, again=again, forwards=forwards)
    shared = RANKS * formulas.shared_head_bytes(config, RANKS)
    whole = RANKS * (rows + formulas.loss_bytes(config, tokens, RANKS))
    return {"tp": whole} | ({"tp_kv": shared} if shared else {})


def state(job: Job) -> int:
    """A share of the matrices and whole norms, four times, and a counter for each tensor."""
    held = formulas.parameters_per_rank(job.config, RANKS)
    return 4 * held * job.width + COUNTER_BYTES * len(parameter_sizes(job.config))


def kept_whole(job: Job) -> int:
    """All blocks, and the ends."""
    shape = job.config, job.sequences, job.seq_len, RANKS
    blocks = job.config.layers * formulas.saved_per_block(*shape)
    return blocks + formulas.saved_at_ends(*shape) + COUNT_BYTES


def saved_by_rows(job: Job, *, again: bool = False) -> int:
    """The same where ranks share rows."""
    config, shape = job.config, (job.config, job.sequences, job.seq_len, RANKS)
    vocabulary = formulas.saved_by_vocabulary(config, job.sequences * job.seq_len, RANKS)
    blocks = config.layers * sp.saved_per_block(*shape, again=again)
    return blocks + sp.saved_at_ends(*shape, again=again) + vocabulary + COUNT_BYTES


def kept_recomputed(job: Job) -> int:
    """The inputs of all blocks, and beside them either the ends or, once backward has let go of
    head and loss, what the last block makes anew, whose first norm keeps its input too."""
    config = job.config
    rows_bytes = job.sequences * job.seq_len // RANKS * config.hidden * job.width
    positions = job.seq_len * recompute.ID_BYTES
    inputs = config.layers * rows_bytes + positions
    shape = config, job.sequences, job.seq_len, RANKS
    vocabulary = formulas.saved_by_vocabulary(config, job.sequences * job.seq_len, RANKS)
    ends = sp.saved_at_ends(*shape) + vocabulary + COUNT_BYTES
    first_end = formulas.saved_by_embedding(job.sequences * job.seq_len)
    first_end += recompute.saved_at_ends(config, job.sequences, job.seq_len).positions // RANKS
    return inputs + max(ends, first_end + sp.saved_per_block(*shape) - rows_bytes)


def tensor_parallel(
    name: str,
    lesson: str,
    sentence: str,
    region: Region,
    sent: Callable[[Job], dict[str, Fraction]],
    kept: Callable[[Job], int],
    *changes: Change,
) -> Technique:
    """A row on four ranks: what they send, what one of them keeps for backward."""
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
        "Every rank holds a quarter of every matrix and of the vocabulary; attention and MLP each "
        "cost one all-reduce forward and one backward.",
        tp.REGION,
        sent_whole,
        kept_whole,
    ),
    tensor_parallel(
        "sp",
        "06",
        "Between those layers a rank holds a quarter of the positions: gather and scatter send "
        "what the all-reduces did, and norms keep a quarter.",
        sp.REGION,
        sent_by_rows,
        saved_by_rows,
    ),
    tensor_parallel(
        "sp-again",
        "06",
        "The same, but what was gathered is let go and gathered once more in backward: a quarter "
        "more bytes, and nothing kept whole.",
        sp.GATHER_AGAIN,
        lambda job: sent_by_rows(job, again=True),
        lambda job: saved_by_rows(job, again=True),
    ),
    tensor_parallel(
        "sp-recomputed",
        "06",
        "Every block keeps its input alone, and runs forward once more in backward, its messages "
        "included.",
        sp.REGION,
        lambda job: sent_by_rows(job, forwards=2),
        kept_recomputed,
        recompute.full,
    ),
]
