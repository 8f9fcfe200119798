"""Lesson 13: wrong and right answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from attack import Attacks
from torch import Tensor

from course_lib import comm
from course_lib.grading import registry
from course_lib.grading.exercise import Answer, Wrong
from course_lib.inference import choose, context
from course_lib.inference.scheduler import NOTHING
from course_lib.mesh import Axis, make_mesh

REFUSAL = "this is what you are asked to write"


def _table(**entries: Any) -> dict[str, Any]:
    return {**registry.find("13-1").wanted, **entries}  # type: ignore[attr-defined]


# --- 13-2
def _by_counting(
    memory: int, weights: int, layers: int, kv_heads: int, head_dim: int, room: int, tp: int
) -> int:
    position = 4 * layers * head_dim * (kv_heads // tp or 1)
    left, found = memory - weights / tp, 0
    while left >= (found + 1) * position * room:
        found += 1
    return found


def _quotient(
    memory: int, weights: int, layers: int, kv_heads: int, head_dim: int, room: int, tp: int
) -> float:
    return (memory - weights / tp) / (4 * layers * max(kv_heads / tp, 1) * head_dim * room)


def _looks_at_all_weights(
    memory: int, weights: int, layers: int, kv_heads: int, head_dim: int, room: int, tp: int
) -> int:
    """Refuses where only the shard of the weights fits."""
    found = _by_counting(memory, weights, layers, kv_heads, head_dim, room, tp)
    return found if memory > weights else 0


# --- 13-3
def _greedy(logits: Tensor, first: int, axis: Axis) -> Tensor:
    best_B, token_B = logits.max(1)
    best_nB = comm.all_gather(best_B[None], axis)
    token_nB = comm.all_gather((token_B + first)[None], axis)
    return token_nB.gather(0, best_nB.argmax(0, keepdim=True))[0]


def _by_reductions(logits: Tensor, first: int, axis: Axis) -> Tensor:
    """The largest logit, then the lowest of the tokens that have it."""
    best_B, token_B = logits.max(1)
    most_B = best_B.clone()
    if axis.size > 1:
        dist.all_reduce(most_B, op=dist.ReduceOp.MAX, group=axis.group)
    token_B = (token_B + first).masked_fill(best_B < most_B, 2**40)
    if axis.size > 1:
        dist.all_reduce(token_B, op=dist.ReduceOp.MIN, group=axis.group)
    return token_B


def _in_pairs(logits: Tensor, first: int, axis: Axis) -> Tensor:
    best_B, token_B = logits.max(1)
    winner, *others = comm.all_gather(
        torch.stack((best_B.double(), (token_B + first).double()), 1)[None], axis
    )
    for pair in others:
        winner = torch.where(pair[:, :1] > winner[:, :1], pair, winner)
    return winner[:, 1].long()


def _in_the_world(logits: Tensor, first: int, axis: Axis) -> Tensor:
    best_B, token_B = logits.max(1)
    n = dist.get_world_size()
    best, token = ([torch.empty_like(each) for _ in range(n)] for each in (best_B, token_B))
    dist.all_gather(best, best_B)
    dist.all_gather(token, token_B + first)
    return torch.stack(token).gather(0, torch.stack(best).argmax(0)[None])[0]


def _by_rank(
    logits: Tensor, first: int, axis: Axis, *, last: bool = False, rank: bool = False
) -> Any:
    """The last of equal ones wins, or the rank is returned."""
    best_B, token_B = logits.max(1)
    best_nB = comm.all_gather(best_B[None], axis)
    token_nB = comm.all_gather((token_B + first)[None], axis)
    winner_B = best_nB.argmax(0)
    if last:
        winner_B = axis.size - 1 - best_nB.flip(0).argmax(0)
    return winner_B if rank else token_nB.gather(0, winner_B[None])[0]


def _no_offset(logits: Tensor, first: int, axis: Axis) -> Tensor:
    best_B, token_B = logits.max(1)
    best_nB = comm.all_gather(best_B[None], axis)
    return comm.all_gather(token_B[None], axis).gather(0, best_nB.argmax(0, keepdim=True))[0]


def _rounds(dtype: torch.dtype) -> Answer:
    def greedy(logits: Tensor, first: int, axis: Axis) -> Tensor:
        best_B, token_B = logits.max(1)
        best_nB = comm.all_gather(best_B.to(dtype)[None], axis)
        token_nB = comm.all_gather((token_B + first)[None], axis)
        return token_nB.gather(0, best_nB.double().argmax(0, keepdim=True))[0]

    return greedy


def _pairs_of_logits(logits: Tensor, first: int, axis: Axis) -> Tensor:
    """A pair in the dtype of the logits: bfloat16 cannot store numbers of tokens."""
    best_B, token_B = logits.max(1)
    pair_B2 = torch.stack((best_B, (token_B + first).to(best_B.dtype)), 1)
    pair_nB2 = comm.all_gather(pair_B2[None], axis)
    return pair_nB2[..., 1].gather(0, pair_nB2[..., 0].argmax(0)[None])[0].long()


def _by_bits(logits: Tensor, first: int, axis: Axis) -> Tensor:
    """Orders floats by their bits, in which -0 is below 0."""
    best_B, token_B = logits.max(1)
    bits_nB = comm.all_gather(best_B[None], axis).double().view(torch.int64)
    order_nB = torch.where(bits_nB < 0, -(2**63) - bits_nB - 1, bits_nB)
    token_nB = comm.all_gather((token_B + first)[None], axis)
    return token_nB.gather(0, order_nB.argmax(0, keepdim=True))[0]


def _greedy_in_place(logits: Tensor, first: int, axis: Axis) -> Tensor:
    token = _greedy(logits, first, axis)
    logits.fill_(0)
    return token


def _never_waits(logits: Tensor, first: int, axis: Axis) -> Tensor:
    best_B, token_B = logits.max(1)
    handle = comm.start_all_gather(best_B[None], axis)
    token_nB = comm.all_gather((token_B + first)[None], axis)
    best_nB = comm.all_gather(best_B[None], axis)
    del handle
    return token_nB.gather(0, best_nB.argmax(0, keepdim=True))[0]


_CACHED: list[Tensor] = []


def _remembers(logits: Tensor, first: int, axis: Axis) -> Tensor:
    """Answers the second call with the first result."""
    if not _CACHED:
        _CACHED.append(_greedy(logits, first, axis))
    return _CACHED[0]


# --- 13-4
def _scores(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bhk,bthk->bht", q, k) * q.shape[-1] ** -0.5


def _mix(p: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bht,bthk->bhk", p, v)


def _alone(q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> Tensor:
    return _mix(_scores(q, k).softmax(-1), v)


def _attend(q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> Tensor:
    scores = _scores(q, k)
    lse = scores.logsumexp(-1, keepdim=True)
    part = torch.cat((_mix((scores - lse).exp(), v), lse), -1)
    parts = comm.all_gather(part[None], axis)
    return (parts[..., :-1] * parts[..., -1:].softmax(0)).sum(0)


def _attend_by_reductions(q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> Tensor:
    """The maximum of all first; then numerators and denominators are sums."""
    scores = _scores(q, k)
    top = comm.all_reduce_max(scores.amax(-1, keepdim=True), axis)
    p = (scores - top).exp()
    both = torch.cat((_mix(p, v), p.sum(-1, keepdim=True)), -1).contiguous()
    if axis.size > 1:
        dist.all_reduce(both, group=axis.group)
    return both[..., :-1] / both[..., -1:]


def _quotient_of_sums(p: Callable[[Tensor], Tensor]) -> Answer:
    """Numerators and denominators of ``p`` of the scores, summed."""

    def attend(q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> Tensor:
        weights = p(_scores(q, k))
        both = torch.cat((_mix(weights, v), weights.sum(-1, keepdim=True)), -1)
        total = comm.all_reduce(both, axis)
        return total[..., :-1] / total[..., -1:]

    return attend


def _weighted(weight: Callable[[Tensor], Tensor]) -> Answer:
    """Results of the ranks with a weight made from their scores."""

    def attend(q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> Tensor:
        weights = weight(_scores(q, k))[..., None]
        total = comm.all_reduce(torch.cat((_alone(q, k, v, axis) * weights, weights), -1), axis)
        return total[..., :-1] / total[..., -1:]

    return attend


def _sends_the_cache(q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> Tensor:
    """Gathers keys and values, padded to the longest."""
    rows = int(comm.all_reduce_max(torch.tensor([k.shape[1]]), axis))
    missing = rows - k.shape[1]
    k, v = (F.pad(x, (0, 0, 0, 0, 0, missing)) for x in (k, v))
    seen = torch.ones(len(q), rows)
    seen[:, rows - missing :] = 0
    k, v, seen = (comm.all_gather(x, axis, dim=1) for x in (k, v, seen))
    return _mix(_scores(q, k).masked_fill(seen[:, None] == 0, -torch.inf).softmax(-1), v)


def _by_the_library(q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> Tensor:
    seen = torch.ones(k.shape[:2], dtype=torch.bool)
    part = context.attend_part(q[:, None], k, v, seen)
    return context.join_parts(comm.all_gather(part[None], axis))[:, 0]


def _world_of(q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> Tensor:
    return _attend(q, k, v, make_mesh().world)


def _both_groups(q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> Tensor:
    """Right results, and a sum over the world beside them."""
    comm.all_reduce(torch.zeros(1), make_mesh().world)
    return _attend(q, k, v, axis)


# --- 13-5
def _loop(
    tokens: Tensor, embedding: Tensor, up: Tensor, down: Tensor, head: Tensor, new: int,
    *, mistake: str = "",
) -> Any:  # fmt: skip
    """Right, or with a ``mistake``."""
    n, rank = dist.get_world_size(), dist.get_rank()
    chosen = []
    for _ in range(new):
        x = embedding[tokens]
        h = x @ up.T
        part = (h if mistake == "no relu" else h.relu()) @ down.T
        if mistake == "x in the sum":
            part = part + x
        if "no sum" not in mistake:
            dist.all_reduce(part)
        y = part if mistake in ("x in the sum", "no x") else x + part
        z = y @ head.T
        if mistake == "gathers":
            every = [torch.empty_like(z) for _ in range(n)]
            dist.all_gather(every, z.contiguous())
            next_B = torch.cat(every, 1).argmax(1)
        else:
            next_B = _best(-z if mistake == "least" else z, rank, n, mistake)
        chosen.append(tokens if mistake == "shifted" else next_B)
        tokens = next_B
    if mistake == "last":
        return chosen[-1]
    return torch.stack(chosen, 0 if mistake == "by step" else 1)


def _best(z: Tensor, rank: int, n: int, mistake: str) -> Tensor:
    best, token = z.max(1)
    if mistake != "no offset":
        token = token + rank * z.shape[1]
    if "own best" in mistake:
        return token
    pair = torch.stack((best, token.to(best.dtype)), 1)
    pairs = [torch.empty_like(pair) for _ in range(n)]
    dist.all_gather(pairs, pair)
    stacked = torch.stack(pairs)
    return stacked[..., 1].gather(0, stacked[..., 0].argmax(0)[None])[0].long()


def _but(mistake: str) -> Answer:
    return lambda *given: _loop(*given, mistake=mistake)


def _loop_by_reductions(
    tokens: Tensor, embedding: Tensor, up: Tensor, down: Tensor, head: Tensor, new: int
) -> Tensor:
    """Two reductions choose; the table is filled in place."""
    out = tokens.new_empty(len(tokens), new)
    for step in range(new):
        y = torch.relu(embedding[tokens] @ up.mT) @ down.mT
        dist.all_reduce(y)
        z = (y + embedding[tokens]) @ head.mT
        most = z.amax(1)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        own = z.argmax(1) + dist.get_rank() * len(head)
        tokens = own.masked_fill(z.amax(1) < most, len(embedding))
        dist.all_reduce(tokens, op=dist.ReduceOp.MIN)
        out[:, step] = tokens
    return out


def _x_on_one_rank(
    tokens: Tensor, embedding: Tensor, up: Tensor, down: Tensor, head: Tensor, new: int
) -> Tensor:
    """x is added before the sum, on rank 0 alone: once."""
    rank, n, chosen = dist.get_rank(), dist.get_world_size(), []
    for _ in range(new):
        x = embedding[tokens]
        y = (x @ up.T).relu() @ down.T + x * (rank == 0)
        dist.all_reduce(y)
        tokens = _best(y @ head.T, rank, n, "")
        chosen.append(tokens)
    return torch.stack(chosen, 1)


def _sums_twice(
    tokens: Tensor, embedding: Tensor, up: Tensor, down: Tensor, head: Tensor, new: int
) -> Tensor:
    """A further sum per token."""
    chosen = _loop(tokens, embedding, up, down, head, new)
    dist.all_reduce(embedding[tokens].clone())
    return chosen


def _drops_the_handle(
    tokens: Tensor, embedding: Tensor, up: Tensor, down: Tensor, head: Tensor, new: int
) -> Tensor:
    """Never waits for the sums; a barrier lets them finish."""
    n, rank, chosen = dist.get_world_size(), dist.get_rank(), []
    for _ in range(new):
        x = embedding[tokens]
        part = (x @ up.T).relu() @ down.T
        dist.all_reduce(part, async_op=True)
        dist.barrier()
        tokens = _best((x + part) @ head.T, rank, n, "")
        chosen.append(tokens)
    return torch.stack(chosen, 1)


def _by_comm(
    tokens: Tensor, embedding: Tensor, up: Tensor, down: Tensor, head: Tensor, new: int
) -> Tensor:
    axis = make_mesh().world
    part = comm.all_reduce((embedding[tokens] @ up.T).relu() @ down.T, axis)
    return part.argmax(1)


def _loop_in_place(
    tokens: Tensor, embedding: Tensor, up: Tensor, down: Tensor, head: Tensor, new: int
) -> Tensor:
    chosen = _loop(tokens, embedding, up, down, head, new)
    tokens.copy_(chosen[:, -1])
    return chosen


ATTACKS = {
    "13-1": Attacks(
        wrong=(
            Wrong(_table(cache=None), words="'cache' is not filled in yet"),
            Wrong(_table(calls="6"), words="expected a number, not the text '6'"),
        ),
        right=(
            _table(busy=(0.25, 1.0, 1.0), ticks=(4.0, 4.0, np.int64(6))),
            _table(cache=2 * 2 * 3 * 100 * 2 * 8 * 2, **{"tp8 ms": 50 / 8 + 8}),
        ),
    ),
    "13-2": Attacks(
        wrong=(
            Wrong(_quotient, words="expected a whole number of requests"),
            Wrong(lambda *given: None, words="expected a whole number of requests, got None"),
            Wrong(_looks_at_all_weights, words="expected"),
            Wrong(lambda *given: min(_by_counting(*given), 64), words="expected"),
        ),
        right=(
            _by_counting,
            lambda *given: np.int64(_by_counting(*given)),
            lambda *given: max(_quotient(*given) // 1, 0),
        ),
    ),
    "13-3": Attacks(
        wrong=(
            Wrong(lambda logits, first, axis: None, words="to be a tensor, got None"),
            Wrong(lambda logits, first, axis: logits.argmax(1), words="numbered within the shard"),
            Wrong(
                lambda logits, first, axis: logits.argmax(1) + first, words="compare over the ranks"
            ),
            Wrong(_no_offset, words="add `first` before you send"),
            Wrong(
                lambda logits, first, axis: _by_rank(logits, first, axis, rank=True),
                words="the rank that has the token",
            ),
            Wrong(
                lambda logits, first, axis: _by_rank(logits, first, axis, last=True),
                words="the lowest token wins",
            ),
            Wrong(
                lambda logits, first, axis: _greedy(-logits, first, axis),
                words="the least likely token",
            ),
            Wrong(
                lambda logits, first, axis: comm.all_reduce(logits.argmax(1) + first, axis),
                words="the sum of the tokens",
            ),
            Wrong(
                lambda logits, first, axis: comm.all_gather(logits, axis, dim=1).argmax(1),
                words="logit",
            ),
            Wrong(
                lambda logits, first, axis: _greedy(logits, first, axis).float(),
                words="of torch.int64 on rank",
            ),
            Wrong(_rounds(torch.int32), words="nearly equal logits"),
            Wrong(_rounds(torch.bfloat16), words="nearly equal logits"),
            Wrong(_rounds(torch.float32), words="nearly equal logits"),
            Wrong(_pairs_of_logits, words="bfloat16 has 8 bits"),
            Wrong(_by_bits, words="outputs: wrong"),
            Wrong(
                lambda logits, first, axis: _greedy(logits, first, axis).squeeze(),
                words="expected outputs of shape [1]",
            ),
            Wrong(_in_the_world, words="expected its calls to use the group of the axis"),
            Wrong(_remembers, words="in the second call"),
            Wrong(_never_waits, words="never waited for it"),
            Wrong(_greedy_in_place, words="the answer wrote into it"),
            Wrong(
                lambda logits, first, axis: choose(
                    logits, NOTHING, None, axis, first, logits.shape[1] * axis.size
                ),
                words=REFUSAL,
            ),
        ),
        right=(_greedy, _by_reductions, _in_pairs),
    ),
    "13-4": Attacks(
        wrong=(
            Wrong(lambda q, k, v, axis: None, words="to be a tensor, got None"),
            Wrong(_alone, words="on its own rows alone"),
            Wrong(
                lambda q, k, v, axis: comm.all_reduce(_alone(q, k, v, axis), axis),
                words="the ranks are summed",
            ),
            Wrong(
                lambda q, k, v, axis: comm.all_reduce(_alone(q, k, v, axis), axis) / axis.size,
                words="the ranks are averaged",
            ),
            Wrong(
                _weighted(lambda scores: torch.full_like(scores[..., 0], scores.shape[-1])),
                words="weighted by their numbers of rows",
            ),
            Wrong(_quotient_of_sums(torch.exp), words="0/0 is nan"),
            Wrong(_weighted(lambda scores: scores.logsumexp(-1).exp()), words="0/0 is nan"),
            Wrong(
                _quotient_of_sums(lambda scores: (scores - scores.amax(-1, keepdim=True)).exp()),
                words="each rank subtracted its own maximum",
            ),
            Wrong(
                lambda q, k, v, axis: _attend(q * q.shape[-1] ** 0.5, k, v, axis),
                words="by the root of K",
            ),
            Wrong(
                lambda q, k, v, axis: _attend(q * 4**-0.5 * q.shape[-1] ** 0.5, k, v, axis),
                words="outputs",
            ),
            Wrong(
                lambda q, k, v, axis: _attend(q, k, v, axis).squeeze(1),
                words="expected outputs of shape",
            ),
            Wrong(_world_of, words="expected its calls to use the group of the axis"),
            Wrong(_both_groups, words="expected its calls to use the group of the axis"),
            Wrong(_sends_the_cache, words="the rows of the cache are not sent"),
            Wrong(
                lambda q, k, v, axis: q.copy_(_attend(q, k, v, axis)),
                words="the answer wrote into it",
            ),
            Wrong(
                lambda q, k, v, axis: _attend(q, k.mul_(1.5), v, axis),
                words="the answer wrote into it",
            ),
            Wrong(_by_the_library, words=REFUSAL),
        ),
        right=(_attend, _attend_by_reductions),
    ),
    "13-5": Attacks(
        wrong=(
            Wrong(lambda *given: None, words="to be a tensor, got None"),
            Wrong(_but("no sum"), words="the parts of y are not summed"),
            Wrong(_but("own best"), words="ranks took different tokens"),
            Wrong(_but("no sum, own best"), words="each rank took the best token of its own shard"),
            Wrong(_but("no offset"), words="numbered within the shard"),
            Wrong(_but("x in the sum"), words="every rank added x before the sum"),
            Wrong(_but("no x"), words="x is missing"),
            Wrong(_but("no relu"), words="relu is missing"),
            Wrong(_but("least"), words="the least likely token"),
            Wrong(_but("shifted"), words="return the new tokens only"),
            Wrong(_but("last"), words="the last token alone"),
            Wrong(_but("by step"), words="a row per request"),
            Wrong(lambda *given: _loop(*given).squeeze(0), words="expected outputs of shape [1,"),
            Wrong(_but("gathers"), words="do not gather the logits"),
            Wrong(_sums_twice, words="one sum of y per new token"),
            Wrong(_drops_the_handle, words="never waited for it"),
            Wrong(_loop_in_place, words="the answer wrote into it"),
            Wrong(_by_comm, words=REFUSAL),
        ),
        right=(_loop, _loop_by_reductions, _x_on_one_rank),
    ),
}
