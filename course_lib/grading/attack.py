"""``make attack``: check every exercise against its wrong and its right answers, as a table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from course_lib.grading import registry
from course_lib.grading.exercise import Answers, Exercise, each
from course_lib.grading.verdict import Verdict

DEADLINE = 2.0  # seconds of CPU time per rank, because many of these answers hang


@dataclass
class Attack:
    """The results of one exercise. ``failures`` has a line per unexpected verdict."""

    ex: str
    wrong: int = 0
    rejected: int = 0
    right: int = 0
    accepted: int = 0
    failures: list[str] = field(default_factory=list)


def attack(exercise: Exercise, seed: int = 0) -> Attack:
    """Judge all listed answers of ``exercise``, and its stub, which must score 0."""
    result = Attack(exercise.id)
    for number, wrong in enumerate(exercise.wrong):
        verdict, good = _judge(exercise, wrong.answer, seed, partial(_rejects, wrong.wanted))
        result.wrong += 1
        result.rejected += good
        if not good:
            result.failures.append(f"wrong {number}: {verdict.line} (expected: {wrong.wanted})")
    for number, answer in enumerate(exercise.right):
        verdict, good = _judge(exercise, answer, seed, lambda verdict: verdict.ok)
        result.right += 1
        result.accepted += good
        if not good:
            result.failures.append(f"right {number}: {verdict.line}")
    verdict, good = _judge(exercise, exercise.stub, seed, lambda verdict: not verdict.passed)
    if not good:
        result.failures.append(f"the stub scores: {verdict.line}")
    return result


def _rejects(words: str, verdict: Verdict) -> bool:
    return not verdict.ok and words in verdict.message


def _judge(
    exercise: Exercise, answers: Answers, seed: int, wanted: Callable[[Verdict], bool]
) -> tuple[Verdict, bool]:
    """Return the verdict and whether it is as expected."""
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
    return "\n".join(lines)


def main() -> int:
    """Attack every exercise; return 1 if one has failures."""
    attacks = [
        attack(exercise)
        for lesson in registry.lesson_numbers()
        for exercise in registry.exercises(lesson)
    ]
    print(table(attacks))
    return int(any(found.failures for found in attacks))


if __name__ == "__main__":
    sys.exit(main())
