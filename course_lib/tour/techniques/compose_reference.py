"""The single-process reference of the row with five axes, and the load of its experts.

Micro-batch k of the reference joins micro-batch k of each replica, because the ranks compute these
at the same time and each micro-batch has its own auxiliary loss. The two ranks of cp share the
experts.
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
    experts_model,
    experts_state_bytes,
    reference_peak_bytes,
    train_reference,
)

MICRO_BATCHES = 4
REFERENCE = "serial-moe-4"
Place = tuple[int, int, int]  # coordinates on dp, cp and tp


def every_place() -> list[Place]:
    """Return the coordinates of all ranks of a stage."""
    return [(d, c, t) for d in range(2) for c in range(2) for t in range(2)]


def micro_batches(job: Job, step: int) -> list[Batch]:
    """Return micro-batches that join those of the replicas: all k-th ones are micro-batch k."""
    shares = [[x.chunk(MICRO_BATCHES) for x in job.rows_of(step, d, 2)] for d in range(2)]
    return [
        (torch.cat([share[0][k] for share in shares]), torch.cat([share[1][k] for share in shares]))
        for k in range(MICRO_BATCHES)
    ]


@cache
def choices(job: Job) -> list[list[torch.Tensor]]:
    """Return the top_k experts of each token in the last step, [micro-batch][layer] (C, B, S)."""
    model = before_last_step(job, micro_batches)
    found: list[list[torch.Tensor]] = []
    for layer in ep.moe_layers(model):
        layer.register_forward_pre_hook(
            lambda layer, args: found[-1].append(
                layer.route(args[0].flatten(0, 1)).experts_KT.unflatten(1, args[0].shape[:2])
            )
        )
    for tokens, _ in micro_batches(job, job.steps - 1):
        found.append([])
        with torch.no_grad():
            model(tokens)
    return found


@cache
def load_at(job: Job, mb: int, layer: int, d: int, t: int) -> ep.Load:
    """Return the load of a layer's experts on the two ranks of cp that share them."""
    wanted = choices(job)[mb][layer].chunk(2, 1)[d]
    counts = []
    for c in range(2):
        chunks = wanted.chunk(4, -1)
        rows = torch.cat([chunks[number] for number in cp.ZIGZAG.chunks(c, 2)], -1)
        own = rows.chunk(2, -1)[t]
        counts.append(tuple(own.flatten().bincount(minlength=EXPERTS).tolist()))
    return ep.Load((), tuple(counts))


def every_load(job: Job) -> list[ep.Load]:
    """Return the loads of all layers and micro-batches in a step."""
    return [
        load_at(job, mb, layer, d, t)
        for mb in range(MICRO_BATCHES)
        for layer in range(job.config.layers)
        for d in range(2)
        for t in range(2)
    ]


def pairs_leaving(load: ep.Load) -> int:
    """Return the number of (token, expert) pairs with the expert on another rank."""
    own = EXPERTS // len(load.kept)
    return sum(
        count
        for rank, row in enumerate(load.kept)
        for expert, count in enumerate(row)
        if expert // own != rank
    )


EXPERTS_REFERENCE = Technique(
    name=REFERENCE,
    lesson="12",
    sentence="One process trains a model with 8 experts per layer, with four micro-batches per "
    "step and an auxiliary loss per micro-batch: the reference of the next row, in float64.",
    mesh={},
    train=lambda job: train_reference(experts_model(job), job, micro_batches, job.steps),
    formula=lambda job: {},
    state_formula=lambda job: experts_state_bytes(job, 1),
    peak_activation_formula=lambda job: reference_peak_bytes(job, MICRO_BATCHES),
    reference=REFERENCE,
)
