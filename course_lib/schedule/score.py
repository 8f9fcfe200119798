"""The score of a schedule: bubble and memory beside other schedules, and a lower bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from course_lib.schedule.data import Schedule
from course_lib.schedule.named import make, placement
from course_lib.schedule.simulate import Costs, Simulation, first_pass, simulate
from course_lib.schedule.validate import validate

BESIDE = ("1f1b", "zb-h1", "zb-v")


def score(schedule: Schedule, costs: Costs) -> dict[str, Any]:
    """Return time and memory of a legal ``schedule``, and of others that do the same work.

    The keys are ``makespan`` and ``span`` (the longest of one rank); the ``bubble`` with both
    bases; ``peak``, the most that a rank has in flight, in micro-batches of all its stages (a
    stage of half the size counts half); the ``lower_bound`` of the makespan; and ``efficiency``,
    the bound over the makespan. ``beside`` has the same for 1F1B, ZB-H1 and ZB-V, in which every
    rank has the same work, split evenly over its stages. Raises ScheduleError when ``schedule`` is
    not legal.
    """
    validate(schedule)
    result = _measured(simulate(schedule, costs))
    p, m = schedule.ranks, schedule.microbatches
    result["beside"] = {}
    for name in BESIDE:
        same = same_work(schedule, costs, placement(name, p))
        other = make(name, p, m, costs=same)
        result["beside"][name] = _measured(simulate(other, same))
    return result


def _measured(simulation: Simulation) -> dict[str, Any]:
    schedule, costs = simulation.schedule, simulation.costs
    peaks = zip(
        schedule.peak_in_flight(), map(schedule.stages_of, range(schedule.ranks)), strict=True
    )
    bound = lower_bound(schedule.placement, schedule.microbatches, costs)
    return {
        "makespan": simulation.makespan,
        "span": simulation.span,
        "bubble": {"of_total": simulation.bubble_of_total, "of_ideal": simulation.bubble_of_ideal},
        "peak": max(peak / len(stages) for peak, stages in peaks),
        "lower_bound": bound,
        "efficiency": bound / simulation.makespan,
    }


def same_work(schedule: Schedule, costs: Costs, other: Sequence[int]) -> Costs:
    """Return costs for the placement ``other`` with the work per rank of ``schedule``."""
    costs.check_stages(schedule.stages)
    of_rank = []
    for rank in range(schedule.ranks):
        own = [costs.at(stage) for stage in schedule.stages_of(rank)]
        of_rank.append([sum(op) for op in zip(*own, strict=True)])
    stages = [[cost / other.count(rank) for cost in of_rank[rank]] for rank in other]
    return Costs(1, 1, 1, costs.comm, tuple((f, i, w) for f, i, w in stages))


def lower_bound(placement: Sequence[int], microbatches: int, costs: Costs) -> float:
    """Return a makespan that no order can beat, even with unlimited memory.

    A rank starts when the first micro-batch arrives, and then has all its work to do. Its first I
    waits for the whole forward. After its last I follow those of all earlier stages, and one W.
    """
    forward, backward = first_pass(placement, costs)
    stages = range(len(placement))
    f, i, w = zip(*map(costs.at, stages), strict=True)
    transfers = costs.transfers(placement)
    tail = [sum(i[:stage]) + sum(transfers[:stage]) + w[0] for stage in stages]
    bounds = []
    for rank in set(placement):
        own = [stage for stage in stages if placement[stage] == rank]
        fs, ins, ws = (microbatches * sum(op[stage] for stage in own) for op in (f, i, w))
        start, first = min(forward[stage] for stage in own), min(backward[stage] for stage in own)
        after = min(tail[stage] for stage in own)
        bounds += [start + fs + ins + ws, start + fs + ins + after, first + ins + after]
    return max(bounds)
