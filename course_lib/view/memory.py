"""Memory as pictures: what a rank keeps, and what is alive over one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from course_lib.trace import PeakLiveBytes, StateBytes
from course_lib.view import style
from course_lib.view.bars import BELOW, LEFT, LEGEND, Parts, byte_axes, size_text, stacked, unit_of
from course_lib.view.style import NORMAL, SMALL, WIDTH, Picture, frame

HEIGHT = 2.6  # inches of the picture of live bytes
LINES = ("-", "--", ":", "-.")
# Each line writes its peak into another corner of the dot, so that close peaks can be read.
CORNERS = ((6, 4), (-6, -4), (-6, 4), (6, -4))
COLOURS = (style.BLUE, style.VERMILLION, style.BLACK, style.GREEN)


def memory_plot(
    rows: Mapping[str, StateBytes],
    *,
    activations: Mapping[str, int] | None = None,
    title: str = "What a rank keeps in memory",
    note: str = "",
    width: float = WIDTH,
) -> Picture:
    """Stacked bars of parameters, gradients, optimizer state and activations, in bytes.

    ``rows`` names the bars (a rank, a technique); ``activations`` gives the peak of saved
    activations of some or all of them. Raises ValueError when there are no rows, or activations
    for a row that is not there.
    """
    if not rows:
        raise ValueError(
            "there is nothing to draw: memory_plot wants at least one row of StateBytes"
        )
    activations = activations or {}
    if unknown := set(activations) - set(rows):
        raise ValueError(f"activations for {sorted(unknown)}, but the rows are {list(rows)}")
    bars = {}
    for name, state in rows.items():
        parts = {
            "parameters": state.parameters,
            "gradients": state.gradients,
            "optimizer": state.optimizer,
            "activations": activations.get(name, 0),
        }
        bars[name] = {what: float(size) for what, size in parts.items() if size}
    caption = f"{_memory_caption(bars, bool(activations))} {note}".strip()
    return stacked(bars, marks={}, where="a rank", title=title, caption=caption, width=width)


def _memory_caption(bars: Mapping[str, Parts], with_activations: bool) -> str:
    sums = {name: sum(parts.values()) for name, parts in bars.items()}
    most, least = max(sums, key=sums.__getitem__), min(sums, key=sums.__getitem__)
    text = f"Fullest: {most} with {size_text(sums[most])}"
    if sums[least] < sums[most]:
        share = f" ({sums[least] / sums[most]:.0%} of that)"
        text += f"; emptiest: {least} with {size_text(sums[least])}{share}"
    text += "; exact bytes, each storage counted once"
    return text + (
        ", activations at their peak." if with_activations else ", activations not included."
    )


def live_plot(
    timelines: Mapping[str, PeakLiveBytes | Sequence[tuple[float, int]]],
    *,
    title: str = "Live bytes over one step",
    note: str = "",
    stretched: bool = False,
    width: float = WIDTH,
) -> Picture:
    """Bytes alive over time in ms, a line for each name, its peak marked and numbered.

    Values are :class:`PeakLiveBytes` meters or their timelines: (seconds, bytes from then on).
    Each starts at 0. ``stretched`` lines all end at 100 %, which compares what takes different
    times, or was measured on a busy machine. Raises ValueError when there are no lines, an empty
    one, or more than four.
    """
    lines = {
        name: value.timeline if isinstance(value, PeakLiveBytes) else list(value)
        for name, value in timelines.items()
    }
    if not lines or not all(lines.values()):
        empty = [name for name, line in lines.items() if not line]
        raise ValueError(f"there is nothing to draw: no points for {empty or 'any line'}")
    if len(lines) > len(COLOURS):
        raise ValueError(f"{len(lines)} lines: more than {len(COLOURS)} cannot be told apart")
    if stretched:
        lines = {name: _stretched(line) for name, line in lines.items()}
    peaks = {name: max(size for _, size in line) for name, line in lines.items()}
    said = ", ".join(f"{name} {size_text(peak)}" for name, peak in peaks.items())
    caption = (
        f"Peak of what was made during the step and is alive: {said}; "
        f"{'every line has its own time' if stretched else 'the meter itself takes time'}. {note}"
    ).strip()
    picture = frame(width, HEIGHT + LEGEND + BELOW, title, caption)
    factor, unit = unit_of(max(peaks.values()) or 1)
    longest = max((line[-1][0] - line[0][0]) * 1e3 for line in lines.values()) or 1.0
    ax = byte_axes(picture, HEIGHT, longest)
    ax.set_ylim(0, max(peaks.values()) / factor * 1.15 or 1.0)
    ax.set_xlabel("part of the step (%)" if stretched else "time (ms)", size=NORMAL, labelpad=2)
    _show_bytes_upwards(ax, unit)
    entries = [
        _draw_line(ax, name, line, factor, look)
        for (name, line), look in zip(
            lines.items(), zip(COLOURS, LINES, CORNERS, strict=True), strict=False
        )
    ]
    style.legend(picture, entries, LEFT, BELOW + HEIGHT)
    return picture


def _stretched(line: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """The same line, 0.1 s long: its ms are then percent."""
    begin, length = line[0][0], line[-1][0] - line[0][0] or 1.0
    return [(0.1 * (when - begin) / length, size) for when, size in line]


def _show_bytes_upwards(ax: Axes, unit: str) -> None:
    ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.tick_params(axis="y", labelsize=SMALL, length=3)
    ax.spines["left"].set_visible(True)
    ax.set_ylabel(unit, size=NORMAL)


def _draw_line(
    ax: Axes,
    name: str,
    line: Sequence[tuple[float, int]],
    factor: float,
    look: tuple[str, str, tuple[int, int]],
) -> Line2D:
    """Live bytes over time as steps, with a dot at the peak and a number in its corner of it."""
    colour, dashes, corner = look
    times = [(when - line[0][0]) * 1e3 for when, _ in line]
    sizes = [size / factor for _, size in line]
    (drawn,) = ax.step(times, sizes, where="post", color=colour, ls=dashes, lw=1.6, label=name)
    peak = max(range(len(sizes)), key=sizes.__getitem__)
    ax.plot(times[peak], sizes[peak], "o", color=colour, ms=5)
    ax.annotate(
        size_text(line[peak][1]),
        (times[peak], sizes[peak]),
        xytext=corner,
        textcoords="offset points",
        ha="left" if corner[0] > 0 else "right",
        va="bottom" if corner[1] > 0 else "top",
        size=SMALL,
        color=colour,
        weight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8},
        gid="peak",
    )
    return drawn
