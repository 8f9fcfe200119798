"""11-1: queues, wrong sums and rings of waiting ranks, worked out on paper."""

from __future__ import annotations

from typing import Any

from course_lib.grading.exercise import Wrong
from course_lib.grading.worked import Worked

WANTED = {
    "alone": [52, 6],
    "one group": 58,
    "own groups": 16,
    "one link": 58,
    "held": [16, 28, 42],
    "new_group": 56,
    "rank 0": [21, 12],
    "rank 1": [12, 21],
    "ring": [1, 3, 0, 2],
    "one alone": 0,
}


def _but(entries: dict[str, Any]) -> dict[str, Any]:
    """The right table with other ``entries``."""
    return {**WANTED, **entries}


BY_HAND = Worked(
    id="11-1",
    title="queues, sums and rings, by hand",
    names=("table",),
    hints=(
        "An all-reduce between two ranks takes 2 messages of 1 ms, and its bytes at 1,000 a ms. "
        "Draw the link as a line of time and put one transfer behind the other.",
        "One group and one link are queues: the small call starts when the bucket is through. "
        "Groups are counted, not named: rank 1's first group is rank 0's first group, whatever "
        "they call it. For the ring, write behind each rank its first call and with whom.",
        "alone: 2 + 50 and 2 + 4. held: the first small call takes 10 to 16, a piece of 10,000 "
        "bytes 12 ms, the second small call is made at 16 + 20. new_group: 64/8 + 64/4 + 64/2. "
        "rank 0's a meets rank 1's g.",
    ),
    wrong=(
        Wrong(
            _but({"alone": [50, 4]}),
            "the latency of two messages is missing.",
        ),
        Wrong(
            _but({"alone": [51, 5]}),
            "an all-reduce between two ranks is two messages one after the other.",
        ),
        Wrong(
            _but({"alone": [102, 10]}),
            "between two ranks 2(n-1)/n of the bytes travel: once.",
        ),
        Wrong(_but({"one group": 16}), "one group is one queue: the bucket was started first."),
        Wrong(_but({"one group": 68}), "it was made at 10 ms, and waits until the bucket is done."),
        Wrong(
            _but({"own groups": 58}),
            "on a group and a link of its own nothing stands before it.",
        ),
        Wrong(_but({"own groups": 6}), "it was made at 10 ms."),
        Wrong(_but({"one link": 16}), "another group does not help where the link is one."),
        Wrong(
            _but({"held": [16, 28, 64]}),
            "one piece leaves in this gap, and not the whole bucket.",
        ),
        Wrong(
            _but({"held": [16, 28, 54]}),
            "the piece travels while the rank computes.",
        ),
        Wrong(
            _but({"held": [16, 26, 42]}),
            "every piece pays the latency of two messages.",
        ),
        Wrong(_but({"new_group": 3}), "every rank makes all groups, those of others too."),
        Wrong(_but({"new_group": 14}), "these are the sizes; how many groups has each axis?"),
        Wrong(_but({"rank 0": [3, 30]}), "this would be right if both had one order."),
        Wrong(_but({"rank 0": [12, 21]}), "this is what rank 1 gets."),
        Wrong(_but({"rank 1": [21, 12]}), "this is what rank 0 gets."),
        Wrong(_but({"rank 1": [3, 30]}), "this would be right if both had one order."),
        Wrong(_but({"ring": [2, 0, 3, 1]}), "look again at which axis each rank begins with."),
        Wrong(
            _but({"one alone": 4}),
            "play it: ranks 2 and 3 meet on tp first, and then rank 2 comes to dp.",
        ),
        Wrong(
            _but({"one alone": 2}),
            "play it: rank 2 is late for rank 0, but it comes.",
        ),
        Wrong(_but({"ring": None}), words="'ring' is not filled in yet"),
    ),
    right=(
        _but({"alone": (52.0, 6.0), "held": (16, 28.0, 42)}),
        _but({"new_group": 64 // 8 + 64 // 4 + 64 // 2}),
    ),
    stub=dict.fromkeys(WANTED),
    wanted=WANTED,
)
