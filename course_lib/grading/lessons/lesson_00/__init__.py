"""Lesson 00: from a rank to its coordinates, and from coordinates to groups. No ranks needed."""

from course_lib.grading.lessons.lesson_00.coordinates import COORDINATES
from course_lib.grading.lessons.lesson_00.groups import GROUPS

EXERCISES = (COORDINATES, GROUPS)
