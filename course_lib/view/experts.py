"""The load of experts as a picture: who is wanted, whose tokens travel, who finds no room."""

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
    "tokens that travel here": Look(ORANGE, "---"),
    "dropped: no room": Look("#FFFFFF", "xx"),
}


def load_plot(
    load: Load, *, title: str = "What each expert computes", note: str = "", width: float = WIDTH
) -> Picture:
    """A bar for each expert, ranks apart: pairs from its own rank, from others, and dropped ones.

    A black line marks an even load. ``note`` is added to the sentence.
    """
    ranks, experts = len(load.kept), len(load.by_expert)
    own = experts // ranks
    height = experts * BAR + ranks * GAP
    picture = frame(width, height + LEGEND + BELOW, title, f"{_caption(load)} {note}".strip())
    parts = [_parts(load, expert, expert // own) for expert in range(experts)]
    longest = max(map(sum, parts)) or 1
    ax = byte_axes(picture, height, longest)
    ax.set_xlabel("pairs of a token and a choice", size=NORMAL, labelpad=2)
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
    """Pairs from the expert's own rank, from the others, and dropped."""
    kept = [row[expert] for row in load.kept]
    wanted = sum(row[expert] for row in load.chosen)
    return kept[home], sum(kept) - kept[home], wanted - sum(kept)


def _draw(ax: Axes, sizes: tuple[int, int, int], top: float) -> None:
    start = 0
    for size, look in zip(sizes, LOOKS.values(), strict=True):
        ink = style.mix(look.colour, look.ink, 0.45)
        ax.add_patch(
            Rectangle((start, top), size, BAR, fc=look.colour, ec=ink, hatch=look.hatch, lw=0)
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
        f"{imbalance(load.by_rank):.2f} times the mean of ranks, and the others wait for it; "
        f"{(pairs - stay) / max(pairs, 1):.0%} of the pairs computed travel"
    )
    return text + (f"; {load.dropped:.1%} were dropped." if load.dropped else ".")
