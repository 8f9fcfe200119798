"""Emulated links on real ranks: asserted on spans and their order, never on a stop-watch."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch

from course_lib import comm
from course_lib.comm.transfer import Call
from course_lib.mesh import Link, Links, make_mesh

INSIDE, BETWEEN = Link(alpha=0.001, beta=1e6), Link(alpha=0.005, beta=1e5)
LINKS = Links(INSIDE, BETWEEN, ranks_per_node=2)
X = torch.ones(500)  # 2,000 bytes
PAYLOAD = 2000


def spans(results, op=None, rank=None):
    traces = results.traces if rank is None else [results.traces[rank]]
    return [s for trace in traces for s in trace.spans if s.is_comm and op in (None, s.op)]


@pytest.mark.parametrize(
    ("op", "steps", "carried"),
    [
        (comm.all_reduce, 6, 1.5 * PAYLOAD),
        (comm.all_gather, 3, 3 * PAYLOAD),
        (comm.reduce_scatter, 3, 0.75 * PAYLOAD),
        (comm.all_to_all, 3, 0.75 * PAYLOAD),
        (comm.broadcast, 2, 0.75 * PAYLOAD),
    ],
)
def test_a_collective_takes_at_least_its_alpha_beta_time(worlds, op, steps, carried):
    def once():
        op(X, make_mesh().dp)
        return time.perf_counter()

    results = worlds(4).run(once, links=LINKS)
    seconds = steps * BETWEEN.alpha + carried / BETWEEN.beta
    for returned, trace in zip(results, results.traces, strict=True):
        (span,) = trace.spans
        assert span.duration >= seconds
        assert returned >= span.end, "wait came back before the transfer was over"
        assert all(sleep.took >= sleep.asked for sleep in trace.sleeps)


def test_inside_a_node_and_between_nodes(worlds):
    """Node {0, 1} and node {2, 3}: tp stays inside, dp goes between; pairs of the world by pair."""

    def classes():
        mesh = make_mesh(tp=2)
        reduce = Call("all_reduce", "allreduce_", X, lambda _: None)
        other = Call("recv", "recv_", X, lambda _: None, peer=(mesh.rank + 1) % 4)
        axes, (links,) = (mesh.tp, mesh.dp, mesh.world), mesh.context.instruments
        return [links.seconds(a, reduce) for a in axes] + [links.seconds(mesh.world, other)]

    for rank, (tp, dp, world, message) in enumerate(worlds(4).run(classes, links=LINKS)):
        assert tp == pytest.approx(2 * INSIDE.alpha + PAYLOAD / INSIDE.beta)
        assert dp == pytest.approx(2 * BETWEEN.alpha + PAYLOAD / BETWEEN.beta)
        assert world == pytest.approx(6 * BETWEEN.alpha + 1.5 * PAYLOAD / BETWEEN.beta)
        link = INSIDE if rank % 2 == 0 else BETWEEN
        assert message == pytest.approx(link.alpha + PAYLOAD / link.beta)


def test_a_transfer_passes_while_the_caller_computes(worlds):
    """Max and not sum: it is over before the compute is, and wait has nothing left to sleep."""

    def overlapped():
        mesh = make_mesh()
        handle = comm.start_all_reduce(X, mesh.dp)  # 60 ms
        with mesh.compute("B"):
            time.sleep(0.5)
        total = handle.wait()
        return total[0].item(), len(mesh.trace.sleeps)

    results = worlds(4).run(overlapped, links=LINKS)
    assert list(results) == [(4.0, 0)] * 4
    for trace in results.traces:
        compute, transfer = trace.spans
        assert transfer.start < compute.start
        assert transfer.end < compute.end


def test_wait_sleeps_only_for_what_is_left(worlds):
    def partly():
        mesh = make_mesh()
        handle = comm.start_all_reduce(X, mesh.dp)
        time.sleep(0.03)  # half of it
        handle.wait()

    results = worlds(2).run(partly, links=Links(Link(0.03, 1e12), Link(0.03, 1e12)))
    for trace in results.traces:
        (span,) = trace.spans
        assert span.duration >= 0.06
        assert sum(sleep.asked for sleep in trace.sleeps) < span.duration - 0.03


def test_one_axis_carries_one_transfer_at_a_time(worlds):
    def three_at_once():
        mesh = make_mesh()
        for handle in [comm.start_all_reduce(X, mesh.dp) for _ in range(3)]:
            handle.wait()

    seconds = 2 * BETWEEN.alpha + PAYLOAD / BETWEEN.beta
    results = worlds(2).run(three_at_once, links=Links(BETWEEN, BETWEEN))
    for rank in range(2):
        three = sorted(spans(results, rank=rank), key=lambda span: span.start)
        assert len(three) == 3
        assert all(first.end <= second.start for first, second in pairwise(three))
        assert all(span.duration >= seconds * (1 - 1e-6) for span in three)


def test_two_axes_carry_at_the_same_time(worlds):
    def both_axes():
        mesh = make_mesh(tp=2)
        handles = [comm.start_all_reduce(X, axis) for axis in (mesh.tp, mesh.dp)]
        for handle in handles:
            handle.wait()

    slow = Link(0.1, 1e12)
    for trace in worlds(4).run(both_axes, links=Links(slow, slow)).traces:
        tp, dp = (next(span for span in trace.spans if span.axis == a) for a in ("tp", "dp"))
        assert dp.start < tp.end
        assert tp.start < dp.end


def test_a_transfer_starts_when_the_last_rank_has_joined(worlds):
    def late():
        mesh = make_mesh()
        if mesh.rank == 2:
            time.sleep(0.1)
        joined = time.perf_counter()
        comm.all_reduce(X, mesh.dp)
        return joined

    results = worlds(4).run(late, links=LINKS)
    seconds = 6 * BETWEEN.alpha + 1.5 * PAYLOAD / BETWEEN.beta
    assert max(results) == results[2]
    assert all(span.end >= results[2] + seconds for span in spans(results))


def test_a_message_costs_its_receiver_and_not_its_sender(worlds):
    def hop():
        axis = make_mesh().dp
        if axis.rank == 0:
            time.sleep(0.05)
            posted = time.perf_counter()
            comm.send(X, axis, to=2)
            return posted
        if axis.rank == 2:
            comm.recv(X, axis, source=0)

    slow = Link(alpha=0.3, beta=1e6)
    results = worlds(4).run(hop, links=Links(INSIDE, slow, ranks_per_node=2))
    (sent,), (received,) = spans(results, "send"), spans(results, "recv")
    assert received.end >= results[0] + slow.alpha + PAYLOAD / slow.beta
    assert sent.end < received.end
    assert results.traces[0].sleeps == []
    assert len(results.traces[2].sleeps) == 1


def test_ring_hides_its_messages_behind_work(worlds):
    """A turn's message (25 ms) is over before the caller's work (300 ms) on the block is."""

    def walk():
        mesh = make_mesh()
        for _ in comm.ring(X, mesh.dp):
            with mesh.compute("attention"):
                time.sleep(0.3)
        return len(mesh.trace.sleeps)

    results = worlds(3).run(walk, links=Links(BETWEEN, BETWEEN))
    assert list(results) == [0, 0, 0]
    for rank, trace in enumerate(results.traces):
        work = [span for span in trace.spans if not span.is_comm]
        arrivals = spans(results, "recv", rank)
        assert len(arrivals) == 2
        assert all(
            a.start <= w.end and a.end <= w.end for a, w in zip(arrivals, work, strict=False)
        )


@pytest.mark.parametrize("checked", [False, True])
def test_values_are_those_without_links(worlds, checked):
    fast = Links(Link(1e-4, 1e9), Link(1e-4, 1e9))

    def everything():
        axis = make_mesh().dp
        x = torch.arange(8.0) + axis.rank
        got = [op(x, axis) for op in (comm.all_reduce, comm.reduce_scatter, comm.ring_all_reduce)]
        got += [block for _, block in comm.ring(x, axis)]
        return [one.tolist() for one in got]

    assert worlds(4).run(everything, links=fast, checked=checked) == worlds(4).run(everything)


def test_one_rank_has_no_link(worlds):
    def alone():
        mesh = make_mesh()
        comm.all_reduce(X, mesh.dp)
        return mesh.trace.spans, mesh.trace.sleeps

    assert worlds(1).run(alone, links=LINKS) == [([], [])]
