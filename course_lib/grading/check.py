"""``check``: what a check cell calls."""

from __future__ import annotations

import random
from typing import Any

from course_lib.grading.answers import DEADLINE
from course_lib.grading.verdict import Verdict, failed


def check(
    exercise_id: str, *answers: Any, seed: int | None = None, deadline: float = DEADLINE
) -> Verdict:
    """The verdict on ``answers``, the functions that the exercise asks for, in its order.

    Parameters are drawn anew at each call, or from ``seed``. ``deadline`` is in seconds. Never
    raises, an interrupt by hand aside.
    """
    from course_lib.grading import registry

    try:
        exercise = registry.find(exercise_id)
    except ValueError as error:
        return failed(str(exercise_id), str(error))
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    return exercise.judge(answers, seed, deadline)
