"""03-1: gradients of three ranks, and the buckets of a step, worked out on paper."""

from __future__ import annotations

from typing import Any

from course_lib.grading.exercise import Wrong
from course_lib.grading.worked import Worked

# The numbers of the exercise's text.
ROWS = ((1, 2), (4,), (1, 1, 1))  # x of each rank
TENSORS = {"a": 400, "b": 2000, "c": 800, "d": 1200, "e": 600}  # bytes, in the model's order
LIMIT, RANKS = 2000, 4
HOOKS = "ecbda"  # the order in which gradients are complete

WANTED = {
    "own": [10, 32, 6],
    "law": 8,
    "mean of means": 13,
    "n times": 39,
    "buckets": "edc b a",
    "leaves": "d d a",
    "bytes": 7500,
    "bytes, 4 micro-batches": 7500,
}


def _but(entries: dict[str, Any]) -> dict[str, Any]:
    """The right table with other ``entries``."""
    return {**WANTED, **entries}


BY_HAND = Worked(
    id="03-1",
    title="three gradients and three buckets, by hand",
    names=("step",),
    hints=(
        "The gradient of one row is 2 w x^2, and w is 1: write the six of them down first. For "
        "the buckets begin at e.",
        "law: all six added, divided by six. mean of means and n times: first each rank's own "
        "mean. A bucket takes tensors until it holds 2,000 bytes or more; bucket 1 may be full "
        "early and must then wait for bucket 0.",
        "48 / 6; then 5, 32 and 2, averaged and added. e + d are 1,800 bytes, so that c goes in "
        "as well. The bytes are 2(n-1)/n times all bytes of the five tensors, once a step.",
    ),
    wrong=(
        Wrong(
            _but({"own": [5, 32, 2]}),
            "these are the gradients of the ranks' means: here nothing is divided yet.",
        ),
        Wrong(
            _but({"own": [6, 8, 6]}),
            "x is squared in the gradient too: of the row x = 2 it is 8.",
        ),
        Wrong(
            _but({"law": 13, "mean of means": 8}),
            "a rank with one row must not weigh as much as one with three, unless you average "
            "means.",
        ),
        Wrong(_but({"law": 48}), "nothing is divided: this is the gradient of the summed loss."),
        Wrong(
            _but({"law": 16}),
            "divided by the number of ranks: the mean of the loss is over rows.",
        ),
        Wrong(
            _but({"mean of means": 39, "n times": 13}),
            "summed and averaged are swapped: of n ranks, one is n times the other.",
        ),
        Wrong(_but({"n times": 24}), "each rank divides by its own rows, not by all six."),
        Wrong(
            _but({"buckets": "ab cd e"}),
            "filled from the first tensor: backward finishes the last one first.",
        ),
        Wrong(
            _but({"buckets": "ed c b a"}),
            "a bucket is closed by the tensor that fills it: at 1,800 bytes it is still open.",
        ),
        Wrong(
            _but({"buckets": "cde b a"}),
            "these are the right tensors, but the last one of the model is put in first.",
        ),
        Wrong(
            _but({"buckets": "edc ba"}),
            "a tensor as large as the limit fills its bucket alone: nothing goes in after it.",
        ),
        Wrong(
            _but({"leaves": "c b a"}),
            "here the hooks do not fire in the order in which the buckets were filled.",
        ),
        Wrong(
            _but({"leaves": "d b a"}),
            "bucket 1 is full after b, but bucket 0 has not left: the order is the same on all "
            "ranks.",
        ),
        Wrong(_but({"leaves": "e b a"}), "a bucket leaves when its last gradient is there."),
        Wrong(_but({"bytes": 5000}), "this is the payload; a ring sends 2(n-1)/n times that."),
        Wrong(_but({"bytes": 15000}), "(n-1) S is what it takes to send everything to everybody."),
        Wrong(_but({"bytes": 3750}), "(n-1)/n S is one half of the ring: the other is as long."),
        Wrong(
            _but({"bytes, 4 micro-batches": 30000}),
            "micro-batches are added up on each rank, and the sum is sent once.",
        ),
        Wrong(_but({"own": None}), words="'own' is not filled in yet"),
    ),
    right=(
        _but({"own": (10.0, 32.0, 6.0), "buckets": " edc  b a "}),
        _but({"law": 48 / 6, "mean of means": (5 + 32 + 2) / 3, "bytes": 2 * 3 / 4 * 5000}),
    ),
    stub=dict.fromkeys(WANTED),
    wanted=WANTED,
)
