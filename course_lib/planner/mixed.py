"""The estimate of a step on two kinds of GPU: each pipeline rank runs on its own hardware."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from course_lib.formulas.moves import Move
from course_lib.planner.catalog import Model
from course_lib.planner.communication import stage_moves, step_moves
from course_lib.planner.configuration import Configuration, stages_of
from course_lib.planner.estimate import RESERVE, estimate, exposed_seconds, optimizer_seconds
from course_lib.planner.flops import step_flops
from course_lib.planner.hardware import Hardware
from course_lib.planner.links import axis_span, seconds
from course_lib.planner.memory import stage_memory
from course_lib.planner.pipeline import pipeline
from course_lib.planner.result import Estimate
from course_lib.planner.timing import Stage, exposed_data, rates, stage_seconds

Groups = Sequence[tuple[Hardware, int]]  # hardware and its number of GPUs, in the order of ranks


def machines_of(groups: Groups, pp: int) -> list[Hardware]:
    """Return the hardware of each of ``pp`` pipeline ranks, which divide the GPUs in order.

    A rank with GPUs of two kinds is as fast as the slower ones.
    """
    kinds = [kind for kind, number in groups for _ in range(number)]
    size = len(kinds) // pp
    return [
        min(kinds[rank * size : (rank + 1) * size], key=lambda kind: kind.peak_of("bf16"))
        for rank in range(pp)
    ]


def mixed_stages(model: Model, groups: Groups, plan: Configuration) -> list[Stage]:
    """Return the seconds of one micro-batch on each virtual stage, on the hardware of its rank."""
    machines, moves = machines_of(groups, plan.pp), stage_moves(model, plan)
    by_kind = {
        kind.name: stage_seconds(model, kind, plan, moves, rates(kind, plan)) for kind in machines
    }
    owners = enumerate(rank for rank, _ in stages_of(model, plan))
    return [by_kind[machines[rank].name][at] for at, rank in owners]


def estimate_mixed(model: Model, groups: Groups, configuration: Configuration) -> Estimate:
    """Return the estimate of a step on ``groups`` of GPUs, which the pipeline ranks divide.

    A message takes the time of the slower of its two ends. ``memory`` and ``hardware`` are those of
    the rank with least room; MFU is of the mean peak. The traffic is that of the slowest hardware.
    """
    plan, ranks = configuration, range(configuration.pp)
    machines, stages = machines_of(groups, plan.pp), mixed_stages(model, groups, plan)
    onward, owners = stage_moves(model, plan)[0].onward, [r for r, _ in stages_of(model, plan)]
    of_ranks = {rank: step_moves(model, plan, rank) for rank in ranks}

    def sends(moves: Iterable[Move], axis: str, kind: Hardware) -> float:
        return seconds(moves, axis_span(axis, plan, kind.gpus_per_node), kind)

    ends = {rank for pair in pairwise(owners) for rank in pair}
    found = pipeline(
        plan.schedule,
        plan.pp,
        plan.micro_batches,
        [stage.total for stage in stages],
        chunks=plan.chunks,
        message=max((sends(onward, "pp", machines[rank]) for rank in ends), default=0.0),
    )
    busiest = [stage for stage, rank in zip(stages, owners, strict=True) if rank == found.rank]
    first = [stage for stage, rank in zip(stages, owners, strict=True) if rank == owners[0]]
    exposed = exposed_seconds(plan, busiest)
    waits = exposed_data(machines[owners[0]], plan, of_ranks[owners[0]], first)
    for axis, more in waits.items():
        exposed[axis] += more
    for axis in {axis for step in of_ranks.values() for axis in step.sums}:
        exposed[axis] += max(
            sends(step.sums.get(axis, ()), axis, machines[rank]) for rank, step in of_ranks.items()
        )
    elementwise = plan.micro_batches * sum(stage.elementwise for stage in busiest)
    parts = {
        "compute": plan.micro_batches
        * sum(stage.compute.total - stage.elementwise for stage in busiest),
        "elementwise": elementwise,
        "bubble": found.bubble,
        **exposed,
        "optimizer": max(optimizer_seconds(model, machines[rank], plan, rank) for rank in ranks),
    }
    step = sum(parts.values())
    held = [stage_memory(model, plan, rank) for rank in ranks]
    room, full = min(
        ((1 - RESERVE) * machines[rank].capacity_bytes - held[rank].total, rank) for rank in ranks
    )
    peak = sum(n * kind.peak_of(plan.dtype.name) for kind, n in groups) / plan.world
    slowest = min(machines, key=lambda kind: kind.peak_of(plan.dtype.name))
    base = estimate(model, slowest, plan)  # its shares of the peak scale with step and peak
    scale = base.step_seconds * slowest.peak_of(plan.dtype.name) / (step * peak)
    return replace(
        base,
        hardware=machines[full],
        memory=held[full],
        bubble_of_total=found.of_total,
        bubble_of_ideal=found.of_ideal,
        step_seconds=step,
        tflops_per_gpu=step_flops(model, plan) / plan.world / step / 1e12,
        mfu=base.mfu * scale,
        mfu_full_attention=base.mfu_full_attention * scale,
        hfu=base.hfu * scale,
        fits=room >= 0,
        headroom_bytes=room,
        reasons=(),
        parts=parts,
    )
