"""09-1: positions, score entries, turns, bytes and a merge, worked out on paper."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from course_lib.grading.exercise import Wrong
from course_lib.grading.worked import Worked

# The numbers of the text: 16 positions, 4 ranks; two blocks, sums 6 and 2, outputs 2 and 6.
WANTED = {
    "contiguous": [4, 5, 6, 7],
    "zig-zag": [2, 3, 12, 13],
    "entries, contiguous": [10, 26, 42, 58],
    "entries, zig-zag": [34, 34, 34, 34],
    "imbalance": Fraction(29, 17),
    "blocks": [1, 0, 3, 2],
    "by turn, contiguous": [10, 16, 0, 0],
    "by turn, zig-zag": [10, 8, 8, 8],
    "merged": 3,
    "bytes": [300, 600],
}


def _but(entries: dict[str, Any]) -> dict[str, Any]:
    """The right table with other ``entries``."""
    return {**WANTED, **entries}


BY_HAND = Worked(
    id="09-1",
    title="positions and score entries, by hand",
    names=("table",),
    hints=(
        "Draw the triangle: 16 rows of queries, 16 columns of keys. The query at position p has "
        "p + 1 entries. Whose rows are a rank's?",
        "Add p + 1 over the positions that a rank holds. By turn: its own block is a small "
        "triangle; of another block, count how many of its keys lie before each of the rank's "
        "queries. In turn t rank r has the block of rank r - t.",
        "Zig-zag cuts 8 chunks of 2 and gives rank r chunks r and 7 - r. Rank 1: 3 + 4 + 13 + 14 "
        "entries. Merged: each block's output weighs as much as the sum of its exponentials.",
    ),
    wrong=(
        Wrong(
            _but({"contiguous": [1, 5, 9, 13]}),
            "this is every fourth position; contiguous ranks hold neighbours.",
        ),
        Wrong(_but({"contiguous": [0, 1, 2, 3]}), "these are rank 0's: ranks are counted from 0."),
        Wrong(
            _but({"zig-zag": [2, 3, 14, 15]}),
            "chunks 0 and 7 belong together, 1 and 6, 2 and 5, 3 and 4.",
        ),
        Wrong(
            _but({"zig-zag": [1, 14]}),
            "16 positions in 8 chunks: a chunk has two of them, and a rank four.",
        ),
        Wrong(
            _but({"entries, contiguous": [64, 64, 64, 64]}),
            "this is without the causal mask: a query sees no key behind it.",
        ),
        Wrong(
            _but({"entries, contiguous": [10, 10, 10, 10]}),
            "these are the entries within each rank's own block; its queries see earlier blocks "
            "too.",
        ),
        Wrong(
            _but({"entries, contiguous": [6, 22, 38, 54]}),
            "a query sees itself too: p + 1 entries at position p.",
        ),
        Wrong(
            _but({"entries, zig-zag": [10, 26, 42, 58]}),
            "these are the contiguous ones; here a rank has an early chunk and a late one.",
        ),
        Wrong(
            _but({"imbalance": Fraction(29, 5)}),
            "this is busiest over idlest; wanted is the busiest over the mean.",
        ),
        Wrong(
            _but({"imbalance": 4}),
            "the busiest rank does not do all the work: divide its entries by the mean.",
        ),
        Wrong(
            _but({"blocks": [1, 2, 3, 0]}),
            "K and V go to the next rank, so that what arrives comes from ever further back.",
        ),
        Wrong(
            _but({"by turn, contiguous": [10, 16, 16, 16]}),
            "blocks of later ranks pass by too, and rank 1's queries see nothing of them.",
        ),
        Wrong(
            _but({"by turn, contiguous": [16, 16, 0, 0]}),
            "the own block is under the mask: a triangle of four rows.",
        ),
        Wrong(
            _but({"by turn, zig-zag": [10, 16, 8, 0]}),
            "of every other block rank 1 sees one half: either two of its queries see all of it, "
            "or all four see its early chunk.",
        ),
        Wrong(_but({"merged": 4}), "this is the mean of the two outputs: weigh them."),
        Wrong(_but({"merged": 8}), "this is their sum: the weights add up to 1."),
        Wrong(
            _but({"merged": 5}),
            "the weights are the wrong way round: the block with the larger sum weighs more.",
        ),
        Wrong(
            _but({"bytes": [400, 800]}),
            "n - 1 turns, not n: the own block is there already, and its gradient stays.",
        ),
        Wrong(
            _but({"bytes": [300, 300]}),
            "backward needs K and V once more, and their gradients travel too.",
        ),
        Wrong(_but({"merged": None}), words="'merged' is not filled in yet"),
    ),
    right=(
        _but({"zig-zag": (2, 3, 12, 13), "imbalance": 58 / 34}),
        _but({"merged": 3.0, "bytes": [300.0, 600.0]}),
    ),
    stub=dict.fromkeys(WANTED),
    wanted=WANTED,
    unordered=frozenset({"contiguous", "zig-zag"}),
)
