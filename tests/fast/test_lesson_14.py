"""Lesson 14: what exercise 14-1 prints for the learner is what its grader judges by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from course_lib.grading.graders.judge import lesson_14 as judge
from course_lib.grading.source import read_lesson

SOURCE = Path(__file__).parents[2] / "notebooks" / "14_the_decision.py"


@pytest.fixture(scope="module")
def given() -> dict[str, Any]:
    """The names of the cell that is given with 14-1."""
    cells = read_lesson(SOURCE).cells
    (cell,) = [cell for cell in cells if (cell.ex, cell.role) == ("14-1", "given")]
    space: dict[str, Any] = {}
    exec(cell.source, space)
    return space


def test_the_twenty_clusters_are_those_that_are_graded(given):
    assert given["CLUSTERS"] == judge.CASES
    assert len(judge.CHOOSE.cases) == 20
    assert {4, 12, 20} <= {gpus for _, gpus, _, _ in judge.CASES}
    assert given["MODELS"] == judge.MODELS


@pytest.mark.parametrize("row", judge.CASES, ids=str)
def test_bytes_and_seconds_are_those_of_the_grader(given, row):
    args = judge._instance(*row)
    for layout in list(judge.layouts(**args))[:20]:
        assert given["needed"](args["model"], layout) == judge.needed(args["model"], layout)
        mine, theirs = (
            space(args["model"], layout, args["per_node"])
            for space in (given["seconds"], judge.seconds)
        )
        assert mine == theirs
