"""Lesson 11: groups, priorities and deadlocks."""

from course_lib.grading.lessons.lesson_11.by_hand import BY_HAND
from course_lib.grading.lessons.lesson_11.gives_way import GIVES_WAY
from course_lib.grading.lessons.lesson_11.made import MADE
from course_lib.grading.lessons.lesson_11.never import NEVER
from course_lib.grading.lessons.lesson_11.piece import PIECE

EXERCISES = (BY_HAND, PIECE, NEVER, GIVES_WAY, MADE)
