"""07-1: 1F1B on three ranks with five micro-batches, traced by hand."""

from __future__ import annotations

from typing import Any

from course_lib.grading.exercise import Wrong
from course_lib.grading.worked import Worked
from course_lib.schedule import Costs, Schedule, from_rows, make, simulate

P, M, F, B = 3, 5, 1, 2


def _rows(schedule: Schedule) -> dict[str, Any]:
    texts = [" ".join(map(str, row)) for row in schedule.rows]
    return {
        "row 0": texts[0],
        "row 1": texts[1],
        "in flight at most, by rank": schedule.peak_in_flight(),
    }


def _worked_out(schedule: Schedule, f: int = F, b: int = B) -> dict[str, Any]:
    """The table as the library computes it."""
    simulation = simulate(schedule, Costs.make(f=f, b=b))
    first = next(span.start for span in simulation.rows[0] if span.op == "B")
    return {
        **_rows(schedule),
        "start of 0B0": first,
        "step": simulation.makespan,
        "bubble of total": simulation.bubble_of_total,
        "bubble of ideal": simulation.bubble_of_ideal,
    }


def _with_first_forwards(extra: int) -> Schedule:
    """1F1B in which every rank but the last begins with ``extra`` forwards more."""
    rows = []
    for rank in range(P):
        first = P - 1 - rank + (extra if rank < P - 1 else 0)
        row = [f"{rank}F{mb}" for mb in range(first)]
        for mb in range(M - first):
            row += [f"{rank}F{first + mb}", f"{rank}B{mb}"]
        rows.append(row + [f"{rank}B{mb}" for mb in range(M - first, M)])
    return from_rows(rows)


RIGHT = _worked_out(make("1f1b", P, M))

BY_HAND = Worked(
    id="07-1",
    title="1F1B traced by hand",
    names=("traced",),
    hints=(
        "Draw three lines and fill them from the left. Rank 2 has no first forwards: it begins to "
        "alternate with its first micro-batch. When does its first backward end?",
        "Rank r begins with p-1-r forwards, then alternates one F and one B until no forward is "
        "left, then does the backwards that are left. An action starts when its rank is free and "
        "what it needs has ended: 0B0 needs 1B0, which needs 2B0.",
        "Row 0 begins 0F0 0F1 0F2 0B0 0F3 0B1, row 1 begins 1F0 1F1 1B0 1F2 1B1. The step is "
        "(m+p-1)(F+B); divide what a rank waits, (p-1)(F+B), by the step, and by m(F+B).",
    ),
    wrong=(
        Wrong(
            _worked_out(make("gpipe", P, M)),
            "that is GPipe: all forwards first. 1F1B does a backward as soon as it can.",
        ),
        Wrong(
            _worked_out(_with_first_forwards(1)),
            "one forward too many before the alternation: rank r begins with p-1-r.",
        ),
        Wrong(
            _worked_out(_with_first_forwards(-1)),
            "one forward too few before the alternation: rank r begins with p-1-r.",
        ),
        Wrong(
            _worked_out(make("naive", P, M)),
            "that is the naive way: a micro-batch goes there and back before the next one starts.",
        ),
        Wrong(
            {**RIGHT, "in flight at most, by rank": [1, 2, 3]},
            "the other way round: rank 0 waits longest for its first backward and keeps the most.",
        ),
        Wrong(
            _worked_out(make("1f1b", P, M), f=1, b=1),
            "here B takes as long as F; it takes twice as long.",
        ),
        Wrong(
            {**RIGHT, "start of 0B0": 3},
            "0B0 waits for 2B0 and then 1B0, though rank 0 is free before.",
        ),
        Wrong(
            {
                **RIGHT,
                "bubble of total": RIGHT["bubble of ideal"],
                "bubble of ideal": RIGHT["bubble of total"],
            },
            "the bases are mixed up: total time includes the bubble, ideal time does not.",
        ),
        Wrong(
            {**RIGHT, "step": (M + P) * (F + B), "bubble of total": P / (M + P)}
            | {"bubble of ideal": P / M},
            "p-1 and not p: a micro-batch has p-1 other ranks to pass.",
        ),
        Wrong(
            {
                **RIGHT,
                "bubble of total": (M - 1) / (M + P - 1),
                "bubble of ideal": (M - 1) / P,
            },
            "m and p are swapped: more ranks wait longer, more micro-batches fill the time.",
        ),
        Wrong(
            {
                **RIGHT,
                "row 0": RIGHT["row 0"].replace("0F", "F").replace("0B", "B"),
                "row 1": RIGHT["row 1"].replace("1F", "F").replace("1B", "B"),
            },
            "a cell begins with its stage, as those of rank 2 begin with 2.",
        ),
        Wrong(
            {**RIGHT, "bubble of total": 100 * 2 / 7, "bubble of ideal": 40},
            "that is in percent; a share lies between 0 and 1 here.",
        ),
        Wrong({**RIGHT, "step": 20}, words="'step': 20 is not right"),
        Wrong({**RIGHT, "row 1": "1F0 1F1 1B0"}, words="expected 10 values, got 3 values"),
    ),
    right=(
        RIGHT,
        {**RIGHT, "start of 0B0": 7, "step": 21, "bubble of total": 2 / 7, "bubble of ideal": 0.4},
    ),
    stub=dict.fromkeys(RIGHT),
    wanted=RIGHT,
)
