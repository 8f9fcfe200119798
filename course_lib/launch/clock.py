"""Measure the offset between the clocks of ranks on several machines.

On one machine all processes read the same ``time.perf_counter``, but on each machine it starts
from a different moment. Rank r asks rank 0 for its time several times. The answer with the
shortest round trip gives the offset, with an error of at most half that round trip
(Cristian 1989, doi:10.1007/BF01784024).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

QUESTIONS = 10


def offset_to_rank_0(rank: int, n: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds to add to this rank's ``clock`` to get the time on rank 0.

    All ``n`` ranks must call it together.
    """
    if rank == 0:
        for asker in range(1, n):
            for _ in range(QUESTIONS):
                dist.recv(torch.empty(1, dtype=torch.float64), asker)
                dist.send(torch.tensor([clock()], dtype=torch.float64), asker)
        return 0.0
    answers = []
    for _ in range(QUESTIONS):
        asked = clock()
        dist.send(torch.zeros(1, dtype=torch.float64), 0)
        told = torch.empty(1, dtype=torch.float64)
        dist.recv(told, 0)
        heard = clock()
        answers.append((heard - asked, float(told) - (asked + heard) / 2))
    return min(answers)[1]
