"""Search for a schedule for any placement, costs and memory, by list scheduling.

Every rank always takes the action that a rule prefers among those that are ready. Greedy choices
are not optimal, so several rules are tried, the Ws of each result are placed into its gaps anew,
and the shortest schedule is returned.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from course_lib.schedule.data import Action, Schedule, as_rows, check_sizes, v_shape
from course_lib.schedule.fill import OVERSHOOTS, fill, shortest
from course_lib.schedule.simulate import Costs
from course_lib.schedule.zero_bubble import EQUAL, looped_skeletons, v_shaped_skeleton

# Which operation goes first where both are ready (I, F, or the one that was not the last), and
# whether the later of two stages goes first for I.
RULES = [(first, late) for first in ("I", "F", "turn") for late in (True, False)]


def searched(
    placement: Sequence[int], microbatches: int, costs: Costs = EQUAL, limit: int | None = None
) -> Schedule:
    """Return the shortest schedule found with at most ``limit`` pairs in flight on each rank.

    ``limit`` is by default the number of stages, which is 1F1B's memory. A schedule that is
    shorter, or as short with less memory, may exist. Raises ValueError when ``limit`` is below
    the number of a rank's stages.
    """
    placement = tuple(placement)
    limit = len(placement) if limit is None else limit
    check_sizes(microbatches=microbatches, limit=limit, stages=len(placement))
    costs.check_stages(len(placement))
    most = max(placement.count(rank) for rank in placement)
    if limit < most:
        raise ValueError(
            f"expected limit={most} or more, as a rank has {most} stages; got limit={limit}"
        )
    played = [ListScheduler(placement, microbatches, costs, limit, *rule).run() for rule in RULES]
    skeletons = [_without_w(schedule) for schedule in played]
    p = max(placement) + 1
    if placement == tuple(range(p)):
        skeletons += looped_skeletons(p, microbatches, costs, limit)
    if placement == v_shape(p):
        skeletons.append(v_shaped_skeleton(p, microbatches))
    different = dict.fromkeys(skeletons)  # in order: every rank must compute the same rows
    filled = [fill(s, costs, limit, over) for s in different for over in OVERSHOOTS]
    fitting = [s for s in played + filled if max(s.peak_in_flight()) <= limit]
    best = shortest(fitting, costs)
    return Schedule("searched", best.rows, placement)


class ListScheduler:
    """One run of list scheduling: each rank's clock, ready actions and pairs in flight.

    An F starts only where the limit also leaves room for one F of each later stage of its rank.
    So every micro-batch that was started can be finished, and nothing deadlocks.
    """

    def __init__(
        self, placement: tuple[int, ...], m: int, costs: Costs, limit: int, first: str, late: bool
    ) -> None:
        self.placement, self.costs, self.limit = placement, costs, limit
        self.first, self.late = first, late
        ranks = max(placement) + 1
        self.stages = [[s for s, rank in enumerate(placement) if rank == r] for r in range(ranks)]
        self.rows: list[list[Action]] = [[] for _ in range(ranks)]
        self.deferred: list[deque[Action]] = [deque() for _ in range(ranks)]  # Ws
        self.free, self.in_flight, self.last = [0.0] * ranks, [0] * ranks, ["I"] * ranks
        # By operation and stage: the time from which it is ready, and the micro-batch.
        self.ready: defaultdict[tuple[str, int], deque[tuple[float, int]]] = defaultdict(deque)
        self.ready["F", 0].extend((0.0, mb) for mb in range(m))

    def run(self) -> Schedule:
        """Return the schedule; actions are chosen in the order of time."""
        events = [
            (0.0, rank) for rank in range(len(self.rows))
        ]  # the times at which a rank looks for work
        while events:
            now, rank = heappop(events)
            if now < self.free[rank]:
                continue  # it looks again when it is free
            action = self._choice(now, rank)
            if action is not None:
                for event in self._do(now, rank, action):
                    heappush(events, event)
        return Schedule("played", as_rows(self.rows), self.placement)

    def _choice(self, now: float, rank: int) -> Action | None:
        able = [
            (op, stage) for stage in self.stages[rank] for op in "IF" if self._can(now, op, stage)
        ]
        if able:
            op, stage = min(able, key=self._order)
            return Action(op, stage, self.ready[op, stage].popleft()[1])
        return self.deferred[rank].popleft() if self.deferred[rank] else None

    def _can(self, now: float, op: str, stage: int) -> bool:
        rank, here = self.placement[stage], self.ready[op, stage]
        later = sum(other > stage for other in self.stages[rank])
        room = op == "I" or self.in_flight[rank] + later < self.limit
        return bool(here) and here[0][0] <= now and room

    def _order(self, one: tuple[str, int]) -> tuple[bool, int]:
        op, stage = one
        turn = {"F": "I", "I": "F"}[self.last[self.placement[stage]]]
        wanted = turn if self.first == "turn" else self.first
        return op != wanted, -stage if self.late or op == "F" else stage

    def _do(self, now: float, rank: int, action: Action) -> Iterator[tuple[float, int]]:
        """Do ``action``; yield the (time, rank) at which ranks can continue because of it."""
        self.rows[rank].append(action)
        self.in_flight[rank] += (action.op == "F") - (action.op == "W")
        self.free[rank] = now + self.costs.of(action)
        yield self.free[rank], rank
        if action.op == "I":
            self.deferred[rank].append(Action("W", action.stage, action.mb))
        if action.op != "W":
            self.last[rank] = action.op
        for op, stage in _unlocked(action, len(self.placement) - 1):
            reader = self.placement[stage]
            at = self.free[rank] + self.costs.comm * (reader != rank)
            self.ready[op, stage].append((at, action.mb))
            yield at, reader


def _unlocked(action: Action, last: int) -> list[tuple[str, int]]:
    """Return the operation and stage that become ready after ``action``, if there is one."""
    if action.op == "F":
        return [("F", action.stage + 1)] if action.stage < last else [("I", last)]
    return [("I", action.stage - 1)] if action.op == "I" and action.stage else []


def _without_w(schedule: Schedule) -> Schedule:
    rows = [[action for action in row if action.op != "W"] for row in schedule.rows]
    return Schedule("skeleton", as_rows(rows), schedule.placement)
