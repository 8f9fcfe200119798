"""Lesson 02: wrong and right answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil, log2
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from attack import Attacks
from torch import Tensor

from course_lib import comm
from course_lib.comm.alpha_beta import crossing
from course_lib.grading import registry
from course_lib.grading.exercise import Answer, Wrong
from course_lib.mesh import Axis, Link, make_mesh

REFUSAL = "raised PermissionError: this is what you are asked to write"
ONLY = "expected send and recv only"
WRITTEN = "the answer wrote into it"
TIME = 0.3  # seconds in which all messages have arrived


def _table(**types: Any) -> dict[str, Any]:
    wanted = registry.find("02-1").wanted  # type: ignore[attr-defined]
    return {key: types[type(value).__name__](value) for key, value in wanted.items()}


def _floats(values: list[int]) -> tuple[float, ...]:
    return tuple(map(float, values))


# --- 02-2
def _by_search(n: int, link: Link) -> float:
    """The zero of the straight line that is the difference."""

    def ahead(size: float) -> float:
        ring = 2 * (n - 1) * (link.alpha + size / n / link.beta)
        return ring - 2 * ceil(log2(n)) * (link.alpha + size / link.beta)

    return ahead(0) / (ahead(0) - ahead(1e6)) * 1e6


def _in_seconds(n: int, link: Link) -> float:
    rounds, turns = 2 * (n - 1).bit_length(), 2 * n - 2
    slope = rounds / link.beta - turns / n / link.beta
    return (turns - rounds) * link.alpha / slope


def _whole_0(n: int, link: Link) -> float:
    return 0 if n < 4 else np.float64(_by_search(n, link))


def _from_4(n: int, link: Link) -> float:
    if n < 4:
        raise ValueError("n is too small")
    return _by_search(n, link)


class _OfTheFirst:
    """Right once: calls with an equal key return the result of the first of them."""

    def __init__(self, key: Callable[[int, Link], Any]) -> None:
        self.key, self.known = key, {}  # type: Any, dict[Any, float]

    def __call__(self, n: int, link: Link) -> float:
        return self.known.setdefault(self.key(n, link), _by_search(n, link))


# --- 02-3
def _upwards(x: Tensor, axis: Axis, *, bound: bool = True, to_0: bool = False,
             lost: bool = False, rounds: Any = None, limit: int = 1000) -> Tensor:  # fmt: skip
    """A right tree with the short steps first, or a wrong one."""
    step, made = 1, 0
    while step < min(axis.size, limit) and (rounds is None or made < rounds(axis.size)):
        if axis.rank < step and (axis.rank + step < axis.size or not bound):
            comm.send(x, axis, to=axis.rank + step)
        elif step <= axis.rank < 2 * step:
            got = comm.recv(x, axis, source=0 if to_0 else axis.rank - step)
            x = x if lost else got
        step, made = 2 * step, made + 1
    return x


def _tree(**mistake: Any) -> Answer:
    return lambda x, axis: _upwards(x, axis, **mistake)


def _by_halves(x: Tensor, axis: Axis) -> Tensor:
    """The first of the ranks first..last-1 sends x to the middle one, and so on in each half."""
    first, last = 0, axis.size
    while last - first > 1:
        middle = (first + last + 1) // 2
        if axis.rank == first:
            comm.send(x, axis, to=middle)
        elif axis.rank == middle:
            x = comm.recv(x, axis, source=first)
        first, last = (middle, last) if axis.rank >= middle else (first, middle)
    return x


def _raw_tree(x: Tensor, axis: Axis, *, world: bool = False, waits: bool = True) -> Tensor:
    """In raw torch, with the ranks of the axis or, wrongly, with those of the world."""
    n, rank = (dist.get_world_size(), dist.get_rank()) if world else (axis.size, axis.rank)
    ranks = range(n) if world else axis.ranks
    out, step = x.detach().clone(memory_format=torch.contiguous_format), 1
    while step < n:
        if rank < step and rank + step < n:
            work = dist.isend(out, ranks[rank + step])
            if waits:
                work.wait()  # type: ignore[union-attr]
        elif step <= rank < 2 * step:
            dist.recv(out, ranks[rank - step])
        step *= 2
    return out


def _flat(x: Tensor, axis: Axis) -> Tensor:
    if axis.rank:
        return comm.recv(x, axis, source=0)
    for rank in range(1, axis.size):
        comm.send(x, axis, to=rank)
    return x


def _chain(x: Tensor, axis: Axis) -> Tensor:
    if axis.rank > 0:
        x = comm.recv(x, axis, source=axis.rank - 1)
    if axis.rank + 1 < axis.size:
        comm.send(x, axis, to=axis.rank + 1)
    return x


def _heap(x: Tensor, axis: Axis) -> Tensor:
    """Two children each: a tree in which not every rank that has x is always sending."""
    if axis.rank:
        x = comm.recv(x, axis, source=(axis.rank - 1) // 2)
    for child in (2 * axis.rank + 1, 2 * axis.rank + 2):
        if child < axis.size:
            comm.send(x, axis, to=child)
    return x


def _in_halves(x: Tensor, axis: Axis) -> Tensor:
    """Two messages in place of one."""
    return torch.cat([_upwards(part, axis) for part in x.flatten().tensor_split(2)]).view(x.shape)


def _in_float32(x: Tensor, axis: Axis) -> Tensor:
    return _upwards(x.float(), axis)


def _sum_of_zeros(x: Tensor, axis: Axis) -> Tensor:
    return comm.all_reduce(x if axis.rank == 0 else torch.zeros_like(x), axis)


def _borrows(answer: Answer) -> Answer:
    """Return an answer that writes into x and puts the old values back."""

    def borrows(x: Tensor, *axis: Axis) -> Tensor:
        found, old = answer(x, *axis).clone(), x.clone()
        x.fill_(7)
        x.copy_(old)
        return found

    return borrows


def _row_by_row(x: Tensor, axis: Axis) -> Tensor:
    """A tensor without dimensions has no rows."""
    return _upwards(x.reshape(len(x), -1), axis).view(x.shape)


class _Remembers:
    """Right in its first call; then the result of that call again."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.found = answer, None

    def __call__(self, x: Tensor, *axis: Axis) -> Any:
        found = self.answer(x, *axis)
        if self.found is None or self.found.shape != found.shape:
            self.found = found
        return self.found


# --- 02-4
def _by_ring(x: Tensor, axis: Axis, *, gather: bool = True, adding: Any = None,
             split: str = "tensor_split", add: Any = torch.add) -> Tensor:  # fmt: skip
    pieces = [piece.clone() for piece in getattr(x, split)(axis.size)]
    for turn in range(2 * (axis.size - 1) if gather else axis.size - 1):
        leaving, arriving = (axis.rank - turn) % axis.size, (axis.rank - turn - 1) % axis.size
        got = comm.exchange(pieces[leaving], axis, axis.next, axis.previous, like=pieces[arriving])
        adds = turn < axis.size - 1 if adding is None else adding
        pieces[arriving] = add(pieces[arriving], got) if adds else got
    return torch.cat(pieces)


def _added_in_float32(a: Tensor, b: Tensor) -> Tensor:
    """Float32 for a bfloat16, which is fine, and for whole numbers, which is not."""
    return a + b if a.dtype == torch.float64 else (a.float() + b.float()).to(a.dtype)


def _without_empty(x: Tensor, axis: Axis) -> Tensor:
    """Empty pieces are not sent; the text lets them be empty."""
    n, rank, pieces = axis.size, axis.rank, list(x.tensor_split(axis.size))
    for turn in range(2 * (n - 1)):
        leaving, arriving = (rank - turn) % n, (rank - turn - 1) % n
        sends = [(pieces[leaving], axis.next)] if pieces[leaving].numel() else []
        receives = [(pieces[arriving], axis.previous)] if pieces[arriving].numel() else []
        for got in comm.start_exchange(axis, sends, receives).wait():
            pieces[arriving] = pieces[arriving] + got if turn < n - 1 else got
    return torch.cat(pieces)


def _send_first(x: Tensor, axis: Axis) -> Tensor:
    for _ in range(axis.size - 1):
        comm.send(x, axis, axis.next)
        x = x + comm.recv(x, axis, axis.previous)
    return x


def _whole_tensors(x: Tensor, axis: Axis) -> Tensor:
    total = moving = x
    for _ in range(axis.size - 1):
        moving = comm.exchange(moving, axis, axis.next, axis.previous)
        total = total + moving
    return total


def _gather_all(x: Tensor, axis: Axis) -> Tensor:
    return torch.stack([block for _, block in comm.ring(x, axis)]).sum(0)


def _two_halves(x: Tensor, axis: Axis) -> Tensor:
    return torch.cat(comm.ring_all_gather(comm.ring_reduce_scatter(x, axis), axis))


def _up_and_down(x: Tensor, axis: Axis) -> Tensor:
    return comm.tree_broadcast(comm.tree_reduce(x, axis), axis)


def _raw_all_reduce(x: Tensor, axis: Axis) -> Tensor:
    total = x.clone()
    dist.all_reduce(total)
    return total


class _StoresHandles:
    """Right, since it stores the handles and gives the messages time, but never waits."""

    def __init__(self) -> None:
        self.begun: list[Any] = []

    def __call__(self, x: Tensor, axis: Axis) -> Tensor:
        n, rank = axis.size, axis.rank
        pieces = [piece.contiguous() for piece in x.tensor_split(n)]
        for turn in range(2 * (n - 1)):
            leaving, arriving = (rank - turn) % n, (rank - turn - 1) % n
            self.begun.append(dist.isend(pieces[leaving], axis.ranks[axis.next]))
            got = torch.empty_like(pieces[arriving])
            dist.recv(got, axis.ranks[axis.previous])
            pieces[arriving] = pieces[arriving] + got if turn < n - 1 else got
        time.sleep(TIME)
        return torch.cat(pieces)


def _one_piece_ahead(x: Tensor, axis: Axis) -> Tensor:
    """Receives into the piece after the one that it sends, which has another length."""
    pieces = [piece.clone() for piece in x.tensor_split(axis.size)]
    for turn in range(2 * (axis.size - 1)):
        leaving, arriving = (axis.rank - turn) % axis.size, (axis.rank - turn + 1) % axis.size
        got = comm.exchange(pieces[leaving], axis, axis.next, axis.previous, like=pieces[arriving])
        pieces[arriving] = pieces[arriving] + got if turn < axis.size - 1 else got
    return torch.cat(pieces)


def _listens_to_next(x: Tensor, axis: Axis) -> Tensor:
    """Sends to the next rank and receives from it: right on two ranks, endless on three."""
    total = moving = x
    for _ in range(axis.size - 1):
        moving = comm.exchange(moving, axis, axis.next, axis.next)
        total = total + moving
    return total


def _zigzag(x: Tensor, axis: Axis) -> Tensor:
    """Right: a ring in the other direction in the second half, so it has two neighbors."""
    shard = _by_ring(x, axis, gather=False).tensor_split(axis.size)
    n, rank, pieces = axis.size, axis.rank, list(shard)
    for turn in range(n - 1):
        leaving, arriving = (rank + 1 + turn) % n, (rank + 2 + turn) % n
        pieces[arriving] = comm.exchange(
            pieces[leaving], axis, axis.previous, axis.next, like=pieces[arriving]
        )
    return torch.cat(pieces)


def _raises_on_rank_1(x: Tensor, axis: Axis) -> Tensor:
    if axis.rank == 1:
        raise IndexError("no piece 4")
    return comm.all_reduce(x, axis)


def _world_ring(x: Tensor, axis: Axis) -> Tensor:
    return _by_ring(x, make_mesh().world)


def _copies_of_all(x: Tensor, axis: Axis) -> Tensor:
    """The right messages, with four copies of x alive."""
    copies = [x.clone() for _ in range(4)]
    return _by_ring(copies[-1], axis)


def _accumulates_in_float32(x: Tensor, axis: Axis) -> Tensor:
    return _by_ring(x.float(), axis).to(x.dtype)


def _backwards(x: Tensor, axis: Axis) -> Tensor:
    """The ring in the other direction, into one buffer, with two messages at once."""
    n, rank = axis.size, axis.rank
    total = x.clone(memory_format=torch.contiguous_format)
    views = total.tensor_split(n)
    for turn in range(2 * (n - 1)):
        leaving, arriving = views[(rank + turn) % n], views[(rank + turn + 1) % n]
        incoming = comm.start_exchange(axis, [(leaving, axis.previous)], [(arriving, axis.next)])
        (got,) = incoming.wait()
        arriving.copy_(arriving + got if turn < n - 1 else got)
    return total


def _raw_ring(x: Tensor, axis: Axis) -> Tensor:
    """In raw torch, in the group of the axis."""
    n, rank = axis.size, axis.rank
    pieces = [piece.contiguous() for piece in x.tensor_split(n)]
    for turn in range(2 * (n - 1)):
        leaving, arriving = (rank - turn) % n, (rank - turn - 1) % n
        got = torch.empty_like(pieces[arriving])
        sending = dist.isend(pieces[leaving], axis.ranks[axis.next], axis.group)
        dist.recv(got, axis.ranks[axis.previous], axis.group)
        sending.wait()  # type: ignore[union-attr]
        pieces[arriving] = pieces[arriving] + got if turn < n - 1 else got
    return torch.cat(pieces)


# --- 02-5
def _in_one_batch(x: Tensor, *, copy: bool = True, dtype: Any = None, waits: bool = True,
                  own: bool = True) -> Tensor:  # fmt: skip
    rank, n = dist.get_rank(), dist.get_world_size()
    result = x.clone() if copy else torch.full_like(x, 7.0)
    result = result if dtype is None else result.to(dtype)
    others = [other for other in range(n) if other != rank]
    operations = [dist.P2POp(dist.isend, x[other], other) for other in others]
    operations += [dist.P2POp(dist.irecv, result[other], other) for other in others]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        if waits:
            work.wait()
    if not waits:
        time.sleep(TIME)
    return result


def _batch(**mistake: Any) -> Answer:
    return lambda x: _in_one_batch(x, **mistake)


def _without_waiting(x: Tensor) -> Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    rows = [torch.zeros_like(row) for row in x]
    rows[rank] = x[rank].clone()
    for other in range(n):
        if other != rank:
            dist.isend(x[other], other)
            dist.irecv(rows[other], other)
    return torch.stack(rows)


class _OnlyAsks:
    """Waits by asking is_completed."""

    def __init__(self) -> None:
        self.works: list[Any] = []

    def __call__(self, x: Tensor) -> Tensor:
        rank, n = dist.get_rank(), dist.get_world_size()
        result = x.clone()
        for other in range(n):
            if other != rank:
                self.works += [dist.isend(x[other], other), dist.irecv(result[other], other)]
        end = time.monotonic() + TIME
        while not all(work.is_completed() for work in self.works) and time.monotonic() < end:
            time.sleep(0.01)
        return result


def _lower_rank_first(x: Tensor) -> Tensor:
    """Blocking calls only: of each pair the lower rank sends first."""
    rank, n = dist.get_rank(), dist.get_world_size()
    rows = [row.clone() for row in x]
    for other in range(n):
        if rank < other:
            dist.send(x[other], other)
            dist.recv(rows[other], other)
        elif rank > other:
            dist.recv(rows[other], other)
            dist.send(x[other], other)
    return torch.stack(rows)


def _turn_by_turn(
    x: Tensor, *, sends: str = "row", keeps_own: bool = True, in_order: bool = True
) -> Tensor:
    """n-1 turns; in turn t a rank sends to the rank t above and receives from the one t below."""
    rank, n = dist.get_rank(), dist.get_world_size()
    rows = [torch.zeros_like(row) for row in x]
    arrived = [x[rank].clone()]
    if keeps_own:
        rows[rank] = x[rank].clone()
    for turn in range(1, n):
        to, source = (rank + turn) % n, (rank - turn) % n
        out = {"row": x[to], "own": x[rank], "all": x}[sends].contiguous()
        into = torch.empty_like(out)
        operations = [dist.P2POp(dist.isend, out, to), dist.P2POp(dist.irecv, into, source)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        rows[source] = into[rank] if sends == "all" else into
        arrived.append(rows[source])
    return torch.stack(rows if in_order else arrived)


def _sends_first(x: Tensor) -> Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    result = x.clone()
    for other in range(n):
        if other != rank:
            dist.send(x[other], other)
    for other in range(n):
        if other != rank:
            dist.recv(result[other], other)
    return result


def _through_rank_0(x: Tensor) -> Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(x, 0)
        result = torch.empty_like(x)
        dist.recv(result, 0)
        return result
    every = [x.clone() for _ in range(n)]
    for other in range(1, n):
        dist.recv(every[other], other)
    for other in range(1, n):
        dist.send(torch.stack([rows[other] for rows in every]), other)
    return torch.stack([rows[0] for rows in every])


def _collective(x: Tensor) -> Tensor:
    result = torch.empty_like(x)
    dist.all_to_all_single(result, x)
    return result


def _gathered(x: Tensor) -> Tensor:
    every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(every, x)
    return torch.stack([rows[dist.get_rank()] for rows in every])


def _by_comm(x: Tensor) -> Tensor:
    world = make_mesh().world
    rows = [(x[other], other) for other in range(world.size) if other != world.rank]
    received = comm.start_exchange(world, rows, rows).wait() if rows else []
    received.insert(world.rank, x[world.rank])
    return torch.stack(received)


def _as_arguments(x: Tensor) -> Tensor:
    """send has no async_op."""
    dist.send(x[0], dst=0, async_op=True)  # type: ignore[call-arg]
    return x


def _repeats(x: Tensor) -> Tensor:
    """Right, but every row is sent twice."""
    _in_one_batch(x)
    return _in_one_batch(x)


ATTACKS = {
    "02-1": Attacks(
        wrong=(Wrong(dict.fromkeys(_table(list=list, int=int)), words="is not filled in yet"),),
        right=(_table(list=list, int=int), _table(list=_floats, int=float)),
    ),
    "02-2": Attacks(
        wrong=(
            Wrong(lambda n, link: torch.tensor(_by_search(n, link)), words="call .item()"),
            Wrong(crossing, words="this is what you are asked to write"),
            Wrong(lambda n, link: None, words="expected a number of bytes, got None"),
            Wrong(lambda n, link: link["alpha"], words="raised TypeError"),
            Wrong(_from_4, words="crossing(n=2"),
            Wrong(lambda n, link: _by_search(n, link) if n < 2000 else 0.0, words="expected"),
            Wrong(lambda n, link: 1.001 * _by_search(n, link), words="expected"),
            Wrong(_OfTheFirst(lambda n, link: link), words="expected"),
            Wrong(_OfTheFirst(lambda n, link: (n, link.alpha)), words="expected"),
            Wrong(_OfTheFirst(lambda n, link: (n, link.beta)), words="expected"),
        ),
        right=(_by_search, _in_seconds, _whole_0),
    ),
    "02-3": Attacks(
        wrong=(
            Wrong(lambda x, axis: x, words="nothing arrived"),
            Wrong(lambda x, axis: None, words="to be a tensor, got None"),
            Wrong(_flat, words="after 4 messages one after another; a tree of 5 ranks needs 3"),
            Wrong(_chain, words="after 4 messages one after another"),
            Wrong(_heap, words="after 4 messages one after another; a tree of 7 ranks needs 3"),
            Wrong(_tree(bound=False), words="to=3 is no coordinate of axis world"),
            Wrong(_tree(to_0=True), words="rank 3 was at: recv"),
            Wrong(_tree(lost=True), words="nothing arrived"),
            Wrong(lambda x, axis: dict(comm.ring(x, axis))[0], words="n-1 = 1 messages on 2 ranks"),
            Wrong(lambda x, axis: comm.broadcast(x, axis), words=ONLY),
            Wrong(_sum_of_zeros, words=ONLY),
            Wrong(lambda x, axis: comm.tree_broadcast(x, axis), words=REFUSAL),
            Wrong(lambda x, axis: comm.ring_all_reduce(x, axis), words="this is the sum"),
            Wrong(lambda x, axis: x.copy_(_upwards(x, axis)), words=WRITTEN),
            Wrong(_tree(limit=4), words="outputs: wrong on rank 4"),
            Wrong(_tree(rounds=lambda n: round(log2(n))), words="outputs: wrong on rank 4"),
            Wrong(_in_halves, words="n-1 = 1 messages on 2 ranks, got 2"),
            Wrong(_in_float32, words="torch.float64"),
            Wrong(lambda x, axis: _raw_tree(x, axis, world=True), words="ranks [1, 3]"),
            Wrong(lambda x, axis: _raw_tree(x, axis, waits=False), words="never waited for it"),
            Wrong(_Remembers(_upwards), words="call"),
            Wrong(_borrows(_upwards), words=WRITTEN),
            Wrong(_row_by_row, words="len() of a 0-d tensor"),
        ),
        right=(_upwards, _by_halves, _raw_tree),
    ),
    "02-4": Attacks(
        wrong=(
            Wrong(lambda x, axis: x, words="nothing was added"),
            Wrong(lambda x, axis: None, words="to be a tensor, got None"),
            Wrong(lambda x, axis: _by_ring(x, axis, gather=False), words="the second half"),
            Wrong(lambda x, axis: _by_ring(x, axis) / axis.size, words="this is the average"),
            Wrong(lambda x, axis: _by_ring(x, axis) * axis.size, words="exactly 2 times too large"),
            Wrong(lambda x, axis: dict(comm.ring(x, axis))[0], words="this is a broadcast"),
            Wrong(lambda x, axis: comm.all_reduce(x, axis), words=ONLY),
            Wrong(_raw_all_reduce, words=ONLY),
            Wrong(lambda x, axis: comm.ring_all_reduce(x, axis), words=REFUSAL),
            Wrong(_two_halves, words=REFUSAL),
            Wrong(_up_and_down, words=REFUSAL),
            Wrong(lambda x, axis: _by_ring(x, axis, adding=False), words="from one rank only"),
            Wrong(lambda x, axis: _by_ring(x, axis, adding=True), words="in the second half too"),
            Wrong(_StoresHandles(), words="never waited for it"),
            Wrong(_borrows(_by_ring), words=WRITTEN),
            Wrong(
                lambda x, axis: _by_ring(x, axis, add=_added_in_float32),
                words="add in the dtype of x",
            ),
            Wrong(_one_piece_ahead, words="the calls of the ranks do not match"),
            Wrong(_listens_to_next, words="had not returned"),
            Wrong(lambda x, axis: comm.tree_all_reduce(x, axis), words=REFUSAL),
            Wrong(_whole_tensors, words="expected 2(n-1) = 2 messages"),
            Wrong(_gather_all, words="expected 2(n-1) = 2 messages"),
            Wrong(_send_first, words="every rank waits in send"),
            Wrong(_raises_on_rank_1, words="rank 1 raised IndexError: no piece 4"),
            Wrong(lambda x, axis: x.copy_(_by_ring(x, axis)), words=WRITTEN),
            Wrong(lambda x, axis: _by_ring(x, axis, split="chunk"), words="IndexError"),
            Wrong(_world_ring, words="the axis has the ranks"),
            Wrong(_zigzag, words="to one neighbor"),
            Wrong(_copies_of_all, words="alive at once"),
            Wrong(_accumulates_in_float32, words="the precision of float32"),
            Wrong(_Remembers(_by_ring), words="call"),
        ),
        right=(_by_ring, _backwards, _raw_ring, _without_empty),
    ),
    "02-5": Attacks(
        wrong=(
            Wrong(lambda x: x, words="nothing was exchanged"),
            Wrong(lambda x: None, words="to be a tensor, got None"),
            Wrong(lambda x: _turn_by_turn(x, keeps_own=False), words="no message, but a copy"),
            Wrong(_batch(copy=False), words="no message, but a copy"),
            Wrong(lambda x: _turn_by_turn(x, in_order=False), words="right rows in another order"),
            Wrong(lambda x: _turn_by_turn(x, sends="own"), words="its own row to all others"),
            Wrong(lambda x: _turn_by_turn(x, sends="all"), words="send each rank its row, not all"),
            Wrong(lambda x: _turn_by_turn(x).flatten(), words="expected outputs of shape"),
            Wrong(_batch(dtype=torch.float32), words="compare calls, peers and shapes by rank"),
            Wrong(_without_waiting, words="never waited for it"),
            Wrong(_batch(waits=False), words="never waited for it"),
            Wrong(_OnlyAsks(), words="never waited for it"),
            Wrong(_sends_first, words="every rank waits in send"),
            Wrong(_through_rank_0, words="to every other rank"),
            Wrong(_collective, words=ONLY),
            Wrong(_gathered, words=ONLY),
            Wrong(_by_comm, words=REFUSAL),
            Wrong(_as_arguments, words="unexpected keyword argument 'async_op'"),
            Wrong(lambda x: x.copy_(_turn_by_turn(x)), words=WRITTEN),
            Wrong(_repeats, words="got messages to 1, 1"),
            Wrong(_Remembers(_in_one_batch), words="call"),
            Wrong(_borrows(_in_one_batch), words=WRITTEN),
        ),
        right=(_in_one_batch, _lower_rank_first, _turn_by_turn),
    ),
}
