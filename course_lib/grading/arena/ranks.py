"""Run a schedule on real ranks: compare its gradients with one process, and measure its time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from course_lib import comm, pp
from course_lib.data import batch
from course_lib.launch import run
from course_lib.mesh import make_mesh
from course_lib.model import Decoder, build_model, loss_sum, tiny_config
from course_lib.schedule import Costs, Schedule, makespan

SEQ = 16


def trial(schedule: Schedule, costs: Costs, unit: float) -> tuple[float, float | None]:
    """Return the largest gradient difference from one process, and the measured makespan.

    A cost of 1 is padded by sleep to ``unit`` seconds. With 0, nothing is padded and the makespan
    is None.
    """
    pace = None
    if unit:
        in_seconds = replace(costs, f=costs.f * unit, i=costs.i * unit, w=costs.w * unit)
        pace = pp.pace_of(in_seconds, schedule)
    results = run(one_step, schedule, n=schedule.ranks, pace=pace)
    got = {name: gradient for rank in results for name, gradient in rank.items()}
    right = serial(schedule)
    if got.keys() != right.keys():
        return float("inf"), None
    off = max(float(torch.max(torch.abs(got[name] - right[name]))) for name in right)
    return off, makespan(pp.measured_rows(results.traces)) / unit if unit else None


def one_step(schedule: Schedule) -> dict[str, Tensor]:
    """Return the gradients of this rank by name; the first of two steps is a warm-up."""
    mesh, m = make_mesh(pp=schedule.ranks), schedule.microbatches
    tokens, targets = batch(0, seed=0, batch_size=m, seq_len=SEQ)
    cut = list(zip(tokens.chunk(m), targets.chunk(m), strict=True))
    model = _model(schedule.stages)
    stages = pp.make_stages(model, schedule, mesh.pp.rank)
    for _ in range(2):
        for p in pp.parameters(stages):
            p.grad = None
        comm.barrier(mesh.pp)
        mesh.trace.clear()
        pp.run(schedule, stages, mesh, cut, _share(targets))
    mine = {id(p) for p in pp.parameters(stages)}
    return {
        name: p.grad for name, p in model.named_parameters() if id(p) in mine and p.grad is not None
    }


def serial(schedule: Schedule) -> dict[str, Tensor]:
    """Return the gradients of the same batch in one process."""
    model = _model(schedule.stages)
    tokens, targets = batch(0, seed=0, batch_size=schedule.microbatches, seq_len=SEQ)
    _share(targets)(model(tokens), targets).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _model(stages: int) -> Decoder:
    return build_model(tiny_config(layers=stages, max_seq_len=SEQ), seed=0)


def _share(targets: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda y, some: loss_sum(y, some)[0] / targets.numel()
