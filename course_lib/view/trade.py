"""The trade-off of memory against bubble: each schedule is a point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from course_lib.view import style
from course_lib.view.bars import BELOW
from course_lib.view.memory import COLORS
from course_lib.view.style import NORMAL, SMALL, WIDTH, Picture, frame

HEIGHT, LEFT, RIGHT = 3.2, 0.75, 0.3  # inches
NEAR = (1.0, 0.03)  # the names of closer points would overlap

Point = tuple[float, float]  # memory in micro-batches, bubble as a share from 0 to 1


def trade_plot(
    points: Mapping[str, Point],
    lines: Mapping[str, Sequence[Point]],
    floors: Mapping[str, float],
    *,
    title: str = "Memory against bubble",
    note: str = "",
    width: float = WIDTH,
) -> Picture:
    """Draw named points, lines through other points, and dotted lower bounds of the bubble.

    The caption names the point with the smallest bubble; of several, the one with the least
    memory. Raises ValueError without points, and for more than four lines or bounds.
    """
    if not points:
        raise ValueError("expected at least one point, got none")
    if (most := max(len(lines), len(floors))) > len(COLORS):
        raise ValueError(f"expected at most {len(COLORS)} lines and bounds, got {most}")
    best = min(points, key=lambda name: (round(points[name][1], 9), points[name][0]))
    memory, share = points[best]
    caption = (
        f"Simulated. Smallest bubble: {best}, {share:.1%} of total time with {memory:.3g} "
        f"micro-batches in flight. {note}"
    ).strip()
    looks = [*zip(lines, COLORS, strict=False)], [*zip(floors, COLORS, strict=False)]
    entries = [Line2D([], [], color=c, lw=1.4, marker=".", label=name) for name, c in looks[0]]
    entries += [Line2D([], [], color=c, lw=1.2, ls=":", label=name) for name, c in looks[1]]
    above = style.legend_height(entries) if entries else 0.0
    picture = frame(width, HEIGHT + above + BELOW, title, caption)
    ax = _axes(picture)
    for name, color in looks[0]:
        ax.plot(*zip(*lines[name], strict=True), color=color, lw=1.4, marker=".", zorder=2)
    for name, color in looks[1]:
        ax.axhline(floors[name], color=color, lw=1.2, ls=":", zorder=1)
    _draw_points(ax, points)
    ax.set_xlim(0, 1.15 * max(memory for memory, _ in points.values()))
    ax.set_ylim(0, 1.2 * max(share for _, share in points.values()))
    if entries:
        style.legend(picture, entries, LEFT, BELOW + HEIGHT)
    return picture


def _axes(picture: Picture) -> Axes:
    width, inches = picture.get_size_inches()
    bottom = style.caption_height(picture.caption, width) + BELOW
    ax = picture.add_axes(
        (LEFT / width, bottom / inches, 1 - (LEFT + RIGHT) / width, HEIGHT / inches)
    )
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.tick_params(labelsize=SMALL, length=3)
    ax.set_xlabel("peak micro-batches in flight, maximum over ranks", size=NORMAL, labelpad=2)
    ax.set_ylabel("bubble, share of total time", size=NORMAL)
    ax.grid(color="#CCCCCC", lw=0.5)
    ax.set_axisbelow(True)
    for side in ("right", "top"):
        ax.spines[side].set_visible(False)
    return ax


def _draw_points(ax: Axes, points: Mapping[str, Point]) -> None:
    """Write names to the right above their points, or to the left below if a point is close."""
    for name, (memory, share) in points.items():
        crowded = any(
            0 < other - memory < NEAR[0] and abs(height - share) < NEAR[1]
            for other, height in points.values()
        )
        ax.plot([memory], [share], "o", color=style.BLACK, ms=7, zorder=3)
        ax.annotate(
            name, (memory, share), xytext=(-8, -15) if crowded else (8, 7),
            textcoords="offset points", ha="right" if crowded else "left",
            size=NORMAL, weight="bold", zorder=4,
        )  # fmt: skip
