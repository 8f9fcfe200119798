"""Bars of bytes: what went over each axis, what each rank keeps, and what lived when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from course_lib.ledger import Ledger, summarize
from course_lib.trace import PeakLiveBytes, StateBytes
from course_lib.view import style
from course_lib.view.style import (
    MEMORY,
    NORMAL,
    OPERATIONS,
    SMALL,
    WIDTH,
    Look,
    Picture,
    frame,
    look_of,
)

BAR, GAP = 0.34, 0.16  # inches
LEFT, RIGHT, BELOW, LEGEND = 1.1, 1.3, 0.42, 0.26  # margins around the axes, inches
LIVE = 2.6  # inches: the height of the picture of live bytes
LINES = ("-", "--", ":", "-.")
COLOURS = (style.BLUE, style.VERMILLION, style.BLACK, style.GREEN)
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))

Parts = Mapping[str, float]  # what a bar is stacked of, in bytes


def ledger_plot(
    ledgers: Iterable[Ledger],
    *,
    formula: Mapping[str, float | Fraction] | None = None,
    title: str = "Bytes sent on each axis",
    note: str = "",
    width: float = WIDTH,
) -> Picture:
    """Wire bytes per axis, stacked by operation, all ranks together, numbers on the bars.

    ``formula`` gives the bytes expected on an axis; a black line marks it, and the sentence says
    by how much the count is off. Control traffic is left out of the bars and told in the
    sentence. Raises ValueError when nothing was sent and nothing expected.
    """
    ledgers = list(ledgers)
    bars: dict[str, dict[str, float]] = defaultdict(dict)
    control = Fraction(0)
    for line in summarize(ledgers):
        if line.control:
            control += line.wire
        elif line.wire:
            sent = bars[line.axis]
            sent[line.op] = sent.get(line.op, 0.0) + float(line.wire)
    marks = {axis: float(value) for axis, value in (formula or {}).items()}
    for axis in marks:
        bars.setdefault(axis, {})
    if not bars:
        raise ValueError("there is nothing to draw: no rank sent anything on any axis of size > 1")
    caption = _ledger_caption(bars, marks, float(control), len(ledgers), note)
    return _stacked(bars, marks, title, caption, width)


def _ledger_caption(
    bars: Mapping[str, Parts], marks: Parts, control: float, ranks: int, note: str
) -> str:
    sums = {axis: sum(parts.values()) for axis, parts in bars.items()}
    said = ", ".join(f"{value:,.0f} on {axis}" for axis, value in sums.items())
    text = f"Bytes counted on {ranks} {'rank' if ranks == 1 else 'ranks'}: {said}"
    if marks:
        off = max(abs(sums[axis] - value) for axis, value in marks.items())
        text += "; the formula (black line) "
        text += f"is off by up to {off:,.0f} bytes" if off > 1 else "says the same"
    if control:
        text += f"; {control:,.0f} of control traffic left out"
    return f"{text}. {note}".strip()


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
    sums = {name: sum(parts.values()) for name, parts in bars.items()}
    most, least = max(sums, key=sums.__getitem__), min(sums, key=sums.__getitem__)
    caption = f"Fullest: {most} with {size_text(sums[most])}"
    if sums[least] < sums[most]:
        share = f" ({sums[least] / sums[most]:.0%} of that)"
        caption += f"; emptiest: {least} with {size_text(sums[least])}{share}"
    caption += "; exact bytes, each storage counted once"
    caption += ", activations at their peak." if activations else ", activations not included."
    return _stacked(bars, {}, title, f"{caption} {note}".strip(), width)


def _stacked(
    bars: Mapping[str, Parts], marks: Parts, title: str, caption: str, width: float
) -> Picture:
    """Horizontal stacked bars, the total at the right end of each, a legend above."""
    present = {part for parts in bars.values() for part in parts}
    known = [part for part in (*MEMORY, *OPERATIONS) if part in present]
    looks = look_of(known + sorted(present - set(known)))
    height = len(bars) * (BAR + GAP)
    picture = frame(width, height + LEGEND + BELOW, title, caption)
    longest = max([sum(parts.values()) for parts in bars.values()] + list(marks.values())) or 1.0
    factor, unit = _unit(longest)
    ax = _axes(picture, height, longest / factor)
    ax.set_xlabel(f"{unit} on all ranks together" if marks else unit, size=NORMAL, labelpad=2)
    per_inch = longest / factor / (width - LEFT - RIGHT)
    for index, (name, parts) in enumerate(bars.items()):
        top = GAP / 2 + index * (BAR + GAP)
        ax.text(
            -0.01,
            top + BAR / 2,
            name,
            transform=ax.get_yaxis_transform(),
            size=NORMAL,
            weight="bold",
            ha="right",
            va="center",
            gid="lane",
        )
        right = _draw_bar(ax, parts, looks, top, factor, per_inch)
        if name in marks:
            mark = marks[name] / factor
            right = max(right, mark)
            ends = [top - 0.05, top + BAR + 0.05]
            ax.plot([mark, mark], ends, color="black", lw=2.4, clip_on=False, zorder=5)
        _draw_total(
            ax, right + 0.08 * per_inch, top + BAR / 2, sum(parts.values()), marks.get(name)
        )
    _legend(picture, looks, bool(marks), height)
    return picture


def _draw_total(ax: Axes, x: float, y: float, total: float, formula: float | None) -> None:
    text = size_text(total)
    if formula is not None:
        text += f"\nformula {size_text(formula)}"
    ax.text(x, y, text, size=SMALL + 0.5, va="center", linespacing=1.1, gid="total")


def _axes(picture: Picture, height: float, longest: float) -> Axes:
    width, inches = picture.get_size_inches()
    bottom = style.caption_height(picture.caption, width) + BELOW
    ax = picture.add_axes(
        (LEFT / width, bottom / inches, 1 - (LEFT + RIGHT) / width, height / inches)
    )
    ax.set_xlim(0, longest)
    ax.set_ylim(height, 0)
    ax.set_yticks([])
    ax.tick_params(axis="x", labelsize=SMALL, length=3)
    ax.grid(axis="x", color="#CCCCCC", lw=0.5)
    ax.set_axisbelow(True)
    for side in ("left", "right", "top"):
        ax.spines[side].set_visible(False)
    return ax


def _draw_bar(
    ax: Axes, parts: Parts, looks: Mapping[str, Look], top: float, factor: float, per_inch: float
) -> float:
    """One bar from left to right; its end in units of the axis."""
    left = 0.0
    for part, look in looks.items():
        size = parts.get(part, 0.0) / factor
        if not size:
            continue
        ink = style.mix(look.colour, look.ink, 0.45)
        filled = Rectangle((left, top), size, BAR, fc=look.colour, ec=ink, hatch=look.hatch, lw=0)
        ax.add_patch(filled)
        ax.add_patch(
            Rectangle((left, top), size, BAR, fill=False, edgecolor="black", lw=0.7, clip_on=False)
        )
        text = size_text(parts[part])
        if len(parts) > 1 and len(text) * SMALL * 0.63 / 72 + 0.08 <= size / per_inch:
            ax.text(
                left + size / 2,
                top + BAR / 2,
                text,
                size=SMALL,
                color=look.ink,
                ha="center",
                va="center_baseline",
                gid="box",
                bbox={"facecolor": look.colour, "edgecolor": "none", "pad": 1.0},
            )
        left += size
    return left


def _legend(picture: Picture, looks: Mapping[str, Look], marks: bool, height: float) -> None:
    keys: list = style.keys(looks)
    if marks:
        keys.append(Patch(facecolor="black", label="formula"))
    style.legend(picture, keys, LEFT, BELOW + height)


def live_plot(
    timelines: Mapping[str, PeakLiveBytes | Sequence[tuple[float, int]]],
    *,
    title: str = "Live bytes over one step",
    note: str = "",
    width: float = WIDTH,
) -> Picture:
    """Bytes alive over time in ms, a line for each name, its peak marked and numbered.

    Values are :class:`PeakLiveBytes` meters or their timelines: (seconds, bytes from then on).
    Each starts at 0. Raises ValueError when there are no lines, an empty one, or more than four.
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
    peaks = {name: max(size for _, size in line) for name, line in lines.items()}
    said = ", ".join(f"{name} {size_text(peak)}" for name, peak in peaks.items())
    caption = (
        f"Peak of what was made during the step and is alive: {said}; the meter itself takes time."
        f" {note}"
    ).strip()
    picture = frame(width, LIVE + LEGEND + BELOW, title, caption)
    factor, unit = _unit(max(peaks.values()) or 1)
    longest = max((line[-1][0] - line[0][0]) * 1e3 for line in lines.values()) or 1.0
    ax = _axes(picture, LIVE, longest)
    ax.set_ylim(0, max(peaks.values()) / factor * 1.15 or 1.0)
    entries = [
        _draw_line(ax, name, line, factor, colour, dashes)
        for (name, line), colour, dashes in zip(lines.items(), COLOURS, LINES, strict=False)
    ]
    ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.tick_params(axis="y", labelsize=SMALL, length=3)
    ax.spines["left"].set_visible(True)
    ax.set_xlabel("time (ms)", size=NORMAL, labelpad=2)
    ax.set_ylabel(unit, size=NORMAL)
    style.legend(picture, entries, LEFT, BELOW + LIVE)
    return picture


def _draw_line(
    ax: Axes, name: str, line: Sequence[tuple[float, int]], factor: float, colour: str, dashes: str
) -> Line2D:
    """Live bytes over time as steps, with a dot and a number at the peak."""
    times = [(when - line[0][0]) * 1e3 for when, _ in line]
    sizes = [size / factor for _, size in line]
    (drawn,) = ax.step(times, sizes, where="post", color=colour, ls=dashes, lw=1.6, label=name)
    peak = max(range(len(sizes)), key=sizes.__getitem__)
    ax.plot(times[peak], sizes[peak], "o", color=colour, ms=5)
    ax.annotate(
        size_text(line[peak][1]),
        (times[peak], sizes[peak]),
        xytext=(6, 4),
        textcoords="offset points",
        size=SMALL,
        color=colour,
        weight="bold",
        gid="peak",
    )
    return drawn


def size_text(size: float) -> str:
    """Bytes as text: whole ones below 10,000, else kB, MB or GB (powers of ten), three digits."""
    if size < 1e4:
        return f"{size:,.0f} B"
    factor, unit = _unit(size)
    return f"{size / factor:.3g} {unit}"


def _unit(size: float) -> tuple[float, str]:
    return next((factor, unit) for factor, unit in UNITS if size >= factor or factor == 1.0)
