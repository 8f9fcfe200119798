"""13-1: what a small server keeps, sends and waits for, worked out on paper."""

from __future__ import annotations

from typing import Any

from course_lib.grading.exercise import Wrong
from course_lib.grading.worked import Worked

# The text's model: 2 layers, hidden 32, 4 query heads of 8, 2 heads of keys and values, 2 bytes.
WANTED = {
    "rows": [30, 9],
    "cache": 38400,
    "cache a rank": [19200, 19200],
    "calls": 6,
    "bytes": 328,
    "pairs": [[4.0, 1], [4.5, 4]],
    "token": 4,
    "ticks": [4, 4, 6],
    "busy": [1 / 4, 1, 1],
    "tp8 ms": 14.25,
    "8 requests": [160, 8000 / 14.25],
}


def _but(entries: dict[str, Any]) -> dict[str, Any]:
    """The right table with other ``entries``."""
    return {**WANTED, **entries}


BY_HAND = Worked(
    id="13-1",
    title="a small server, by hand",
    names=("server",),
    hints=(
        "Begin with the cache: for each layer, request and position it holds the keys and the "
        "values of all key-value heads. The last token is never fed back.",
        "Cache: 2 x layers x requests x positions x kv heads x head size x bytes. A decoded token "
        "under TP: one all-reduce for the embedding, two a layer, and one all-gather of a pair. A "
        "round of a pipeline has as many ticks as groups or stages, whichever is more.",
        "Rows: 6 + 7 + 8 + 9, and 6 + 1 + 1 + 1. Bytes: five all-reduces of 64 bytes, each times "
        "2(n-1)/n = 1, and a pair of two float32. TP8: 50/8 + 8 ms; 8 requests take one step.",
    ),
    wrong=(
        Wrong(
            _but({"rows": [30, 10]}),
            "the last token chosen is never fed back: with a cache 6 rows, and one for each token "
            "but the last.",
        ),
        Wrong(
            _but({"rows": [24, 9]}),
            "without a cache the text is longer by one in every forward: 6, 7, 8, 9.",
        ),
        Wrong(_but({"cache": 19200}), "keys and values are both kept."),
        Wrong(
            _but({"cache": 76800}),
            "kept are the heads of keys and values, 2 of them, not the 4 query heads.",
        ),
        Wrong(_but({"cache": 12800}), "three requests are kept, not one."),
        Wrong(
            _but({"cache a rank": [19200, 9600]}),
            "a rank holds one head at least: on four ranks each of the two heads is held twice.",
        ),
        Wrong(
            _but({"cache a rank": [38400, 38400]}),
            "tensor parallelism cuts the heads, and with them the cache.",
        ),
        Wrong(
            _but({"calls": 4}), "two a layer, and one for the embedding and one for the choice too."
        ),
        Wrong(_but({"calls": 5}), "one is missing: the embedding's sum, or the choice of a token."),
        Wrong(
            _but({"bytes": 320}), "the choice is missing: a pair of two float32 to the other rank."
        ),
        Wrong(
            _but({"bytes": 648}),
            "on two ranks an all-reduce sends 2(n-1)/n = 1 times its payload.",
        ),
        Wrong(
            _but({"pairs": [[4.0, 1], [4.5, 1]]}),
            "token numbers are those of the whole vocabulary: rank 1 begins with number 3.",
        ),
        Wrong(_but({"token": 1}), "this is the place in a rank's own part, or the smaller logit."),
        Wrong(
            _but({"ticks": [4, 1, 1]}),
            "groups fill the stages; a token still goes through all four.",
        ),
        Wrong(
            _but({"ticks": [4, 4, 4]}),
            "six groups take turns on four stages: a round has six ticks.",
        ),
        Wrong(
            _but({"busy": [1 / 4, 1, 3 / 2]}),
            "a stage cannot be busier than always.",
        ),
        Wrong(_but({"busy": [1, 1, 1]}), "with one group only one stage of four works at a time."),
        Wrong(
            _but({"tp8 ms": 58}),
            "this is the note's number: the 50 ms of one GPU are not divided by 8.",
        ),
        Wrong(_but({"tp8 ms": 7.25}), "the messages are not divided: they stay 8 ms."),
        Wrong(
            _but({"8 requests": [160, 1000 / 14.25]}),
            "all 8 requests share a step: 8 tokens, not one.",
        ),
        Wrong(
            _but({"8 requests": [20, 8000 / 14.25]}),
            "there are eight replicas, each with one request.",
        ),
        Wrong(_but({"cache": None}), words="'cache' is not filled in yet"),
    ),
    right=(
        _but({"busy": (0.25, 1.0, 1.0), "ticks": (4.0, 4.0, 6.0)}),
        _but({"cache": 2 * 2 * 3 * 100 * 2 * 8 * 2, "tp8 ms": 50 / 8 + 8}),
    ),
    stub=dict.fromkeys(WANTED),
    wanted=WANTED,
)
