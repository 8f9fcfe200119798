"""Spans on one clock, and pauses that admit how long they took."""

import time

import pytest
import torch

from course_lib.schedule import Span, from_zero
from course_lib.trace import TOO_BUSY, Sleep, Trace, overshoot
from course_lib.trace.blocks import MeasuredBlocks


def test_a_span_has_its_rank_its_fields_and_holds_its_body():
    trace = Trace(rank=3)
    with trace.span("F", stage=1, mb=2):
        inside = time.perf_counter()
    (span,) = trace.spans
    assert (span.rank, span.op, span.stage, span.mb, span.axis) == (3, "F", 1, 2, None)
    assert span.start <= inside <= span.end
    assert trace.sleeps == []


def test_a_paced_span_takes_at_least_its_pace():
    trace = Trace()
    with trace.span("F", at_least=0.02):
        pass
    assert trace.spans[0].duration >= 0.02
    (pause,) = trace.sleeps
    assert pause.asked == 0.02
    assert pause.took == pytest.approx(trace.spans[0].duration)


def test_a_body_longer_than_its_pace_is_told():
    """No sleep is left to overshoot, and yet the pace was not held."""
    trace = Trace()
    with trace.span("F", at_least=0.002):
        time.sleep(0.006)
    assert overshoot([trace]) > 1.9


def test_nested_spans_are_both_written_down():
    trace = Trace()
    with trace.span("F"), trace.span("attention"):
        pass
    assert [span.op for span in trace.spans] == ["attention", "F"]
    assert trace.spans[1].start <= trace.spans[0].start


def test_a_body_that_raises_leaves_no_span():
    trace = Trace()
    with pytest.raises(KeyError), trace.span("F", at_least=1.0):
        raise KeyError
    assert trace.spans == []


def test_sleep_remembers_and_ignores_what_is_over():
    trace = Trace()
    trace.sleep(0.003)
    trace.sleep(0.0)
    trace.sleep(-1.0)
    (pause,) = trace.sleeps
    assert pause.asked == 0.003
    assert pause.took >= 0.003


def test_clear_forgets_spans_and_sleeps():
    trace = Trace()
    with trace.span("F", at_least=0.001):
        pass
    trace.clear()
    assert (trace.spans, trace.sleeps) == ([], [])


def slept(*pauses: tuple[float, float]) -> Trace:
    trace = Trace()
    trace.sleeps = [Sleep(asked, took) for asked, took in pauses]
    return trace


def test_overshoot_is_that_of_the_worst_rank_over_its_whole_run():
    steady = slept((0.02, 0.0202), (0.04, 0.0404))
    stalled = slept(*[(0.02, 0.02)] * 9, (0.02, 0.08))  # one stall of 60 ms in 200 ms
    assert overshoot([steady]) == pytest.approx(0.01)
    assert overshoot([steady, stalled]) == pytest.approx(0.30)
    assert overshoot([steady]) < TOO_BUSY < overshoot([stalled])


def test_tiny_pauses_say_nothing():
    assert overshoot([slept((0.0001, 0.0002))]) == 0.0
    assert overshoot([]) == 0.0
    assert overshoot([Trace()]) == 0.0


def test_from_zero_shifts_all_ranks_alike():
    spans = [Span(1, "F", 12.5, 13.0), Span(0, "F", 12.0, 12.5)]
    moved = from_zero(spans)
    assert [(span.rank, span.start, span.end) for span in moved] == [(0, 0.0, 0.5), (1, 0.5, 1.0)]
    assert from_zero([]) == []


def test_a_forward_that_was_slow_once_keeps_its_pace_afterwards():
    """The padding before it is too short then: the rest is made up at its end."""

    class Slow(torch.nn.Module):
        seconds = 0.03

        def forward(self, x):
            time.sleep(self.seconds)
            return x

    block, trace = Slow(), Trace()
    with MeasuredBlocks([block], trace, {"F": 0.04}):
        block(torch.ones(1))
        block.seconds = 0.0
        block(torch.ones(1))
    assert [span.label for span in trace.spans] == ["block 0", "block 0"]
    assert all(span.duration >= 0.04 for span in trace.spans)
