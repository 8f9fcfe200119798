"""Lesson 16b, six katas: the exercises in order. What each expects is in ``katas/``."""

from __future__ import annotations

from course_lib.grading.graders.judge.katas import dp_tp, pp_zero_cp

EXERCISES = (*dp_tp.EXERCISES, *pp_zero_cp.EXERCISES)
