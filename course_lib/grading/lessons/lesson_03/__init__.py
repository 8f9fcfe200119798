"""Lesson 03: data parallelism."""

from course_lib.grading.lessons.lesson_03.bucket import BUCKET
from course_lib.grading.lessons.lesson_03.by_hand import BY_HAND
from course_lib.grading.lessons.lesson_03.overlap import OVERLAP
from course_lib.grading.lessons.lesson_03.raw import RAW
from course_lib.grading.lessons.lesson_03.scale import SCALE

EXERCISES = (BY_HAND, SCALE, BUCKET, OVERLAP, RAW)
