"""Pictures of memory: the stored bytes per rank, and live bytes over one step."""

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
# The number of each peak is at a different corner of its dot, so that close peaks can be read.
CORNERS = ((6, 4), (-6, -4), (-6, 4), (6, -4))
COLORS = (style.BLUE, style.VERMILLION, style.BLACK, style.GREEN)


def memory_plot(
    rows: Mapping[str, StateBytes],
    *,
    activations: Mapping[str, int] | None = None,
    title: str = "Memory per rank",
    note: str = "",
    width: float = WIDTH,
) -> Picture:
    """Draw stacked bars of parameters, gradients, optimizer state and activations, in bytes.

    ``rows`` has one bar per rank or technique, by name. ``activations`` has the peak of the saved
    activations of some or all rows. Raises ValueError without rows, and for activations without a
    row.
    """
    if not rows:
        raise ValueError("expected at least one row of StateBytes, got none")
    activations = activations or {}
    if unknown := set(activations) - set(rows):
        raise ValueError(
            f"expected activations for the rows {list(rows)}, got activations for {sorted(unknown)}"
        )
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
    return stacked(bars, marks={}, where="per rank", title=title, caption=caption, width=width)


def _memory_caption(bars: Mapping[str, Parts], with_activations: bool) -> str:
    sums = {name: sum(parts.values()) for name, parts in bars.items()}
    most, least = max(sums, key=sums.__getitem__), min(sums, key=sums.__getitem__)
    text = f"Most memory: {most} with {size_text(sums[most])}"
    if sums[least] < sums[most]:
        share = f" ({sums[least] / sums[most]:.0%})"
        text += f"; least memory: {least} with {size_text(sums[least])}{share}"
    text += ". Each storage is counted once"
    return text + (", activations at their peak." if with_activations else ", without activations.")


def live_plot(
    timelines: Mapping[str, PeakLiveBytes | Sequence[tuple[float, int]]],
    *,
    title: str = "Live bytes over one step",
    note: str = "",
    stretched: bool = False,
    width: float = WIDTH,
) -> Picture:
    """Draw live bytes over time in ms, with a line for each name and the number of its peak.

    Values are :class:`PeakLiveBytes` meters or their timelines: (seconds, bytes from then on).
    Each line starts at 0. With ``stretched``, all lines end at 100 %, which compares runs of
    different length, or runs on a busy machine. Raises ValueError without lines, for an empty
    line, and for more than four lines.
    """
    lines = {
        name: value.timeline if isinstance(value, PeakLiveBytes) else list(value)
        for name, value in timelines.items()
    }
    if not lines or not all(lines.values()):
        empty = [name for name, line in lines.items() if not line]
        raise ValueError(f"expected points for each line, got no points for {empty or 'any line'}")
    if len(lines) > len(COLORS):
        raise ValueError(f"expected at most {len(COLORS)} lines, got {len(lines)}")
    if stretched:
        lines = {name: _stretched(line) for name, line in lines.items()}
    peaks = {name: max(size for _, size in line) for name, line in lines.items()}
    said = ", ".join(f"{name} {size_text(peak)}" for name, peak in peaks.items())
    caption = (
        f"Peak of the live bytes allocated during the step: {said}. "
        f"{'Each line has its own time scale' if stretched else 'The meter itself takes time'}. "
        f"{note}"
    ).strip()
    picture = frame(width, HEIGHT + LEGEND + BELOW, title, caption)
    factor, unit = unit_of(max(peaks.values()) or 1)
    longest = max((line[-1][0] - line[0][0]) * 1e3 for line in lines.values()) or 1.0
    ax = byte_axes(picture, HEIGHT, longest)
    ax.set_ylim(0, max(peaks.values()) / factor * 1.15 or 1.0)
    ax.set_xlabel("share of the step (%)" if stretched else "time (ms)", size=NORMAL, labelpad=2)
    _show_bytes_upwards(ax, unit)
    entries = [
        _draw_line(ax, name, line, factor, look)
        for (name, line), look in zip(
            lines.items(), zip(COLORS, LINES, CORNERS, strict=True), strict=False
        )
    ]
    style.legend(picture, entries, LEFT, BELOW + HEIGHT)
    return picture


def _stretched(line: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return the line scaled to 0.1 s, so that its milliseconds are percent."""
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
    """Draw live bytes over time as steps, with a dot and a number at the peak."""
    color, dashes, corner = look
    times = [(when - line[0][0]) * 1e3 for when, _ in line]
    sizes = [size / factor for _, size in line]
    (drawn,) = ax.step(times, sizes, where="post", color=color, ls=dashes, lw=1.6, label=name)
    peak = max(range(len(sizes)), key=sizes.__getitem__)
    ax.plot(times[peak], sizes[peak], "o", color=color, ms=5)
    ax.annotate(
        size_text(line[peak][1]),
        (times[peak], sizes[peak]),
        xytext=corner,
        textcoords="offset points",
        ha="left" if corner[0] > 0 else "right",
        va="bottom" if corner[1] > 0 else "top",
        size=SMALL,
        color=color,
        weight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8},
        gid="peak",
    )
    return drawn
