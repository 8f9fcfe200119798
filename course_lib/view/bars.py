"""Stacked bars of bytes, for the pictures of traffic and of memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from course_lib.view import style
from course_lib.view.style import (
    MEMORY,
    NORMAL,
    OPERATIONS,
    SMALL,
    Look,
    Picture,
    frame,
    look_of,
)

BAR, GAP = 0.34, 0.16  # inches
LEFT, RIGHT, BELOW, LEGEND = 1.1, 1.3, 0.42, 0.26  # margins around the axes, inches
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))

Parts = Mapping[str, float]  # the segments of a bar, in bytes


class Scale(NamedTuple):
    """Bytes per unit of the x axis, and units per inch of paper."""

    unit: float
    per_inch: float


def stacked(
    bars: Mapping[str, Parts],
    *,
    marks: Parts,
    where: str,
    title: str,
    caption: str,
    width: float,
) -> Picture:
    """Draw horizontal stacked bars, with the total at the right end of each and a legend above.

    ``marks`` gives some bars a black line. ``where`` follows the unit in the label of the x axis,
    such as "per rank".
    """
    present = {part for parts in bars.values() for part in parts}
    known = [part for part in (*MEMORY, *OPERATIONS) if part in present]
    looks = look_of(known + sorted(present - set(known)))
    height = len(bars) * (BAR + GAP)
    picture = frame(width, height + LEGEND + BELOW, title, caption)
    longest = max([sum(parts.values()) for parts in bars.values()] + list(marks.values())) or 1.0
    factor, unit = unit_of(longest)
    ax = byte_axes(picture, height, longest / factor)
    ax.set_xlabel(f"{unit} {where}", size=NORMAL, labelpad=2)
    scale = Scale(factor, longest / factor / (width - LEFT - RIGHT))
    for index, (name, parts) in enumerate(bars.items()):
        top = GAP / 2 + index * (BAR + GAP)
        _draw_name(ax, name, top + BAR / 2)
        end = _draw_bar(ax, parts, looks, top, scale)
        _draw_end(ax, end, top, sum(parts.values()), marks.get(name), scale)
    keys = style.keys(looks)
    if marks:
        keys.append(Patch(facecolor="black", label="formula"))
    style.legend(picture, keys, LEFT, BELOW + height)
    return picture


def _draw_name(ax: Axes, name: str, y: float) -> None:
    left = ax.get_yaxis_transform()
    ax.text(
        -0.01, y, name, transform=left, size=NORMAL, weight="bold", ha="right", va="center",
        gid="lane",
    )  # fmt: skip


def _draw_end(
    ax: Axes, end: float, top: float, total: float, formula: float | None, scale: Scale
) -> None:
    """Draw the total at the right of a bar that ends at ``end``, and the mark of the formula."""
    text = size_text(total)
    if formula is not None:
        mark = formula / scale.unit
        ends = [top - 0.05, top + BAR + 0.05]
        ax.plot([mark, mark], ends, color="black", lw=2.4, clip_on=False, zorder=5)
        end = max(end, mark)
        text += f"\nformula {size_text(formula)}"
    x = end + 0.08 * scale.per_inch
    ax.text(x, top + BAR / 2, text, size=SMALL + 0.5, va="center", linespacing=1.1, gid="total")


def byte_axes(picture: Picture, height: float, longest: float) -> Axes:
    """Add axes ``height`` inches high; x from 0 to ``longest``, y in inches from the top."""
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


def _draw_bar(ax: Axes, parts: Parts, looks: Mapping[str, Look], top: float, scale: Scale) -> float:
    """Draw one bar from left to right; return its end in units of the axis."""
    left = 0.0
    for part, look in looks.items():
        size = parts.get(part, 0.0) / scale.unit
        if not size:
            continue
        ink = style.mix(look.color, look.ink, 0.45)
        filled = Rectangle((left, top), size, BAR, fc=look.color, ec=ink, hatch=look.hatch, lw=0)
        ax.add_patch(filled)
        ax.add_patch(
            Rectangle((left, top), size, BAR, fill=False, edgecolor="black", lw=0.7, clip_on=False)
        )
        text = size_text(parts[part])
        if len(parts) > 1 and len(text) * SMALL * 0.63 / 72 + 0.08 <= size / scale.per_inch:
            ax.text(
                left + size / 2,
                top + BAR / 2,
                text,
                size=SMALL,
                color=look.ink,
                ha="center",
                va="center_baseline",
                gid="box",
                bbox={"facecolor": look.color, "edgecolor": "none", "pad": 1.0},
            )
        left += size
    return left


def size_text(size: float) -> str:
    """Return bytes as text: in B below 10,000, else with three or more digits in kB, MB or GB."""
    if size < 1e4:
        return f"{size:,.0f} B"
    factor, unit = unit_of(size)
    shown = size / factor
    return f"{shown:.3g} {unit}" if shown < 999.5 else f"{shown:,.0f} {unit}"


def unit_of(size: float) -> tuple[float, str]:
    """Return the largest unit that is not larger than ``size``, in bytes, and its name."""
    return next((factor, unit) for factor, unit in UNITS if size >= factor or factor == 1.0)
