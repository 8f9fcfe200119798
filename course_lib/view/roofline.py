"""A roofline: the highest possible FLOP/s, by FLOPs per byte that must be moved.

Under a roof (peak, bandwidth), the limit is min(peak, FLOPs per byte * bandwidth).
Source: Williams, Waterman and Patterson 2009, doi:10.1145/1498765.1498785.
"""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from course_lib.view import style
from course_lib.view.bars import BELOW, LEFT, LEGEND
from course_lib.view.fit_plot import DOTS
from course_lib.view.memory import COLORS, LINES
from course_lib.view.style import NORMAL, SMALL, WIDTH, Picture, frame

HEIGHT, RIGHT = 2.8, 0.3  # inches
MARGIN = 8  # factor by which the x axis extends beyond the outermost corner or point
UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1.0, ""))

Points = Mapping[float, float]  # FLOPs per byte -> FLOPs per second
Roof = tuple[float, float]  # peak FLOPs per second, bytes per second


def roofline(
    points: Mapping[str, Points],
    roofs: Mapping[str, Roof],
    *,
    title: str = "Roofline",
    x: str = "FLOPs per byte moved",
    note: str = "",
    width: float = WIDTH,
) -> Picture:
    """Draw roofs as lines, with measured points under them; both axes are logarithmic.

    The caption says where each roof bends: bandwidth is the limit to the left of the bend,
    arithmetic to the right of it. Raises ValueError without a roof, and for more than four roofs
    or more than four names of points.
    """
    if not roofs:
        raise ValueError("expected at least one roof, got none")
    if (most := max(len(points), len(roofs))) > len(COLORS):
        raise ValueError(f"expected at most {len(COLORS)} names, got {most}")
    bends = {name: peak / bandwidth for name, (peak, bandwidth) in roofs.items()}
    told = "; ".join(f"{name} bends at {bend:,.0f}" for name, bend in bends.items())
    caption = f"{told} FLOPs per byte; to the left of it, bandwidth is the limit. {note}".strip()
    caption = caption[0].upper() + caption[1:]
    picture = frame(width, HEIGHT + LEGEND + BELOW, title, caption)
    ax = _axes(picture, x)
    places = [*bends.values(), *(place for each in points.values() for place in each)]
    first, last = min(places) / MARGIN, max(places) * MARGIN
    entries = []
    for (name, (peak, bandwidth)), color, dashes in zip(roofs.items(), COLORS, LINES, strict=False):
        corners = [first, bends[name], last]
        ax.plot(corners, [min(peak, at * bandwidth) for at in corners], dashes, color=color, lw=2)
        entries.append(Line2D([], [], color=color, ls=dashes, lw=2, label=name))
    for (name, own), color, dot in zip(points.items(), reversed(COLORS), DOTS, strict=False):
        ax.plot(list(own), list(own.values()), dot, color=color, ms=5, zorder=3)
        entries.append(Line2D([], [], color=color, marker=dot, ls="", ms=5, label=name))
    style.legend(picture, entries, LEFT, BELOW + HEIGHT)
    return picture


def rate_text(flops: float) -> str:
    """Return FLOPs per second as text: 2 GFLOP/s."""
    factor, letter = next((f, unit) for f, unit in UNITS if flops >= f or f == 1.0)
    return f"{flops / factor:.3g} {letter}FLOP/s"


def _axes(picture: Picture, x: str) -> Axes:
    width, inches = picture.get_size_inches()
    bottom = style.caption_height(picture.caption, width) + BELOW
    ax = picture.add_axes(
        (LEFT / width, bottom / inches, 1 - (LEFT + RIGHT) / width, HEIGHT / inches)
    )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:,g}"))
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: rate_text(rate)))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_formatter(NullFormatter())
    ax.tick_params(labelsize=SMALL, length=3)
    ax.set_xlabel(x, size=NORMAL, labelpad=2)
    ax.grid(color="#CCCCCC", lw=0.5)
    ax.set_axisbelow(True)
    for side in ("right", "top"):
        ax.spines[side].set_visible(False)
    return ax
