"""The schedule arena: a learner's rows are judged, run on real ranks, and saved.

A level defines the placement of the stages, the costs of the actions and the limit of micro-batches
in flight. ``play`` gives a reason for every illegal move. Legal rows are simulated, scored and run
on ranks, whose gradients must equal those of one process.
"""

from course_lib.grading.arena.board import leaderboard, picture, stars
from course_lib.grading.arena.judge import Attempt, play, read
from course_lib.grading.arena.levels import LEVELS, Level, begin_with, level, split_backwards

__all__ = [
    "LEVELS",
    "Attempt",
    "Level",
    "begin_with",
    "leaderboard",
    "level",
    "picture",
    "play",
    "read",
    "split_backwards",
    "stars",
]
