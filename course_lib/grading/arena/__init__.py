"""The schedule arena: rows that somebody wrote, judged, run on real ranks, and remembered.

A level says where the stages live, what an action costs and how much a rank may keep. ``play``
refuses rows with a reason for every illegal move; legal ones are simulated, scored, and run on
ranks, whose gradients must be those of one process.
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
