"""Measured steps as rows of a schedule, and the pace of ranks for simulated costs."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy

from course_lib.mesh import Pace
from course_lib.schedule import Action, Costs, Schedule, Span, from_zero
from course_lib.trace import Trace


def pace_of(costs: Costs, schedule: Schedule) -> Pace:
    """Return the ``pace`` that makes each action take the seconds in ``costs``.

    Stages may differ, for example where one of them has slower GPUs.
    """
    kinds = {(action.op, action.stage) for row in schedule.rows for action in row}
    return {kind: costs.of(Action(*kind, 0)) for kind in sorted(kinds)}


def stage_traces(traces: Iterable[Trace]) -> list[Trace]:
    """Return copies of the traces with the spans of stages only, for a picture of a schedule."""
    found = []
    for trace in traces:
        only = copy(trace)
        only.spans = [span for span in trace.spans if span.stage is not None]
        found.append(only)
    return found


def measured_rows(traces: Iterable[Trace]) -> list[list[Span]]:
    """Return each rank's measured actions, in seconds from the first start on any rank.

    The rows have the type of a Simulation's, so ``bubble`` and ``makespan`` take them. The traces
    should hold one step: clear them after a first step, which warms up.
    """
    spans = from_zero(span for trace in stage_traces(traces) for span in trace.spans)
    ranks = sorted({span.rank for span in spans})
    return [[span for span in spans if span.rank == rank] for rank in ranks]
