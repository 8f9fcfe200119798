"""Groups used or made in different orders: named in checked mode, and no legal program accused."""

from __future__ import annotations

import inspect
import os
import shutil
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from course_lib import comm
from course_lib.comm.instruments import watch
from course_lib.comm.instruments.watch import (
    MAKING,
    DeadlockError,
    Position,
    follow,
    stuck,
    verdict,
)
from course_lib.launch import World
from course_lib.launch.faults import RankDeadline, RankError
from course_lib.layout import make_layout
from course_lib.mesh import Axis, across_axis, make_mesh, rank_context, sub_axis

SQUARE = {"tp": 2, "dp": 2}
CUBE = {"tp": 2, "cp": 2, "pp": 2}


def failed(world, fn, *args) -> RankError:
    with pytest.raises(RankError) as caught:
        world.run(fn, *args, checked=True, timeout=30)
    return caught.value


def line_of(fn, text: str) -> str:
    lines, first = inspect.getsourcelines(fn)
    (offset,) = (at for at, line in enumerate(lines) if text in line)
    return f"test_group_order.py line {first + offset}"


# --- positions on paper -------------------------------------------------------------------------


def at(needs, made):
    return Position(f"call on {needs}", "cell 1 line 1", needs, made)


RETURNED = Position("", "", {}, {"g": 1})


def test_two_that_wait_for_each_other_are_stuck_and_who_waits_for_them_too():
    positions = {
        0: at({1: ("g", 1)}, {"g": 1}),
        1: at({0: ("h", 1)}, {"h": 1}),
        2: at({0: ("h", 1), 3: ("h", 1)}, {"h": 1}),
        3: None,
    }
    assert stuck(positions) == {0, 1, 2}
    said = {rank: verdict(rank, positions) for rank in stuck(positions)}
    assert len(set(said.values())) == 1, "rank 2 names the ring, to which it does not belong"
    assert said[2].startswith("ranks 0 and 1 wait for each other for ever:")


def test_a_rank_of_which_nothing_is_known_may_be_on_its_way():
    assert stuck({0: at({1: ("g", 1), 2: ("g", 1)}, {"g": 1}), 1: None, 2: None}) == set()


def test_who_has_made_the_call_is_not_waited_for():
    """Both said where they stand before they heard that the other had come."""
    positions = {0: at({1: ("g", 1)}, {"g": 1}), 1: at({0: ("g", 1)}, {"g": 1})}
    assert stuck(positions) == set()


def test_returned_ranks_count_by_the_calls_that_they_made():
    waits = at({1: ("g", 1)}, {"g": 1})
    assert stuck({0: waits, 1: RETURNED}) == {1}
    waits = at({1: ("g", 2)}, {"g": 2})
    assert stuck({0: waits, 1: RETURNED}) == {0, 1}
    assert "rank 1 has returned" in verdict(0, {0: waits, 1: RETURNED})
    assert "rank 1 made 1 of the 2 calls" in verdict(0, {0: waits, 1: RETURNED})


def test_a_rank_needs_all_that_it_waits_for():
    """One stuck member is enough, though the other is still free."""
    positions = {
        0: at({1: ("g", 1), 2: ("g", 1)}, {"g": 1}),
        1: None,
        2: at({3: ("h", 1)}, {"h": 1}),
        3: at({2: ("k", 1)}, {"k": 1}),
    }
    assert stuck(positions) == {0, 2, 3}
    positions[3] = None
    assert stuck(positions) == set()


def test_positions_are_followed_from_rank_to_rank_and_each_read_once():
    known = {0: at({1: ("g", 1)}, {}), 1: at({2: ("h", 1)}, {}), 2: at({0: ("k", 1)}, {}), 3: None}
    read = []
    assert set(follow(0, lambda rank: read.append(rank) or known[rank])) == {0, 1, 2}
    assert sorted(read) == [0, 1, 2]


def making(number, made, where="cell 1 line 1"):
    needs = dict.fromkeys(range(4), (MAKING, number))
    return Position("axis pair of groups [[0, 1]]", where, needs, {MAKING: number, **made})


def test_groups_that_some_ranks_do_not_make_are_told_rank_by_rank():
    positions = {0: making(2, {}), 1: RETURNED, 2: at({0: ("g", 1)}, {}), 3: None}
    assert stuck(positions) == {0, 1, 2}
    assert verdict(0, positions) == verdict(2, positions)
    assert verdict(0, positions).splitlines()[:5] == [
        "not every rank makes axis pair of groups [[0, 1]]:",
        "  rank 0 makes axis pair of groups [[0, 1]], cell 1 line 1",
        "  rank 1 never does: it has returned",
        "  rank 2 does not: it waits for rank 0 in call on {0: ('g', 1)}, cell 1 line 1",
        "  rank 3 has not come to it yet",
    ]


def test_groups_that_all_are_about_to_make_accuse_nobody():
    assert stuck({0: making(1, {}), 1: making(1, {}), 2: None, 3: None}) == set()
    assert stuck({rank: making(1, {}) for rank in range(4)}) == set()


# --- opposite orders on ranks -------------------------------------------------------------------


def opposite_on_two_ranks():
    dp = make_mesh().dp
    tp = sub_axis(dp, 2, "tp")
    x = torch.ones(4)
    comm.all_reduce(x, dp)
    if dp.rank == 0:
        comm.all_reduce(x, tp)  # rank 0
        comm.all_reduce(x, dp)
    else:
        comm.all_reduce(x, dp)  # rank 1
        comm.all_reduce(x, tp)


def test_opposite_orders_are_named_with_ranks_axes_calls_and_lines(worlds):
    error = failed(worlds(2), opposite_on_two_ranks)
    assert isinstance(error.exception, DeadlockError)
    first, zero, one, advice = str(error.exception).splitlines()
    assert first == "ranks 0 and 1 wait for each other for ever:"
    assert zero == (
        "  rank 0 waits for rank 1 in call 1 on axis tp (ranks 0 1): all_reduce of float32 [4], "
        + line_of(opposite_on_two_ranks, "# rank 0")
    )
    assert one == (
        "  rank 1 waits for rank 0 in call 2 on axis dp (ranks 0 1): all_reduce of float32 [4], "
        + line_of(opposite_on_two_ranks, "# rank 1")
    )
    assert "one order on every rank" in advice
    assert "rank 1 failed in the same way" in error.standing[1]


def ring_of_four():
    """No two groups of a mesh share two ranks: it takes four ranks to close the ring."""
    mesh = make_mesh(tp=2)
    axes = (mesh.tp, mesh.dp) if mesh.rank in (0, 3) else (mesh.dp, mesh.tp)
    for axis in axes:
        comm.all_reduce(torch.ones(4), axis)


def test_a_ring_through_four_groups_is_found_and_every_rank_is_told_the_same(worlds):
    error = failed(worlds(4), ring_of_four)
    said = str(error.exception).splitlines()
    assert said[0] == "ranks 0, 1, 2 and 3 wait for each other for ever:"
    assert [line.split(" in ")[0].strip() for line in said[1:5]] == [
        "rank 0 waits for rank 1",
        "rank 1 waits for rank 3",
        "rank 3 waits for rank 2",
        "rank 2 waits for rank 0",
    ]
    assert all("failed in the same way" in error.standing[rank] for rank in (1, 2, 3))


def started_only():
    """gloo would carry these side by side; on nccl they wait for each other."""
    dp = make_mesh().dp
    tp = sub_axis(dp, 2, "tp")
    x = torch.ones(4)
    axes = (tp, dp) if dp.rank else (dp, tp)
    return [handle.wait().sum().item() for handle in [comm.start_all_reduce(x, a) for a in axes]]


def test_the_order_of_starting_counts(worlds):
    assert worlds(2).run(started_only) == [[8.0, 8.0]] * 2
    assert "wait for each other for ever" in str(failed(worlds(2), started_only).exception)


def message_against_collective():
    dp = make_mesh().dp
    x = torch.ones(4)
    if dp.rank == 0:
        comm.recv(x, dp, source=1)
        comm.all_reduce(x, dp)
    else:
        comm.all_reduce(x, dp)
        comm.send(x, dp, to=0)


def test_messages_are_followed_too(worlds):
    said = str(failed(worlds(2), message_against_collective).exception)
    assert "rank 0 waits for rank 1 in message 1 from rank 1 on axis dp: recv of" in said
    assert "rank 1 waits for rank 0 in call 1 on axis dp (ranks 0 1): all_reduce" in said


def both_send_first():
    dp = make_mesh().dp
    comm.send(torch.ones(4), dp, to=dp.next)
    comm.recv(torch.ones(4), dp, source=dp.previous)


def test_two_that_both_send_first(worlds):
    said = str(failed(worlds(2), both_send_first).exception)
    assert "rank 0 waits for rank 1 in message 1 to rank 1 on axis dp: send" in said
    assert "rank 1 waits for rank 0 in message 1 to rank 0 on axis dp: send" in said


def member_that_never_calls():
    mesh = make_mesh(tp=2)
    comm.all_reduce(torch.ones(1), mesh.dp)
    if mesh.rank != 3:
        comm.all_reduce(torch.ones(1), mesh.dp)


def test_a_member_that_has_returned_is_missed_by_name(worlds):
    error = failed(worlds(4), member_that_never_calls)
    assert error.rank == 1
    said = str(error.exception)
    assert said.startswith("rank 3 has returned and never makes a call for which rank 1 waits:")
    assert "rank 1 waits for rank 3 in call 2 on axis dp (ranks 1 3): all_reduce" in said
    assert line_of(member_that_never_calls, "        comm.all_reduce") in said
    assert "rank 3 made 1 of the 2 calls there" in said
    assert error.standing[3] == "rank 3 had returned"
    assert error.standing[0] == "rank 0 had returned"


def other_axis():
    """Rank 2 mistakes one axis for another: then rank 3 waits on tp and rank 0 on dp."""
    mesh = make_mesh(tp=2)
    axis = mesh.dp if mesh.rank == 2 else mesh.tp
    comm.all_reduce(torch.ones(1), axis)


def test_a_rank_that_calls_on_another_axis(worlds):
    said = str(failed(worlds(4), other_axis).exception)
    assert said.startswith("rank 0 has returned and never makes a call for which rank 2 waits:")
    assert "rank 2 waits for rank 0 in call 1 on axis dp (ranks 0 2)" in said


# --- no false alarm -----------------------------------------------------------------------------


def late_ranks():
    """Everyone waits for longer than PATIENCE, one behind the other, and goes on."""
    watch.PATIENCE = 0.1
    mesh = make_mesh(tp=2)
    for _ in range(2):
        if mesh.rank == 0:
            time.sleep(3 * watch.PATIENCE)
        comm.all_reduce(torch.ones(1), mesh.tp)
        comm.all_reduce(torch.ones(1), mesh.dp)
        comm.exchange(torch.ones(1), mesh.world, mesh.world.next, mesh.world.previous)
    (checks,) = mesh.context.instruments
    return checks.watch.store.check([str(mesh.rank)])


def test_waiting_long_is_no_fault(worlds):
    assert any(worlds(4).run(late_ranks, checked=True)), "some rank must have said where it waits"


def test_long_names_of_many_bytes_are_cut_and_go_through(worlds):
    def long_names():
        axis = sub_axis(make_mesh().dp, 2, "軸" * 300)
        return comm.all_reduce(torch.ones([1] * 60), axis).sum().item()

    assert worlds(2).run(long_names, checked=True) == [2.0, 2.0]


def test_unchecked_runs_have_no_watch(worlds):
    def calls():
        comm.all_reduce(torch.ones(1), make_mesh().dp)
        return rank_context().instruments

    assert worlds(2).run(calls) == [(), ()]


Step = tuple[str, int, str]  # axis, which of its groups, "call", "start" or "message"


def perform(sizes, programs):
    """This rank's program, calls that are only started waited for at the end; what came of it.

    Ranks say all the time where they wait, so that every race between saying and going on is run.
    """
    watch.PATIENCE = 1e-4
    mesh, one = make_mesh(**sizes), torch.tensor([1.0])
    handles = []
    for name, _, kind in programs[mesh.rank]:
        axis = getattr(mesh, name)
        if kind == "message":
            start = comm.start_recv if axis.rank else comm.start_send
            handles.append(start(one, axis, axis.next))
        else:
            handles.append(comm.start_all_reduce(one, axis))
        if kind != "start":
            handles[-1].wait()
    values = [handle.wait() for handle in handles]
    watch.PATIENCE = 0.1  # these ranks are kept
    return [None if value is None else value.item() for value in values]


def expected(rank, sizes, programs):
    """Sums of two, and of messages 1 where they are received."""

    def of(step):
        receives = rank == members(sizes, step)[1]
        return {"message": 1.0 if receives else None}.get(step[2], 2.0)

    return [of(step) for step in programs[rank]]


def members(sizes, step):
    return make_layout(8 if len(sizes) > 2 else 4, **sizes).groups(step[0])[step[1]]


def programs_of(sizes, steps: list[Step]) -> list[list[Step]]:
    ranks = range(8 if len(sizes) > 2 else 4)
    return [[step for step in steps if rank in members(sizes, step)] for rank in ranks]


def comes_to_an_end(sizes, programs) -> bool:
    """Make calls as long as one stands first in the program of all its ranks."""
    left = [[(*step[:2], step[2] == "message") for step in program] for program in programs]
    while any(left):
        ready = [
            step
            for program in left
            for step in program[:1]
            if all(left[rank][:1] == [step] for rank in members(sizes, step))
        ]
        if not ready:
            return False
        for rank in members(sizes, ready[0]):
            left[rank].pop(0)
    return True


def steps_on(sizes, least, most):
    groups = st.integers(0, 3 if len(sizes) > 2 else 1)
    kinds = st.sampled_from(["call", "start", "message"])
    step = st.tuples(st.sampled_from(sorted(sizes)), groups, kinds)
    return st.lists(step, min_size=least, max_size=most)


@pytest.mark.parametrize(("n", "sizes"), [(4, SQUARE), (8, CUBE)], ids=["2x2", "2x2x2"])
def test_no_legal_program_is_accused(worlds, n, sizes):
    @given(steps_on(sizes, 0, 3 * n))
    def check(steps):
        programs = programs_of(sizes, steps)
        results = worlds(n).run(perform, sizes, programs, checked=True)
        assert list(results) == [expected(rank, sizes, programs) for rank in range(n)]

    check()


@pytest.mark.parametrize(("n", "sizes"), [(4, SQUARE), (8, CUBE)], ids=["2x2", "2x2x2"])
def test_shuffled_programs_are_accused_exactly_when_they_hang(n, sizes):
    seen = set()
    with World(n) as world:

        @given(steps_on(sizes, 2, 2 * n), st.randoms(use_true_random=False), st.integers(0, 2))
        def check(steps, random, shuffled):
            programs = programs_of(sizes, steps)
            for program in programs[: shuffled * n // 2]:
                random.shuffle(program)
            legal = comes_to_an_end(sizes, programs)
            seen.add(legal)
            if legal:
                world.run(perform, sizes, programs, checked=True)
            else:
                error = failed(world, perform, sizes, programs)
                assert isinstance(error.exception, DeadlockError), error.report

        check()
    assert seen == {True, False}


# --- groups made wrongly ------------------------------------------------------------------------


def made_in_opposite_orders() -> dict[str, Axis]:
    """Two groups of the same two ranks, made in the order of a set or of first use: a classic."""
    dp = make_mesh().dp
    names = ["activations", "gradients"]
    return {name: sub_axis(dp, 2, name) for name in (names if dp.rank == 0 else names[::-1])}


def wrong_sum():
    axes = made_in_opposite_orders()
    activation, gradient = torch.tensor([1.0]), torch.tensor([100.0])
    handles = [
        comm.start_all_reduce(activation, axes["activations"]),
        comm.start_all_reduce(gradient, axes["gradients"]),
    ]
    return [handle.wait().item() for handle in handles]


def hang():
    axes = made_in_opposite_orders()
    comm.all_reduce(torch.tensor([1.0]), axes["activations"])
    comm.all_reduce(torch.tensor([100.0]), axes["gradients"])


def test_groups_made_in_other_orders_give_a_wrong_sum_without_an_error(worlds):
    assert worlds(2).run(wrong_sum) == [[101.0, 101.0]] * 2, "[2, 200] would be right"


def test_or_they_hang_without_an_error_and_the_report_says_where():
    with World(2) as world, pytest.raises(RankDeadline) as caught:
        world.run(hang, timeout=2)
    for rank in (0, 1):
        where = line_of(hang, "activations")
        assert f"rank {rank} was at: all_reduce, {where}" in str(caught.value)


@pytest.mark.parametrize("fn", [wrong_sum, hang])
def test_checked_mode_names_them_before_they_are_made(worlds, fn):
    said = str(failed(worlds(2), fn).exception)
    assert said.startswith("the ranks do not make the same groups:")
    assert "rank 0: axis activations of groups [[0, 1]]" in said
    assert "rank 1: axis gradients of groups [[0, 1]]" in said
    assert "in the same order on every rank" in said


def test_other_arguments_of_make_mesh_are_named(worlds):
    def other_mesh():
        make_mesh(**({"pp": 2} if dist.get_rank() == 1 else {"tp": 2}))

    said = str(failed(worlds(4), other_mesh).exception)
    assert "rank 0: axis tp of groups [[0, 1], [2, 3]]" in said
    assert "rank 1: axis dp of groups [[0, 1], [2, 3]]" in said


def some_make(how):
    """Three ways in which only ranks 0 and 2 make an axis: the others return, or call, or both."""
    mesh = make_mesh(tp=2)
    if mesh.rank in (0, 2):
        make(mesh, how)  # 0 and 2
    if how != "return":
        comm.all_reduce(torch.ones(1), mesh.dp if how == "call" else mesh.world)  # all


def make(mesh, how):
    if how == "across":
        across_axis(mesh.world, 2, "pair")
    elif how == "mesh":
        make_mesh(tp=4)
    else:
        sub_axis(mesh.world, 2, "pair")


PAIR = "axis pair of groups [[0, 1], [2, 3]]"
ACROSS = "axis pair of groups [[0, 2], [1, 3]]"


@pytest.mark.parametrize(
    ("how", "axis", "others"),
    [
        ("return", PAIR, "never does: it has returned"),
        ("call", PAIR, "never does: it has returned"),
        ("across", ACROSS, "does not: it waits for rank 0 and 2 in call 1 on axis world (ranks"),
        ("mesh", "axis tp of groups [[0, 1, 2, 3]]", "does not: it waits for rank 0 and 2 in"),
    ],
)
def test_groups_that_only_some_ranks_make_are_named_with_who_and_where(worlds, how, axis, others):
    error = failed(worlds(4), some_make, how)
    assert isinstance(error.exception, DeadlockError)
    first, *ranks, advice = str(error.exception).splitlines()
    assert first == f"not every rank makes {axis}:"
    for rank in (0, 2):
        assert ranks[rank].startswith(f"  rank {rank} makes {axis}, test_group_order.py line ")
    for rank in (1, 3):
        assert ranks[rank].startswith(f"  rank {rank} {others}")
        assert how in ("return", "call") or ranks[rank].endswith(line_of(some_make, "# all"))
    assert advice == watch.SAME_GROUPS


def test_groups_that_some_rank_makes_late_are_made(worlds):
    """Each rank is late in its turn, and between the axes pairs of ranks call; all say at once."""

    def late():
        watch.PATIENCE = 1e-4
        mesh, sums = make_mesh(tp=2), []
        for turn in range(8):
            if mesh.rank == turn % 4:
                time.sleep(0.02)
            axis = sub_axis(mesh.world, 2, f"pair {turn}")
            sums.append(comm.all_reduce(torch.ones(1), (axis, mesh.dp, mesh.tp)[turn % 3]).item())
        watch.PATIENCE = 0.1  # these ranks are kept
        return sums

    assert worlds(4).run(late, checked=True) == [[2.0] * 8] * 4


def ended_with_its_store(directory):
    """The program makes its group of a store of its own, which is gone when it returns."""
    store = dist.FileStore(f"{directory}/store", 2)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
    total = comm.all_reduce(torch.ones(1), make_mesh().dp).item()
    dist.barrier()
    shutil.rmtree(directory, ignore_errors=True)
    return total


def test_a_store_that_is_gone_at_the_end_does_no_harm(tmp_path):
    directory = tmp_path / "ranks"
    directory.mkdir()
    with World(2, init=False, timeout=30) as world:  # the store's own patience is minutes
        assert world.run(ended_with_its_store, str(directory), checked=True) == [2.0, 2.0]


def test_groups_of_raw_torch_are_compared_by_their_first_call(worlds):
    def swapped():
        rank, context = dist.get_rank(), rank_context()
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        a, b = groups if rank == 0 else groups[::-1]
        axes = [Axis(name, rank, 2, (0, 1), g, context) for name, g in (("a", a), ("b", b))]
        with pytest.raises(ValueError, match="take it for different axes") as caught:
            comm.all_reduce(torch.ones(1), axes[rank])
        return str(caught.value)

    first, second = worlds(2).run(swapped, checked=True)
    assert first == second
    assert "rank 0: axis a, all_reduce of float32 [1]" in first
    assert "rank 1: axis b, all_reduce of float32 [1]" in first


def test_an_axis_whose_group_has_other_ranks_is_named(worlds):
    """dp made of neighbours: every sum is over the wrong ranks, and nothing is ever raised."""

    def neighbours():
        rank, context = dist.get_rank(), rank_context()
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        ranks = (rank % 2, rank % 2 + 2)
        dp = Axis("dp", rank % 2, 2, ranks, groups[rank // 2], context)
        return comm.all_reduce(torch.tensor([10.0**rank]), dp).item()

    assert worlds(4).run(neighbours) == [11.0, 11.0, 1100.0, 1100.0], "without checks: a wrong sum"
    error = failed(worlds(4), neighbours)
    assert "the group of axis dp is not that of ranks" in error.report
    assert "in it are:" in error.report
