"""Messages between two ranks of an axis, and the ring.

``to`` and ``source`` are coordinates on the axis. gloo's send returns only when the receiver has
asked for the message, so two ranks that both send first wait for ever: :func:`exchange` posts
both halves at once and cannot. A message must have the shape and dtype that the receiver expects
(``like``); torch does not check, checked mode does. Messages of one pair arrive in the order in
which they were sent. S is the message in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.comm.transfer import Call, Handle, issue
from course_lib.mesh import Axis


def send(x: Tensor, axis: Axis, to: int) -> None:
    """Send ``x`` to coordinate ``to``. Wire bytes: S."""
    start_send(x, axis, to).wait()


def start_send(x: Tensor, axis: Axis, to: int) -> Handle:
    """Begin :func:`send`. ``x`` must not be written before the handle's wait: it is not copied."""
    return issue(axis, _send(x, axis, to))


def recv(like: Tensor, axis: Axis, source: int) -> Tensor:
    """A message of the shape and dtype of ``like`` from coordinate ``source``."""
    return start_recv(like, axis, source).wait()


def start_recv(like: Tensor, axis: Axis, source: int) -> Handle:
    """Begin :func:`recv`; the handle's wait gives the message."""
    return issue(axis, _recv(like, axis, source))


def _send(x: Tensor, axis: Axis, to: int) -> Call:
    """Raise TypeError if ``x`` is no tensor, such as a gradient that was never computed."""
    peer, group = _other(to, axis, "to"), axis.group
    if not isinstance(x, Tensor):
        raise TypeError(
            f"send on axis {axis.name}: expected a tensor, got {x!r} (x.grad is None unless x is a "
            "leaf that requires_grad and a backward has reached it)"
        )
    message = x.detach().contiguous()

    def start(message: Tensor) -> Any:
        return dist.isend(message, peer, group)

    return Call("send", "send", message, start, lambda: None, peer=to)


def _recv(like: Tensor, axis: Axis, source: int) -> Call:
    peer, group = _other(source, axis, "source"), axis.group
    buffer = torch.empty_like(like, memory_format=torch.contiguous_format, requires_grad=False)

    def start(buffer: Tensor) -> Any:
        return dist.irecv(buffer, peer, group)

    return Call("recv", "recv_", buffer, start, peer=source)


class Exchange:
    """Messages in flight, posted together. :meth:`wait` gives what was received, in order.

    ``sends`` and ``receives`` are their handles, to wait for one of them alone.
    """

    def __init__(self, sends: list[Handle], receives: list[Handle]) -> None:
        self.sends, self.receives = sends, receives

    def wait(self) -> list[Tensor]:
        """Block until all is sent and received."""
        received = [handle.wait() for handle in self.receives]
        for handle in self.sends:
            handle.wait()
        return received


def start_exchange(
    axis: Axis, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
) -> Exchange:
    """Post ``sends`` [(tensor, to)] and ``receives`` [(like, source)] before any is waited for.

    So the order of the halves on the two sides does not matter. On nccl they are one batch
    (``batch_isend_irecv``), or it would make a communicator for each pair. No tensor that is sent
    may be written before the wait.
    """
    calls = [_send(x, axis, to) for x, to in sends]
    calls += [_recv(like, axis, source) for like, source in receives]
    if calls and dist.get_backend(axis.group) != "gloo":
        _start_as_batch(axis, calls)
    handles = [issue(axis, call) for call in calls]
    return Exchange(handles[: len(sends)], handles[len(sends) :])


def _start_as_batch(axis: Axis, calls: list[Call]) -> None:
    """Post all messages at once; each call then finds its work."""
    operations = []
    for call in calls:
        assert call.peer is not None, "only send and recv have a peer"
        move = dist.isend if call.op == "send" else dist.irecv
        operations.append(dist.P2POp(move, call.tensor, axis.ranks[call.peer], axis.group))
    works = dist.batch_isend_irecv(operations)
    if len(works) != len(operations):  # nccl gives one work for the whole batch
        works = works * len(operations)
    for call, work in zip(calls, works, strict=True):
        call.start = partial(_started, work)


def _started(work: Any, _: Tensor) -> Any:
    return work


def exchange(x: Tensor, axis: Axis, to: int, source: int, like: Tensor | None = None) -> Tensor:
    """Send ``x`` to ``to`` and receive a tensor like ``like`` (or ``x``) from ``source``.

    On an axis of one rank both are this rank, and the result is ``x``.
    """
    if axis.size == 1:
        return x.detach()
    return start_exchange(axis, [(x, to)], [(x if like is None else like, source)]).wait()[0]


def ring(x: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor]]:
    """Yield (source rank, block) for all ranks: this rank's own, the previous rank's, and so on.

    The next block is received while the caller computes with the current one: each of the n-1 turns
    sends the current block to the next rank and receives from the previous one. Go through to the
    end, on every rank, and do not write to a block. Wire bytes: (n-1) S.
    """
    block = x.detach()
    for turn in range(axis.size):
        in_flight = None
        if turn + 1 < axis.size:
            in_flight = start_exchange(axis, [(block, axis.next)], [(block, axis.previous)])
        yield (axis.rank - turn) % axis.size, block
        if in_flight is not None:
            block = in_flight.wait()[0]


def _other(coordinate: int, axis: Axis, what: str) -> int:
    """The global rank at ``coordinate``; ValueError if it is no other rank of the axis."""
    if (peer := axis.global_rank(coordinate, what)) == axis.ranks[axis.rank]:
        raise ValueError(
            f"{what}={coordinate} on axis {axis.name} is this rank itself: a message needs "
            "another rank"
        )
    return peer
