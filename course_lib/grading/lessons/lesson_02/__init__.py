"""Lesson 02: collectives from send and recv, and what they cost."""

from course_lib.grading.lessons.lesson_02.all_to_all import ALL_TO_ALL
from course_lib.grading.lessons.lesson_02.by_hand import BY_HAND
from course_lib.grading.lessons.lesson_02.crossing import CROSSING
from course_lib.grading.lessons.lesson_02.ring import RING
from course_lib.grading.lessons.lesson_02.tree import TREE

EXERCISES = (BY_HAND, CROSSING, TREE, RING, ALL_TO_ALL)
