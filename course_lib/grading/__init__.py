"""Grading: ``check("03-2", answer)`` in a notebook, and the official run behind ``course grade``.

A grade is for a learner who wants feedback. Network operations of an answer are counted below
course_lib, and the parameters are drawn again for each check, so that raw torch and tables of
results do not pass. Code that patches the grader would pass; that is out of scope.

Importing this package does not import torch, because every pytest run of this Python imports the
plugin next to it.
"""

from course_lib.grading.check import check, hint, progress
from course_lib.grading.lab import Lab
from course_lib.grading.verdict import Verdict

__all__ = ["Lab", "Verdict", "check", "hint", "progress"]
