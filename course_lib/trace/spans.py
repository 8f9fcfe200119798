"""Measured spans of one rank, and sleeps with their overshoot.

The clock is ``time.perf_counter``, which is the same for all processes of a machine, so that the
spans of different ranks can be compared. On several machines, the launcher shifts all spans to the
clock of rank 0 (:meth:`Trace.shift`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from course_lib.schedule import Span

TOO_BUSY = 0.10  # overshoot above which pictures have a warning
SHORTEST = 1e-3  # seconds; shorter sleeps are ignored, because the timer is about 0.1 ms late


@dataclass(frozen=True, slots=True)
class Sleep:
    """A sleep or a padded block: its requested and its actual length, in seconds."""

    asked: float
    took: float


class Trace:
    """The spans and sleeps of one rank."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.spans: list[Span] = []
        self.sleeps: list[Sleep] = []

    def clear(self) -> None:
        """Remove all spans and sleeps."""
        self.spans.clear()
        self.sleeps.clear()

    def shift(self, seconds: float) -> None:
        """Shift every span by ``seconds``, to the clock of another machine."""
        self.spans = [
            replace(span, start=span.start + seconds, end=span.end + seconds) for span in self.spans
        ]

    def add(self, op: str, start: float, end: float, **what: Any) -> None:
        """Add a span with known times. ``what`` has further fields of Span."""
        self.spans.append(Span(self.rank, op, start, end, **what))

    @contextmanager
    def span(self, op: str, *, at_least: float = 0.0, **what: Any) -> Iterator[None]:
        """Measure the body as one span; sleep at its end until ``at_least`` seconds are over.

        :func:`overshoot` counts the whole padded block, not only its sleep, so that a body that
        takes longer than its pace counts too. A body that raises adds no span.
        """
        start = time.perf_counter()
        yield
        left = start + at_least - time.perf_counter()
        if left > 0:
            time.sleep(left)
        end = time.perf_counter()
        if at_least > 0:
            self.sleeps.append(Sleep(at_least, end - start))
        self.add(op, start, end, **what)

    def sleep(self, seconds: float) -> None:
        """Sleep and record the actual time. For 0 or less, do nothing."""
        if seconds <= 0:
            return
        start = time.perf_counter()
        time.sleep(seconds)
        self.sleeps.append(Sleep(seconds, time.perf_counter() - start))


def overshoot(traces: Iterable[Trace]) -> float:
    """Return how much longer sleeps and padded blocks took than requested (0.05 is 5 %).

    The result is for the rank with the largest overshoot. The sums of a rank's run are compared,
    because one long stall spoils a step as much as many short ones. Sleeps under 1 ms do not
    count; without others, the result is 0.
    """
    shares = [0.0]
    for trace in traces:
        pauses = [sleep for sleep in trace.sleeps if sleep.asked >= SHORTEST]
        if pauses:
            asked = sum(sleep.asked for sleep in pauses)
            shares.append(sum(sleep.took for sleep in pauses) / asked - 1)
    return max(shares)
