"""The plan arena: a learner's plan is checked, predicted, run on real ranks, scored and saved.

A level defines a toy model, a batch, a cluster with emulated links and a memory limit per rank.
The score is the simulated step. The run proves gradients, bytes and memory.
"""

from course_lib.grading.plans.board import leaderboard, stars
from course_lib.grading.plans.judge import Attempt, play
from course_lib.grading.plans.levels import LEVELS, Level, level

__all__ = ["LEVELS", "Attempt", "Level", "leaderboard", "level", "play", "stars"]
