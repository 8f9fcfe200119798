"""The tour's rows of expert parallelism, and their single-process reference with experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache

import torch
from torch import Tensor

from course_lib import dp, ep
from course_lib.formulas.held import COUNT_BYTES, COUNTER_BYTES
from course_lib.mesh import make_mesh
from course_lib.model import Decoder, parameter_sizes
from course_lib.recompute import ID_BYTES
from course_lib.tour.technique import Job, Report, Technique, adam
from course_lib.trace.memory import SavedActivations, state_bytes

RANKS, EXPERTS, TOP_K = 4, 8, 2
COEFFICIENT = 0.01  # of the auxiliary loss
REFERENCE = "serial-moe"
Batch = tuple[Tensor, Tensor]  # tokens and targets
Batches = Callable[[Job, int], list[Batch]]  # the micro-batches of a step


def exact(job: Job) -> Job:
    """Return the job in float64, so that rounding never changes the experts of a token."""
    return replace(job, config=replace(job.config, dtype=torch.float64))


def experts_model(job: Job) -> Decoder:
    """Return the model of the other rows with 8 experts instead of each MLP."""
    return ep.add_experts(exact(job).model(), EXPERTS, TOP_K, seed=0)


def whole_batch(job: Job, step: int) -> list[Batch]:
    """Return the whole batch as one micro-batch."""
    return [job.rows_of(step, 0, 1)]


def train_reference(model: Decoder, job: Job, batches: Batches, steps: int) -> Report:
    """Train for ``steps`` optimizer steps; each micro-batch has its own auxiliary loss."""
    optimizer = adam(model.parameters())
    loss_sum, losses = ep.loss_sum(model, COEFFICIENT), []
    for step in range(steps):
        optimizer.zero_grad()
        micro_batches, loss = batches(job, step), 0.0
        count = sum((targets != -100).sum() for _, targets in micro_batches)
        with SavedActivations(model) as saved:
            for tokens, targets in micro_batches:
                share = loss_sum(tokens, targets)[0] / count
                share.backward()
                loss += float(share.detach())
        optimizer.step()
        losses.append(loss)
    return Report(losses, state_bytes(model, optimizer), saved.peak)


def before_last_step(job: Job, batches: Batches) -> Decoder:
    """Return the reference before its last step, whose routers give the load of that step."""
    model, threads = experts_model(job), torch.get_num_threads()
    torch.set_num_threads(1)  # as in a rank: more threads are slower for small matrices
    train_reference(model, job, batches, job.steps - 1)
    torch.set_num_threads(threads)
    return model


def train_expert_parallel(job: Job, ep_size: int) -> Report:
    """Train with the rows and the experts of each rank; sum two sets of gradients, each over
    different ranks."""
    mesh = make_mesh(ep=ep_size)
    model = ep.parallelize(experts_model(job), mesh.ep, mesh.dp_cp)
    optimizer = adam(model.parameters())
    sync = ep.ExpertSync(model, dp.Bucketed, ep=mesh.ep, edp=mesh.edp, data=mesh.dp_cp)
    losses = []
    for step in range(job.steps):
        mesh.count_from_here()
        with SavedActivations(model) as saved:
            loss = dp.train_step(
                ep.loss_sum(model, COEFFICIENT), [job.rows(step, mesh.dp)], sync, optimizer
            )
        losses.append(float(loss))
    return Report(losses, state_bytes(model, optimizer), saved.peak)


@cache
def reference_counts(job: Job) -> list[list[tuple[int, ...]]]:
    """Return the reference's tokens per expert in the last step, [layer][rank][expert]."""
    model = before_last_step(job, whole_batch)
    counts: list[list[tuple[int, ...]]] = [[] for _ in range(job.config.layers)]
    for rank in range(RANKS):
        with torch.no_grad():
            model(job.rows_of(job.steps - 1, rank, RANKS)[0])
        for layer, found in zip(ep.moe_layers(model), counts, strict=True):
            assert layer.load is not None
            found.append(layer.load.kept[0])
    return counts


def loads(job: Job, ep_size: int, first: int) -> list[ep.Load]:
    """Return the load of each layer on the ``ep_size`` ranks from ``first`` on, which share all
    experts."""
    return [ep.Load((), tuple(counts[first : first + ep_size])) for counts in reference_counts(job)]


def expert_parallel_bytes(job: Job, ep_size: int) -> dict[str, Fraction]:
    """Return the bytes that all ranks together send, by axis.

    The bytes of tokens follow from the counts of the reference, those of gradients from shapes.
    """
    config = exact(job).config
    width, tokens = config.dtype.itemsize, Fraction(0)
    for first in range(0, RANKS, ep_size):
        for load in loads(job, ep_size, first):
            tokens += sum(
                ep.wire_bytes(load, rank, config.hidden * width) for rank in range(ep_size)
            )
    experts, rest = ep.parameters_per_rank(config, EXPERTS, ep_size)
    formula = {"ep": tokens, "dp": RANKS * dp.wire_bytes(rest * width, RANKS)}
    if ep_size < RANKS:  # else no two ranks store the same experts
        formula["edp"] = RANKS * dp.wire_bytes(experts * width, RANKS // ep_size)
    return formula


def experts_state_bytes(job: Job, ep_size: int) -> int:
    """Return four times the bytes of experts and all other parameters, and Adam's counters.

    An expert has as many tensors as an MLP; a router has one.
    """
    config = exact(job).config
    held = sum(ep.parameters_per_rank(config, EXPERTS, ep_size))
    mlp_tensors = 3 if config.family == "llama" else 4
    tensors = len(parameter_sizes(config))
    tensors += config.layers * (1 + (EXPERTS // ep_size - 1) * mlp_tensors)
    return 4 * held * config.dtype.itemsize + COUNTER_BYTES * tensors


def experts_peak_bytes(job: Job, ep_size: int) -> int:
    """Return the peak bytes of saved activations, of the rank with the highest peak.

    The experts of a rank also compute the tokens of other ranks.
    """
    config, sequences = exact(job).config, job.sequences // RANKS

    def saved(rank: int) -> int:
        of_layers = loads(job, ep_size, rank // ep_size * ep_size)
        batch = sequences, job.seq_len
        return ep.saved_bytes(config, *batch, of_layers, rank % ep_size, TOP_K)

    return max(map(saved, range(RANKS))) + batch_bytes(job, RANKS)


def reference_peak_bytes(job: Job, micro_batches: int = 1) -> int:
    """Return the peak bytes of saved activations of the single-process reference."""
    config, sequences = exact(job).config, job.sequences // micro_batches
    saved = ep.reference_saved_bytes(config, sequences, job.seq_len, EXPERTS, TOP_K)
    return saved + batch_bytes(job, micro_batches)


def batch_bytes(job: Job, parts: int) -> int:
    """Return the bytes of tokens, targets and their count, of one of ``parts`` of the batch."""
    return 2 * ID_BYTES * (job.sequences // parts) * job.seq_len + COUNT_BYTES


def expert_parallel(name: str, sentence: str, ep_size: int) -> Technique:
    """Return a row of lesson 10 on four ranks."""
    return Technique(
        name=name,
        lesson="10",
        sentence=sentence,
        mesh={"dp": RANKS, "ep": ep_size},
        train=lambda job: train_expert_parallel(job, ep_size),
        formula=lambda job: expert_parallel_bytes(job, ep_size),
        state_formula=lambda job: experts_state_bytes(job, ep_size),
        peak_activation_formula=lambda job: experts_peak_bytes(job, ep_size),
        reference=REFERENCE,
    )


EXPERT_PARALLEL = [
    Technique(
        name=REFERENCE,
        lesson="10",
        sentence="One process trains a model with 8 experts per layer and 2 experts per token: the "
        "reference of the next rows, in float64.",
        mesh={},
        train=lambda job: train_reference(experts_model(job), job, whole_batch, job.steps),
        formula=lambda job: {},
        state_formula=lambda job: experts_state_bytes(job, 1),
        peak_activation_formula=reference_peak_bytes,
        reference=REFERENCE,
    ),
    expert_parallel(
        "ep-4",
        "Each rank has the model, a quarter of the batch and 2 of the 8 experts. Tokens are sent "
        "to their experts and back; the rest is data parallelism.",
        4,
    ),
    expert_parallel(
        "ep-2",
        "Each of two pairs of ranks has all experts. Fewer tokens are sent to another rank, and "
        "the gradients of 4 experts are summed over the two ranks that store them.",
        2,
    ),
]
