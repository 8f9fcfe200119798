"""Collectives as pure functions of a tensor and an axis: the caller's tensor is never written.

``start_*`` returns a :class:`~course_lib.comm.door.Handle` at once, so that the caller computes
while the bytes travel; the plain name waits. With n = 1 the input itself comes back and nothing is
recorded. n is the size of the axis, S the payload in bytes (the input); the wire bytes are those
of :func:`course_lib.ledger.wire`. ``control=True`` tags traffic that steers and carries no model
data (token counts, norms): the ledger keeps it on its own line.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.comm.door import Call, Done, Handle, issue
from course_lib.mesh import Axis

# torch 2.13 renamed two collectives; the older names still exist and warn.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(x: Tensor, axis: Axis, *, control: bool = False) -> Tensor:
    """Sum of every rank's ``x``, on every rank. Same shape. A rank sends 2(n-1)/n S."""
    return start_all_reduce(x, axis, control=control).wait()


def start_all_reduce(x: Tensor, axis: Axis, *, control: bool = False) -> Handle:
    """Begin :func:`all_reduce`; the handle's wait gives the sum."""
    if axis.size == 1:
        return Done(x)
    return _start_all_reduce(_copy(x), axis, dist.ReduceOp.SUM, control)


def all_reduce_max(x: Tensor, axis: Axis, *, control: bool = False) -> Tensor:
    """Element-wise maximum over every rank's ``x``, on every rank. Bytes as all_reduce."""
    if axis.size == 1:
        return x
    return _start_all_reduce(_copy(x), axis, dist.ReduceOp.MAX, control).wait()


def _start_all_reduce(fresh: Tensor, axis: Axis, reduction, control: bool) -> Handle:
    """All-reduce in place a tensor that nobody else holds."""
    call = Call("all_reduce", "all_reduce", fresh, control=control)
    return issue(
        axis,
        call,
        lambda: dist.all_reduce(fresh, op=reduction, group=axis.group, async_op=True),
        lambda: fresh,
    )


def all_gather(x: Tensor, axis: Axis, dim: int = 0, *, control: bool = False) -> Tensor:
    """Every rank's ``x`` joined along ``dim`` in rank order, on every rank.

    x [.., d, ..] -> [.., n*d, ..]. A rank sends (n-1) S, S being one shard.
    """
    return start_all_gather(x, axis, dim, control=control).wait()


def start_all_gather(x: Tensor, axis: Axis, dim: int = 0, *, control: bool = False) -> Handle:
    """Begin :func:`all_gather`; the handle's wait gives the joined tensor."""
    if axis.size == 1:
        return Done(x)
    shard = x.detach().contiguous()
    gathered = shard.new_empty((axis.size, *shard.shape))
    call = Call("all_gather", "all_gather_single", shard, control=control)

    def joined() -> Tensor:
        return gathered.flatten(0, 1) if dim == 0 and x.dim() else torch.cat(list(gathered), dim)

    return issue(
        axis,
        call,
        lambda: _ALL_GATHER(gathered.view(-1), shard.view(-1), group=axis.group, async_op=True),
        joined,
    )


def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """This rank's piece along ``dim`` of the sum of every rank's ``x``.

    x [.., n*d, ..] -> [.., d, ..]. A rank sends (n-1)/n S.
    """
    return start_reduce_scatter(x, axis, dim).wait()


def start_reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Handle:
    """Begin :func:`reduce_scatter`.

    gloo's own reduce-scatter is an all-reduce inside and moves twice the bytes, so on gloo the
    pieces go to their owners by all-to-all and each owner adds them in rank order; that order also
    makes the sum the same in every run.
    """
    if axis.size == 1:
        return Done(x)
    pieces = _pieces(x, axis, dim, "reduce_scatter")
    if dist.get_backend(axis.group) == "nccl":
        mine = pieces.new_empty(pieces.shape[1:])
        call = Call("reduce_scatter", "reduce_scatter_single", pieces)
        return issue(
            axis,
            call,
            lambda: _REDUCE_SCATTER(
                mine.view(-1), pieces.view(-1), group=axis.group, async_op=True
            ),
            lambda: mine,
        )
    received = torch.empty_like(pieces)
    call = Call("reduce_scatter", "all_to_all_single", pieces)

    def summed() -> Tensor:
        total = received[0].clone()
        for piece in received[1:]:
            total += piece
        return total

    return issue(axis, call, lambda: _swap(received, pieces, axis), summed)


def all_to_all(x: Tensor, axis: Axis, split_dim: int = 0, join_dim: int = 0) -> Tensor:
    """Cut ``x`` along ``split_dim``, send piece r to rank r, join what came along ``join_dim``.

    A rank sends (n-1)/n S.
    """
    if axis.size == 1:
        return x
    pieces = _pieces(x, axis, split_dim, "all_to_all")
    received = torch.empty_like(pieces)
    call = Call("all_to_all", "all_to_all_single", pieces)
    handle = issue(axis, call, lambda: _swap(received, pieces, axis), lambda: received)
    return torch.cat(list(handle.wait()), join_dim)


def all_to_all_uneven(
    x: Tensor, axis: Axis, send_counts: Sequence[int], receive_counts: Sequence[int]
) -> Tensor:
    """Send the first ``send_counts[0]`` rows of ``x`` to rank 0, the next to rank 1, and so on.

    x [sum(send_counts), ..] -> [sum(receive_counts), ..], in rank order. ``receive_counts[r]``
    must be what rank r sends here. A rank sends the bytes of the rows that leave it.
    """
    for name, counts in (("send_counts", send_counts), ("receive_counts", receive_counts)):
        if len(counts) != axis.size or min(counts) < 0:
            raise ValueError(
                f"{name}={list(counts)} on axis {axis.name}: one count of 0 or more for each of "
                f"its {axis.size} ranks is wanted"
            )
    if sum(send_counts) != len(x):
        raise ValueError(
            f"send_counts={list(send_counts)} add up to {sum(send_counts)} rows, but x has "
            f"{len(x)} (axis {axis.name}, rank {axis.rank})"
        )
    if axis.size == 1:
        return x
    rows = x.detach().contiguous()
    received = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
    row_bytes = rows[:1].numel() * rows.element_size() if len(rows) else 0
    leaving = (len(rows) - send_counts[axis.rank]) * row_bytes
    call = Call("all_to_all", "all_to_all_single", rows, leaving=leaving)

    def start():
        return dist.all_to_all_single(
            received,
            rows,
            list(receive_counts),
            list(send_counts),
            group=axis.group,
            async_op=True,
        )

    return issue(axis, call, start, lambda: received).wait()


def broadcast(x: Tensor, axis: Axis, source: int = 0) -> Tensor:
    """The ``x`` of coordinate ``source``, on every rank. ``x`` elsewhere gives shape and dtype.

    A rank sends (n-1)/n S, averaged over the ranks.
    """
    _coordinate(source, axis, "source")
    if axis.size == 1:
        return x
    fresh = _copy(x)
    call = Call("broadcast", "broadcast", fresh)
    root = axis.ranks[source]
    return issue(
        axis,
        call,
        lambda: dist.broadcast(fresh, root, group=axis.group, async_op=True),
        lambda: fresh,
    ).wait()


def barrier(axis: Axis) -> None:
    """Wait until every rank of the axis is here (an all-reduce of one number, as control)."""
    all_reduce(torch.zeros(1, device=axis.context.device), axis, control=True)


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


def _swap(received: Tensor, pieces: Tensor, axis: Axis):
    """Piece r of every rank goes to rank r; both are [n, ...]."""
    return dist.all_to_all_single(
        received.view(-1), pieces.view(-1), group=axis.group, async_op=True
    )


def _pieces(x: Tensor, axis: Axis, dim: int, op: str) -> Tensor:
    """``x`` cut along ``dim`` into [n, ...] pieces of equal size, contiguous."""
    if x.dim() == 0 or x.shape[dim] % axis.size:
        raise ValueError(
            f"{op} on axis {axis.name} cuts dim {dim} of shape {list(x.shape)} into "
            f"{axis.size} equal pieces, which does not divide; pad that dim or choose another"
        )
    x = x.detach()
    if dim == 0:
        return x.contiguous().view(axis.size, x.shape[0] // axis.size, *x.shape[1:])
    return torch.stack(x.chunk(axis.size, dim))


def _coordinate(coordinate: int, axis: Axis, what: str) -> None:
    if not 0 <= coordinate < axis.size:
        raise ValueError(
            f"{what}={coordinate} is no coordinate of axis {axis.name}, which has {axis.size} "
            f"ranks: give one of 0..{axis.size - 1}"
        )
