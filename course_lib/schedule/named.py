"""The schedules with a name, as rows.

p is the number of ranks, m of micro-batches; with ``chunks`` > 1 each rank holds several stages
(looped placement).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

from course_lib.schedule.data import Action, Schedule, as_rows, check_sizes, looped, v_shape
from course_lib.schedule.simulate import Costs
from course_lib.schedule.zero_bubble import dualpipe_v, zb_h1, zb_h2, zb_v


def naive(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Run one micro-batch at a time forward and back: one rank works, p-1 wait.

    The makespan is ``m p (F + B)`` (one chunk): a model split over ranks, without a pipeline.
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
    """Run all forwards, then all backwards. Bubble (p-1)/(m+p-1) of total; m in flight.

    Backwards take the micro-batches in the order of the forwards, as in torch. With several
    chunks, every chunk runs all micro-batches before the next one starts (breadth first).
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

    The bubble is that of GPipe, but rank r has at most p-r micro-batches in flight instead of m.
    Source: Narayanan et al. 2019 (PipeDream, arXiv:1806.03377) and 2021 (arXiv:2104.04473, with
    a flush at the end of each step, as here).
    """
    check_sizes(ranks=ranks, microbatches=microbatches, chunks=chunks)
    if chunks > 1:
        raise ValueError(
            f"1f1b has one chunk per rank, got chunks={chunks}; with several chunks choose "
            "interleaved"
        )
    rows = []
    for rank in range(ranks):
        fs, bs = ([Action(op, rank, mb) for mb in range(microbatches)] for op in "FB")
        rows.append(alternate(fs, bs, warm_up=ranks - 1 - rank))
    return Schedule("1f1b", as_rows(rows), looped(ranks))


def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B with several stages per rank: the bubble is divided by ``chunks``, more is in flight.

    Micro-batches run in rounds of p or a few more: a round passes all chunks before the next one
    starts. Where m is a multiple of p the order is Megatron's. Otherwise the m // p rounds are as
    even as possible, the larger first, so that every round has at least p micro-batches.
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
        rows.append(alternate(fs, bs, warm_up))
    return Schedule("interleaved", as_rows(rows), looped(ranks, chunks))


def alternate(fs: list[Action], bs: list[Action], warm_up: int) -> list[Action]:
    """Return ``warm_up`` of ``fs``, then one of each in turn, then the rest of ``bs``."""
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
CHUNKS = {"interleaved": 2, "zb-v": 2, "dualpipe-v": 2}  # by default; 1 for the others
PLANNED = ("zb-h1", "zb-h2", "zb-v", "dualpipe-v")  # their rows depend on the costs
V_SHAPED = ("zb-v", "dualpipe-v")


def make(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    costs: Costs | None = None,
) -> Schedule:
    """Return the schedule ``name``; ``chunks`` is by default 2 for interleaved and a V, else 1.

    A zero-bubble schedule is planned for ``costs`` (by default F = I = W); the rows of the others
    do not depend on them. Raises ValueError for an unknown name.
    """
    chunks = _chunks(name, chunks)
    if costs is None or name not in PLANNED:
        return SCHEDULES[name](ranks, microbatches, chunks)
    return SCHEDULES[name](ranks, microbatches, chunks, costs)


@lru_cache(maxsize=4096, typed=True)
def placement(name: str, ranks: int, chunks: int | None = None) -> tuple[int, ...]:
    """Return the rank of each stage of the schedule ``name``."""
    chunks = _chunks(name, chunks)
    check_sizes(ranks=ranks, chunks=chunks)
    return v_shape(ranks) if name in V_SHAPED else looped(ranks, chunks)


def _chunks(name: str, chunks: int | None) -> int:
    if name not in SCHEDULES:
        raise ValueError(f"no schedule is called {name!r}; choose from {', '.join(SCHEDULES)}")
    return CHUNKS.get(name, 1) if chunks is None else chunks


def predicted_bubble(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    costs: Costs | None = None,
) -> float:
    """Return the textbook bubble as a share of total time; equal stages, no communication.

    naive: (p-1)/p. The others: x/(1+x), where x is the share of ideal time. With v chunks x is
    (p-1)/(mv) for gpipe, 1f1b and interleaved; (p-1)(F+I-W) over m(F+I+W) for zb-h1 and
    (p-1)(F+I-2W) over the same for zb-h2, but not below 0, where W is at most F and I; and 0 for
    zb-v at F = I = W. The last two are shares of a rank's own time, from its first start to its
    last end. Ranks start one after another, so the makespan is longer by (p-1) F. Raises
    ValueError where the papers give no formula.
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
