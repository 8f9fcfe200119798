"""02-3: a broadcast by a tree of messages."""

from __future__ import annotations

from math import ceil, log2

import torch
from torch import Tensor

from course_lib import comm
from course_lib.grading.compare import difference
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
from course_lib.grading.ranked import RankCase, Ranked, Seen, Trial
from course_lib.mesh import Axis

TWO, EIGHT, THREE, ONE = range(4)
TRIALS = (Trial(2, 6), Trial(8, 1000), Trial(3, 5), Trial(1, 4))


@made_of_messages
def _everywhere(seen: Seen) -> str:
    """Every rank holds the x of rank 0."""
    given, n = given_to(seen), seen.trial.n
    says = difference("outputs", seen.values, [given[0]] * n)
    if says and n > 1 and not difference("outputs", seen.values, given):
        return f"every rank gives its own x back: nothing arrived ({says})"
    if says and not difference("outputs", seen.values, [given[-1]] * n):
        return f"every rank has the x of rank {n - 1}; rank 0's is wanted ({says})"
    if says and not difference("outputs", seen.values, [torch.stack(given).sum(0)] * n):
        return f"this is the sum over the ranks; rank 0's x is wanted ({says})"
    return says


def _messages(seen: Seen) -> str:
    """n-1 messages in all: every rank but 0 receives x once, whole."""
    n, size = seen.trial.n, 4 * seen.trial.size
    received = [to for rank in seen.ranks for to in sent_to(rank)]
    if len(received) != n - 1:
        return (
            f"{len(received)} messages on {n} ranks; n-1 = {n - 1} are enough, since each rank but "
            "0 needs x once"
        )
    bytes_sent = {call.payload for rank in seen.ranks for call in rank.calls}
    if bytes_sent != {size}:
        return f"a message has {min(bytes_sent):,} bytes; in this tree each carries x, {size:,}"
    return ""


def _rounds(seen: Seen) -> str:
    """ceil(log2 n) messages one after another, when a rank sends one at a time."""
    n = seen.trial.n
    round_of, waiting = {0: 0}, [0]
    while waiting:
        rank = waiting.pop()
        for number, peer in enumerate(sent_to(seen.ranks[rank]), 1):
            if peer not in round_of:
                round_of[peer] = round_of[rank] + number
                waiting.append(peer)
    last, needed = max(round_of, key=round_of.__getitem__), ceil(log2(n))
    if round_of[last] <= needed:
        return ""
    return (
        f"rank {last} has x only after {round_of[last]} messages one after another; a tree of {n} "
        f"ranks needs {needed}: let every rank that has x send it on at the same time"
    )


def _upwards(x: Tensor, axis: Axis) -> Tensor:
    """A right tree of another shape: the short steps first."""
    step = 1
    while step < axis.size:
        if axis.rank < step and axis.rank + step < axis.size:
            comm.send(x, axis, to=axis.rank + step)
        elif step <= axis.rank < 2 * step:
            x = comm.recv(x, axis, source=axis.rank - step)
        step *= 2
    return x


def _by_halves(x: Tensor, axis: Axis) -> Tensor:
    """Right too: who holds x for ranks first..last gives it to the middle one, again and again."""
    first, last = 0, axis.size
    while last - first > 1:
        middle = (first + last + 1) // 2
        if axis.rank == first:
            comm.send(x, axis, to=middle)
        elif axis.rank == middle:
            x = comm.recv(x, axis, source=first)
        first, last = (middle, last) if axis.rank >= middle else (first, middle)
    return x


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
    """Two children each: a tree, but not every rank that has x is always sending."""
    if axis.rank:
        x = comm.recv(x, axis, source=(axis.rank - 1) // 2)
    for child in (2 * axis.rank + 1, 2 * axis.rank + 2):
        if child < axis.size:
            comm.send(x, axis, to=child)
    return x


def _no_bound(x: Tensor, axis: Axis) -> Tensor:
    step = 1
    while step < axis.size:
        if axis.rank < step:
            comm.send(x, axis, to=axis.rank + step)
        elif axis.rank < 2 * step:
            x = comm.recv(x, axis, source=axis.rank - step)
        step *= 2
    return x


def _listens_to_0(x: Tensor, axis: Axis) -> Tensor:
    step = 1
    while step < axis.size:
        if axis.rank < step and axis.rank + step < axis.size:
            comm.send(x, axis, to=axis.rank + step)
        elif step <= axis.rank < 2 * step:
            x = comm.recv(x, axis, source=0)
        step *= 2
    return x


def _result_lost(x: Tensor, axis: Axis) -> Tensor:
    """Receives and throws away; what is sent on is the rank's own x."""
    step = 1
    while step < axis.size:
        if axis.rank < step and axis.rank + step < axis.size:
            comm.send(x, axis, to=axis.rank + step)
        elif step <= axis.rank < 2 * step:
            comm.recv(x, axis, source=axis.rank - step)
        step *= 2
    return x


def _around_the_ring(x: Tensor, axis: Axis) -> Tensor:
    return dict(comm.ring(x, axis))[0]


def _sum_of_zeros(x: Tensor, axis: Axis) -> Tensor:
    return comm.all_reduce(x if axis.rank == 0 else torch.zeros_like(x), axis)


def _in_place(x: Tensor, axis: Axis) -> Tensor:
    return x.copy_(_upwards(x, axis))


TREE = Ranked(
    id="02-3",
    title="a broadcast by a tree",
    names=("tree_broadcast",),
    hints=(
        "In round 1 only rank 0 can send. How many ranks can send in round 2, and how many have x "
        "after it?",
        "Let step go 1, 2, 4, ... In each round the ranks below step have x, and each sends it to "
        "the rank step above, if there is one.",
        "while step < axis.size: ranks with axis.rank < step send to axis.rank + step (if that is "
        "below axis.size); ranks with step <= axis.rank < 2 * step receive from axis.rank - step; "
        "then step *= 2.",
    ),
    wrong=(
        Wrong(lambda x, axis: x, words="nothing arrived"),
        Wrong(lambda x, axis: None, words="from rank 0, got a NoneType"),
        Wrong(_flat, words="after 7 messages one after another; a tree of 8 ranks needs 3"),
        Wrong(_chain, words="after 7 messages one after another"),
        Wrong(_heap, words="after 4 messages one after another; a tree of 8 ranks needs 3"),
        Wrong(_no_bound, words="to=3 is no coordinate of axis world"),
        Wrong(_listens_to_0, words="rank 3 was at: recv"),
        Wrong(_result_lost, words="nothing arrived"),
        Wrong(_around_the_ring, words="56 messages on 8 ranks; n-1 = 7 are enough"),
        Wrong(lambda x, axis: comm.broadcast(x, axis), words="use send and recv alone"),
        Wrong(_sum_of_zeros, words="called all_reduce: use send and recv alone"),
        Wrong(lambda x, axis: comm.tree_broadcast(x, axis), words=REFUSAL),
        Wrong(lambda x, axis: comm.ring_all_reduce(x, axis), words="this is the sum"),
        Wrong(_in_place, words="x was written"),
    ),
    right=(_upwards, _by_halves),
    stub=lambda x, axis: None,
    trials=TRIALS,
    inputs=drawn,
    act=on_world,
    looks=(
        RankCase("outputs", "two ranks", TWO, _everywhere),
        RankCase("outputs", "eight ranks", EIGHT, _everywhere),
        RankCase("outputs", "three ranks", THREE, _everywhere),
        RankCase("outputs", "x is left as it is", EIGHT, left_alone(given_to), later=True),
        RankCase("outputs", "one rank", ONE, _everywhere),
        RankCase("wire", "messages", EIGHT, _messages),
        RankCase("wire", "one after another", EIGHT, _rounds),
    ),
    refused=(
        "course_lib.comm.from_messages:tree_broadcast",
        "course_lib.comm.from_messages:tree_all_reduce",
    ),
)
