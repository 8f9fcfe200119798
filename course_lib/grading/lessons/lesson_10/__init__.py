"""Lesson 10: expert parallelism."""

from course_lib.grading.lessons.lesson_10.by_hand import BY_HAND
from course_lib.grading.lessons.lesson_10.gradient import GRADIENT
from course_lib.grading.lessons.lesson_10.layer import LAYER
from course_lib.grading.lessons.lesson_10.raw import RAW
from course_lib.grading.lessons.lesson_10.routing import ROUTING

EXERCISES = (BY_HAND, GRADIENT, ROUTING, LAYER, RAW)
