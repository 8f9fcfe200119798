"""Verdicts and exercises without ranks: what counts, what is said, what never happens."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import subprocess
import sys
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from attack import answers_to, written

from course_lib.grading import answers, check, exercise, registry
from course_lib.grading.answers import NotRight, guarded
from course_lib.grading.catalog import HINTS, hint_id
from course_lib.grading.exercise import Function, alike, each, plain
from course_lib.grading.verdict import MIME, CaseResult, Verdict

FUNCTIONS = [
    exercise
    for lesson in registry.lesson_numbers()
    for exercise in registry.exercises(lesson)
    if isinstance(exercise, Function)
]
WRONG = [
    pytest.param(exercise, wrong, id=f"{exercise.id}-{number}")
    for exercise in FUNCTIONS
    for number, wrong in enumerate(answers_to(exercise).wrong)
]
RIGHT = [
    pytest.param(exercise, each(answer)[0], id=f"{exercise.id}-{number}")
    for exercise in FUNCTIONS
    for number, answer in enumerate(answers_to(exercise).right)
]
SEEDS = range(5)


@pytest.mark.parametrize(("exercise", "wrong"), WRONG)
def test_a_wrong_answer_gets_its_message(exercise, wrong):
    for seed in SEEDS:
        verdict = exercise.judge([wrong.answer], seed)
        assert not verdict.ok
        assert wrong.wanted in verdict.message


@pytest.mark.parametrize(("exercise", "answer"), RIGHT)
def test_a_right_answer_passes_however_it_is_written(exercise, answer):
    for seed in SEEDS:
        verdict = exercise.judge([answer], seed)
        assert verdict.line == f"{exercise.id}: {exercise.total} of {exercise.total} passed."


@pytest.mark.parametrize("exercise", FUNCTIONS, ids=lambda exercise: exercise.id)
def test_the_library_s_own_answer_refuses_while_judged_and_works_again_after(exercise):
    if exercise.reference.__module__.startswith("course_lib.grading."):
        return  # the library has no such function: the grader has its own
    case = exercise.drawn[0].draw(random.Random(0))[0]
    before = exercise.normal(exercise.reference(*case.values()))
    verdict = exercise.judge([exercise.reference], 0)
    assert verdict.passed == 0
    assert "this is what you are asked to write" in verdict.message
    assert exercise.normal(exercise.reference(*case.values())) == before


def test_every_exercise_has_three_hints_and_no_hint_is_left_over():
    stored = json.loads((Path(__file__).parents[2] / "exercises" / HINTS).read_text())
    lessons = registry.lesson_numbers()
    ids = [each.id for lesson in lessons for each in registry.exercises(lesson)]
    assert list(stored) == sorted(hint_id(ex, rung) for ex in ids for rung in (1, 2, 3))
    assert all(text.strip() == text and text[-1] in ".?" for text in stored.values())


@pytest.mark.parametrize("exercise", FUNCTIONS, ids=lambda exercise: exercise.id)
def test_every_exercise_is_attacked_and_a_stub_scores_nothing(exercise):
    assert len(answers_to(exercise).wrong) >= 6
    stubs = [
        *written(exercise, "exercises"),
        lambda *_: None,
        lambda *_: 0,
        lambda *_: [],
        lambda *_: {},
    ]
    table = exercise.reference(*exercise.drawn[0].draw(random.Random(0))[0].values())
    for answer in [*stubs, lambda *_: table]:
        assert exercise.judge([answer], seed=3).passed == 0


def _raises(*_):
    raise KeyError("tp")


def _exits(*_):
    sys.exit(3)


def _unwritten(*_):
    raise NotImplementedError("exercise 00-1: yours to write")


class _Odd:
    def __eq__(self, other):
        raise RuntimeError("no comparing")

    __hash__ = None

    def __repr__(self):
        raise RuntimeError("no printing")


class _OddKey(_Odd):
    """The same, but it may be a key."""

    __hash__ = object.__hash__


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([_raises], "raised KeyError: 'tp'"),
        ([_exits], "called sys.exit"),
        ([_unwritten], "coordinates is not written yet"),
        ([lambda *_: _Odd()], "expected a dict from axis to coordinate, got a _Odd"),
        ([lambda *_: {"tp": _Odd()}], "got a _Odd that cannot be printed"),
        ([lambda *_: {_OddKey(): 1}], ": expected "),
        ([lambda *_: 8], "): expected a dict from axis to coordinate, got 8"),
        ([lambda: {}], "raised TypeError"),
        ([7], "expected coordinates to be a function, got 7"),
        ([], 'expected check("00-1", coordinates)'),
    ],
)
def test_errors_of_the_answer_become_the_message(answers, words):
    verdict = check("00-1", *answers, seed=1)
    assert (verdict.passed, verdict.total) == (0, registry.find("00-1").total)
    assert words in verdict.message


def test_an_unknown_exercise_is_a_verdict_too():
    assert "lesson 00 has 00-1, 00-2" in check("00-9", print).message
    assert "an id is such as 00-1" in check("nonsense").message


def test_a_loop_without_end_is_stopped():
    def turns(*_):
        while True:
            pass

    verdict = check("00-1", turns, deadline=0.2)
    assert "not done after 0.2 s" in verdict.message
    assert (verdict.passed, verdict.total, verdict.not_judged) == (0, 5, 0)


def test_a_deadline_counts_cpu_time_and_sleep_has_a_limit_of_its_own():
    with guarded(cpu=0.2, total=30):
        time.sleep(0.5)
    sleeps = pytest.raises(NotRight, match="not done after 0.3 s: check that nothing sleeps")
    with sleeps, guarded(cpu=5, total=0.3):
        time.sleep(30)


def test_a_busy_machine_takes_no_points(monkeypatch):
    waited = itertools.count(step=60)  # seconds for a processor, more at every look
    monkeypatch.setattr(answers, "_delay", lambda: next(waited))
    where = registry.find("00-1")
    monkeypatch.setattr(exercise, "guarded", lambda cpu: guarded(cpu, total=0.2))
    verdict = where.judge([lambda *_: time.sleep(30)], seed=1)
    assert (verdict.passed, verdict.total, verdict.not_judged) == (0, 5, 5)
    assert "not judged, because the machine was too busy" in verdict.line
    assert not verdict.ok


class _Shell:
    def ask_exit(self):
        raise AssertionError("the kernel would end")


def test_exit_in_an_answer_does_not_end_the_kernel(monkeypatch):
    shell = _Shell()
    python = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", python)
    verdict = check("00-1", lambda *_: shell.ask_exit(), seed=1)
    assert "coordinates called sys.exit; a function must return" in verdict.message
    assert vars(shell) == {}


def test_a_flood_of_printing_is_cut(capsys):
    def floods(rank, sizes, order):
        print("x" * 1_000_000)

    check("00-1", floods, seed=1)
    printed = capsys.readouterr().out
    assert len(printed) < 30_000
    assert "is not shown" in printed


def test_who_uses_up_an_argument_is_told_so_and_spoils_no_other_call():
    def empties(rank, sizes, order):
        found = {}
        for axis in order.split("-"):
            size = sizes.pop(axis)
            rank, found[axis] = divmod(rank, size)
        return found

    message = check("00-1", empties, seed=5).message
    assert "changed its argument sizes: copy it" in message
    assert "KeyError" not in message


def test_the_first_failing_axis_is_told_first():
    verdict = Verdict(
        "09-1",
        [CaseResult("wire", "calls", "too many"), CaseResult("outputs", "two ranks", "wrong sum")],
    )
    assert verdict.message == "wrong sum"
    assert verdict.axes == {"outputs": (0, 1), "wire": (0, 1)}
    assert not Verdict("09-1").ok


def test_a_case_that_was_not_looked_at_has_nothing_to_tell():
    waits = CaseResult("outputs", "one rank", "later", judged=False)
    assert Verdict("09-1", [waits, CaseResult("gradients", "two", "3 times")]).message == "3 times"
    assert Verdict("09-1", [waits]).message == "later"


def test_the_forms_of_a_verdict():
    verdict = Verdict(
        "09-1", [CaseResult("outputs", "a <b>", "1 < 2\nlines"), CaseResult("wire", "c")]
    )
    shown = verdict._repr_mimebundle_()
    assert shown["text/plain"] == "09-1: 1 of 2 passed. 1 < 2 lines"
    assert "1 &lt; 2" in shown["text/html"]
    assert "a &lt;b&gt;" in shown["text/html"]
    assert json.loads(json.dumps(shown[MIME])) == {
        "ex": "09-1",
        "passed": 1,
        "total": 2,
        "not_judged": 0,
        "message": "1 < 2 lines",
        "axes": {"outputs": [0, 1], "wire": [1, 1]},
    }


def test_a_verdict_on_the_page_has_code_as_code_and_says_what_was_not_judged():
    cases = [
        CaseResult("outputs", "a", "Read backwards.\n    f(1):\n    expected 1,\n    got 2"),
        CaseResult("wire", "b", "later", judged=False),
        CaseResult("peak", "c"),
        CaseResult("peak", "d", "too busy", judged=False, busy=True),
    ]
    shown = Verdict("09-1", cases)._repr_mimebundle_()
    assert shown["text/plain"].endswith("passed. Read backwards. f(1): expected 1, got 2")
    assert re.findall(r"monospace[^>]*>([^<]*)<", shown["text/html"]) == [
        "f(1):", "expected 1,", "got 2"
    ]  # fmt: skip
    rows = re.findall(r"</b> ([a-z ]+)</td>", shown["text/html"])
    assert rows == ["failed", "not judged yet", "passed", "not judged"]


def test_grading_loads_no_torch():
    script = (
        "import sys; from course_lib.grading import check; import course_lib.grading.plugin;"
        "check('00-1', print, seed=1); sys.exit('torch' in sys.modules)"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env=environ)


def test_whole_numbers_of_torch_and_numpy_count_as_such():
    import torch

    where = registry.find("00-1")
    (right,) = written(where, "solutions")
    as_tensors = lambda *args: {k: torch.tensor(v) for k, v in right(*args).items()}  # noqa: E731
    assert where.judge([as_tensors], 5).ok
    as_floats = lambda *args: {k: float(v) for k, v in right(*args).items()}  # noqa: E731
    assert "whole numbers" in where.judge([as_floats], 5).message


def test_a_right_answer_is_never_refused_by_rounding():
    """Six digits split half-integers: other ways to compute the same number differ in the last."""
    exercise = registry.find("01-2")
    for answer in exercise.right:
        refused = [seed for seed in range(1000) if not exercise.judge([answer], seed).ok]
        assert not refused


def test_weights_may_be_computed_in_float32():
    exercise = registry.find("10-3")

    def route(logits, choices, room):
        p_TE = torch.tensor(logits).softmax(-1)
        weights_TC, experts_TC = p_TE.topk(choices)
        if choices > 1:
            weights_TC = weights_TC / weights_TC.sum(-1, keepdim=True)
        left, served = [room] * p_TE.shape[1], [{} for _ in logits]
        for choice in range(choices):
            for token, expert in enumerate(experts_TC[:, choice].tolist()):
                if left[expert]:
                    left[expert] -= 1
                    served[token][expert] = weights_TC[token, choice].item()
        return served

    for seed in range(20):
        assert exercise.judge([route], seed).ok


def as_numpy(value):
    """Return the same result with numbers of numpy, and tuples in place of lists."""
    if isinstance(value, dict):
        return {key: as_numpy(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return tuple(map(as_numpy, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return np.int64(value)
    return np.float64(value) if isinstance(value, float) else value


@pytest.mark.parametrize(("exercise", "answer"), RIGHT)
def test_numbers_of_numpy_and_tuples_are_right_too(exercise, answer):
    verdict = exercise.judge([lambda *given: as_numpy(answer(*given))], 1)
    assert verdict.ok, verdict.message


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.array([[1, 2]]), [[1, 2]]),
        (Decimal("2.50"), 2.5),
        (Decimal(7), 7),
        (Decimal("1e400"), float("inf")),
        (Fraction(8, 2), 4),
        (Fraction(1, 2), 0.5),
        (True, True),
        ("3", "3"),
        (None, None),
        ((1, [np.int32(2), (3,)]), [1, [2, [3]]]),
        ({np.int64(1): (np.int64(2),), "a": 1.5}, {1: [2], "a": 1.5}),
    ],
)
def test_the_plain_form_of_a_result(value, wanted):
    assert plain(value) == wanted
    assert repr(plain(value)) == repr(wanted), "the types are the same too"


@pytest.mark.parametrize(
    ("got", "wanted", "equal"),
    [
        (0.1 + 0.2, 0.3, True),
        (1e9 + 1e2, 1e9, True),
        (1.00001, 1.0, False),
        (3, 3.0, True),
        (10_000_001, 10_000_000, False),  # a whole number has no rounding
        (10_000_001.0, 10_000_000, False),
        (10**400, 1.0, False),
        (float("nan"), float("nan"), False),
        (None, 1.0, False),
        ("1", 1.0, False),
        ([1, 0.3], [1, 0.1 + 0.2], True),
        ([1, 0.3], [1, 0.31], False),
        ([1], [1, 2], False),
        ((1, 2.0), (1, 2.0000001), True),
        ({0: 0.3}, {0: 0.1 + 0.2}, True),
        ({0: 0.3, 1: 0.0}, {0: 0.3}, False),
        ({0: 0.3}, [0.3], False),
    ],
)
def test_results_that_are_alike(got, wanted, equal):
    assert alike(got, wanted) is equal
