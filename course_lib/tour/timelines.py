"""The tour's pictures: data parallelism with and without overlap, on paced ranks.

Four ranks on two cores compete for them, so that their real arithmetic would show the machine and
not the technique. Here every block's forward and backward is padded by sleep to a fixed time and
every transfer takes what the emulated link would: ranks, groups, messages and waiting are real.
"""

from __future__ import annotations

from course_lib import dp
from course_lib.mesh import Link, Links, make_mesh
from course_lib.tour.technique import JOB, adam
from course_lib.tour.techniques.dp import BUCKET_BYTES
from course_lib.trace.blocks import MeasuredBlocks

RANKS = 4
PACE = {"F": 0.015, "B": 0.030}  # seconds a block
LINK = Link(alpha=0.0005, beta=15e6)  # slow on purpose: a bucket takes about as long as a block
LINKS = Links(inside=LINK, between=LINK)

SYNCS: dict[str, type[dp.Bucketed]] = {"overlapped": dp.Overlapped, "bucketed": dp.Bucketed}


def one_step(sync_name: str) -> None:
    """The second of two steps stays in the trace: the first one warms up."""
    mesh = make_mesh()
    model = JOB.model()
    optimizer = adam(model.parameters())
    sync = SYNCS[sync_name](model.parameters(), mesh.dp, BUCKET_BYTES)
    with MeasuredBlocks(model.blocks, mesh.trace, mesh.conditions.pace):
        for step in range(2):
            dp.comm.barrier(mesh.dp)
            mesh.trace.clear()
            dp.train_step(model.loss_sum, [JOB.rows(step, mesh.dp)], sync, optimizer)
