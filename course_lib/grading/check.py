"""What a cell of a notebook calls: ``check``, ``hint`` and ``progress``."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

from course_lib.grading.answers import DEADLINE
from course_lib.grading.progress import Progress, in_work
from course_lib.grading.verdict import Verdict, failed

ROOT = Path(__file__).resolve().parents[2]


def check(
    exercise_id: str, *answers: Any, seed: int | None = None, deadline: float = DEADLINE
) -> Verdict:
    """Return the verdict on ``answers``, the functions of the exercise in its order.

    Parameters are drawn again in each call, or from ``seed``. ``deadline`` is in seconds of CPU
    time. Never raises, except for a keyboard interrupt.
    """
    from course_lib.grading import registry

    try:
        exercise = registry.find(exercise_id)
    except ValueError as error:
        return failed(str(exercise_id), str(error))
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    verdict = exercise.judge(answers, seed, deadline)
    _note(verdict, ROOT)
    return verdict


def hint(exercise_id: str) -> None:
    """Print the next hint to an exercise, such as ``hint("03-2")``, after those already shown.

    Raises ValueError when there is no such exercise.
    """
    from course_lib.grading import desk

    number = desk.lesson_number(ROOT, exercise_id.partition("-")[0])
    print(desk.hint(ROOT, desk.exercise_id(ROOT, number, exercise_id)))


def progress() -> None:
    """Print all lessons, and how many exercises and points of each you have."""
    from course_lib.grading import syllabus

    print(syllabus.table(syllabus.lessons(ROOT)))


def _note(verdict: Verdict, root: Path) -> None:
    """Count the check as an attempt in the learner's folder, but not in the official run.

    A check that the machine was too busy to finish does not count.
    """
    with contextlib.suppress(OSError):
        if not verdict.not_judged and in_work(Path.cwd() / "notebook", root):
            record = Progress(root)
            record.attempt(verdict.ex, verdict.passed, verdict.total)
            record.save()
