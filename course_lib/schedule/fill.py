"""Insert each W into a gap of a given order of F and I; the costs decide where the gaps are."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from course_lib.schedule.data import Action, Schedule, as_rows
from course_lib.schedule.simulate import Costs, arrival, simulate
from course_lib.schedule.validate import progress, settled

OVERSHOOTS = (0.0, 0.25, 0.5, 0.75, 1.0)


def fastest(name: str, skeletons: Iterable[Schedule], costs: Costs, limit: int) -> Schedule:
    """Fill all ``skeletons`` in all ways; return the shortest schedule, with the name ``name``."""
    different = dict.fromkeys(skeletons)  # in order: every rank must compute the same rows
    filled = (fill(s, costs, limit, over) for s in different for over in OVERSHOOTS)
    best = shortest(filled, costs)
    return Schedule(name, best.rows, best.placement)


def shortest(schedules: Iterable[Schedule], costs: Costs) -> Schedule:
    """Return the schedule with the least makespan; of equals the least rank span, then peak."""

    def measure(schedule: Schedule) -> tuple[float, float, int]:
        result = simulate(schedule, costs)
        unit = 1e-9 * result.work  # differences by rounding do not count
        peak = max(schedule.peak_in_flight())
        return round(result.makespan / unit), round(result.span / unit), peak

    return min(schedules, key=measure)


def fill(skeleton: Schedule, costs: Costs, limit: int, overshoot: float) -> Schedule:
    """Add a W for each I to ``skeleton``, which has only F and I, oldest first.

    A W goes where the rank would wait for its next action, which it may delay by at most
    ``overshoot`` times the W; and before an F that would exceed ``limit`` in flight.
    """
    costs.check_stages(skeleton.stages)
    rows: list[list[Action]] = [[] for _ in skeleton.rows]
    deferred: list[deque[Action]] = [deque() for _ in skeleton.rows]
    now, in_flight = [0.0] * len(rows), [0] * len(rows)
    end: dict[Action, float] = {}

    def do(rank: int, action: Action, start: float) -> None:
        rows[rank].append(action)
        now[rank] = start + costs.of(action)
        end.update(dict.fromkeys(settled(action), now[rank]))
        in_flight[rank] += (action.op == "F") - (action.op == "W")

    for rank, _, action in progress(skeleton):
        start = arrival(skeleton, costs, action, end)
        full = limit if action.op == "F" else limit + 1
        while deferred[rank] and (
            in_flight[rank] >= full
            or _fits(costs.of(deferred[rank][0]), now[rank], start, overshoot)
        ):
            do(rank, deferred[rank].popleft(), now[rank])
        do(rank, action, max(now[rank], start))
        if action.op == "I":
            deferred[rank].append(Action("W", action.stage, action.mb))
    for row, left in zip(rows, deferred, strict=True):
        row += left
    return Schedule(skeleton.name, as_rows(rows), skeleton.placement)


def _fits(cost: float, now: float, start: float, overshoot: float) -> bool:
    """Return whether a W that starts at ``now`` delays the action at ``start`` little enough."""
    least = 1e-9 * start  # a gap, not rounding
    return start - now > least and now + cost - start <= overshoot * cost + least
