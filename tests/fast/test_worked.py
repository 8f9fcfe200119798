"""Exercises worked by hand: what counts as the same entry, and what a verdict tells."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
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
        (np.int64(10), 10, True),
        ([np.int64(1), np.float64(2)], [1, 2], True),
        (torch.tensor([1, 2]), [1, 2], True),
        (torch.tensor(2.5), 2.5, True),
        (Decimal("2.7"), 2.7, True),
        (Decimal("2.71"), 2.7, False),
        (Decimal("NaN"), 2.7, False),
        (Fraction(27, 10), 2.7, True),
        (((1,), (2,)), [[1], [2]], True),
        ([1, 2], (1, 2), True),
        ({1, 2}, [1, 2], False),
        ("Network", "network", True),
        (" 'NETWORK'. ", "network", True),
        ("(edc), (b); (a)", "edc b a", True),
        ("EDC b a", "edc b a", True),
        ("edc | b | a", "edc b a", True),
        ("ed c b a", "edc b a", False),
        ("", "network", False),
        ("...", "network", False),
        (10**400, 10, False),
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
    ("value", "equal"),
    [
        ([[12, 13], [9, 11, 13]], True),
        ([{13, 12}, frozenset({9, 11, 13})], True),
        (([13, 12], (13, 9, 11)), True),
        ([np.array([13, 12]), [np.int64(9), 11, 13]], True),
        ([[9, 11, 13], [12, 13]], False),  # one group for each axis: their order counts
        ([{12, 13}, {9, 11}], False),
        ([[12, 13], [9, 11, 11]], False),
        ([{12, "13"}, {9, 11, 13}], False),
        ({12, 13}, False),
        ([12, 13], False),
        ("12 13", False),
    ],
)
def test_groups_of_ranks_have_no_order(value, equal):
    assert same(value, [[12, 13], [9, 11, 13]], unordered=True) is equal


def test_without_the_declaration_the_order_counts():
    assert not same([[13, 12]], [[12, 13]])
    message = TABLE.judge([{**TABLE.right[0], "turns": [2, 1]}], 0).message
    assert message.endswith("look at 2, number 1")


def numpy_numbers(value):
    if isinstance(value, list | tuple):
        return tuple(map(numpy_numbers, value))
    if isinstance(value, int):
        return np.int64(value)
    return value if isinstance(value, str) else Decimal(float(value))


@pytest.mark.parametrize("exercise", [*WORKED, TABLE], ids=lambda exercise: exercise.id)
def test_a_table_may_have_other_types_of_numbers(exercise):
    table = {key: numpy_numbers(value) for key, value in exercise.wanted.items()}
    verdict = exercise.judge([table], 0)
    assert verdict.ok, verdict.message


@pytest.mark.parametrize(
    ("ex", "entry"),
    [
        ("01-1", {"binds": "Network."}),
        ("09-1", {"contiguous": {4, 5, 6, 7}, "zig-zag": frozenset({2, 3, 12, 13})}),
        ("10-1", {"summed with": {5, 1}}),
        ("12-1", {"groups": [{13, 12}, {9, 11, 13, 15}, [13, 5]], "crosses": "PP"}),
    ],
)
def test_entries_that_a_careful_learner_types(ex, entry):
    exercise = registry.find(ex)
    verdict = exercise.judge([{**exercise.wanted, **entry}], 0)
    assert verdict.ok, verdict.message


def test_ranks_without_an_order_are_named_without_their_place():
    exercise = registry.find("10-1")
    for ranks in ({1, 3}, [3, 1]):
        message = exercise.judge([{**exercise.wanted, "summed with": ranks}], 0).message
        assert message.endswith("is not right: look at 3")


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
        ({"sum": "10"}, "'sum': expected a number, not the text '10'"),
        ({"turns": ["1", "2"]}, "'turns': expected a number, not the text '1'"),
        ({"turns": {1, 2}}, "'turns': expected a list, because the order counts, not the set"),
        ({"row": 7}, "'row': expected a text, not the number 7"),
    ],
)
def test_the_verdict_names_the_entry_and_never_what_is_right(entry, words):
    verdict = TABLE.judge([{**TABLE.right[0], **entry}], 0)
    assert (verdict.passed, verdict.total) == (3, 4)
    assert words in verdict.message


def test_a_table_of_another_kind_is_said():
    assert "a dict with the keys 'sum', 'row'" in TABLE.judge([[1]], 0).message
    assert "in table, but 'row' is missing" in TABLE.judge([{"sum": 1}], 0).message
