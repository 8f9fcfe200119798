"""Checked mode: compare operation, shape and dtype across the ranks before a call is made.

Without it a mismatch is silent, wrong or fatal by turns: equal byte counts of another dtype are
summed as they are, unequal ones make gloo abort a rank. The comparing messages are not written
into the ledger: they belong to the mode, not to the program.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from course_lib.comm.call import Call
from course_lib.mesh import Axis

_HEADER_BYTES = 512


def call_site(cells: dict[str, str]) -> str:
    """The learner's line that led here: the nearest frame outside this library and torch."""
    inside = (str(Path(__file__).resolve().parents[1]), str(Path(torch.__file__).resolve().parent))
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name in cells:
            return f"{cells[name]} line {frame.f_lineno}"
        if not name.startswith(inside):
            return f"{Path(name).name} line {frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "an unknown line"


def compare_calls(axis: Axis, call: Call) -> None:
    """Have all ranks say what they are about to call; raise ValueError where they differ."""
    said: list[Any] = [None] * axis.size
    dist.all_gather_object(said, _describe(axis, call), group=axis.group)
    # In an uneven all_to_all the shapes differ by right: only operation and dtype must agree.
    asked = {what.split(" [")[0] if call.leaving is not None else what for what, _ in said}
    if len(asked) > 1:
        raise ValueError(_disagreement(axis, list(zip(axis.ranks, said, strict=True))))


def checks_messages(axis: Axis) -> bool:
    """Whether send and recv are compared too. On nccl they are not: an unbatched header hangs."""
    return axis.context.conditions.checked and dist.get_backend(axis.group) == "gloo"


def announced(axis: Axis, call: Call, start: Callable[[], Any]) -> Callable[[], list[Any]]:
    """``start`` of a send, with a header posted before the message."""
    text = "\n".join(_describe(axis, call)).encode()[:_HEADER_BYTES]
    header = torch.zeros(_HEADER_BYTES, dtype=torch.uint8)
    header[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    peer = axis.ranks[_peer(call)]
    return lambda: [_Sending(dist.isend(header, peer, group=axis.group), header), start()]


def compared(axis: Axis, call: Call, start: Callable[[], Any]) -> Callable[[], list[Any]]:
    """``start`` of a receive that reads the header, compares, and only then takes the message."""
    return lambda: [_Receiving(axis, call, start)]


class _Sending:
    """A header in flight; it holds the tensor, which isend does not copy."""

    def __init__(self, work: Any, header: torch.Tensor):
        self._work, self._header = work, header

    def wait(self) -> None:
        self._work.wait()


class _Receiving:
    """A receive that happens at wait(). Those of one sender are taken in the order of posting."""

    def __init__(self, axis: Axis, call: Call, start: Callable[[], Any]):
        self._axis, self._call, self._start = axis, call, start
        self._where = call_site(axis.context.cells)
        waiting = axis.context.posted_receives.setdefault((axis.name, _peer(call)), [])
        self._earlier = list(waiting)
        waiting.append(self)
        self._queue = waiting
        self._done = False

    def wait(self) -> None:
        if self._done:
            return
        for receiving in self._earlier:
            receiving.wait()
        self._done = True
        self._queue.remove(self)
        self._compare_header()
        self._start().wait()

    def _compare_header(self) -> None:
        axis, peer = self._axis, self._axis.ranks[_peer(self._call)]
        header = torch.zeros(_HEADER_BYTES, dtype=torch.uint8)
        dist.recv(header, peer, group=axis.group)
        sent, sent_from = bytes(header.tolist()).rstrip(b"\0").decode().split("\n")
        wanted = _describe(axis, self._call)[0]
        if sent.removeprefix("send") != wanted.removeprefix("recv"):
            me = axis.ranks[axis.rank]
            said = [(peer, (sent, sent_from)), (me, (wanted, self._where))]
            raise ValueError(_disagreement(axis, said))


def _peer(call: Call) -> int:
    assert call.peer is not None, "only send and recv have a peer"
    return call.peer


def _describe(axis: Axis, call: Call) -> tuple[str, str]:
    """(what must agree across ranks, where it was called)."""
    dtype = str(call.tensor.dtype).removeprefix("torch.")
    shape = "x".join(map(str, call.tensor.shape)) or "scalar"
    return f"{call.op} of {dtype} [{shape}]", call_site(axis.context.cells)


def _disagreement(axis: Axis, said: list[tuple[int, tuple[str, str]]]) -> str:
    lines = [f"  rank {rank}: {what}, {where}" for rank, (what, where) in said]
    return (
        f"the ranks of axis {axis.name} do not make the same call:\n"
        + "\n".join(lines)
        + "\nEvery rank of an axis must call the same operation, in the same order, with the same "
        "shape and dtype."
    )
