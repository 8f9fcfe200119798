"""Checked mode: compare operation, shape and dtype across the ranks before a call is made.

Without it a mismatch is silent, wrong or fatal by turns: equal byte counts of another dtype are
summed as they are, unequal ones make gloo abort a rank. With it every rank concerned raises the
same ValueError. The comparing messages are not written into the ledger: they belong to the mode,
not to the program. While a rank waits for another to make its call, it looks whether the other ever
will (:mod:`~course_lib.comm.instruments.watch`).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.comm.instruments.watch import (
    MAKING,
    SAME_GROUPS,
    Position,
    Watch,
    call_site,
    channel,
)
from course_lib.comm.transfer import Call, Counts, Handle
from course_lib.mesh import Axis, Instrument

_HEADER_BYTES = 512  # for a collective 24 more for each rank: the counts of an uneven all_to_all
_POLL = 0.002  # seconds between looks for the groups that other ranks make
_LONGEST = 140  # bytes of each text in a header; the rest is cut
_TAGS = {"send": 1, "recv": 2}  # of the headers; the messages themselves have 0
_CALLS = (
    "Every rank of an axis must make the same calls in the same order, each with the same shape "
    "and dtype."
)
_MESSAGES = (
    "Messages arrive in the order in which they were sent; receive each with its shape and dtype."
)


class _Said(NamedTuple):
    """What a rank is about to do: ``what`` must agree across the ranks."""

    op: str
    what: str
    where: str
    counts: Counts | None = None
    axis: str = ""
    rank: int = 0


class Checks(Instrument):
    """Checked mode of one rank, in one run."""

    def __init__(self, cells: dict[str, str], run: int = 0) -> None:
        self.cells, self._run = cells, run
        self.last_message: dict[tuple[Any, str, int], CheckedMessage] = {}

    @cached_property
    def watch(self) -> Watch:
        """What this rank knows about the calls of all ranks; it needs an initialized group."""
        return Watch(self._run)

    def around(self, axis: Axis, call: Call, issue: Callable[[Call], Handle]) -> Handle:
        """Compare ``call`` across the ranks, then issue it.

        On nccl messages are not compared: an unbatched header would hang.
        """
        call.where = call.where or call_site(self.cells)
        if call.peer is None:
            self._compare_calls(axis, call)
            return issue(call)
        if dist.get_backend(axis.group) != "gloo":
            return issue(call)
        message = CheckedMessage(self, axis, call)
        return _Watched(issue(replace(call, start=lambda _: message)), message)

    def making_groups(self, name: str, groups: list[list[int]]) -> None:
        """Raise ValueError, on every rank, unless all ranks are about to make the same groups.

        DeadlockError where a rank will never make any. Unchecked, the groups of ranks that make
        theirs in different orders are joined as they come: a hang, or sums over the wrong ranks
        without an error (github.com/pytorch/pytorch/issues/25390).
        """
        said = self._said_by_all(f"axis {name} of groups {groups}")
        if len(set(said)) > 1:
            lines = [f"  rank {rank}: {one}" for rank, one in enumerate(said)]
            head = "the ranks do not make the same groups:"
            raise ValueError("\n".join([head, *lines, SAME_GROUPS]))

    def returned(self) -> None:
        """Tell the other ranks that this one makes no more calls."""
        if dist.is_initialized():
            self.watch.returned()

    def _said_by_all(self, what: str) -> list[str]:
        """What every rank is about to make, by way of the store: groups may be what is wrong."""
        watch, where, world = self.watch, call_site(self.cells), range(dist.get_world_size())
        number = watch.count(MAKING)
        keys = [f"{MAKING} {number}, rank {rank}" for rank in world]
        others = {rank: (MAKING, number) for rank in world if rank != watch.rank}
        position = Position(what, where, others, dict(watch.made))
        watch.say(position)  # at once, so that a report can tell who was here
        watch.store.set(keys[watch.rank], what)
        watch.until(partial(_all_there, watch.store, keys), lambda: position)
        return [watch.store.get(key).decode() for key in keys]

    def _compare_calls(self, axis: Axis, call: Call) -> None:
        """Have all ranks say what they are about to call; raise ValueError where they differ.

        DeadlockError where a rank will never say anything.
        """
        said = self._gather(axis, _say(axis, call))
        if [one.rank for one in said] != list(axis.ranks) or len({one.axis for one in said}) > 1:
            raise ValueError(_wrong_group(axis, said))
        if len({(one.op, one.what) for one in said}) > 1:
            raise ValueError(_disagreement(axis, dict(zip(axis.ranks, said, strict=True)), _CALLS))
        if call.counts is not None:
            _compare_counts(axis, said)

    def _gather(self, axis: Axis, mine: _Said) -> list[_Said]:
        """What every rank of the axis says; the watch looks on while this one waits."""
        header = _header(mine, _HEADER_BYTES + 24 * axis.size)
        if "gloo" not in str(dist.get_backend_config(axis.group)):
            header = header.to(axis.context.device)
        rows = header.new_empty(axis.size, len(header))
        watch, name = self.watch, channel(axis)
        number = watch.count(name)
        work: Any = dist.all_gather(list(rows), header, group=axis.group, async_op=True)
        over = threading.Event()
        work.get_future().add_done_callback(lambda _: over.set())
        others = {rank: (name, number) for rank in axis.ranks if rank != axis.ranks[axis.rank]}
        what = f"call {number} on axis {axis.name} (ranks {' '.join(map(str, axis.ranks))}): "
        what += mine.op + mine.what
        watch.until(over.wait, lambda: Position(what, mine.where, others, dict(watch.made)))
        work.wait()
        return list(map(_read, rows))


def _all_there(store: dist.Store, keys: list[str], seconds: float) -> bool:
    """Whether all keys are in the store, ``seconds`` from now at the latest."""
    end = time.monotonic() + seconds
    while not store.check(keys):
        if time.monotonic() >= end:
            return False
        time.sleep(_POLL)
    return True


def _header(said: _Said, size: int) -> Tensor:
    """Return ``said`` as ``size`` bytes."""
    text = json.dumps(said, ensure_ascii=False).encode()
    return torch.tensor(list(text.ljust(size, b"\0")), dtype=torch.uint8)


def _read(header: Tensor) -> _Said:
    return _Said(*json.loads(bytes(header.tolist()).rstrip(b"\0")))


def _wrong_group(axis: Axis, said: list[_Said]) -> str:
    lines = [f"  rank {one.rank}: axis {one.axis}, {one.op}{one.what}, {one.where}" for one in said]
    expected = " ".join(map(str, axis.ranks))
    head = f"the group of axis {axis.name} is not that of ranks {expected}; in it are:"
    if len({one.axis for one in said}) > 1:
        head = f"ranks {expected} call on the same group and take it for different axes:"
    return "\n".join([head, *lines, SAME_GROUPS])


def _compare_counts(axis: Axis, said: list[_Said]) -> None:
    """What each rank sends to each must be what that one expects."""
    for sender, one in enumerate(said):
        for receiver, other in enumerate(said):
            assert one.counts is not None
            assert other.counts is not None
            sent, expected = one.counts[0][receiver], other.counts[1][sender]
            if sent != expected:
                raise ValueError(
                    f"uneven all_to_all on axis {axis.name}: rank {axis.ranks[sender]} sends "
                    f"{sent} rows to rank {axis.ranks[receiver]} ({one.where}), which expects "
                    f"{expected} ({other.where}); exchange the counts first"
                )


class _Watched(Handle):
    """A compared message: while the program waits for it, the watch looks on."""

    def __init__(self, inner: Handle, message: CheckedMessage) -> None:
        self._inner, self._message = inner, message

    def wait(self) -> Any:
        """Wait for the message; DeadlockError if its peer will never come."""
        self._message.watched()
        return self._inner.wait()


class CheckedMessage:
    """A send or recv that first exchanges headers with its peer, and continues only if they agree.

    A thread does it, so that posting a receive early works as it does without checks. Messages of
    one sender and receiver go one after another, in the order in which they were posted.
    """

    def __init__(self, checks: Checks, axis: Axis, call: Call) -> None:
        assert call.peer is not None, "only send and recv have a peer"
        self._checks, self._axis, self._call = checks, axis, call
        self._peer = axis.ranks[call.peer]
        self._mine = _say(axis, call)
        self._error: Exception | None = None
        me = axis.ranks[axis.rank]
        ends = (me, self._peer) if call.op == "send" else (self._peer, me)
        self._other_op = "recv" if call.op == "send" else "send"
        self._number = checks.watch.count(channel(axis, call.op, *ends))
        self._needs = {self._peer: (channel(axis, self._other_op, *ends), self._number)}
        queue = (axis.group, call.op, self._peer)
        self._before: CheckedMessage | None = checks.last_message.get(queue)
        checks.last_message[queue] = self
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Block until the message is through; raise ValueError where the two sides differ."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def watched(self) -> None:
        """Block as :meth:`wait` does, with an eye on whether the peer will ever come.

        For the thread of the program alone: while it is here, this rank makes no further call.
        """
        watch = self._checks.watch
        towards = "to" if self._call.op == "send" else "from"
        what = f"message {self._number} {towards} rank {self._peer} on axis {self._axis.name}: "
        what += self._mine.op + self._mine.what

        def over(seconds: float) -> bool:
            self._thread.join(seconds)
            return not self._thread.is_alive()

        watch.until(over, lambda: Position(what, self._mine.where, self._needs, dict(watch.made)))

    def _run(self) -> None:
        if self._before is not None:
            self._before._thread.join()
            self._before = None
        try:
            theirs = self._swap_headers()
            if theirs.what != self._mine.what:
                said = {self._axis.ranks[self._axis.rank]: self._mine, self._peer: theirs}
                raise ValueError(_disagreement(self._axis, dict(sorted(said.items())), _MESSAGES))
            self._call.start(self._call.tensor).wait()
        except Exception as error:
            self._error = error

    def _swap_headers(self) -> _Said:
        mine, group = _header(self._mine, _HEADER_BYTES), self._axis.group
        theirs = torch.empty_like(mine)
        work: Any = dist.isend(mine, self._peer, group=group, tag=_TAGS[self._call.op])
        dist.recv(theirs, self._peer, group=group, tag=_TAGS[self._other_op])
        work.wait()
        return _read(theirs)


def _say(axis: Axis, call: Call) -> _Said:
    dtype = str(call.tensor.dtype).removeprefix("torch.")
    sizes = list(map(str, call.tensor.shape))
    if call.counts is not None:
        sizes[0] = "rows"  # their number may differ between ranks; compared by the counts
    how = f" ({call.how})" if call.how else ""
    what = f"{how} of {dtype} [{' x '.join(sizes) or 'scalar'}]"
    what, where, name = (
        text.encode()[:_LONGEST].decode(errors="ignore") for text in (what, call.where, axis.name)
    )
    return _Said(call.op, what, where, call.counts, name, axis.ranks[axis.rank])


def _disagreement(axis: Axis, said: dict[int, _Said], wanted: str) -> str:
    lines = [f"  rank {rank}: {one.op}{one.what}, {one.where}" for rank, one in said.items()]
    return "\n".join([f"the ranks of axis {axis.name} do not agree:", *lines, wanted])
