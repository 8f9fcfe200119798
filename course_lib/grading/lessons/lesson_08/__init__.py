"""Lesson 08, pipelines II: where W goes, from paper to a backward that sends early."""

from course_lib.grading.lessons.lesson_08.by_hand import BY_HAND
from course_lib.grading.lessons.lesson_08.halves import HALVES
from course_lib.grading.lessons.lesson_08.raw import RAW
from course_lib.grading.lessons.lesson_08.rows import ROWS
from course_lib.grading.lessons.lesson_08.warm_up import WARM_UP

EXERCISES = (BY_HAND, WARM_UP, HALVES, ROWS, RAW)
