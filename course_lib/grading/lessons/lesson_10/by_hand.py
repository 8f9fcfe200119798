"""10-1: six tokens on two ranks with four experts, worked out on paper."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from course_lib.grading.exercise import Wrong
from course_lib.grading.worked import Worked

# The choices of the exercise's text, [rank][token]: first choice, second choice.
CHOICES = (((0, 2), (0, 1), (2, 0)), ((0, 3), (1, 0), (3, 2)))

WANTED = {
    "by expert": [5, 2, 3, 2],
    "imbalance": 7 / 6,
    "splits": [[4, 2], [3, 3]],
    "rows": [0, 1, 2, 1, 2, 0],
    "bytes": [320, 320],
    "dropped": [1, 0],
    "balance": 17 / 15,
    "summed with": [1, 5],
    "too large": 4,
}


def _but(entries: dict[str, Any]) -> dict[str, Any]:
    """The right table with other ``entries``."""
    return {**WANTED, **entries}


BY_HAND = Worked(
    id="10-1",
    title="six tokens and four experts, by hand",
    names=("table",),
    hints=(
        "Make a table of ranks by experts: how many pairs of each rank want each expert. Nearly "
        "all follows from its sums.",
        "Rank 0 wants [3, 1, 2, 0] of the experts, rank 1 [2, 1, 1, 2]. Experts 0 and 1 live on "
        "rank 0. A pair that crosses costs four rows: there and back, forward and backward; a rank "
        "sends half of them for each pair that leaves it or comes to it.",
        "Two pairs of rank 0 and three of rank 1 cross: each rank sends 2 (2 + 3) rows of 32 "
        "bytes. Room is 6/4 rounded up. Balance: 4 times the sum of f_e p_e with f = [5/12, 2/12, "
        "3/12, 2/12] and p = [2.4, 1.2, 1.2, 1.2] / 6.",
    ),
    wrong=(
        Wrong(
            _but({"by expert": [2, 1, 1, 2]}),
            "these are the first choices alone: a pair is a token and one of its choices.",
        ),
        Wrong(
            _but({"by expert": [3, 1, 2, 0]}),
            "these are rank 0's pairs; an expert works for the tokens of all ranks.",
        ),
        Wrong(
            _but({"imbalance": 5 / 3}),
            "this is the busiest expert over the mean of experts; ranks are asked for.",
        ),
        Wrong(_but({"imbalance": 7 / 5}), "the busiest is divided by the mean, not by the other."),
        Wrong(
            _but({"imbalance": 6 / 7}),
            "this is the mean over the busiest; it is wanted the other way round.",
        ),
        Wrong(
            _but({"splits": [[4, 3], [2, 3]]}),
            "these are the rows that each rank receives; what it sends is asked for.",
        ),
        Wrong(
            _but({"splits": [[3, 3], [3, 3]]}),
            "nothing makes them even: count the pairs whose expert is on each rank.",
        ),
        Wrong(
            _but({"splits": [[0, 2], [3, 0]]}),
            "rows whose expert is here stand in the splits too: all-to-all hands those over, too.",
        ),
        Wrong(
            _but({"rows": [0, 1, 2, 0, 1, 2]}),
            "rows leave sorted by expert, not in the order of the pairs.",
        ),
        Wrong(
            _but({"rows": [0, 1, 2, 1, 0, 2]}),
            "within an expert first choices come before second ones.",
        ),
        Wrong(
            _but({"rows": [0, 1, 5, 4, 2, 3]}),
            "these are the numbers of the pairs; the token of each is wanted.",
        ),
        Wrong(
            _but({"bytes": [768, 768]}),
            "this is all six pairs four times: what stays on the rank is not sent.",
        ),
        Wrong(
            _but({"bytes": [256, 384]}),
            "each rank also sends what it does for other ranks: results forward, gradients "
            "backward.",
        ),
        Wrong(_but({"bytes": [160, 160]}), "this is forward alone; backward travels as far."),
        Wrong(_but({"bytes": [80, 80]}), "a number has 4 bytes."),
        Wrong(
            _but({"dropped": [3, 2]}),
            "room is rounded up: 6 pairs over 4 experts are room for 2.",
        ),
        Wrong(
            _but({"dropped": [2, 0]}),
            "expert 2 is wanted twice and has room for 2.",
        ),
        Wrong(
            _but({"dropped": [0, 0]}),
            "each rank decides alone: of its own 6 pairs an expert takes 2.",
        ),
        Wrong(
            _but({"balance": 17 / 60}),
            "times the number of experts: an even load is to give 1.",
        ),
        Wrong(_but({"balance": 6.8}), "divided by the number of tokens, it is 1 for an even load."),
        Wrong(
            _but({"balance": 34 / 15}),
            "f_e is the share of all 12 pairs; this divided by the 6 tokens.",
        ),
        Wrong(
            _but({"summed with": [4, 5, 6, 7]}),
            "these hold different experts; who holds the same ones as rank 5?",
        ),
        Wrong(
            _but({"summed with": [0, 1, 2, 3, 4, 5, 6, 7]}),
            "so it is for the router; an expert's gradient is added up by those who hold it.",
        ),
        Wrong(
            _but({"summed with": [4, 5]}),
            "with ep = 4 ranks 0 to 3 share the experts, and 4 to 7 again.",
        ),
        Wrong(
            _but({"too large": 2}),
            "backward of dispatch has already added up the tokens of all ep ranks.",
        ),
        Wrong(
            _but({"too large": 8}),
            "it is divided by the 2 ranks of edp, where 8 would be right.",
        ),
        Wrong(
            _but({"too large": Fraction(1, 4)}),
            "the other way round: it is divided by too little.",
        ),
        Wrong(_but({"dropped": None}), words="'dropped' is not filled in yet"),
    ),
    right=(
        _but({"imbalance": Fraction(7, 6), "splits": ((4, 2), (3, 3))}),
        _but({"bytes": [2 * (2 + 3) * 8 * 4] * 2, "balance": 4 * 1.7 / 6}),
    ),
    stub=dict.fromkeys(WANTED),
    wanted=WANTED,
    unordered=frozenset({"summed with"}),
)
