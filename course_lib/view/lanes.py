"""The layout of a timeline: a line for each rank and axis, and a box for each span."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from course_lib.schedule import Span

COMPUTE, COMM, OVERLAY, GAP = 0.30, 0.19, 0.17, 0.13  # heights in inches
MOST_LEVELS = 3  # operations in flight for which a line grows; more of them share its height
MAX_HEIGHT = 7.0
SLACK = 1e-9  # seconds of overlap that are ignored between consecutive spans


@dataclass(frozen=True, slots=True)
class Lane:
    """One line of the picture, ``top`` inches from its top; without an axis, it is for compute."""

    rank: int
    axis: str | None
    overlay: bool
    top: float
    height: float
    leads: bool  # it has the name of its rank, and its empty space is idle time

    @property
    def name(self) -> str:
        """The text at its left."""
        if self.overlay:
            return "simulated"
        return f"rank {self.rank}" if self.leads else str(self.axis)


@dataclass(frozen=True, slots=True)
class Box:
    """One span in the picture: ``left`` and ``right`` in ms, ``top`` and ``bottom`` in inches.

    ``chunk`` is the index of the span's stage among the stages of its rank.
    """

    span: Span
    chunk: int
    overlay: bool
    left: float
    right: float
    top: float
    bottom: float

    @property
    def corners(self) -> list[tuple[float, float]]:
        """The four corners, for a polygon."""
        left, right, top, bottom = self.left, self.right, self.top, self.bottom
        return [(left, top), (right, top), (right, bottom), (left, bottom)]


Key = tuple[int, str | None, bool]  # rank, axis, overlay


def layout(spans: Sequence[Span], planned: Sequence[Span]) -> tuple[list[Lane], list[Box], float]:
    """Return lines and boxes for ``spans`` and the ``planned`` spans above them, and the height.

    A rank has a line for the overlay if there is one, a line for compute, and one per axis. If
    there are only messages on one axis, it has only the line of that axis. All ranks have the same
    lines, so that they can be compared. The height is in inches.
    """
    members: dict[Key, list[Span]] = defaultdict(list)
    for part, overlay in ((spans, False), (planned, True)):
        for span in part:
            members[span.rank, span.axis, overlay].append(span)
    levels = {key: depths(own) for key, own in members.items()}
    lanes, height = _stack(levels, bool(planned))
    stages = chunks([*spans, *planned])
    boxes = []
    for lane in lanes:
        key = (lane.rank, lane.axis, lane.overlay)
        own, level = members[key], levels.get(key, [])
        share = lane.height / (max(level, default=0) + 1)
        for span, depth in zip(own, level, strict=True):
            chunk = stages.get((span.rank, span.stage), 0)
            left, right, top = span.start * 1e3, span.end * 1e3, lane.top + depth * share
            boxes.append(Box(span, chunk, lane.overlay, left, right, top, top + share))
    return lanes, boxes, height


def _stack(levels: dict[Key, list[int]], with_overlay: bool) -> tuple[list[Lane], float]:
    """Return the lines from top to bottom, in at most MAX_HEIGHT inches, and the total height."""
    ranks = sorted({rank for rank, _, _ in levels})
    axes = sorted({axis for _, axis, _ in levels if axis is not None})
    computes = with_overlay or len(axes) != 1 or any(axis is None for _, axis, _ in levels)
    kinds: list[tuple[str | None, bool, float]] = [(None, False, COMPUTE)] if computes else []
    if with_overlay:
        kinds.insert(0, (None, True, OVERLAY))
    for name in axes:
        deepest = max(max(own) for (_, axis, _), own in levels.items() if axis == name)
        height = COMM * min(deepest + 1, MOST_LEVELS)
        kinds.append((name, False, height if computes else max(height, COMPUTE)))
    whole = len(ranks) * (GAP + sum(height for _, _, height in kinds))
    scale = min(1.0, MAX_HEIGHT / whole)
    lanes, top = [], GAP * scale / 2
    for rank in ranks:
        for axis, overlay, height in kinds:
            leads = not overlay and (axis is None or not computes)
            lanes.append(Lane(rank, axis, overlay, top, height * scale, leads))
            top += height * scale
        top += GAP * scale
    return lanes, whole * scale


def depths(spans: Sequence[Span]) -> list[int]:
    """Return, for each of ``spans`` in order of start, the lowest level without an overlap.

    All levels are 0 if no spans overlap; two operations in flight at once get levels 0 and 1.
    """
    free: list[int] = []  # levels that are not in use
    running: list[tuple[float, int]] = []  # (end, level)
    levels = []
    for span in spans:
        while running and running[0][0] <= span.start + SLACK:
            heapq.heappush(free, heapq.heappop(running)[1])
        level = heapq.heappop(free) if free else len(running)
        heapq.heappush(running, (span.end, level))
        levels.append(level)
    return levels


def chunks(spans: Sequence[Span]) -> dict[tuple[int, int | None], int]:
    """Return the index of each (rank, stage) among the stages of its rank: 0, 1, ..."""
    stages: dict[int, set[int]] = defaultdict(set)
    for span in spans:
        if span.stage is not None and not span.is_comm:
            stages[span.rank].add(span.stage)
    return {
        (rank, stage): chunk
        for rank, own in stages.items()
        for chunk, stage in enumerate(sorted(own))
    }
