"""The rows on a page to print."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes

from course_lib.model import parameter_count
from course_lib.view.course_map.rows import (
    GPU,
    MODEL,
    NETWORK,
    NODE,
    RANKS,
    SEQ_LEN,
    SEQUENCES,
    SHARE_OF_PEAK,
    Row,
    compute_seconds,
    rows,
)
from course_lib.view.style import BLACK, GREY, ORANGE, SKY, YELLOW, Picture, mix

PAPER = (11.69, 8.27)  # inches: A4, landscape
LINE = 0.47
COLUMNS = (  # heading, left edge in inches
    ("technique", 0.35),
    ("lesson", 1.33),
    ("cuts", 1.83),
    ("state", 2.83),
    ("activations", 3.63),
    ("sends", 4.43),
    ("node | net", 5.23),
    ("what is sent, and does it hide?", 6.18),
    ("use it when; drawbacks", 8.72),
)
ORDER = (
    "In which order. 1  The model fits on a rank: DP, with ZeRO-1.  2  It does not: TP + SP as wide"
    " as a node, or ZeRO-3 where the network is fast.  3  Still too large, or many nodes: PP"
    " between nodes, with ZeRO-1.  4  One sequence is too long: CP.  5  More parameters for the"
    " same FLOPs: EP."
)
LAYOUT = (
    "The order of the axes. tp-cp-dp-pp, the fastest first: TP waits for every message and gets the"
    " links inside a node, PP sends least and crosses nodes. Ranks = tp x cp x dp x pp; ep lies"
    " inside dp x cp."
)


def course_map() -> Picture:
    """The rows as a page to print: A4, landscape."""
    found = rows()
    picture = Picture(figsize=PAPER, facecolor="white")
    ax = picture.add_axes((0, 0, 1, 1))
    ax.set_xlim(0, PAPER[0])
    ax.set_ylim(0, PAPER[1])
    ax.axis("off")
    title = "Which technique, when, and at what cost: the course on a page"
    _write(ax, 0.35, 7.78, title, size=13, weight="bold")
    _write(ax, 0.35, 7.34, example())
    top = 6.85
    for name, left in COLUMNS:
        _write(ax, left, top + 0.12, name, weight="bold")
    _write(ax, 2.83, top - 0.04, "GB stored per rank, most", size=6.5)
    _write(ax, 4.43, top - 0.04, "GB per step", size=6.5)
    _write(ax, 5.23, top - 0.04, "seconds", size=6.5)
    for number, row in enumerate(found):
        _draw_row(ax, row, top - 0.5 - number * LINE, found)
    below = top - 0.5 - len(found) * LINE
    for at, text in enumerate((ORDER, LAYOUT, _notes())):
        _write(ax, 0.35, below - 0.02 - at * 0.45, textwrap.fill(text, 186), va="top")
    figures = [
        f"{row.name} {float(row.state) / 1e9:.1f}, {float(row.activations) / 1e9:.1f} and "
        f"{float(row.sent) / 1e9:.1f} GB, {row.seconds(NETWORK):.2f} s, {row.idle:.0%}"
        for row in found
    ]
    picture.caption = "State, activations, sent, at 400 Gb/s, idle: " + "; ".join(figures)
    return picture


def example() -> str:
    """What the figures are of."""
    return (
        f"Example: {parameter_count(MODEL) / 1e9:.2f} billion parameters, bfloat16 and AdamW, on"
        f" {RANKS} ranks; {SEQUENCES} sequences of {SEQ_LEN:,} tokens per step, one per"
        f" micro-batch."
        f" It computes {compute_seconds():.2f} s on {RANKS} H100 at {SHARE_OF_PEAK:.0%} of"
        f" {GPU / 1e12:.0f} TFLOP/s.\nEvery number is computed by the library's formulas, which the"
        " tests hold to the byte; `course map` prints them."
    )


def _notes() -> str:
    return (
        "State: 2 bytes of weights, 2 of gradients, 12 of optimizer per parameter. Activations: of"
        " what is in flight, attention without a score matrix, nothing recomputed. Seconds: bytes"
        f" at {NODE / 1e9:.0f} GB/s (NVLink 4, one way) | {NETWORK / 1e9:.0f} GB/s (one 400 Gb/s"
        " adapter per GPU), not hidden, without latency. DP and ZeRO sum gradients in float32. CP"
        f" pays from long sequences on: {SEQ_LEN:,} tokens are short."
    )


def _draw_row(ax: Axes, row: Row, y: float, found: Sequence[Row]) -> None:
    ax.plot([0.3, PAPER[0] - 0.3], [y + 0.33, y + 0.33], color=GREY, linewidth=0.5)
    _write(ax, COLUMNS[0][1], y + 0.08, row.name, weight="bold")
    _write(ax, COLUMNS[1][1], y + 0.08, row.lesson)
    _write(ax, COLUMNS[2][1], y + 0.08, row.cuts)
    for column, what, colour in (
        (3, "state", SKY),
        (4, "activations", YELLOW),
        (5, "sent", ORANGE),
    ):
        most = max(getattr(one, what) for one in found)
        left, value = COLUMNS[column][1], getattr(row, what)
        ax.barh(
            y + 0.11,
            0.72 * float(value / most),
            left=left,
            height=0.3,
            color=mix(colour, "#FFFFFF", 0.35),
            zorder=0,
        )
        _write(ax, left + 0.04, y + 0.08, f"{float(value) / 1e9:.1f}")
    _write(ax, COLUMNS[6][1], y + 0.08, f"{row.seconds(NODE):.2f} | {row.seconds(NETWORK):.2f}")
    idle = f"; idle {row.idle:.0%}" if row.idle else ""
    _write(ax, COLUMNS[7][1], y + 0.17, row.travels)
    _write(ax, COLUMNS[7][1], y + 0.0, f"hides? {row.hides}{idle}", size=7)
    _write(ax, COLUMNS[8][1], y + 0.17, row.take)
    _write(ax, COLUMNS[8][1], y + 0.0, f"not: {row.stops}", size=7)


def _write(
    ax: Axes,
    x: float,
    y: float,
    text: str,
    size: float = 7.5,
    weight: str = "normal",
    va: str = "bottom",
) -> None:
    ax.text(x, y, text, size=size, weight=weight, va=va, color=BLACK, linespacing=1.35)
