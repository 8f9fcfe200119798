"""02-1: the ring all-reduce of three ranks, traced with a pencil."""

from __future__ import annotations

from course_lib.grading.exercise import Wrong
from course_lib.grading.worked import Worked

SENT, FIRST, SECOND = "sent in turn 1", "sums of turn 1", "sums of turn 2"
HELD, ARRIVED = "rank 0 before the all-gather", "arrives at rank 0 in turns 3 and 4"
BYTES = "bytes that a rank sends"
TRACE = {
    SENT: [4, 1, 6],
    FIRST: [7, 13, 3],
    SECOND: [6, 12, 18],
    HELD: [6, 7, 4],
    ARRIVED: [18, 12],
    BYTES: 16,
}


def _but(**entries: object) -> dict[str, object]:
    return {**TRACE, **{globals()[name]: value for name, value in entries.items()}}


BY_HAND = Worked(
    id="02-1",
    title="a ring of three ranks by hand",
    names=("trace",),
    hints=(
        "Draw the three ranks side by side with their pieces below each other, and an arrow for "
        "each message of turn 1. Cross out what a sum replaces.",
        "In turn 1 rank 0 sends its piece 2, rank 1 its piece 0, rank 2 its piece 1, each to the "
        "next rank. Who receives adds its own number of that piece. In turn 2 that sum leaves.",
        "Rank 0 receives 6 from rank 2 and adds its own piece 1: 1 + 6 = 7. In turn 2 it sends 7 "
        "to rank 1 and receives what rank 2 made in turn 1. After turn 2 rank r has the sum of "
        "piece r; then the sums travel on the same way without being added to anything.",
    ),
    wrong=(
        Wrong(
            _but(SENT=[3, 5, 5], FIRST=[9, 4, 11], SECOND=[12, 18, 6], HELD=[3, 12, 9]),
            "here every rank began with its own piece; by this rule rank r begins with piece r-1, "
            "so that it ends with the sum of piece r",
        ),
        Wrong(
            _but(FIRST=[4, 11, 9]),
            "messages go to the next rank: rank 0 hears from rank 2, not from rank 1",
        ),
        Wrong(
            _but(SECOND=[4, 11, 9]),
            "what leaves in turn 2 is the sum made in turn 1, not the number that had arrived",
        ),
        Wrong(
            _but(HELD=[6, 12, 18]),
            "the reduce-scatter leaves one complete sum on each rank; the other two pieces of "
            "rank 0 are as it last left them",
        ),
        Wrong(_but(HELD=[6, 1, 4]), "rank 0 added to piece 1 in turn 1, and keeps that sum"),
        Wrong(
            _but(ARRIVED=[12, 18]),
            "rank 0 hears from rank 2 alone, which first sends the sum that it completed itself",
        ),
        Wrong(_but(BYTES=48), "these are the bytes of all three ranks together"),
        Wrong(_but(BYTES=24), "this is 2S; a rank sends 2(n-1)/n S, a piece in each of four turns"),
        Wrong(_but(BYTES=4), "these are numbers; a number has 4 bytes"),
        Wrong(_but(SENT=[2, 0, 1]), "these are the pieces; the numbers in them are wanted"),
    ),
    right=(
        TRACE,
        {key: tuple(map(float, v)) if isinstance(v, list) else v for key, v in TRACE.items()},
    ),
    stub=dict.fromkeys(TRACE),
    wanted=TRACE,
)
