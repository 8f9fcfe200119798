"""Spans of several machines are laid on rank 0's clock."""

from __future__ import annotations

import time

import pytest

from course_lib.launch.clock import offset_to_rank_0
from course_lib.trace import Trace


@pytest.mark.parametrize("n", [2, 3])
def test_the_offset_of_a_clock_that_is_ahead_is_found(worlds, n):
    def rank():
        import torch.distributed as dist

        me = dist.get_rank()
        return offset_to_rank_0(me, n, clock=lambda: time.perf_counter() + 100.0 * me)

    for me, offset in enumerate(worlds(n).run(rank)):
        assert offset == pytest.approx(-100.0 * me, abs=0.02)


def test_shift_moves_spans_and_keeps_their_length():
    trace = Trace(1)
    trace.add("F", 5.0, 7.0, mb=3)
    trace.shift(-4.0)
    (span,) = trace.spans
    assert (span.start, span.end, span.mb) == (1.0, 3.0, 3)
