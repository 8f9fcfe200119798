"""The bubble of a pipeline: by formula where the papers give one, and by simulation.

The simulation uses the seconds of F, I and W of every stage, so it accounts for an uneven split,
the LM head on the last stage and the time of a message. Its cost is bounded. After the first
micro-batches, every further p of them add the same time, so fewer are simulated
(:func:`shortened`). The bubble grows as p - 1, so a pipeline of many ranks is simulated with fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from course_lib.schedule import Costs, Schedule, make, placement, predicted_bubble, simulate
from course_lib.schedule.named import PLANNED

SIMULATED = 1024  # micro-batches x stages that are simulated in full: some 20 ms
_make = lru_cache(maxsize=256)(make)


class StageSeconds(NamedTuple):
    """Seconds of one micro-batch on one virtual stage: forward, and the halves of backward."""

    f: float
    i: float
    w: float

    @property
    def total(self) -> float:
        """Seconds of forward and backward."""
        return self.f + self.i + self.w


@dataclass(frozen=True)
class Pipeline:
    """The pipeline of one step.

    ``work`` is the time in seconds in which the busiest rank (``rank``) works, ``bubble`` the time
    in which it waits. ``by_formula`` is the textbook bubble as a share of total time, for equal
    stages and no communication; None where there is no formula. ``simulated`` counts the
    micro-batches that were simulated.
    """

    rank: int
    work: float
    bubble: float
    by_formula: float | None
    simulated: int

    @property
    def seconds(self) -> float:
        """Seconds from the first forward to the last backward."""
        return self.work + self.bubble

    @property
    def of_total(self) -> float:
        """The bubble as a share of the total time."""
        return self.bubble / self.seconds

    @property
    def of_ideal(self) -> float:
        """The bubble as a share of the working time."""
        return self.bubble / self.work


def pipeline(
    name: str,
    ranks: int,
    micro_batches: int,
    stages: Sequence[StageSeconds],
    *,
    chunks: int | None = None,
    message: float = 0.0,
    simulated: bool = True,
) -> Pipeline:
    """Return work and bubble of the schedule ``name``; ``message`` is the seconds of one transfer.

    With ``simulated=False`` the formula is used where there is one, with the mean work of the other
    ranks, and the time that a message takes through all ranks and back. Raises ValueError when the
    number of stages is not that of the schedule.
    """
    rank_of = placement(name, ranks, chunks)
    if len(stages) != len(rank_of):
        raise ValueError(
            f"expected the seconds of {len(rank_of)} stages for {name} on {ranks} ranks, got "
            f"{len(stages)}"
        )
    loads = [0.0] * ranks
    for stage, rank in enumerate(rank_of):
        loads[rank] += stages[stage].total * micro_batches
    busiest = max(range(ranks), key=loads.__getitem__)
    work, share = loads[busiest], _formula(name, ranks, micro_batches, chunks, stages)
    if ranks == 1:
        return Pipeline(busiest, work, 0.0, 0.0, 0)
    if share is not None and not simulated:
        others = (sum(loads) - work) / (ranks - 1)  # a rank waits for the work of the others
        hops = 2 * sum(here != there for here, there in pairwise(rank_of)) * ranks // len(rank_of)
        starts = (ranks - 1) * _mean(stages).f if name in ("zb-h2", "zb-v") else 0.0
        wait = others * share / (1 - share) + starts + hops * message
        return Pipeline(busiest, work, wait, share, 0)
    most = _most_ranks(name, len(rank_of) // ranks)
    larger = 1.0
    if ranks > most:
        larger = (ranks - 1) / (most - 1)
        micro_batches = max(2, round(micro_batches * most / ranks))
        stages, ranks = [_mean(stages)] * (most * len(rank_of) // ranks), most
    costs = Costs(1.0, 1.0, 1.0, message, per_stage=tuple((f, i, w) for f, i, w in stages))
    short = shortened(name, ranks, micro_batches, len(stages))
    waits = [_wait(name, ranks, m, chunks, costs) for m in short]
    wait = waits[-1]
    if len(short) > 1:
        wait += (waits[1] - waits[0]) / (short[1] - short[0]) * (micro_batches - short[1])
    return Pipeline(busiest, work, max(0.0, wait * larger), share, short[-1])


def shortened(name: str, ranks: int, micro_batches: int, stages: int) -> list[int]:
    """Return the numbers of micro-batches to simulate instead of ``micro_batches``.

    All have the same remainder by p. A zero-bubble schedule takes long to plan, and from 2 p
    micro-batches on its bubble is nearly constant. That of the others grows evenly, because each
    round waits for messages and for the slowest stage: two lengths give the slope.
    """
    rest = micro_batches % ranks
    if name in PLANNED:
        return [micro_batches if micro_batches < 3 * ranks else 2 * ranks + rest]
    if micro_batches * stages <= SIMULATED or micro_batches < 4 * ranks:
        return [micro_batches]
    return [2 * ranks + rest, 3 * ranks + rest]


def _most_ranks(name: str, chunks: int) -> int:
    """Return on how many ranks a schedule is simulated; the bubble of more grows as p - 1."""
    planned = {"zb-h1": 16, "zb-h2": 8, "zb-v": 16}
    return planned.get(name, max(2, 96 // chunks))


def _mean(stages: Sequence[StageSeconds]) -> StageSeconds:
    """Return the mean seconds of a stage."""
    return StageSeconds(*(sum(costs) / len(stages) for costs in zip(*stages, strict=True)))


def _wait(name: str, ranks: int, m: int, chunks: int | None, costs: Costs) -> float:
    """Return the seconds that the busiest rank waits, simulated."""
    result = simulate(_schedule(name, ranks, m, chunks, costs), costs)
    return result.makespan - result.work


def _schedule(name: str, ranks: int, m: int, chunks: int | None, costs: Costs) -> Schedule:
    """Return the schedule; a zero-bubble schedule is planned for these costs."""
    if name in PLANNED:
        return _make(name, ranks, m, chunks, costs)
    return _make(name, ranks, m, chunks)


def _formula(
    name: str, ranks: int, m: int, chunks: int | None, stages: Sequence[StageSeconds]
) -> float | None:
    """Return the textbook bubble of total, at the mean cost of a stage; None if there is none."""
    try:
        return predicted_bubble(name, ranks, m, chunks, Costs(*_mean(stages)))
    except ValueError:
        return None
