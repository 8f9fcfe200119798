"""Measured times against the bytes of a message, with the line of a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator

from course_lib.view import style
from course_lib.view.bars import BELOW, LEFT, LEGEND, size_text
from course_lib.view.memory import COLORS, LINES
from course_lib.view.style import NORMAL, SMALL, WIDTH, Picture, frame
from course_lib.view.summary import milliseconds

HEIGHT, RIGHT = 2.8, 0.3  # inches
DOTS = "osD^"
SMOOTH = 60  # segments of a model's line

Times = Mapping[int, float]  # bytes -> seconds
Model = Callable[[float], float]  # bytes -> seconds


def fit_plot(
    measured: Mapping[str, Times],
    models: Mapping[str, Model],
    *,
    title: str = "Time against bytes",
    note: str = "",
    width: float = WIDTH,
) -> Picture:
    """Draw measured points and the lines of models; both axes are logarithmic.

    ``measured`` has seconds by bytes for each name, ``models`` a line for some or all names. The
    caption names the point that is farthest from its line. Raises ValueError when a name has no
    points, when a model has no points, or for more than four names.
    """
    check(measured, models)
    text = f"Points: measured. Lines: model{_farthest(measured, models)}."
    caption = f"{text} {note}".strip()
    picture = frame(width, HEIGHT + LEGEND + BELOW, title, caption)
    ax = _axes(picture)
    every = [seconds for times in measured.values() for seconds in times.values()]
    if max(every) < 100 * min(every):  # one tick per decade would be too few
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    entries = []
    for (name, times), *look in zip(measured.items(), COLORS, LINES, DOTS, strict=False):
        entries.append(_draw(ax, name, times, models.get(name), *look))
    ax.minorticks_off()
    style.legend(picture, entries, LEFT, BELOW + HEIGHT)
    return picture


def check(measured: Mapping[str, Mapping], models: Mapping[str, Callable]) -> None:
    """Raise ValueError if the points and lines cannot be drawn."""
    if not measured or not all(measured.values()):
        empty = [name for name, times in measured.items() if not times]
        raise ValueError(f"expected points for each name, got no points for {empty or 'any name'}")
    if unknown := set(models) - set(measured):
        raise ValueError(
            f"expected lines for the names {list(measured)}, got lines for {sorted(unknown)}"
        )
    if len(measured) > len(COLORS):
        raise ValueError(f"expected at most {len(COLORS)} names, got {len(measured)}")


def _farthest(measured: Mapping[str, Times], models: Mapping[str, Model]) -> str:
    """Return the point with the largest ratio to its line, up or down, in words."""
    ratios = {
        (name, size): seconds / models[name](size)
        for name, times in measured.items()
        if name in models
        for size, seconds in times.items()
    }
    if not ratios:
        return ""
    name, size = max(ratios, key=lambda point: max(ratios[point], 1 / ratios[point]))
    ratio = ratios[name, size]
    where = f"{name} at {size_text(size)}"
    return f"; the farthest from its line is {where}, {ratio:.2g} times the model"


def _axes(picture: Picture) -> Axes:
    width, inches = picture.get_size_inches()
    bottom = style.caption_height(picture.caption, width) + BELOW
    ax = picture.add_axes(
        (LEFT / width, bottom / inches, 1 - (LEFT + RIGHT) / width, HEIGHT / inches)
    )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda size, _: size_text(size)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: milliseconds(seconds)))
    ax.tick_params(labelsize=SMALL, length=3)
    ax.set_xlabel("bytes", size=NORMAL, labelpad=2)
    ax.grid(color="#CCCCCC", lw=0.5)
    ax.set_axisbelow(True)
    for side in ("right", "top"):
        ax.spines[side].set_visible(False)
    return ax


def _draw(
    ax: Axes, name: str, times: Times, model: Model | None, color: str, dashes: str, dot: str
) -> Line2D:
    """Draw the points of one name and the line of its model; return its legend entry."""
    ax.plot(list(times), list(times.values()), dot, color=color, ms=5, zorder=3)
    if model is not None:
        sizes = smooth(times)
        ax.plot(sizes, list(map(model, sizes)), dashes, color=color, lw=1.4)
    return entry(name, color, dot, "" if model is None else dashes)


def smooth(points: Collection[float]) -> list[float]:
    """Return x values for a model's line: over all ``points``, in even steps of a log axis."""
    first, last = min(points), max(points)
    return [first * (last / first) ** (at / SMOOTH) for at in range(SMOOTH + 1)]


def entry(name: str, color: str, dot: str, dashes: str) -> Line2D:
    """Return the legend entry of a name: its point, and its line if it has one."""
    return Line2D([], [], color=color, marker=dot, ls=dashes, ms=5, lw=1.4, label=name)
