"""13-4: attention of a new token on a cache whose rows are on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import comm
from course_lib.grading.compare import difference
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.ranked import RankCase, Ranked, Seen, Trial
from course_lib.inference import context
from course_lib.mesh import Axis, Mesh

TWO, FOUR, LARGE, ONE = range(4)
TRIALS = (Trial(2, 5), Trial(4, 3), Trial(4, 6), Trial(1, 4))  # size: rows of rank 0
BATCH, HEADS, HEAD_DIM = 2, 3, 4
MOST = BATCH * HEADS * (HEAD_DIM + 2) * 4  # bytes: a part, its sum and its maximum
REFUSAL = "this is what you are asked to write"


@cache
def _parts(trial: Trial, seed: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """q_BHK, and keys and values by rank: rank r has r rows more than rank 0."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*rows: int) -> Tensor:
        return torch.randn(BATCH, *rows, HEADS, HEAD_DIM, generator=generator)

    spread = 100.0 if trial == TRIALS[LARGE] else 1.5  # scores in the hundreds: exp overflows
    rows = [trial.size + rank for rank in range(trial.n)]
    return drawn() * spread, [drawn(count) for count in rows], [drawn(count) for count in rows]


def _inputs(trial: Trial, rank: int, seed: int) -> tuple[Any, ...]:
    q, keys, values = _parts(trial, seed)
    return q.clone(), keys[rank].clone(), values[rank].clone()


def _act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> Any:
    return answers[0](*inputs, mesh.world)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """(B, H, T)"""
    return torch.einsum("bhk,bthk->bht", q, k) * HEAD_DIM**-0.5


def _mix(p: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bht,bthk->bhk", p, v)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _mix(_scores(q, k).softmax(-1), v)


def _outputs(seen: Seen) -> str:
    q, keys, values = _parts(seen.trial, seen.seed)
    k, v = torch.cat(keys, 1), torch.cat(values, 1)
    wanted, n, got = _attend(q, k, v), seen.trial.n, seen.values
    says = difference("outputs", got, [wanted] * n)
    if not says or n == 1:
        return says
    parts = [_attend(q, *rows) for rows in zip(keys, values, strict=True)]
    unscaled = _mix((_scores(q, k) * HEAD_DIM**0.5).softmax(-1), v)
    for mistaken, message in (
        (parts, "each rank has attention on its own rows alone"),
        ([torch.stack(parts).sum(0)] * n, "the parts are added as if each had the whole weight"),
        (
            [torch.stack(parts).mean(0)] * n,
            "the parts are averaged: a part counts by the sum of its exponentials",
        ),
        ([unscaled] * n, "scores are divided by the root of head_dim"),
    ):
        if not difference("outputs", got, mistaken):
            return f"{message} ({says})"
    broken = [isinstance(one, Tensor) and not bool(one.isfinite().all()) for one in got]
    if any(broken):
        return (
            "exp overflowed: take the maximum, or the log-sum-exp, out of the scores first "
            f"({says})"
        )
    return says


def _little(seen: Seen) -> str:
    for rank, observed in enumerate(seen.ranks):
        sent = sum(call.payload for call in observed.calls)
        made = ", ".join(f"{call.op} of {call.payload} bytes" for call in observed.calls) or "none"
        if sent > MOST:
            return (
                f"rank {rank} gave {sent} bytes to the network ({made}); a part of attention and "
                f"its weight are at most {MOST}: the rows of the cache stay where they are"
            )
    return ""


def _left_alone(seen: Seen) -> str:
    for rank, observed in enumerate(seen.ranks):
        wanted = _inputs(seen.trial, rank, seen.seed)
        if not all(map(torch.equal, observed.inputs, wanted)):
            return f"rank {rank} wrote into q, keys or values"
    return ""


def _right(q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> Tensor:
    scores = _scores(q, k)
    lse = scores.logsumexp(-1, keepdim=True)
    part = torch.cat((_mix((scores - lse).exp(), v), lse), -1)
    parts = comm.all_gather(part[None], axis)
    return (parts[..., :-1] * parts[..., -1:].softmax(0)).sum(0)


def _right_by_reductions(q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> Tensor:
    """The maximum of all first; then numerators and denominators are sums."""
    scores = _scores(q, k)
    top = scores.amax(-1, keepdim=True)
    dist.all_reduce(top, op=dist.ReduceOp.MAX)
    p = (scores - top).exp()
    both = torch.cat((_mix(p, v), p.sum(-1, keepdim=True)), -1).contiguous()
    dist.all_reduce(both)
    return both[..., :-1] / both[..., -1:]


def _joined(q: Tensor, k: Tensor, v: Tensor, axis: Axis, *, mistake: str) -> Tensor:
    own = _attend(q, k, v)
    parts = comm.all_gather(own[None], axis)
    return parts.sum(0) if mistake == "sum" else parts.mean(0)


def _by_rows(q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> Tensor:
    """Parts weighted by how many rows they have."""
    rows = torch.full((BATCH, HEADS, 1), float(k.shape[1]))
    part = torch.cat((_attend(q, k, v) * rows, rows), -1)
    total = comm.all_reduce(part, axis)
    return total[..., :-1] / total[..., -1:]


def _without_maximum(q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> Tensor:
    p = _scores(q, k).exp()
    total = comm.all_reduce(torch.cat((_mix(p, v), p.sum(-1, keepdim=True)), -1), axis)
    return total[..., :-1] / total[..., -1:]


def _own_maximum(q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> Tensor:
    """Each rank takes out its own maximum and forgets that they differ."""
    scores = _scores(q, k)
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    total = comm.all_reduce(torch.cat((_mix(p, v), p.sum(-1, keepdim=True)), -1), axis)
    return total[..., :-1] / total[..., -1:]


def _moves_the_cache(q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> Tensor:
    """Gathers keys and values, padded to the longest."""
    rows = int(comm.all_reduce_max(torch.tensor([k.shape[1]]), axis))
    missing = rows - k.shape[1]
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, missing)) for x in (k, v))
    seen = torch.ones(BATCH, rows)
    seen[:, rows - missing :] = 0
    k, v, seen = (comm.all_gather(x, axis, dim=1) for x in (k, v, seen))
    return _mix(_scores(q, k).masked_fill(seen[:, None] == 0, -torch.inf).softmax(-1), v)


def _without_root(q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> Tensor:
    return _right(q * HEAD_DIM**0.5, k, v, axis)


def _in_place(q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> Tensor:
    return q.copy_(_right(q, k, v, axis))


def _by_library(q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> Tensor:
    seen = torch.ones(BATCH, k.shape[1], dtype=torch.bool)
    part = context.attend_part(q[:, None], k, v, seen)
    return context.join_parts(comm.all_gather(part[None], axis))[:, 0]


JOIN = Ranked(
    id="13-4",
    title="a cache in parts",
    names=("attend",),
    hints=(
        "Softmax is a quotient of two sums over all rows. What does each rank's own rows add to "
        "both, and how do you keep exp from overflowing?",
        "Attention on the own rows, and the log-sum-exp of their scores; all ranks gather both. A "
        "part's share is exp(its lse - lse of all).",
        "lse = scores.logsumexp(-1, keepdim=True); out = (scores - lse).exp() times v; gather "
        "torch.cat((out, lse), -1)[None]; sum of out * lse.softmax(0) over dim 0.",
    ),
    wrong=(
        Wrong(lambda q, k, v, axis: None, words="from rank 0, got a NoneType"),
        Wrong(lambda q, k, v, axis: _attend(q, k, v), words="on its own rows alone"),
        Wrong(lambda q, k, v, axis: _joined(q, k, v, axis, mistake="sum"), words="whole weight"),
        Wrong(lambda q, k, v, axis: _joined(q, k, v, axis, mistake="mean"), words="averaged"),
        Wrong(_by_rows, words="outputs are wrong on every rank"),
        Wrong(_without_maximum, words="exp overflowed"),
        Wrong(_own_maximum, words="outputs are wrong on every rank"),
        Wrong(_without_root, words="root of head_dim"),
        Wrong(_moves_the_cache, words="stay where they are"),
        Wrong(_in_place, words="wrote into q"),
        Wrong(_by_library, words=REFUSAL),
    ),
    right=(_right, _right_by_reductions),
    stub=lambda q, k, v, axis: None,
    trials=TRIALS,
    inputs=_inputs,
    act=_act,
    looks=(
        RankCase("outputs", "two ranks", TWO, _outputs),
        RankCase("outputs", "four ranks", FOUR, _outputs),
        RankCase("outputs", "scores in the hundreds", LARGE, _outputs),
        RankCase("outputs", "one rank", ONE, _outputs),
        RankCase("outputs", "q, keys and values are left alone", FOUR, _left_alone, later=True),
        RankCase("wire", "no row of the cache travels", LARGE, _little),
    ),
    refused=(
        "course_lib.inference.context:attend_part",
        "course_lib.inference.context:join_parts",
    ),
)
