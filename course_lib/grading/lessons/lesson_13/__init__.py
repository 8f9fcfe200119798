"""Lesson 13: inference."""

from course_lib.grading.lessons.lesson_13.by_hand import BY_HAND
from course_lib.grading.lessons.lesson_13.greedy import GREEDY
from course_lib.grading.lessons.lesson_13.join import JOIN
from course_lib.grading.lessons.lesson_13.room import ROOM
from course_lib.grading.lessons.lesson_13.same_token import SAME_TOKEN

EXERCISES = (BY_HAND, ROOM, SAME_TOKEN, JOIN, GREEDY)
