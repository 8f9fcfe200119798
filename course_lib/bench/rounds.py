"""Timing things beside each other on a noisy machine: interleaved, rotated, by ratio.

Wall-clock on a shared machine drifts by tens of percent within a minute; the ratio of two things
timed within the same second does not. So every round times each contestant once, the order
rotates from round to round, and what is reported is the median of the rounds' ratios.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch.distributed as dist

from course_lib.mesh import Mesh

Say = Callable[[str], object]  # takes what happens next; can be pickled, so ranks call it too
Times = dict[str, list[float]]  # seconds by contestant, one for each round


def quiet(text: str) -> None:
    """Show nothing: what a benchmark says to where no command line shows it."""


def timed(step: Callable[[int], None], mesh: Mesh) -> Callable[[], float]:
    """``step(0)``, ``step(1)``, ... one a call, from a common start of all ranks; its seconds."""
    count = 0

    def once() -> float:
        nonlocal count
        dist.barrier()
        start = time.perf_counter()
        step(count)
        count += 1
        seconds = time.perf_counter() - start
        mesh.trace.clear()  # or every round would be slower than the one before
        mesh.ledger.clear()
        return seconds

    return once


def interleave(
    contestants: Mapping[str, Callable[[], float]],
    rounds: int,
    warmup: int = 2,
    say: Say = quiet,
) -> Times:
    """Call every contestant (it returns its seconds) once per round, in rotating order.

    ``say`` is called with the round and the contestant before each call.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds}: at least 1 is wanted, 20 for a ratio good to 5 %")
    names = list(contestants)
    times: Times = {name: [] for name in names}
    for number in range(-warmup, rounds):
        stage = f"round {number + 1} of {rounds}" if number >= 0 else "warming up"
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            say(f"{stage}, {name}")
            seconds = contestants[name]()
            if number >= 0:
                times[name].append(seconds)
    return times


def slowest_rank(by_rank: list[Times]) -> Times:
    """The times of a step that is over when its last rank is done."""
    return {
        name: [max(rank[name][turn] for rank in by_rank) for turn in range(len(rounds))]
        for name, rounds in by_rank[0].items()
    }


def ratios(times: Times, peer: str) -> dict[str, float]:
    """Median over the rounds of (contestant / peer), for every contestant but the peer."""
    return {
        name: median(one / base for one, base in zip(rounds, times[peer], strict=True))
        for name, rounds in times.items()
        if name != peer
    }
