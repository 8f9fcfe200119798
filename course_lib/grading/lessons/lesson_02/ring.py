"""02-4: the ring all-reduce, the mechanism of the lesson."""

from __future__ import annotations

import time
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import comm
from course_lib.grading.compare import agrees, difference
from course_lib.grading.exercise import Wrong
from course_lib.grading.lessons.lesson_02.messages import (
    REFUSAL,
    drawn,
    given_to,
    left_alone,
    made_of_messages,
    on_world,
    sent_to,
)
from course_lib.grading.ranked import RankCase, Ranked, Seen, Trial, unwaited
from course_lib.mesh import Axis

TWO, FOUR, UNEVEN, ONE = range(4)
TIME = 0.3  # seconds in which all messages have left
TRIALS = (Trial(2, 8), Trial(4, 4096), Trial(3, 4), Trial(1, 5))  # 4 in 3: chunk gives 2 pieces


@made_of_messages
def _sums(seen: Seen) -> str:
    """Every rank holds the sum over all ranks, and messages alone have brought it there."""
    given, n = given_to(seen), seen.trial.n
    total = torch.stack(given).sum(0)
    says = difference("outputs", seen.values, [total] * n)
    if says and n > 1 and not difference("outputs", seen.values, given):
        return f"every rank gives its own x back: nothing was added ({says})"
    if says and n > 1 and not difference("outputs", seen.values, [given[0]] * n):
        return f"every rank has rank 0's x: that is a broadcast ({says})"
    if says and not difference("outputs", seen.values, [total / n] * n):
        return f"this is the mean; the sum is wanted: {says}"
    return _only_own_piece(seen, total) + says if says else ""


def _only_own_piece(seen: Seen, total: Tensor) -> str:
    """The mistake of stopping half-way: each rank has the sum in its own piece alone."""
    n = seen.trial.n
    for turn in range(n):  # which piece is a rank's own is its author's choice
        right = [
            isinstance(value, Tensor)
            and value.shape == total.shape
            and agrees(
                value.tensor_split(n)[(rank + turn) % n], total.tensor_split(n)[(rank + turn) % n]
            )
            for rank, value in enumerate(seen.values)
        ]
        if all(right):
            return "one piece is right on each rank: the all-gather half is missing or wrong; "
    return ""


def _ring_messages(seen: Seen) -> str:
    """2(n-1) messages to one neighbour."""
    n = seen.trial.n
    for rank, observed in enumerate(seen.ranks):
        sends = sent_to(observed)
        peers = set(sends)
        if not peers <= {(rank + 1) % n} and not peers <= {(rank - 1) % n}:
            names = ", ".join(map(str, sorted(peers)))
            return f"rank {rank} sent to ranks {names}: in a ring it sends to one neighbour"
        if len(sends) != 2 * (n - 1):
            return f"rank {rank} sent {len(sends)} messages; a ring of {n} sends {2 * (n - 1)}"
    return unwaited(seen)


def _ring_bytes(seen: Seen) -> str:
    n, size = seen.trial.n, 4 * seen.trial.size
    wanted = Fraction(2 * (n - 1), n) * size
    for rank, observed in enumerate(seen.ranks):
        sent = sum((call.wire(n) for call in observed.calls), Fraction(0))
        if sent != wanted:
            return (
                f"rank {rank} sent {float(sent):,g} bytes for x of {size:,}; 2(n-1)/n S are "
                f"{float(wanted):,g}: send pieces of x, not all of it"
            )
    return ""


def _peak(seen: Seen) -> str:
    size = 4 * seen.trial.size
    worst = max(observed.peak for observed in seen.ranks)
    if worst <= 3 * size:
        return ""
    return (
        f"{worst:,} bytes were alive at once, more than 3 times x ({size:,}): a ring needs no "
        "copy of every rank's x"
    )


def _by_ring(x: Tensor, axis: Axis, *, gather: bool = True, adding: bool = True) -> Tensor:
    pieces = [piece.clone() for piece in x.tensor_split(axis.size)]
    for turn in range(2 * (axis.size - 1) if gather else axis.size - 1):
        leaving, arriving = (axis.rank - turn) % axis.size, (axis.rank - turn - 1) % axis.size
        got = comm.exchange(pieces[leaving], axis, axis.next, axis.previous, like=pieces[arriving])
        first_half = turn < axis.size - 1
        pieces[arriving] = pieces[arriving] + got if first_half and adding else got
    return torch.cat(pieces)


def _send_first(x: Tensor, axis: Axis) -> Tensor:
    for _ in range(axis.size - 1):
        comm.send(x, axis, axis.next)
        x = x + comm.recv(x, axis, axis.previous)
    return x


def _whole_tensors(x: Tensor, axis: Axis) -> Tensor:
    total = travelling = x
    for _ in range(axis.size - 1):
        travelling = comm.exchange(travelling, axis, axis.next, axis.previous)
        total = total + travelling
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


class _KeepsWithoutWaiting:
    """Right, since it holds what isend returned and the others have time; none of it is sure."""

    def __init__(self) -> None:
        self.begun: list[Any] = []

    def __call__(self, x: Tensor, axis: Axis) -> Tensor:
        pieces = [piece.clone() for piece in x.tensor_split(axis.size)]
        for turn in range(2 * (axis.size - 1)):
            leaving, arriving = (axis.rank - turn) % axis.size, (axis.rank - turn - 1) % axis.size
            self.begun.append(dist.isend(pieces[leaving], axis.next))
            got = torch.empty_like(pieces[arriving])
            dist.recv(got, axis.previous)
            pieces[arriving] = pieces[arriving] + got if turn < axis.size - 1 else got
        time.sleep(TIME)
        return torch.cat(pieces)


def _one_piece_behind(x: Tensor, axis: Axis) -> Tensor:
    """Sends the piece before the one that it has just added to: partial sums get lost."""
    pieces = [piece.clone() for piece in x.tensor_split(axis.size)]
    for turn in range(2 * (axis.size - 1)):
        leaving, arriving = (axis.rank - turn) % axis.size, (axis.rank - turn + 1) % axis.size
        got = comm.exchange(pieces[leaving], axis, axis.next, axis.previous, like=pieces[arriving])
        pieces[arriving] = pieces[arriving] + got if turn < axis.size - 1 else got
    return torch.cat(pieces)


def _listens_to_next(x: Tensor, axis: Axis) -> Tensor:
    """Sends to the next rank and waits for it, too: right on two ranks, for ever on three."""
    total = travelling = x
    for _ in range(axis.size - 1):
        travelling = comm.exchange(travelling, axis, axis.next, axis.next)
        total = total + travelling
    return total


def _doubling(x: Tensor, axis: Axis) -> Tensor:
    """Adds a total that already holds this rank's own share."""
    return _by_ring(x, axis) * axis.size


def _raises_on_rank_1(x: Tensor, axis: Axis) -> Tensor:
    if axis.rank == 1:
        raise IndexError("no piece 4")
    return comm.all_reduce(x, axis)


def _in_place(x: Tensor, axis: Axis) -> Tensor:
    return x.copy_(_by_ring(x, axis))


def _right_backwards(x: Tensor, axis: Axis) -> Tensor:
    """The same ring turned the other way, into one buffer, with two messages in flight."""
    n, rank = axis.size, axis.rank
    total = x.clone()
    views = total.tensor_split(n)
    for turn in range(2 * (n - 1)):
        leaving, arriving = views[(rank + turn) % n], views[(rank + turn + 1) % n]
        incoming = comm.start_exchange(axis, [(leaving, axis.previous)], [(arriving, axis.next)])
        (got,) = incoming.wait()
        arriving.copy_(arriving + got if turn < n - 1 else got)
    return total


RING = Ranked(
    id="02-4",
    title="a ring all-reduce from send and recv",
    names=("ring_all_reduce",),
    hints=(
        "Cut x into n pieces. In n-1 turns every piece travels once around the ring: what should "
        "a rank do with a piece that arrives?",
        "Two halves: n-1 turns in which what arrives is added to the own piece, then n-1 turns in "
        "which what arrives takes its place. In turn t rank r sends piece (r - t) mod n.",
        "comm.exchange(pieces[(r - t) % n], axis, axis.next, axis.previous, like=pieces[(r - t - "
        "1) % n]) posts both messages at once; add in turns 0..n-2, replace in turns n-1..2n-3, "
        "then cat.",
    ),
    wrong=(
        Wrong(lambda x, axis: x, words="nothing was added"),
        Wrong(lambda x, axis: None, words="from rank 0, got a NoneType"),
        Wrong(lambda x, axis: _by_ring(x, axis, gather=False), words="the all-gather half"),
        Wrong(lambda x, axis: _by_ring(x, axis) / axis.size, words="this is the mean"),
        Wrong(_doubling, words="your outputs are exactly 2 times too large"),
        Wrong(lambda x, axis: dict(comm.ring(x, axis))[0], words="that is a broadcast"),
        Wrong(lambda x, axis: comm.all_reduce(x, axis), words="use send and recv alone"),
        Wrong(_raw_all_reduce, words="called all_reduce: use send and recv alone"),
        Wrong(lambda x, axis: comm.ring_all_reduce(x, axis), words=REFUSAL),
        Wrong(_two_halves, words=REFUSAL),
        Wrong(_up_and_down, words=REFUSAL),
        Wrong(lambda x, axis: _by_ring(x, axis, adding=False), words="outputs are wrong on every"),
        Wrong(_KeepsWithoutWaiting(), words="started 12 messages and waited for 6 of them"),
        Wrong(_one_piece_behind, words="outputs are wrong on every rank"),
        Wrong(_listens_to_next, words="on 4 ranks the answer had not returned"),
        Wrong(lambda x, axis: comm.tree_all_reduce(x, axis), words=REFUSAL),
        Wrong(_whole_tensors, words="a ring of 4 sends 6"),
        Wrong(_gather_all, words="a ring of 4 sends 6"),
        Wrong(_send_first, words="every rank waits in send"),
        Wrong(_raises_on_rank_1, words="rank 1 raised IndexError: no piece 4"),
        Wrong(_in_place, words="x was written"),
    ),
    right=(_by_ring, _right_backwards),
    stub=lambda x, axis: None,
    trials=TRIALS,
    inputs=drawn,
    act=on_world,
    looks=(
        RankCase("outputs", "two ranks", TWO, _sums),
        RankCase("outputs", "four ranks", FOUR, _sums),
        RankCase("outputs", "three ranks, uneven pieces", UNEVEN, _sums),
        RankCase("outputs", "x is left as it is", TWO, left_alone(given_to), later=True),
        RankCase("outputs", "one rank", ONE, _sums),
        RankCase("wire", "messages and peers", FOUR, _ring_messages),
        RankCase("wire", "bytes", FOUR, _ring_bytes),
        RankCase("peak", "memory", FOUR, _peak),
    ),
    refused=tuple(
        f"course_lib.comm.from_messages:{half}_{name}"
        for half, names in (
            ("ring", ("reduce_scatter", "all_gather", "all_reduce")),
            ("tree", ("reduce", "broadcast", "all_reduce")),
        )
        for name in names
    ),
)
