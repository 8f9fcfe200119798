"""08-1: ZB-H1 on three ranks with four micro-batches, its Ws put in by hand."""

from __future__ import annotations

from typing import Any

from course_lib.grading.exercise import Wrong
from course_lib.grading.worked import Worked
from course_lib.schedule import Costs, Schedule, from_rows, make, simulate

P, M = 3, 4
ROWS = (
    "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
    "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
    "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
)


def _at_once() -> Schedule:
    """1F1B with each B as I and W."""
    rows = []
    for row in make("1f1b", P, M).rows:
        cells = []
        for a in row:
            ops = "IW" if a.op == "B" else "F"
            cells += [f"{a.stage}{op}{a.mb}" for op in ops]
        rows.append(cells)
    return from_rows(rows)


def _at_the_end() -> Schedule:
    """All Ws behind all Is."""
    rows = []
    for rank, row in enumerate(ROWS):
        cells = [cell for cell in row.split() if "W" not in cell]
        rows.append(cells + [f"{rank}W{mb}" for mb in range(M)])
    return from_rows(rows)


def _worked_out(schedule: Schedule) -> dict[str, Any]:
    """The table as the library computes it."""
    simulation = simulate(schedule, Costs())
    texts = [" ".join(map(str, row)) for row in schedule.rows]
    first = next(span.start for span in simulation.rows[0] if span.op in "BI")
    return {
        **{f"row {rank}": text for rank, text in enumerate(texts)},
        "start of 0I0": first,
        "step": simulation.makespan,
        "in flight at most, by rank": schedule.peak_in_flight(),
        "bubble of total": simulation.bubble_of_total,
        "step of 1F1B": simulate(make("1f1b", P, M), Costs()).makespan,
        "W at once": simulate(_at_once(), Costs()).makespan,
    }


RIGHT = _worked_out(from_rows([row.split() for row in ROWS]))

BY_HAND = Worked(
    id="08-1",
    title="where W goes, by hand",
    names=("filled",),
    hints=(
        "Draw three lines and fill them from the left, all ranks together. Before its first I a "
        "rank has no W to do. When rank 2 has done F0, I0, F1, I1, F2, I2, how many are in flight?",
        "In flight counts from F to W. Rank 2 may not do F3 before W0. Rank 1 has F0, F1, F2 in "
        "flight when F3 is next; so has rank 0.",
        "Rank 0 does its first W after I0, rank 1 after I1, rank 2 after I2. From then on a W "
        "follows each I. What is left comes at the end.",
    ),
    wrong=(
        Wrong(
            _worked_out(_at_once()) | {"in flight at most, by rank": [3, 3, 3]},
            "here every W follows its own I at once. Only rank 0 must do so: where a rank need not "
            "wait and is not full, the next F or I comes first.",
        ),
        Wrong(
            _worked_out(_at_the_end()),
            "here all Ws wait for the end; W0 must come before F3, which would be the fourth in "
            "flight.",
        ),
        Wrong(
            {**RIGHT, "in flight at most, by rank": [3, 2, 1]},
            "that is counted from F to I; x and dy are kept until W.",
        ),
        Wrong(
            {**RIGHT, "start of 0I0": 3},
            "rank 0 is free then, but I0 must come from rank 2 over rank 1.",
        ),
        Wrong(
            {**RIGHT, "start of 0I0": 7},
            "that is 1F1B, where whole backwards are waited for; here only I is.",
        ),
        Wrong(
            {**RIGHT, "bubble of total": 1 / 6},
            "that is the share of ideal time, 12; the step itself is the base.",
        ),
        Wrong({**RIGHT, "step": 12}, "that is a rank's work; it also waits."),
        Wrong(
            {**RIGHT, "step of 1F1B": 14},
            "with whole backwards the gap at the end stays: (m+p-1)(F+B).",
        ),
        Wrong(
            {**RIGHT, "W at once": 18},
            "that is 1F1B. With W at once, I is still sent before W: the gradient comes sooner.",
        ),
        Wrong(
            {**RIGHT, "W at once": 14},
            "too early: with W at once nothing is left to fill the gaps at the end.",
        ),
        Wrong({**RIGHT, "row 0": RIGHT["row 0"].replace("0I3 0W3", "0W3 0I3")}, words="'row 0': "),
        Wrong({**RIGHT, "row 2": "2F0 2I0"}, words="expected 12 values, got 2 values"),
        Wrong({**RIGHT, "bubble of total": 0.143}, words="type it as a fraction"),
    ),
    right=(RIGHT, {**RIGHT, "step": 14, "bubble of total": 2 / 14, "start of 0I0": 5}),
    stub=dict.fromkeys(RIGHT),
    wanted=RIGHT,
)
