"""How good is a schedule? Its bubble and its memory beside others', and what none can beat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from course_lib.schedule.data import Schedule
from course_lib.schedule.named import make, placement
from course_lib.schedule.simulate import Costs, Simulation, first_pass, simulate
from course_lib.schedule.validate import validate

BESIDE = ("1f1b", "zb-h1", "zb-v")


def score(schedule: Schedule, costs: Costs) -> dict[str, Any]:
    """Time and memory of a legal ``schedule``, and those of others that do the same work.

    ``makespan`` and ``span`` (the longest of one rank), the ``bubble`` of either base, ``peak``:
    the most that a rank keeps in flight, in micro-batches of all its stages (so that stages of
    half the size count half), ``lower_bound`` of the makespan and ``efficiency``, the bound's
    share of it. ``beside`` has the same of 1F1B, ZB-H1 and ZB-V, in which every rank has the same
    work, evenly cut into its stages. Raises ScheduleError, with the reason, when ``schedule`` is
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
    """Costs for a placement ``other`` in which each rank works as long as in ``schedule``."""
    costs.check_stages(schedule.stages)
    of_rank = []
    for rank in range(schedule.ranks):
        mine = [costs.at(stage) for stage in schedule.stages_of(rank)]
        of_rank.append([sum(op) for op in zip(*mine, strict=True)])
    stages = [[cost / other.count(rank) for cost in of_rank[rank]] for rank in other]
    return Costs(1, 1, 1, costs.comm, tuple((f, i, w) for f, i, w in stages))


def lower_bound(placement: Sequence[int], microbatches: int, costs: Costs) -> float:
    """No order takes less than this, whatever the memory: the least makespan there may be.

    A rank cannot begin before the first micro-batch is there, and has all its work to do; its
    first I waits for the whole forward; and after its last I that of every stage before is still
    to come, and one W.
    """
    there, back = first_pass(placement, costs)
    stages = range(len(placement))
    f, i, w = zip(*map(costs.at, stages), strict=True)
    hops = costs.hops(placement)
    tail = [sum(i[:stage]) + sum(hops[:stage]) + w[0] for stage in stages]
    bounds = []
    for rank in set(placement):
        mine = [stage for stage in stages if placement[stage] == rank]
        fs, ins, ws = (microbatches * sum(op[stage] for stage in mine) for op in (f, i, w))
        start, first = min(there[stage] for stage in mine), min(back[stage] for stage in mine)
        after = min(tail[stage] for stage in mine)
        bounds += [start + fs + ins + ws, start + fs + ins + after, first + ins + after]
    return max(bounds)
