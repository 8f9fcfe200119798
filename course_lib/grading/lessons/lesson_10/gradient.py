"""10-2: over which ranks the gradient of an expert is summed, and by what it is divided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import comm
from course_lib.grading.compare import difference
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.ranked import RankCase, Ranked, Seen, Trial
from course_lib.grading.wire import WireCalls
from course_lib.mesh import Axis, Mesh, make_mesh

PAIRS, ALL_ALIKE, ALL_SHARED, ONE = range(4)
TRIALS = (Trial(4, 2), Trial(4, 1), Trial(4, 4), Trial(1, 1))  # size: ranks of ep
SHAPE = (3, 5)


def _inputs(trial: Trial, rank: int, seed: int) -> tuple[int, Tensor]:
    """The size of ep, and what backward left on this rank."""
    generator = torch.Generator().manual_seed(seed + rank)
    return trial.size, torch.randn(SHAPE, generator=generator)


def _act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> Any:
    ep_size, gradient = inputs
    cut = make_mesh(ep=ep_size)
    handed = gradient.clone()
    with WireCalls() as wire:
        total = answers[0](handed, cut.ep, cut.edp, cut.dp_cp)
    return total, wire.calls, torch.equal(handed, gradient)


def _holders(seen: Seen, rank: int) -> list[int]:
    """The ranks that hold the experts of ``rank``."""
    return list(range(rank % seen.trial.size, seen.trial.n, seen.trial.size))


def _sums(seen: Seen, over: Callable[[int], Sequence[int]]) -> list[Tensor]:
    """By rank: the sum of what the ranks ``over(rank)`` have."""
    own = [_inputs(seen.trial, rank, seen.seed)[1] for rank in range(seen.trial.n)]
    return [torch.stack([own[r] for r in over(rank)]).sum(0) for rank in range(seen.trial.n)]


def _gradients(seen: Seen) -> str:
    n, ep = seen.trial.n, seen.trial.size
    wanted = _sums(seen, lambda rank: _holders(seen, rank))
    got = [value[0] for value in seen.values]
    says = difference("gradients", got, wanted)
    if not says or n == 1:
        return says
    everyone = _sums(seen, lambda rank: range(n))
    neighbours = _sums(seen, lambda rank: range(rank // ep * ep, rank // ep * ep + ep))
    own = _sums(seen, lambda rank: [rank])
    holders = n // ep
    mistakes = [
        ([w / holders for w in wanted], holders, "averaged over edp: the loss was divided by the "
         "tokens of all ranks, so gradients are only added up"),
        ([w / n for w in wanted], n, "divided by the ranks of dp: the loss was divided by the "
         "tokens of all ranks already"),
        (everyone, ep, "summed over all data ranks: those of one ep group hold different experts, "
         "whose gradients only happen to have one shape"),
        ([e / n for e in everyone], ep, "averaged over all data ranks, as if all held this expert"),
        (neighbours, ep, "summed over ep: these ranks hold different experts, and their tokens "
         "are in the gradient already"),
        (own, holders, "each rank has what the tokens of its ep group gave: other groups hold the "
         "same experts, and had other tokens"),
    ]  # fmt: skip
    for mistaken, size, message in mistakes:
        if size > 1 and not difference("", got, mistaken):
            return f"{message} ({says})"
    return says


def _calls(seen: Seen) -> str:
    payload = _inputs(seen.trial, 0, seen.seed)[1].nbytes
    wanted = [("all_reduce", payload)] if seen.trial.size < seen.trial.n else []
    for rank, (_, calls, _) in enumerate(seen.values):
        made = [(call.op, call.payload) for call in calls]
        if made != wanted:
            said = ", ".join(f"{op} of {size} bytes" for op, size in made) or "nothing"
            right = "one all_reduce of the gradient" if wanted else "nothing"
            return f"rank {rank} sent {said}; {right} is wanted"
    return ""


def _left_alone(seen: Seen) -> str:
    for rank, (_, _, alone) in enumerate(seen.values):
        if not alone:
            return f"rank {rank} wrote into the gradient that it was given: return a new tensor"
    return ""


def _raw(gradient: Tensor, ep: Axis, edp: Axis, data: Axis) -> Tensor:
    total = gradient.clone()
    if edp.size > 1:
        dist.all_reduce(total, group=edp.group)
    return total


def _in_place(gradient: Tensor, ep: Axis, edp: Axis, data: Axis) -> Tensor:
    if edp.size > 1:
        dist.all_reduce(gradient, group=edp.group)
    return gradient


def _gathers(gradient: Tensor, ep: Axis, edp: Axis, data: Axis) -> Tensor:
    return comm.all_gather(gradient[None], edp).sum(0)


def _all_then_some(gradient: Tensor, ep: Axis, edp: Axis, data: Axis) -> Tensor:
    """Everybody's gradients to everybody, then those of the holders."""
    every = comm.all_gather(gradient[None], data)
    return every[data.rank % ep.size :: ep.size].sum(0)


GRADIENT = Ranked(
    id="10-2",
    title="the gradient of an expert",
    names=("expert_gradient",),
    hints=(
        "Whose tokens are in the gradient already, when backward of dispatch has come home? And "
        "who holds the same expert?",
        "In the gradient are the tokens of the whole ep group. Missing are those of the other ep "
        "groups, and the ranks of edp have them. The loss was divided by the tokens of all.",
        "comm.all_reduce(gradient, edp): a sum, and nothing is divided.",
    ),
    wrong=(
        Wrong(lambda g, ep, edp, data: None, words="from rank 0, got a NoneType"),
        Wrong(lambda g, ep, edp, data: g, words="other groups hold the same experts"),
        Wrong(
            lambda g, ep, edp, data: comm.all_reduce(g, edp) / edp.size, words="averaged over edp"
        ),
        Wrong(
            lambda g, ep, edp, data: comm.all_reduce(g, edp) / data.size,
            words="divided by the ranks of dp",
        ),
        Wrong(
            lambda g, ep, edp, data: comm.all_reduce(g, data), words="summed over all data ranks"
        ),
        Wrong(
            lambda g, ep, edp, data: comm.all_reduce(g, data) / data.size,
            words="averaged over all data ranks",
        ),
        Wrong(lambda g, ep, edp, data: comm.all_reduce(g, ep), words="summed over ep"),
        Wrong(
            lambda g, ep, edp, data: comm.all_reduce(comm.all_reduce(g, ep), edp),
            words="summed over all data ranks",
        ),
        Wrong(lambda g, ep, edp, data: comm.all_reduce(g, edp) * ep.size, words="times too large"),
        Wrong(_in_place, words="wrote into the gradient"),
        Wrong(_gathers, words="one all_reduce of the gradient"),
        Wrong(_all_then_some, words="sent all_gather"),
    ),
    right=(lambda g, ep, edp, data: comm.all_reduce(g, edp), _raw),
    stub=lambda g, ep, edp, data: None,
    trials=TRIALS,
    inputs=_inputs,
    act=_act,
    looks=(
        RankCase("gradients", "four ranks, ep = 2", PAIRS, _gradients),
        RankCase("gradients", "four ranks, ep = 1", ALL_ALIKE, _gradients),
        RankCase("gradients", "four ranks, ep = 4", ALL_SHARED, _gradients, later=True),
        RankCase("gradients", "one rank", ONE, _gradients),
        RankCase("gradients", "what is given is left alone", PAIRS, _left_alone, later=True),
        RankCase("wire", "one all-reduce, ep = 2", PAIRS, _calls),
        RankCase("wire", "nothing to send, ep = 4", ALL_SHARED, _calls),
    ),
)
