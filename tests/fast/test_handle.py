"""Handles and emulated links with a make-believe backend: every race can be arranged here."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import pytest
import torch

from course_lib.comm import Handle
from course_lib.comm.instruments.links import EmulatedLinks
from course_lib.comm.transfer import Call, Completed, issue
from course_lib.mesh import Axis, Link, Links, RankContext

LINKS = Links(Link(alpha=0.5, beta=100.0), Link(alpha=2.0, beta=10.0), ranks_per_node=2)
FREE = Links(Link(0.0, 1e18), Link(0.0, 1e18))


class Future:
    """Torch's future as far as it is used: callbacks run when it is completed, in any thread."""

    def __init__(self):
        self.callbacks = []

    def add_done_callback(self, callback):
        self.callbacks.append(callback)

    def complete(self):
        for callback in self.callbacks:
            callback(self)


class Work:
    """Backend work. ``wait`` counts its calls, may block on ``gate``, and may fail."""

    def __init__(self, error=None, gate=None):
        self.future, self.error, self.gate, self.waits = Future(), error, gate, 0

    def get_future(self):
        return self.future

    def wait(self):
        self.waits += 1
        if self.gate is not None:
            assert self.gate.wait(5)
        if self.error is not None:
            raise self.error


def axis(links=None, rank=0, ranks=(0, 1, 2, 3)):
    context = RankContext(rank)
    if links is not None:
        context.instruments = (EmulatedLinks(links),)
    return Axis("dp", rank, len(ranks), tuple(ranks), None, context)


def call_of(op, peer=None, work=None, **more):
    return Call(op, op, torch.ones(25), lambda _: work, peer=peer, **more)


def start(work, on, op="all_reduce", peer=None):
    return issue(on, call_of(op, peer, work, overlaps=peer is None))


def test_waiting_again_gives_the_same_and_asks_the_backend_once():
    work, on = Work(), axis()
    handle = start(work, on)
    assert handle.wait() is handle.wait()
    assert work.waits == 1
    assert len(on.trace.spans) == on.ledger.calls() == 1


def test_one_rank_is_done_at_once_and_leaves_no_mark():
    handle = Completed(5)
    assert isinstance(handle, Handle)
    assert (handle.wait(), handle.wait()) == (5, 5)


@pytest.mark.parametrize(("op", "peer", "links"), [("all_reduce", None, None), ("recv", 1, FREE)])
def test_what_went_wrong_in_the_backend_is_raised_each_time(op, peer, links):
    """With a watching thread too: an error must not end there and leave a half-filled result."""
    work, on = Work(error=RuntimeError("connection closed by peer")), axis(links)
    handle = start(work, on, op, peer)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed by peer"):
            handle.wait()
    assert work.waits == 1, "a second wait for a message of gloo would never return"
    assert on.trace.spans == []


def test_the_end_is_stamped_once_whoever_comes_first():
    """The backend's thread may be late: the wait then stamps, and the axis is not held twice."""
    on, work = axis(Links(Link(0.0, 1e4), Link(0.0, 1e4))), Work()  # 150 B on the wire: 15 ms
    handle = start(work, on)
    handle.wait()
    (links,) = on.context.instruments
    occupied_until = dict(links.free_at)
    work.future.complete()
    assert links.free_at == occupied_until


def test_without_links_too_the_end_is_stamped_once():
    on, work = axis(), Work()
    start(work, on).wait()
    free_at = dict(on.context.free_at)
    work.future.complete()
    assert on.context.free_at == free_at


def test_a_call_that_is_waited_for_at_once_has_no_callback():
    on, work = axis(), Work()
    issue(on, call_of("all_reduce", work=work)).wait()
    assert work.future.callbacks == []
    assert len(on.trace.spans) == 1


def test_the_true_end_counts_and_not_the_wait():
    on, work = axis(), Work()
    handle = start(work, on)
    work.future.complete()
    stamped = time.perf_counter()
    time.sleep(0.01)
    handle.wait()
    assert on.trace.spans[0].end <= stamped


@pytest.mark.parametrize("links", [None, FREE], ids=["plain", "links"])
def test_many_threads_may_stamp_while_the_caller_waits(links):
    on = axis(links)
    works = [Work() for _ in range(200)]
    handles = [start(work, on) for work in works]
    stampers = [
        threading.Thread(target=lambda part=part: [work.future.complete() for work in part])
        for part in (works[::2], works[1::2])
    ]
    for thread in stampers:
        thread.start()
    for handle in handles:
        handle.wait()
    for thread in stampers:
        thread.join()
    assert len(on.trace.spans) == 200
    by_start = sorted(on.trace.spans, key=lambda span: (span.start, span.end))
    assert all(a.end <= b.start for a, b in pairwise(by_start))


def test_a_handle_never_waited_for_is_in_the_ledger_and_blocks_nobody():
    on = axis(FREE)
    start(Work(gate=threading.Event()), on, "recv", peer=1)  # its watcher waits for ever
    start(Work(), on, "recv", peer=2).wait()
    assert on.ledger.calls() == 2
    assert len(on.trace.spans) == 1


def test_a_message_is_watched_so_that_its_end_is_not_that_of_the_wait():
    on, gate = axis(FREE), threading.Event()
    handle = start(Work(gate=gate), on, "recv", peer=1)
    gate.set()
    deadline = time.perf_counter() + 5
    while ("dp", "recv", 1) not in on.context.instruments[0].free_at:
        assert time.perf_counter() < deadline, "nobody watches the message"
        time.sleep(0.001)
    before_wait = time.perf_counter()
    handle.wait()
    assert on.trace.spans[0].end <= before_wait


def test_what_cannot_be_started_is_not_written_down():
    on = axis()

    def refuse():
        raise RuntimeError("unsupported dtype")

    with pytest.raises(RuntimeError, match="unsupported"):
        issue(on, Call("all_reduce", "allreduce_", torch.ones(1), lambda _: refuse()))
    assert on.ledger.calls() == 0


# --- the alpha-beta model, 100 bytes -----------------------------------------------------------

INSIDE, ACROSS = (0, 1), (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("op", "peer", "ranks", "seconds"),
    [
        ("all_reduce", None, INSIDE, 2 * 0.5 + 100 / 100),
        ("all_reduce", None, ACROSS, 6 * 2.0 + 150 / 10),
        ("reduce_scatter", None, ACROSS, 3 * 2.0 + 75 / 10),
        ("all_to_all", None, ACROSS, 3 * 2.0 + 75 / 10),
        ("all_gather", None, ACROSS, 3 * 2.0 + 300 / 10),
        ("broadcast", None, ACROSS, 2 * 2.0 + 75 / 10),
        ("recv", 1, ACROSS, 0.5 + 100 / 100),  # a pair inside a node of a group across nodes
        ("recv", 3, ACROSS, 2.0 + 100 / 10),
        ("send", 3, ACROSS, 0.0),
    ],
)
def test_link_seconds(op, peer, ranks, seconds):
    links = EmulatedLinks(LINKS)
    assert links.seconds(axis(ranks=ranks), call_of(op, peer)) == pytest.approx(seconds, rel=1e-12)


def test_uneven_all_to_all_is_as_slow_as_its_busier_direction():
    on, rows = axis(LINKS), torch.zeros(5, 5)  # 20 bytes a row
    counts = ((2, 1, 1, 1), (2, 4, 0, 4))
    call = Call("all_to_all", "alltoall_base_", rows, lambda _: Work(), counts=counts)
    assert EmulatedLinks(LINKS).seconds(on, call) == pytest.approx(3 * 2.0 + 8 * 20 / 10)


def test_links_have_two_classes_by_node():
    assert LINKS.link((0, 1)) == LINKS.link((2, 3)) == LINKS.inside
    assert LINKS.link((1, 2)) == LINKS.link((0, 1, 2, 3)) == LINKS.between


@pytest.mark.parametrize("bad", [{"alpha": -1.0, "beta": 1.0}, {"alpha": 0.0, "beta": 0.0}])
def test_impossible_links_are_refused(bad):
    with pytest.raises(ValueError, match="bytes per second"):
        Link(**bad)


def test_nodes_need_ranks():
    with pytest.raises(ValueError, match="ranks_per_node=0"):
        Links(LINKS.inside, LINKS.between, ranks_per_node=0)


def test_one_axis_carries_one_transfer_at_a_time():
    on, links = axis(ranks=INSIDE), EmulatedLinks(LINKS)
    call = call_of("all_reduce")  # 2 s each
    assert links.occupy(on, call, issued=0.0, arrived=1.0) == (0.0, 3.0)
    assert links.occupy(on, call, issued=0.5, arrived=1.5) == (3.0, 5.0)
    assert links.occupy(on, call, issued=9.0, arrived=9.0) == (9.0, 11.0)


def test_messages_of_different_peers_and_directions_pass_each_other():
    on, links = axis(), EmulatedLinks(LINKS)
    ways = [("recv", 1), ("recv", 2), ("send", 1)]
    ends = [links.occupy(on, call_of(op, peer), 0.0, 1.0)[1] for op, peer in ways]
    assert ends == pytest.approx([1 + 0.5 + 1, 1 + 2 + 10, 1.0])


def test_without_links_a_transfer_begins_when_the_axis_is_free_and_ends_when_torch_says_so():
    on, first, second, message = axis(), Work(), Work(), Work()
    handles = [start(first, on), start(second, on), start(message, on, "recv", peer=1)]
    before = time.perf_counter()
    first.future.complete()
    between = time.perf_counter()
    second.future.complete()
    for handle in reversed(handles):
        handle.wait()
    received, two, one = on.trace.spans
    assert one.start < before <= one.end <= between <= two.end
    assert two.start == one.end
    assert received.start < before, "a message does not wait for a collective"


def test_an_emulated_link_keeps_the_order_of_issue():
    """The backend finishes the second call first: it stands in line behind the first."""
    on, first, second = axis(Links(Link(0.001, 1e9), Link(0.001, 1e9))), Work(), Work()
    handles = [start(first, on), start(second, on)]
    second.future.complete()
    assert on.context.instruments[0].free_at == {}
    first.future.complete()
    for handle in reversed(handles):
        handle.wait()
    one, two = sorted(on.trace.spans, key=lambda span: span.start)
    assert two.start >= one.end
    assert on.trace.spans[0] is two, "the second was waited for first, and ended second"
