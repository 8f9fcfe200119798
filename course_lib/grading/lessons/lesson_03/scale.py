"""03-2: what a rank divides its summed loss by, so that the sum of gradients is the right one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import comm, dp
from course_lib.grading.compare import difference
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.ranked import RankCase, Ranked, Seen, Trial
from course_lib.mesh import Axis, Mesh

FEATURES = 5
TWO, FOUR, NONE, ONE = range(4)
NOBODY = "The last rank has no tokens, and must make the call all the same"
TRIALS = (
    Trial(2, 1),
    Trial(4, 1),
    Trial(3, 0, hang=NOBODY),
    Trial(1, 3),
)  # size: tokens of the last rank
NO_GRADIENT = (
    "the loss that you return carries no gradient: what a collective returns has none, and a "
    "number has none either; scale total itself"
)
COUNT_WRITTEN = (
    "count was written: its caller may need it again; comm.all_reduce returns the sum in a new "
    "tensor, dist.all_reduce works in place, so give it a copy"
)


def _inputs(trial: Trial, rank: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens x [count, FEATURES] with targets [count], other counts on every rank, and w."""
    shared = torch.Generator().manual_seed(seed)
    w = torch.randn(FEATURES, generator=shared)
    counts = torch.randperm(8, generator=shared) + 2
    counts[trial.n - 1] = trial.size
    if int(counts[: trial.n].sum()) == trial.n**2:  # a mean over ranks and one over tokens would
        counts[0] += 1  # then differ by a factor that is another mistake's
    own = torch.Generator().manual_seed(seed + 1 + rank)
    x = torch.randn(int(counts[rank]), FEATURES, generator=own)
    return x, torch.randn(len(x), generator=own), w


def _summed_loss(inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    x, y, w = inputs
    w = w.clone().requires_grad_()
    return ((x @ w - y) ** 2).sum(), w


def _act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> Any:
    total, w = _summed_loss(inputs)
    count = torch.tensor(len(inputs[0]))
    loss = answers[0](total, count, mesh.dp)
    if mesh.dp.size > 1 and int(count) != len(inputs[0]):
        return COUNT_WRITTEN
    if isinstance(loss, Tensor) and not loss.requires_grad:
        return NO_GRADIENT
    if isinstance(loss, Tensor):
        loss.backward()
        return NO_GRADIENT if w.grad is None else w.grad
    return NO_GRADIENT if isinstance(loss, float) else loss


def _own(seen: Seen) -> tuple[Tensor, list[int]]:
    """Every rank's gradient of its summed loss [n, FEATURES], and its number of tokens."""
    gradients, counts = [], []
    for rank in range(seen.trial.n):
        inputs = _inputs(seen.trial, rank, seen.seed)
        total, w = _summed_loss(inputs)
        gradients.append(torch.autograd.grad(total, w)[0])
        counts.append(len(inputs[0]))
    return torch.stack(gradients), counts


def _summed(seen: Seen) -> str:
    """The sum of the gradients over ranks is the gradient of one process."""
    for rank, value in enumerate(seen.values):
        if isinstance(value, str):
            return value
        if not isinstance(value, Tensor):
            return f"rank {rank} returned a {type(value).__name__}; a loss, a tensor, is wanted"
    got, (own, counts) = torch.stack(seen.values).sum(0), _own(seen)
    wanted = own.sum(0) / sum(counts)
    says = difference("gradients, summed over the ranks,", [got], [wanted])
    if not says:
        return ""
    for mistaken, message in _mistakes(own, counts):
        if not difference("gradients", [got], [mistaken]):
            return f"{message}: {says}"
    return says


def _mistakes(own: Tensor, counts: list[int]) -> list[tuple[Tensor, str]]:
    n, each = len(counts), torch.tensor(counts).unsqueeze(1)
    return [
        (own.sum(0), "nothing is divided"),
        (
            (own / each).sum(0),
            "each rank divides by its own tokens (comm.all_reduce returns the sum, and leaves what "
            "it is given as it is)",
        ),
        ((own / each).mean(0), "this is the mean of the ranks' means: every rank weighs the same"),
        (own.sum(0) / n, "this divides by the number of ranks; the mean is over tokens"),
        (
            own.sum(0) / n / sum(counts),
            "divided by the number of ranks once more, but gradients are summed, not averaged",
        ),
    ]


def _one_number(seen: Seen) -> str:
    for rank, observed in enumerate(seen.ranks):
        payload = sum(call.payload for call in observed.calls)
        if len(observed.calls) != 1:
            return f"rank {rank} made {len(observed.calls)} calls; one is enough: the token count"
        if payload > 8:
            return f"rank {rank} handed {payload} bytes to its call; the token count has 8"
    return ""


def _as_if_in_place(total: Tensor, count: Tensor, axis: Axis) -> Tensor:
    comm.all_reduce(count, axis)
    return total / count


def _in_raw_torch(total: Tensor, count: Tensor, axis: Axis) -> Tensor:
    count = count.clone()
    dist.all_reduce(count, group=axis.group)
    return total * (1 / count)


def _in_place(total: Tensor, count: Tensor, axis: Axis) -> Tensor:
    dist.all_reduce(count, group=axis.group)
    return total / count


def _with_loss(total: Tensor, count: Tensor, axis: Axis) -> Tensor:
    """Sends the loss as well, which nobody needs for the gradient."""
    comm.all_reduce(total, axis)
    return total / comm.all_reduce(count, axis)


def _one_hot(total: Tensor, count: Tensor, axis: Axis) -> Tensor:
    """Every rank's count in its own place of a long tensor."""
    counts = torch.zeros(64, dtype=torch.int64)
    counts[axis.rank] = count
    return total / comm.all_reduce(counts, axis).sum()


SCALE = Ranked(
    id="03-2",
    title="the scale before the sum",
    names=("local_loss",),
    hints=(
        "Ranks hold different numbers of tokens. By what would one process divide the summed "
        "loss of all of them?",
        "By the tokens of all ranks. Every rank needs that one number, so it has to travel.",
        "comm.all_reduce(count, axis) is that number: divide total by it.",
    ),
    wrong=(
        Wrong(lambda total, count, axis: total, words="nothing is divided"),
        Wrong(lambda total, count, axis: total / count, words="divides by its own tokens"),
        Wrong(_as_if_in_place, words="comm.all_reduce returns the sum"),
        Wrong(
            lambda total, count, axis: total / (count * axis.size),
            words="mean of the ranks' means: every rank weighs the same",
        ),
        Wrong(
            lambda total, count, axis: total / axis.size,
            words="divides by the number of ranks; the mean is over tokens",
        ),
        Wrong(
            lambda total, count, axis: total / comm.all_reduce(count, axis) / axis.size,
            words="exactly 2 times too small",
        ),
        Wrong(
            lambda total, count, axis: comm.all_reduce(total, axis) / comm.all_reduce(count, axis),
            words="carries no gradient",
        ),
        Wrong(
            lambda total, count, axis: total.item() / comm.all_reduce(count, axis).item(),
            words="carries no gradient",
        ),
        Wrong(lambda total, count, axis: None, words="returned a NoneType"),
        Wrong(
            lambda total, count, axis: (
                total / dp.global_tokens([torch.zeros(int(count))], axis)  # type: ignore[call-overload]
            ),
            words="this is what you are asked to write",
        ),
        Wrong(_in_place, words="count was written"),
        Wrong(_with_loss, words="made 2 calls"),
        Wrong(_one_hot, words="handed 512 bytes to its call"),
    ),
    right=(lambda total, count, axis: total / comm.all_reduce(count, axis), _in_raw_torch),
    stub=lambda total, count, axis: None,
    trials=TRIALS,
    inputs=_inputs,
    act=_act,
    looks=(
        RankCase("gradients", "two ranks, unequal token counts", TWO, _summed),
        RankCase("gradients", "four ranks, unequal token counts", FOUR, _summed),
        RankCase("gradients", "a rank without tokens", NONE, _summed),
        RankCase("gradients", "one rank", ONE, _summed),
        RankCase("wire", "one number travels", FOUR, _one_number),
    ),
    refused=("course_lib.dp:global_tokens",),
)
