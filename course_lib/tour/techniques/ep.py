"""The tour's rows of expert parallelism, and the twin that they must equal: it has experts too."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import cache

import torch

from course_lib import dp, ep
from course_lib.mesh import make_mesh
from course_lib.model import Decoder, build_model
from course_lib.tour.technique import (
    CONFIG,
    LEARNING_RATE,
    STEPS,
    Report,
    Technique,
    rows,
    rows_of,
)
from course_lib.trace.memory import SavedActivations, state_bytes

RANKS, EXPERTS, CHOICES = 4, 8, 2
COEFFICIENT = 0.01  # of the auxiliary loss
# So many digits that no token stands between two experts, to go one way here and another there.
CONFIG_64 = replace(CONFIG, dtype=torch.float64)
TWIN = "serial-moe"


def experts_model() -> Decoder:
    """The model of the other rows with 8 experts in the place of each MLP."""
    return ep.add_experts(build_model(CONFIG_64, seed=0), EXPERTS, CHOICES, seed=0)


def train_twin() -> Report:
    """One process, all experts, and a plain loop."""
    return train_serially(experts_model(), STEPS)


def train_serially(model: Decoder, steps: int) -> Report:
    """``steps`` optimizer steps on whole batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    loss_sum, losses = ep.loss_sum(model, COEFFICIENT), []
    for step in range(steps):
        optimizer.zero_grad()
        with SavedActivations(model) as saved:
            total, count = loss_sum(*rows_of(step, 0, 1))
            (total / count).backward()
        optimizer.step()
        losses.append(float(total.detach() / count))
    return Report(losses, state_bytes(model, optimizer), saved.peak)


def train_expert_parallel(ep_size: int) -> Report:
    """Each rank has its rows and its experts; two sums of gradients, over other ranks each."""
    mesh = make_mesh(ep=ep_size)
    model = ep.parallelize(experts_model(), mesh.ep, mesh.dp_cp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    sync = ep.ExpertSync(model, dp.Bucketed, ep=mesh.ep, edp=mesh.edp, data=mesh.dp_cp)
    losses = []
    for step in range(STEPS):
        mesh.ledger.clear()
        with SavedActivations(model) as saved:
            loss = dp.train_step(
                ep.loss_sum(model, COEFFICIENT), [rows(step, mesh)], sync, optimizer
            )
        losses.append(float(loss))
    return Report(losses, state_bytes(model, optimizer), saved.peak)


@cache
def twin_counts() -> list[list[tuple[int, ...]]]:
    """What the twin's routers want in the last step, [layer][rank][expert]."""
    model = experts_model()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a rank: several, for so little, wait for each other
    train_serially(model, STEPS - 1)
    torch.set_num_threads(threads)
    counts: list[list[tuple[int, ...]]] = [[] for _ in range(CONFIG.layers)]
    for rank in range(RANKS):
        with torch.no_grad():
            model(rows_of(STEPS - 1, rank, RANKS)[0])
        for layer, found in zip(ep.moe_layers(model), counts, strict=True):
            assert layer.load is not None
            found.append(layer.load.kept[0])
    return counts


def expert_parallel_bytes(ep_size: int) -> dict[str, Fraction]:
    """All ranks together: tokens by the twin's counts, gradients by shapes."""
    width = CONFIG_64.dtype.itemsize
    tokens = Fraction(0)
    for counts in twin_counts():
        for first in range(0, RANKS, ep_size):
            load = ep.Load((), tuple(counts[first : first + ep_size]))
            tokens += sum(
                ep.wire_bytes(load, rank, CONFIG.hidden * width) for rank in range(ep_size)
            )
    experts, rest = ep.parameters_per_rank(CONFIG_64, EXPERTS, ep_size)
    formula = {"ep": tokens, "dp": RANKS * dp.wire_bytes(rest * width, RANKS)}
    if ep_size < RANKS:  # else no two ranks hold the same experts
        formula["edp"] = RANKS * dp.wire_bytes(experts * width, RANKS // ep_size)
    return formula


def expert_parallel(name: str, sentence: str, ep_size: int) -> Technique:
    """A row of lesson 10, on four ranks."""
    return Technique(
        name=name,
        lesson="10",
        sentence=sentence,
        mesh={"dp": RANKS, "ep": ep_size},
        train=lambda: train_expert_parallel(ep_size),
        formula=lambda: expert_parallel_bytes(ep_size),
        twin=TWIN,
    )


EXPERT_PARALLEL = [
    Technique(
        name=TWIN,
        lesson="10",
        sentence="One process and a model with 8 experts a layer, of which each token takes 2: the "
        "twin of the next rows, in float64.",
        mesh={},
        train=train_twin,
        formula=dict,
        twin=TWIN,
    ),
    expert_parallel(
        "ep-4",
        "Every rank holds the model, a quarter of the batch and 2 of the 8 experts; tokens travel "
        "to their experts and back, all else is data parallelism.",
        4,
    ),
    expert_parallel(
        "ep-2",
        "Two pairs of ranks, each with all experts between them: tokens travel less far, and the "
        "gradients of 4 experts are summed over the two ranks that hold them.",
        2,
    ),
]
