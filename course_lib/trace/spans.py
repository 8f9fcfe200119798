"""Measured spans of one rank, and sleeps that admit by how much they overshot.

The clock is ``time.perf_counter``: on one machine all processes read the same one, so that the
spans of different ranks can be laid side by side.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from course_lib.schedule import Span

TOO_BUSY = 0.10  # above this overshoot a picture says: compare order, not time


@dataclass(frozen=True, slots=True)
class Sleep:
    """A sleep that was asked for and what it took, in seconds."""

    asked: float
    took: float


class Trace:
    """What one rank did and when."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.spans: list[Span] = []
        self.sleeps: list[Sleep] = []

    def clear(self) -> None:
        """Forget everything measured so far."""
        self.spans.clear()
        self.sleeps.clear()

    def add(self, op: str, start: float, end: float, **what) -> None:
        """Write down a span whose times are known. ``what`` are further fields of Span."""
        self.spans.append(Span(self.rank, op, start, end, **what))

    @contextmanager
    def span(self, op: str, *, at_least: float = 0.0, **what) -> Iterator[None]:
        """Measure the body as one span; sleep at its end until ``at_least`` seconds are over."""
        start = time.perf_counter()
        yield
        self.sleep(start + at_least - time.perf_counter())
        self.add(op, start, time.perf_counter(), **what)

    def sleep(self, seconds: float) -> None:
        """Sleep, and remember how long it really took. Nothing happens for 0 or less."""
        if seconds <= 0:
            return
        start = time.perf_counter()
        time.sleep(seconds)
        self.sleeps.append(Sleep(seconds, time.perf_counter() - start))


def overshoot(traces: Iterable[Trace]) -> float:
    """Median share by which sleeps of 1 ms and more took longer than asked (0.05 is 5 %)."""
    shares = [
        sleep.took / sleep.asked - 1
        for trace in traces
        for sleep in trace.sleeps
        if sleep.asked >= 1e-3
    ]
    return median(shares) if shares else 0.0
