"""``course``: the command line. Each verb imports what it needs when it is called, torch last.

Exit codes: 0 done, 1 a check failed, 2 bad input, 3 this machine lacks something or was too busy
to judge an answer, 130 interrupted.
Bad input is one sentence on stderr. With ``--json`` stdout holds the data and nothing else.
"""

from __future__ import annotations

from course_lib.cli.app import main

# Not sorted: --help lists the verbs in the order in which these modules add them.
# isort: off
from course_lib.cli import machine, plans, plan, map, learner, quiz, interview, cards, review
from course_lib.cli import benches
# isort: on

__all__ = ["main"]
