"""The timeline: who does what, and when. A line for each rank, and one for each axis it uses."""

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
from course_lib.view.lanes import Box, Lane, chunks, layout
from course_lib.view.style import LOOKS, SMALL, WIDTH, Look, Picture, frame, look_of
from course_lib.view.summary import milliseconds, read, sentence, summarize

IDLE = "#EDEDED"
WORDS = {"F": "F forward", "B": "B backward", "I": "I input grad", "W": "W weight grad"}
SOURCES = {"measured": "times measured on real ranks", "simulated": "simulated, not measured"}
LEFT, RIGHT, BELOW = 0.85, 0.12, 0.42  # margins around the axes, inches
LEGEND_LINE, LEGEND_COLUMNS = 0.24, 7
SMALLEST = 5.5  # points: below that no text is better than text


def timeline(
    source: Iterable[Span | Trace],
    *,
    title: str = "What each rank does, and when",
    overlay: Iterable[Span] | None = None,
    conditions: Conditions | None = None,
    kind: Literal["measured", "simulated"] = "measured",
    note: str = "",
    width: float = WIDTH,
) -> Picture:
    """Draw spans as boxes over time in ms, and one sentence with the numbers underneath.

    ``source`` are spans or traces (of which the overshoot of their sleeps is taken too, and
    above ``TOO_BUSY`` the sentence warns). Each rank has a line for compute and one for each
    axis on which it communicates; operations in flight at once stand below each other. A box
    has its operation's colour and hatch, and where it fits its micro-batch or label.

    ``overlay`` are simulated spans in seconds, drawn as outlines in a thin line above each
    rank's own; both start at 0. ``conditions`` say what was paced and emulated. ``kind`` is
    what ``source`` is. ``note`` is added to the sentence. ``width`` is in inches.

    Raises ValueError when there are no spans. Returns a Figure: show it by returning it from a
    cell, or ``savefig`` it; its sentence is ``.caption``.
    """
    spans, busy = read(source)
    spans, planned = from_zero(spans), from_zero(overlay or ())
    said = _said(spans, planned, kind)
    caption = sentence(summarize(spans), source=said, conditions=conditions, busy=busy, note=note)
    lanes, boxes, height = layout(spans, planned)
    looks = _looks(spans)
    keys = _legend_keys(looks, bool(planned))
    legend = LEGEND_LINE * -(-len(keys) // LEGEND_COLUMNS)
    picture = frame(width, height + legend + BELOW, title, caption)
    end = max(box.right for box in boxes) or 1e-6
    ax = _axes(picture, height, end)
    _draw_lanes(ax, lanes)
    _draw_boxes(ax, boxes, looks, inches_per_ms=(width - LEFT - RIGHT) / end)
    _draw_legend(picture, keys, height)
    return picture


def _said(spans: Sequence[Span], planned: Sequence[Span], kind: str) -> str:
    """What the boxes are, in words."""
    if kind not in SOURCES:
        raise ValueError(f"kind={kind!r}: it is one of {', '.join(SOURCES)}")
    said = SOURCES[kind]
    if any(chunks(spans).values()):
        said += ", paler boxes with ′ are a rank's second stage"
    if planned:
        plan = summarize(planned)
        said += f", outlines simulated: {milliseconds(plan.makespan)}, {plan.idle:.1%} idle"
    return said


def _looks(spans: Sequence[Span]) -> dict[str, Look]:
    """The look of each operation present: known ones in fixed order, then the others."""
    present = {span.op for span in spans}
    known = [op for op in LOOKS if op in present]
    return look_of(known + sorted(present - set(known)))


def _axes(picture: Picture, height: float, end: float) -> Axes:
    """Axes ``height`` inches high from 0 to ``end`` ms; y is in inches from the top."""
    width, inches = picture.get_size_inches()
    bottom = style.caption_height(picture.caption, width) + BELOW
    ax = picture.add_axes(
        (LEFT / width, bottom / inches, 1 - (LEFT + RIGHT) / width, height / inches)
    )
    ax.set_xlim(0, end)
    ax.set_ylim(height, 0)
    ax.set_xlabel("time (ms)", size=style.NORMAL, labelpad=2)
    ax.tick_params(axis="x", labelsize=SMALL, length=3)
    ax.set_yticks([])
    for side in ("left", "right", "top"):
        ax.spines[side].set_visible(False)
    return ax


def _draw_lanes(ax: Axes, lanes: Sequence[Lane]) -> None:
    """Grey ground (idle) behind compute, and the names of ranks and axes at the left."""
    size = min(style.NORMAL, min(lane.height for lane in lanes) * 72 * 0.8)
    for lane in lanes:
        name, weight, colour = str(lane.axis), "normal", "#444444"
        if lane.overlay:
            name = "simulated"
        elif lane.axis is None:
            name, weight, colour = f"rank {lane.rank}", "bold", "black"
            ax.axhspan(lane.top, lane.top + lane.height, color=IDLE, lw=0, zorder=0)
        ax.text(
            -0.008,
            lane.top + lane.height / 2,
            name,
            transform=ax.get_yaxis_transform(),
            size=size,
            weight=weight,
            color=colour,
            ha="right",
            va="center",
            gid="lane",
        )
    ax.grid(axis="x", color="#CCCCCC", lw=0.5)
    ax.set_axisbelow(True)


def _draw_boxes(
    ax: Axes, boxes: Sequence[Box], looks: Mapping[str, Look], inches_per_ms: float
) -> None:
    """All boxes; those that look the same are one collection, which keeps long runs fast."""
    same: dict[tuple[str, int, bool], list[Box]] = defaultdict(list)
    for box in boxes:
        same[box.span.op, box.chunk % 2, box.overlay].append(box)
    for (op, odd, overlay), group in same.items():
        face = "#FFFFFF" if overlay else looks[op].colour
        if odd and not overlay:
            face = style.mix(face, "#FFFFFF", 0.55)
        corners = [box.corners for box in group]
        typical = median(box.right - box.left for box in group) * inches_per_ms * 72
        if not overlay:
            _fill(ax, corners, face, looks[op].hatch)
        ax.add_collection(
            PolyCollection(
                corners,
                facecolors="none",
                edgecolors="black",
                linewidths=min(0.7, typical / 8),
                zorder=3,
            )
        )
        for box in group:
            _label(ax, box, face, inches_per_ms)


def _fill(ax: Axes, corners: list, face: str, hatch: str) -> None:
    """Colour and hatch. Apart from the edge, since a hatch takes its colour and must be fainter."""
    ink = style.mix(face, style.ink_on(face), 0.45)
    boxes = PolyCollection(
        corners, facecolors=face, edgecolors=ink, hatch=hatch, linewidths=0, zorder=2
    )
    ax.add_collection(boxes)


def _label(ax: Axes, box: Box, face: str, inches_per_ms: float) -> None:
    """Write the longest name of the span that fits into its box, if any does."""
    size = min(SMALL, (box.bottom - box.top) * 72 * 0.62)
    room = (box.right - box.left) * inches_per_ms - 0.05
    if size < SMALLEST or room <= 0:
        return
    names = (name for name in _names(box) if len(name) * size * 0.63 / 72 <= room)
    if name := next(names, None):
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


def _names(box: Box) -> list[str]:
    """What a box may be called, the most telling first."""
    span = box.span
    names = [span.label] if span.label else []
    if span.mb is not None:
        number = f"{span.mb}{'′' * box.chunk}"
        names += [number] if span.is_comm else [f"{span.op}{number}", number]
    last = span.label.split()[-1:]
    if last and last[0].isdigit():
        names += last
    return names if names else [span.op]


def _legend_keys(looks: Mapping[str, Look], planned: bool) -> list[Patch]:
    """What colours and hatches mean."""
    keys = []
    for op, look in looks.items():
        ink = style.mix(look.colour, look.ink, 0.45)
        keys.append(
            Patch(facecolor=look.colour, edgecolor=ink, hatch=look.hatch, label=WORDS.get(op, op))
        )
    keys.append(Patch(facecolor=IDLE, edgecolor="#999999", label="idle"))
    if planned:
        keys.append(Patch(facecolor="none", edgecolor="black", label="simulated"))
    return keys


def _draw_legend(picture: Picture, keys: Sequence[Patch], height: float) -> None:
    width, inches = picture.get_size_inches()
    bottom = style.caption_height(picture.caption, width) + BELOW + height + 0.02
    picture.legend(
        handles=keys,
        loc="lower left",
        bbox_to_anchor=(LEFT / width, bottom / inches),
        ncols=min(LEGEND_COLUMNS, len(keys)),
        fontsize=SMALL + 0.5,
        frameon=False,
        borderpad=0,
        borderaxespad=0,
        handlelength=2.0,
        handleheight=1.1,
        columnspacing=1.4,
    )
