"""Checked mode: a mismatch across ranks is a ValueError that says who called what, and where."""

from __future__ import annotations

import inspect

import pytest
import torch

from course_lib import comm
from course_lib.mesh import make_mesh


def caught(call):
    """What ``call(x, axis)`` raises on this rank, or "nothing"."""

    def on_rank():
        mesh = make_mesh()
        try:
            call(torch.ones(4, 6), mesh.dp)
        except ValueError as error:
            return str(error)
        return "nothing"

    return on_rank


def other_shape(x, axis):
    comm.all_reduce(x if axis.rank else x[:2], axis)


def same_bytes_other_shape(x, axis):
    comm.all_reduce(x if axis.rank else x.view(6, 4), axis)


def other_dtype(x, axis):
    comm.all_reduce(x if axis.rank else x.int(), axis)


def other_operation(x, axis):
    comm.all_reduce(x, axis) if axis.rank else comm.all_gather(x, axis)


def other_reduction(x, axis):
    comm.all_reduce(x, axis) if axis.rank else comm.all_reduce_max(x, axis)


def other_source(x, axis):
    comm.broadcast(x, axis, source=min(axis.rank, 1))


def other_dim(x, axis):
    comm.reduce_scatter(x[:, :4], axis, dim=min(axis.rank, 1))


def other_uneven_dtype(x, axis):
    comm.all_to_all_v(x if axis.rank else x.int(), axis, [1] * 4, [1] * 4)


MISMATCHES = [
    (other_shape, "all_reduce of float32 [2 x 6]", "all_reduce of float32 [4 x 6]"),
    (same_bytes_other_shape, "all_reduce of float32 [6 x 4]", "all_reduce of float32 [4 x 6]"),
    (other_dtype, "all_reduce of int32 [4 x 6]", "all_reduce of float32 [4 x 6]"),
    (other_operation, "all_gather (dim 0) of float32 [4 x 6]", "all_reduce of float32 [4 x 6]"),
    (other_reduction, "all_reduce (max) of float32 [4 x 6]", "all_reduce of float32 [4 x 6]"),
    (other_source, "broadcast (source 0) of", "broadcast (source 1) of"),
    (other_dim, "reduce_scatter (dim 0) of", "reduce_scatter (dim 1) of"),
    (other_uneven_dtype, "(uneven) of int32 [rows x 6]", "(uneven) of float32 [rows x 6]"),
]


@pytest.mark.parametrize(("call", "first", "others"), MISMATCHES)
def test_every_rank_learns_who_called_what_and_where(worlds, call, first, others):
    line = inspect.getsourcelines(call)[1] + 1
    messages = worlds(4).run(caught(call), checked=True)
    assert len(set(messages)) == 1, "all ranks raise, and the same"
    said = messages[0].splitlines()
    assert said[0] == "the ranks of axis dp do not agree:"
    assert said[1].startswith("  rank 0: ")
    assert first in said[1]
    assert said[1].endswith(f", test_checked.py line {line}")
    for rank in (1, 2, 3):
        assert said[1 + rank].startswith(f"  rank {rank}: ")
        assert others in said[1 + rank]
    assert "same calls in the same order" in said[-1]


def test_uneven_counts_that_do_not_fit_are_named(worlds):
    def wrong_counts(x, axis):
        sends = [1, 1, 1, 1]
        expects = [1, 1, 1, 1] if axis.rank != 2 else [1, 3, 1, 1]
        comm.all_to_all_v(x, axis, sends, expects)

    for message in worlds(4).run(caught(wrong_counts), checked=True):
        assert "rank 1 sends 1 rows to rank 2 (test_checked.py line" in message
        assert "which expects 3" in message


def test_uneven_rows_may_differ(worlds):
    def uneven():
        axis = make_mesh().dp
        counts = [[(s + r) % 3 for r in range(4)] for s in range(4)]
        x = torch.full([sum(counts[axis.rank]), 2], float(axis.rank))
        incoming = [counts[s][axis.rank] for s in range(4)]
        return comm.all_to_all_v(x, axis, counts[axis.rank], incoming).tolist()

    assert worlds(4).run(uneven, checked=True) == worlds(4).run(uneven)


def test_a_rank_without_gradient_calls_less_and_the_next_call_tells(worlds):
    """The usual cause: one rank skips a call. The calls that then meet do not agree."""

    def skipping(x, axis):
        if axis.rank != 2:
            comm.all_reduce(x, axis)
        comm.all_reduce(x[0], axis)

    for message in worlds(4).run(caught(skipping), checked=True):
        assert "rank 2: all_reduce of float32 [6]" in message
        assert "rank 3: all_reduce of float32 [4 x 6]" in message


def test_on_which_axis(worlds):
    def on_tp():
        mesh = make_mesh(tp=2)
        comm.all_reduce(torch.ones(2), mesh.dp)
        try:
            comm.all_reduce(torch.ones(1 + (mesh.rank == 3)), mesh.tp)
        except ValueError as error:
            return str(error)
        return "nothing"

    first, second, *wrong = worlds(4).run(on_tp, checked=True)
    assert first == second == "nothing"
    for message in wrong:
        assert "axis tp" in message
        assert "rank 2: all_reduce of float32 [1]" in message
        assert "rank 3: all_reduce of float32 [2]" in message


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (lambda x: x[:2], "send of float32 [2 x 6]"),
        (lambda x: x.view(6, 4), "send of float32 [6 x 4]"),
        (lambda x: x.int(), "send of int32 [4 x 6]"),
    ],
)
def test_messages_are_compared_on_both_sides(worlds, sent, said):
    def mismatched(x, axis):
        if axis.rank == 1:
            comm.send(sent(x), axis, to=3)
        if axis.rank == 3:
            comm.recv(x, axis, source=1)

    idle, sender, idle_too, receiver = worlds(4).run(caught(mismatched), checked=True)
    assert idle == idle_too == "nothing"
    assert sender == receiver
    first, second, third, _ = sender.splitlines()
    assert first == "the ranks of axis dp do not agree:"
    assert second.startswith(f"  rank 1: {said}, test_checked.py line")
    assert third.startswith("  rank 3: recv of float32 [4 x 6], test_checked.py line")


def test_messages_out_of_order_are_seen(worlds):
    def crossed(x, axis):
        if axis.rank == 0:
            handles = [comm.start_send(x, axis, to=1), comm.start_send(x[0], axis, to=1)]
        else:
            handles = [comm.start_recv(x[0], axis, 0), comm.start_recv(x, axis, 0)]
        for handle in handles:
            handle.wait()

    for message in worlds(2).run(caught(crossed), checked=True):
        assert "rank 0: send of float32 [4 x 6]" in message
        assert "rank 1: recv of float32 [6]" in message
        assert "in the order in which they were sent" in message


def test_receives_may_be_waited_for_in_any_order(worlds):
    def shuffled():
        axis = make_mesh().dp
        if axis.rank == 0:
            handles = [comm.start_send(torch.full([k + 1], k), axis, to=1) for k in range(6)]
            return [handle.wait() for handle in handles]
        handles = [
            comm.start_recv(torch.empty(k + 1, dtype=torch.int64), axis, 0) for k in range(6)
        ]
        for k in (3, 0, 5, 4, 1, 2):
            handles[k].wait()
        return [handle.wait().tolist() for handle in handles]

    assert worlds(2).run(shuffled, checked=True)[1] == [[k] * (k + 1) for k in range(6)]


def everything():
    """Each operation once; what comes back and what the ledger says."""
    mesh = make_mesh()
    axis = mesh.dp
    x = torch.arange(24, dtype=torch.float64).view(4, 6) + axis.rank
    y = x.clone().requires_grad_()
    comm.reduce_from(comm.copy_to(y, axis) * axis.rank, axis).sum().backward()
    got = [
        *(op(x, axis) for op in (comm.all_reduce, comm.all_reduce_max, comm.all_gather)),
        *(op(x, axis) for op in (comm.reduce_scatter, comm.all_to_all, comm.broadcast)),
        *(op(x, axis) for op in (comm.ring_all_reduce, comm.tree_all_reduce)),
        comm.exchange(x, axis, axis.next, axis.previous),
        *(block for _, block in comm.ring(x, axis)),
        y.grad,
    ]
    comm.barrier(axis)
    calls = [(one.op, one.payload, one.wire, one.peer) for one in mesh.ledger.records]
    return [one.tolist() for one in got], calls


@pytest.mark.parametrize("n", [1, 2, 4])
def test_equal_calls_pass_with_equal_results_and_an_equal_ledger(worlds, n):
    assert worlds(n).run(everything, checked=True) == worlds(n).run(everything)


def test_the_world_goes_on_after_a_mismatch(worlds):
    """Nothing of a refused call is left in the pipes."""

    def go_on():
        axis = make_mesh().dp
        for call in (other_shape, other_operation, other_dtype):
            with pytest.raises(ValueError, match="do not agree"):
                call(torch.ones(4, 6), axis)
        with pytest.raises(ValueError, match="do not agree"):
            comm.exchange(torch.ones(axis.rank + 1), axis, axis.next, axis.previous)
        return comm.all_reduce(torch.ones(1), axis).item()

    assert worlds(4).run(go_on, checked=True) == [4.0] * 4
