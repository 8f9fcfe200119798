"""Spans: what one rank does from one moment to another, measured or simulated alike.

No torch here. A simulated schedule and a measured run are both lists of :class:`Span`,
which is why one picture can lay them over each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(slots=True, unsafe_hash=True)  # frozen takes three times as long, at every call of comm
class Span:
    """One action of one rank. Times are seconds on a clock that all ranks share.

    ``op`` is what was done: F, B, I or W for a stage's work, the name of a collective for
    communication, anything else for other compute. ``axis`` is set for communication only.
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
        """Seconds from start to end."""
        return self.end - self.start

    @property
    def is_comm(self) -> bool:
        """Whether this span is communication (it then has an axis)."""
        return self.axis is not None


def from_zero(spans: Iterable[Span]) -> list[Span]:
    """Shift ``spans`` so that the earliest starts at 0, in order of start."""
    ordered = sorted(spans, key=lambda span: (span.start, span.rank))
    if not ordered:
        return []
    zero = ordered[0].start
    return [replace(span, start=span.start - zero, end=span.end - zero) for span in ordered]
