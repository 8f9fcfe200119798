"""From traces to rows, and from the costs of a simulation to the pace of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy

from course_lib.mesh import Pace
from course_lib.schedule import Action, Costs, Schedule, Span, from_zero
from course_lib.trace import Trace


def pace_of(costs: Costs, schedule: Schedule) -> Pace:
    """The ``pace`` with which ranks take as long for each action as :func:`simulate` assumes.

    ``costs`` are seconds. Stages may differ: a slow generation of GPUs in one of them.
    """
    kinds = {(action.op, action.stage) for row in schedule.rows for action in row}
    return {kind: costs.of(Action(*kind, 0)) for kind in sorted(kinds)}


def stage_traces(traces: Iterable[Trace]) -> list[Trace]:
    """The traces without messages, as a picture of a schedule wants them; sleeps stay."""
    found = []
    for trace in traces:
        only = copy(trace)
        only.spans = [span for span in trace.spans if span.stage is not None]
        found.append(only)
    return found


def measured_rows(traces: Iterable[Trace]) -> list[list[Span]]:
    """The stages' actions of each rank as measured, in seconds from the first start of all.

    Rows as those of a Simulation, so that ``bubble`` and ``makespan`` take them. The traces
    should hold one step: clear them after a first one that warms up.
    """
    spans = from_zero(span for trace in stage_traces(traces) for span in trace.spans)
    ranks = sorted({span.rank for span in spans})
    return [[span for span in spans if span.rank == rank] for rank in ranks]
