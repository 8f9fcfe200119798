"""Curves by a formula and points measured, over a number that doubles: speed-up against ranks."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator

from course_lib.view import style
from course_lib.view.bars import BELOW, LEFT, LEGEND
from course_lib.view.memory import COLOURS, LINES
from course_lib.view.style import NORMAL, SMALL, WIDTH, Picture, frame

HEIGHT, RIGHT = 3.2, 0.3  # inches
DOTS = "osD^"

Values = Mapping[int, float]


def curves(
    formula: Mapping[str, Values],
    measured: Mapping[str, Values],
    *,
    across: str,
    up: str,
    ideal: str = "",
    title: str = "",
    note: str = "",
    width: float = WIDTH,
) -> Picture:
    """A line for each name of ``formula``, points for those of ``measured``; axes double.

    ``ideal`` names a thin grey diagonal, where there is to be one. The sentence says which point
    is farthest from its line. Raises ValueError when nothing is given or more than four names.
    """
    if not formula or len(formula) > len(COLOURS):
        raise ValueError(f"{len(formula)} curves: one to {len(COLOURS)} can be told apart")
    if unknown := set(measured) - set(formula):
        raise ValueError(f"points for {sorted(unknown)}, but the curves are {list(formula)}")
    caption = f"Lines by formula, points measured{_farthest(formula, measured)}. {note}".strip()
    picture = frame(width, HEIGHT + LEGEND + BELOW, title, caption)
    inches = picture.get_figheight()
    bottom = style.caption_height(caption, width) + BELOW
    ax = picture.add_axes(
        (LEFT / width, bottom / inches, 1 - (LEFT + RIGHT) / width, HEIGHT / inches)
    )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    entries = []
    for (name, line), colour, dashes, dot in zip(
        formula.items(), COLOURS, LINES, DOTS, strict=False
    ):
        ax.plot(list(line), list(line.values()), dashes, color=colour, lw=1.6)
        points = measured.get(name, {})
        ax.plot(list(points), list(points.values()), dot, color=colour, ms=6, zorder=3)
        marker = dot if points else ""
        entries.append(Line2D([], [], color=colour, ls=dashes, marker=marker, ms=6, label=name))
    if ideal:
        ends = [min(map(min, formula.values())), max(map(max, formula.values()))]
        ax.plot(ends, ends, color="#999999", lw=0.8, zorder=1)
        entries.append(Line2D([], [], color="#999999", lw=0.8, label=ideal))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    ax.tick_params(labelsize=SMALL, length=3)
    ax.set_xlabel(across, size=NORMAL, labelpad=2)
    ax.set_ylabel(up, size=NORMAL, labelpad=2)
    ax.grid(color="#CCCCCC", lw=0.5)
    ax.set_axisbelow(True)
    for side in ("right", "top"):
        ax.spines[side].set_visible(False)
    style.legend(picture, entries, LEFT, BELOW + HEIGHT)
    return picture


def _farthest(formula: Mapping[str, Values], measured: Mapping[str, Values]) -> str:
    """The point with the largest ratio to its line, either way, in words."""
    ratios = {
        (name, x): value / formula[name][x]
        for name, points in measured.items()
        for x, value in points.items()
        if x in formula[name]
    }
    if not ratios:
        return ""
    name, x = max(ratios, key=lambda point: max(ratios[point], 1 / ratios[point]))
    return f"; farthest is {name} at {x}: {ratios[name, x]:.2f} of the formula"
