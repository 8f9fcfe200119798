"""Compare run times on a noisy machine: interleaved, in rotating order, by ratio.

On a shared machine, wall-clock times drift by tens of percent within a minute. The ratio of two
times measured within the same second is stable. Every round therefore times each contestant once,
the order rotates from round to round, and the result is the median of the rounds' ratios.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch.distributed as dist

from course_lib.mesh import Mesh

Say = Callable[[str], object]  # receives a line of progress; can be pickled, so ranks call it
Times = dict[str, list[float]]  # seconds per round, by contestant


def quiet(text: str) -> None:
    """Show nothing: what a benchmark says to where no command line shows it."""


def timed(step: Callable[[int], None], mesh: Mesh) -> Callable[[], float]:
    """Return a function that calls ``step(0)``, then ``step(1)``, ..., and returns its seconds.

    All ranks start each step together.
    """
    count = 0

    def once() -> float:
        nonlocal count
        dist.barrier()
        start = time.perf_counter()
        step(count)
        count += 1
        seconds = time.perf_counter() - start
        mesh.trace.clear()  # else every round would be slower than the one before
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
        raise ValueError(
            f"expected at least 1 round, got rounds={rounds}; take 20 for ratios within 5 %"
        )
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
    """Return the step times of the slowest rank in each round."""
    return {
        name: [max(rank[name][turn] for rank in by_rank) for turn in range(len(rounds))]
        for name, rounds in by_rank[0].items()
    }


def ratios(times: Times, peer: str) -> dict[str, float]:
    """Return the median over rounds of (contestant / peer), for all contestants except the peer."""
    return {
        name: median(one / base for one, base in zip(rounds, times[peer], strict=True))
        for name, rounds in times.items()
        if name != peer
    }
