"""Messages between two ranks of an axis, and the ring.

``to`` and ``source`` are coordinates on the axis. gloo's send returns only when the receiver has
asked for the message, so two ranks that both send first wait for ever: :func:`exchange` posts
both halves at once and cannot. A message must have the shape and dtype that the receiver expects
(``like``); torch does not check, checked mode does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.comm.checked import checks_messages
from course_lib.comm.collectives import _coordinate
from course_lib.comm.door import Call, Handle, issue
from course_lib.mesh import Axis


def send(x: Tensor, axis: Axis, to: int, *, control: bool = False) -> None:
    """Send ``x`` to coordinate ``to``. Wire bytes: S."""
    start_send(x, axis, to, control=control).wait()


def start_send(x: Tensor, axis: Axis, to: int, *, control: bool = False) -> Handle:
    """Begin :func:`send`. ``x`` must not be written before the handle's wait: it is not copied."""
    _other(to, axis, "to")
    message = x.detach().contiguous()
    call = Call("send", "isend", message, peer=to, control=control)
    peer = axis.ranks[to]
    return issue(axis, call, lambda: dist.isend(message, peer, group=axis.group), lambda: message)


def recv(like: Tensor, axis: Axis, source: int, *, control: bool = False) -> Tensor:
    """A message of the shape and dtype of ``like`` from coordinate ``source``."""
    return start_recv(like, axis, source, control=control).wait()


def start_recv(like: Tensor, axis: Axis, source: int, *, control: bool = False) -> Handle:
    """Begin :func:`recv`; the handle's wait gives the message."""
    _other(source, axis, "source")
    buffer = torch.empty_like(like, memory_format=torch.contiguous_format, requires_grad=False)
    call = Call("recv", "irecv", buffer, peer=source, control=control)
    peer = axis.ranks[source]
    return issue(axis, call, lambda: dist.irecv(buffer, peer, group=axis.group), lambda: buffer)


class Exchange:
    """Messages in flight, posted as one batch. :meth:`wait` gives what was received, in order."""

    def __init__(self, sends: list[Handle], receives: list[Handle]):
        self._sends, self._receives = sends, receives

    def wait(self) -> list[Tensor]:
        """Block until all is sent and received."""
        received = [handle.wait() for handle in self._receives]
        for handle in self._sends:
            handle.wait()
        return received


def start_exchange(
    axis: Axis, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]
) -> Exchange:
    """Post ``sends`` [(tensor, to)] and ``receives`` [(like, source)] as one batch.

    One batch (``batch_isend_irecv``) is what keeps nccl from making a communicator for each pair,
    and what makes the order of the halves on the two sides irrelevant.
    """
    out = [(x.detach().contiguous(), to) for x, to in sends]
    into = [(torch.empty_like(like).contiguous(), source) for like, source in receives]
    for _, to in out:
        _other(to, axis, "to")
    for _, source in into:
        _other(source, axis, "source")
    if checks_messages(axis):
        sent = [start_send(x, axis, to) for x, to in out]
        return Exchange(sent, [start_recv(x, axis, source) for x, source in into])
    operations = [dist.P2POp(dist.isend, x, axis.ranks[to], axis.group) for x, to in out]
    operations += [dist.P2POp(dist.irecv, x, axis.ranks[source], axis.group) for x, source in into]
    works = dist.batch_isend_irecv(operations) if operations else []
    if len(works) != len(operations):  # nccl gives one work for the whole batch
        works = works * len(operations)
    calls = [Call("send", "isend", x, peer=to) for x, to in out]
    calls += [Call("recv", "irecv", x, peer=source) for x, source in into]
    handles = [_in_flight(axis, call, work) for call, work in zip(calls, works, strict=True)]
    return Exchange(handles[: len(out)], handles[len(out) :])


def _in_flight(axis: Axis, call: Call, work: Any) -> Handle:
    return issue(axis, call, lambda: work, lambda: call.tensor)


def exchange(x: Tensor, axis: Axis, to: int, source: int, like: Tensor | None = None) -> Tensor:
    """Send ``x`` to ``to`` and receive a tensor like ``like`` (or ``x``) from ``source``."""
    if axis.size == 1:
        return x
    return start_exchange(axis, [(x, to)], [(x if like is None else like, source)]).wait()[0]


def ring(x: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor]]:
    """Yield (whose, block) for the blocks of all ranks, own first, then from ever further back.

    While the caller works on one block the next is already travelling: each of the n-1 turns sends
    the block in hand to the next rank and receives the one before it. Do not write to a block.
    Wire bytes: (n-1) S.
    """
    block = x
    for turn in range(axis.size):
        travelling = None
        if turn + 1 < axis.size:
            travelling = start_exchange(axis, [(block, axis.next)], [(block, axis.previous)])
        yield (axis.rank - turn) % axis.size, block
        if travelling is not None:
            block = travelling.wait()[0]


def _other(coordinate: int, axis: Axis, what: str) -> None:
    _coordinate(coordinate, axis, what)
    if coordinate == axis.rank:
        raise ValueError(
            f"{what}={coordinate} on axis {axis.name} is this rank itself: a message needs "
            "another rank"
        )
