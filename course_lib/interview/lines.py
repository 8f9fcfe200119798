"""Fold text to the width of a terminal; a Chinese character takes two columns."""

from __future__ import annotations

import re
from unicodedata import east_asian_width

from course_lib.planner.text import HARD_SPACE, UNIT

WIDTH = 80
# A piece that is not broken: a wide character or a word, with the closing marks after it.
PIECE = re.compile(r" +|(?:[⺀-鿿]|[^ ⺀-鿿，。；：？！、）》」]+|.)[，。；：？！、）》」]*")


def columns(text: str) -> int:
    """Return the number of columns that ``text`` takes in a terminal."""
    return sum(2 if east_asian_width(each) in "WF" else 1 for each in text)


def folded(text: str, width: int = WIDTH) -> str:
    """Return ``text`` in lines of at most ``width`` columns; its own lines stay apart.

    What follows "- " or "1. " at the start of a line is indented.
    """
    lines = re.sub(UNIT, HARD_SPACE, text).split("\n")  # "25 %" is not broken
    found = (line for given in lines for line in _fold(given, width))
    return "\n".join(found).replace(HARD_SPACE, " ")


def _fold(text: str, width: int) -> list[str]:
    mark = re.match(r" *(?:- |\d+\. )?", text)
    indent, lines = " " * len(mark[0] if mark else ""), [""]
    for piece in PIECE.findall(text):
        if columns(lines[-1] + piece.rstrip()) > width and lines[-1].strip():
            lines.append(indent)
        if not (piece.isspace() and lines[1:] and lines[-1] == indent):
            lines[-1] += piece
    return [line.rstrip() for line in lines]
