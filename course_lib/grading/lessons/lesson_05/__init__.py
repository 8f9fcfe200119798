"""Lesson 05: tensor parallelism."""

from course_lib.grading.lessons.lesson_05.attention import ATTENTION
from course_lib.grading.lessons.lesson_05.bias import BIAS
from course_lib.grading.lessons.lesson_05.by_hand import BY_HAND
from course_lib.grading.lessons.lesson_05.mlp import MLP_PAIR
from course_lib.grading.lessons.lesson_05.operators import OPERATORS

EXERCISES = (BY_HAND, BIAS, OPERATORS, MLP_PAIR, ATTENTION)
