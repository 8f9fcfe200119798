"""Lesson 09: context parallelism."""

from course_lib.grading.lessons.lesson_09.by_hand import BY_HAND
from course_lib.grading.lessons.lesson_09.merge import MERGE
from course_lib.grading.lessons.lesson_09.positions import POSITIONS
from course_lib.grading.lessons.lesson_09.ring import RING
from course_lib.grading.lessons.lesson_09.swap import SWAP

EXERCISES = (BY_HAND, POSITIONS, MERGE, RING, SWAP)
