"""Call a function on real ranks: ``run(fn, n=4)``, or ``World(n)`` to keep the ranks.

In a Jupyter kernel importing this starts the fork server in the background, so that it has
imported torch by the time that the first cell asks for ranks.
"""

from __future__ import annotations

import sys

from course_lib.launch.api import Results, World, run
from course_lib.launch.faults import RankDeadline, RankError, RankInterrupted
from course_lib.launch.local import fork_server
from course_lib.launch.rank import inside_rank

__all__ = [
    "RankDeadline",
    "RankError",
    "RankInterrupted",
    "Results",
    "World",
    "inside_rank",
    "run",
]


def in_kernel() -> bool:
    """Whether this process is a Jupyter kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


if in_kernel():
    fork_server()
