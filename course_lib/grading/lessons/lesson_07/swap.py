"""07-4: in raw torch.distributed, a message there and one back that never wait for each other."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.grading.compare import agrees, difference
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.ranked import RankCase, Ranked, Seen, Trial, unwaited
from course_lib.mesh import Mesh

TWO, FOUR = range(2)
ALONE = "Only the two ranks of a swap call it: a collective would wait for all four."
TRIALS = (Trial(2, 3), Trial(4, 2, hang=ALONE))  # size: rounds of the alternating part
LATE = 0.05  # seconds: whoever does not wait for a message sees that it is not there yet
ACTIVATION, GRADIENT = (3, 4, 8), (2, 4, 8)  # of two micro-batches, the second a shorter one
DTYPE = torch.float64  # not the default: a buffer has to be made like `like`


def _inputs(trial: Trial, rank: int, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """What a rank sends on and what it sends back, round by round."""
    generator = torch.Generator().manual_seed(seed + rank)
    rounds = range(trial.size)
    activations, gradients = (
        [torch.randn(shape, generator=generator, dtype=DTYPE) for _ in rounds]
        for shape in (ACTIVATION, GRADIENT)
    )
    return activations, gradients


def _act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> dict[str, list]:
    """The alternating part of 1F1B: first with the rank behind, then with the one before."""
    rank, last = mesh.world.rank, mesh.world.size - 1
    found: dict[str, list] = {"got": [], "like": []}
    for activation, gradient in zip(*inputs, strict=True):
        for mine, like, peer in (
            (activation, torch.full(GRADIENT, -7.0, dtype=DTYPE), rank + 1),
            (gradient, torch.full(ACTIVATION, -7.0, dtype=DTYPE), rank - 1),
        ):
            if 0 <= peer <= last:
                time.sleep(LATE * (rank % 2))
                got = answers[0](mine, like, peer)
                found["got"].append(got.clone() if isinstance(got, Tensor) else got)
                found["like"].append(like)
    return found


class _Swap(NamedTuple):
    """One swap as a rank sees it: what it sends, what it is to receive, and the other rank."""

    mine: Tensor
    right: Tensor
    peer: int


def _swaps(seen: Seen, rank: int) -> Iterator[_Swap]:
    """The swaps of ``rank`` in order."""
    n = seen.trial.n
    every = [_inputs(seen.trial, other, seen.seed) for other in range(n)]
    for turn in range(seen.trial.size):
        if rank + 1 < n:
            yield _Swap(every[rank][0][turn], every[rank + 1][1][turn], rank + 1)
        if rank > 0:
            yield _Swap(every[rank][1][turn], every[rank - 1][0][turn], rank - 1)


def _received(seen: Seen) -> str:
    """Every swap gave what the peer sent."""
    for rank, value in enumerate(seen.values):
        for number, (got, (mine, right, peer)) in enumerate(
            zip(value["got"], _swaps(seen, rank), strict=True)
        ):
            if agrees(got, right):
                continue
            who = f"swap number {number + 1} of rank {rank}, with rank {peer}"
            if not isinstance(got, Tensor):
                return f"{who}, returned a {type(got).__name__}; a tensor is wanted"
            if agrees(got, mine):
                return f"{who}, returned what rank {rank} sent, not what rank {peer} sent"
            if got.shape != right.shape:
                shapes = f"shape {list(got.shape)}; {list(right.shape)} is right, as like has"
                return f"{who}, returned {shapes}"
            return (
                f"{who}, did not return what rank {peer} sent: wait for the receive before you "
                f"return its tensor ({_first(got, right)})"
            )
    return ""


def _first(got: Tensor, right: Tensor) -> str:
    return difference("values", [got], [right]).partition(": ")[2]


def _left_alone(seen: Seen) -> str:
    for rank, observed in enumerate(seen.ranks):
        given = _inputs(seen.trial, rank, seen.seed)
        for now, before in zip(observed.inputs, given, strict=True):
            if not all(map(torch.equal, now, before)):
                return "mine was written: the sender still needs what it sends"
        if any(bool((like != -7.0).any()) for like in observed.value["like"]):
            return (
                "like was written: it only shows shape and dtype, and in a pipeline it is often an "
                "activation that backward still needs; receive into a new tensor"
            )
    return ""


def _messages(seen: Seen) -> str:
    """In each swap one message out and one in, with the peer, of the bytes that there are."""
    for rank, observed in enumerate(seen.ranks):
        others = sorted({call.op for call in observed.calls} - {"send", "recv"})
        if others:
            return f"rank {rank} called {', '.join(others)}: two ranks swap, the others do not"
        swaps = list(_swaps(seen, rank))
        for op, tensors in (("send", [s.mine for s in swaps]), ("recv", [s.right for s in swaps])):
            wanted = [(s.peer, x.nbytes) for s, x in zip(swaps, tensors, strict=True)]
            made = [(call.peer, call.payload) for call in observed.calls if call.op == op]
            if made != wanted:
                return (
                    f"rank {rank} posted {len(made)} {op}s {_shown(made)}; wanted are "
                    f"{len(wanted)} {_shown(wanted)}: one a swap"
                )
    return unwaited(seen)


def _shown(messages: Sequence[tuple[int | None, int]]) -> str:
    """``(peer 1: 256 bytes, peer 3: 256 bytes)``, at most four messages."""
    text = ", ".join(f"peer {peer}: {size} bytes" for peer, size in messages[:4])
    return f"({text}{', ...' if len(messages) > 4 else ''})"


def _both_send(mine: Tensor, like: Tensor, peer: int) -> Tensor:
    got = torch.empty_like(like)
    dist.send(mine, peer)
    dist.recv(got, peer)
    return got


def _both_receive(mine: Tensor, like: Tensor, peer: int) -> Tensor:
    got = torch.empty_like(like)
    dist.recv(got, peer)
    dist.send(mine, peer)
    return got


def _batch(mine: Tensor, into: Tensor, peer: int) -> list[Any]:
    ops = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, into, peer)]
    return dist.batch_isend_irecv(ops)


def _without_waiting(mine: Tensor, like: Tensor, peer: int) -> Tensor:
    got = torch.zeros_like(like)
    _batch(mine, got, peer)
    return got


class _WaitsForTheReceive:
    """What arrives is right; when mine has left nobody knows. It holds what isend returned."""

    def __init__(self) -> None:
        self.begun: list[Any] = []

    def __call__(self, mine: Tensor, like: Tensor, peer: int) -> Tensor:
        self.begun.append(dist.isend(mine, peer))
        got = torch.empty_like(like)
        dist.recv(got, peer)
        time.sleep(2 * LATE)  # here it will have left
        return got


def _drops_the_handle(mine: Tensor, like: Tensor, peer: int) -> Tensor:
    dist.isend(mine, peer)
    got = torch.empty_like(like)
    dist.recv(got, peer)
    return got


def _into_like(mine: Tensor, like: Tensor, peer: int) -> Tensor:
    for work in _batch(mine, like, peer):
        work.wait()
    return like


def _of_default_dtype(mine: Tensor, like: Tensor, peer: int) -> Tensor:
    got = torch.empty(like.shape)
    for work in _batch(mine, got, peer):
        work.wait()
    return got


def _own(mine: Tensor, like: Tensor, peer: int) -> Tensor:
    for work in _batch(mine, torch.empty_like(like), peer):
        work.wait()
    return mine


def _twice(mine: Tensor, like: Tensor, peer: int) -> Tensor:
    for _ in range(2):
        got = torch.empty_like(like)
        for work in _batch(mine, got, peer):
            work.wait()
    return got


def _next_rank(mine: Tensor, like: Tensor, peer: int) -> Tensor:
    """As in a ring: right for two ranks, for four the wrong peer."""
    got = torch.empty_like(like)
    n, rank = dist.get_world_size(), dist.get_rank()
    to, source = (rank + 1) % n, (rank - 1) % n
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, to), dist.P2POp(dist.irecv, got, source)]
    ):
        work.wait()
    return got


def _gathers(mine: Tensor, like: Tensor, peer: int) -> Tensor:
    """A collective in the place of two messages."""
    rows = max(mine.shape[0], like.shape[0])
    padded = mine.new_zeros(rows, *mine.shape[1:])
    padded[: mine.shape[0]] = mine
    every = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(every, padded)
    return every[peer][: like.shape[0]].clone()


def _in_turn(mine: Tensor, like: Tensor, peer: int) -> Tensor:
    """The lower rank sends first, the higher one receives first."""
    got = torch.empty_like(like)
    if dist.get_rank() < peer:
        dist.send(mine, peer)
        dist.recv(got, peer)
    else:
        dist.recv(got, peer)
        dist.send(mine, peer)
    return got


def _send_in_background(mine: Tensor, like: Tensor, peer: int) -> Tensor:
    sending = dist.isend(mine, peer)
    got = like.new_empty(like.shape)
    dist.recv(got, peer)
    if sending is not None:
        sending.wait()
    return got


SWAP = Ranked(
    id="07-4",
    title="a swap that cannot deadlock, in raw torch",
    names=("swap",),
    hints=(
        "Follow two ranks that both call dist.send and then dist.recv. When does the first send "
        "return, and what would have to happen on the other rank before?",
        "Post the send and the receive without waiting, then wait for both. What the receive fills "
        "must be a tensor of its own.",
        "ops = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, got, peer)]; then "
        "work.wait() for every work in dist.batch_isend_irecv(ops).",
    ),
    wrong=(
        Wrong(_both_send, words="every rank waits in send"),
        Wrong(_both_receive, words="either no rank has sent one"),
        Wrong(_drops_the_handle, words="or the handle that isend returned was dropped"),
        Wrong(_without_waiting, words="wait for the receive before you return"),
        Wrong(_WaitsForTheReceive(), words="started 4 messages and waited for 2 of them"),
        Wrong(_into_like, words="like was written"),
        Wrong(_of_default_dtype, words="compare calls, peers and shapes by rank"),
        Wrong(_own, words="returned what rank 0 sent, not what rank 1 sent"),
        Wrong(_twice, words="rank 0 posted 4 sends"),
        Wrong(_next_rank, words="compare calls, peers and shapes by rank"),
        Wrong(_gathers, words="a collective would wait for all four"),
        Wrong(lambda mine, like, peer: mine, words="returned what rank 0 sent"),
        Wrong(lambda mine, like, peer: like, words="did not return what rank 1 sent"),
        Wrong(lambda mine, like, peer: None, words="returned a NoneType"),
        Wrong(lambda mine, like, peer: dist.send(mine, peer), words="every rank waits in send"),
    ),
    right=(_in_turn, _send_in_background),
    stub=lambda mine, like, peer: None,
    trials=TRIALS,
    inputs=_inputs,
    act=_act,
    looks=(
        RankCase("outputs", "two ranks", TWO, _received),
        RankCase("outputs", "four ranks in a row", FOUR, _received),
        RankCase("outputs", "mine and like are left as they are", FOUR, _left_alone, later=True),
        RankCase("wire", "messages, peers and bytes", FOUR, _messages),
    ),
)
