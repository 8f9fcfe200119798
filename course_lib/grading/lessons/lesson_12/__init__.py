"""Lesson 12: three, four and five axes at once."""

from course_lib.grading.lessons.lesson_12.by_hand import BY_HAND
from course_lib.grading.lessons.lesson_12.clip import CLIP
from course_lib.grading.lessons.lesson_12.complete import COMPLETE
from course_lib.grading.lessons.lesson_12.holders import HOLDERS
from course_lib.grading.lessons.lesson_12.sent import SENT

EXERCISES = (BY_HAND, HOLDERS, SENT, CLIP, COMPLETE)
