"""Where to put W: into the gaps of an order of F and I, which only the costs can tell."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from course_lib.schedule.data import Action, Schedule, as_rows
from course_lib.schedule.simulate import Costs, arrival, simulate
from course_lib.schedule.validate import progress, settled

OVERSHOOTS = (0.0, 0.25, 0.5, 0.75, 1.0)


def fastest(name: str, skeletons: Iterable[Schedule], costs: Costs, limit: int) -> Schedule:
    """The shortest of all ``skeletons`` filled in all ways, under the name ``name``."""
    different = dict.fromkeys(skeletons)  # in order: every rank must make the same rows
    filled = (fill(s, costs, limit, over) for s in different for over in OVERSHOOTS)
    best = shortest(filled, costs)
    return Schedule(name, best.rows, best.placement)


def shortest(schedules: Iterable[Schedule], costs: Costs) -> Schedule:
    """The one with the least makespan; of equals that with the least rank span, then peak."""

    def measure(schedule: Schedule) -> tuple[float, float, int]:
        result = simulate(schedule, costs)
        unit = 1e-9 * result.work  # rounding decides nothing
        peak = max(schedule.peak_in_flight())
        return round(result.makespan / unit), round(result.span / unit), peak

    return min(schedules, key=measure)


def fill(skeleton: Schedule, costs: Costs, limit: int, overshoot: float) -> Schedule:
    """``skeleton``, which has F and I, with a W for each I, oldest first.

    A W is done where the rank would wait for its next action and may then be late by at most
    ``overshoot`` times the W; and before an F that would exceed ``limit`` in flight.
    """
    costs.check_stages(skeleton.stages)
    rows: list[list[Action]] = [[] for _ in skeleton.rows]
    owed: list[deque[Action]] = [deque() for _ in skeleton.rows]
    now, kept = [0.0] * len(rows), [0] * len(rows)
    end: dict[Action, float] = {}

    def do(rank: int, action: Action, start: float) -> None:
        rows[rank].append(action)
        now[rank] = start + costs.of(action)
        end.update(dict.fromkeys(settled(action), now[rank]))
        kept[rank] += (action.op == "F") - (action.op == "W")

    for rank, _, action in progress(skeleton):
        start = arrival(skeleton, costs, action, end)
        full = limit if action.op == "F" else limit + 1
        while owed[rank] and (
            kept[rank] >= full or _fits(costs.of(owed[rank][0]), now[rank], start, overshoot)
        ):
            do(rank, owed[rank].popleft(), now[rank])
        do(rank, action, max(now[rank], start))
        if action.op == "I":
            owed[rank].append(Action("W", action.stage, action.mb))
    for row, left in zip(rows, owed, strict=True):
        row += left
    return Schedule(skeleton.name, as_rows(rows), skeleton.placement)


def _fits(cost: float, now: float, start: float, overshoot: float) -> bool:
    """Whether a W between ``now`` and ``start`` is worth what it delays."""
    least = 1e-9 * start  # rounding is no gap
    return start - now > least and now + cost - start <= overshoot * cost + least
