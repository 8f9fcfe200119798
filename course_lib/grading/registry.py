"""Where exercises are found: a module a lesson, each with its list ``EXERCISES``."""

from __future__ import annotations

import pkgutil
import re
from importlib import import_module

from course_lib.grading import lessons
from course_lib.grading.exercise import Exercise

ID = re.compile(r"(\d\d[a-z]?)-\w+")


def lesson_numbers() -> list[str]:
    """The lessons that have graded exercises, in order."""
    names = (module.name for module in pkgutil.iter_modules(lessons.__path__))
    return sorted(name.removeprefix("lesson_") for name in names)


def exercises(lesson: str) -> list[Exercise]:
    """The exercises of a lesson, in order; [] where it has none."""
    if lesson not in lesson_numbers():
        return []
    return list(import_module(f"course_lib.grading.lessons.lesson_{lesson}").EXERCISES)


def find(exercise_id: str) -> Exercise:
    """The exercise with that id. Raises ValueError that names those of its lesson."""
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
