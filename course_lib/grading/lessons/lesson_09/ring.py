"""09-4: ring attention forward: the next block travels while this one is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import comm, cp
from course_lib.cp.blockwise import PLAIN, merge
from course_lib.grading.compare import difference
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.ranked import RankCase, Ranked, Seen, Trial
from course_lib.grading.wire import WireCalls
from course_lib.mesh import Axis, Mesh
from course_lib.model import causal_attention

PASSES_ON = "A rank whose queries need no more blocks must still pass on those that others wait for"
TWO, FOUR, THREE, ONE = range(4)
TRIALS = (  # size: positions of a rank
    Trial(2, 3, PASSES_ON),
    Trial(4, 2, PASSES_ON),
    Trial(3, 4, PASSES_ON),
    Trial(1, 3),
)
BATCH, HEADS, KV_HEADS, HEAD = 2, 4, 2, 8
REFUSAL = "this is what you are asked to write"
Attend = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]


class Block(NamedTuple):
    """What one rank had done when it asked for a block: bytes sent, messages waited for."""

    causal: bool
    sent: int
    landed: int


def _whole(trial: Trial, seed: int) -> list[Tensor]:
    """q, k and v of all positions."""
    generator = torch.Generator().manual_seed(seed)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    rows = trial.n * trial.size
    return [torch.randn(BATCH, rows, each, HEAD, generator=generator) for each in heads]


def _inputs(trial: Trial, rank: int, seed: int) -> tuple[Tensor, ...]:
    return tuple(x.chunk(trial.n, 1)[rank].clone() for x in _whole(trial, seed))


def _act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> Any:
    """The result, and what stood when each block was asked for."""
    blocks: list[Block] = []
    with WireCalls() as wire:

        def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
            sent = sum(call.payload for call in wire.calls if call.op == "send")
            landed = sum(span.payload for span in mesh.trace.spans if span.op == "recv")
            blocks.append(Block(causal, sent, landed))
            return PLAIN.forward(q, k, v, causal)

        value = answers[0](*inputs, mesh.world, attend)
    return value, blocks


def _wanted(seen: Seen) -> list[Tensor]:
    return list(causal_attention(*_whole(seen.trial, seen.seed)).chunk(seen.trial.n, 1))


def _outputs(seen: Seen) -> str:
    n, right = seen.trial.n, _wanted(seen)
    got = [value[0] for value in seen.values]
    says = difference("outputs", got, right)
    if not says or n == 1:
        return says
    for options, message in _MISTAKES:
        if not difference("", got, _imitated(seen, **options)):
            return f"{message} ({says})"
    return says


# What a wrong answer computes, and what to say of it.
_MISTAKES: tuple[tuple[dict[str, Any], str], ...] = (
    (
        {"turns": 1},
        "every rank has attended to its own block alone: those of earlier ranks are missing",
    ),
    (
        {"skips": False},
        "queries have seen keys of later ranks: a block from a rank above this one is passed on "
        "and not attended to",
    ),
    (
        {"causal": (True, True)},
        "the causal mask was used on blocks of earlier ranks too: all of their keys are visible",
    ),
    (
        {"causal": (False, False)},
        "the own block wants the causal mask: a query sees no key behind it",
    ),
    ({"adds": "sum"}, "the blocks' outputs are summed: weigh them by their log-sum-exp, as merge"),
    ({"adds": "last"}, "only the last block is in the result: merge each into what is there"),
    (
        {"late": 1},
        "blocks are taken for those of the wrong rank: in turn t rank r has that of rank (r - t) "
        "mod n",
    ),
)


def _imitated(seen: Seen, **options: Any) -> list[Tensor]:
    """The result of every rank with a mistake, computed here."""
    pieces = [x.chunk(seen.trial.n, 1) for x in _whole(seen.trial, seen.seed)]
    q, k, v = pieces
    n = seen.trial.n
    return [
        _over_blocks(
            q[rank],
            [(k[(rank - turn) % n], v[(rank - turn) % n]) for turn in range(n)],
            rank,
            PLAIN.forward,
            **options,
        )
        for rank in range(n)
    ]


def _over_blocks(
    q: Tensor,
    blocks: Any,
    rank: int,
    attend: Attend,
    *,
    n: int | None = None,
    turns: int | None = None,
    skips: bool = True,
    causal: tuple[bool, bool] = (True, False),
    adds: str = "merge",
    late: int = 0,
) -> Tensor:
    """Attention on ``blocks`` (k, v) in the order of the ring; right, or with a mistake.

    ``causal`` is asked of the own block, and of others.
    """
    n = n or len(blocks)
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], float("-inf"))
    for turn, (k, v) in enumerate(blocks):
        whose = (rank - turn - late) % n
        if (skips and whose > rank) or (turns is not None and turn >= turns):
            continue
        found = attend(q, k, v, causal[0] if whose == rank else causal[1])
        if adds == "merge":
            merge(out, lse, *found)
        elif adds == "sum":
            out += found[0]
        else:
            out = found[0]
    return out


def _block_bytes(seen: Seen) -> int:
    _, k, v = _inputs(seen.trial, 0, seen.seed)
    return k.nbytes + v.nbytes


def _messages(seen: Seen) -> str:
    """n-1 turns, all to one neighbour, and K and V of one rank in each."""
    n, block = seen.trial.n, _block_bytes(seen)
    for rank, observed in enumerate(seen.ranks):
        if others := sorted({call.op for call in observed.calls} - {"send", "recv"}):
            return f"rank {rank} called {', '.join(others)}: a ring is made of messages"
        sends = [call for call in observed.calls if call.op == "send"]
        peers = {call.peer for call in sends}
        if peers != {(rank + 1) % n}:
            named = ", ".join(map(str, sorted(peer for peer in peers if peer is not None)))
            return f"rank {rank} sent to {named or 'nobody'}; all goes to the next rank"
        sent = sum(call.payload for call in sends)
        if sent != (n - 1) * block:
            return (
                f"rank {rank} sent {sent:,} bytes; n - 1 turns with K and V of one rank are "
                f"{(n - 1) * block:,}"
            )
    return ""


def _work(seen: Seen) -> str:
    """Rank r attends to r + 1 blocks."""
    for rank, value in enumerate(seen.values):
        if len(value[1]) != rank + 1:
            return (
                f"rank {rank} called attend {len(value[1])} times; it sees {rank + 1} blocks, its "
                "own and those of earlier ranks"
            )
    return ""


def _ahead(seen: Seen) -> str:
    """When block t is computed, t + 1 turns were begun (n - 1 at most) and t waited for."""
    n, block = seen.trial.n, _block_bytes(seen)
    for rank, value in enumerate(seen.values):
        for turn, at in enumerate(value[1]):
            begun, landed = at.sent // block, at.landed // block
            if begun < min(turn + 1, n - 1):
                return (
                    f"rank {rank}, turn {turn}: nothing travels while the block is computed; "
                    "start the exchange before attend, wait for it after"
                )
            if begun > turn + 1:
                return (
                    f"rank {rank}, turn {turn}: {begun} exchanges were begun already: blocks pile "
                    "up, where a ring holds three, its own, one in hand and one that arrives"
                )
            if landed > turn:
                return (
                    f"rank {rank}, turn {turn}: the next block was waited for before this one was "
                    "computed: start the exchange, call attend, and only then wait"
                )
    return ""


def _left_alone(seen: Seen) -> str:
    for rank, observed in enumerate(seen.ranks):
        given = _inputs(seen.trial, rank, seen.seed)
        for name, now, before in zip("qkv", observed.inputs, given, strict=True):
            if not torch.equal(now, before):
                return f"rank {rank} wrote into {name}: it was given to be read"
    return ""


# --- answers -------------------------------------------------------------------------------------


def _turns(k: Tensor, v: Tensor, axis: Axis, *, when: str = "beside") -> Any:
    """The blocks of all ranks; the next one travels ``beside`` the caller's work, or is fetched
    ``before`` or ``after`` it."""
    block = torch.stack((k, v))
    for turn in range(axis.size):
        travelling, last = None, turn + 1 == axis.size
        if not last and when != "after":
            travelling = comm.start_exchange(axis, [(block, axis.next)], [(block, axis.previous)])
            if when == "before":
                travelling.wait()
        yield block[0], block[1]
        if not last and travelling is None:
            travelling = comm.start_exchange(axis, [(block, axis.next)], [(block, axis.previous)])
        if travelling is not None:
            block = travelling.wait()[0]


def _ring(q: Tensor, k: Tensor, v: Tensor, axis: Axis, attend: Attend, **mistake: Any) -> Tensor:
    when = mistake.pop("when", "beside")
    blocks = _turns(k, v, axis, when=when)
    return _over_blocks(q, blocks, axis.rank, attend, n=axis.size, **mistake)


def _but(**mistake: Any) -> Answer:
    return lambda q, k, v, axis, attend: _ring(q, k, v, axis, attend, **mistake)


def _right_raw(q: Tensor, k: Tensor, v: Tensor, axis: Axis, attend: Attend) -> Tensor:
    """K and V as two messages of raw torch; merged with a softmax over what was found."""
    found = []
    for turn in range(axis.size):
        works, arriving = [], [torch.empty_like(k), torch.empty_like(v)]
        if turn + 1 < axis.size:
            operations = [dist.P2POp(dist.isend, x, axis.next) for x in (k, v)]
            operations += [dist.P2POp(dist.irecv, x, axis.previous) for x in arriving]
            works = dist.batch_isend_irecv(operations)
        if turn <= axis.rank:
            found.append(attend(q, k, v, turn == 0))
        for work in works:
            work.wait()
        k, v = arriving
    outs, lses = (torch.stack(each) for each in zip(*found, strict=True))
    return (outs * lses.softmax(0)[..., None]).sum(0)


def _stops_early(q: Tensor, k: Tensor, v: Tensor, axis: Axis, attend: Attend) -> Tensor:
    """Leaves the ring when no later block is of use to it."""
    block = torch.stack((k, v))
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], float("-inf"))
    for turn in range(axis.rank + 1):
        merge(out, lse, *attend(q, block[0], block[1], turn == 0))
        if turn < axis.rank:
            block = comm.exchange(block, axis, axis.next, axis.previous)
    return out


def _gathers(q: Tensor, k: Tensor, v: Tensor, axis: Axis, attend: Attend) -> Tensor:
    everyones = comm.all_gather(torch.stack((k, v))[None], axis)
    blocks = [everyones[(axis.rank - turn) % axis.size] for turn in range(axis.size)]
    return _over_blocks(q, [(each[0], each[1]) for each in blocks], axis.rank, attend)


def _all_first(q: Tensor, k: Tensor, v: Tensor, axis: Axis, attend: Attend) -> Tensor:
    """The ring goes round before anything is computed."""
    return _over_blocks(q, list(_turns(k, v, axis)), axis.rank, attend)


def _passes_queries(q: Tensor, k: Tensor, v: Tensor, axis: Axis, attend: Attend) -> Tensor:
    """Sends q along with K and V."""
    block = torch.stack((k, v))
    luggage = q.clone()
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], float("-inf"))
    for turn in range(axis.size):
        last, travelling = turn + 1 == axis.size, None
        if not last:
            sends = [(block, axis.next), (luggage, axis.next)]
            receives = [(block, axis.previous), (luggage, axis.previous)]
            travelling = comm.start_exchange(axis, sends, receives)
        if turn <= axis.rank:
            merge(out, lse, *attend(q, block[0], block[1], turn == 0))
        if travelling is not None:
            block, luggage = travelling.wait()
    return out


def _backwards(q: Tensor, k: Tensor, v: Tensor, axis: Axis, attend: Attend) -> Tensor:
    """Sends to the previous rank, and reckons as if to the next."""
    block = torch.stack((k, v))
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], float("-inf"))
    for turn in range(axis.size):
        travelling = None
        if turn + 1 < axis.size:
            travelling = comm.start_exchange(axis, [(block, axis.previous)], [(block, axis.next)])
        if turn <= axis.rank:
            merge(out, lse, *attend(q, block[0], block[1], turn == 0))
        if travelling is not None:
            block = travelling.wait()[0]
    return out


def _send_first(q: Tensor, k: Tensor, v: Tensor, axis: Axis, attend: Attend) -> Tensor:
    block = torch.stack((k, v))
    for _ in range(axis.size - 1):
        comm.send(block, axis, axis.next)
        block = comm.recv(block, axis, axis.previous)
    return attend(q, block[0], block[1], True)[0]


def _in_place(q: Tensor, k: Tensor, v: Tensor, axis: Axis, attend: Attend) -> Tensor:
    return q.copy_(_ring(q, k, v, axis, attend))


RING = Ranked(
    id="09-4",
    title="ring attention forward",
    names=("ring_attention",),
    hints=(
        "n turns. Of whom is the block in hand in turn t? Three cases: your own, one of an earlier "
        "rank, one of a later rank.",
        "In each turn but the last: start the exchange, attend and merge if the block is visible, "
        "then wait. Own block: causal. Earlier rank: all of it. Later rank: only pass it on.",
        "block = torch.stack((k, v)); for turn in range(n): travelling = comm.start_exchange(axis, "
        "[(block, axis.next)], [(block, axis.previous)]) but in the last turn; if turn <= "
        "axis.rank: merge(out, lse, *attend(q, *block, turn == 0)); block = travelling.wait()[0].",
    ),
    wrong=(
        Wrong(lambda q, k, v, axis, attend: None, words="from rank 0, got a NoneType"),
        Wrong(
            lambda q, k, v, axis, attend: attend(q, k, v, True)[0],
            words="every rank has attended to its own block alone",
        ),
        Wrong(_but(skips=False), words="queries have seen keys of later ranks"),
        Wrong(_but(causal=(True, True)), words="the causal mask was used on blocks of earlier"),
        Wrong(_but(causal=(False, False)), words="the own block wants the causal mask"),
        Wrong(_but(adds="sum"), words="weigh them by their log-sum-exp"),
        Wrong(_but(adds="last"), words="only the last block is in the result"),
        Wrong(_but(late=1), words="blocks are taken for those of the wrong rank"),
        Wrong(_backwards, words="outputs are wrong"),
        Wrong(_stops_early, words="must still pass on those that others wait for"),
        Wrong(_send_first, words="every rank waits in send"),
        Wrong(_gathers, words="called all_gather: a ring is made of messages"),
        Wrong(_passes_queries, words="n - 1 turns with K and V of one rank are"),
        Wrong(_but(when="before"), words="the next block was waited for before"),
        Wrong(_but(when="after"), words="nothing travels while the block is computed"),
        Wrong(_all_first, words="blocks pile up"),
        Wrong(_in_place, words="wrote into q"),
        Wrong(
            lambda q, k, v, axis, attend: cp.ring_attention(q, k, v, axis, cp.CONTIGUOUS),
            words=REFUSAL,
        ),
        Wrong(
            lambda q, k, v, axis, attend: _over_blocks(
                q,
                [(block[0], block[1]) for _, block in comm.ring(torch.stack((k, v)), axis)],
                axis.rank,
                attend,
            ),
            words=REFUSAL,
        ),
    ),
    right=(_ring, _right_raw),
    stub=lambda q, k, v, axis, attend: None,
    trials=TRIALS,
    inputs=_inputs,
    act=_act,
    looks=(
        RankCase("outputs", "two ranks", TWO, _outputs),
        RankCase("outputs", "four ranks", FOUR, _outputs),
        RankCase("outputs", "three ranks", THREE, _outputs),
        RankCase("outputs", "one rank", ONE, _outputs),
        RankCase("outputs", "what is given is left alone", FOUR, _left_alone, later=True),
        RankCase("wire", "one ring, K and V alone", FOUR, _messages),
        RankCase("wire", "blocks attended to", FOUR, _work),
        RankCase("wire", "the next block travels meanwhile", FOUR, _ahead),
    ),
    refused=(
        "course_lib.cp.ring:RingAttention.forward",
        "course_lib.cp.gather:GatherAttention.forward",
        "course_lib.cp.blockwise:attend",
        "course_lib.comm.p2p:ring",
    ),
)
