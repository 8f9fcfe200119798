"""A roofline: how fast work can go, by how many FLOPs it has for each byte that must be moved.

Under a roof (peak, bandwidth) nothing is faster than min(peak, FLOPs for each byte * bandwidth).
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
from course_lib.view.memory import COLOURS, LINES
from course_lib.view.style import NORMAL, SMALL, WIDTH, Picture, frame

HEIGHT, RIGHT = 2.8, 0.3  # inches
MARGIN = 8  # times beyond the outermost bend or point, on either side
UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1.0, ""))

Points = Mapping[float, float]  # FLOPs for each byte -> FLOPs a second
Roof = tuple[float, float]  # FLOPs a second at most, bytes a second


def roofline(
    points: Mapping[str, Points],
    roofs: Mapping[str, Roof],
    *,
    title: str = "Roofline",
    x: str = "FLOPs for each byte moved",
    note: str = "",
    width: float = WIDTH,
) -> Picture:
    """Roofs as lines, measured points under them, both axes logarithmic.

    The sentence says where each roof bends: left of that bytes are the limit, right of it
    arithmetic. Raises ValueError when there is no roof, or a sort has more than four names.
    """
    if not roofs:
        raise ValueError("there is nothing to draw: roofline wants at least one roof")
    if max(len(points), len(roofs)) > len(COLOURS):
        raise ValueError(f"more than {len(COLOURS)} names cannot be told apart")
    bends = {name: peak / bandwidth for name, (peak, bandwidth) in roofs.items()}
    told = "; ".join(f"{name} bends at {bend:,.0f}" for name, bend in bends.items())
    caption = f"{told} FLOPs a byte: left of it bytes are the limit. {note}".strip()
    caption = caption[0].upper() + caption[1:]
    picture = frame(width, HEIGHT + LEGEND + BELOW, title, caption)
    ax = _axes(picture, x)
    places = [*bends.values(), *(place for each in points.values() for place in each)]
    first, last = min(places) / MARGIN, max(places) * MARGIN
    entries = []
    for (name, (peak, bandwidth)), colour, dashes in zip(
        roofs.items(), COLOURS, LINES, strict=False
    ):
        corners = [first, bends[name], last]
        ax.plot(corners, [min(peak, at * bandwidth) for at in corners], dashes, color=colour, lw=2)
        entries.append(Line2D([], [], color=colour, ls=dashes, lw=2, label=name))
    for (name, own), colour, dot in zip(points.items(), reversed(COLOURS), DOTS, strict=False):
        ax.plot(list(own), list(own.values()), dot, color=colour, ms=5, zorder=3)
        entries.append(Line2D([], [], color=colour, marker=dot, ls="", ms=5, label=name))
    style.legend(picture, entries, LEFT, BELOW + HEIGHT)
    return picture


def rate_text(flops: float) -> str:
    """FLOPs a second as text: 2 GFLOP/s."""
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
