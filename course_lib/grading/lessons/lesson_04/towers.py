"""What exercise 04-4 trains, one process that does the same, and how it looks at what came out.

The model is a sum of towers, one bucket each. Bucket 0 is the first that backward completes.
"""

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
from course_lib.grading.wire import WireCalls
from course_lib.ledger import wire
from course_lib.mesh import Mesh
from course_lib.trace import PeakLiveBytes
from course_lib.zero import padded

TOWERS, WIDTH, ROWS, STEPS = 8, 31, 2, 2
ELEMENTS = WIDTH * WIDTH + WIDTH + 1  # of a bucket: 993, which 2 and 4 do not divide
Bucket = list[nn.Parameter]


@dataclass
class Run:
    """What came out of it on one rank. Gradients and weights are flat, by bucket."""

    gradients: Tensor | None  # of the own shards, before the first step; None: some have none
    weights: Tensor  # of all parameters, after the last step
    moments: int  # elements that the optimizer updates
    sent: list[str]  # the calls of the first step's backwards
    left: int  # parameters that still have a gradient when backward is over
    peak: int  # bytes made and alive during the first step's backwards


def buckets_of(seed: int) -> list[Bucket]:
    """Parameters from the tower that backward completes first to the last one."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((WIDTH, WIDTH), (WIDTH,), (1,))
    return [
        [nn.Parameter(torch.randn(shape, generator=generator) / 4) for shape in shapes]
        for _ in range(TOWERS)
    ]


def loss_of(buckets: Sequence[Bucket], seed: int, number: int) -> Tensor:
    """The summed loss of one micro-batch; ``number`` tells it from all others."""
    generator = torch.Generator().manual_seed(seed + 1 + number)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    y = torch.randn(ROWS, generator=generator)
    for first, second, third in reversed(buckets):
        y = y - (torch.tanh(x @ first) @ second) * third
    return (y**2).sum()


def numbers(trial: Trial, rank: int, step: int) -> list[int]:
    """The micro-batches of a rank's step; trial.size is how many."""
    return [((step * 8) + rank) * 8 + each for each in range(trial.size)]


def sgd(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    """SGD shows a wrong factor, which Adam would hide."""
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def inputs(trial: Trial, rank: int, seed: int) -> tuple[int, list[list[int]]]:
    """The seed and this rank's micro-batches of each step."""
    return seed, [numbers(trial, rank, step) for step in range(STEPS)]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """All of them in one."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> Run:
    """Runs in a rank: trains with the answer, the class ``Zero2`` of the exercise."""
    seed, steps = inputs
    buckets = buckets_of(seed)
    rows = ROWS * len(steps[0]) * mesh.dp.size
    z = answers[0](buckets, mesh.dp, sgd)
    done = Run(None, torch.empty(0), 0, [], 0, 0)
    for step, micro_batches in enumerate(steps):
        with PeakLiveBytes() as live, WireCalls() as calls:
            for number in micro_batches:
                (loss_of(buckets, seed, number) / rows).backward()
        if step == 0:
            done.peak, done.sent = live.peak, [call.op for call in calls.calls]
            done.left = sum(p.grad is not None for bucket in buckets for p in bucket)
            if all(shard.grad is not None for shard in z.shards):
                done.gradients = flat([shard.grad for shard in z.shards])
        z.step()
    done.weights = flat([p for bucket in buckets for p in bucket])
    updated = z.optimizer.param_groups[0]["params"]
    done.moments = sum(p.numel() for p in updated)
    return done


Micro = list[Tensor]  # gradients [TOWERS, ELEMENTS] of each micro-batch of a rank
Combine = Callable[[list[Micro]], list[Tensor]]  # by rank -> the whole gradient each has a piece of


def micro_gradients(seen: Seen) -> list[Micro]:
    """Of the first step, by rank and micro-batch."""
    buckets = buckets_of(seen.seed)
    parameters = [p for bucket in buckets for p in bucket]
    rows = ROWS * seen.trial.size * seen.trial.n
    return [
        [
            flat(torch.autograd.grad(loss_of(buckets, seen.seed, number) / rows, parameters)).view(
                TOWERS, ELEMENTS
            )
            for number in numbers(seen.trial, rank, 0)
        ]
        for rank in range(seen.trial.n)
    ]


def shards(whole: Tensor, rank: int, n: int) -> Tensor:
    """Rank's pieces of a gradient [TOWERS, ELEMENTS], flat."""
    size = padded(ELEMENTS, n)
    full = torch.cat([whole, whole.new_zeros(TOWERS, size - ELEMENTS)], 1)
    return full.chunk(n, 1)[rank].flatten()


def _sum(micro: list[Micro]) -> Tensor:
    return torch.stack([torch.stack(each).sum(0) for each in micro]).sum(0)


MISTAKES: tuple[tuple[Combine, str], ...] = (
    (
        lambda micro: [_sum([each[-1:] for each in micro])] * len(micro),
        "only the last micro-batch is in the shard: add what arrives to shard.grad",
    ),
    (
        lambda micro: [_sum([each[:1] for each in micro])] * len(micro),
        "only the first micro-batch is in the shard: after a bucket has left it waits for its "
        "gradients anew",
    ),
    (
        lambda micro: (
            [_sum([[(len(e) - i) * g for i, g in enumerate(e)] for e in micro])] * len(micro)
        ),
        "earlier micro-batches count several times: their gradients are still in p.grad when the "
        "next one is added; free them",
    ),
    (
        lambda micro: [torch.stack(each).sum(0) for each in micro],
        "the shard has this rank's own gradient: nothing was summed over the ranks",
    ),
    (
        lambda micro: [_sum(micro) / len(micro)] * len(micro),
        "gradients are averaged over the ranks: the losses are divided already, sum them",
    ),
)


def gradients(seen: Seen) -> str:
    """Each rank's shards of the first step's gradient."""
    n = seen.trial.n
    for rank, value in enumerate(seen.values):
        if value.gradients is None:
            return (
                f"rank {rank}: a shard has no gradient when the last backward is over: its bucket "
                "did not leave, or what arrived was not put into shard.grad"
            )
    micro = micro_gradients(seen)
    got = [value.gradients for value in seen.values]
    whole = _sum(micro)
    says = difference("gradients", got, [shards(whole, rank, n) for rank in range(n)])
    if not says or n == 1:
        return says
    for combine, message in MISTAKES:
        mistaken = combine(micro)
        if not difference("", got, [shards(mistaken[rank], rank, n) for rank in range(n)]):
            return f"{message} ({says})"
    others = [shards(whole, (rank + 1) % n, n) for rank in range(n)]
    if not difference("", got, others):
        return f"the shards are those of another rank ({says})"
    return says


def weights(seen: Seen) -> str:
    """All parameters, on every rank, after two steps: those of one process."""
    buckets = buckets_of(seen.seed)
    parameters = [p for bucket in buckets for p in bucket]
    optimizer, rows = sgd(parameters), ROWS * seen.trial.size * seen.trial.n
    start, after = flat(parameters), []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(seen.trial.n):
            for number in numbers(seen.trial, rank, step):
                (loss_of(buckets, seen.seed, number) / rows).backward()
        optimizer.step()
        after.append(flat(parameters))
    got = [value.weights for value in seen.values]
    says = difference("weights", got, [after[-1]] * seen.trial.n)
    if not says or seen.trial.n == 1:
        return says
    if not difference("", got, [start] * len(got)):
        return (
            "no parameter has changed: step updates shards, and the parameters have to follow "
            f"({says})"
        )
    if difference("", got, [got[0]] * len(got)):
        return f"ranks end with different weights: gather the shards after the step ({says})"
    if not gradients(seen):
        return (
            f"the first step's gradients are right: are shard.grad and what is missing reset, and "
            f"do the parameters follow the shards? ({says})"
        )
    return says


def calls(seen: Seen) -> str:
    """A reduce-scatter for each bucket and micro-batch, an all-gather for each bucket."""
    n, micro_batches = seen.trial.n, seen.trial.size
    size = 4 * padded(ELEMENTS, n)
    scattered, gathered = wire("reduce_scatter", size, n), wire("all_gather", size // n, n)
    right = STEPS * TOWERS * (micro_batches * scattered + gathered)
    for rank, observed in enumerate(seen.ranks):
        early = len(seen.values[rank].sent)
        if early != TOWERS * micro_batches:
            return (
                f"rank {rank} made {early} calls in the backwards of a step with {micro_batches} "
                f"micro-batches and {TOWERS} buckets; one for each is wanted, "
                f"{TOWERS * micro_batches}"
            )
        sent = sum((call.wire(n) for call in observed.calls), Fraction(0))
        if sent != right:
            ops = ", ".join(sorted({call.op for call in observed.calls}))
            return (
                f"rank {rank} sent {float(sent):,g} bytes by {ops}; (M+1)(n-1)/n of the bytes of "
                f"the gradients are {float(right) / STEPS:,g} a step, {float(right):,g} in all"
            )
    return ""


def freed(seen: Seen) -> str:
    """No full gradients: neither left over nor at the fullest moment."""
    limit = 4 * TOWERS * padded(ELEMENTS, seen.trial.n)
    for rank, value in enumerate(seen.values):
        if value.left:
            return (
                f"rank {rank}: {value.left} parameters still have a gradient when backward is "
                "over: what has been sent is freed, p.grad = None"
            )
        if value.peak >= limit:
            return (
                f"rank {rank} had {value.peak:,} bytes alive in backward; all gradients together "
                f"are {limit:,}: a bucket leaves and is freed as soon as it is full"
            )
        share = TOWERS * padded(ELEMENTS, seen.trial.n) // seen.trial.n
        if value.moments != share:
            return f"rank {rank}'s optimizer updates {value.moments:,} elements, not {share:,}"
    return ""
