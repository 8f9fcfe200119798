"""The small model of 07-5, cut into stages, and the same step made by one process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from course_lib.grading.ranked import Trial

Row = list[tuple[str, int]]  # ("F", 3): forward of micro-batch 3
Batches = list[tuple[Tensor, Tensor]]

WIDTH, HIDDEN, ROWS = 8, 32, 16
RATE = 0.5  # of plain SGD


def mean_square(y: Tensor, target: Tensor) -> Tensor:
    """The loss that answers are given: the mean over one micro-batch."""
    return (y - target).square().mean()


def stages(trial: Trial, seed: int) -> list[nn.Sequential]:
    """The pieces of a small model, one for each rank; the same for one seed."""
    generator = torch.Generator().manual_seed(seed)
    made = [new_stage() for _ in range(trial.n)]
    for p in (p for stage in made for p in stage.parameters()):
        with torch.no_grad():  # so large that gradients do not fade on their way to rank 0
            p.normal_(0, 1.2 / p.shape[-1] ** 0.5, generator=generator)
    return made


def new_stage() -> nn.Sequential:
    """A rank's piece: from (ROWS, WIDTH) to (ROWS, WIDTH)."""
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH))


def batches(trial: Trial, seed: int) -> Batches:
    """(input, target) of every micro-batch."""
    generator = torch.Generator().manual_seed(seed)
    shape = (ROWS, WIDTH)
    return [
        (torch.randn(shape, generator=generator), 3 * torch.randn(shape, generator=generator))
        for _ in range(trial.size)
    ]


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All of them in one row."""
    return torch.cat([tensor.flatten() for tensor in tensors])


@dataclass(frozen=True)
class Twin:
    """What one process gets: the loss of each micro-batch; gradients and weights by rank."""

    losses: list[Tensor]
    gradients: list[Tensor]
    weights: list[Tensor]  # after a step


@cache  # several cases ask for one trial
def serial(trial: Trial, seed: int) -> Twin:
    """The step of ``trial`` made by one process."""
    parts = stages(trial, seed)
    model = nn.Sequential(*parts)
    losses = [mean_square(model(x), target) for x, target in batches(trial, seed)]
    torch.stack(losses).mean().backward()
    gradients = gradients_of(parts)
    weights = [flat(part.parameters()) for part in parts]
    after = [w.detach() - RATE * g for w, g in zip(weights, gradients, strict=True)]
    return Twin([loss.detach() for loss in losses], gradients, after)


def gradients_of(parts: Iterable[nn.Module]) -> list[Tensor]:
    """The gradients of each part in one row; every parameter has one."""
    return [flat(p.grad for p in part.parameters() if p.grad is not None) for part in parts]
