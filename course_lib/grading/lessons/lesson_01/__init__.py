"""Lesson 01: why parallelism: memory, compute and network by formula."""

from course_lib.grading.lessons.lesson_01.by_hand import BY_HAND
from course_lib.grading.lessons.lesson_01.count import COUNT
from course_lib.grading.lessons.lesson_01.fullest import FULLEST
from course_lib.grading.lessons.lesson_01.limit import LIMIT
from course_lib.grading.lessons.lesson_01.tokens import TOKENS

EXERCISES = (BY_HAND, TOKENS, COUNT, LIMIT, FULLEST)
