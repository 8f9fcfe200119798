"""04-1: shards, bytes kept and bytes sent in each stage, worked out on paper."""

from __future__ import annotations

from typing import Any

from course_lib.grading.exercise import Wrong
from course_lib.grading.worked import Worked

WANTED = {
    "flat": 12,
    "owners": "a ab bc c",
    "padding": [0, 0, 0, 2],
    "kept, GB": [32, 11, 7.5, 4],
    "kept, 1000 ranks": [16, 4.012, 2.014, 0.016],
    "sent, GB": [7, 7, 7, 10.5],
    "sent, 4 micro-batches": [7, 7, 17.5, 42],
}


def _but(entries: dict[str, Any]) -> dict[str, Any]:
    """The right table with other ``entries``."""
    return {**WANTED, **entries}


BY_HAND = Worked(
    id="04-1",
    title="who owns, keeps and sends what, by hand",
    names=("table",),
    hints=(
        "Write the ten elements in a line, aaaaabbccc, and add padding at the end until four equal "
        "shards fit. For the bytes, begin with stage 3: what is not divided there?",
        "Weights 2, gradients 2, optimizer 12 bytes a parameter. Stage 1 divides the 12, stage 2 "
        "the gradients too, stage 3 all. A reduce-scatter or an all-gather of S bytes in all sends "
        "(n-1)/n S: count how many of them a step has.",
        "Kept by stage 1: 2 billion times (4 + 12/8). One reduce-scatter or all-gather of the "
        "4 GB sends 3.5 GB. There are 2 of them in DP and stage 1, M + 1 in stage 2, 3M in stage "
        "3.",
    ),
    wrong=(
        Wrong(_but({"flat": 10}), "ten elements do not make four equal shards: pad them."),
        Wrong(_but({"flat": 16}), "padded too far: the smallest multiple of 4 that holds 10."),
        Wrong(
            _but({"owners": "a b c"}),
            "a shard does not care where a tensor ends: all four have three places each.",
        ),
        Wrong(
            _but({"owners": "a abb bcc c"}),
            "a tensor is named once in a shard, however many of its elements lie there.",
        ),
        Wrong(
            _but({"padding": [2, 0, 0, 0]}),
            "padding stands at the end of the flat tensor, not at its beginning.",
        ),
        Wrong(
            _but({"padding": [0, 0, 1, 1]}),
            "shards are equal and padding stands at the end: it is not spread over the ranks.",
        ),
        Wrong(
            _but({"kept, GB": [32, 11, 7.5, 8]}),
            "stage 3 divides everything that is kept: no part of the 16 bytes is left whole.",
        ),
        Wrong(
            _but({"kept, GB": [24, 10, 6.5, 3]}),
            "the optimizer has 12 bytes: the float32 master weights belong to it.",
        ),
        Wrong(
            _but({"kept, GB": [32, 4, 4, 4]}),
            "stages 1 and 2 divide only a part of the 16 bytes.",
        ),
        Wrong(
            _but({"kept, 1000 ranks": [0.016, 0.016, 0.016, 0.016]}),
            "only stage 3 divides all of it: the others have a floor.",
        ),
        Wrong(
            _but({"sent, GB": [8, 8, 8, 12]}),
            "these are the bytes of the calls: a rank sends (n-1)/n of them, its own piece stays.",
        ),
        Wrong(
            _but({"sent, GB": [3.5, 7, 7, 10.5]}),
            "an all-reduce is a reduce-scatter and an all-gather: DP sends twice 3.5.",
        ),
        Wrong(
            _but({"sent, GB": [7, 10.5, 10.5, 10.5]}),
            "stage 1 gathers weights where DP gathers gradients: nothing is added.",
        ),
        Wrong(
            _but({"sent, 4 micro-batches": [7, 7, 7, 10.5]}),
            "freed gradients cannot wait for the next micro-batch: stages 2 and 3 send each time.",
        ),
        Wrong(
            _but({"sent, 4 micro-batches": [28, 28, 28, 42]}),
            "DP and stage 1 send once a step, stage 2 gathers the weights once a step.",
        ),
    ),
    right=(
        _but({"owners": "a, ab, bc, c", "kept, GB": (32.0, 11, 7.5, 4.0)}),
        _but({"sent, GB": [7, 7, 7, 21 / 2]}),
    ),
    stub=dict.fromkeys(WANTED),
    wanted=WANTED,
)
