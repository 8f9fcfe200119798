"""Messages between ranks, and the ring: order, values, no deadlock, sent = received."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ledgers import unmatched_sends

from course_lib import comm
from course_lib.mesh import Link, Links, make_mesh

FREE = Links(Link(0.0, 1e18), Link(0.0, 1e18))  # no delay, but the ends of messages are watched


def message(sender, receiver, number=0):
    return torch.tensor([sender, receiver, number], dtype=torch.float64)


def nothing_lost(results):
    return unmatched_sends(results.ledgers) == {}


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_send_and_recv_around_the_ring(worlds, n):
    def pass_on():
        axis = make_mesh().dp
        if axis.rank == 0:
            comm.send(message(0, 1), axis, to=axis.next)
            return comm.recv(message(0, 0), axis, source=axis.previous)
        got = comm.recv(message(0, 0), axis, source=axis.previous)
        comm.send(got + message(0, 0, axis.rank), axis, to=axis.next)
        return got

    results = worlds(n).run(pass_on)
    assert results[0].tolist() == [0, 1, sum(range(n))]
    assert nothing_lost(results)
    for ledger in results.ledgers:
        assert ledger.wire_bytes("dp", "send") == 24
        assert [(one.op, one.peer) for one in ledger.records if one.op == "send"] == [
            ("send", (ledger.rank + 1) % n)
        ]


def test_messages_of_one_pair_arrive_in_the_order_of_sending(worlds):
    def many():
        axis = make_mesh().dp
        if axis.rank == 0:
            for handle in [comm.start_send(message(0, 1, k), axis, to=1) for k in range(20)]:
                handle.wait()
            return None
        handles = [comm.start_recv(message(0, 0), axis, source=0) for _ in range(20)]
        return [int(handle.wait()[2]) for handle in handles[::-1]][::-1]

    assert worlds(2).run(many)[1] == list(range(20))


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("checked", [False, True])
def test_all_pairs_at_once_do_not_deadlock(worlds, n, checked):
    """Each rank posts its halves in another order."""

    def everyone_to_everyone():
        axis = make_mesh().dp
        others = [(axis.rank + step) % n for step in range(1, n)]
        sends = [(message(axis.rank, to), to) for to in others]
        receives = [(message(0, 0), source) for source in sorted(others)]
        return comm.start_exchange(axis, sends, receives).wait()

    results = worlds(n).run(everyone_to_everyone, checked=checked)
    for rank, received in enumerate(results):
        assert [got.tolist() for got in received] == [
            [sender, rank, 0] for sender in range(n) if sender != rank
        ]
    assert nothing_lost(results)
    assert all(ledger.calls(op="send") == n - 1 for ledger in results.ledgers)


@pytest.mark.parametrize("checked", [False, True])
def test_a_receive_posted_early_lets_both_send(worlds, checked):
    """Checked mode must not make a right program wait for ever."""

    def both_send():
        axis = make_mesh().dp
        other = 1 - axis.rank
        coming = comm.start_recv(message(0, 0), axis, source=other)
        comm.send(message(axis.rank, other), axis, to=other)
        return coming.wait().tolist()

    assert worlds(2).run(both_send, checked=checked) == [[1, 0, 0], [0, 1, 0]]


def test_two_who_both_send_first_wait_for_ever_and_are_reported():
    """Why exchange exists. The report says where they stand."""
    from course_lib.launch import run

    def both_send():
        axis = make_mesh().dp
        comm.send(message(0, 1), axis, to=1 - axis.rank)
        comm.recv(message(0, 0), axis, source=1 - axis.rank)

    with pytest.raises(RuntimeError, match=r"send, test_p2p.py line \d+"):
        run(both_send, n=2, timeout=1.5)


def test_a_gradient_that_nobody_made_is_said_before_it_is_sent(worlds):
    def send_no_gradient():
        axis, x = make_mesh().dp, torch.ones(2)
        with pytest.raises(
            TypeError, match=r"axis dp: expected a tensor, got None.*x is a leaf that requires_grad"
        ):
            comm.start_send(x.grad, axis, to=1 - axis.rank)
        with pytest.raises(TypeError, match="axis dp: expected a tensor, got None"):
            comm.start_exchange(axis, [(x.grad, 1 - axis.rank)], [])
        return True

    assert all(worlds(2).run(send_no_gradient))


@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    dtype=st.sampled_from([torch.float64, torch.bfloat16, torch.int64, torch.bool]),
)
def test_any_shape_and_dtype_travels_and_the_sender_keeps_his(worlds, shape, dtype):
    def to_next():
        axis = make_mesh().dp
        x = (torch.arange(64)[: torch.Size(shape).numel()] + axis.rank).reshape(shape).to(dtype)
        x = x.transpose(0, -1) if x.dim() else x
        before, version = x.clone(), x._version
        got = comm.exchange(x, axis, to=axis.next, source=axis.previous)
        return x, got, torch.equal(x, before) and x._version == version

    results = worlds(3).run(to_next)
    for rank, (_, got, pure) in enumerate(results):
        sent = results[(rank - 1) % 3][0]
        assert got.dtype == dtype
        assert torch.equal(got, sent)
        assert pure
    assert nothing_lost(results)


def test_like_gives_the_shape_of_what_comes(worlds):
    def grow():
        axis = make_mesh().dp
        like = torch.empty(axis.previous + 1, dtype=torch.float64, requires_grad=True)
        mine = torch.full([axis.rank + 1], float(axis.rank), dtype=torch.float64)
        got = comm.exchange(mine.requires_grad_(), axis, axis.next, axis.previous, like=like)
        return got, got.requires_grad

    for rank, (got, attached) in enumerate(worlds(4).run(grow)):
        before = (rank - 1) % 4
        assert got.tolist() == [before] * (before + 1)
        assert not attached


def test_one_rank_exchanges_with_itself(worlds):
    def alone():
        mesh = make_mesh()
        x = torch.arange(3.0, requires_grad=True)
        got = comm.exchange(x, mesh.dp, 0, 0)
        blocks = [(whose, block.tolist()) for whose, block in comm.ring(x, mesh.dp)]
        return got.tolist(), got.requires_grad, blocks, len(mesh.ledger.records)

    assert worlds(1).run(alone) == [([0, 1, 2], False, [(0, [0, 1, 2])], 0)]


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("checked", [False, True])
def test_ring_yields_every_block_own_first_then_further_back(worlds, n, checked):
    def walk():
        axis = make_mesh().dp
        mine = message(axis.rank, 0).requires_grad_()
        blocks = [
            (whose, block.clone(), block.requires_grad) for whose, block in comm.ring(mine, axis)
        ]
        return blocks, mine.tolist()

    results = worlds(n).run(walk, checked=checked)
    for rank, (blocks, mine) in enumerate(results):
        assert [whose for whose, *_ in blocks] == [(rank - turn) % n for turn in range(n)]
        assert all(torch.equal(block, message(whose, 0)) for whose, block, _ in blocks)
        assert not any(attached for *_, attached in blocks)
        assert mine == [rank, 0, 0]
        assert results.ledgers[rank].wire_bytes("dp") == (n - 1) * 24
    assert nothing_lost(results)


def test_the_next_block_travels_while_the_caller_holds_the_present_one(worlds):
    """In the body of turn 0 the message of the next block comes to its end, before turn 1."""

    def hold():
        mesh = make_mesh()
        axis, channels = mesh.dp, mesh.context.instruments[0].free_at
        arrival, last, seen = ("dp", "recv", axis.previous), None, []
        for _ in comm.ring(torch.ones(1000), axis):
            deadline = time.perf_counter() + (5 if len(seen) + 1 < axis.size else 0)
            while channels.get(arrival) == last and time.perf_counter() < deadline:
                time.sleep(0.001)
            seen.append(channels.get(arrival) != last)
            last = channels.get(arrival)
            comm.barrier(axis)  # nobody starts the next turn before all have looked
        return seen

    for seen in worlds(3).run(hold, links=FREE):
        assert seen == [True, True, False]


def test_an_exchange_waits_for_what_it_sends_too(worlds):
    def swapped():
        mesh = make_mesh()
        comm.exchange(message(mesh.rank, 0), mesh.dp, mesh.dp.next, mesh.dp.previous)
        return sorted(span.op for span in mesh.trace.spans)

    assert list(worlds(3).run(swapped)) == [["recv", "send"]] * 3


class Together:
    """One work for a whole batch, as nccl returns it."""

    def __init__(self, works):
        self.works = works

    def wait(self):
        while self.works:  # gloo's can be waited for once only
            self.works.pop().wait()


@pytest.mark.parametrize("one_work", [False, True])
def test_on_other_backends_than_gloo_an_exchange_is_one_batch(worlds, one_work):
    def swapped():
        axis, batches = make_mesh().dp, []
        real = dist.batch_isend_irecv

        def noted(operations):
            batches.append([(operation.op.__name__, operation.peer) for operation in operations])
            works = real(operations)
            return [Together(works)] if one_work else works

        with (
            mock.patch.object(dist, "get_backend", return_value="nccl"),
            mock.patch.object(dist, "batch_isend_irecv", noted),
        ):
            got = comm.exchange(message(axis.rank, 0), axis, axis.next, axis.previous)
            empty = comm.start_exchange(axis, [], []).wait()
        return got.tolist(), empty, batches

    results = worlds(3).run(swapped)
    for rank, (got, empty, batches) in enumerate(results):
        before, after = (rank - 1) % 3, (rank + 1) % 3
        assert (got, empty) == ([before, 0, 0], [])
        assert batches == [[("isend", after), ("irecv", before)]]
    assert nothing_lost(results)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x, axis: comm.send(x, axis, to=axis.rank), "to=1 on axis dp is this rank itself"),
        (lambda x, axis: comm.recv(x, axis, source=2), "source=2 is no coordinate of axis dp"),
        (lambda x, axis: comm.exchange(x, axis, to=0, source=-1), "source=-1 is no coordinate"),
        (lambda x, axis: comm.start_exchange(axis, [(x, 5)], []), "to=5 is no coordinate"),
    ],
)
def test_bad_peers_are_named(worlds, call, says):
    def refused():
        mesh = make_mesh()
        if mesh.rank == 1:
            try:
                call(torch.ones(1), mesh.dp)
            except ValueError as error:
                return str(error), len(mesh.ledger.records)

    message_, records = worlds(2).run(refused)[1]
    assert says in message_
    assert records == 0


def test_an_empty_batch_is_nothing(worlds):
    def empty():
        mesh = make_mesh()
        return comm.start_exchange(mesh.dp, [], []).wait(), len(mesh.ledger.records)

    assert worlds(2).run(empty) == [([], 0)] * 2
