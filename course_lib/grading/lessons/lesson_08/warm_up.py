"""08-2: how many forwards a rank of interleaved 1F1B does before it alternates."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from course_lib.grading.answers import NotRight, shown
from course_lib.grading.exercise import Case, Function, Instance, Wrong
from course_lib.schedule import interleaved


def _warm_up(p: int, v: int, m: int, rank: int) -> int:
    return min((v - 1) * p + 2 * (p - 1 - rank), m * v)


def _some(p: tuple[int, int], v: tuple[int, int], rounds: tuple[int, int]) -> Callable[..., Any]:
    """Draws all ranks of one pipeline."""

    def draw(rng: random.Random) -> list[Instance]:
        ranks, chunks = rng.randint(*p), rng.randint(*v)
        m = ranks * rng.randint(*rounds)
        return [{"p": ranks, "v": chunks, "m": m, "rank": rank} for rank in range(ranks)]

    return draw


def _as_count(value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise NotRight(f"a whole number of forwards is wanted, not {shown(value)}")
    return int(value)


def _by_adding(p: int, v: int, m: int, rank: int) -> int:
    count = 0
    for _ in range(v - 1):
        count += p
    for _ in range(rank + 1, p):
        count += 2
    return count if count < m * v else m * v


def _from_the_rows(p: int, v: int, m: int, rank: int) -> int:
    row = interleaved(p, m, v).rows[rank]
    return next(place for place, action in enumerate(row) if action.op == "B") - 1


WARM_UP = Function(
    id="08-2",
    title="the warm-up of interleaving",
    names=("warm_up",),
    hints=(
        "The last rank has no rank behind it. What must it have done before the first micro-batch "
        "comes to its last chunk?",
        "(v-1) p forwards for the chunks but the last, and two more for each of the p-1-rank ranks "
        "behind. What if that is more than there are?",
        "min((v - 1) * p + 2 * (p - 1 - rank), m * v).",
    ),
    wrong=(
        Wrong(
            lambda p, v, m, rank: p - 1 - rank,
            "That is 1F1B with one stage a rank: all chunks but the last come before it.",
        ),
        Wrong(
            lambda p, v, m, rank: min((v - 1) * p + (p - 1 - rank), m * v),
            "One more for each rank behind: it must be two, for the way there and the way back.",
        ),
        Wrong(
            lambda p, v, m, rank: min(2 * (p - 1 - rank), m * v),
            "The chunks before the last are missing: (v-1) p forwards.",
        ),
        Wrong(
            lambda p, v, m, rank: min(v * p + 2 * (p - 1 - rank), m * v),
            "All v chunks are counted for the first round; its last chunk is where alternating "
            "begins: v-1.",
        ),
        Wrong(
            lambda p, v, m, rank: (v - 1) * p + 2 * (p - 1 - rank),
            "There are no more than m v forwards: where m is p, that is less.",
        ),
        Wrong(
            lambda p, v, m, rank: min((v - 1) * p + 2 * rank, m * v),
            "The ranks are the other way round: it is rank 0 that has most ranks behind it.",
        ),
        Wrong(
            lambda p, v, m, rank: min((v - 1) * p + 2 * (p - rank), m * v),
            "p-1-rank ranks are behind, not p-rank.",
        ),
        Wrong(
            lambda p, v, m, rank: min((v - 1) * m + 2 * (p - 1 - rank), m * v),
            "Micro-batches go in rounds of p, not of m: that is breadth first.",
        ),
        Wrong(
            lambda p, v, m, rank: min((v - 1) * p + 2 * (p - 1 - rank), m * v) + 1,
            "One too many: the forward of the first pair belongs to the alternating part.",
        ),
        Wrong(
            lambda p, v, m, rank: min((v - 1) * p + 2 * (p - 1 - rank), m),
            "The limit is m v forwards: a micro-batch has one for each chunk.",
        ),
        Wrong(lambda p, v, m, rank: None, words="a whole number of forwards is wanted"),
        Wrong(_from_the_rows, words="this is what you are asked to write"),
    ),
    right=(_by_adding,),
    stub=lambda p, v, m, rank: None,
    reference=_warm_up,
    refused=("course_lib.schedule.named:interleaved",),
    normal=_as_count,
    drawn=(
        Case("two chunks", _some((3, 8), (2, 2), (3, 5))),
        Case("more chunks", _some((3, 8), (3, 5), (3, 5))),
        Case("as few micro-batches as ranks", _some((3, 8), (2, 4), (1, 1))),
    ),
)
