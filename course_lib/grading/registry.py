"""Find exercises: one module per lesson, with its list ``EXERCISES``."""

from __future__ import annotations

import pkgutil
import re
from importlib import import_module

from course_lib.grading import graders
from course_lib.grading.exercise import Exercise

ID = re.compile(r"(\d\d[a-z]?)-\w+")


def lesson_numbers() -> list[str]:
    """Return the lessons that have graded exercises, in order."""
    return sorted(_modules())


def _modules() -> dict[str, str]:
    """Return the module with the exercises of each lesson."""
    return {
        module.name.removeprefix("lesson_"): f"{graders.__name__}.judge.{module.name}"
        for module in pkgutil.iter_modules([str(graders.FOLDER / "judge")])
    }


def exercises(lesson: str) -> list[Exercise]:
    """Return the exercises of a lesson, in order; [] if it has none."""
    name = _modules().get(lesson)
    return list(import_module(name).EXERCISES) if name else []


def find(exercise_id: str) -> Exercise:
    """Return the exercise with that id. Raises ValueError, which lists the ids of its lesson."""
    match = ID.fullmatch(exercise_id) if isinstance(exercise_id, str) else None
    known = exercises(match[1]) if match else []
    for exercise in known:
        if exercise.id == exercise_id:
            return exercise
    choice = ", ".join(exercise.id for exercise in known)
    raise ValueError(
        f"there is no exercise {exercise_id!r}; "
        + (f"lesson {match[1]} has {choice}" if match and choice else "an id is such as 00-1")
    )
