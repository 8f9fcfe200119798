"""Checked mode: compare operation, shape and dtype across the ranks before a call is made.

Without it a mismatch is silent, wrong or fatal by turns: equal byte counts of another dtype are
summed as they are, unequal ones make gloo abort a rank. With it every rank concerned raises the
same ValueError. The comparing messages are not written into the ledger: they belong to the mode,
not to the program.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from course_lib.comm.call import Call, Counts
from course_lib.mesh import Axis

_HEADER_BYTES = 512
_TAGS = {"send": 1, "recv": 2}  # of the headers; the messages themselves have 0
_CALLS = (
    "Every rank of an axis must make the same calls in the same order, each with the same shape "
    "and dtype."
)
_MESSAGES = (
    "Messages arrive in the order in which they were sent; receive each with its shape and dtype."
)
_LIBRARY = (str(Path(__file__).resolve().parents[1]), str(Path(torch.__file__).resolve().parent))


class _Said(NamedTuple):
    """What a rank is about to do: ``what`` must agree across the ranks."""

    op: str
    what: str
    where: str
    counts: Counts | None = None


def compare_calls(axis: Axis, call: Call) -> None:
    """Have all ranks say what they are about to call; raise ValueError where they differ."""
    said: list[Any] = [None] * axis.size
    dist.all_gather_object(said, _say(axis, call), group=axis.group)
    if len({(one.op, one.what) for one in said}) > 1:
        raise ValueError(_disagreement(axis, dict(zip(axis.ranks, said, strict=True)), _CALLS))
    if call.counts is not None:
        _compare_counts(axis, said)


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


def checks_messages(axis: Axis) -> bool:
    """Whether send and recv are compared too. On nccl they are not: an unbatched header hangs."""
    return axis.context.conditions.checked and dist.get_backend(axis.group) == "gloo"


class CheckedMessage:
    """A send or recv that first swaps headers with its peer, and goes on only if they agree.

    A thread does it, so that posting a receive early works as it does without checks. Messages of
    one sender and receiver go one after another, in the order in which they were posted.
    """

    def __init__(self, axis: Axis, call: Call, start: Callable[[], Any]) -> None:
        assert call.peer is not None, "only send and recv have a peer"
        self._axis, self._call, self._begin, self._peer = axis, call, start, axis.ranks[call.peer]
        self._mine = _say(axis, call)
        self._error: Exception | None = None
        queue = (axis.group, call.op, self._peer)
        self._before: CheckedMessage | None = axis.context.last_message.get(queue)
        axis.context.last_message[queue] = self
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Block until the message is through; raise ValueError where the two sides differ."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        if self._before is not None:
            self._before._thread.join()
            self._before = None
        try:
            self._compare()
            self._begin().wait()
        except Exception as error:
            self._error = error

    def _compare(self) -> None:
        theirs = self._swap_headers()
        if theirs.what != self._mine.what:
            said = {self._axis.ranks[self._axis.rank]: self._mine, self._peer: theirs}
            raise ValueError(_disagreement(self._axis, dict(sorted(said.items())), _MESSAGES))

    def _swap_headers(self) -> _Said:
        mine, theirs = torch.zeros(2, _HEADER_BYTES, dtype=torch.uint8)
        text = "\n".join(self._mine[:3]).encode()[:_HEADER_BYTES]
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        other_op = "recv" if self._call.op == "send" else "send"
        group = self._axis.group
        work: Any = dist.isend(mine, self._peer, group=group, tag=_TAGS[self._call.op])
        dist.recv(theirs, self._peer, group=group, tag=_TAGS[other_op])
        work.wait()
        op, what, where = bytes(theirs.tolist()).rstrip(b"\0").decode(errors="replace").split("\n")
        return _Said(op, what, where)


def _say(axis: Axis, call: Call) -> _Said:
    dtype = str(call.tensor.dtype).removeprefix("torch.")
    sizes = list(map(str, call.tensor.shape))
    if call.counts is not None:
        sizes[0] = "rows"  # their number may differ between ranks; compared by the counts
    how = f" ({call.how})" if call.how else ""
    what = f"{how} of {dtype} [{' x '.join(sizes) or 'scalar'}]"
    return _Said(call.op, what, call_site(axis.context.cells), call.counts)


def call_site(cells: dict[str, str]) -> str:
    """The learner's line that led here: the nearest frame outside this library and torch.

    ``cells`` names the files that are cells of the notebook.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name in cells:
            return f"{cells[name]} line {frame.f_lineno}"
        if not name.startswith(_LIBRARY):
            place = "a cell" if "ipykernel_" in name else Path(name).name
            return f"{place} line {frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"


def _disagreement(axis: Axis, said: dict[int, _Said], wanted: str) -> str:
    lines = [f"  rank {rank}: {one.op}{one.what}, {one.where}" for rank, one in said.items()]
    return "\n".join([f"the ranks of axis {axis.name} do not agree:", *lines, wanted])
