"""The simulator: it takes a schedule and costs and returns spans.

Every rank does its row in order. An action starts when the rank is free and its inputs have
arrived. A message between different ranks takes ``comm`` and blocks no rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from course_lib.schedule.data import Action, Schedule
from course_lib.schedule.span import Span
from course_lib.schedule.validate import before, progress, settled

Factor = float | tuple[float, float, float]  # of a stage's costs: one for all, or for F, I and W
MOST = 1e12  # the largest cost: sums of such costs are still exact enough
LEAST = 1e-30  # the smallest cost above 0: quotients of such costs are still finite


@dataclass(frozen=True)
class Costs:
    """Seconds (or any unit) of one action on one virtual stage, and of one P2P transfer.

    B = I + W always. :meth:`make` takes ``b`` (half of which is I where a schedule splits the
    backward) or ``i`` and ``w``. For unequal stages, ``per_stage`` multiplies the costs of each
    stage by one factor, or by one each for F, I and W. For ranks of unequal speed see
    :meth:`on_ranks`.
    """

    f: float = 1.0
    i: float = 1.0
    w: float = 1.0
    comm: float = 0.0
    per_stage: tuple[Factor, ...] | None = None

    @classmethod
    def make(
        cls,
        f: float = 1.0,
        b: float | None = None,
        i: float | None = None,
        w: float | None = None,
        comm: float = 0.0,
        per_stage: tuple[Factor, ...] | None = None,
    ) -> Costs:
        """Make costs from B, or from I and W; B is 2 F when neither is given.

        Raises ValueError when a cost is negative, only one half is given or B is not I + W.
        """
        given = {"f": f, "b": b, "i": i, "w": w, "comm": comm}
        _check_costs({name: cost for name, cost in given.items() if cost is not None})
        if b is None and i is None and w is None:
            b = 2 * f
        if b is None:
            if i is None or w is None:
                raise ValueError("give the whole backward b, or both of its halves i and w")
            return cls(f, i, w, comm, per_stage)
        if i is None:
            i = b / 2 if w is None else b - w
        if w is None:
            w = b - i
        if i < 0 or w < 0:
            raise ValueError(f"i={i}, w={w}: half of the backward cannot cost more than b={b}")
        if abs(i + w - b) > 1e-9 * b:
            raise ValueError(f"b={b} is not i + w = {i + w}; leave one of them out")
        return cls(f, i, w, comm, per_stage)

    def __post_init__(self) -> None:
        """Raise ValueError for impossible costs."""
        _check_costs({"f": self.f, "i": self.i, "w": self.w, "comm": self.comm})
        for stage, factor in enumerate(self.per_stage or ()):
            _check_costs({f"per_stage[{stage}]": one for one in _three(factor)})
        stages = (0,) if self.per_stage is None else range(len(self.per_stage))
        if not any(sum(self.at(stage)) for stage in stages):
            raise ValueError("f, i and w are all 0, on every stage: there is no work to schedule")

    def of(self, action: Action) -> float:
        """Return the cost of ``action``."""
        f, i, w = self.at(action.stage)
        return {"F": f, "B": i + w, "I": i, "W": w}[action.op]

    def at(self, stage: int) -> tuple[float, float, float]:
        """Return the costs F, I and W of ``stage``."""
        if self.per_stage is None:
            return self.f, self.i, self.w
        f, i, w = _three(self.per_stage[stage])
        return self.f * f, self.i * i, self.w * w

    def on_ranks(self, speeds: Sequence[float], placement: Sequence[int]) -> Costs:
        """Return costs for ranks of different speed; at speed 0.5 an action takes twice as long.

        Raises ValueError when there is not one speed above 0 per rank of ``placement``.
        """
        ranks = max(placement) + 1
        if len(speeds) != ranks or not all(0 < speed <= MOST for speed in speeds):
            raise ValueError(
                f"expected one speed above 0 for each of {ranks} ranks, got "
                f"{', '.join(map(str, speeds))}"
            )
        self.check_stages(len(placement))
        factors = self.per_stage or (1.0,) * len(placement)
        slower = (
            (f / speeds[rank], i / speeds[rank], w / speeds[rank])
            for rank, (f, i, w) in zip(placement, map(_three, factors), strict=True)
        )
        return replace(self, per_stage=tuple(t[0] if len(set(t)) == 1 else t for t in slower))

    def transfers(self, placement: Sequence[int]) -> list[float]:
        """Return the time of a message from each stage to the next; 0 within a rank."""
        return [self.comm * (here != following) for here, following in pairwise(placement)]

    def check_stages(self, stages: int) -> None:
        """Raise ValueError unless ``per_stage`` has this many factors."""
        if self.per_stage is not None and len(self.per_stage) != stages:
            raise ValueError(
                f"expected one factor for each of the schedule's {stages} stages, got per_stage "
                f"with {len(self.per_stage)}"
            )


def _three(factor: Factor) -> tuple[float, float, float]:
    """Return the factors of F, of I and of W."""
    if not isinstance(factor, tuple):
        return factor, factor, factor
    if len(factor) != 3:
        raise ValueError(f"expected one factor, or three for F, I and W, got {factor}")
    return factor


def _check_costs(costs: Mapping[str, float]) -> None:
    for name, cost in costs.items():
        if not (cost == 0 or LEAST <= cost <= MOST):
            raise ValueError(
                f"{name}={cost}: a cost is a number from 0 to {MOST:g}, and {LEAST:g} or more "
                "unless it is 0"
            )


@dataclass(frozen=True)
class Simulation:
    """The spans of each rank, in the unit of the costs, and figures computed from them."""

    schedule: Schedule
    rows: tuple[tuple[Span, ...], ...]
    costs: Costs

    @property
    def spans(self) -> list[Span]:
        """All spans, rank by rank."""
        return [span for row in self.rows for span in row]

    @property
    def makespan(self) -> float:
        """The time from 0 to the end of the last action."""
        return makespan(self.rows)

    @property
    def work(self) -> float:
        """The working time of the busiest rank."""
        return busiest(self.rows)

    @property
    def span(self) -> float:
        """The longest time from one rank's first start to its last end."""
        return longest_rank_span(self.rows)

    @property
    def bubble_of_total(self) -> float:
        """(makespan - work) / makespan, work being that of the busiest rank."""
        return bubble(self.rows)[0]

    @property
    def bubble_of_ideal(self) -> float:
        """(makespan - work) / work."""
        return bubble(self.rows)[1]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data: one row and one peak per rank."""
        of_total, of_ideal = bubble(self.rows)
        keys = ("op", "stage", "mb", "start", "end")
        return {
            "name": self.schedule.name,
            "rows": [[{key: getattr(span, key) for key in keys} for span in r] for r in self.rows],
            "makespan": self.makespan,
            "span": self.span,
            "bubble": {"of_total": of_total, "of_ideal": of_ideal},
            "peak_in_flight": self.schedule.peak_in_flight(),
        }


Rows = Sequence[Sequence[Span]]


def makespan(rows: Rows) -> float:
    """Return the time from the first start on any rank to the last end on any rank."""
    last = max(span.end for row in rows for span in row)
    return last - min(span.start for row in rows for span in row)


def longest_rank_span(rows: Rows) -> float:
    """Return the longest time from one rank's first start to its last end."""
    return max(row[-1].end - row[0].start for row in rows if row)


def busiest(rows: Rows) -> float:
    """Return the working time of the busiest rank."""
    return max(sum(span.duration for span in row) for row in rows)


def bubble(rows: Rows) -> tuple[float, float]:
    """Return the bubble as shares of total and of ideal time, of simulated or measured rows."""
    work = busiest(rows)
    total = makespan(rows)
    waited = max(0.0, total - work)  # rounding could make it negative
    return (waited / total, waited / work) if work else (0.0, 0.0)


def arrival(schedule: Schedule, costs: Costs, action: Action, end: Mapping[Action, float]) -> float:
    """Return when all inputs of ``action`` are on its rank; ``end`` has the ends of actions."""
    rank, latest = schedule.placement[action.stage], 0.0
    for needed in before(action, schedule.stages):
        transfer = costs.comm if schedule.placement[needed.stage] != rank else 0.0
        latest = max(latest, end[needed] + transfer)
    return latest


def first_pass(placement: Sequence[int], costs: Costs) -> tuple[list[float], list[float]]:
    """Return when the first micro-batch can reach each stage, for its F and for its I (or B)."""
    costs.check_stages(len(placement))
    cost = [costs.at(stage) for stage in range(len(placement))]
    transfers = costs.transfers(placement)
    forward = [0.0]
    for (f, _, _), transfer in zip(cost, transfers, strict=False):
        forward.append(forward[-1] + f + transfer)
    backward = [forward[-1] + cost[-1][0]]
    for (_, i, _), transfer in zip(reversed(cost), reversed(transfers), strict=False):
        backward.append(backward[-1] + i + transfer)
    return forward, backward[::-1]


def simulate(schedule: Schedule, costs: Costs) -> Simulation:
    """Simulate the schedule, in linear time. Raises ScheduleError on a deadlock."""
    costs.check_stages(schedule.stages)
    end: dict[Action, float] = {}
    rows: list[list[Span]] = [[] for _ in schedule.rows]
    for rank, _, action in progress(schedule):
        free = rows[rank][-1].end if rows[rank] else 0.0
        start = max(free, arrival(schedule, costs, action, end))
        over = start + costs.of(action)
        rows[rank].append(Span(rank, action.op, start, over, stage=action.stage, mb=action.mb))
        end.update(dict.fromkeys(settled(action), over))
    return Simulation(schedule, tuple(tuple(row) for row in rows), costs)
