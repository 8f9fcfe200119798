"""Ranks as boxes, node by node, with the groups of an axis."""

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

COLORS = (SKY, ORANGE, GREEN, YELLOW, BLUE, VERMILLION, PURPLE, "#FFFFFF")
HATCHES = ("", "//", "..", "xx")
LEFT, GAP, LARGEST = 0.8, 0.12, 0.5  # inches
MOST = 64  # ranks whose boxes can be distinguished


def rank_grid(
    layout: Layout, *axes: str, per_node: int = 8, title: str = "", width: float = WIDTH
) -> Picture:
    """Draw a row of boxes per node; ranks in one group of ``axes`` have the same look.

    A box has the rank and, below, the letter of its group. The caption has the number of groups
    that cross nodes. Raises ValueError for more than 64 ranks, and for an unknown axis.
    """
    if layout.world > MOST:
        raise ValueError(f"expected at most {MOST} ranks, got {layout.world}")
    groups = layout.groups(*axes)
    across = sum(ranks[0] // per_node != ranks[-1] // per_node for ranks in groups)
    name = " and ".join(axes)
    order = "-".join(axis for axis in layout.order if layout.sizes[axis] > 1) or "of one rank"
    caption = (
        f"Boxes with the same look are one group of {name}: {len(groups)} groups of "
        f"{len(groups[0])} ranks, of which {across} cross nodes of {per_node}. "
        f"Order {order}; the first axis varies fastest."
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
        face = COLORS[number % len(COLORS)]
        hatch = HATCHES[number // len(COLORS) % len(HATCHES)]
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
    """Return a to z, then aa, ab and so on."""
    text = chr(ord("a") + number % 26)
    return text if number < 26 else _letters(number // 26 - 1) + text
