"""Curves by a formula and measured points, by default on doubling axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator

from course_lib.view import style
from course_lib.view.bars import BELOW, LEFT, LEGEND
from course_lib.view.memory import COLORS, LINES
from course_lib.view.style import NORMAL, SMALL, WIDTH, Picture, frame

HEIGHT, RIGHT = 3.2, 0.3  # inches
DOTS = "osD^"

Values = Mapping[Any, float]  # by a number


def curves(
    formula: Mapping[str, Values],
    measured: Mapping[str, Values] | None = None,
    *,
    across: str,
    up: str,
    ideal: str = "",
    linear: bool = False,
    title: str = "",
    note: str = "",
    width: float = WIDTH,
) -> Picture:
    """Draw a line for each name of ``formula`` and points for each name of ``measured``.

    Both axes are logarithmic with base 2 unless ``linear``. ``ideal`` is the label of a thin gray
    diagonal, "" for none. The caption names the point that is farthest from its line. Raises
    ValueError without curves, for more than four curves, and for points without a curve.
    """
    measured = measured or {}
    if not formula or len(formula) > len(COLORS):
        raise ValueError(f"expected 1 to {len(COLORS)} curves, got {len(formula)}")
    if unknown := set(measured) - set(formula):
        raise ValueError(
            f"expected points for the curves {list(formula)}, got points for {sorted(unknown)}"
        )
    text = f"Lines: formula. Points: measured{_farthest(formula, measured)}." if measured else ""
    caption = f"{text} {note}".strip()
    picture = frame(width, HEIGHT + LEGEND + BELOW, title, caption)
    inches = picture.get_figheight()
    bottom = style.caption_height(caption, width) + BELOW
    ax = picture.add_axes(
        (LEFT / width, bottom / inches, 1 - (LEFT + RIGHT) / width, HEIGHT / inches)
    )
    if not linear:
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
    entries = []
    for (name, line), color, dashes, dot in zip(formula.items(), COLORS, LINES, DOTS, strict=False):
        ax.plot(list(line), list(line.values()), dashes, color=color, lw=1.6)
        points = measured.get(name, {})
        ax.plot(list(points), list(points.values()), dot, color=color, ms=6, zorder=3)
        marker = dot if points else ""
        entries.append(Line2D([], [], color=color, ls=dashes, marker=marker, ms=6, label=name))
    if ideal:
        ends = [min(map(min, formula.values())), max(map(max, formula.values()))]
        ax.plot(ends, ends, color="#999999", lw=0.8, zorder=1)
        entries.append(Line2D([], [], color="#999999", lw=0.8, label=ideal))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: _number(value)))
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


def _number(value: float) -> str:
    """Return a tick's number: 65,536, not 65536, and 0.0039, not 0.00390625."""
    return f"{value:,.10g}" if value >= 1 else f"{value:.2g}"


def _farthest(formula: Mapping[str, Values], measured: Mapping[str, Values]) -> str:
    """Return the point with the largest ratio to its line, up or down, in words."""
    ratios = {
        (name, x): value / formula[name][x]
        for name, points in measured.items()
        for x, value in points.items()
        if x in formula[name]
    }
    if not ratios:
        return ""
    name, x = max(ratios, key=lambda point: max(ratios[point], 1 / ratios[point]))
    return f"; the farthest from its line is {name} at {x}, {ratios[name, x]:.2f} of the formula"
