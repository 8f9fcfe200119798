"""The schedules that have a name, written out as rows.

p is the number of ranks, m of micro-batches; with ``chunks`` > 1 each rank holds several stages
(looped placement).
"""

from __future__ import annotations

from collections.abc import Callable

from course_lib.schedule.data import Action, Schedule, as_rows, check_sizes, looped


def naive(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """One micro-batch at a time goes all the way forward and back: one rank works, p-1 wait.

    ``m p (F + B)`` in all (one chunk): what cutting a model over ranks gives without a pipeline.
    """
    check_sizes(ranks=ranks, microbatches=microbatches, chunks=chunks)
    rows: list[list[Action]] = []
    for rank in range(ranks):
        mine = range(rank, ranks * chunks, ranks)
        row: list[Action] = []
        for mb in range(microbatches):
            row += [Action("F", stage, mb) for stage in mine]
            row += [Action("B", stage, mb) for stage in reversed(mine)]
        rows.append(row)
    return Schedule("naive", as_rows(rows), looped(ranks, chunks))


def gpipe(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """All forwards, then all backwards. Bubble (p-1)/(m+p-1) of total; m in flight.

    Backwards take the micro-batches in the order of the forwards, as torch's does. With several
    chunks every chunk passes all micro-batches before the next one starts (breadth first).
    Source: Huang et al. 2018, arXiv:1811.06965.
    """
    check_sizes(ranks=ranks, microbatches=microbatches, chunks=chunks)
    rows = []
    for rank in range(ranks):
        mine = range(rank, ranks * chunks, ranks)
        forwards = [Action("F", stage, mb) for stage in mine for mb in range(microbatches)]
        backwards = [
            Action("B", stage, mb) for stage in reversed(mine) for mb in range(microbatches)
        ]
        rows.append(forwards + backwards)
    return Schedule("gpipe", as_rows(rows), looped(ranks, chunks))


def one_f_one_b(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Rank r warms up with p-1-r forwards, then alternates one forward and one backward.

    The same bubble as GPipe, but rank r keeps at most p-r micro-batches in flight instead of m.
    Source: Narayanan et al. 2019 (PipeDream, arXiv:1806.03377) and 2021 (arXiv:2104.04473, with
    the flush at the end that is meant here).
    """
    check_sizes(ranks=ranks, microbatches=microbatches, chunks=chunks)
    if chunks > 1:
        raise ValueError(
            f"1f1b has one chunk a rank, got chunks={chunks}; several chunks make it another "
            "schedule (interleaved)"
        )
    rows = []
    for rank in range(ranks):
        warm_up = min(ranks - 1 - rank, microbatches)
        row = [Action("F", rank, mb) for mb in range(warm_up)]
        for mb in range(microbatches - warm_up):
            row += [Action("F", rank, warm_up + mb), Action("B", rank, mb)]
        row += [Action("B", rank, mb) for mb in range(microbatches - warm_up, microbatches)]
        rows.append(row)
    return Schedule("1f1b", as_rows(rows), looped(ranks))


SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
}


def make(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule called ``name``. Raises ValueError that lists the names there are."""
    if name not in SCHEDULES:
        raise ValueError(f"no schedule is called {name!r}; there are {', '.join(SCHEDULES)}")
    return SCHEDULES[name](ranks, microbatches, chunks)


def predicted_bubble(name: str, ranks: int, microbatches: int) -> float:
    """The textbook share of total time in which a rank waits; chunks 1, equal stages, no comm.

    naive (p-1)/p; GPipe and 1F1B (p-1)/(m+p-1).
    """
    check_sizes(ranks=ranks, microbatches=microbatches)
    if name == "naive":
        return (ranks - 1) / ranks
    if name in ("gpipe", "1f1b"):
        return (ranks - 1) / (microbatches + ranks - 1)
    raise ValueError(f"there is no textbook formula for {name!r} here")
