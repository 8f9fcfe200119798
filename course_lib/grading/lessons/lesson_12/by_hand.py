"""12-1: coordinates, groups, copies, norm and thresholds of a mesh, worked out on paper."""

from __future__ import annotations

from typing import Any

from course_lib.grading.exercise import Wrong
from course_lib.grading.worked import Worked

WANTED = {
    "coordinates": [1, 2, 1],
    "groups": [[12, 13], [9, 11, 13, 15], [5, 13]],
    "crosses": "pp",
    "copies": [4, 8, 8],
    "copies, ZeRO-1": [1, 2, 2],
    "squared norm": 20,
    "counted twice": 112,
    "tokens": [3072, 2304],
    "experts": [16, 4, 2],
}


def _but(entries: dict[str, Any]) -> dict[str, Any]:
    """The right table with other ``entries``."""
    return {**WANTED, **entries}


BY_HAND = Worked(
    id="12-1",
    title="a mesh by hand",
    names=("mesh",),
    hints=(
        "Divide 13 by 2, what is left by 4, what is left by 2: the remainders are the "
        "coordinates. For copies, ask which axes do not change what a rank holds.",
        "A step on tp is 1 rank, on dp 2, on pp 8. dp copies everything, tp what it does not cut, "
        "two stages the embedding; ZeRO leaves no copies over dp. A square that k ranks hold "
        "counts 1/k on each.",
        "13 = 1 + 2 (2 + 4 * 1). Squared norm: 16 * 3 / 4 + 16 * 4 / 8. Tokens: 3h, and "
        "3h (d-1) / (d (t-1)). ep lies inside dp: it asks for no rank more.",
    ),
    wrong=(
        Wrong(
            _but({"coordinates": [1, 1, 2]}),
            "these are tp, pp, dp: the order tp-dp-pp has dp second.",
        ),
        Wrong(
            _but({"coordinates": [1, 2, 3]}),
            "the last coordinate is below pp: divide by the sizes of all faster axes.",
        ),
        Wrong(
            _but({"groups": [[12, 13], [13, 15, 17, 19], [13, 21]]}),
            "a group starts at its first member, not at the rank that asks.",
        ),
        Wrong(
            _but({"groups": [[12, 13], [12, 13, 14, 15], [5, 13]]}),
            "only the fastest axis has neighbours: a step on dp is tp ranks.",
        ),
        Wrong(
            _but({"crosses": "dp pp"}),
            "tp x dp = 8 ranks fill a node: dp's groups lie inside it.",
        ),
        Wrong(
            _but({"copies": [4, 4, 4]}),
            "a norm's weight is not cut by tp, and the embedding is on two stages.",
        ),
        Wrong(
            _but({"copies": [1, 2, 2]}),
            "without ZeRO every rank of dp holds the complete gradient.",
        ),
        Wrong(
            _but({"copies": [16, 16, 16]}),
            "stages hold different layers, and ranks of tp different parts of a matrix.",
        ),
        Wrong(
            _but({"copies, ZeRO-1": [1, 1, 1]}),
            "ZeRO shards over dp alone: tp and the two stages still hold copies.",
        ),
        Wrong(
            _but({"copies, ZeRO-1": [4, 8, 8]}),
            "dp's sum leaves a shard: no other rank of dp has it.",
        ),
        Wrong(_but({"squared norm": 112}), "every rank's copies are counted: divide by copies."),
        Wrong(
            _but({"squared norm": 28}),
            "the norms' weights are copies over tp too: 8 ranks hold them.",
        ),
        Wrong(_but({"squared norm": 7}), "this is one rank: stages and parts of tp add up."),
        Wrong(
            _but({"tokens": [3072, 3072]}),
            "in the mesh tp has cut the gradients too, and the groups have other sizes.",
        ),
        Wrong(
            _but({"tokens": [3072, 1536]}),
            "dp is 4 here: (d-1)/d is 3/4, not 1/2.",
        ),
        Wrong(_but({"experts": [32, 4, 2]}), "ep lies inside dp: it asks for no rank more."),
        Wrong(
            _but({"experts": [16, 4, 4]}),
            "the ranks of ep hold other experts: dp / ep hold the same ones.",
        ),
        Wrong(
            _but({"experts": [16, 8, 2]}),
            "the experts are shared out over ep.",
        ),
    ),
    right=(
        _but({"crosses": " pp ", "squared norm": 20.0}),
        _but({"groups": ((12, 13), (9, 11, 13, 15), (5, 13)), "tokens": (3072.0, 2304.0)}),
    ),
    stub=dict.fromkeys(WANTED),
    wanted=WANTED,
    unordered=frozenset({"groups"}),
)
