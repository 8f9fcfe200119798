"""Measured spans of one rank, and pauses that admit by how much they overshot.

The clock is ``time.perf_counter``: on one machine all processes read the same one, so that the
spans of different ranks can be laid side by side; a launcher that spans machines shifts them to
rank 0's clock (:meth:`Trace.shift`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from course_lib.schedule import Span

TOO_BUSY = 0.10  # above this overshoot a picture says: compare order, not time
SHORTEST = 1e-3  # seconds: the timer itself is late by some 0.1 ms, which says nothing


@dataclass(frozen=True, slots=True)
class Sleep:
    """A pause or a paced block: how long it was to be and how long it took, in seconds."""

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

    def shift(self, seconds: float) -> None:
        """Move every span: to the clock of another machine."""
        self.spans = [
            replace(span, start=span.start + seconds, end=span.end + seconds) for span in self.spans
        ]

    def add(self, op: str, start: float, end: float, **what) -> None:
        """Write down a span whose times are known. ``what`` are further fields of Span."""
        self.spans.append(Span(self.rank, op, start, end, **what))

    @contextmanager
    def span(self, op: str, *, at_least: float = 0.0, **what) -> Iterator[None]:
        """Measure the body as one span; sleep at its end until ``at_least`` seconds are over.

        A body that takes longer than its pace is no sleep that overshot, and yet the pace was
        not held: so the paced block as a whole is what :func:`overshoot` hears of. A body that
        raises leaves no span.
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
        """Sleep, and remember how long it really took. Nothing happens for 0 or less."""
        if seconds <= 0:
            return
        start = time.perf_counter()
        time.sleep(seconds)
        self.sleeps.append(Sleep(seconds, time.perf_counter() - start))


def overshoot(traces: Iterable[Trace]) -> float:
    """By which share paused and paced time took longer than asked (0.05 is 5 %), on the worst rank.

    Sums over the rank's run are compared, not single pauses: one long stall spoils a step as much
    as many short ones. Pauses under 1 ms do not count; 0 where there are no others.
    """
    shares = [0.0]
    for trace in traces:
        pauses = [sleep for sleep in trace.sleeps if sleep.asked >= SHORTEST]
        if pauses:
            asked = sum(sleep.asked for sleep in pauses)
            shares.append(sum(sleep.took for sleep in pauses) / asked - 1)
    return max(shares)
