"""Lesson 07, pipelines I: from a schedule traced by hand to one that runs on ranks."""

from course_lib.grading.lessons.lesson_07.by_hand import BY_HAND
from course_lib.grading.lessons.lesson_07.enough import ENOUGH
from course_lib.grading.lessons.lesson_07.rows import ROWS
from course_lib.grading.lessons.lesson_07.step import STEP
from course_lib.grading.lessons.lesson_07.swap import SWAP

EXERCISES = (BY_HAND, ENOUGH, ROWS, SWAP, STEP)
