"""The same collectives built from send and recv: the course's first subject.

Nothing here calls a collective of torch; every byte goes through a message to one neighbor. The
shards of a tensor may be uneven, so any number of ranks and elements works. n is the size of the
axis, S the bytes of ``x``.
"""

from __future__ import annotations

from torch import Tensor, cat

from course_lib.comm.p2p import exchange, recv, send
from course_lib.mesh import Axis


def ring_reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """This rank's shard of the flattened sum, after n-1 turns of a ring.

    In each turn a rank sends the shard it has just added to, and adds its own values to the shard
    that arrives; the shard that arrives last is the rank's own. Each rank sends (n-1)/n S.
    Source: Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002.
    """
    shards = list(x.detach().flatten().tensor_split(axis.size))
    for turn in range(axis.size - 1):
        leaving = (axis.rank - turn - 1) % axis.size
        arriving = (axis.rank - turn - 2) % axis.size
        received = exchange(shards[leaving], axis, axis.next, axis.previous, like=shards[arriving])
        shards[arriving] = shards[arriving] + received
    return shards[axis.rank]


def ring_all_gather(shard: Tensor, axis: Axis, like: list[Tensor] | None = None) -> list[Tensor]:
    """Every rank's shard, in rank order, after n-1 turns of a ring.

    ``like`` gives the shapes of the shards where they differ. Each rank sends (n-1) S' for shards
    of S' bytes: every shard except that of the next rank.
    """
    shards = [shard] * axis.size if like is None else list(like)
    shards[axis.rank] = shard.detach()
    for turn in range(axis.size - 1):
        leaving = (axis.rank - turn) % axis.size
        arriving = (axis.rank - turn - 1) % axis.size
        shards[arriving] = exchange(
            shards[leaving], axis, axis.next, axis.previous, like=shards[arriving]
        )
    return shards


def ring_all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the ranks: a ring reduce-scatter, then a ring all-gather.

    2(n-1) messages one after another; each rank sends 2(n-1)/n S. Ranks that do the additions
    cannot send less on average; a switch that adds needs less.
    """
    if axis.size == 1:
        return x.detach()
    shapes = list(x.detach().flatten().tensor_split(axis.size))
    shards = ring_all_gather(ring_reduce_scatter(x, axis), axis, like=shapes)
    return cat(shards).view(x.shape)


def tree_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the ranks on rank 0 of the axis (elsewhere a partial sum), by a binomial tree.

    In each of ceil(log2 n) rounds the upper half of each pair sends its sum down and is done.
    """
    total, step = x.detach(), 1
    while step < axis.size:
        if axis.rank % (2 * step):
            send(total, axis, to=axis.rank - step)
            break
        if axis.rank + step < axis.size:
            total = total + recv(total, axis, source=axis.rank + step)
        step *= 2
    return total


def tree_broadcast(x: Tensor, axis: Axis) -> Tensor:
    """Rank 0's ``x`` on every rank: the same tree, run backwards, from the longest step down."""
    step = 1
    while step < axis.size:
        step *= 2
    value = x.detach()
    while step > 1:
        half = step // 2
        if axis.rank % step == half:
            value = recv(value, axis, source=axis.rank - half)
        elif axis.rank % step == 0 and axis.rank + half < axis.size:
            send(value, axis, to=axis.rank + half)
        step = half
    return value


def tree_all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the ranks: reduce to rank 0, then broadcast.

    2 ceil(log2 n) messages one after another instead of 2(n-1), but the whole tensor in each:
    2(n-1) S in all, and rank 0's link carries most. Fast for small tensors, slow for large ones.
    """
    return tree_broadcast(tree_reduce(x, axis), axis)
