"""Spans: what one rank does from one time to another, measured or simulated.

A simulated schedule and a measured run are both lists of :class:`Span`, so one picture can show
them together. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(slots=True, unsafe_hash=True)  # frozen takes three times as long, at every call of comm
class Span:
    """One action of one rank. Times are seconds on a clock that all ranks share.

    ``op`` is F, B, I or W for a stage's work, the name of a collective for communication, and any
    other name for other compute. ``axis`` is set for communication only.
    """

    rank: int
    op: str
    start: float
    end: float
    stage: int | None = None
    mb: int | None = None
    axis: str | None = None
    payload: int = 0
    label: str = ""

    @property
    def duration(self) -> float:
        """The seconds from start to end."""
        return self.end - self.start

    @property
    def is_comm(self) -> bool:
        """Whether this span is communication: then it has an axis."""
        return self.axis is not None


def from_zero(spans: Iterable[Span]) -> list[Span]:
    """Return ``spans`` in order of start, shifted so that the earliest starts at 0."""
    ordered = sorted(spans, key=lambda span: (span.start, span.rank))
    if not ordered:
        return []
    zero = ordered[0].start
    return [replace(span, start=span.start - zero, end=span.end - zero) for span in ordered]
