"""Schedules that split the backward: W waits until a rank has nothing better to do.

Only I stands between a rank and the one before it, so that W can fill what would be a bubble.
A schedule here is made in two steps: the order of F and I (a *skeleton*), which the papers give,
and then the Ws, put where its gaps are (:mod:`course_lib.schedule.fill`). Where they are depends
on the costs, and so the rows do. A made schedule may be run at any costs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from math import ceil

from course_lib.schedule.data import Action, Schedule, as_rows, check_sizes, looped, v_shape
from course_lib.schedule.fill import fastest, shortest
from course_lib.schedule.simulate import Costs, first_pass

EQUAL = Costs()
Move = tuple[str, int]  # an operation, and on which of the rank's stages: 0 or 1


def zb_h1(ranks: int, microbatches: int, chunks: int = 1, costs: Costs = EQUAL) -> Schedule:
    """The order of 1F1B, W in its gaps, p in flight: bubble (p-1)(F + I - W).

    Source: Qi et al. 2023, arXiv:2401.10241, as are zb-h2 and zb-v.
    """
    _check("zb-h1", ranks, microbatches, chunks, 1)
    return fastest("zb-h1", one_by_one(ranks, microbatches, costs, ranks), costs, ranks)


def zb_h2(ranks: int, microbatches: int, chunks: int = 1, costs: Costs = EQUAL) -> Schedule:
    """More forwards first, until the first I is there: no rank waits once it has begun.

    It takes up to 2p in flight (2p-1 at equal costs). The bubble is (p-1)(F + I - 2W) where that
    is not below 0, counted from each rank's own start: ranks begin and end one after another.
    """
    _check("zb-h2", ranks, microbatches, chunks, 1)
    found = (
        fastest("zb-h2", one_by_one(ranks, microbatches, costs, limit), costs, limit)
        for limit in (2 * ranks - 1, 2 * ranks)
    )
    return shortest(found, costs)


def zb_v(ranks: int, microbatches: int, chunks: int = 2, costs: Costs = EQUAL) -> Schedule:
    """There and back: no bubble at equal costs with 2p half stages in flight, 1F1B's memory.

    A micro-batch ends where it began, on rank 0, which begins the backward; and every rank has an
    early stage and a late one, so that all keep the same number of micro-batches for as long.
    """
    _check("zb-v", ranks, microbatches, chunks, 2)
    return fastest("zb-v", [there_and_back(ranks, microbatches)], costs, 2 * ranks)


def dualpipe_v(ranks: int, microbatches: int, chunks: int = 2, costs: Costs = EQUAL) -> Schedule:
    """A V whose steady state pairs one forward with one whole backward, to overlap their messages.

    Halves of the backward are used only where ranks begin and end; 2p+1 half stages in flight.
    Source: DeepSeek's DualPipeV, the half with one copy of the parameters of DualPipe
    (DeepSeek-V3, arXiv:2412.19437, 3.2.1). That is for m >= 2p; with fewer micro-batches ranks do
    nothing but begin and end, and so all backwards are halves.
    """
    _check("dualpipe-v", ranks, microbatches, chunks, 2)
    rows = [_pairs(ranks, rank, microbatches) for rank in range(ranks)]
    if microbatches >= 2 * ranks:
        return _numbered("dualpipe-v", rows, microbatches)
    halves = [[("I" if op == "B" else op, at) for op, at in row if op != "W"] for row in rows]
    skeleton = _numbered("skeleton", halves, microbatches)
    return fastest("dualpipe-v", [skeleton], costs, 2 * ranks + 1)


def _check(name: str, ranks: int, microbatches: int, chunks: int, wanted: int) -> None:
    check_sizes(ranks=ranks, microbatches=microbatches, chunks=chunks)
    if chunks != wanted:
        number = {1: "one chunk", 2: "two chunks"}[wanted]
        raise ValueError(
            f"{name} has {number} a rank, got chunks={chunks}; give {wanted} or leave it out"
        )


def one_by_one(p: int, m: int, costs: Costs, limit: int) -> Iterator[Schedule]:
    """Skeletons of one stage a rank: some forwards first, then one I and one F by turns.

    How many first: as many as fit before the first I arrives, rounded down or up, or as many as
    that are at equal costs; and never more than ``limit``, nor as many as the rank before.
    """
    there, back = first_pass(looped(p), costs)
    fs = [costs.at(stage)[0] for stage in range(p)]
    fit = [
        min(limit, (until - since) / f) if f else limit
        for since, until, f in zip(there, back, fs, strict=True)
    ]
    equal = [2 * (p - 1 - rank) + 1 for rank in range(p)]
    for wanted in (equal, [int(x + 1e-9) for x in fit], [ceil(x - 1e-9) for x in fit]):
        firsts = [limit + 1]
        for first in wanted:
            firsts.append(max(1, min(first, firsts[-1] - 1)))
        rows = [_alternate(rank, m, first) for rank, first in enumerate(firsts[1:])]
        yield Schedule("skeleton", as_rows(rows), looped(p))


def _alternate(stage: int, m: int, first: int) -> list[Action]:
    """``first`` forwards, then one I and one F by turns, then the Is that are left."""
    forwards, inputs = ([Action(op, stage, mb) for mb in range(m)] for op in "FI")
    row = forwards[:first]
    for mb, action in enumerate(inputs):
        row += [action, *forwards[first + mb : first + mb + 1]]
    return row


def there_and_back(p: int, m: int) -> Schedule:
    """The skeleton of ZB-V. Fewer than 2p-1 micro-batches are played as 2p-1."""
    f0, f1, i0, i1 = ("F", 0), ("F", 1), ("I", 0), ("I", 1)
    rows, most = [], max(m, 2 * p - 1)
    for rank in range(p):
        after = p - 1 - rank
        filling = [f0] * (2 * after + 1) + [f1, f0] * rank + [f1, i1] * (after + 1)
        steady = [f0, i0, f1, i1] * (most - p - after) + [i0, f1, i1] * after
        rows.append(filling + steady + [i0, i1] * rank + [i0] * (after + 1))
    return _numbered("skeleton", rows, m)


def _pairs(p: int, rank: int, m: int) -> list[Move]:
    """One rank of DualPipe-V; W is that of the oldest I. Fewer than 2p are played as 2p."""
    m, after = max(m, 2 * p), p - 1 - rank
    f0, f1, b0, b1 = ("F", 0), ("F", 1), ("B", 0), ("B", 1)
    i0, i1, w = ("I", 0), ("I", 1), ("W", 0)
    filling = [f0] * (2 * after) + [f0, f1] * (rank + 1) + [i1, w, f1] * after
    steady = [f0, b1, f1, b0] * (m - p - after) + [b1, f1, b0] * after
    half = rank + 1  # of the last backwards are whole, the others leave W for later
    draining = ([b1, b0] * half)[:half] + ([i1, i0] * half)[half:]
    return filling + steady + draining + [w, i0] * after + [w] * half


def _numbered(name: str, moves: Sequence[Sequence[Move]], m: int) -> Schedule:
    """Moves with their micro-batches, in order for each stage; those from ``m`` on are left out."""
    rows = []
    for rank, mine in enumerate(moves):
        stages = (rank, 2 * len(moves) - 1 - rank)
        row: list[Action] = []
        owed: deque[Action] = deque()
        count: Counter[tuple[bool, int]] = Counter()
        for op, chunk in mine:
            if op == "W":
                row += [owed.popleft()] if owed else []
                continue
            mb = count[op == "F", chunk]  # B and I are of one kind
            count[op == "F", chunk] += 1
            if mb < m:
                row.append(Action(op, stages[chunk], mb))
            if mb < m and op == "I":
                owed.append(Action("W", stages[chunk], mb))
        rows.append(row)
    return Schedule(name, as_rows(rows), v_shape(len(rows)))
