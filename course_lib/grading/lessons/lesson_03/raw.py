"""03-5: data parallelism in raw torch.distributed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_lib import comm, dp
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.lessons.lesson_03.training import (
    Batches,
    Optimizer,
    act,
    clipped,
    flat,
    gradient_of,
    inputs,
    sent_bytes,
    set_gradients,
    weights,
)
from course_lib.grading.ranked import RankCase, Ranked, Trial
from course_lib.mesh import make_mesh

TWO, FOUR, NONE, ONE = range(4)
HANG = "The last rank has no rows in one step: it must make all calls of that step too"
# size: rows of the last rank in the second step
TRIALS = (Trial(2, 1), Trial(4, 1), Trial(3, 0, HANG), Trial(1, 4))
REFUSAL = "this is what you are asked to write"


def _train(
    model: nn.Module,
    batches: Batches,
    optimizer: Optimizer,
    max_norm: float,
    *,
    equal: bool = True,
    divide: str = "all",
    clip: str = "after",
    summed: bool = True,
    zeroed: bool = True,
) -> None:
    """Right, or with a mistake."""
    n = dist.get_world_size()
    parameters = list(model.parameters())
    for parameter in parameters if equal else []:
        dist.broadcast(parameter.data, 0)
    for x, y in batches:
        rows = torch.tensor(len(x))
        if divide in ("all", "all and ranks"):
            dist.all_reduce(rows)
        rows = rows.clamp(min=1) * (n if divide in ("all and ranks", "own and ranks") else 1)
        if zeroed:
            optimizer.zero_grad()
        (((model(x) - y) ** 2).sum() / rows).backward()
        if clip == "before":
            nn.utils.clip_grad_norm_(parameters, max_norm)
        for parameter in parameters if summed else []:
            dist.all_reduce(parameter.grad)
        if clip == "after":
            nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()


def _but(**mistake: Any) -> Answer:
    return lambda model, batches, optimizer, max_norm: _train(
        model, batches, optimizer, max_norm, **mistake
    )


def _right_flat(model: nn.Module, batches: Batches, optimizer: Optimizer, max_norm: float) -> None:
    """One flat gradient, into which the row count goes along; divided after the sum."""
    start = flat(list(model.parameters()))
    dist.broadcast(start, 0)
    nn.utils.vector_to_parameters(start, model.parameters())
    for x, y in batches:
        sent = torch.cat([gradient_of(model, x, y), torch.tensor([float(len(x))])])
        dist.all_reduce(sent)
        set_gradients(model, clipped(sent[:-1] / sent[-1], max_norm))
        optimizer.step()


def _returned(model: nn.Module, batches: Batches, optimizer: Optimizer, max_norm: float) -> None:
    """Takes the result of dist.all_reduce, which is None, for the gradient."""
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    for x, y in batches:
        optimizer.zero_grad()
        ((model(x) - y) ** 2).sum().backward()
        for parameter in model.parameters():
            parameter.grad = dist.all_reduce(parameter.grad)
        optimizer.step()


def _averages_weights(
    model: nn.Module, batches: Batches, optimizer: Optimizer, max_norm: float
) -> None:
    """Each rank trains by itself; the weights are averaged after each step."""
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    for batch in batches:
        _train(model, [batch], optimizer, max_norm, equal=False, summed=False)
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()


def _skips(model: nn.Module, batches: Batches, optimizer: Optimizer, max_norm: float) -> None:
    """A rank without rows leaves the step out."""
    some = [(x, y) for x, y in batches if len(x)]
    _train(model, some, optimizer, max_norm)


def _skips_the_count(
    model: nn.Module, batches: Batches, optimizer: Optimizer, max_norm: float
) -> None:
    """A rank without rows has nothing to add to their number, and leaves that call out."""
    start = flat(list(model.parameters()))
    dist.broadcast(start, 0)
    nn.utils.vector_to_parameters(start, model.parameters())
    for x, y in batches:
        rows = torch.tensor(len(x))
        if len(x):
            dist.all_reduce(rows)
        own = gradient_of(model, x, y) / rows.clamp(min=1)
        dist.all_reduce(own)
        set_gradients(model, clipped(own, max_norm))
        optimizer.step()


def _broadcasts_each_step(
    model: nn.Module, batches: Batches, optimizer: Optimizer, max_norm: float
) -> None:
    for batch in batches:
        _train(model, [batch], optimizer, max_norm)


def _gathers(model: nn.Module, batches: Batches, optimizer: Optimizer, max_norm: float) -> None:
    """Every rank sends its whole gradient to every other, and adds them up itself."""
    start = flat(list(model.parameters()))
    dist.broadcast(start, 0)
    nn.utils.vector_to_parameters(start, model.parameters())
    for x, y in batches:
        rows = torch.tensor(len(x))
        dist.all_reduce(rows)
        own = gradient_of(model, x, y) / rows
        everybody = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, own)
        set_gradients(model, clipped(torch.stack(everybody).sum(0), max_norm))
        optimizer.step()


def _by_ddp(model: nn.Module, batches: Batches, optimizer: Optimizer, max_norm: float) -> None:
    _train(DistributedDataParallel(model), batches, optimizer, max_norm, summed=False)


def _by_library(model: nn.Module, batches: Batches, optimizer: Optimizer, max_norm: float) -> None:
    dp.broadcast_parameters(model, make_mesh().dp)


def _by_comm(model: nn.Module, batches: Batches, optimizer: Optimizer, max_norm: float) -> None:
    axis = make_mesh().dp
    for parameter in model.parameters():
        parameter.data.copy_(comm.broadcast(parameter.data, axis))


RAW = Ranked(
    id="03-5",
    title="the same in raw PyTorch",
    names=("train",),
    hints=(
        "Four things must be equal on all ranks: the weights at the start, the divisor, the "
        "gradient, the norm that it is clipped to. Which of them needs a message?",
        "Before the first step broadcast every parameter from rank 0. In each step all-reduce the "
        "number of rows, divide the summed loss by it, backward, all-reduce every gradient, then "
        "clip and step. A rank without rows does all of this too.",
        "dist.broadcast(p.data, 0); rows = torch.tensor(len(x)); dist.all_reduce(rows); "
        "optimizer.zero_grad(); (((model(x) - y) ** 2).sum() / rows).backward(); "
        "dist.all_reduce(p.grad); nn.utils.clip_grad_norm_(model.parameters(), max_norm); "
        "optimizer.step().",
    ),
    wrong=(
        Wrong(lambda model, batches, optimizer, max_norm: None, words="nothing was trained"),
        Wrong(_returned, words="no step changed them"),
        Wrong(_but(summed=False), words="they are never summed"),
        Wrong(_but(equal=False), words="broadcast rank 0's weights"),
        Wrong(
            _but(equal=False, divide="own and ranks"), words="the ranks end with different weights"
        ),
        Wrong(_but(divide="own"), words="each rank divides by its own rows"),
        Wrong(_but(divide="own and ranks"), words="averages the ranks' means"),
        Wrong(_but(divide="all and ranks"), words="once is enough"),
        Wrong(_but(clip="before"), words="clip after the sum"),
        Wrong(_but(clip="never"), words="nothing is clipped"),
        Wrong(_but(zeroed=False), words="zero_grad() is missing"),
        Wrong(_averages_weights, words="weights are averaged where gradients should be summed"),
        Wrong(_skips, words="it must make all calls of that step too"),
        Wrong(_skips_the_count, words="it must make all calls of that step too"),
        Wrong(_broadcasts_each_step, words="one broadcast of the weights"),
        Wrong(_gathers, words="one all-reduce of the gradients a step"),
        Wrong(_by_ddp, words=REFUSAL),
        Wrong(_by_library, words=REFUSAL),
        Wrong(_by_comm, words=REFUSAL),
    ),
    right=(_train, _right_flat),
    stub=lambda model, batches, optimizer, max_norm: None,
    trials=TRIALS,
    inputs=inputs,
    act=act,
    looks=(
        RankCase("weights", "two ranks, after three steps", TWO, weights),
        RankCase("weights", "four ranks", FOUR, weights),
        RankCase("weights", "a rank without rows", NONE, weights),
        RankCase("weights", "one rank", ONE, weights),
        RankCase("wire", "bytes", FOUR, sent_bytes),
    ),
    refused=(
        "course_lib.comm.transfer:issue",
        "course_lib.dp:broadcast_parameters",
        "course_lib.dp:global_tokens",
        "course_lib.dp:train_step",
        "torch.nn.parallel.distributed:DistributedDataParallel.forward",
    ),
)
