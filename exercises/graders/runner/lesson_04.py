"""Lesson 04 in a rank: how the answers are called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.grading.runner import Answers, Inputs, Unfit, named
from course_lib.mesh import Axis, Mesh
from course_lib.trace import PeakLiveBytes

STEPS, MOMENTUM, DECAY = 3, 0.9, 0.2
SIZES = "elements given to update"
ROWS, RATE = 2, 0.02  # of a micro-batch; of the optimizer in 04-4
SHARDS = "gradients of the shards"

Bucket = list[Tensor]


def after(step: int) -> str:
    """Return the name of the weights after so many steps."""
    return f"weights after step {step}"


class Momentum:
    """new weights = update(weights, gradients), with a moment that it stores; notes the sizes."""

    def __init__(self, rate: float) -> None:
        self.rate, self.moment, self.sizes = rate, None, []  # type: Any, Any, list[int]

    def __call__(self, weights: Tensor, gradients: Tensor) -> Tensor:
        self.sizes.append(weights.numel())
        moment = gradients if self.moment is None else MOMENTUM * self.moment + gradients
        self.moment = moment
        return weights - self.rate * (moment + DECAY * weights)


def stage_1(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> Iterator[Any]:
    """04-3: three steps; the two calls in turn."""
    weights, update = given["weights"], given["rule"](given["rate"])
    found: dict[str, Any] = {SIZES: update.sizes}
    for step, gradients in enumerate(given["gradients"], 1):
        new = answers[0](weights, gradients, update, axis)
        if not isinstance(new, Tensor):
            raise Unfit(f"expected the new weights, got a {type(new).__name__}")
        if new.shape != weights.shape:
            raise Unfit(
                f"expected weights of shape {list(weights.shape)}, got {list(new.shape)}: return "
                "all ranks' shards, without the padding"
            )
        if len(update.sizes) > step:
            raise Unfit(
                f"expected one call of update per step, for the own shard, got {len(update.sizes)} "
                f"in {step}: its moment would be that of several shards"
            )
        weights = new
        found[after(step)] = new.detach().clone()
        yield
    if 0 < len(update.sizes) < STEPS:
        raise Unfit(
            f"expected one call of update per step, got {len(update.sizes)} in {STEPS} on rank "
            f"{axis.rank}: its moment and its decay change the weights also where gradients are 0"
        )
    return found


def loss_of(buckets: Sequence[Bucket], x: Tensor, y: Tensor) -> Tensor:
    """Return the summed loss of a micro-batch. Backward completes bucket 0 first."""
    for first, second, third in reversed(buckets):
        y = y - (torch.tanh(x @ first) @ second) * third
    return (y**2).sum()


def sgd(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Return an optimizer that shows a wrong factor, which Adam would hide."""
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements in one tensor."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def stage_2(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> Iterator[Any]:
    """04-4: trains with two instances of the class in turn. x and y have [steps, micro-batches]."""
    buckets = [[nn.Parameter(p.clone()) for p in bucket] for bucket in given["buckets"]]
    parameters = [p for bucket in buckets for p in bucket]
    live, left, found = PeakLiveBytes(), 0, {}
    with live:
        z = answers[0](buckets, axis, sgd)
    for step, (xs, ys) in enumerate(zip(given["x"], given["y"], strict=True), 1):
        for x, y in zip(xs, ys, strict=True):
            yield
            loss = loss_of(buckets, x, y) / given["rows"]  # type: ignore[arg-type]
            with live:
                loss.backward()
        yield
        left = left or sum(p.grad is not None for p in parameters)
        if any(shard.grad is None for shard in z.shards):
            raise Unfit(
                "a shard has no gradient when the last backward is over: its bucket was not sent, "
                "or what arrived was not put into shard.grad"
            )
        found.setdefault(SHARDS, flat([shard.grad for shard in z.shards]))
        z.step()
        found[after(step)] = flat(parameters)
    updated = z.optimizer.param_groups[0]["params"]
    return found | {"left": left, "peak": live.peak, "updated": sum(p.numel() for p in updated)}


def stage_3(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> dict[str, Any]:
    """04-5: raw torch on the default group."""
    found = named(answers[0](*given.values()), "outputs", "gradients")
    shards, got = given["shards"], found["gradients"]
    count = len(got) if isinstance(got, list | tuple) else None
    if count != len(shards) or not all(isinstance(each, Tensor) for each in got):
        raise Unfit(f"expected gradients to be a list of {len(shards)} tensors, one per layer")
    for each in got:
        if each.shape != shards[0].shape:
            raise Unfit(
                f"expected gradients of shape {list(shards[0].shape)}, that of a shard with its "
                f"padding, got {list(each.shape)}"
            )
    return found | {"gradients": torch.stack(list(got))}
