"""03-5: data parallelism in raw torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from course_lib import comm, dp
from course_lib.grading.compare import difference
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.ranked import RankCase, Ranked, Seen, Trial
from course_lib.ledger import wire
from course_lib.mesh import Mesh, make_mesh

TWO, FOUR, NONE, ONE = range(4)
HANG = "The last rank has no rows in one step: it must make all calls of that step too"
# size: rows of the last rank in the second step
TRIALS = (Trial(2, 1), Trial(4, 1), Trial(3, 0, HANG), Trial(1, 4))
STEPS, FEATURES = 3, 6
REFUSAL = "this is what you are asked to write"
Batches = Sequence[tuple[Tensor, Tensor]]
Optimizer = torch.optim.Optimizer
# the gradients of the summed loss by rank, the rows of each, the limit -> what each rank steps by
Combine = Callable[[list[Tensor], list[int], float], list[Tensor]]


def _model(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))


def _optimizer(model: nn.Module) -> Optimizer:
    """SGD shows a wrong factor, which Adam would hide."""
    return torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)


def _batches(trial: Trial, rank: int, seed: int) -> Batches:
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


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _set_gradients(model: nn.Module, flat: Tensor) -> None:
    parameters = list(model.parameters())
    for parameter, part in zip(
        parameters, flat.split([p.numel() for p in parameters]), strict=True
    ):
        parameter.grad = part.view_as(parameter).clone()


def _gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Of the summed loss, flat."""
    return _flat(torch.autograd.grad(((model(x) - y) ** 2).sum(), list(model.parameters())))


def _limit(trial: Trial, seed: int) -> float:
    """0.4 of the norm of the first step's gradient: of two ranks' parts one at least is longer."""
    first = [_batches(trial, rank, seed)[0] for rank in range(trial.n)]
    x, y = (torch.cat(parts) for parts in zip(*first, strict=True))
    return _gradient(_model(seed), x, y).norm().item() / len(x) * 0.4


def _inputs(trial: Trial, rank: int, seed: int) -> tuple[int, Batches, float]:
    return seed + rank, _batches(trial, rank, seed), _limit(trial, seed)


def _act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> Any:
    seed, batches, limit = inputs
    model = _model(seed)
    answers[0](model, batches, _optimizer(model), limit)
    return _flat(list(model.parameters()))


def _clipped(gradient: Tensor, limit: float) -> Tensor:
    return gradient * min(1.0, limit / (gradient.norm().item() + 1e-6))


def _right(own: list[Tensor], rows: list[int], limit: float) -> list[Tensor]:
    return [_clipped(torch.stack(own).sum(0) / sum(rows), limit)] * len(own)


@dataclass(frozen=True)
class Mistake:
    """A way to train that gives other weights: what to say, and in what it differs."""

    message: str
    combine: Combine = _right
    equal: bool = True  # whether the ranks start from the same weights
    averaged: bool = False  # whether the weights are averaged after each step


def _trained(seen: Seen, how: Mistake = Mistake("")) -> list[Tensor]:
    """The weights of every rank, worked out in one process."""
    n, seed = seen.trial.n, seen.seed
    models = [_model(seed + rank * (not how.equal)) for rank in range(n)]
    optimizers = [_optimizer(model) for model in models]
    batches = [_batches(seen.trial, rank, seed) for rank in range(n)]
    for step in range(STEPS):
        rows = [len(own[step][0]) for own in batches]
        own = [_gradient(model, *mine[step]) for model, mine in zip(models, batches, strict=True)]
        totals = how.combine(own, rows, _limit(seen.trial, seed))
        for model, optimizer, total in zip(models, optimizers, totals, strict=True):
            _set_gradients(model, total)
            optimizer.step()
        if how.averaged:
            _average(models)
    return [_flat(list(model.parameters())) for model in models]


def _average(models: list[nn.Module]) -> None:
    mean = torch.stack([_flat(list(model.parameters())) for model in models]).mean(0)
    for model in models:
        nn.utils.vector_to_parameters(mean.clone(), model.parameters())


def _same(own: list[Tensor], total: Tensor) -> list[Tensor]:
    return [total] * len(own)


def _alone(own: list[Tensor], rows: list[int], limit: float) -> list[Tensor]:
    return [_clipped(gradient / sum(rows), limit) for gradient in own]


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
    Mistake("each rank steps by its own gradient: they are never summed", _alone),
    Mistake("the ranks did not start equal: broadcast rank 0's weights", equal=False),
    Mistake(
        "each rank divides by its own rows, and then the gradients are summed",
        lambda own, rows, limit: _same(own, _clipped(_means(own, rows).sum(0), limit)),
    ),
    Mistake(
        "this averages the ranks' means: a rank with one row weighs as much as one with seven",
        lambda own, rows, limit: _same(own, _clipped(_means(own, rows).mean(0), limit)),
    ),
    Mistake(
        "divided by the rows of all ranks and by the number of ranks: once is enough",
        lambda own, rows, limit: _same(own, _clipped(torch.stack(own).mean(0) / sum(rows), limit)),
    ),
    Mistake(
        "each rank clips its own part: clip after the sum",
        lambda own, rows, limit: _same(own, torch.stack(_alone(own, rows, limit)).sum(0)),
    ),
    Mistake(
        "nothing is clipped",
        lambda own, rows, limit: _same(own, torch.stack(own).sum(0) / sum(rows)),
    ),
    Mistake("weights are averaged where gradients should be summed", _alone, averaged=True),
)


def _weights(seen: Seen) -> str:
    """The weights after the steps are those of one process, on every rank."""
    wanted = _trained(seen)
    says = difference("weights", seen.values, wanted)
    if not says or seen.trial.n == 1:
        return says
    for mistake in MISTAKES:
        if not difference("weights", seen.values, _trained(seen, mistake)):
            return f"{mistake.message} ({says})"
    return says


def _bytes(seen: Seen) -> str:
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
    weights = _flat(list(model.parameters()))
    dist.broadcast(weights, 0)
    nn.utils.vector_to_parameters(weights, model.parameters())
    for x, y in batches:
        sent = torch.cat([_gradient(model, x, y), torch.tensor([float(len(x))])])
        dist.all_reduce(sent)
        _set_gradients(model, _clipped(sent[:-1] / sent[-1], max_norm))
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


def _broadcasts_each_step(
    model: nn.Module, batches: Batches, optimizer: Optimizer, max_norm: float
) -> None:
    for batch in batches:
        _train(model, [batch], optimizer, max_norm)


def _gathers(model: nn.Module, batches: Batches, optimizer: Optimizer, max_norm: float) -> None:
    """Every rank sends its whole gradient to every other, and adds them up itself."""
    weights = _flat(list(model.parameters()))
    dist.broadcast(weights, 0)
    nn.utils.vector_to_parameters(weights, model.parameters())
    for x, y in batches:
        rows = torch.tensor(len(x))
        dist.all_reduce(rows)
        own = _gradient(model, x, y) / rows
        everybody = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, own)
        _set_gradients(model, _clipped(torch.stack(everybody).sum(0), max_norm))
        optimizer.step()


def _by_ddp(model: nn.Module, batches: Batches, optimizer: Optimizer, max_norm: float) -> None:
    _train(DistributedDataParallel(model), batches, optimizer, max_norm, summed=False)


def _by_library(model: nn.Module, batches: Batches, optimizer: Optimizer, max_norm: float) -> None:
    dp.start_equal(model, make_mesh().dp)


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
        Wrong(_but(summed=False), words="they are never summed"),
        Wrong(_but(equal=False), words="broadcast rank 0's weights"),
        Wrong(_but(divide="own"), words="each rank divides by its own rows"),
        Wrong(_but(divide="own and ranks"), words="averages the ranks' means"),
        Wrong(_but(divide="all and ranks"), words="once is enough"),
        Wrong(_but(clip="before"), words="clip after the sum"),
        Wrong(_but(clip="never"), words="nothing is clipped"),
        Wrong(_averages_weights, words="weights are averaged where gradients should be summed"),
        Wrong(_skips, words="it must make all calls of that step too"),
        Wrong(_broadcasts_each_step, words="one broadcast of the weights"),
        Wrong(_gathers, words="one all-reduce of the gradients a step"),
        Wrong(_by_ddp, words=REFUSAL),
        Wrong(_by_library, words=REFUSAL),
        Wrong(_by_comm, words=REFUSAL),
    ),
    right=(_train, _right_flat),
    stub=lambda model, batches, optimizer, max_norm: None,
    trials=TRIALS,
    inputs=_inputs,
    act=_act,
    looks=(
        RankCase("weights", "two ranks, after three steps", TWO, _weights),
        RankCase("weights", "four ranks", FOUR, _weights),
        RankCase("weights", "a rank without rows", NONE, _weights),
        RankCase("weights", "one rank", ONE, _weights),
        RankCase("wire", "bytes", FOUR, _bytes),
    ),
    refused=(
        "course_lib.comm.door:issue",
        "course_lib.dp:start_equal",
        "course_lib.dp:global_tokens",
        "course_lib.dp:train_step",
        "torch.nn.parallel.distributed:DistributedDataParallel.forward",
    ),
)
