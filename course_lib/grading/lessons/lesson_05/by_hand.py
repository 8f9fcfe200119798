"""05-1: a pair of matrices on two ranks, forward and backward, worked out on paper."""

from __future__ import annotations

from typing import Any

from course_lib.grading.exercise import Wrong
from course_lib.grading.worked import Worked

# The numbers of the exercise's text: x = [1, 2], dy = [1, 1], ReLU between A and B.
A = ((1, 2, 3, -1), (1, -2, -1, 2))
B = ((1, 2), (5, 1), (2, -1), (1, 0))

WANTED = {
    "inner": [[3, -2], [1, 3]],
    "partial": [[3, 6], [5, -1]],
    "y": [9, 6],
    "bias too early": [10, 7],
    "rows first": [3, 2, 3, 4],
    "dx parts": [[3, 3], [2, 1]],
    "dx": [5, 4],
    "all-reduces": [1, 1],
    "bytes": 3840,
}


def _but(entries: dict[str, Any]) -> dict[str, Any]:
    """The right table with other ``entries``."""
    return {**WANTED, **entries}


BY_HAND = Worked(
    id="05-1",
    title="one pair on two ranks, by hand",
    names=("pair",),
    hints=(
        "Begin with the four numbers of x A: rank 0 has the first two, rank 1 the others. ReLU "
        "makes negative ones 0.",
        "A rank's partial sum is its own inner numbers after ReLU times its own rows of B. "
        "Backward: dy times those rows transposed, 0 where ReLU was 0, then times the rank's "
        "columns of A transposed. dx is the sum of what the ranks get.",
        "x A = [3, -2, 1, 3]. Rank 0: 3 times [1, 2]; rank 1: 1 times [2, -1] plus 3 times "
        "[1, 0]. Backward, rank 0: 1 + 2 = 3, then 3 times [1, 1]. Bytes: 8 times the layers "
        "times (n-1)/n times the bytes of x.",
    ),
    wrong=(
        Wrong(
            _but({"inner": [[3, 0], [1, 3]]}),
            "this is after ReLU; the numbers before it are asked for.",
        ),
        Wrong(
            _but({"inner": [[3, 1], [-2, 3]]}),
            "rank 0 has the first two columns of A, rank 1 the last two: neighbours stay together.",
        ),
        Wrong(
            _but({"partial": [[-7, 4], [5, -1]]}),
            "ReLU is missing: what is negative counts as 0 behind it.",
        ),
        Wrong(_but({"partial": [[8, 5], [8, 5]]}), "this is the sum; each rank has a part of it."),
        Wrong(_but({"y": [8, 5]}), "the bias is missing."),
        Wrong(_but({"y": [10, 7]}), "both ranks added the bias: it is added once, to the sum."),
        Wrong(
            _but({"bias too early": [9, 6]}),
            "here each of two ranks adds the bias to its part, so that the sum has it twice.",
        ),
        Wrong(
            _but({"rows first": [3, 0, 1, 3]}),
            "this is ReLU of the sum; here every rank takes ReLU of its own part.",
        ),
        Wrong(
            _but({"rows first": [3, -2, 1, 3]}),
            "this is the sum without ReLU.",
        ),
        Wrong(
            _but({"dx parts": [[15, -9], [2, 1]]}),
            "ReLU passes no gradient where its input was negative.",
        ),
        Wrong(
            _but({"dx parts": [[5, 4], [5, 4]]}),
            "this is the sum; each rank has the gradient through its own columns alone.",
        ),
        Wrong(_but({"dx": [3, 3]}), "this is rank 0's part: x went to both ranks."),
        Wrong(_but({"dx": [2.5, 2]}), "the parts are added, not averaged."),
        Wrong(
            _but({"all-reduces": [2, 2]}),
            "the inner numbers never travel: one where the pair ends, and one in backward, where "
            "it begins.",
        ),
        Wrong(
            _but({"all-reduces": [1, 0]}),
            "forward is right; but in backward each rank has only its part of dx.",
        ),
        Wrong(
            _but({"bytes": 1920}),
            "attention is a pair too: four all-reduces a layer.",
        ),
        Wrong(_but({"bytes": 2560}), "this is the payload; a ring sends 2(n-1)/n times that."),
        Wrong(_but({"bytes": 960}), "a number has 4 bytes."),
        Wrong(_but({"y": None}), words="'y' is not filled in yet"),
    ),
    right=(
        _but({"y": (9.0, 6.0), "dx": (5.0, 4.0)}),
        _but({"bytes": 4 * 2 * (2 * 3 / 4) * 320}),
    ),
    stub=dict.fromkeys(WANTED),
    wanted=WANTED,
)
