"""Katas 16b-1 to 16b-3: ring all-reduce, data parallelism with buckets, column and row linear."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from course_lib.grading.graders.judge.lesson_02 import RING
from course_lib.grading.graders.runner import lesson_02
from course_lib.grading.graders.runner import lesson_16b as runner

# --- 16b-1 ---------------------------------------------------------------------------------------

RING_KATA = replace(
    RING,
    id="16b-1",
    title="a ring all-reduce",
    act=partial(runner.in_group, lesson_02.on_axis),
    refused=runner.SENDERS,
)


# --- 16b-2 ---------------------------------------------------------------------------------------


# --- 16b-3 ---------------------------------------------------------------------------------------

EXERCISES = (RING_KATA,)
