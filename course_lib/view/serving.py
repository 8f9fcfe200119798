"""Serving as a picture: throughput and latency against the number of requests at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from course_lib.view import style
from course_lib.view.bars import BELOW, LEGEND
from course_lib.view.fit_plot import DOTS, check, entry, smooth
from course_lib.view.memory import COLORS, LINES
from course_lib.view.style import NORMAL, SMALL, WIDTH, Picture, frame

HEIGHT, LEFT, BETWEEN, RIGHT = 2.6, 0.65, 0.75, 0.2  # inches

# requests at once -> tokens per second, seconds per token
Points = Mapping[int, tuple[float, float]]
Model = Callable[[float], tuple[float, float]]  # the same by a formula


def serving_plot(
    measured: Mapping[str, Points],
    models: Mapping[str, Model],
    *,
    title: str = "More requests at once: more throughput, higher latency",
    note: str = "",
    width: float = WIDTH,
) -> Picture:
    """Draw tokens per second (left) and time per token (right) against requests at once.

    Points are measured; lines are by the model of the same name, if there is one. The caption
    names the highest throughput at the fewest and at the most requests. Raises ValueError when a
    name has no points, when a model has no points, or for more than four names.
    """
    check(measured, models)
    lines = " Lines: model." if models else ""
    caption = " ".join(filter(None, (f"Points: measured.{lines}", _best(measured), note)))
    picture = frame(width, HEIGHT + LEGEND + BELOW, title, caption)
    ticks = sorted({size for points in measured.values() for size in points})
    panels = [
        _axes(picture, 0, "tokens per second", ticks),
        _axes(picture, 1, "ms per token", ticks),
    ]
    entries = []
    for (name, points), *look in zip(measured.items(), COLORS, LINES, DOTS, strict=False):
        entries.append(_draw(panels, name, points, models.get(name), *look))
    for ax in panels:
        ax.set_ylim(bottom=0)
    style.legend(picture, entries, LEFT, BELOW + HEIGHT)
    return picture


def _best(measured: Mapping[str, Points]) -> str:
    """Name the highest throughput at the smallest and at the largest common batch."""
    common = set.intersection(*(set(points) for points in measured.values()))
    if not common or len(measured) < 2:
        return ""
    said = []
    for size in sorted({min(common), max(common)}):
        name = max(measured, key=lambda name: measured[name][size][0])
        said.append(f"{name} at {size} ({measured[name][size][0]:,.0f} tokens per second)")
    return "Highest throughput: " + ", ".join(said) + "."


def _axes(picture: Picture, number: int, what: str, ticks: list[int]) -> Axes:
    width, inches = picture.get_size_inches()
    wide = (width - LEFT - BETWEEN - RIGHT) / 2
    bottom = style.caption_height(picture.caption, width) + BELOW
    left = LEFT + number * (wide + BETWEEN)
    ax = picture.add_axes((left / width, bottom / inches, wide / width, HEIGHT / inches))
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
    ax.tick_params(labelsize=SMALL, length=3)
    ax.set_xlabel("requests at once, all ranks together", size=NORMAL, labelpad=2)
    ax.set_ylabel(what, size=NORMAL)
    ax.grid(color="#CCCCCC", lw=0.5)
    ax.set_axisbelow(True)
    for side in ("right", "top"):
        ax.spines[side].set_visible(False)
    return ax


def _draw(
    panels: list[Axes],
    name: str,
    points: Points,
    model: Model | None,
    color: str,
    dashes: str,
    dot: str,
) -> Line2D:
    """Draw one name in both panels; return its legend entry."""
    for which, (ax, scale) in enumerate(zip(panels, (1.0, 1e3), strict=True)):
        values = [scale * pair[which] for pair in points.values()]
        ax.plot(list(points), values, dot, color=color, ms=5, zorder=3)
        if model is not None:
            sizes = smooth(points)
            line = [scale * model(size)[which] for size in sizes]
            ax.plot(sizes, line, dashes, color=color, lw=1.4)
    return entry(name, color, dot, "" if model is None else dashes)
