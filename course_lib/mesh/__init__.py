"""What a rank is, in a process: its coordinate on each axis, and the process groups behind them.

:func:`make_mesh` creates the groups (the same ones in the same order on every rank) and returns a
:class:`Mesh` whose axes go to every parallel function: ``all_reduce(x, mesh.tp)``. There is no
global group. The only thing that a launch leaves behind in a rank is a :class:`RankContext`:
ledger, trace and the conditions of the run.

==========  ===================================================================
conditions  pace, emulated links, checks
axes        what one rank sees: context, axis, mesh; what an instrument is
groups      how the groups are made
==========  ===================================================================
"""

from course_lib.mesh.axes import (
    Axis,
    Instrument,
    Mesh,
    RankContext,
    enter_rank,
    rank_context,
)
from course_lib.mesh.conditions import Conditions, Link, Links, Pace
from course_lib.mesh.groups import across_axis, make_mesh, sub_axis
