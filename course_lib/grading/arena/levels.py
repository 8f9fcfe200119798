"""The levels of the arena, with the library's schedules and initial rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from course_lib.schedule import (
    Action,
    Costs,
    Schedule,
    Simulation,
    looped,
    lower_bound,
    make,
    placement,
    searched,
    simulate,
    v_shape,
)
from course_lib.schedule.data import as_rows
from course_lib.schedule.fill import OVERSHOOTS, fill, shortest
from course_lib.schedule.score import same_work

CLOSE = 1e-9  # difference of makespans that is ignored as rounding
HALF = Costs(0.5, 0.5, 0.5)  # two stages per rank of the same model
RIVALS = ("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")


@dataclass(frozen=True)
class Level:
    """A scheduling task. ``limit`` is the most (stage, micro-batch) pairs in flight per rank."""

    number: int
    title: str
    task: str
    placement: tuple[int, ...]
    microbatches: int
    limit: int
    costs: Costs = field(default_factory=Costs)

    @property
    def ranks(self) -> int:
        """Number of ranks, and of rows."""
        return max(self.placement) + 1

    @property
    def chunks(self) -> int:
        """Stages per rank."""
        return len(self.placement) // self.ranks

    @property
    def bound(self) -> float:
        """Lower bound of the makespan, for any memory."""
        return lower_bound(self.placement, self.microbatches, self.costs)

    @cached_property
    def rivals(self) -> dict[str, Simulation]:
        """The library's schedules of the same work; only "searched" is made for the level."""
        found = {}
        for name in RIVALS:
            costs = same_work_on(self, placement(name, self.ranks))
            rival = make(name, self.ranks, self.microbatches, costs=costs)
            found[name] = simulate(rival, costs)
        best = searched(self.placement, self.microbatches, self.costs, self.limit)
        return {**found, "searched": simulate(best, self.costs)}

    def obeys(self, schedule: Schedule) -> bool:
        """Return whether the level allows ``schedule``, which must be legal."""
        return schedule.placement == self.placement and max(schedule.peak_in_flight()) <= self.limit

    @cached_property
    def best(self) -> float:
        """The shortest makespan of the library within the rules; a shorter one may exist."""
        return min(each.makespan for each in self.rivals.values() if self.obeys(each.schedule))

    @property
    def open(self) -> bool:
        """Whether a shorter schedule may exist."""
        return self.best > self.bound + CLOSE

    @property
    def par(self) -> float:
        """The mean of the makespans of 1F1B and of the library's best."""
        return (self.rivals["1f1b"].makespan + self.best) / 2

    def stars(self, makespan: float) -> int:
        """Return 1 for a legal step, 2 for 1F1B's, 3 for par, 4 for the best, 5 for less."""
        steps = (self.rivals["1f1b"].makespan, self.par, self.best)
        beaten = makespan < self.best - CLOSE
        return 1 + sum(makespan <= step + CLOSE for step in steps) + beaten

    def __str__(self) -> str:
        """Return the description of the level for a learner."""
        v_shaped = f"stages r and {len(self.placement) - 1}-r on rank r"
        where = "stage r on rank r" if self.chunks == 1 else v_shaped
        each = "" if self.chunks == 1 else f" ({self.limit / self.chunks:g} micro-batches)"
        known = "open: less may be possible" if self.open else "no order is shorter"
        return (
            f"Level {self.number}, {self.title}: {self.task}\n"
            f"  {self.ranks} ranks, {where}\n"
            f"  {self.microbatches} micro-batches, at most {self.limit} in flight on a rank{each}\n"
            f"  1F1B {self.rivals['1f1b'].makespan:g}, par {self.par:g}, best of the library "
            f"{self.best:g} ({known})"
        )


def same_work_on(which: Level, other: tuple[int, ...]) -> Costs:
    """Return the level's costs for another placement, with the same work per rank."""
    own = Schedule("", ((),) * which.ranks, which.placement)
    return same_work(own, which.costs, other)


LEVELS = (
    Level(1, "two ranks", "F, I and W take 1 each, B takes 2.", looped(2), 4, 4),
    Level(2, "no memory to waste", "the same with two in flight.", looped(2), 4, 2),
    Level(3, "four ranks", "the memory of 1F1B's first rank, on all of them.", looped(4), 8, 4),
    Level(4, "one less", "1F1B would be over this limit. The library can be beaten here.",
          looped(4), 8, 3),
    Level(5, "the V", "two half stages per rank, V-shaped; F, I and W of one take 0.5.",
          v_shape(4), 8, 8, HALF),
    Level(6, "three quarters of it", "the same V with six half stages in flight.",
          v_shape(4), 8, 6, HALF),
    Level(7, "few micro-batches", "the V with four of them.", v_shape(4), 4, 8, HALF),
    Level(8, "a slow rank", "rank 2 takes twice as long for everything.",
          looped(4), 8, 4, Costs().on_ranks((1, 1, 0.5, 1), looped(4))),
    Level(9, "slow messages", "a P2P transfer takes half a forward; eight may be in flight.",
          looped(4), 8, 8, Costs(comm=0.5)),
    Level(10, "little W", "as with frozen weights: W takes 0.5, so B takes 1.5.",
          looped(4), 8, 4, Costs(1, 1, 0.5)),
)  # fmt: skip


def level(number: int) -> Level:
    """Return a level by its number. Raises ValueError with the valid numbers."""
    for one in LEVELS:
        if one.number == number:
            return one
    raise ValueError(f"expected a level from 1 to {len(LEVELS)}, got {number!r}")


def begin_with(number: int, name: str = "1f1b") -> str:
    """Return rows of a named schedule for a level, as a start for editing by hand.

    A schedule that breaks the rules of the level is replaced: by 1F1B with fewer first forwards,
    or, for two stages per rank, by one micro-batch after another. Raises ValueError for an unknown
    name.
    """
    which = level(number)
    named = make(name, which.ranks, which.microbatches)
    if which.obeys(named):
        return text(named)
    if which.chunks == 1:
        return text(_few_in_flight(which))
    rows: list[list[str]] = [[] for _ in range(which.ranks)]
    stages = list(enumerate(which.placement))
    for mb in range(which.microbatches):
        for stage, rank in stages:
            rows[rank].append(f"{stage}F{mb}")
        for stage, rank in reversed(stages):
            rows[rank].append(f"{stage}B{mb}")
    return "\n".join(" ".join(row) for row in rows)


def _few_in_flight(which: Level) -> Schedule:
    """Return 1F1B with at most ``limit`` forwards at the beginning."""
    rows, m = [], which.microbatches
    for rank in range(which.ranks):
        first = min(which.ranks - rank, which.limit)
        row = [Action("F", rank, mb) for mb in range(first)]
        for mb in range(m):
            row.append(Action("B", rank, mb))
            if mb + first < m:
                row.append(Action("F", rank, mb + first))
        rows.append(row)
    return Schedule("1f1b", as_rows(rows), which.placement)


def split_backwards(number: int, rows: str) -> str:
    """Return your order of F and I with W actions in its gaps; B counts as I, your Ws are removed.

    Rows that are not a schedule of the level are returned unchanged; ``play`` gives the reasons.
    """
    from course_lib.grading.arena.judge import read

    which = level(number)
    schedule, _ = read(which, rows, limited=False)
    if schedule is None:
        return rows
    order = [
        [a._replace(op="I") if a.op == "B" else a for a in row if a.op != "W"]
        for row in schedule.rows
    ]
    skeleton = Schedule("yours", as_rows(order), which.placement)
    ways = [fill(skeleton, which.costs, which.limit, over) for over in OVERSHOOTS]
    kept = [way for way in ways if which.obeys(way)]
    return text(shortest(kept or ways, which.costs))


def text(schedule: Schedule) -> str:
    """Return rows as ``play`` takes them, in columns."""
    width = max(len(str(action)) for row in schedule.rows for action in row)
    return "\n".join(
        " ".join(f"{action!s:{width}}" for action in row).rstrip() for row in schedule.rows
    )
