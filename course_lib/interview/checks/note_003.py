"""Checks of the claims on isolation: 64 = TP 8 x PP 4 x DP 2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from course_lib.formulas.moves import of_data
from course_lib.interview.checks import Numbers
from course_lib.layout import Layout, make_layout
from course_lib.schedule import Costs, make, simulate


def layout() -> Layout:
    """Return the layout of the claims."""
    return make_layout(64, "tp-pp-dp", tp=8, pp=4, dp=2)


def world() -> Numbers:
    return 64, layout().world


def coordinates() -> Numbers:
    here = layout()
    right = [
        here.coordinates(rank) == {"tp": rank % 8, "pp": rank // 8 % 4, "dp": rank // 32, "cp": 0}
        for rank in range(64)
    ]
    return 64, sum(right)


def _ranks_with(axis: str, group: Callable[[int], list[int]]) -> int:
    groups = layout().groups(axis)
    return sum(group(rank) in groups for rank in range(64))


def tp_ranks() -> Numbers:
    return 64, _ranks_with("tp", lambda rank: [rank - rank % 8 + i for i in range(8)])


def pp_ranks() -> Numbers:
    return 64, _ranks_with("pp", lambda rank: [rank + i * 8 for i in range(4)])


def dp_ranks() -> Numbers:
    return 64, _ranks_with("dp", lambda rank: [rank + i * 32 for i in range(2)])


def ranks_that_exist() -> Numbers:
    """Ranks for which all members of the note's PP group exist."""
    return 64, sum(rank + 3 * 8 < 64 for rank in range(64))


def completed(programs: Sequence[Sequence[frozenset[int]]]) -> int:
    """Count the collectives that finish if each rank runs its list in order.

    A collective is the set of its ranks; it finishes when it is the next call of all of them.
    """
    waiting = [list(program) for program in programs]
    done = 0
    while ready := {
        program[0]
        for program in waiting
        if program and all(waiting[r] and waiting[r][0] == program[0] for r in program[0])
    }:
        group = min(ready, key=sorted)
        for rank in group:
            waiting[rank].pop(0)
        done += 1
    return done


def no_mutual_blocking() -> Numbers:
    """Calls that finish of 4: 4 ranks in a square, each in a row and a column group.

    Ranks that call row before column finish; two that call in the other order block all.
    """
    rows, columns = [frozenset({0, 1}), frozenset({2, 3})], [frozenset({0, 2}), frozenset({1, 3})]

    def programs(reversed_ranks: Sequence[int]) -> list[list[frozenset[int]]]:
        found = []
        for rank in range(4):
            own = [next(group for group in two if rank in group) for two in (rows, columns)]
            found.append(own[::-1] if rank in reversed_ranks else own)
        return found

    return 4, completed(programs([])), completed(programs([1, 2]))


def dp_by_all_reduce() -> Numbers:
    """All-reduces of a step: DP, and ZeRO-1, which has a reduce-scatter and a gather."""

    def calls(stage: int) -> int:
        moves = of_data(stage, [1024], 8, itemsize=2, gradient_itemsize=4).moves
        return sum(move.op == "all_reduce" for move in moves)

    return 1, calls(0), calls(1)


def send_before_receive() -> Numbers:
    """Turns until all 3 messages arrive: 4 stages, all but the last one send first."""
    turns = 0
    blocked = {0, 1, 2}  # in send, until the next stage receives
    receiving = {3}
    while blocked:
        sender = max(blocked)
        assert sender + 1 in receiving
        blocked.remove(sender)
        receiving.add(sender)
        turns += 1
    return 1, turns


def coroutine_runs() -> Numbers:
    """Statements that run when an ``async def`` is called, and when it is awaited."""
    ran: list[int] = []

    async def communicate() -> None:
        ran.append(1)

    coroutine = communicate()
    called = len(ran)
    with suppress(StopIteration):
        coroutine.send(None)  # as an event loop does; a notebook's own loop is running already
    assert len(ran) == 1
    return 1, called


def overlap() -> Numbers:
    """1 if some P2P time is hidden behind compute: 8 micro-batches, and one. 4 stages."""

    def hidden(micro_batches: int) -> bool:
        schedule = make("gpipe", 4, micro_batches)
        times = [simulate(schedule, Costs.make(f=1, b=2, comm=comm)).makespan for comm in (0, 0.1)]
        return times[1] - times[0] < 0.1 * 2 * 3 * micro_batches * 0.999

    return 1, hidden(8), hidden(1)


def scheduler_serves_all() -> Numbers:
    """Calls over DP that run in 100 rounds of the note's if/elif, TP and DP always ready."""
    ran = {"tp": 0, "pp": 0, "dp": 0}
    ready = {"tp": True, "pp": False, "dp": True}
    for _ in range(100):
        if ready["tp"]:
            ran["tp"] += 1
        elif ready["pp"]:
            ran["pp"] += 1
        elif ready["dp"]:
            ran["dp"] += 1
    return 100, ran["dp"]


def groups_per_rank() -> Numbers:
    here = layout()
    return 3, sum(17 in group for axis in ("tp", "pp", "dp") for group in here.groups(axis))
