"""Call a function on real ranks: ``run(fn, n=4)``, or ``World(n)`` to keep the ranks.

In a Jupyter kernel, importing this package starts the fork server in the background. The server
has then imported torch by the time the first cell starts ranks.
"""

from __future__ import annotations

from course_lib.launch import local, surroundings

if surroundings.in_kernel():
    local.fork_server()  # before the next lines import torch, so that both imports run at once

from course_lib.launch.api import Results, World, run
from course_lib.launch.faults import RankDeadline, RankError, RankInterrupted
from course_lib.launch.joined import available_ranks, is_reporter
from course_lib.launch.limits import Limits
from course_lib.launch.local import warm_up
from course_lib.launch.rank import begun, inside_rank
