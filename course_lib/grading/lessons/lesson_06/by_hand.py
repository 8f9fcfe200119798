"""06-1: rows, bytes, memory and a loss by words, worked out on paper."""

from __future__ import annotations

from typing import Any

from course_lib.grading.exercise import Wrong
from course_lib.grading.worked import Worked

# The numbers of the exercise's text: 4 positions on 2 ranks; x of 1,000 bytes on 4; t = 8; 4 words.
WANTED = {
    "rows": [[11, 22], [33, 44]],
    "dx": [[4, 4], [6, 6]],
    "norm parts": [12, -6],
    "norm": 6,
    "bytes": [6000, 6000, 7500],
    "full": 9000,
    "kept": [13, 7.75, 4.25],
    "dz": [[0.5, 0.25], [-0.875, 0.125]],
    "heads": [0, 0, 1, 1],
}


def _but(entries: dict[str, Any]) -> dict[str, Any]:
    """The right table with other ``entries``."""
    return {**WANTED, **entries}


BY_HAND = Worked(
    id="06-1",
    title="rows, bytes and words, by hand",
    names=("rows",),
    hints=(
        "Leave adds the parts up and gives each rank its rows of the sum. Backward, enter does the "
        "same with gradients.",
        "A rank has the norm's gradient of its own rows: dx times the norm's input, added up. An "
        "all-reduce sends 2(n-1)/n of x, a gather of rows or a scatter (n-1)/n. Softmax is "
        "e^(z - m) over the sum of all ranks.",
        "Leave: 1 + 10 and 2 + 20 for rank 0. Norm, rank 0: 4 times 1 plus 4 times 2. Bytes: 4 "
        "all-reduces of 1,500; or 8, or 10 halves of 750. Kept: 10 + 24/8, 4 + 30/8, 34/8. The sum "
        "over words is 2.",
    ),
    wrong=(
        Wrong(
            _but({"rows": [[11, 22, 33, 44], [11, 22, 33, 44]]}),
            "this is the whole sum on both ranks, an all-reduce; each rank gets its rows.",
        ),
        Wrong(
            _but({"rows": [[1, 2], [30, 40]]}),
            "each rank took its rows of its own part: the parts have to be added first.",
        ),
        Wrong(
            _but({"rows": [[11, 33], [22, 44]]}),
            "rank 0 has the first two positions, rank 1 the last two: neighbours stay together.",
        ),
        Wrong(
            _but({"dx": [[1, 1], [4, 4]]}),
            "each rank took its rows of its own gradient: this is what a gather's wrong backward "
            "does. Both ranks used every row.",
        ),
        Wrong(_but({"dx": [[2, 2], [3, 3]]}), "the gradients are added, not averaged."),
        Wrong(
            _but({"norm parts": [6, 6]}),
            "this is the sum; each rank has the part of its rows alone.",
        ),
        Wrong(_but({"norm": 3}), "the parts are added, not averaged."),
        Wrong(_but({"norm": 12}), "this is rank 0's part, of its own rows."),
        Wrong(
            _but({"bytes": [6000, 6000, 6000]}),
            "the second variant gathers x once more for each region, in backward.",
        ),
        Wrong(
            _but({"bytes": [6000, 3000, 4500]}),
            "a layer has 8 halves, 4 gathers and 4 scatters: 4 all-reduces' worth.",
        ),
        Wrong(
            _but({"bytes": [4000, 4000, 5000]}),
            "this is the payload; a ring sends 2(n-1)/n of it for an all-reduce.",
        ),
        Wrong(_but({"full": 12000}), "forward runs twice, backward once."),
        Wrong(_but({"full": 6000}), "what runs again sends again: forward's two all-reduces."),
        Wrong(
            _but({"kept": [13, 4.25, 4.25]}),
            "the first variant keeps what has entered whole: two activations of 2 bytes a number.",
        ),
        Wrong(
            _but({"kept": [4.25, 7.75, 4.25]}),
            "tensor parallelism leaves 10 of the 34 whole.",
        ),
        Wrong(
            _but({"dz": [[0.5, 0.25], [0.125, 0.125]]}),
            "this is softmax; the target's own has 1 less.",
        ),
        Wrong(
            _but({"dz": [[2 / 3, 1 / 3], [-0.5, 0.5]]}),
            "each rank divided by its own sum; the sum goes over the words of all ranks.",
        ),
        Wrong(
            _but({"heads": [0, 1, 0, 1]}),
            "query heads 0 to 3 use key and value head 0, and ranks 0 and 1 have these.",
        ),
        Wrong(_but({"full": None}), words="'full' is not filled in yet"),
    ),
    right=(
        _but({"rows": ((11.0, 22.0), (33.0, 44.0)), "norm": 6.0}),
        _but({"kept": [10 + 24 / 8, 4 + 30 / 8, 34 / 8], "full": 6 * 1.5 * 1000}),
    ),
    stub=dict.fromkeys(WANTED),
    wanted=WANTED,
)
