"""Lesson 09: wrong and right answers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from attack import Attacks
from torch import Tensor

from course_lib import comm, cp
from course_lib.cp.blockwise import merge as merge_into
from course_lib.grading import registry
from course_lib.grading.exercise import Answer, Wrong
from course_lib.mesh import Axis, make_mesh

REFUSAL = "this is what you are asked to write"
Attend = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
Pair = tuple[Tensor, Tensor]


def _table(**entries: Any) -> dict[str, Any]:
    return {**registry.find("09-1").wanted, **entries}  # type: ignore[attr-defined]


# --- 09-2
def _positions(rank: int, n: int, chunk: int) -> list[int]:
    late = 2 * n - 1 - rank
    return [*range(rank * chunk, (rank + 1) * chunk), *range(late * chunk, (late + 1) * chunk)]


def _by_bits(rank: int, n: int, chunk: int) -> list[int]:
    """Right where n is a power of two."""
    late = rank ^ (2 * n - 1)
    return [*range(rank * chunk, (rank + 1) * chunk), *range(late * chunk, (late + 1) * chunk)]


def _chunk_of_two(rank: int, n: int, chunk: int) -> list[int]:
    last = 2 * n * chunk - rank * chunk
    first = rank * chunk
    return sorted({first, first + chunk - 1, last - chunk, last - 1})


def _by_filter(rank: int, n: int, chunk: int) -> Tensor:
    place = torch.arange(2 * n * chunk)
    number = place // chunk
    return place[torch.minimum(number, 2 * n - 1 - number) == rank]


# --- 09-3
def _merge(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> Pair:
    weight = torch.sigmoid(lse_2 - lse_1)[:, None]
    return out_1 + (out_2 - out_1) * weight, torch.logaddexp(lse_1, lse_2)


def _merge_in_place(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> Pair:
    weight, lse = torch.sigmoid(lse_2 - lse_1)[:, None], torch.logaddexp(lse_1, lse_2)
    return out_1.add_((out_2 - out_1) * weight), lse


def _merge_in_float32(*given: Tensor) -> Pair:
    out, lse = _merge(*(x.float() for x in given))
    return out, lse.to(given[0].dtype)


def _drops_the_smaller(apart: float) -> Answer:
    """Takes one block alone where the other one's share is small."""

    def merge(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> Pair:
        gap, lse = lse_2 - lse_1, torch.logaddexp(lse_1, lse_2)
        lse = torch.where(gap.abs() > apart, torch.maximum(lse_1, lse_2), lse)
        weight = torch.sigmoid(torch.where(gap.abs() > apart, gap.sign() * torch.inf, gap))
        return out_1 + weight[:, None] * (out_2 - out_1), lse

    return merge


def _by_library(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> Pair:
    out, lse = out_1.clone(), lse_1.clone()
    merge_into(out, lse, out_2, lse_2)
    return out, lse


def _by_softmax(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> list[Tensor]:
    both = torch.stack((lse_1, lse_2))
    weights = both.softmax(0)[..., None]
    return [(torch.stack((out_1, out_2)) * weights).sum(0), both.logsumexp(0)]


def _by_maximum(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> Pair:
    """The usual online softmax: both sums relative to the larger exponent."""
    top = torch.maximum(lse_1, lse_2)
    sum_1, sum_2 = (lse_1 - top).exp(), (lse_2 - top).exp()
    total = sum_1 + sum_2
    out = (sum_1[:, None] * out_1 + sum_2[:, None] * out_2) / total[:, None]
    return out, top + total.log()


def _by_new_lse(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> Pair:
    lse = torch.logaddexp(lse_1, lse_2)
    weight_1, weight_2 = (lse_1 - lse).exp(), (lse_2 - lse).exp()
    return weight_1[:, None] * out_1 + weight_2[:, None] * out_2, lse


# --- 09-4
def _over_blocks(
    q: Tensor,
    blocks: Any,
    rank: int,
    attend: Attend,
    *,
    n: int | None = None,
    skips: bool = True,
    causal: tuple[bool, bool] = (True, False),
    adds: str = "merge",
    late: int = 0,
) -> Tensor:
    """Attention on ``blocks`` (k, v) in the order of the ring; right, or with a mistake."""
    n = n or len(blocks)
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], float("-inf"))
    for turn, (k, v) in enumerate(blocks):
        source = (rank - turn - late) % n
        if skips and source > rank:
            continue
        found = attend(q, k, v, causal[0] if source == rank else causal[1])
        if adds == "merge":
            merge_into(out, lse, *found)
        elif adds == "sum":
            out += found[0]
        else:
            out = found[0]
    return out


def _turns(k: Tensor, v: Tensor, axis: Axis, *, when: str = "beside") -> Any:
    """The blocks of all ranks; the next one is sent ``beside`` the caller's work, ``before`` or
    ``after`` it."""
    block = torch.stack((k, v))
    for turn in range(axis.size):
        in_flight, last = None, turn + 1 == axis.size
        if not last and when != "after":
            in_flight = comm.start_exchange(axis, [(block, axis.next)], [(block, axis.previous)])
            if when == "before":
                in_flight.wait()
        yield block[0], block[1]
        if not last and in_flight is None:
            in_flight = comm.start_exchange(axis, [(block, axis.next)], [(block, axis.previous)])
        if in_flight is not None:
            block = in_flight.wait()[0]


def _ring(q: Tensor, k: Tensor, v: Tensor, axis: Axis, attend: Attend, **mistake: Any) -> Tensor:
    blocks = _turns(k, v, axis, when=mistake.pop("when", "beside"))
    return _over_blocks(q, blocks, axis.rank, attend, n=axis.size, **mistake)


def _but(**mistake: Any) -> Answer:
    return lambda q, k, v, axis, attend: _ring(q, k, v, axis, attend, **mistake)


def _by_messages(first: str = "attend", waits: str = "all", group: bool = True) -> Answer:
    """K and V as two messages of raw torch, merged with a softmax; right, or with a mistake."""

    def answer(q: Tensor, k: Tensor, v: Tensor, axis: Axis, attend: Attend) -> Tensor:
        k, v = k.contiguous(), v.contiguous()
        found = []
        to, source = (
            (axis.ranks[axis.next], axis.ranks[axis.previous])
            if group
            else (axis.next, axis.previous)
        )
        for turn in range(axis.size):
            sends: list[Any] = []
            receives: list[Any] = []
            arriving = [torch.empty_like(k), torch.empty_like(v)]
            if turn + 1 < axis.size:
                own = axis.group if group else None
                sends = [dist.isend(x, to, group=own) for x in (k, v)]
                receives = [dist.irecv(x, source, group=own) for x in arriving]
            waited = receives if waits == "receives" else [*sends, *receives]
            if first == "wait":
                for work in waited:
                    work.wait()
            if turn <= axis.rank:
                found.append(attend(q, k, v, turn == 0))
            for work in waited if first == "attend" else []:
                if waits == "polls":
                    work.is_completed()
                    time.sleep(0.02)
                else:
                    work.wait()
            k, v = arriving
        outs, lses = (torch.stack(each) for each in zip(*found, strict=True))
        return (outs * lses.softmax(0)[..., None]).sum(0)

    return answer


def _stops_early(q: Tensor, k: Tensor, v: Tensor, axis: Axis, attend: Attend) -> Tensor:
    """Leaves the ring when it needs no later block."""
    block = torch.stack((k, v))
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], float("-inf"))
    for turn in range(axis.rank + 1):
        merge_into(out, lse, *attend(q, block[0], block[1], turn == 0))
        if turn < axis.rank:
            block = comm.exchange(block, axis, axis.next, axis.previous)
    return out


def _gathers(q: Tensor, k: Tensor, v: Tensor, axis: Axis, attend: Attend) -> Tensor:
    gathered = comm.all_gather(torch.stack((k, v))[None], axis)
    blocks = [gathered[(axis.rank - turn) % axis.size] for turn in range(axis.size)]
    return _over_blocks(q, [(each[0], each[1]) for each in blocks], axis.rank, attend)


def _all_first(q: Tensor, k: Tensor, v: Tensor, axis: Axis, attend: Attend) -> Tensor:
    """Collects all blocks before it computes anything."""
    return _over_blocks(q, list(_turns(k, v, axis)), axis.rank, attend)


def _attends_to_all(q: Tensor, k: Tensor, v: Tensor, axis: Axis, attend: Attend) -> Tensor:
    """Computes blocks that its queries do not see, and drops the results."""

    def seen(turn: int, block: Any) -> Any:
        found = attend(q, *block, turn == 0)
        return found if turn <= axis.rank else (torch.zeros_like(q), found[1] * 0 - torch.inf)

    out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], float("-inf"))
    for turn, block in enumerate(_turns(k, v, axis)):
        merge_into(out, lse, *seen(turn, block))
    return out


def _passes_queries(q: Tensor, k: Tensor, v: Tensor, axis: Axis, attend: Attend) -> Tensor:
    """Sends q with K and V."""
    block = torch.stack((k, v))
    more = q.clone()
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], float("-inf"))
    for turn in range(axis.size):
        last, in_flight = turn + 1 == axis.size, None
        if not last:
            sends = [(block, axis.next), (more, axis.next)]
            receives = [(block, axis.previous), (more, axis.previous)]
            in_flight = comm.start_exchange(axis, sends, receives)
        if turn <= axis.rank:
            merge_into(out, lse, *attend(q, block[0], block[1], turn == 0))
        if in_flight is not None:
            block, more = in_flight.wait()
    return out


def _backwards(q: Tensor, k: Tensor, v: Tensor, axis: Axis, attend: Attend) -> Tensor:
    """Sends to the previous rank, and counts as if to the next."""
    block = torch.stack((k, v))
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], float("-inf"))
    for turn in range(axis.size):
        in_flight = None
        if turn + 1 < axis.size:
            in_flight = comm.start_exchange(axis, [(block, axis.previous)], [(block, axis.next)])
        if turn <= axis.rank:
            merge_into(out, lse, *attend(q, block[0], block[1], turn == 0))
        if in_flight is not None:
            block = in_flight.wait()[0]
    return out


def _send_first(q: Tensor, k: Tensor, v: Tensor, axis: Axis, attend: Attend) -> Tensor:
    block = torch.stack((k, v))
    for _ in range(axis.size - 1):
        comm.send(block, axis, axis.next)
        block = comm.recv(block, axis, axis.previous)
    return attend(q, block[0], block[1], True)[0]


def _in_place(q: Tensor, k: Tensor, v: Tensor, axis: Axis, attend: Attend) -> Tensor:
    return q.copy_(_ring(q, k, v, axis, attend))


def _blocks_into_k(q: Tensor, k: Tensor, v: Tensor, axis: Axis, attend: Attend) -> Tensor:
    """Stores the last block that arrived where its own was."""
    blocks = []
    for block in _turns(k, v, axis):
        blocks.append(block)
        if len(blocks) == 1:
            out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], float("-inf"))
        if len(blocks) <= axis.rank + 1:
            merge_into(out, lse, *attend(q, *block, len(blocks) == 1))
    k.copy_(blocks[-1][0])
    return out


class _Cached:
    """The block of the first call, used again in the second."""

    block: Tensor | None = None


def _cached(q: Tensor, k: Tensor, v: Tensor, axis: Axis, attend: Attend) -> Tensor:
    if _Cached.block is None or _Cached.block.shape[1:] != k.shape:
        _Cached.block = torch.stack((k, v))
    return _ring(q, _Cached.block[0], _Cached.block[1], axis, attend)


# --- 09-5
def _swap(x: Tensor, split: int, join: int, *, back: bool = False) -> Tensor:
    n = dist.get_world_size()
    pieces = torch.stack(x.chunk(n, split))
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces)
    parts = list(received)
    return torch.cat(parts[::-1] if back else parts, join)


def _to_heads(x: Tensor) -> Tensor:
    return _swap(x, 2, 1)


def _to_rows(x: Tensor) -> Tensor:
    return _swap(x, 1, 2)


def _lists_to_heads(x: Tensor) -> Tensor:
    """By messages, the own shard copied."""
    return torch.cat(_messages(x.chunk(dist.get_world_size(), 2)), 1)


def _lists_to_rows(x: Tensor) -> Tensor:
    return torch.cat(_messages(x.chunk(dist.get_world_size(), 1)), 2)


def _messages(pieces: Sequence[Tensor]) -> list[Tensor]:
    rank = dist.get_rank()
    leaving = [piece.contiguous() for piece in pieces]
    arriving = [torch.empty_like(piece) for piece in leaving]
    arriving[rank] = leaving[rank].clone()
    others = [other for other in range(len(leaving)) if other != rank]
    operations = [dist.P2POp(dist.isend, leaving[other], other) for other in others]
    operations += [dist.P2POp(dist.irecv, arriving[other], other) for other in others]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return arriving


def _permuted_to_heads(x: Tensor) -> Tensor:
    """With reshapes and permutations alone."""
    n = dist.get_world_size()
    batch, rows, heads, features = x.shape
    pieces = x.reshape(batch, rows, n, heads // n, features).permute(2, 0, 1, 3, 4).contiguous()
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces)
    return received.permute(1, 0, 2, 3, 4).reshape(batch, n * rows, heads // n, features)


def _permuted_to_rows(x: Tensor) -> Tensor:
    n = dist.get_world_size()
    batch, positions, heads, features = x.shape
    pieces = x.reshape(batch, n, positions // n, heads, features).transpose(0, 1).contiguous()
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces)
    rows = received.permute(1, 2, 0, 3, 4)
    return rows.reshape(batch, positions // n, n * heads, features)


def _async(wait: bool) -> Answer:
    def to_heads(x: Tensor) -> Tensor:
        pieces = torch.stack(x.chunk(dist.get_world_size(), 2))
        received = torch.empty_like(pieces)
        work = dist.all_to_all_single(received, pieces, async_op=True)
        if wait:
            work.wait()
        else:
            time.sleep(0.03)
        return torch.cat(list(received), 1)

    return to_heads


def _gathered(x: Tensor) -> list[Tensor]:
    every = [x.new_empty(x.shape) for _ in range(dist.get_world_size())]
    dist.all_gather(every, x.contiguous())
    return every


def _gathers_heads(x: Tensor) -> Tensor:
    n, rank = dist.get_world_size(), dist.get_rank()
    return torch.cat(_gathered(x), 1).chunk(n, 2)[rank]


def _gathers_rows(x: Tensor) -> Tensor:
    n, rank = dist.get_world_size(), dist.get_rank()
    return torch.cat(_gathered(x), 2).chunk(n, 1)[rank]


def _memory_as_it_is(x: Tensor) -> Tensor:
    n = dist.get_world_size()
    flat = x.contiguous().view(-1)
    received = torch.empty_like(flat)
    dist.all_to_all_single(received, flat)
    return received.view(x.shape[0], n * x.shape[1], x.shape[2] // n, x.shape[3])


def _not_joined(x: Tensor) -> Tensor:
    n = dist.get_world_size()
    pieces = torch.stack(x.chunk(n, 2))
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces)
    return received.view(x.shape[0], n * x.shape[1], x.shape[2] // n, x.shape[3])


def _every_nth(x: Tensor) -> Tensor:
    n = dist.get_world_size()
    pieces = torch.stack([x[:, :, rank::n] for rank in range(n)])
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces)
    return torch.cat(list(received), 1)


def _reversed_heads(x: Tensor) -> Tensor:
    pieces = torch.stack(x.chunk(dist.get_world_size(), 2)[::-1])
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces)
    return torch.cat(list(received), 1)


def _rows_in_stripes(x: Tensor) -> Tensor:
    """Back, with heads of the ranks in turn."""
    n = dist.get_world_size()
    pieces = torch.stack(x.chunk(n, 1))
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces)
    return torch.stack(list(received), 3).flatten(2, 3)


def _float32(x: Tensor) -> Tensor:
    """Receives into a buffer of the default dtype."""
    pieces = torch.stack(x.chunk(dist.get_world_size(), 2)).float()
    received = torch.empty(pieces.shape)
    dist.all_to_all_single(received, pieces)
    return torch.cat(list(received), 1)


def _twice(x: Tensor) -> Tensor:
    return _to_heads(_to_rows(_to_heads(x)))


def _overwritten(x: Tensor) -> Tensor:
    moved = _to_heads(x)
    x.zero_()
    return moved


def _strided(x: Tensor) -> Tensor:
    """Gives pieces that are not contiguous."""
    n = dist.get_world_size()
    pieces = x.unflatten(2, (n, -1)).movedim(2, 0)
    received = torch.empty(pieces.shape)
    dist.all_to_all_single(received, pieces)
    return torch.cat(list(received), 1)


def _by_comm(x: Tensor) -> Tensor:
    return comm.all_to_all(x, make_mesh().world, 2, 1)


ATTACKS = {
    "09-1": Attacks(
        wrong=(
            Wrong(_table(merged=None), words="'merged' is not filled in yet"),
            Wrong(_table(imbalance=1.71), words="it looks rounded"),
            Wrong(_table(bytes=300), words="'bytes'"),
        ),
        right=(
            _table(**{"zig-zag": (2, 3, 12, 13), "imbalance": 58 / 34}),
            _table(merged=3.0, bytes=[300.0, 600.0], blocks=np.array([1, 0, 3, 2])),
        ),
    ),
    "09-2": Attacks(
        wrong=(
            Wrong(lambda rank, n, chunk: rank, words="expected positions, such as"),
            Wrong(
                lambda rank, n, chunk: [place / 1 for place in _positions(rank, n, chunk)],
                words="expected whole numbers, got",
            ),
            Wrong(lambda rank, n, chunk: cp.ZIGZAG.chunks(rank, n), words=REFUSAL),
            Wrong(_by_bits, words="expected ["),
            Wrong(_chunk_of_two, words="expected ["),
            Wrong(
                lambda rank, n, chunk: torch.tensor(_positions(rank, n, chunk)).view(2, -1),
                words="expected whole numbers, got",
            ),
        ),
        right=(
            _by_filter,
            lambda *given: tuple(_positions(*given)),
            lambda *given: np.array(_positions(*given)),
            lambda rank, n, chunk: itertools.chain(
                range(rank * chunk, rank * chunk + chunk),
                range((2 * n - 1 - rank) * chunk, (2 * n - rank) * chunk),
            ),
        ),
    ),
    "09-3": Attacks(
        wrong=(
            Wrong(_by_library, words=REFUSAL),
            Wrong(lambda *given: _merge(*given)[0], words="expected "),
            Wrong(
                lambda *given: (_merge(*given)[0], _merge(*given)[1][:, None]),
                words="expected lse of shape [rows], got [",
            ),
            Wrong(lambda *given: None, words="expected a pair (out, lse), got None"),
            Wrong(_merge_in_place, words="changed its argument out_1"),
            Wrong(_merge_in_float32, words="(torch.float32)"),
            Wrong(_drops_the_smaller(9), words="expected out"),
            Wrong(_drops_the_smaller(20), words="expected out"),
        ),
        right=(_by_softmax, _by_maximum, _by_new_lse),
    ),
    "09-4": Attacks(
        wrong=(
            Wrong(lambda q, k, v, axis, attend: None, words="to be a tensor, got None"),
            Wrong(
                lambda q, k, v, axis, attend: attend(q, k, v, True)[0],
                words="each rank attended to its own block alone",
            ),
            Wrong(_but(skips=False), words="queries saw keys of later ranks"),
            Wrong(_but(causal=(True, True)), words="the causal mask was used on blocks of earlier"),
            Wrong(_but(causal=(False, False)), words="the own block needs the causal mask"),
            Wrong(_but(adds="sum"), words="weigh them by their log-sum-exp"),
            Wrong(_but(adds="last"), words="only the last block is in the result"),
            Wrong(_but(late=1), words="not of another rank"),
            Wrong(_backwards, words="blocks are sent to the previous rank"),
            Wrong(_stops_early, words="must still pass on the blocks that other ranks wait for"),
            Wrong(_send_first, words="every rank waits in send"),
            Wrong(_gathers, words="messages only, got all_gather"),
            Wrong(_passes_queries, words="bytes, K and V of all ranks but the next"),
            Wrong(_attends_to_all, words="expected rank 0 to call attend 1 times, got 2"),
            Wrong(_but(when="before"), words="the next block was waited for before"),
            Wrong(_but(when="after"), words="expected the next exchange to be started before"),
            Wrong(_all_first, words="the next block was waited for before"),
            Wrong(_in_place, words="the input q to be unchanged"),
            Wrong(_blocks_into_k, words="the input k to be unchanged"),
            Wrong(_cached, words="in a third call"),
            Wrong(_by_messages(first="wait"), words="the next block was waited for before"),
            Wrong(_by_messages(waits="receives"), words="never waited for it"),
            Wrong(_by_messages(waits="polls"), words="never waited for it"),
            Wrong(_by_messages(group=False), words="rank"),
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
        right=(_ring, _by_messages()),
    ),
    "09-5": Attacks(
        wrong=(
            Wrong((lambda x: None, _to_rows), words="to be a tensor, got None"),
            Wrong((lambda x: x, lambda x: x), words="no rank exchanged anything"),
            Wrong((_gathers_heads, _to_rows), words="to_heads: expected one all_to_all"),
            Wrong((_to_heads, _gathers_rows), words="to_rows: expected one all_to_all"),
            Wrong((_memory_as_it_is, _to_rows), words="all_to_all_single splits along dim 0"),
            Wrong((_not_joined, _to_rows), words="join the received shards along dim 1"),
            Wrong((_every_nth, _to_rows), words="rank r has every n-th head"),
            Wrong((_reversed_heads, _to_rows), words="the heads of rank n - 1 - r"),
            Wrong((lambda x: _swap(x, 2, 1, back=True), _to_rows), words="the order of the ranks"),
            Wrong((lambda x: _swap(x, 2, 2), _to_rows), words="got shape"),
            Wrong((_to_heads, _to_heads), words="expected outputs of to_rows of shape"),
            Wrong(
                (_to_heads, lambda x: _swap(x, 1, 2, back=True)),
                words="the heads are in the wrong order",
            ),
            Wrong((_to_heads, _rows_in_stripes), words="the heads are in the wrong order"),
            Wrong((_to_heads, lambda x: None), words="to be a tensor, got None"),
            Wrong((_twice, _to_rows), words="to_heads: expected one all_to_all"),
            Wrong((_overwritten, _to_rows), words="the answer wrote into it"),
            Wrong((_strided, _to_rows), words="contiguous"),
            Wrong((_float32, _to_rows), words="of torch.float64 on rank 0, got torch.float32"),
            Wrong((_async(wait=False), _to_rows), words="never waited for it"),
            Wrong((_by_comm, _to_rows), words=REFUSAL),
        ),
        right=(
            (_to_heads, _to_rows),
            (_permuted_to_heads, _permuted_to_rows),
            (_lists_to_heads, _lists_to_rows),
            (_async(wait=True), _to_rows),
        ),
    ),
}
