"""The schedules that have a name, written out as rows.

p is the number of ranks, m of micro-batches; with ``chunks`` > 1 each rank holds several stages
(looped placement).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from course_lib.schedule.data import Action, Schedule, as_rows, check_sizes, looped, v_shape
from course_lib.schedule.simulate import Costs
from course_lib.schedule.zero_bubble import dualpipe_v, zb_h1, zb_h2, zb_v


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
        fs, bs = ([Action(op, rank, mb) for mb in range(microbatches)] for op in "FB")
        rows.append(one_and_one(fs, bs, warm_up=ranks - 1 - rank))
    return Schedule("1f1b", as_rows(rows), looped(ranks))


def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B with several stages a rank: the bubble is cut by ``chunks``, in flight there is more.

    Micro-batches go in rounds of p or a few more: a round passes all chunks before the next one
    starts. Where m is a multiple of p the order is Megatron's; otherwise the m // p rounds are as
    even as can be, the larger first, so that no round is too short to fill the ring.
    Source: Narayanan et al. 2021, arXiv:2104.04473, 2.2.
    """
    check_sizes(ranks=ranks, microbatches=microbatches, chunks=chunks)
    count = max(1, microbatches // ranks)
    least, more = divmod(microbatches, count)
    starts = [at * least + min(at, more) for at in range(count + 1)]
    rounds = [range(*ends) for ends in pairwise(starts)]
    forwards = [(chunk, mb) for mbs in rounds for chunk in range(chunks) for mb in mbs]
    backwards = [(chunk, mb) for mbs in rounds for chunk in reversed(range(chunks)) for mb in mbs]
    rows = []
    for rank in range(ranks):
        warm_up = (chunks - 1) * len(rounds[0]) + (1 + (chunks > 1)) * (ranks - 1 - rank)
        fs = [Action("F", chunk * ranks + rank, mb) for chunk, mb in forwards]
        bs = [Action("B", chunk * ranks + rank, mb) for chunk, mb in backwards]
        rows.append(one_and_one(fs, bs, warm_up))
    return Schedule("interleaved", as_rows(rows), looped(ranks, chunks))


def one_and_one(fs: list[Action], bs: list[Action], warm_up: int) -> list[Action]:
    """``warm_up`` of ``fs``, then one of each by turns, then what is left of ``bs``."""
    steady = [action for pair in zip(fs[warm_up:], bs, strict=False) for action in pair]
    return fs[:warm_up] + steady + bs[max(0, len(fs) - warm_up) :]


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "dualpipe-v": dualpipe_v,
}
CHUNKS = {"interleaved": 2, "zb-v": 2, "dualpipe-v": 2}  # unless said; 1 for the others
PLANNED = ("zb-h1", "zb-h2", "zb-v", "dualpipe-v")  # their rows depend on the costs
IN_A_V = ("zb-v", "dualpipe-v")


def make(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    costs: Costs | None = None,
) -> Schedule:
    """The schedule called ``name``; ``chunks`` left out is 2 for interleaved and the Vs, else 1.

    ``costs`` are those that a zero-bubble schedule is made for (F = I = W unless given); the
    others have the same rows at any. Raises ValueError that lists the names there are.
    """
    chunks = _chunks(name, chunks)
    if costs is None or name not in PLANNED:
        return SCHEDULES[name](ranks, microbatches, chunks)
    return SCHEDULES[name](ranks, microbatches, chunks, costs)


def placement(name: str, ranks: int, chunks: int | None = None) -> tuple[int, ...]:
    """Where the stages of the schedule called ``name`` live: the rank of each."""
    chunks = _chunks(name, chunks)
    check_sizes(ranks=ranks, chunks=chunks)
    return v_shape(ranks) if name in IN_A_V else looped(ranks, chunks)


def _chunks(name: str, chunks: int | None) -> int:
    if name not in SCHEDULES:
        raise ValueError(f"no schedule is called {name!r}; there are {', '.join(SCHEDULES)}")
    return CHUNKS.get(name, 1) if chunks is None else chunks


def predicted_bubble(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    costs: Costs | None = None,
) -> float:
    """The textbook share of total time in which a rank waits; equal stages, no communication.

    naive (p-1)/p. The others x/(1+x), x being the share of ideal time, with v chunks: gpipe, 1f1b
    and interleaved (p-1)/(mv); zb-h1 (p-1)(F+I-W) and zb-h2 (p-1)(F+I-2W), but not below 0, of
    m(F+I+W), for W no longer than F or I; zb-v 0, at F = I = W. The last two are shares of a
    rank's own time, from its first start to its last end: ranks begin one after another, and so
    the makespan holds (p-1) F more. Raises ValueError where the papers give no formula.
    """
    chunks = _chunks(name, chunks)
    check_sizes(ranks=ranks, microbatches=microbatches, chunks=chunks)
    if name == "naive":
        return (ranks - 1) / ranks
    if name in ("gpipe", "1f1b", "interleaved"):
        return (ranks - 1) / (microbatches * chunks + ranks - 1)
    f, i, w = (1.0, 1.0, 1.0) if costs is None else (costs.f, costs.i, costs.w)
    if name == "zb-v" and f == i == w:
        return 0.0
    if name not in ("zb-h1", "zb-h2"):
        raise ValueError(f"there is no textbook formula for {name!r} at these costs; simulate it")
    if w > min(f, i):
        raise ValueError(f"the formula of {name} is for W no longer than F or I; simulate it")
    wait = (ranks - 1) * max(0.0, f + i - (1 if name == "zb-h1" else 2) * w)
    return wait / (microbatches * (f + i + w) + wait)
