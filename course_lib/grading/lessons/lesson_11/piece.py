"""11-2: the largest piece of a bucket that fits into a gap."""

from __future__ import annotations

import random
from typing import Any

from course_lib.grading.answers import NotRight, shown
from course_lib.grading.exercise import Case, Function, Instance, Wrong

ELEMENT = 4  # bytes of a float32


def _fits(gap: int, ranks: int, alpha: int, beta: int) -> int:
    turns = 2 * (ranks - 1)
    return max(0, (gap - turns * alpha) * beta * ranks // (turns * ELEMENT))


def _by_trying(gap: int, ranks: int, alpha: int, beta: int) -> int:
    """Halves the interval between one that fits and one that does not."""

    def fits(elements: int) -> bool:
        scale = ranks * beta  # whole numbers alone
        return 2 * (ranks - 1) * (alpha * scale + ELEMENT * elements) <= gap * scale

    low, high = 0, gap * beta * ranks
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise NotRight(f"a whole number of elements is wanted, not {shown(value)}")
    return int(value)


def _drawn(rng: random.Random, ranks: list[int], short: int) -> list[Instance]:
    """Five gaps, ``short`` of them too short for a single message's way around."""
    found = []
    for number in range(5):
        n, alpha = rng.choice(ranks), rng.randrange(2, 30)
        latency = 2 * (n - 1) * alpha
        gap = rng.randrange(1, latency) if number < short else latency + rng.randrange(50, 5_000)
        found.append(
            {"gap": gap, "ranks": n, "alpha": alpha, "beta": rng.randrange(1_001, 50_000, 2)}
        )
    return found


# What people get wrong.


def _no_latency(gap: int, ranks: int, alpha: int, beta: int) -> int:
    return gap * beta * ranks // (2 * (ranks - 1) * ELEMENT)


def _one_alpha(gap: int, ranks: int, alpha: int, beta: int) -> int:
    return max(0, (gap - alpha) * beta * ranks // (2 * (ranks - 1) * ELEMENT))


def _whole_bytes_once(gap: int, ranks: int, alpha: int, beta: int) -> int:
    return max(0, (gap - 2 * (ranks - 1) * alpha) * beta // ELEMENT)


def _bytes(gap: int, ranks: int, alpha: int, beta: int) -> int:
    return max(0, (gap - 2 * (ranks - 1) * alpha) * beta * ranks // (2 * (ranks - 1)))


def _negative(gap: int, ranks: int, alpha: int, beta: int) -> int:
    turns = 2 * (ranks - 1)
    return (gap - turns * alpha) * beta * ranks // (turns * ELEMENT)


def _half_ring(gap: int, ranks: int, alpha: int, beta: int) -> int:
    turns = ranks - 1
    return max(0, (gap - turns * alpha) * beta * ranks // (turns * ELEMENT))


def _two_ranks(gap: int, ranks: int, alpha: int, beta: int) -> int:
    return _fits(gap, 2, alpha, beta)


def _upwards(gap: int, ranks: int, alpha: int, beta: int) -> int:
    turns = 2 * (ranks - 1)
    return max(0, -(-(gap - turns * alpha) * beta * ranks // (turns * ELEMENT)))


PIECE = Function(
    id="11-2",
    title="the piece that fits",
    names=("elements_that_fit",),
    hints=(
        "What is left of the gap when all messages have paid their latency?",
        "left = gap - 2(n-1) alpha. In that time left * beta bytes leave the rank, and they are "
        "2(n-1)/n of the piece.",
        "bytes = left * beta * n / (2(n-1)); a float32 has 4 of them. Round down with //, and "
        "return max(0, ...).",
    ),
    wrong=(
        Wrong(_no_latency, "The latency of 2(n-1) messages is missing."),
        Wrong(_one_alpha, "Each of the 2(n-1) messages pays alpha, not only the first."),
        Wrong(_whole_bytes_once, "A rank sends 2(n-1)/n of the piece, and not just the piece."),
        Wrong(_bytes, "These are bytes; a float32 element has 4."),
        Wrong(_negative, "Where the latency alone is longer than the gap nothing fits: 0."),
        Wrong(_half_ring, "This is half a ring: a reduce-scatter. An all-reduce has 2(n-1) turns."),
        Wrong(_two_ranks, "The number of ranks is not used."),
        Wrong(_upwards, "Rounded up, it is one element too many."),
        Wrong(lambda gap, ranks, alpha, beta: None, words="a whole number of elements is wanted"),
        Wrong(
            lambda gap, ranks, alpha, beta: (gap - 2 * (ranks - 1) * alpha) * beta / 8.3,
            words="a whole number of elements is wanted",
        ),
    ),
    right=(_by_trying, lambda gap, ranks, alpha, beta: float(_fits(gap, ranks, alpha, beta))),
    stub=lambda gap, ranks, alpha, beta: None,
    reference=_fits,
    normal=_whole,
    drawn=(
        Case("two ranks", lambda rng: _drawn(rng, [2], short=0)),
        Case("more ranks", lambda rng: _drawn(rng, [4, 8, 16], short=0)),
        Case("gaps too short among them", lambda rng: _drawn(rng, [2, 4, 8], short=2)),
    ),
)
