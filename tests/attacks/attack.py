"""``make attack``: judge every exercise's wrong and right answers, its stub and its solution.

The answers are in ``attacks_NN.py`` beside this file, keyed by the id of the exercise. The wrong
answers of a :class:`Function` or :class:`Worked` that carry a message for the learner are in the
grader. The stub and the solution come from the notebooks.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import sys
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from course_lib.grading import registry
from course_lib.grading.exercise import Answers, Exercise, Wrong, each
from course_lib.grading.ranked import OnRanks
from course_lib.grading.verdict import Verdict
from course_lib.grading.worked import Worked

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 2.0  # seconds of CPU time per rank, because many of these answers hang
SLOWEST = 5  # right answers shown with their times


@dataclass(frozen=True)
class Attacks:
    """Answers to one exercise that must be rejected with their words, or accepted."""

    wrong: tuple[Wrong, ...] = ()
    right: tuple[Answers, ...] = ()


@dataclass
class Attack:
    """The results of one exercise. ``failures`` has a line per unexpected verdict."""

    ex: str
    wrong: int = 0
    rejected: int = 0
    right: int = 0
    accepted: int = 0
    seconds: float = 0.0  # the slowest right answer
    failures: list[str] = field(default_factory=list)


def answers_to(exercise: Exercise) -> Attacks:
    """Return all answers that are known for ``exercise``, its solution among the right ones."""
    lesson = exercise.id.partition("-")[0]
    name = f"attacks_{lesson}"
    listed = import_module(name).ATTACKS.get(exercise.id) if find_spec(name) else None
    found = listed or Attacks(exercise.wrong, exercise.right)
    mistakes = tuple(
        Wrong(_table(exercise, wrong.answer), wrong.message)
        for wrong in getattr(exercise, "mistakes", ())
        if isinstance(wrong, Wrong)
    )
    right = (*found.right, written(exercise, "solutions"))
    return Attacks((*mistakes, *found.wrong), right)


def _table(exercise: Exercise, answer: Answers) -> Answers:
    """Return the right table with the entries of ``answer``, or an answer that is no table."""
    return {**exercise.wanted, **answer} if isinstance(exercise, Worked) else answer


@cache
def _cells(folder: str, lesson: str, role: str) -> list[dict[str, Any]]:
    (path,) = (ROOT / folder).glob(f"{lesson}_*.ipynb")
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    return [cell for cell in cells if cell["metadata"].get("course", {}).get("role") == role]


def written(exercise: Exercise, folder: str) -> tuple[Any, ...]:
    """Return the answers in a notebook of ``folder``, called after today's given cells."""
    space: dict[str, Any] = {"__name__": "__main__"}
    lesson = exercise.id.partition("-")[0]
    cells = [*_cells("exercises", lesson, "given"), *_cells(folder, lesson, "answer")]
    for number, cell in enumerate(cells):
        course = cell["metadata"]["course"]
        if course.get("ex") == exercise.id or (course["role"], course.get("ex")) == ("given", None):
            text, file = "".join(cell["source"]), f"<{exercise.id} in {folder}, cell {number}>"
            linecache.cache[file] = (len(text), None, text.splitlines(True), file)
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(text, file, "exec"), space)
    return tuple(space.get(name) for name in exercise.names)


def attack(exercise: Exercise, seed: int = 0, every: int = 1) -> Attack:
    """Judge the answers to ``exercise``, and its stub, which must score 0.

    Of the wrong answers, judge one out of ``every``, and all right ones.
    """
    result, answers = Attack(exercise.id), answers_to(exercise)
    for number, wrong in list(enumerate(answers.wrong))[::every]:
        verdict, good = _judge(exercise, wrong.answer, seed, partial(_rejects, wrong.wanted))
        result.wrong += 1
        result.rejected += good
        if not good:
            result.failures.append(f"wrong {number}: {verdict.line} (expected: {wrong.wanted})")
    for number, answer in enumerate(answers.right):
        start = time.monotonic()
        verdict, good = _judge(exercise, answer, seed, lambda verdict: verdict.ok)
        result.seconds = max(result.seconds, time.monotonic() - start)
        result.right += 1
        result.accepted += good
        if not good:
            result.failures.append(f"right {number}: {verdict.line}")
    stub = written(exercise, "exercises")
    verdict, good = _judge(exercise, stub, seed, lambda verdict: not verdict.passed)
    if not good:
        result.failures.append(f"the stub scores: {verdict.line}")
    return result


def ranked(lessons: Container[str]) -> list[OnRanks]:
    """Return the exercises on ranks of some lessons."""
    return [
        exercise
        for lesson in registry.lesson_numbers()
        if lesson in lessons
        for exercise in registry.exercises(lesson)
        if isinstance(exercise, OnRanks)
    ]


def assert_stands(exercise: Exercise, every: int = 2) -> None:
    """Assert that an exercise rejects wrong answers and accepts right ones.

    Half of the wrong answers, because launching ranks takes a second for each; ``make test-long``
    and ``make attack`` judge all of them. An exercise has at least six.
    """
    result = attack(exercise, every=every)
    assert not result.failures, table([result])
    assert (result.wrong, result.right) == (result.rejected, result.accepted)
    assert len(answers_to(exercise).wrong) >= 6
    assert result.right >= 1


def _rejects(words: str, verdict: Verdict) -> bool:
    return not verdict.ok and words in verdict.message


def _judge(
    exercise: Exercise, answers: Answers, seed: int, wanted: Callable[[Verdict], bool]
) -> tuple[Verdict, bool]:
    """Return the verdict and whether it is as expected.

    A rank that leaves a call of gloo unfinished may crash when it ends; then it is judged again.
    """
    verdict = exercise.judge(each(answers), seed, DEADLINE)
    if not wanted(verdict) and "was ended by signal" in verdict.message:
        verdict = exercise.judge(each(answers), seed, DEADLINE)
    return verdict, wanted(verdict)


def table(attacks: Sequence[Attack]) -> str:
    """Return a line per exercise with the counts of answers, and the failures below."""
    lines = [f"{'exercise':<10}{'wrong':>8}{'rejected':>10}{'right':>8}{'accepted':>10}"]
    for found in attacks:
        lines.append(
            f"{found.ex:<10}{found.wrong:>8}{found.rejected:>10}{found.right:>8}{found.accepted:>10}"
        )
    lines += [f"{found.ex}, {failure}" for found in attacks for failure in found.failures]
    slowest = sorted(attacks, key=lambda found: -found.seconds)[:SLOWEST]
    lines += [f"slowest right answers: {', '.join(f'{a.ex} {a.seconds:.1f} s' for a in slowest)}"]
    return "\n".join(lines)


def main(ids: Sequence[str]) -> int:
    """Attack every exercise, or those whose ids begin with one of ``ids``; 1 after a failure."""
    attacks = [
        attack(exercise)
        for lesson in registry.lesson_numbers()
        for exercise in registry.exercises(lesson)
        if not ids or exercise.id.startswith(tuple(ids))
    ]
    print(table(attacks))
    return int(any(found.failures for found in attacks))


if __name__ == "__main__":
    sys.modules["attack"] = sys.modules["__main__"]  # the answers import it under this name
    sys.exit(main(sys.argv[1:]))
