"""Measured times against the bytes of a message, and the model's line through them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator

from course_lib.view import style
from course_lib.view.bars import BELOW, LEFT, LEGEND, size_text
from course_lib.view.memory import COLOURS, LINES
from course_lib.view.style import NORMAL, SMALL, WIDTH, Picture, frame
from course_lib.view.summary import milliseconds

HEIGHT, RIGHT = 2.8, 0.3  # inches
DOTS = "osD^"
SMOOTH = 60  # points of a model's line

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
    """Points measured, lines by the model, both axes logarithmic.

    ``measured`` gives each name its seconds by bytes, ``models`` a line for some or all of the
    names. The sentence says which point is farthest from its line. Raises ValueError when a name
    has no points, a model has no name, or there are more than four.
    """
    check(measured, models)
    caption = f"Points measured, lines by the model{_farthest(measured, models)}. {note}".strip()
    picture = frame(width, HEIGHT + LEGEND + BELOW, title, caption)
    ax = _axes(picture)
    every = [seconds for times in measured.values() for seconds in times.values()]
    if max(every) < 100 * min(every):  # a tick a decade would leave the axis almost bare
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    entries = []
    for (name, times), *look in zip(measured.items(), COLOURS, LINES, DOTS, strict=False):
        entries.append(_draw(ax, name, times, models.get(name), *look))
    ax.minorticks_off()
    style.legend(picture, entries, LEFT, BELOW + HEIGHT)
    return picture


def check(measured: Mapping[str, Mapping], models: Mapping[str, Callable]) -> None:
    """Raise ValueError where points and lines cannot be drawn."""
    if not measured or not all(measured.values()):
        raise ValueError(f"there is nothing to draw: no points for {list(measured) or 'any name'}")
    if unknown := set(models) - set(measured):
        raise ValueError(f"lines for {sorted(unknown)}, but the points are of {list(measured)}")
    if len(measured) > len(COLOURS):
        raise ValueError(f"{len(measured)} names: more than {len(COLOURS)} cannot be told apart")


def _farthest(measured: Mapping[str, Times], models: Mapping[str, Model]) -> str:
    """The point with the largest ratio to its line, either way, in words."""
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
    return f"; farthest from its line is {name} at {size_text(size)}: {ratio:.2g} times as long"


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
    ax: Axes, name: str, times: Times, model: Model | None, colour: str, dashes: str, dot: str
) -> Line2D:
    """The points of one name and the line of its model."""
    ax.plot(list(times), list(times.values()), dot, color=colour, ms=5, zorder=3)
    if model is not None:
        sizes = smooth(times)
        ax.plot(sizes, list(map(model, sizes)), dashes, color=colour, lw=1.4)
    return entry(name, colour, dot, "" if model is None else dashes)


def smooth(points: Collection[float]) -> list[float]:
    """Where a model's line is drawn: over all ``points``, in even steps of a log axis."""
    first, last = min(points), max(points)
    return [first * (last / first) ** (at / SMOOTH) for at in range(SMOOTH + 1)]


def entry(name: str, colour: str, dot: str, dashes: str) -> Line2D:
    """What the legend shows of a name: its point, and its line if it has one."""
    return Line2D([], [], color=colour, marker=dot, ls=dashes, ms=5, lw=1.4, label=name)
