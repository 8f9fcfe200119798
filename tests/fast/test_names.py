"""Names of the first edition answer without a warning; names in strings exist."""

from __future__ import annotations

import importlib
import warnings
from types import FunctionType

import pytest

from course_lib.aliases import RENAMED
from course_lib.grading import registry
from course_lib.grading.refuse import find

OLD = [(package, old, new) for package, names in RENAMED.items() for old, new in names.items()]
REFUSED = [
    (exercise.id, name)
    for lesson in registry.lesson_numbers()
    for exercise in registry.exercises(lesson)
    for name in getattr(exercise, "refused", ())
]


@pytest.mark.parametrize(("package", "old", "new"), OLD)
def test_an_old_name_is_the_new_object(package, old, new):
    module = importlib.import_module(package)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scope: dict = {}
        exec(f"from {package} import {old} as imported", scope)
        assert getattr(module, old) is scope["imported"] is vars(module)[new]
    assert old not in vars(module), "the new name is the only one that is documented"


def test_other_names_are_missing_as_ever():
    comm = importlib.import_module("course_lib.comm")
    with pytest.raises(AttributeError, match="'course_lib.comm' has no attribute 'copied'"):
        _ = comm.copied


@pytest.mark.parametrize(("exercise", "name"), REFUSED)
def test_what_an_exercise_refuses_exists(exercise, name):
    assert isinstance(find(name), FunctionType)


def test_exercises_refuse_something():
    assert len(REFUSED) > 40
