"""Collectives as pure functions of a tensor and an axis: the caller's tensor is never written.

``start_*`` returns a :class:`~course_lib.comm.transfer.Handle` at once, so that the caller computes
during the transfer; the plain name waits. n is the size of the axis, S the payload in bytes (the
input); the wire bytes are those of :func:`course_lib.ledger.wire`. With n = 1 the result is the
input, memory shared, and nothing is recorded. Results carry no gradient, whatever n is:
:mod:`course_lib.comm.operators` has the functions that do. ``control=True`` tags control traffic
(token counts, norms), which the ledger lists on a line of its own. A shape that does not fit raises
ValueError before anything is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.comm.transfer import Call, Completed, Handle, issue
from course_lib.mesh import Axis

# torch 2.13 renamed two collectives; the older names still exist and warn.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(x: Tensor, axis: Axis, *, control: bool = False) -> Tensor:
    """Sum of every rank's ``x``, on every rank. Same shape. Each rank sends 2(n-1)/n S."""
    return _reduced(x, axis, control=control).wait()


def start_all_reduce(x: Tensor, axis: Axis) -> Handle:
    """Begin :func:`all_reduce`; the handle's wait gives the sum."""
    return _reduced(x, axis, overlaps=True)


def all_reduce_max(x: Tensor, axis: Axis, *, control: bool = False) -> Tensor:
    """Element-wise maximum over every rank's ``x``, on every rank. Bytes as all_reduce."""
    return _reduced(x, axis, dist.ReduceOp.MAX, control=control, how="max").wait()


def _reduced(x: Tensor, axis: Axis, op: Any = dist.ReduceOp.SUM, **what: Any) -> Handle:
    if axis.size == 1:
        return Completed(x.detach())
    return start_all_reduce_into(_copy(x), axis, op, **what)


def start_all_reduce_into(
    fresh: Tensor, axis: Axis, op: Any = dist.ReduceOp.SUM, **what: Any
) -> Handle:
    """Begin to reduce into ``fresh``, contiguous, which nothing else may use. n must be above 1.

    ``what`` has further fields of Call.
    """

    def start(x: Tensor) -> Any:
        return dist.all_reduce(x, op, axis.group, async_op=True)

    return issue(axis, Call("all_reduce", "allreduce_", fresh, start, **what))


def all_gather(x: Tensor, axis: Axis, dim: int = 0, *, control: bool = False) -> Tensor:
    """Every rank's ``x`` joined along ``dim`` in rank order, on every rank.

    x [.., d, ..] -> [.., n*d, ..]. Each rank sends (n-1) S, S being one shard.
    """
    return _gathered(x, axis, dim, control=control).wait()


def start_all_gather(x: Tensor, axis: Axis, dim: int = 0) -> Handle:
    """Begin :func:`all_gather`; the handle's wait gives the joined tensor."""
    return _gathered(x, axis, dim, overlaps=True)


def _gathered(x: Tensor, axis: Axis, dim: int, **what: Any) -> Handle:
    dim = checked_dim(x, dim, "all_gather", axis)
    if axis.size == 1:
        return Completed(x.detach())
    shard = x.detach().contiguous()
    full = shard.new_empty((axis.size, *shard.shape))

    def result() -> Tensor:
        return full.flatten(0, 1) if dim == 0 else torch.cat(list(full), dim)

    return start_all_gather_into(full, shard, axis, result=result, how=f"dim {dim}", **what)


def start_all_gather_into(full: Tensor, shard: Tensor, axis: Axis, **what: Any) -> Handle:
    """Begin to gather ``shard`` [d] of every rank into ``full`` [n*d], which is written.

    ``shard`` may be this rank's own slice of ``full``. n must be above 1. ``what`` has further
    fields of Call.
    """

    def start(shard: Tensor) -> Any:
        return _ALL_GATHER(full.view(-1), shard.view(-1), group=axis.group, async_op=True)

    return issue(axis, Call("all_gather", "_allgather_base_", shard, start, **what))


def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """This rank's shard along ``dim`` of the sum of every rank's ``x``.

    x [.., n*d, ..] -> [.., d, ..]. Each rank sends (n-1)/n S.
    """
    return _scattered(x, axis, dim).wait()


def start_reduce_scatter(x: Tensor, axis: Axis, dim: int = 0, *, label: str = "") -> Handle:
    """Begin :func:`reduce_scatter`; wait gives the shard. ``label`` is for pictures."""
    return _scattered(x, axis, dim, label=label, overlaps=True)


def _scattered(x: Tensor, axis: Axis, dim: int, **what: Any) -> Handle:
    """Begin a reduce-scatter: on nccl its own; on gloo an all-to-all and a sum.

    gloo's own reduce-scatter is an all-reduce inside and moves twice the bytes. With an all-to-all
    each owner receives the shards of all ranks and adds them in rank order, which also makes the
    sum the same in every run.
    """
    dim = checked_shard(x, dim, "reduce_scatter", axis)
    if axis.size == 1:
        return Completed(x.detach())
    shards, native = _shards(x, axis, dim), dist.get_backend(axis.group) == "nccl"
    received = torch.empty_like(shards[0] if native else shards)

    def start(_: Tensor) -> Any:
        if not native:
            return _swap(received, shards, axis)
        return _REDUCE_SCATTER(received.view(-1), shards.view(-1), group=axis.group, async_op=True)

    def result() -> Tensor:
        return received if native else _in_rank_order(received)

    backend_op = "_reduce_scatter_base_" if native else "alltoall_base_"
    return issue(axis, Call("reduce_scatter", backend_op, x, start, result, f"dim {dim}", **what))


def _in_rank_order(shards: Tensor) -> Tensor:
    """The sum over the first dimension, added from rank 0 up."""
    total = shards[0] + shards[1]
    for shard in shards[2:]:
        total += shard
    return total


def exchange_shards(x: Tensor, axis: Axis, split_dim: int, join_dim: int) -> Tensor:
    """all_to_all without gradient: split ``x``, send shard r to rank r, join what arrives."""
    split_dim = checked_shard(x, split_dim, "all_to_all", axis)
    join_dim = checked_dim(x, join_dim, "all_to_all", axis)
    if axis.size == 1:
        return x.detach()
    shards = _shards(x, axis, split_dim)
    received = torch.empty_like(shards)

    def start(_: Tensor) -> Any:
        return _swap(received, shards, axis)

    how = f"dim {split_dim} to dim {join_dim}"
    call = Call("all_to_all", "alltoall_base_", x, start, lambda: received, how)
    return torch.cat(list(issue(axis, call).wait()), join_dim)


def exchange_rows(
    x: Tensor, axis: Axis, send_counts: Sequence[int], receive_counts: Sequence[int]
) -> Tensor:
    """all_to_all_v without gradient: the rows of ``x`` to the ranks that ``send_counts`` says."""
    _check_counts(x, axis, send_counts, receive_counts)
    if axis.size == 1:
        return x.detach()
    rows = x.detach().contiguous()
    received = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
    sends, receives = list(send_counts), list(receive_counts)

    def start(rows: Tensor) -> Any:
        return dist.all_to_all_single(
            received, rows, receives, sends, group=axis.group, async_op=True
        )

    leaving = (len(rows) - sends[axis.rank]) * rows.shape[1:].numel() * rows.element_size()
    counts = tuple(sends), tuple(receives)
    call = Call(
        "all_to_all", "alltoall_base_", rows, start, lambda: received, "uneven", counts=counts,
        sent=leaving,
    )  # fmt: skip
    return issue(axis, call).wait()


def broadcast(x: Tensor, axis: Axis, source: int = 0) -> Tensor:
    """The ``x`` of coordinate ``source``, on every rank. ``x`` elsewhere gives shape and dtype.

    Each rank sends (n-1)/n S, averaged over the ranks.
    """
    root = axis.global_rank(source, "source")
    if axis.size == 1:
        return x.detach()

    def start(fresh: Tensor) -> Any:
        return dist.broadcast(fresh, root, group=axis.group, async_op=True)

    call = Call("broadcast", "broadcast_", _copy(x), start, how=f"source {source}")
    return issue(axis, call).wait()


def barrier(axis: Axis) -> None:
    """Wait until every rank of the axis is here (an all-reduce of one number, as control)."""
    all_reduce(torch.zeros(1, device=axis.context.device), axis, control=True)


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


def _swap(received: Tensor, shards: Tensor, axis: Axis) -> Any:
    """Shard r of every rank goes to rank r; both tensors are [n, ...]."""
    return dist.all_to_all_single(
        received.view(-1), shards.view(-1), group=axis.group, async_op=True
    )


def _shards(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """``x`` split along ``dim`` into [n, ...] shards of equal size, contiguous."""
    if dim == 0:
        return x.detach().contiguous().view(axis.size, x.shape[0] // axis.size, *x.shape[1:])
    return torch.stack(x.detach().chunk(axis.size, dim))


def checked_dim(x: Tensor, dim: int, op: str, axis: Axis) -> int:
    """``dim`` counted from 0, if ``x`` has it; else ValueError."""
    if not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"{op} on axis {axis.name}: dim {dim} of shape {list(x.shape)} does not exist"
            + ("; reshape the scalar to [1]" if x.dim() == 0 else "")
        )
    return dim % x.dim()


def checked_shard(x: Tensor, dim: int, op: str, axis: Axis) -> int:
    """``dim`` counted from 0, if it splits into equal shards for all ranks; else ValueError."""
    dim = checked_dim(x, dim, op, axis)
    check_equal_shards(f"dim {dim} of shape {list(x.shape)}", x.shape[dim], op, axis)
    return dim


def check_equal_shards(what: str, size: int, op: str, axis: Axis, shards: int = 0) -> None:
    """Raise ValueError unless ``size`` splits into one equal shard per rank, or into ``shards``."""
    shards = shards or axis.size
    if size % shards:
        raise ValueError(
            f"{op} on axis {axis.name}: {what} does not split into {shards} equal shards; pad it, "
            "or choose another size or number of ranks"
        )


def _check_counts(
    x: Tensor, axis: Axis, send_counts: Sequence[int], receive_counts: Sequence[int]
) -> None:
    at = f"(axis {axis.name}, rank {axis.rank})"
    for name, counts in (("send_counts", send_counts), ("receive_counts", receive_counts)):
        if len(counts) != axis.size or min(counts) < 0:
            raise ValueError(
                f"{name}={list(counts)} {at}: expected one count of 0 or more for each of the "
                f"{axis.size} ranks"
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
