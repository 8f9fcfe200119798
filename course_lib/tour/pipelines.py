"""The tour's pipelines: one step on paced ranks, its bubble predicted, simulated and measured.

Three numbers from three sources: a textbook formula, the simulation of the rows, and the same
rows done by real ranks whose forward and backward (or its halves) are padded by sleep.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from course_lib import pp
from course_lib.comm import barrier
from course_lib.launch import Results, available_ranks, run
from course_lib.mesh import make_mesh
from course_lib.schedule import Costs, Schedule, bubble, make, makespan, predicted_bubble, simulate
from course_lib.schedule.simulate import Simulation
from course_lib.tour.technique import JOB
from course_lib.trace import overshoot

NAMES = ("gpipe", "1f1b", "zb-h1")
RANKS, MICRO_BATCHES = 4, 8
# Seconds. A message costs gloo about a millisecond on two cores, and in ZB-H1 nearly all of them
# are on the critical chain: actions must be long beside it. B is I and W.
PACE = {"F": 0.040, "B": 0.080, "I": 0.040, "W": 0.040}


@dataclass(frozen=True)
class PacedPipeline:
    """One schedule, as simulated and as measured."""

    simulation: Simulation
    results: Results

    @property
    def schedule(self) -> Schedule:
        """The rows that both of them followed."""
        return self.simulation.schedule

    @property
    def pace(self) -> dict[str, float]:
        """Seconds of each operation that there is."""
        return pace_of(self.schedule)

    @property
    def measured_bubble(self) -> float:
        """Share of total time, from the ranks' traces."""
        return bubble(pp.measured_rows(self.results.traces))[0]

    @property
    def measured_makespan(self) -> float:
        """Seconds from the first start to the last end of all ranks."""
        return makespan(pp.measured_rows(self.results.traces))

    @property
    def overshoot(self) -> float:
        """By which share paced actions took longer than asked, on the worst rank."""
        return overshoot(self.results.traces)

    def as_json(self) -> dict[str, Any]:
        """The entry of tour.json: bubbles are shares of total time, times are seconds."""
        name = self.schedule.name
        return {
            "schedule": name,
            "ranks": self.schedule.ranks,
            "microbatches": self.schedule.microbatches,
            "bubble": {
                "predicted": predicted_bubble(name, RANKS, MICRO_BATCHES),
                "simulated": self.simulation.bubble_of_total,
                "measured": self.measured_bubble,
            },
            "makespan": {
                "simulated": self.simulation.makespan,
                "measured": self.measured_makespan,
            },
            "peak_in_flight": self.schedule.peak_in_flight(),
            "overshoot": self.overshoot,
        }


def pace_of(schedule: Schedule) -> dict[str, float]:
    """:data:`PACE`, of the operations in ``schedule``."""
    ops = {action.op for row in schedule.rows for action in row}
    return {op: seconds for op, seconds in PACE.items() if op in ops}


def paced_step(schedule: Schedule) -> None:
    """Two steps; the first one warms up, the second one stays in the trace."""
    mesh = make_mesh(pp=schedule.ranks)
    stages = pp.make_stages(JOB.model(), schedule, mesh.pp.rank)
    optimizer = torch.optim.SGD(pp.parameters(stages), lr=1e-3)
    tokens, targets = JOB.rows(0, mesh.dp)
    m = schedule.microbatches
    cut = list(zip(tokens.chunk(m), targets.chunk(m), strict=True))
    for _ in range(2):
        barrier(mesh.pp)
        mesh.trace.clear()
        pp.train_step(schedule, stages, mesh, cut, optimizer)


def measure_pipelines(say: Callable[[str], None]) -> list[PacedPipeline]:
    """Run every schedule of :data:`NAMES` on paced ranks; none where there are too few ranks."""
    limit = available_ranks()
    if limit is not None and limit < RANKS:
        return []
    measured = []
    for name in NAMES:
        schedule = make(name, RANKS, MICRO_BATCHES)
        say(f"pipeline {name}: {RANKS} paced ranks, {MICRO_BATCHES} micro-batches")
        results = run(paced_step, schedule, n=RANKS, pace=pace_of(schedule), timeout=120)
        costs = Costs.make(f=PACE["F"], i=PACE["I"], w=PACE["W"])
        measured.append(PacedPipeline(simulate(schedule, costs), results))
    return measured
