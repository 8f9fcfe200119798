"""Lesson 06: sequence parallelism, recomputation, and what the vocabulary and heads need."""

from course_lib.grading.lessons.lesson_06.by_hand import BY_HAND
from course_lib.grading.lessons.lesson_06.enter import ENTER
from course_lib.grading.lessons.lesson_06.loss import LOSS
from course_lib.grading.lessons.lesson_06.norms import NORMS
from course_lib.grading.lessons.lesson_06.raw import REGION

EXERCISES = (BY_HAND, ENTER, NORMS, LOSS, REGION)
