"""Grading: ``check("03-2", answer)`` in a notebook, and the official run behind ``course grade``.

A grade is for a learner who wants to know. What an answer asks of the network is counted below
our own code and the parameters are drawn anew, so neither raw torch nor a table of results slips
past; code that patches the grader itself would, and is out of scope.

Importing this loads no torch: every pytest run of this Python imports the plugin beside it.
"""

from course_lib.grading.check import check
from course_lib.grading.lab import Lab
from course_lib.grading.verdict import Verdict

__all__ = ["Lab", "Verdict", "check"]
