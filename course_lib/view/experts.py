"""The load of experts as a picture: pairs per expert, pairs from other ranks, dropped pairs."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from course_lib.ep import Load, imbalance
from course_lib.view import style
from course_lib.view.bars import BELOW, LEFT, LEGEND, byte_axes
from course_lib.view.style import GREEN, NORMAL, ORANGE, SMALL, WIDTH, Look, Picture, frame

BAR, GAP = 0.2, 0.14  # inches: a bar, and the space between two ranks
LOOKS = {
    "tokens of the same rank": Look(GREEN, ""),
    "tokens from other ranks": Look(ORANGE, "---"),
    "dropped: over capacity": Look("#FFFFFF", "xx"),
}


def load_plot(
    load: Load, *, title: str = "What each expert computes", note: str = "", width: float = WIDTH
) -> Picture:
    """Draw a bar per expert: (token, expert) pairs from its own rank, from others, and dropped.

    A black line marks an even load. ``note`` is added to the caption.
    """
    ranks, experts = len(load.kept), len(load.by_expert)
    own = experts // ranks
    height = experts * BAR + ranks * GAP
    picture = frame(width, height + LEGEND + BELOW, title, f"{_caption(load)} {note}".strip())
    parts = [_parts(load, expert, expert // own) for expert in range(experts)]
    longest = max(map(sum, parts)) or 1
    ax = byte_axes(picture, height, longest)
    ax.set_xlabel("(token, expert) pairs", size=NORMAL, labelpad=2)
    for expert, sizes in enumerate(parts):
        rank = expert // own
        top = expert * BAR + (rank + 0.5) * GAP
        _draw(ax, sizes, top)
        left = ax.get_yaxis_transform()
        ax.text(-0.01, top + BAR / 2, f"expert {expert}", transform=left, size=SMALL, ha="right",
                va="center", gid="lane")  # fmt: skip
        if expert % own == 0:
            middle, total = top + own * BAR / 2, load.by_rank[rank]
            ax.text(1.02, middle, f"rank {rank}: {total:,}", transform=left, size=NORMAL,
                    weight="bold", va="center", gid="total")  # fmt: skip
    even = sum(load.by_expert) / experts
    ax.plot([even, even], [0, height], color="black", lw=1.6, zorder=5)
    shown = {name: look for index, (name, look) in enumerate(LOOKS.items())
             if any(sizes[index] for sizes in parts)}  # fmt: skip
    style.legend(picture, style.keys(shown), LEFT, BELOW + height)
    return picture


def _parts(load: Load, expert: int, home: int) -> tuple[int, int, int]:
    """Return the pairs from the expert's own rank, from other ranks, and dropped."""
    kept = [row[expert] for row in load.kept]
    wanted = sum(row[expert] for row in load.chosen)
    return kept[home], sum(kept) - kept[home], wanted - sum(kept)


def _draw(ax: Axes, sizes: tuple[int, int, int], top: float) -> None:
    start = 0
    for size, look in zip(sizes, LOOKS.values(), strict=True):
        ink = style.mix(look.color, look.ink, 0.45)
        ax.add_patch(
            Rectangle((start, top), size, BAR, fc=look.color, ec=ink, hatch=look.hatch, lw=0)
        )
        ax.add_patch(Rectangle((start, top), size, BAR, fill=False, ec="black", lw=0.7))
        start += size


def _caption(load: Load) -> str:
    ranks, experts = len(load.kept), len(load.by_expert)
    own, pairs = experts // ranks, sum(load.by_expert)
    stay = sum(load.kept[expert // own][expert] for expert in range(experts))
    busiest = load.by_rank.index(max(load.by_rank))
    text = (
        f"Black line: an even load. Rank {busiest} is the busiest, with "
        f"{imbalance(load.by_rank):.2f} times the mean of all ranks, and the others wait for it; "
        f"{(pairs - stay) / max(pairs, 1):.0%} of the computed pairs are sent to another rank"
    )
    return text + (f"; {load.dropped:.1%} were dropped." if load.dropped else ".")
