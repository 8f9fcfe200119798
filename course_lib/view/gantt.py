"""The timeline of all ranks: one line per rank for compute, and one per axis that it uses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch

from course_lib.mesh import Conditions
from course_lib.schedule import Span, from_zero
from course_lib.trace import Trace
from course_lib.view import style
from course_lib.view.lanes import Box, Lane, layout
from course_lib.view.style import OPERATIONS, SMALL, WIDTH, Look, Picture, frame, look_of
from course_lib.view.summary import described, read, sentence, summarize

IDLE = "#EDEDED"
WORDS = {"F": "F forward", "B": "B backward", "I": "I input grad", "W": "W weight grad"}
SHORT = {
    "all_reduce": "AR",
    "all_gather": "AG",
    "reduce_scatter": "RS",
    "all_to_all": "A2A",
    "broadcast": "BC",
}
LEFT, RIGHT, BELOW = 0.85, 0.12, 0.42  # margins around the axes, inches
SLIVER = 0.015  # inches, about two pixels; narrower boxes have a color and no outline
SMALLEST = 5.5  # points; smaller text is not drawn


def timeline(
    source: Iterable[Span | Trace],
    *,
    title: str = "Timeline of all ranks",
    overlay: Iterable[Span] | None = None,
    conditions: Conditions | None = None,
    kind: Literal["measured", "simulated"] = "measured",
    note: str = "",
    width: float = WIDTH,
) -> Picture:
    """Draw spans as boxes over time in ms, with the numbers in a caption.

    ``source`` has spans or traces. For traces whose sleeps took too long (more than ``TOO_BUSY``),
    the caption has a warning. Each rank has a line for compute and one per axis on which it
    communicates; if there are only messages on one axis, there is no line for compute. Operations
    in flight at the same time are drawn below each other. A box has the color and the hatch of its
    operation, and its micro-batch or label if there is space.

    ``overlay`` has simulated spans in seconds, drawn as outlines in a thin line above the line of
    each rank; both start at 0. ``conditions`` are the pace and the emulated links, for the
    caption. ``kind`` says whether ``source`` was measured or simulated. ``note`` is added to the
    caption. ``width`` is in inches.

    Raises ValueError when there are no spans. Returns a Figure: show it by returning it from a
    cell, or call ``savefig``; its caption is ``.caption``.
    """
    spans, busy = read(source)
    spans, planned = from_zero(spans), from_zero(overlay or ())
    said = described(spans, planned, kind)
    caption = sentence(summarize(spans), source=said, conditions=conditions, busy=busy, note=note)
    lanes, boxes, height = layout(spans, planned)
    looks = looks_of(spans)
    keys = style.keys({WORDS.get(op, op): look for op, look in looks.items()})
    keys.append(Patch(facecolor=IDLE, edgecolor="#999999", label="idle"))
    if planned:
        keys.append(Patch(facecolor="none", edgecolor="black", label="simulated"))
    picture = frame(width, height + style.legend_height(keys) + BELOW, title, caption)
    end = max(box.right for box in boxes) or 1e-6
    ax = axes(picture, height, end, "time (ms)")
    _draw_lanes(ax, lanes)
    draw_boxes(ax, boxes, looks, inches_per_ms=(width - LEFT - RIGHT) / end)
    style.legend(picture, keys, LEFT, BELOW + height)
    return picture


def looks_of(spans: Sequence[Span]) -> dict[str, Look]:
    """Return the look of each operation in ``spans``: known ones in fixed order, then others."""
    present = {span.op for span in spans}
    known = [op for op in OPERATIONS if op in present]
    return look_of(known + sorted(present - set(known)))


def axes(
    picture: Picture, height: float, end: float, time: str, left: float = LEFT, right: float = RIGHT
) -> Axes:
    """Add axes ``height`` inches high; x is ``time`` from 0 to ``end``, y inches from the top."""
    width, inches = picture.get_size_inches()
    bottom = style.caption_height(picture.caption, width) + BELOW
    ax = picture.add_axes(
        (left / width, bottom / inches, 1 - (left + right) / width, height / inches)
    )
    ax.set_xlim(0, end)
    ax.set_ylim(height, 0)
    ax.set_xlabel(time, size=style.NORMAL, labelpad=2)
    ax.tick_params(axis="x", labelsize=SMALL, length=3)
    ax.set_yticks([])
    for side in ("left", "right", "top"):
        ax.spines[side].set_visible(False)
    return ax


def _draw_lanes(ax: Axes, lanes: Sequence[Lane]) -> None:
    """Draw a gray (idle) background for each rank's first line, and the names at the left."""
    size = min(style.NORMAL, min(lane.height for lane in lanes) * 72 * 0.8)
    for lane in lanes:
        weight, color = ("bold", "black") if lane.leads else ("normal", "#444444")
        if lane.leads:
            ax.axhspan(lane.top, lane.top + lane.height, color=IDLE, lw=0, zorder=0)
        ax.text(
            -0.008,
            lane.top + lane.height / 2,
            lane.name,
            transform=ax.get_yaxis_transform(),
            size=size,
            weight=weight,
            color=color,
            ha="right",
            va="center",
            gid="lane",
        )
    ax.grid(axis="x", color="#CCCCCC", lw=0.5)
    ax.set_axisbelow(True)


def draw_boxes(
    ax: Axes, boxes: Sequence[Box], looks: Mapping[str, Look], inches_per_ms: float
) -> None:
    """Draw all boxes. Boxes of the same look are one collection, which is fast for long runs.

    ``inches_per_ms`` is the number of inches of paper per unit of the time axis.
    """
    same: dict[tuple[str, bool], list[Box]] = defaultdict(list)
    later = max((box.chunk for box in boxes), default=0)
    for box in boxes:
        same[box.span.op, box.overlay].append(box)
    for (op, overlay), group in same.items():
        widths = [(box.right - box.left) * inches_per_ms for box in group]
        form = _form(group, widths)
        slivers = median(widths) < SLIVER
        for chunk in sorted({box.chunk for box in group}):  # later stages of a rank are paler
            alike = [box for box in group if box.chunk == chunk]
            corners = [box.corners for box in alike]
            face = "#FFFFFF" if overlay else looks[op].color
            if not overlay:
                face = style.mix(
                    face, "#FFFFFF", (0.75 if later > 1 else 0.55) * chunk / max(1, later)
                )
                _fill(ax, corners, face, "" if slivers else looks[op].hatch, snap=not slivers)
            if slivers:  # an outline would hide the color
                continue
            outlines = PolyCollection(corners, facecolors="none", edgecolors="black", zorder=3)
            outlines.set_linewidth(min(0.7, median(widths) * 72 / 8))
            ax.add_collection(outlines)
            for box in alike:
                _label(ax, box, face, _from(_names(box), form), inches_per_ms)


def _fill(ax: Axes, corners: list, face: str, hatch: str, snap: bool) -> None:
    """Draw color and hatch, without the edge: a hatch has the edge's color and must be fainter."""
    ink = style.mix(face, style.ink_on(face), 0.45)
    boxes = PolyCollection(
        corners, facecolors=face, edgecolors=ink, hatch=hatch or None, linewidths=0, zorder=2
    )
    boxes.set_snap(None if snap else False)  # snapping slivers to pixels would make a pattern
    ax.add_collection(boxes)


def _form(group: Sequence[Box], widths: Sequence[float]) -> int:
    """Return which of its names is written into all boxes of an operation.

    It is the longest name that fits into four out of five of the boxes that have space for any.
    """
    size = _size(group[0])
    names = [_names(box) for box in group]
    able = [
        width for own, width in zip(names, widths, strict=True) if _room(own[-1], size) <= width
    ]
    if not able:
        return 0
    usual = sorted(able)[len(able) // 5]
    forms = max(len(own) for own in names)
    needs = (max(_room(_from(own, form)[0], size) for own in names) for form in range(forms))
    return next((form for form, need in enumerate(needs) if need <= usual), forms - 1)


def _from(names: Sequence[str], form: int) -> Sequence[str]:
    """Return ``names`` without the first ``form`` ones, but at least the last."""
    return names[min(form, len(names) - 1) :]


def _label(ax: Axes, box: Box, face: str, names: Sequence[str], inches_per_ms: float) -> None:
    """Write the first of ``names`` that fits into the box, if any fits."""
    size, width = _size(box), (box.right - box.left) * inches_per_ms
    if size < SMALLEST or width <= 0:
        return
    if name := next((name for name in names if _room(name, size) <= width), None):
        ax.text(
            (box.left + box.right) / 2,
            (box.top + box.bottom) / 2,
            name,
            size=size,
            color=style.ink_on(face),
            ha="center",
            va="center_baseline",
            zorder=4,
            gid="box",
            bbox={"facecolor": face, "edgecolor": "none", "pad": 0.6},
        )


def _size(box: Box) -> float:
    """Return the font size in a box, in points."""
    return min(SMALL, (box.bottom - box.top) * 72 * 0.62)


def _room(name: str, size: float) -> float:
    """Return the inches that ``name`` needs in a box; letters are 0.63 times as wide as high."""
    return len(name) * size * 0.63 / 72 + 0.05


def _names(box: Box) -> list[str]:
    """Return the possible names of a box, the longest first.

    The last one omits the mark of a rank's later stage, which the paler color shows too.
    """
    span = box.span
    number = "" if span.mb is None else f"{span.mb}{'′' * box.chunk}"
    if span.label:
        last = span.label.split()[-1]
        return [span.label, last] if last.isdigit() else [span.label]
    if number and not span.is_comm:
        return list(dict.fromkeys([f"{span.op}{number}", number, str(span.mb)]))
    names = [f"{span.op} {number}", span.op, SHORT.get(span.op, span.op), number]
    return [name.strip() for name in names if name]
