"""Fold text to the width of a terminal; a Chinese character takes two columns."""

from __future__ import annotations

import re
from unicodedata import east_asian_width

WIDTH = 80
# A piece that is not broken: a wide character or a word, with the closing marks after it.
PIECE = re.compile(r"\s+|(?:[⺀-鿿]|[^\s⺀-鿿，。；：？！、）》」]+|.)[，。；：？！、）》」]*")


def columns(text: str) -> int:
    """Return the number of columns that ``text`` takes in a terminal."""
    return sum(2 if east_asian_width(each) in "WF" else 1 for each in text)


def folded(text: str, indent: str = "", width: int = WIDTH) -> str:
    """Return ``text`` in lines of at most ``width`` columns; later lines start with ``indent``.

    Lines of ``text`` stay apart.
    """
    return "\n".join(line for given in text.split("\n") for line in _fold(given, indent, width))


def _fold(text: str, indent: str, width: int) -> list[str]:
    lines = [""]
    for piece in PIECE.findall(text):
        if columns(lines[-1] + piece.rstrip()) > width and lines[-1].strip():
            lines.append(indent)
        if not (piece.isspace() and lines[1:] and lines[-1] == indent):
            lines[-1] += piece
    return [line.rstrip() for line in lines]
