"""``make attack``: every exercise against its wrong answers and its right ones, as a table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from course_lib.grading import registry
from course_lib.grading.exercise import Answers, Exercise, each
from course_lib.grading.verdict import Verdict

DEADLINE = 2.0  # seconds of a check: many of these answers hang


@dataclass
class Attack:
    """How an exercise stood up to its answers. ``failures`` says what went otherwise."""

    ex: str
    wrong: int = 0
    rejected: int = 0
    right: int = 0
    accepted: int = 0
    failures: list[str] = field(default_factory=list)


def attack(exercise: Exercise, seed: int = 0) -> Attack:
    """Judge all answers that ``exercise`` lists, and its stub, which must score 0."""
    result = Attack(exercise.id)
    for number, wrong in enumerate(exercise.wrong):
        verdict = _judge(exercise, wrong.answer, seed)
        result.wrong += 1
        if not verdict.ok and wrong.wanted in verdict.message:
            result.rejected += 1
        else:
            result.failures.append(f"wrong {number}: {verdict.line} (wanted: {wrong.wanted})")
    for number, answer in enumerate(exercise.right):
        verdict = _judge(exercise, answer, seed)
        result.right += 1
        if verdict.ok:
            result.accepted += 1
        else:
            result.failures.append(f"right {number}: {verdict.line}")
    if (verdict := _judge(exercise, exercise.stub, seed)).passed:
        result.failures.append(f"the stub scores: {verdict.line}")
    return result


def _judge(exercise: Exercise, answers: Answers, seed: int) -> Verdict:
    return exercise.judge(each(answers), seed, DEADLINE)


def table(attacks: Sequence[Attack]) -> str:
    """exercise, wrong tried, rejected, right tried, accepted; what failed below."""
    lines = [f"{'exercise':<10}{'wrong':>8}{'rejected':>10}{'right':>8}{'accepted':>10}"]
    for found in attacks:
        lines.append(
            f"{found.ex:<10}{found.wrong:>8}{found.rejected:>10}{found.right:>8}{found.accepted:>10}"
        )
    lines += [f"{found.ex}, {failure}" for found in attacks for failure in found.failures]
    return "\n".join(lines)


def main() -> int:
    """Attack every exercise; 1 when one did not stand."""
    attacks = [
        attack(exercise)
        for lesson in registry.lesson_numbers()
        for exercise in registry.exercises(lesson)
    ]
    print(table(attacks))
    return int(any(found.failures for found in attacks))


if __name__ == "__main__":
    sys.exit(main())
