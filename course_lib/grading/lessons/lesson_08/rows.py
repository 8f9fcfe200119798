"""08-4: the rows of ZB-H1, judged by what they do: legal, how long, how much in flight."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from course_lib.grading.answers import NotRight
from course_lib.grading.exercise import Case, Function, Instance, Wrong
from course_lib.grading.rows import schedule_of
from course_lib.schedule import (
    Costs,
    from_rows,
    looped,
    lower_bound,
    one_f_one_b,
    simulate,
    zb_h1,
    zb_h2,
)

Cells = list[list[str]]


def _facts(value: Any) -> dict[str, Any]:
    """What rows do, whatever cells they hold."""
    schedule = schedule_of(value)
    if any(action.op == "B" for row in schedule.rows for action in row):
        raise NotRight("there are whole backwards (B) in it: every one is to be an I and a W")
    p, m = schedule.ranks, schedule.microbatches
    return {
        "ranks": p,
        "micro-batches": m,
        "one stage a rank, in order": schedule.placement == looped(p),
        "step": round(simulate(schedule, Costs()).makespan, 6),
        "in flight above p": [peak for peak in schedule.peak_in_flight() if peak > p],
    }


def _right(p: int, m: int) -> Cells:
    return _delayed(p, m, lambda rank: rank)


def _delayed(p: int, m: int, delay: Callable[[int], int], firsts: int = 0) -> Cells:
    """F and I as in 1F1B, with ``firsts`` forwards more; rank r does W ``delay(r)`` Is late."""
    rows = []
    for rank in range(p):
        late, first = delay(rank), min(p - rank + firsts, m)
        row = [f"{rank}F{mb}" for mb in range(first)]
        for mb in range(m):
            row.append(f"{rank}I{mb}")
            if mb >= late:
                row.append(f"{rank}W{mb - late}")
            if mb + first < m:
                row.append(f"{rank}F{mb + first}")
        rows.append(row + [f"{rank}W{mb}" for mb in range(max(0, m - late), m)])
    return rows


def _by_turns(p: int, m: int) -> list[str]:
    """In turns of I, W and F, each where there is one; rows as texts."""
    rows = []
    for rank in range(p):
        row = " ".join(f"{rank}F{mb}" for mb in range(p - rank))
        for turn in range(m + rank):
            for op, mb in (("I", turn), ("W", turn - rank), ("F", turn + p - rank)):
                if 0 <= mb < m:
                    row += f" {rank}{op}{mb}"
        rows.append(row)
    return rows


def _whole(p: int, m: int) -> Cells:
    return [[str(action) for action in row] for row in one_f_one_b(p, m).rows]


def _w_first(p: int, m: int) -> Cells:
    swap = {"I": "W", "W": "I"}
    return [[c[0] + swap.get(c[1], c[1]) + c[2:] for c in row] for row in _right(p, m)]


def _without_the_end(p: int, m: int) -> Cells:
    return [row[:-1] for row in _right(p, m)]


def _one_stage(p: int, m: int) -> Cells:
    return [["0" + cell.lstrip("0123456789") for cell in row] for row in _right(p, m)]


def _from_library(make: Callable[..., Any]) -> Callable[[int, int], Cells]:
    return lambda p, m: [[str(action) for action in row] for row in make(p, m).rows]


def _some(p: tuple[int, int], more: tuple[int, int]) -> Callable[..., list[Instance]]:
    """Draws two sizes with m = p + ``more``."""

    def draw(rng: random.Random) -> list[Instance]:
        return [
            {"p": ranks, "m": ranks + rng.randint(*more)}
            for ranks in rng.sample(range(p[0], p[1] + 1), 2)
        ]

    return draw


def _shortest(p: int, m: int) -> Cells:
    """The reference; no order is shorter."""
    rows = _right(p, m)
    step = simulate(from_rows(rows), Costs()).makespan
    assert step == lower_bound(looped(p), m, Costs()), (p, m)
    return rows


ROWS = Function(
    id="08-4",
    title="the rows of ZB-H1",
    names=("rows_of_zb_h1",),
    hints=(
        "Write the three rows of exercise 08-1 under each other. How many Is stand before the "
        "first W of rank 0, 1, 2?",
        "F and I as in 1F1B: p-r forwards, then one I and one F by turns. On rank r W of "
        "micro-batch k comes right after I of micro-batch k+r, before the F.",
        "After p-rank forwards, for mb in range(m): I{mb}; if mb >= rank: W{mb-rank}; if "
        "mb+p-rank < m: F{mb+p-rank}. Then the Ws that are left.",
    ),
    wrong=(
        Wrong(
            lambda p, m: _delayed(p, m, lambda rank: 0),
            "Every W follows its I at once: then the step ends with a gap on the ranks in front. "
            "Put W off where a rank need not do it yet.",
        ),
        Wrong(
            lambda p, m: _delayed(p, m, lambda rank: m),
            "All Ws wait for the end: the step is short, but all m micro-batches are in flight.",
        ),
        Wrong(
            lambda p, m: _delayed(p, m, lambda rank: p - 1 - rank),
            "The delay is the other way round: rank 0 has p forwards in flight before its first I "
            "and no room to put W off; the last rank has most.",
        ),
        Wrong(
            lambda p, m: _delayed(p, m, lambda rank: p - 1),
            "Every rank puts W off by p-1: those in front are then above p in flight.",
        ),
        Wrong(
            lambda p, m: _delayed(p, m, lambda rank: rank + 1),
            "W is put off by one too many: p+1 are in flight.",
        ),
        Wrong(_whole, words="there are whole backwards (B) in it"),
        Wrong(_w_first, words="which it needs"),
        Wrong(_without_the_end, words="half a backward"),
        Wrong(_one_stage, words="a stage's weights are on one rank"),
        Wrong(lambda p, m: _right(m, p), "p and m are swapped."),
        Wrong(_from_library(zb_h1), words="this is what you are asked to write"),
        Wrong(_from_library(zb_h2), words="this is what you are asked to write"),
        Wrong(
            lambda p, m: [[(0, "F", 0)]], words="expected a row to be a list of cells such as '0F3'"
        ),
        Wrong(lambda p, m: None, words="expected a list of rows, one per rank"),
    ),
    right=(_right, _by_turns),
    stub=lambda p, m: None,
    reference=_shortest,
    refused=(
        "course_lib.schedule.zero_bubble:zb_h1",
        "course_lib.schedule.zero_bubble:zb_h2",
        "course_lib.schedule.zero_bubble:looped_skeletons",
        "course_lib.schedule.fill:fill",
        "course_lib.schedule.search:searched",
    ),
    normal=_facts,
    drawn=(
        Case("twice as many micro-batches and more", _some((3, 6), (6, 9))),
        Case("a few more than ranks", _some((3, 6), (1, 3))),
        Case(
            "as many as ranks, and two ranks",
            lambda rng: [{"p": 2, "m": rng.randint(3, 6)}, {"p": 4, "m": 4}],
        ),
    ),
)
