"""07-3: the rows of 1F1B, judged by what they do: legal, how long, how much in flight."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from course_lib.grading.exercise import Case, Function, Instance, Wrong
from course_lib.grading.rows import schedule_of
from course_lib.schedule import (
    Costs,
    Schedule,
    gpipe,
    naive,
    one_f_one_b,
    simulate,
)

Cells = list[list[str]]
COSTS = Costs.make(f=1, b=2)


def _cells(schedule: Schedule) -> Cells:
    return [[str(action) for action in row] for row in schedule.rows]


def _facts(value: Any) -> dict[str, Any]:
    """What rows do, whatever cells they hold."""
    schedule = schedule_of(value)
    return {
        "ranks": schedule.ranks,
        "micro-batches": schedule.microbatches,
        "step": round(simulate(schedule, COSTS).makespan, 6),
        "in flight": schedule.peak_in_flight(),
    }


def _sizes(p: tuple[int, int], more: tuple[int, int]) -> Any:
    """Draws three sizes with m = p + ``more``, at least 1; not all of one p."""

    def draw(rng: random.Random) -> list[Instance]:
        ranks = rng.sample(range(p[0], p[1] + 1), 3)
        return [{"p": size, "m": max(1, size + rng.randint(*more))} for size in ranks]

    return draw


# The three parts, with other numbers than they should have.


def _in_parts(p: int, m: int, first_forwards: Sequence[int]) -> Cells:
    rows = []
    for rank, first in enumerate(first_forwards):
        row = [f"{rank}F{mb}" for mb in range(first)]
        for mb in range(m - first):
            row += [f"{rank}F{first + mb}", f"{rank}B{mb}"]
        rows.append(row + [f"{rank}B{mb}" for mb in range(max(m - first, 0), m)])
    return rows


def _three_parts(p: int, m: int) -> Cells:
    return _in_parts(p, m, [min(p - 1 - rank, m) for rank in range(p)])


def _one_more(p: int, m: int) -> Cells:
    return _in_parts(p, m, [min(p - rank, m) for rank in range(p)])


def _one_less(p: int, m: int) -> Cells:
    return _in_parts(p, m, [min(max(p - 2 - rank, 0), m) for rank in range(p)])


def _reversed_ranks(p: int, m: int) -> Cells:
    return _in_parts(p, m, [min(rank, m) for rank in range(p)])


def _more_than_there_are(p: int, m: int) -> Cells:
    return _in_parts(p, m, [p - 1 - rank for rank in range(p)])


def _without_the_end(p: int, m: int) -> Cells:
    return [row[: 2 * m - min(p - 1 - rank, m)] for rank, row in enumerate(_three_parts(p, m))]


def _one_stage(p: int, m: int) -> Cells:
    return [["0" + cell.lstrip("0123456789") for cell in row] for row in _three_parts(p, m)]


def _backward_first(p: int, m: int) -> Cells:
    """Alternates B and F where it must be F and B."""
    rows = []
    for rank in range(p):
        first = min(p - 1 - rank, m)
        row = [f"{rank}F{mb}" for mb in range(first)]
        for mb in range(m - first):
            row += [f"{rank}B{mb}", f"{rank}F{first + mb}"]
        rows.append(row + [f"{rank}B{mb}" for mb in range(m - first, m)])
    return rows


def _newest_first(p: int, m: int) -> Cells:
    """The backward takes the newest micro-batch, as from a stack."""
    rows = []
    for cells in _three_parts(p, m):
        stack: list[str] = []
        row = []
        for cell in cells:
            if "F" in cell:
                stack.append(cell)
            row.append(cell if "F" in cell else stack.pop().replace("F", "B"))
        rows.append(row)
    return rows


def _from_one(p: int, m: int) -> Cells:
    rows = _three_parts(p, m + 1)
    return [[cell for cell in row if not cell.endswith(("F0", "B0"))] for row in rows]


def _by_room(p: int, m: int) -> list[str]:
    """A forward while there is room for one more, else a backward; rows as texts."""
    rows = []
    for rank in range(p):
        done = {"F": 0, "B": 0}
        row = ""
        while done["B"] < m:
            op = "F" if done["F"] < min(m, done["B"] + p - rank) else "B"
            row += f" {rank}{op}{done[op]}"
            done[op] += 1
        rows.append(row)
    return rows


ROWS = Function(
    id="07-3",
    title="the rows of 1F1B",
    names=("rows_of_1f1b",),
    hints=(
        "Take one rank and write its row for p=4, m=6 on paper. How many forwards come before its "
        "first backward? How many backwards come after its last forward?",
        "Rank r may have p-r micro-batches in flight. As long as there is room and a forward is "
        "left, the next action is a forward, else a backward.",
        "Count forwards f and backwards b. While b < m: if f < m and f - b < p - rank, append "
        "F{f} and raise f, else append B{b} and raise b.",
    ),
    wrong=(
        Wrong(
            lambda p, m: _cells(gpipe(p, m)),
            "This is GPipe: legal and as fast, but every rank keeps all m micro-batches.",
        ),
        Wrong(
            lambda p, m: _cells(naive(p, m)),
            "Every rank alternates from its first forward on, and one works at a time: that is the "
            "naive way. Rank r begins with p-1-r forwards.",
        ),
        Wrong(_one_more, "One forward too many at first: it is kept longer and gains nothing."),
        Wrong(
            _one_less,
            "One forward too few at first: each rank waits where it could compute.",
        ),
        Wrong(
            _reversed_ranks,
            "Rank r begins with r forwards: it is rank 0 that needs the most, p-1-r are right.",
        ),
        Wrong(
            lambda p, m: _three_parts(p, m)[::-1],
            "The rows are in reversed order: row r is that of rank r, which holds stage r.",
        ),
        Wrong(
            _more_than_there_are,
            "With fewer micro-batches than p-1-r a rank can begin with m forwards at most.",
        ),
        Wrong(_without_the_end, words="has no backward"),
        Wrong(_one_stage, words="a stage's weights are on one rank"),
        Wrong(
            _backward_first,
            "In the alternating part the forward comes before the backward.",
        ),
        Wrong(
            _newest_first,
            "The backward takes the newest micro-batch; it must be the oldest in flight.",
        ),
        Wrong(_from_one, "Micro-batches are numbered from 0."),
        Wrong(lambda p, m: _three_parts(m, p), "p and m are swapped."),
        Wrong(lambda p, m: _cells(one_f_one_b(p, m)), words="this is what you are asked to write"),
        Wrong(
            lambda p, m: [[(0, "F", 0)]], words="expected a row to be a list of cells such as '0F3'"
        ),
        Wrong(lambda p, m: None, words="expected a list of rows, one per rank"),
    ),
    right=(_three_parts, _by_room),
    stub=lambda p, m: None,
    reference=lambda p, m: _cells(one_f_one_b(p, m)),
    refused=("course_lib.schedule.named:one_f_one_b",),
    normal=_facts,
    drawn=(
        Case("more micro-batches than ranks", _sizes((2, 6), (1, 8))),
        Case("fewer micro-batches than ranks", _sizes((3, 8), (-5, -1))),
        Case("one rank too", lambda rng: [{"p": 1, "m": rng.randint(2, 5)}, {"p": 3, "m": 4}]),
    ),
)
