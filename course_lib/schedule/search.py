"""A schedule for any placement, costs and memory: every rank takes the best thing it can do now.

What is best now is not best in the end, so several rules are played (list scheduling), the Ws are
put anew into the gaps of each result, and the shortest is kept.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from course_lib.schedule.data import Action, Schedule, as_rows, check_sizes, v_shape
from course_lib.schedule.fill import OVERSHOOTS, fill, shortest
from course_lib.schedule.simulate import Costs
from course_lib.schedule.zero_bubble import EQUAL, one_by_one, there_and_back

# What is begun first where both are ready (I, F, or whichever was not the last), and whether of
# two stages' Is that of the later stage.
RULES = [(first, late) for first in ("I", "F", "turn") for late in (True, False)]


def searched(
    placement: Sequence[int], microbatches: int, costs: Costs = EQUAL, limit: int | None = None
) -> Schedule:
    """The shortest schedule found with at most ``limit`` pairs in flight on each rank.

    ``limit`` left out is the number of stages, which is 1F1B's memory. The search is no proof:
    a schedule that is shorter, or as short with less memory, may exist. Raises ValueError when
    a rank cannot keep one micro-batch of each of its stages.
    """
    placement = tuple(placement)
    limit = len(placement) if limit is None else limit
    check_sizes(microbatches=microbatches, limit=limit, stages=len(placement))
    costs.check_stages(len(placement))
    most = max(placement.count(rank) for rank in placement)
    if limit < most:
        raise ValueError(f"limit={limit}: a rank has {most} stages; {most} or more are wanted")
    played = [Play(placement, microbatches, costs, limit, *rule).run() for rule in RULES]
    skeletons = [_without_w(schedule) for schedule in played]
    p = max(placement) + 1
    if placement == tuple(range(p)):
        skeletons += one_by_one(p, microbatches, costs, limit)
    if placement == v_shape(p):
        skeletons.append(there_and_back(p, microbatches))
    different = dict.fromkeys(skeletons)  # in order: every rank must make the same rows
    filled = [fill(s, costs, limit, over) for s in different for over in OVERSHOOTS]
    kept = [s for s in played + filled if max(s.peak_in_flight()) <= limit]
    best = shortest(kept, costs)
    return Schedule("searched", best.rows, placement)


class Play:
    """One playing: the ranks' clocks, what each of their stages could do, what they keep.

    An F needs room for itself and for one of each later stage of its rank: whatever is begun can
    then be finished, and nothing deadlocks.
    """

    def __init__(
        self, placement: tuple[int, ...], m: int, costs: Costs, limit: int, first: str, late: bool
    ) -> None:
        self.placement, self.costs, self.limit = placement, costs, limit
        self.first, self.late = first, late
        ranks = max(placement) + 1
        self.stages = [[s for s, home in enumerate(placement) if home == r] for r in range(ranks)]
        self.rows: list[list[Action]] = [[] for _ in range(ranks)]
        self.owed: list[deque[Action]] = [deque() for _ in range(ranks)]  # Ws
        self.free, self.kept, self.last = [0.0] * ranks, [0] * ranks, ["I"] * ranks
        # By operation and stage: from when on, and which micro-batch.
        self.ready: defaultdict[tuple[str, int], deque[tuple[float, int]]] = defaultdict(deque)
        self.ready["F", 0].extend((0.0, mb) for mb in range(m))

    def run(self) -> Schedule:
        """All actions, in the order of time."""
        events = [(0.0, rank) for rank in range(len(self.rows))]  # when a rank looks for work
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
        return self.owed[rank].popleft() if self.owed[rank] else None

    def _can(self, now: float, op: str, stage: int) -> bool:
        rank, here = self.placement[stage], self.ready[op, stage]
        later = sum(other > stage for other in self.stages[rank])
        room = op == "I" or self.kept[rank] + later < self.limit
        return bool(here) and here[0][0] <= now and room

    def _order(self, one: tuple[str, int]) -> tuple[bool, int]:
        op, stage = one
        turn = {"F": "I", "I": "F"}[self.last[self.placement[stage]]]
        wanted = turn if self.first == "turn" else self.first
        return op != wanted, -stage if self.late or op == "F" else stage

    def _do(self, now: float, rank: int, action: Action) -> Iterator[tuple[float, int]]:
        """When which ranks can go on because of it."""
        self.rows[rank].append(action)
        self.kept[rank] += (action.op == "F") - (action.op == "W")
        self.free[rank] = now + self.costs.of(action)
        yield self.free[rank], rank
        if action.op == "I":
            self.owed[rank].append(Action("W", action.stage, action.mb))
        if action.op != "W":
            self.last[rank] = action.op
        for op, stage in _unlocked(action, len(self.placement) - 1):
            there = self.placement[stage]
            at = self.free[rank] + self.costs.comm * (there != rank)
            self.ready[op, stage].append((at, action.mb))
            yield at, there


def _unlocked(action: Action, last: int) -> list[tuple[str, int]]:
    """What can be done after ``action``: an operation and its stage, if there is one."""
    if action.op == "F":
        return [("F", action.stage + 1)] if action.stage < last else [("I", last)]
    return [("I", action.stage - 1)] if action.op == "I" and action.stage else []


def _without_w(schedule: Schedule) -> Schedule:
    rows = [[action for action in row if action.op != "W"] for row in schedule.rows]
    return Schedule("skeleton", as_rows(rows), schedule.placement)
