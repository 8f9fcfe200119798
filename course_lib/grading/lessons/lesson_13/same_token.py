"""13-3: the likeliest token, the same on every rank of a cut vocabulary."""

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
from course_lib.inference import choose
from course_lib.inference.scheduler import NOTHING
from course_lib.mesh import Axis, Mesh

TWO, FOUR, TIES, ONE = range(4)
TRIALS = (
    Trial(2, 9),
    Trial(4, 9),
    Trial(4, 8),
    Trial(1, 9),
)  # size: tokens of the vocabulary a rank
REQUESTS = 12
MOST = 16  # bytes a request: a logit and a token number of up to 8 bytes each
REFUSAL = "this is what you are asked to write"


@cache
def _whole(trial: Trial, seed: int) -> Tensor:
    """All logits, (B, V); below zero too. In the trial of ties every maximum is there twice."""
    generator = torch.Generator().manual_seed(seed)
    logits_BV = torch.randn(REQUESTS, trial.n * trial.size, generator=generator) - 2.0
    # Every rank has the largest logit of some request, at a place that differs by request.
    for row in range(REQUESTS):
        own = row % trial.n * trial.size
        logits_BV[row, own + row % trial.size] = 3.0 + row
        if trial == TRIALS[TIES]:
            other = (row + 1) % trial.n * trial.size
            logits_BV[row, other + (row + 5) % trial.size] = 3.0 + row
    return logits_BV


def _inputs(trial: Trial, rank: int, seed: int) -> tuple[Any, ...]:
    """This rank's columns, and the number of the first of them."""
    first = rank * trial.size
    return _whole(trial, seed)[:, first : first + trial.size].clone(), first


def _act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> Any:
    logits, first = inputs
    return answers[0](logits, first, mesh.world)


def _tokens(seen: Seen) -> str:
    n, size, logits_BV = seen.trial.n, seen.trial.size, _whole(seen.trial, seen.seed)
    wanted, got = logits_BV.argmax(1), seen.values
    says = difference("tokens", got, [wanted] * n)
    if not says or n == 1:
        return says
    own = [part.argmax(1) for part in logits_BV.split(size, 1)]
    highest = torch.tensor(
        [int((row == row.max()).nonzero()[-1]) for row in logits_BV], dtype=torch.int64
    )
    for mistaken, message in (
        (own, "each rank took its own best, numbered within its own part"),
        (
            [token + rank * size for rank, token in enumerate(own)],
            "each rank took the best of its own part: compare over the ranks",
        ),
        ([wanted % size] * n, "the token is numbered within the part that it is in: add first"),
        ([wanted // size] * n, "this is the rank that has the token, not the token"),
        ([highest] * n, "of equal logits the lowest token wins"),
        ([logits_BV.argmin(1)] * n, "this is the least likely token"),
    ):
        if not difference("tokens", got, mistaken):
            return f"{message} ({says})"
    return says


def _little(seen: Seen) -> str:
    limit = MOST * REQUESTS
    for rank, observed in enumerate(seen.ranks):
        sent = sum(call.payload for call in observed.calls)
        made = ", ".join(f"{call.op} of {call.payload} bytes" for call in observed.calls) or "none"
        if not observed.calls:
            return f"rank {rank} made no call: it cannot know what the others have"
        if sent > limit:
            return (
                f"rank {rank} gave {sent} bytes to the network ({made}); a logit and a token for "
                f"each of {REQUESTS} requests are at most {limit}: do not gather the logits"
            )
    return ""


def _left_alone(seen: Seen) -> str:
    for rank, observed in enumerate(seen.ranks):
        if not torch.equal(observed.inputs[0], _inputs(seen.trial, rank, seen.seed)[0]):
            return f"rank {rank} wrote into the logits it was given"
    return ""


def _right(logits: Tensor, first: int, axis: Axis) -> Tensor:
    best_B, token_B = logits.max(1)
    best_nB = comm.all_gather(best_B[None], axis)
    token_nB = comm.all_gather((token_B + first)[None], axis)
    return token_nB.gather(0, best_nB.argmax(0, keepdim=True))[0]


def _right_by_reductions(logits: Tensor, first: int, axis: Axis) -> Tensor:
    """The largest logit, then the lowest of the tokens that have it."""
    best_B, token_B = logits.max(1)
    most_B = best_B.clone()
    dist.all_reduce(most_B, op=dist.ReduceOp.MAX)
    token_B = (token_B + first).masked_fill(best_B < most_B, 2**40)
    dist.all_reduce(token_B, op=dist.ReduceOp.MIN)
    return token_B


def _right_in_pairs(logits: Tensor, first: int, axis: Axis) -> Tensor:
    best_B, token_B = logits.max(1)
    pair_B2 = torch.stack((best_B, (token_B + first).float()), 1)
    pairs = [torch.empty_like(pair_B2) for _ in range(dist.get_world_size())]
    dist.all_gather(pairs, pair_B2)
    winner = pairs[0]
    for pair in pairs[1:]:
        winner = torch.where(pair[:, :1] > winner[:, :1], pair, winner)
    return winner[:, 1].long()


def _gathers(logits: Tensor, first: int, axis: Axis) -> Tensor:
    return comm.all_gather(logits, axis, dim=1).argmax(1)


def _pairs(
    logits: Tensor, first: int, axis: Axis, *, last: bool = False, rank: bool = False
) -> Any:
    """Right, but the last of equal ones wins, or the rank is returned."""
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


def _in_place(logits: Tensor, first: int, axis: Axis) -> Tensor:
    token = _right(logits, first, axis)
    logits.fill_(0)
    return token


def _by_library(logits: Tensor, first: int, axis: Axis) -> Tensor:
    return choose(logits, NOTHING, None, axis, first, logits.shape[1] * axis.size)


SAME_TOKEN = Ranked(
    id="13-3",
    title="the same token on every rank",
    names=("greedy",),
    hints=(
        "A maximum of maxima is the maximum. What must a rank tell the others of each request?",
        "Its largest logit, and which token that is, numbered in the whole vocabulary. Gather both "
        "and take the token that stands beside the largest; the first of equals is on the lowest "
        "rank.",
        "best_B, token_B = logits_BVt.max(1); gather best_B[None] and (token_B + first)[None]; "
        "token_nB.gather(0, best_nB.argmax(0, keepdim=True))[0].",
    ),
    wrong=(
        Wrong(lambda logits, first, axis: None, words="from rank 0, got a NoneType"),
        Wrong(lambda logits, first, axis: logits.argmax(1), words="within its own part"),
        Wrong(
            lambda logits, first, axis: logits.argmax(1) + first,
            words="compare over the ranks",
        ),
        Wrong(_no_offset, words="add first"),
        Wrong(
            lambda logits, first, axis: _pairs(logits, first, axis, rank=True),
            words="the rank that has the token",
        ),
        Wrong(
            lambda logits, first, axis: _pairs(logits, first, axis, last=True),
            words="the lowest token wins",
        ),
        Wrong(
            lambda logits, first, axis: _right(-logits, first, axis),
            words="the least likely token",
        ),
        Wrong(
            lambda logits, first, axis: comm.all_reduce(logits.argmax(1) + first, axis),
            words="tokens are wrong on every rank",
        ),
        Wrong(_gathers, words="do not gather the logits"),
        Wrong(
            lambda logits, first, axis: _right(logits, first, axis).float(),
            words="of torch.int64 on rank",
        ),
        Wrong(_in_place, words="wrote into the logits"),
        Wrong(_by_library, words=REFUSAL),
    ),
    right=(_right, _right_by_reductions, _right_in_pairs),
    stub=lambda logits, first, axis: None,
    trials=TRIALS,
    inputs=_inputs,
    act=_act,
    looks=(
        RankCase("outputs", "two ranks", TWO, _tokens),
        RankCase("outputs", "four ranks", FOUR, _tokens),
        RankCase("outputs", "equal logits on two of four ranks", TIES, _tokens),
        RankCase("outputs", "one rank", ONE, _tokens),
        RankCase("outputs", "the logits are left alone", FOUR, _left_alone, later=True),
        RankCase("wire", "a logit and a token a request", FOUR, _little),
    ),
    refused=("course_lib.inference.sampling:choose",),
)
