"""What exercise 03-5 trains, one process that does the same, and how it looks at the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.grading.compare import difference
from course_lib.grading.exercise import Answer
from course_lib.grading.ranked import Seen, Trial
from course_lib.ledger import wire
from course_lib.mesh import Mesh

STEPS, FEATURES = 3, 6
Batches = Sequence[tuple[Tensor, Tensor]]
Optimizer = torch.optim.Optimizer
# the gradients of the summed loss by rank, the rows of each, the limit -> what each rank steps by
Combine = Callable[[list[Tensor], list[int], float], list[Tensor]]


def new_model(seed: int) -> nn.Module:
    """A small model that gives one number a row; its weights follow from ``seed`` alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))


def new_optimizer(model: nn.Module) -> Optimizer:
    """SGD shows a wrong factor, which Adam would hide."""
    return torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)


def batches_of(trial: Trial, rank: int, seed: int) -> Batches:
    """This rank's rows of each step: other numbers of them on every rank.

    The targets of the first step are large, so that it is clipped and the others are not.
    """
    found = []
    for step in range(STEPS):
        shared = torch.Generator().manual_seed(seed + step)
        counts = torch.randperm(6, generator=shared) + 2
        if step == 1:
            counts[trial.n - 1] = trial.size
        own = torch.Generator().manual_seed(seed + 100 * (step + 1) + rank)
        x = torch.randn(int(counts[rank]), FEATURES, generator=own)
        found.append((x, torch.randn(len(x), generator=own) + (0 if step else 5)))
    return found


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """All of them in one."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def set_gradients(model: nn.Module, total: Tensor) -> None:
    """Give every parameter its piece of the flat gradient ``total``."""
    parameters = list(model.parameters())
    for parameter, part in zip(
        parameters, total.split([p.numel() for p in parameters]), strict=True
    ):
        parameter.grad = part.view_as(parameter).clone()


def gradient_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Of the summed loss, flat."""
    return flat(torch.autograd.grad(((model(x) - y) ** 2).sum(), list(model.parameters())))


def limit_of(trial: Trial, seed: int) -> float:
    """0.4 of the norm of the first step's gradient: of two ranks' parts one at least is longer."""
    first = [batches_of(trial, rank, seed)[0] for rank in range(trial.n)]
    x, y = (torch.cat(parts) for parts in zip(*first, strict=True))
    return gradient_of(new_model(seed), x, y).norm().item() / len(x) * 0.4


def inputs(trial: Trial, rank: int, seed: int) -> tuple[int, Batches, float]:
    """The seed of this rank's own first weights, its batches, and the limit of the norm."""
    return seed + rank, batches_of(trial, rank, seed), limit_of(trial, seed)


def act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> Any:
    """Runs in a rank: trains with the answer and gives the weights."""
    seed, batches, limit = inputs
    model = new_model(seed)
    answers[0](model, batches, new_optimizer(model), limit)
    return flat(list(model.parameters()))


def clipped(gradient: Tensor, limit: float) -> Tensor:
    """As torch's clip_grad_norm_ does it."""
    return gradient * min(1.0, limit / (gradient.norm().item() + 1e-6))


def _right(own: list[Tensor], rows: list[int], limit: float) -> list[Tensor]:
    return [clipped(torch.stack(own).sum(0) / sum(rows), limit)] * len(own)


@dataclass(frozen=True)
class Mistake:
    """A way to train that gives other weights: what to say, and in what it differs."""

    message: str
    combine: Combine = _right
    equal: bool = True  # whether the ranks start from the same weights
    averaged: bool = False  # whether the weights are averaged after each step
    zeroed: bool = True  # whether the gradients of the step before are cleared


def trained(seen: Seen, how: Mistake = Mistake("")) -> list[Tensor]:
    """The weights of every rank, worked out in one process."""
    n, seed = seen.trial.n, seen.seed
    models = [new_model(seed + rank * (not how.equal)) for rank in range(n)]
    optimizers = [new_optimizer(model) for model in models]
    batches = [batches_of(seen.trial, rank, seed) for rank in range(n)]
    totals: list[Tensor] = []
    for step in range(STEPS):
        rows = [len(own[step][0]) for own in batches]
        own = [gradient_of(model, *mine[step]) for model, mine in zip(models, batches, strict=True)]
        if totals and not how.zeroed:
            own = [new + sum(rows) * old for new, old in zip(own, totals, strict=True)]
        totals = how.combine(own, rows, limit_of(seen.trial, seed))
        for model, optimizer, total in zip(models, optimizers, totals, strict=True):
            set_gradients(model, total)
            optimizer.step()
        if how.averaged:
            _average(models)
    return [flat(list(model.parameters())) for model in models]


def _average(models: list[nn.Module]) -> None:
    mean = torch.stack([flat(list(model.parameters())) for model in models]).mean(0)
    for model in models:
        nn.utils.vector_to_parameters(mean.clone(), model.parameters())


def _same(own: list[Tensor], total: Tensor) -> list[Tensor]:
    return [total] * len(own)


def _alone(own: list[Tensor], rows: list[int], limit: float) -> list[Tensor]:
    return [clipped(gradient / sum(rows), limit) for gradient in own]


def _means(own: list[Tensor], rows: list[int]) -> Tensor:
    """Each rank's gradient of the mean over its own rows."""
    return torch.stack(
        [gradient / max(count, 1) for gradient, count in zip(own, rows, strict=True)]
    )


MISTAKES = (
    Mistake(
        "the weights are what they were: nothing was trained",
        lambda own, rows, limit: _same(own, 0 * own[0]),
        equal=False,
    ),
    Mistake(
        "every rank still has rank 0's first weights: no step changed them (dist.all_reduce works "
        "in place; what it returns is no gradient)",
        lambda own, rows, limit: _same(own, 0 * own[0]),
    ),
    Mistake("each rank steps by its own gradient: they are never summed", _alone),
    Mistake("the ranks did not start equal: broadcast rank 0's weights", equal=False),
    Mistake(
        "each rank divides by its own rows, and then the gradients are summed",
        lambda own, rows, limit: _same(own, clipped(_means(own, rows).sum(0), limit)),
    ),
    Mistake(
        "this averages the ranks' means: a rank with one row weighs as much as one with seven",
        lambda own, rows, limit: _same(own, clipped(_means(own, rows).mean(0), limit)),
    ),
    Mistake(
        "divided by the rows of all ranks and by the number of ranks: once is enough",
        lambda own, rows, limit: _same(own, clipped(torch.stack(own).mean(0) / sum(rows), limit)),
    ),
    Mistake(
        "each rank clips its own part: clip after the sum",
        lambda own, rows, limit: _same(own, torch.stack(_alone(own, rows, limit)).sum(0)),
    ),
    Mistake(
        "nothing is clipped",
        lambda own, rows, limit: _same(own, torch.stack(own).sum(0) / sum(rows)),
    ),
    Mistake(
        "the gradients of the step before are still in p.grad: optimizer.zero_grad() is missing",
        zeroed=False,
    ),
    Mistake("weights are averaged where gradients should be summed", _alone, averaged=True),
)


def weights(seen: Seen) -> str:
    """The weights after the steps are those of one process, on every rank."""
    wanted = trained(seen)
    says = difference("weights", seen.values, wanted)
    if not says or seen.trial.n == 1:
        return says
    for mistake in MISTAKES:
        if not difference("weights", seen.values, trained(seen, mistake)):
            return f"{mistake.message} ({says})"
    if difference("weights", seen.values, [seen.values[0]] * seen.trial.n):
        return (
            "the ranks end with different weights: they have to start equal, and to step by the "
            f"same gradient ({says})"
        )
    return says


def sent_bytes(seen: Seen) -> str:
    """One broadcast of the weights, one all-reduce of the gradients a step, and a few numbers."""
    n, size = seen.trial.n, 4 * seen.values[0].numel()
    right = wire("broadcast", size, n) + STEPS * wire("all_reduce", size, n)
    for rank, observed in enumerate(seen.ranks):
        sent = sum((call.wire(n) for call in observed.calls), Fraction(0))
        if not right <= sent <= right + STEPS * wire("all_reduce", 16, n):
            return (
                f"rank {rank} sent {float(sent):,g} bytes; one broadcast of the weights and one "
                f"all-reduce of the gradients a step are {float(right):,g}, and the row counts a "
                "few more"
            )
    return ""
