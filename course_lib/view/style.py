"""The look of pictures: colors for color-blind readers, hatches for gray print, and a caption.

The colors are the eight of Okabe and Ito ("Color Universal Design", 2008). Each operation has its
own color *and* hatch; operations that are often neighbors (F and B, I and W) also differ in
lightness.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from PIL import Image

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE, BLACK = "#0072B2", "#D55E00", "#CC79A7", "#000000"
GREY = "#BBBBBB"

WIDTH = 9.0  # inches: the width of a notebook cell
SCREEN_DPI = 110
SMALL, NORMAL, LARGE = 8.0, 9.0, 11.0  # font sizes in points
LEGEND_LINE, LEGEND_COLUMNS = 0.24, 7
CAPTION_LETTERS = 126  # letters per line of WIDTH at NORMAL size


@dataclass(frozen=True, slots=True)
class Look:
    """Color and hatch of one operation."""

    color: str
    hatch: str

    @property
    def ink(self) -> str:
        """Black or white, whichever has more contrast with the color."""
        return ink_on(self.color)


OPERATIONS = {
    "F": Look(YELLOW, ""),
    "B": Look(BLUE, "//"),
    "I": Look(SKY, "\\\\"),
    "W": Look(VERMILLION, "xx"),
    "optimizer": Look(PURPLE, ".."),
    "all_reduce": Look(ORANGE, "---"),
    "all_gather": Look(PURPLE, "|||"),
    "reduce_scatter": Look(GREEN, "+++"),
    "all_to_all": Look(SKY, "ooo"),
    "broadcast": Look(YELLOW, "***"),
    "send": Look(VERMILLION, "/|/|"),
    "recv": Look(GREY, "\\|\\|"),
}
MEMORY = {
    "parameters": Look(SKY, "\\\\"),
    "gradients": Look(BLUE, "//"),
    "optimizer": OPERATIONS["optimizer"],
    "activations": Look(YELLOW, ""),
}
SPARE_HATCHES = ("OO", "/-/-", "\\-\\-", "o-", "x-", "o|", "x|", "*-", "*|", "O-")


def look_of(ops: Iterable[str]) -> dict[str, Look]:
    """Return a look for each of ``ops``; unknown operations get a spare hatch on gray."""
    spare = iter(SPARE_HATCHES)
    looks = {}
    for op in dict.fromkeys(ops):
        looks[op] = OPERATIONS.get(op) or MEMORY.get(op) or Look(GREY, next(spare, ""))
    return looks


def luminance(color: str) -> float:
    """Return the relative luminance of ``#RRGGBB``, 0 (black) to 1 (white), by WCAG 2."""
    channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def ink_on(color: str) -> str:
    """Return black or white as ``#RRGGBB``, whichever has more contrast with ``color``."""
    return "#FFFFFF" if contrast(color, "#FFFFFF") > contrast(color, "#000000") else "#000000"


def mix(one: str, other: str, share: float) -> str:
    """Return the color that is ``share`` of the way from ``one`` to ``other``."""
    pairs = [(int(one[at : at + 2], 16), int(other[at : at + 2], 16)) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * share):02X}" for a, b in pairs)


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colors, 1 (same gray) to 21 (black on white), by WCAG 2."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


class Picture(Figure):
    """A matplotlib Figure that any notebook shows, with its caption in ``caption``.

    It is not part of pyplot's state: return it from a cell to see it, or call ``savefig``.
    """

    caption: str = ""

    def _repr_png_(self) -> bytes:
        """Return a PNG for notebooks, also without an inline backend."""
        drawn, small = io.BytesIO(), io.BytesIO()
        self.savefig(drawn, format="png", dpi=SCREEN_DPI)
        # 256 colors are enough for a few flat colors and need less than half the bytes.
        Image.open(drawn).convert("RGB").quantize(256).save(small, format="PNG")
        return small.getvalue()


def wrap(caption: str, width: float = WIDTH) -> str:
    """Return ``caption`` in lines that fit under a picture ``width`` inches wide."""
    return textwrap.fill(caption, int(CAPTION_LETTERS * width / WIDTH))


def caption_height(caption: str, width: float = WIDTH) -> float:
    """Return the height of ``caption`` in inches under a picture ``width`` inches wide."""
    return 0.17 * (wrap(caption, width).count("\n") + 1) + 0.10


def frame(width: float, height: float, title: str, caption: str) -> Picture:
    """Return an empty picture with title and caption, and ``height`` inches for the drawing."""
    text = wrap(caption, width)
    below = caption_height(caption, width)
    above = 0.32 if title else 0.08
    picture = Picture(figsize=(width, above + height + below), facecolor="white")
    picture.caption = caption
    inches = picture.get_figheight()
    x = 0.1 / width
    if title:
        picture.text(x, 1 - 0.08 / inches, title, size=LARGE, weight="bold", va="top", gid="title")
    picture.text(x, 0.06 / inches, text, size=NORMAL, va="bottom", linespacing=1.3, gid="caption")
    return picture


def keys(looks: Mapping[str, Look]) -> list[Patch]:
    """Return the legend entries of colors and hatches."""
    return [
        Patch(
            facecolor=look.color,
            edgecolor=mix(look.color, look.ink, 0.45),
            hatch=look.hatch,
            label=name,
        )
        for name, look in looks.items()
    ]


def legend_height(entries: Sequence[Artist]) -> float:
    """Return the height of a legend of ``entries`` in inches."""
    return LEGEND_LINE * -(-len(entries) // LEGEND_COLUMNS)


def legend(picture: Picture, entries: Sequence[Artist], left: float, above: float) -> None:
    """Add a legend ``left`` inches from the left and ``above`` inches over the caption."""
    width, inches = picture.get_size_inches()
    bottom = caption_height(picture.caption, width) + above + 0.02
    picture.legend(
        handles=list(entries),
        loc="lower left",
        bbox_to_anchor=(left / width, bottom / inches),
        ncols=min(LEGEND_COLUMNS, len(entries)),
        fontsize=SMALL + 0.5,
        frameon=False,
        borderpad=0,
        borderaxespad=0,
        handlelength=2.0,
        handleheight=1.1,
        columnspacing=1.4,
    )
