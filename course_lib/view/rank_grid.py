"""Ranks as boxes, node by node, and which of them form the groups of an axis."""

from __future__ import annotations

from matplotlib.patches import Rectangle

from course_lib.layout import Layout
from course_lib.view import style
from course_lib.view.style import (
    BLUE,
    GREEN,
    NORMAL,
    ORANGE,
    PURPLE,
    SKY,
    SMALL,
    VERMILLION,
    WIDTH,
    YELLOW,
    Picture,
    frame,
)

COLOURS = (SKY, ORANGE, GREEN, YELLOW, BLUE, VERMILLION, PURPLE, "#FFFFFF")
HATCHES = ("", "//", "..", "xx")
LEFT, GAP, LARGEST = 0.8, 0.12, 0.5  # inches
MOST = 64  # ranks that can be told apart


def rank_grid(
    layout: Layout, *axes: str, per_node: int = 8, title: str = "", width: float = WIDTH
) -> Picture:
    """A row of boxes for each node; ranks of one group of ``axes`` look the same.

    A box holds the rank and, below, the letter of its group; the sentence says how many groups
    cross nodes. Raises ValueError for more than 64 ranks, and for an axis that is not there.
    """
    if layout.world > MOST:
        raise ValueError(f"{layout.world} ranks cannot be told apart: draw {MOST} at most")
    groups = layout.groups(*axes)
    across = sum(ranks[0] // per_node != ranks[-1] // per_node for ranks in groups)
    name = " and ".join(axes)
    order = "-".join(axis for axis in layout.order if layout.sizes[axis] > 1) or "of one rank"
    caption = (
        f"The same look is one group of {name}: {len(groups)} of {len(groups[0])} ranks each; "
        f"{across} of them cross nodes of {per_node}. Order {order}, the first "
        "is the fastest."
    )
    nodes = -(-layout.world // per_node)
    box = min(LARGEST, (width - LEFT - GAP) / per_node)
    height = nodes * (box + GAP)
    picture = frame(width, height, title or f"The groups of {name}", caption)
    inches = picture.get_figheight()
    bottom = style.caption_height(caption, width)
    ax = picture.add_axes((0, bottom / inches, 1, height / inches))
    ax.set_xlim(0, width)
    ax.set_ylim(height, 0)
    ax.axis("off")
    for node in range(nodes):
        y = node * (box + GAP) + box / 2
        ax.text(0.1, y, f"node {node}", size=NORMAL, weight="bold", va="center", gid="lane")
    for number, ranks in enumerate(groups):
        face = COLOURS[number % len(COLOURS)]
        hatch = HATCHES[number // len(COLOURS) % len(HATCHES)]
        for rank in ranks:
            x, y = LEFT + rank % per_node * box, rank // per_node * (box + GAP)
            ax.add_patch(Rectangle((x, y), box, box, fc=face, ec="black", hatch=hatch, lw=0.7))
            ax.text(
                x + box / 2,
                y + box / 2,
                f"{rank}\n{_letters(number)}",
                size=SMALL,
                color=style.ink_on(face),
                ha="center",
                va="center",
                linespacing=1.0,
                gid="box",
                bbox={"facecolor": face, "edgecolor": "none", "pad": 0.8},
            )
    return picture


def _letters(number: int) -> str:
    """a to z, then aa, ab and so on."""
    text = chr(ord("a") + number % 26)
    return text if number < 26 else _letters(number // 26 - 1) + text
