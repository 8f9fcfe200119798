"""07-2: how many micro-batches bring the bubble under a limit."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import count
from typing import Any

from course_lib.grading.answers import NotRight, shown
from course_lib.grading.exercise import Case, Function, Instance, Wrong
from course_lib.schedule import predicted_bubble


def _enough(p: int, percent: int) -> int:
    return next(m for m in count(1) if predicted_bubble("gpipe", p, m) <= percent / 100)


def _some(ranks: tuple[int, int], limits: tuple[int, int]) -> Callable[..., list[Instance]]:
    """Draws five calls; no limit is met exactly: rounding of floats might decide there."""

    def draw(rng: random.Random) -> list[Instance]:
        found: list[Instance] = []
        while len(found) < 5:
            p, percent = rng.randint(*ranks), rng.randint(*limits)
            if (p - 1) * (100 - percent) % percent:
                found.append({"p": p, "percent": percent})
        return found

    return draw


def _met_exactly(rng: random.Random) -> list[Instance]:
    """Limits that some m meets: 25 and 50 %, which floats hold without rounding."""
    return [{"p": rng.randint(3, 64), "percent": percent} for percent in (25, 50)]


def _as_count(value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise NotRight(f"a whole number of micro-batches is wanted, not {shown(value)}")
    return int(value)


def _by_search(p: int, percent: int) -> int:
    m = 1
    while 100 * (p - 1) > percent * (m + p - 1):
        m += 1
    return m


ENOUGH = Function(
    id="07-2",
    title="micro-batches enough",
    names=("enough",),
    hints=(
        "Write down the bubble's share of total time and set it equal to the limit.",
        "(p-1)/(m+p-1) <= percent/100. Solve for m: what must m+p-1 be at least?",
        "m >= (p-1)(100-percent)/percent, and m is whole: round up, with math.ceil.",
    ),
    wrong=(
        Wrong(
            lambda p, percent: math.ceil(100 * (p - 1) / percent),
            "That is m+p-1 (or m for a share of ideal time, (p-1)/m): the share of total time is "
            "(p-1)/(m+p-1).",
        ),
        Wrong(
            lambda p, percent: math.ceil(p * (100 - percent) / percent),
            "p-1 and not p: the bubble is (p-1)/(m+p-1).",
        ),
        Wrong(
            lambda p, percent: (p - 1) * (100 - percent) // percent,
            "Rounded down: with that m the bubble is still above the limit.",
        ),
        Wrong(
            lambda p, percent: round((p - 1) * (100 - percent) / percent),
            "Rounded to the nearest: where that is down, the bubble is still above the limit.",
        ),
        Wrong(
            lambda p, percent: math.ceil((p - 1) * (1 - percent) / percent),
            "The limit is in percent: 10 means 10/100.",
        ),
        Wrong(
            lambda p, percent: math.ceil(2 * (p - 1) * (100 - percent) / percent),
            "The bubble is counted twice: waiting before the first backward and at the ends is "
            "(p-1)(F+B) in all.",
        ),
        Wrong(
            lambda p, percent: math.ceil((p - 1) * percent / (100 - percent)),
            "The limit is taken as the share in which a rank works; it is the share in which it "
            "waits.",
        ),
        Wrong(
            lambda p, percent: (p - 1) * (100 - percent) // percent + 1,
            "One too many where a bubble meets the limit: at most, not below.",
        ),
        Wrong(
            lambda p, percent: (p - 1) * (100 - percent) / percent,
            words="a whole number of micro-batches is wanted",
        ),
        Wrong(_enough, words="this is what you are asked to write"),
        Wrong(lambda p, percent: 4 * p, words=": expected "),
    ),
    right=(_by_search, lambda p, percent: math.ceil((p - 1) / (percent / 100) - (p - 1))),
    stub=lambda p, percent: None,
    reference=_enough,
    refused=("course_lib.schedule.named:predicted_bubble",),
    normal=_as_count,
    drawn=(
        Case("a few ranks", _some((3, 16), (5, 30))),
        Case("hundreds of ranks", _some((128, 512), (5, 30))),
        Case("a high limit", _some((8, 64), (31, 80))),
        Case("a limit met exactly", _met_exactly),
    ),
)
