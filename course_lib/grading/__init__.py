"""Grading: ``check("03-2", answer)`` in a notebook, and the official run behind ``course grade``.

Importing this loads no torch: every pytest run of this Python imports the plugin beside it.
"""

from course_lib.grading.check import check
from course_lib.grading.verdict import Verdict

__all__ = ["Verdict", "check"]
