"""The twin of the row with five axes, and what its routers want: by place in the mesh.

Micro-batch k of the twin holds the k-th of each replica, which is what the ranks compute at one
time: a micro-batch has an auxiliary loss of its own. Experts are shared by the two ranks of cp.
"""

from __future__ import annotations

from functools import cache

import torch

from course_lib import cp, ep
from course_lib.tour.technique import Job, Technique
from course_lib.tour.techniques.ep import (
    EXPERTS,
    Batch,
    before_last_step,
    exact,
    experts_model,
    experts_state_bytes,
    kept_beside_experts,
    train_serially,
)

MICRO_BATCHES = 4
TWIN = "serial-moe-4"
Place = tuple[int, int, int]  # coordinates on dp, cp and tp


def every_place() -> list[Place]:
    """Ranks of a stage."""
    return [(d, c, t) for d in range(2) for c in range(2) for t in range(2)]


def micro_batches(job: Job, step: int) -> list[Batch]:
    """Micro-batch k holds the k-th of each replica: what the ranks compute at the same time."""
    shares = [[x.chunk(MICRO_BATCHES) for x in job.rows_of(step, d, 2)] for d in range(2)]
    return [
        (torch.cat([share[0][k] for share in shares]), torch.cat([share[1][k] for share in shares]))
        for k in range(MICRO_BATCHES)
    ]


@cache
def choices(job: Job) -> list[list[torch.Tensor]]:
    """Experts that each token of the last step wants, [micro-batch][layer] (C, B, S)."""
    model = before_last_step(job, micro_batches)
    found: list[list[torch.Tensor]] = []
    for layer in ep.moe_layers(model):
        layer.register_forward_pre_hook(
            lambda layer, args: found[-1].append(
                layer.route(args[0].flatten(0, 1)).experts_CT.unflatten(1, args[0].shape[:2])
            )
        )
    for tokens, _ in micro_batches(job, job.steps - 1):
        found.append([])
        with torch.no_grad():
            model(tokens)
    return found


@cache
def load_at(job: Job, mb: int, layer: int, d: int, t: int) -> ep.Load:
    """Of a layer, for the two ranks of cp that share all experts."""
    wanted = choices(job)[mb][layer].chunk(2, 1)[d]
    counts = []
    for c in range(2):
        chunks = wanted.chunk(4, -1)
        rows = torch.cat([chunks[number] for number in cp.ZIGZAG.chunks(c, 2)], -1)
        own = rows.chunk(2, -1)[t]
        counts.append(tuple(own.flatten().bincount(minlength=EXPERTS).tolist()))
    return ep.Load((), tuple(counts))


def every_load(job: Job) -> list[ep.Load]:
    """Of a step."""
    return [
        load_at(job, mb, layer, d, t)
        for mb in range(MICRO_BATCHES)
        for layer in range(job.config.layers)
        for d in range(2)
        for t in range(2)
    ]


def pairs_leaving(load: ep.Load) -> int:
    """Pairs whose expert is on another rank."""
    own = EXPERTS // len(load.kept)
    return sum(
        count
        for rank, row in enumerate(load.kept)
        for expert, count in enumerate(row)
        if expert // own != rank
    )


@cache
def some_layer(job: Job) -> ep.MoE:
    """All are alike."""
    return ep.moe_layers(experts_model(job))[0]


def twin_peak(job: Job) -> int:
    """Of one micro-batch."""
    config, tokens = exact(job).config, job.sequences // MICRO_BATCHES * job.seq_len
    of_layers = config.layers * ep.kept_by_serial_layer(config, some_layer(job), tokens)
    return kept_beside_experts(job, MICRO_BATCHES) + of_layers


EXPERTS_TWIN = Technique(
    name=TWIN,
    lesson="12",
    sentence="One process, a model with 8 experts a layer, and four micro-batches a step, each "
    "balanced by itself: the twin of the next row, in float64.",
    mesh={},
    train=lambda job: train_serially(experts_model(job), job, micro_batches, job.steps),
    formula=lambda job: {},
    state_formula=lambda job: experts_state_bytes(job, 1),
    peak_activation_formula=twin_peak,
    twin=TWIN,
)
