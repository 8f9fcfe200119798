"""A simulated schedule as a picture: actions, bubble and micro-batches in flight per rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch, Rectangle

from course_lib.schedule import Simulation, Span
from course_lib.schedule.text import numbers, title_of, unequal
from course_lib.view import style
from course_lib.view.gantt import BELOW, LEFT, SMALLEST, WORDS, axes, draw_boxes, looks_of
from course_lib.view.lanes import Box, chunks
from course_lib.view.style import NORMAL, SMALL, WIDTH, Picture, frame

WORK, FLIGHT, GAP = 0.30, 0.22, 0.12  # heights in inches: actions, micro-batches in flight, space
MAX_HEIGHT = 7.0
RIGHT = 0.7  # inches right of the axes, for the peaks
BUBBLE, BUBBLE_INK = "#FBE3DC", "#D98870"
IN_FLIGHT, IN_FLIGHT_INK = "#9A9A9A", "#444444"


def schedule_picture(
    simulation: Simulation, *, title: str = "", note: str = "", width: float = WIDTH
) -> Picture:
    """Draw a simulated schedule; time is in the unit of its costs.

    Each rank has a line with its actions, dotted where it is idle. Below it are the (stage,
    micro-batch) pairs in flight, on the same scale for all ranks, with the peak at the right end.
    ``title`` defaults to the schedule's name and costs; ``note`` is added to the caption.
    ``width`` is in inches. Returns a Figure with its caption in ``.caption``.
    """
    caption = _caption(simulation, note)
    looks = looks_of(simulation.spans)
    keys = style.keys({WORDS.get(op, op): look for op, look in looks.items()})
    keys.append(Patch(facecolor=BUBBLE, edgecolor=BUBBLE_INK, hatch="..", label="idle: bubble"))
    keys.append(Patch(facecolor=IN_FLIGHT, edgecolor=IN_FLIGHT_INK, label="in flight"))
    ranks = simulation.schedule.ranks
    scale = min(1.0, MAX_HEIGHT / (ranks * (WORK + FLIGHT + GAP)))
    height = ranks * (WORK + FLIGHT + GAP) * scale
    picture = frame(
        width, height + style.legend_height(keys) + BELOW, title or title_of(simulation), caption
    )
    end = simulation.makespan
    ax = axes(picture, height, end, "time (in the unit of the costs)", right=RIGHT)
    tops = [(rank * (WORK + FLIGHT + GAP) + GAP / 2) * scale for rank in range(ranks)]
    _draw_bubble(ax, tops, end, WORK * scale)
    boxes = _boxes(simulation, tops, WORK * scale)
    draw_boxes(ax, boxes, looks, (width - LEFT - RIGHT) / end)
    _draw_in_flight(ax, simulation, [top + WORK * scale for top in tops], FLIGHT * scale)
    _draw_names(ax, simulation, tops, scale)
    style.legend(picture, keys, LEFT, BELOW + height)
    return picture


def _caption(simulation: Simulation, note: str) -> str:
    text = f"{numbers(simulation)} Simulated, not measured."
    if simulation.costs.per_stage is not None:
        text += f" {unequal(simulation.costs.per_stage)}"
    most = max(chunks(simulation.spans).values())
    if most:
        which = "later stages" if most > 1 else "second stage"
        text += f" Paler boxes, with ′ where it fits, are a rank's {which}."
    return f"{text} {note}".strip()


def _boxes(simulation: Simulation, tops: Sequence[float], height: float) -> list[Box]:
    stages = chunks(simulation.spans)
    return [
        Box(
            span,
            stages.get((rank, span.stage), 0),
            overlay=False,
            left=span.start,
            right=span.end,
            top=top,
            bottom=top + height,
        )
        for rank, top in enumerate(tops)
        for span in simulation.rows[rank]
    ]


def _draw_bubble(ax: Axes, tops: Sequence[float], end: float, height: float) -> None:
    """Draw a dotted background, which is visible where there is no action."""
    for top in tops:
        ground = Rectangle((0, top), end, height, fc=BUBBLE, ec=BUBBLE_INK, hatch="..", lw=0)
        ax.add_patch(ground)


def _draw_in_flight(ax: Axes, simulation: Simulation, tops: Sequence[float], height: float) -> None:
    """Draw steps below each rank's actions: one up at the start of F, one down after B or W."""
    most = max(simulation.schedule.peak_in_flight())
    areas = [
        _outline(in_flight(row), top + height, height / most)
        for row, top in zip(simulation.rows, tops, strict=True)
    ]
    ax.add_collection(
        PolyCollection(areas, facecolors=IN_FLIGHT, edgecolors=IN_FLIGHT_INK, linewidths=0.6)
    )


def _outline(
    steps: Sequence[tuple[float, int]], base: float, unit: float
) -> list[tuple[float, float]]:
    """Return the corners of the area between ``base`` and the steps (y grows downwards)."""
    corners = [(steps[0][0], base)]
    for (start, count), (end, _) in pairwise(steps):
        corners += [(start, base - count * unit), (end, base - count * unit)]
    return [*corners, (steps[-1][0], base)]


def in_flight(row: Sequence[Span]) -> list[tuple[float, int]]:
    """Return (time, micro-batches in flight from then on); ends count before starts."""
    changes = [(span.start, 1) for span in row if span.op == "F"]
    changes += [(span.end, -1) for span in row if span.op in ("B", "W")]
    steps: list[tuple[float, int]] = []
    now = 0
    for time, change in sorted(changes):
        now += change
        if steps and steps[-1][0] == time:
            steps.pop()
        if not steps or steps[-1][1] != now:
            steps.append((time, now))
    return steps


def _draw_names(ax: Axes, simulation: Simulation, tops: Sequence[float], scale: float) -> None:
    """Write ranks at the left and peaks at the right; for many ranks, only every n-th."""
    pitch = (WORK + FLIGHT + GAP) * scale
    size = max(SMALLEST, min(NORMAL, WORK * scale * 72 * 0.8))
    every = max(1, -(-int(size * 1.2) // int(pitch * 72))) if pitch * 72 < size * 1.2 else 1
    side = ax.get_yaxis_transform()
    for rank, peak in enumerate(simulation.schedule.peak_in_flight()):
        if rank % every:
            continue
        middle = tops[rank] + WORK * scale / 2
        below = tops[rank] + (WORK + FLIGHT / 2) * scale
        ax.text(
            -0.008, middle, f"rank {rank}", transform=side, size=size, weight="bold",
            ha="right", va="center", gid="lane",
        )  # fmt: skip
        ax.text(
            1.008, below, f"peak {peak}", transform=side, size=min(size, SMALL + 0.5),
            weight="bold", ha="left", va="center", gid="peak",
        )  # fmt: skip
