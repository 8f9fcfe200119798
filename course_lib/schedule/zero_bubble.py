"""Schedules with a split backward: W is deferred and fills gaps.

The stage before waits for I only, so W can fill what would be a bubble. A schedule is made in two
steps. The papers give the order of F and I (a *skeleton*). Then each W is placed into a gap
(:mod:`course_lib.schedule.fill`). The gaps depend on the costs, and so do the rows. The schedule
can then be run at any costs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from math import ceil

from course_lib.schedule.data import Action, Schedule, as_rows, check_sizes, looped, v_shape
from course_lib.schedule.fill import fastest, shortest
from course_lib.schedule.simulate import Costs, first_pass

EQUAL = Costs()
Move = tuple[str, int]  # an operation and the chunk of the rank: 0 or 1


def zb_h1(ranks: int, microbatches: int, chunks: int = 1, costs: Costs = EQUAL) -> Schedule:
    """1F1B's order of F and I, W in its gaps, p in flight: bubble (p-1)(F + I - W).

    Source: Qi et al. 2023, arXiv:2401.10241, as are zb-h2 and zb-v.
    """
    _check("zb-h1", ranks, microbatches, chunks, 1)
    return fastest("zb-h1", looped_skeletons(ranks, microbatches, costs, ranks), costs, ranks)


def zb_h2(ranks: int, microbatches: int, chunks: int = 1, costs: Costs = EQUAL) -> Schedule:
    """More forwards first, until the first I arrives: no rank waits after its start.

    Up to 2p are in flight (2p-1 at equal costs). The bubble is (p-1)(F + I - 2W) where that is not
    below 0, counted from each rank's own start: ranks start and end one after another.
    """
    _check("zb-h2", ranks, microbatches, chunks, 1)
    found = (
        fastest("zb-h2", looped_skeletons(ranks, microbatches, costs, limit), costs, limit)
        for limit in (2 * ranks - 1, 2 * ranks)
    )
    return shortest(found, costs)


def zb_v(ranks: int, microbatches: int, chunks: int = 2, costs: Costs = EQUAL) -> Schedule:
    """V-shaped placement: no bubble at equal costs with 2p half stages in flight, 1F1B's memory.

    A micro-batch ends where it started, on rank 0, which starts the backward. Every rank has an
    early stage and a late one, so all ranks store the same number of micro-batches equally long.
    """
    _check("zb-v", ranks, microbatches, chunks, 2)
    return fastest("zb-v", [v_shaped_skeleton(ranks, microbatches)], costs, 2 * ranks)


def dualpipe_v(ranks: int, microbatches: int, chunks: int = 2, costs: Costs = EQUAL) -> Schedule:
    """A V that pairs one forward with one whole backward, to overlap their messages.

    The backward is split only in warm-up and cool-down; 2p+1 half stages are in flight. Source:
    DeepSeek's DualPipeV, the half of DualPipe with one copy of the parameters (DeepSeek-V3,
    arXiv:2412.19437, 3.2.1). This needs m >= 2p; with fewer micro-batches there is no steady
    state, and all backwards are split.
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
            f"{name} has {number} per rank, got chunks={chunks}; give {wanted} or leave it out"
        )


def looped_skeletons(p: int, m: int, costs: Costs, limit: int) -> Iterator[Schedule]:
    """Yield skeletons with one stage per rank: some forwards, then one I and one F in turn.

    The number of first forwards is what fits before the first I arrives, rounded down or up, or
    that number at equal costs. It is at most ``limit``, and less than that of the rank before,
    unless that rank does all forwards first.
    """
    forward, backward = first_pass(looped(p), costs)
    fs = [costs.at(stage)[0] for stage in range(p)]
    fit = [
        min(limit, (until - since) / f) if f else limit
        for since, until, f in zip(forward, backward, fs, strict=True)
    ]
    equal = [2 * (p - 1 - rank) + 1 for rank in range(p)]
    for wanted in (equal, [int(x + 1e-9) for x in fit], [ceil(x - 1e-9) for x in fit]):
        most, rows = min(limit, m), []
        for rank, first in enumerate(wanted):
            first = max(1, min(first, most))
            rows.append(_alternate(rank, m, first))
            most = first - (first < m)
        yield Schedule("skeleton", as_rows(rows), looped(p))


def _alternate(stage: int, m: int, first: int) -> list[Action]:
    """Return ``first`` forwards, then one I and one F in turn, then the Is that are left."""
    forwards, inputs = ([Action(op, stage, mb) for mb in range(m)] for op in "FI")
    row = forwards[:first]
    for mb, action in enumerate(inputs):
        row += [action, *forwards[first + mb : first + mb + 1]]
    return row


def v_shaped_skeleton(p: int, m: int) -> Schedule:
    """Return the skeleton of ZB-V; fewer than 2p-1 micro-batches are planned as 2p-1."""
    f0, f1, i0, i1 = ("F", 0), ("F", 1), ("I", 0), ("I", 1)
    rows, most = [], max(m, 2 * p - 1)
    for rank in range(p):
        after = p - 1 - rank
        filling = [f0] * (2 * after + 1) + [f1, f0] * rank + [f1, i1] * (after + 1)
        steady = [f0, i0, f1, i1] * (most - p - after) + [i0, f1, i1] * after
        rows.append(filling + steady + [i0, i1] * rank + [i0] * (after + 1))
    return _numbered("skeleton", rows, m)


def _pairs(p: int, rank: int, m: int) -> list[Move]:
    """Return one rank's moves in DualPipe-V; W belongs to the oldest I. Plan at least 2p."""
    m, after = max(m, 2 * p), p - 1 - rank
    f0, f1, b0, b1 = ("F", 0), ("F", 1), ("B", 0), ("B", 1)
    i0, i1, w = ("I", 0), ("I", 1), ("W", 0)
    filling = [f0] * (2 * after) + [f0, f1] * (rank + 1) + [i1, w, f1] * after
    steady = [f0, b1, f1, b0] * (m - p - after) + [b1, f1, b0] * after
    half = rank + 1  # of the last backwards are whole, the others are split
    draining = ([b1, b0] * half)[:half] + ([i1, i0] * half)[half:]
    return filling + steady + draining + [w, i0] * after + [w] * half


def _numbered(name: str, moves: Sequence[Sequence[Move]], m: int) -> Schedule:
    """Number the micro-batches of the moves, in order per stage; leave out those from ``m`` on."""
    rows = []
    for rank, own in enumerate(moves):
        stages = (rank, 2 * len(moves) - 1 - rank)
        row: list[Action] = []
        deferred: deque[Action] = deque()
        count: Counter[tuple[bool, int]] = Counter()
        for op, chunk in own:
            if op == "W":
                row += [deferred.popleft()] if deferred else []
                continue
            mb = count[op == "F", chunk]  # B and I are counted together
            count[op == "F", chunk] += 1
            if mb < m:
                row.append(Action(op, stages[chunk], mb))
            if mb < m and op == "I":
                deferred.append(Action("W", stages[chunk], mb))
        rows.append(row)
    return Schedule(name, as_rows(rows), v_shape(len(rows)))
