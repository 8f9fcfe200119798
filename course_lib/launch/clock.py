"""One clock for ranks on several machines: how far each is from rank 0's, by asking it the time.

On one machine all processes read the same ``time.perf_counter``; between machines it counts from
another moment on each. Rank r asks, rank 0 answers with its time, and the quickest answer of a
few tells the offset, good to half its round trip (Cristian 1989, doi:10.1007/BF01784024).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

QUESTIONS = 10


def offset_to_rank_0(rank: int, n: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds to add to this rank's ``clock`` to get rank 0's. All ``n`` ranks call it at once."""
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
