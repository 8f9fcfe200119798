"""Exercises worked by hand: what counts as the same entry, and what a verdict tells."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from attack import Attacks, answers_to, written

from course_lib.grading import registry
from course_lib.grading.exercise import Wrong, each
from course_lib.grading.worked import Worked, same

WORKED = [
    exercise
    for lesson in registry.lesson_numbers()
    for exercise in registry.exercises(lesson)
    if isinstance(exercise, Worked)
]
TABLE = Worked(
    id="99-1",
    title="a table",
    names=("table",),
    hints=("a", "b", "c"),
    wrong=(
        Wrong({"sum": 5.0, "row": "0F0 0B0", "turns": [1, 2], "share": 0.5}, "That is the mean."),
        Wrong(
            {"sum": 10.0, "row": "0B0 0F0", "turns": [1, 2], "share": 0.5},
            "Backward needs its forward.",
        ),
    ),
    right=({"sum": 10.0, "row": "0F0  0B0", "turns": (1, 2), "share": Fraction(7, 30)},),
    stub={"sum": None, "row": None, "turns": None, "share": None},
    wanted={"sum": 10, "row": "0F0 0B0", "turns": [1, 2], "share": Fraction(7, 30)},
)


@pytest.mark.parametrize("exercise", [*WORKED, TABLE], ids=lambda exercise: exercise.id)
def test_each_table_is_attacked_and_a_stub_scores_nothing(exercise):
    table = exercise is TABLE
    known = Attacks(TABLE.wrong, TABLE.right) if table else answers_to(exercise)
    stub = TABLE.stub if table else written(exercise, "exercises")[0]
    for wrong in known.wrong:
        verdict = exercise.judge([each(wrong.answer)[0]], 0)
        assert not verdict.ok
        assert wrong.wanted in verdict.message
    for right in known.right:
        assert exercise.judge(each(right), 0).ok
    for nothing in (stub, None, {}, [], dict.fromkeys(exercise.wanted), lambda: 1):
        assert exercise.judge([nothing], 0).passed == 0
    for constant in (0, 1, "", "0F0", [], [0]):
        assert not exercise.judge([dict.fromkeys(exercise.wanted, constant)], 0).ok
    assert len(exercise.hints) == 3


@pytest.mark.parametrize("exercise", WORKED, ids=lambda exercise: exercise.id)
def test_each_table_has_six_wrong_answers(exercise):
    assert len(answers_to(exercise).wrong) >= 6


@pytest.mark.parametrize(
    ("value", "wanted", "equal"),
    [
        (10.0, 10, True),
        (Fraction(1, 3), 1 / 3, True),
        ((1, 2), [1.0, 2.0], True),
        (" 0F0   0B0 ", "0F0 0B0", True),
        ("0F0, 0B0", "0F0 0B0", True),
        (np.array([1, 2]), [1, 2], True),
        (np.float32(10), 10, True),
        (np.ndarray, [1, 2], False),
        (True, 1, False),
        ("10", 10, False),
        (10, "10", False),
        ([1, 2], [1, 2, 3], False),
        ([1, [2, 3]], [1, [2, 4]], False),
        (float("nan"), 1.0, False),
        (1, True, False),
        (None, 1, False),
    ],
)
def test_entries_that_are_the_same(value, wanted, equal):
    assert same(value, wanted) is equal


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"sum": None}, "'sum' is not filled in yet"),
        ({"sum": 5}, "'sum': That is the mean."),
        ({"sum": 11}, "'sum': 11 is not right"),
        ({"row": "0B0 0F0"}, "'row': Backward needs its forward."),
        ({"row": "0F0 1B0"}, "'row': '0F0 1B0' is not right: look at '1B0', number 2"),
        ({"row": "0F0"}, "expected 2 values, got 1 value"),
        ({"share": 0.233}, "'share': 0.233 is not right: it looks rounded; type it as a fraction"),
        ({"share": 0.3}, "'share': 0.3 is not right"),
        ({"turns": [1]}, "'turns': [1] is not right: expected 2 values, got 1 value"),
        ({"turns": 3}, "'turns': 3 is not right; expected 2 values"),
    ],
)
def test_the_verdict_names_the_entry_and_never_what_is_right(entry, words):
    verdict = TABLE.judge([{**TABLE.right[0], **entry}], 0)
    assert (verdict.passed, verdict.total) == (3, 4)
    assert words in verdict.message


def test_a_table_of_another_kind_is_said():
    assert "a dict with the keys 'sum', 'row'" in TABLE.judge([[1]], 0).message
    assert "in table, but 'row' is missing" in TABLE.judge([{"sum": 1}], 0).message
