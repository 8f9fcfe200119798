"""Paced steps on real ranks beside their simulation: the one timed guard on schedules."""

from __future__ import annotations

import pytest

from course_lib import pp, view
from course_lib.bench import pp as bench
from course_lib.mesh import Conditions
from course_lib.schedule import Action, bubble, makespan, simulate
from course_lib.trace import TOO_BUSY, overshoot

pytestmark = pytest.mark.alone
NEAR = 1.15  # on an idle machine 1.02-1.05


def planned(name):
    schedule, costs = bench.paced_schedule(name)
    return simulate(schedule, costs), pp.pace_of(costs, schedule)


def paced(worlds, name):
    expected, pace = planned(name)
    return worlds(bench.RANKS).run(bench.paced_step, expected.schedule, pace=pace).traces


@pytest.mark.parametrize("name", bench.PACED)
def test_a_paced_step_takes_as_long_as_simulated(worlds, name):
    expected, _ = planned(name)
    for attempt in (1, 2):
        traces = paced(worlds, name)
        rows = pp.measured_rows(traces)
        ratio = makespan(rows) / expected.makespan
        if ratio <= NEAR:
            break
        if (late := overshoot(traces)) > TOO_BUSY:
            pytest.skip(f"sleeps overshoot by {late:.0%}: the machine is too busy to time")
        assert attempt == 1, f"{name}: {ratio:.3f} times the simulated step"
    assert ratio > 0.99, "a paced step cannot be faster than its simulation"
    # What keeps the step longer than simulated is waiting, so that the bubble follows from it.
    assert bubble(rows)[0] <= 1 - expected.work / makespan(rows) + 1e-9


def test_paced_rows_are_those_of_the_schedule_and_lie_over_the_simulation(worlds):
    (expected, pace), traces = planned("1f1b"), paced(worlds, "1f1b")
    rows = pp.measured_rows(traces)
    for measured, row in zip(rows, expected.rows, strict=True):
        assert [(s.op, s.stage, s.mb) for s in measured] == [(s.op, s.stage, s.mb) for s in row]
        assert all(span.duration >= pace[span.op, span.stage] for span in measured)
        for one, late in zip(row, measured, strict=True):
            assert late.start > one.start - 1e-3, "nothing starts before it can"
    picture = view.timeline(pp.stage_traces(traces), overlay=expected.spans)
    assert "measured on real ranks" in picture.caption
    assert "outlines simulated: 660 ms" in picture.caption


def test_each_stage_has_its_own_pace(worlds):
    """A slow generation of GPUs in one stage: every action there takes twice as long."""
    expected, pace = planned("zb-h1, one slow")
    assert pace["I", 0] == pace["W", 0] == 0.02
    assert pace["I", 1] == pace["F", 1] == 0.04
    for measured in pp.measured_rows(paced(worlds, "zb-h1, one slow")):
        for span in measured:
            assert span.duration >= expected.costs.of(Action(span.op, span.stage, span.mb))
    assert expected.makespan > simulate(expected.schedule, bench.COSTS).makespan


@pytest.mark.parametrize("wrong", [("F",), ("F", "1"), 3, ("F", 1, 2), (1, "F")])
def test_a_pace_of_something_else_is_refused(wrong):
    with pytest.raises(ValueError, match=r"an operation or \(operation, stage\), got pace of "):
        Conditions({wrong: 0.02})


def test_the_pace_of_a_stage_comes_first():
    conditions = Conditions({"F": 0.02, ("F", 1): 0.04})
    assert conditions.pace_of("F", 1) == 0.04
    assert conditions.pace_of("F", 0) == conditions.pace_of("F") == 0.02
    assert conditions.pace_of("W", 1) == 0
    assert "F of stage 1 40 ms" in view.summary.spoken(conditions)


def test_the_table_of_the_bench():
    result = {
        "ranks": 4,
        "micro_batches": 16,
        "rounds": 1,
        "parameters": 4_700_000,
        "milliseconds": {"torch 1f1b": 100.0, "1f1b": 130.0},
        "ratio_to_torch": {"1f1b": 1.3},
        "last_stage_peak_bytes": {"torch 1f1b": 8_000_000, "1f1b": 4_000_000},
        "peak_ratio_to_torch": {"1f1b": 0.5},
        "paced": [
            {
                "name": "1f1b",
                "simulated_ms": 660.0,
                "measured_ms": 693.0,
                "ratio": 1.05,
                "bubble_simulated": 0.273,
                "bubble_measured": 0.293,
                "overshoot": 0.2,
            }
        ],
    }
    said = bench.text(result)
    assert "1.30" in said
    assert "0.50" in said
    assert "1.050" in said
    assert "check it" in said
    assert "too busy" in said
