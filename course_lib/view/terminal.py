"""The timeline for terminals: plain ASCII, one character per slice of time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from course_lib.mesh import Conditions
from course_lib.schedule import Span, from_zero
from course_lib.schedule.text import FILLS as ACTION_FILLS
from course_lib.schedule.text import IDLE
from course_lib.trace import Trace
from course_lib.view.lanes import Box, Lane, layout
from course_lib.view.summary import described, read, sentence, summarize

FILLS = {**ACTION_FILLS, "optimizer": "*"}
COMM = "~"
NARROWEST = 20


def terminal_timeline(
    source: Iterable[Span | Trace],
    *,
    width: int = 100,
    conditions: Conditions | None = None,
    kind: Literal["measured", "simulated"] = "measured",
    note: str = "",
) -> str:
    """Draw spans as text, ``width`` characters wide: ``F0-B0==`` is F, then B of micro-batch 0.

    Each rank has a line for compute and one per axis. Operations in flight at the same time are
    below each other; dots are idle time. The caption with the numbers is last. Raises ValueError
    without spans, and for ``width`` under 20.
    """
    spans, busy = read(source)
    if width < NARROWEST:
        raise ValueError(f"expected a width of at least {NARROWEST} characters, got width={width}")
    spans = from_zero(spans)
    lanes, boxes, _ = layout(spans, [])
    margin = max(len(_name(lane)) for lane in lanes) + 2
    columns = width - margin
    end = max(box.right for box in boxes) or 1e-6
    lines = []
    for lane in lanes:
        inside = [b for b in boxes if b.span.rank == lane.rank and b.span.axis == lane.axis]
        for number, line in enumerate(_draw(inside, columns, columns / end)):
            if lane.axis is None:
                line = line.replace(" ", IDLE)
            name = "" if number else _name(lane)
            lines.append(f"{name.ljust(margin)}{line}".rstrip())
    said = sentence(
        summarize(spans),
        source=described(spans, [], kind),
        conditions=conditions,
        busy=busy,
        note=note,
    )
    return "\n".join([*lines, _scale(margin, columns, end), said.replace("′", "'")])


def _name(lane: Lane) -> str:
    return lane.name if lane.leads else f"  {lane.name}"


def _draw(boxes: Sequence[Box], columns: int, per_ms: float) -> list[str]:
    """Return the text lines of one lane, a line per level of boxes (at least one)."""
    tops = sorted({box.top for box in boxes})
    lines = [[" "] * columns for _ in tops] or [[" "] * columns]
    for box in boxes:
        first = min(columns - 1, round(box.left * per_ms))
        last = min(columns, max(first + 1, round(box.right * per_ms)))
        fill = COMM if box.span.is_comm else FILLS.get(box.span.op, "#")
        text = _text(box)[: last - first].ljust(last - first, fill)
        lines[tops.index(box.top)][first:last] = text
    return ["".join(line) for line in lines]


def _text(box: Box) -> str:
    span = box.span
    if span.mb is not None and not span.label:
        return f"{span.op}{span.mb}" + "'" * box.chunk
    return (span.label or span.op).replace(" ", "_")


def _scale(margin: int, columns: int, end: float) -> str:
    """Return the time axis: 0 at the left, the end in ms at the right."""
    right = f"{end:.3g} ms" if end < 1000 else f"{end:.0f} ms"
    return " " * margin + "0" + right.rjust(columns - 1)
