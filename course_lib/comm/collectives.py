"""Collectives as pure functions of a tensor and an axis: the caller's tensor is never written.

``start_*`` returns a :class:`~course_lib.comm.door.Handle` at once, so that the caller computes
while the bytes travel; the plain name waits. n is the size of the axis, S the payload in bytes
(the input); the wire bytes are those of :func:`course_lib.ledger.wire`. With n = 1 the result is
the input, memory shared, and nothing is recorded. Results carry no gradient, whatever n is:
:mod:`course_lib.comm.operators` has those that do. ``control=True`` tags traffic that steers and
carries no model data (token counts, norms): the ledger keeps it on its own line. A shape that
does not fit raises ValueError before anything is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.comm.call import Call, checked_coordinate, checked_dim, checked_piece
from course_lib.comm.door import Done, Handle, Together, issue
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
        return Done(x.detach())
    return start_in_place_all_reduce(_copy(x), axis, control=control)


def all_reduce_max(x: Tensor, axis: Axis, *, control: bool = False) -> Tensor:
    """Element-wise maximum over every rank's ``x``, on every rank. Bytes as all_reduce."""
    if axis.size == 1:
        return x.detach()
    return start_in_place_all_reduce(_copy(x), axis, maximum=True, control=control).wait()


def start_in_place_all_reduce(
    fresh: Tensor,
    axis: Axis,
    *,
    maximum: bool = False,
    control: bool = False,
    label: str = "",
) -> Handle:
    """All-reduce into ``fresh``, contiguous, which nobody else may hold. n must be above 1.

    Where priorities hold the axis back it travels in pieces.
    """
    reduction = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
    how = "max" if maximum else ""

    def start(piece: Tensor) -> Handle:
        return issue(
            axis,
            Call("all_reduce", "allreduce_", piece, how=how, control=control, label=label),
            lambda: dist.all_reduce(piece, op=reduction, group=axis.group, async_op=True),
            lambda: piece,
        )

    priorities = axis.context.priorities
    pieces = (fresh,) if priorities is None else priorities.cut(fresh, axis)
    handles = [start(piece) for piece in pieces]
    return handles[0] if len(handles) == 1 else Together(handles, fresh)


def all_gather(x: Tensor, axis: Axis, dim: int = 0, *, control: bool = False) -> Tensor:
    """Every rank's ``x`` joined along ``dim`` in rank order, on every rank.

    x [.., d, ..] -> [.., n*d, ..]. A rank sends (n-1) S, S being one shard.
    """
    return start_all_gather(x, axis, dim, control=control).wait()


def start_all_gather(x: Tensor, axis: Axis, dim: int = 0, *, control: bool = False) -> Handle:
    """Begin :func:`all_gather`; the handle's wait gives the joined tensor."""
    dim = checked_dim(x, dim, "all_gather", axis)
    if axis.size == 1:
        return Done(x.detach())
    shard = x.detach().contiguous()
    gathered = shard.new_empty((axis.size, *shard.shape))
    return issue(
        axis,
        Call("all_gather", "_allgather_base_", shard, how=f"dim {dim}", control=control),
        lambda: _ALL_GATHER(gathered.view(-1), shard.view(-1), group=axis.group, async_op=True),
        lambda: gathered.flatten(0, 1) if dim == 0 else torch.cat(list(gathered), dim),
    )


def start_all_gather_into(full: Tensor, shard: Tensor, axis: Axis, *, label: str = "") -> Handle:
    """All-gather 1-D shards into ``full``, which is written: [d] -> [n*d]. n must be above 1.

    ``shard`` may be this rank's own piece of ``full``. ``label`` names it in pictures.
    """
    return issue(
        axis,
        Call("all_gather", "_allgather_base_", shard, how="dim 0", label=label),
        lambda: _ALL_GATHER(full, shard, group=axis.group, async_op=True),
        lambda: full,
    )


def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """This rank's piece along ``dim`` of the sum of every rank's ``x``.

    x [.., n*d, ..] -> [.., d, ..]. A rank sends (n-1)/n S.
    """
    return start_reduce_scatter(x, axis, dim).wait()


def start_reduce_scatter(x: Tensor, axis: Axis, dim: int = 0, *, label: str = "") -> Handle:
    """Begin :func:`reduce_scatter`; the handle's wait gives the piece. ``label`` is for pictures.

    gloo's own reduce-scatter is an all-reduce inside and moves twice the bytes, so on gloo the
    pieces go to their owners by all-to-all and each owner adds them in rank order; that order also
    makes the sum the same in every run.
    """
    dim = checked_piece(x, dim, "reduce_scatter", axis)
    if axis.size == 1:
        return Done(x.detach())
    pieces = _pieces(x, axis, dim)
    if dist.get_backend(axis.group) == "nccl":
        return _native_reduce_scatter(x, pieces, axis, dim, label)
    received = torch.empty_like(pieces)

    def summed() -> Tensor:
        total = received[0] + received[1]
        for piece in received[2:]:
            total += piece
        return total

    call = Call("reduce_scatter", "alltoall_base_", x, how=f"dim {dim}", label=label)
    return issue(axis, call, lambda: _swap(received, pieces, axis), summed)


def _native_reduce_scatter(x: Tensor, pieces: Tensor, axis: Axis, dim: int, label: str) -> Handle:
    mine = pieces.new_empty(pieces.shape[1:])
    return issue(
        axis,
        Call("reduce_scatter", "_reduce_scatter_base_", x, how=f"dim {dim}", label=label),
        lambda: _REDUCE_SCATTER(mine.view(-1), pieces.view(-1), group=axis.group, async_op=True),
        lambda: mine,
    )


def all_to_all(x: Tensor, axis: Axis, split_dim: int = 0, join_dim: int = 0) -> Tensor:
    """Cut ``x`` along ``split_dim``, send piece r to rank r, join what came along ``join_dim``.

    x [.., n*a, .., b, ..] -> [.., a, .., n*b, ..]. A rank sends (n-1)/n S.
    """
    split_dim = checked_piece(x, split_dim, "all_to_all", axis)
    join_dim = checked_dim(x, join_dim, "all_to_all", axis)
    if axis.size == 1:
        return x.detach()
    pieces = _pieces(x, axis, split_dim)
    received = torch.empty_like(pieces)
    call = Call("all_to_all", "alltoall_base_", x, how=f"dim {split_dim} to dim {join_dim}")
    handle = issue(axis, call, lambda: _swap(received, pieces, axis), lambda: received)
    return torch.cat(list(handle.wait()), join_dim)


def all_to_all_uneven(
    x: Tensor, axis: Axis, send_counts: Sequence[int], receive_counts: Sequence[int]
) -> Tensor:
    """Send the first ``send_counts[0]`` rows of ``x`` to rank 0, the next to rank 1, and so on.

    x [sum(send_counts), ..] -> [sum(receive_counts), ..], in rank order. ``receive_counts[r]``
    must be what rank r sends here. A rank sends the bytes of the rows that leave it.
    """
    _check_counts(x, axis, send_counts, receive_counts)
    if axis.size == 1:
        return x.detach()
    rows = x.detach().contiguous()
    received = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
    counts = (tuple(send_counts), tuple(receive_counts))

    def start() -> Any:
        sent, expected = map(list, counts)
        group = axis.group
        return dist.all_to_all_single(received, rows, expected, sent, group=group, async_op=True)

    call = Call("all_to_all", "alltoall_base_", rows, how="uneven", counts=counts)
    return issue(axis, call, start, lambda: received).wait()


def _check_counts(
    x: Tensor, axis: Axis, send_counts: Sequence[int], receive_counts: Sequence[int]
) -> None:
    at = f"(axis {axis.name}, rank {axis.rank})"
    for name, counts in (("send_counts", send_counts), ("receive_counts", receive_counts)):
        if len(counts) != axis.size or min(counts) < 0:
            raise ValueError(
                f"{name}={list(counts)} {at}: one count of 0 or more for each of the "
                f"{axis.size} ranks is wanted"
            )
    rows = len(x) if x.dim() else 0
    if x.dim() == 0 or sum(send_counts) != rows:
        raise ValueError(
            f"send_counts={list(send_counts)} {at} add up to {sum(send_counts)} rows, but x of "
            f"shape {list(x.shape)} has {rows}"
        )
    if send_counts[axis.rank] != receive_counts[axis.rank]:
        raise ValueError(
            f"{at}: this rank sends itself {send_counts[axis.rank]} rows and expects "
            f"{receive_counts[axis.rank]} from itself; are send_counts and receive_counts swapped?"
        )


def broadcast(x: Tensor, axis: Axis, source: int = 0) -> Tensor:
    """The ``x`` of coordinate ``source``, on every rank. ``x`` elsewhere gives shape and dtype.

    A rank sends (n-1)/n S, averaged over the ranks.
    """
    root = axis.ranks[checked_coordinate(source, axis, "source")]
    if axis.size == 1:
        return x.detach()
    fresh = _copy(x)
    return issue(
        axis,
        Call("broadcast", "broadcast_", fresh, how=f"source {source}"),
        lambda: dist.broadcast(fresh, root, group=axis.group, async_op=True),
        lambda: fresh,
    ).wait()


def barrier(axis: Axis) -> None:
    """Wait until every rank of the axis is here (an all-reduce of one number, as control)."""
    all_reduce(torch.zeros(1, device=axis.context.device), axis, control=True)


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


def _swap(received: Tensor, pieces: Tensor, axis: Axis) -> Any:
    """Piece r of every rank goes to rank r; both are [n, ...]."""
    return dist.all_to_all_single(
        received.view(-1), pieces.view(-1), group=axis.group, async_op=True
    )


def _pieces(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """``x`` cut along ``dim`` into [n, ...] pieces of equal size, contiguous."""
    if dim == 0:
        return x.detach().contiguous().view(axis.size, x.shape[0] // axis.size, *x.shape[1:])
    return torch.stack(x.detach().chunk(axis.size, dim))
