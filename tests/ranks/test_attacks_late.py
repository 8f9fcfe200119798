"""Exercises of the later lessons on ranks under attack."""

from __future__ import annotations

import pytest
from attack import assert_stands, ranked

from course_lib.grading import registry

LATE = {lesson for lesson in registry.lesson_numbers() if lesson >= "07"}


@pytest.mark.parametrize("exercise", ranked(LATE), ids=lambda exercise: exercise.id)
def test_an_exercise_stands_its_attack(exercise):
    assert_stands(exercise)


EVERY = set(registry.lesson_numbers())


@pytest.mark.long
@pytest.mark.parametrize("exercise", ranked(EVERY), ids=lambda exercise: exercise.id)
def test_an_exercise_stands_all_of_its_attack(exercise):
    assert_stands(exercise, every=1)
