"""Answers that were written for the first edition still get full marks, unchanged.

tests/support/first_edition holds the solutions of the first edition as a learner would have saved
them: answer cells only. A solution whose cells have not changed is graded elsewhere.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attack import DEADLINE, written

from course_lib.grading import registry
from course_lib.grading.exercise import each
from course_lib.grading.run import grade

ROOT = Path(__file__).parents[2]
SAVED = sorted((ROOT / "tests" / "support" / "first_edition").glob("*.ipynb"))


def answers(path: Path) -> dict[str, list[str]]:
    """The sources of the answer cells of a notebook, by exercise."""
    found: dict[str, list[str]] = {}
    for cell in json.loads(path.read_text())["cells"]:
        course = cell["metadata"].get("course", {})
        if cell["cell_type"] == "code" and course.get("role") == "answer":
            found.setdefault(course["ex"], []).append("".join(cell["source"]))
    return found


def differing() -> list[tuple[Path, str]]:
    """Exercises whose solution has changed since."""
    return [
        (path, ex)
        for path in SAVED
        for ex, cells in answers(path).items()
        if answers(ROOT / "solutions" / path.name).get(ex) != cells
    ]


def test_every_exercise_of_the_first_edition_is_here():
    saved = [ex for path in SAVED for ex in answers(path)]
    assert (len(SAVED), len(saved), len(set(saved))) == (14, 67, 67)
    today = {ex for path in SAVED for ex in answers(ROOT / "solutions" / path.name)}
    assert set(saved) <= today


@pytest.mark.parametrize("ex", [ex for _, ex in differing()])
def test_an_answer_of_the_first_edition_gets_full_marks(ex):
    exercise = registry.find(ex)
    answers = each(written(exercise, "tests/support/first_edition"))
    verdict = exercise.judge(answers, 3, DEADLINE)
    assert verdict.passed == verdict.total > 0, verdict.line


@pytest.mark.parametrize("path", SAVED[:8:4], ids=lambda path: path.stem)
def test_a_notebook_of_the_first_edition_is_graded(path):
    """Of the other lessons as well in make test-long."""
    assert_full_marks(path)


@pytest.mark.long
@pytest.mark.parametrize("path", SAVED, ids=lambda path: path.stem)
def test_every_notebook_of_the_first_edition_is_graded(path):
    assert_full_marks(path)


def assert_full_marks(path: Path) -> None:
    scores = grade(path, ROOT, seed=3).scores
    saved = [scores[ex] for ex in answers(path)]
    assert saved
    assert all(score.passed == score.total > 0 for score in saved), saved
