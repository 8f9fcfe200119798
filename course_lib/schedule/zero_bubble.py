"""Schedules that split the backward: W waits until a rank has nothing better to do.

Only I stands between a rank and the one before it, so that W can fill what would be a bubble.
Source: Qi et al. 2023, arXiv:2401.10241. Each schedule here is made in two steps: the order of F
and I (a *skeleton*), and then the Ws, put where its gaps are. Where gaps are depends on the costs,
and so the rows do; a few skeletons and ways of filling are tried, and the shortest is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from course_lib.schedule.data import Action, Schedule, as_rows, check_sizes, looped
from course_lib.schedule.simulate import Costs, arrival, simulate
from course_lib.schedule.validate import progress, settled

EQUAL = Costs()
OVERSHOOTS = (0.0, 0.25, 0.5, 0.75, 1.0)


def zb_h1(ranks: int, microbatches: int, chunks: int = 1, costs: Costs = EQUAL) -> Schedule:
    """The order of 1F1B, W in its gaps, at most p in flight: bubble (p-1)(F + I - W).

    ``costs`` are those that the rows are made for; they can be run at any others.
    """
    check_halves("zb-h1", ranks, microbatches, chunks)
    return _fastest("zb-h1", _one_by_one(ranks, microbatches, costs, ranks), costs, ranks)


def zb_h2(ranks: int, microbatches: int, chunks: int = 1, costs: Costs = EQUAL) -> Schedule:
    """More forwards first, until the first I is there: no rank waits once it has begun.

    It takes up to 2p in flight (2p-1 at equal costs). The bubble is (p-1)(F + I - 2W) where
    that is not below 0, counted from each rank's own start: ranks begin and end one after another.
    """
    check_halves("zb-h2", ranks, microbatches, chunks)
    found = [
        _fastest("zb-h2", _one_by_one(ranks, microbatches, costs, limit), costs, limit)
        for limit in (max(1, 2 * ranks - 1), 2 * ranks)
    ]
    return shortest(found, costs)


def check_halves(name: str, ranks: int, microbatches: int, chunks: int) -> None:
    """Sizes as they must be for a schedule with one stage a rank."""
    check_sizes(ranks=ranks, microbatches=microbatches, chunks=chunks)
    if chunks > 1:
        raise ValueError(
            f"{name} has one chunk a rank, got chunks={chunks}; zb-v and dualpipe-v have two"
        )


def shortest(schedules: Iterable[Schedule], costs: Costs) -> Schedule:
    """The one with the least makespan; of equals that with the least rank span, then peak."""

    def measure(schedule: Schedule) -> tuple[float, float, int]:
        result = simulate(schedule, costs)
        unit = 1e-9 * result.work  # rounding decides nothing
        peak = max(schedule.peak_in_flight())
        return round(result.makespan / unit), round(result.span / unit), peak

    return min(schedules, key=measure)


def _fastest(name: str, skeletons: Iterable[Schedule], costs: Costs, limit: int) -> Schedule:
    filled = (fill(s, costs, limit, over) for s in set(skeletons) for over in OVERSHOOTS)
    best = shortest(filled, costs)
    return Schedule(name, best.rows, best.placement)


def _one_by_one(p: int, m: int, costs: Costs, limit: int) -> Iterator[Schedule]:
    """Skeletons of one stage a rank: some forwards first, then one I and one F by turns.

    A rank nearer to the end needs fewer before its first I arrives; between one rank and the
    next lie the F that it starts later, the I that it waits for less, and two hops.
    """
    exact = 1 + (costs.i + 2 * costs.comm) / costs.f if costs.f else limit
    for step in (1.0, 1.5, 2.0, exact):
        for more in (0.0, 0.999):  # rounded down or up
            first, firsts = limit, []
            for after in reversed(range(p)):
                first = max(1, min(first, 1 + int(step * after + more * bool(after))))
                firsts.append(first)
                first -= 1
            rows = [_alternate(rank, m, first) for rank, first in enumerate(firsts)]
            yield Schedule("skeleton", as_rows(rows), looped(p))


def _alternate(stage: int, m: int, first: int) -> list[Action]:
    """``first`` forwards, then one I and one F by turns, then the Is that are left."""
    forwards, inputs = ([Action(op, stage, mb) for mb in range(m)] for op in "FI")
    row = forwards[:first]
    for mb, action in enumerate(inputs):
        row += [action, *forwards[first + mb : first + mb + 1]]
    return row


def fill(skeleton: Schedule, costs: Costs, limit: int, overshoot: float) -> Schedule:
    """``skeleton``, which has F and I, with a W for each I, oldest first.

    A W is done where the rank would wait for its next action and may then be late by at most
    ``overshoot`` times the W; and before an F that would exceed ``limit`` in flight.
    """
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
