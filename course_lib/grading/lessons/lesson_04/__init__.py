"""Lesson 04: ZeRO."""

from course_lib.grading.lessons.lesson_04.bounds import BOUNDS
from course_lib.grading.lessons.lesson_04.buckets import BUCKETS
from course_lib.grading.lessons.lesson_04.by_hand import BY_HAND
from course_lib.grading.lessons.lesson_04.raw import RAW
from course_lib.grading.lessons.lesson_04.step import STEP

EXERCISES = (BY_HAND, BOUNDS, STEP, BUCKETS, RAW)
