"""Lesson 03 in a rank: how the answers are called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.grading.runner import Answers, Inputs, Unfit, unchanged
from course_lib.grading.wire import WireCalls
from course_lib.mesh import Axis, Mesh

RATE, MOMENTUM = 0.02, 0.9


def squares(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Return the summed loss of 03-2."""
    return ((x @ w - y) ** 2).sum()


def scale(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> dict[str, Any]:
    """03-2: the loss, and the gradient that it gives to the weights."""
    w = given["w"].requires_grad_()
    total = squares(given["x"], given["y"], w)
    loss = answers[0](total, given["count"], axis)
    if isinstance(loss, float) or (isinstance(loss, Tensor) and not loss.requires_grad):
        raise Unfit(
            "expected a loss with a gradient, got one without: a number has none, and neither has "
            "the result of a collective; divide total itself"
        )
    if not isinstance(loss, Tensor):
        return {"loss": loss}
    loss.backward()
    return {"loss": loss.detach().to(total.dtype), "gradient of w": w.grad}


def bucket(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> Iterator[Any]:
    """03-3: the flat gradients after the call; two buckets in turn."""
    parameters = [nn.Parameter(weight) for weight in given["weights"]]
    for parameter, gradient in zip(parameters, given["gradients"], strict=True):
        parameter.grad = gradient
    answers[0](parameters, axis)
    gradients = [p.grad for p in parameters]
    for number, gradient in enumerate(gradients):
        if gradient is None:
            raise Unfit(
                f"expected a gradient for parameter {number} on rank {axis.rank}, got None: a "
                "parameter that a rank did not use counts as zeros and gets the sum of the others"
            )
    now = flat(gradients)
    yield
    later = flat(gradients)
    return {"gradients": later, "overwritten": not unchanged(later, now)}


def flat(tensors: Sequence[Tensor | None]) -> Tensor:
    """Return all elements in one tensor; a missing gradient as NaN."""
    missing = torch.full((1,), torch.nan)
    return torch.cat([missing if t is None else t.detach().flatten() for t in tensors])


def loss_of(towers: Any, order: Sequence[int], x: Tensor, y: Tensor) -> Tensor:
    """Return the summed loss of a micro-batch in 03-4. The towers are used in ``order``; backward
    completes their gradients from the last to the first."""
    for number in order:
        first, second = towers[number]
        y = y - torch.tanh(x @ first) @ second
    return (y**2).sum()


def used(own: Inputs, step: int) -> list[list[int]]:
    """Return the towers that each micro-batch of a step uses, in their order: ``orders`` are those
    of the last micro-batch, ``earlier`` those of the others."""
    many = len(own["batches"][step])
    return [own["earlier"][step]] * (many - 1) + [own["orders"][step]]


def overlap(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> Iterator[Any]:
    """03-4: steps of SGD; two instances in turn.

    "sent" has, by step, the calls made before the last gradient was computed and before backward
    returned, and how many of these were waited for by then.
    """
    towers = [[nn.Parameter(w.clone()) for w in tower] for tower in given["towers"]]
    parameters = [p for tower in towers for p in tower]
    optimizer = torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM)
    wire, made, missing, overwritten = WireCalls(), [0], False, False
    found: dict[str, Any] = {"sent": []}
    for first, _ in towers:  # before the hooks of the answer
        first.register_post_accumulate_grad_hook(lambda _: made.append(len(wire.calls)))
    sync = answers[0](towers[::-1], axis)
    yield
    for step, batches in enumerate(given["batches"]):
        optimizer.zero_grad()
        losses = [
            loss_of(towers, order, x, y) / given["rows"]
            for order, (x, y) in zip(used(given, step), batches, strict=True)
        ]
        before = len(wire.calls)
        with wire:
            with sync.accumulate():
                for loss in losses[:-1]:
                    loss.backward()
            losses[-1].backward()
            calls = wire.calls[before:]
            waited = sum(call.waited for call in calls)
            found["sent"].append((made[-1] - before, len(calls), waited))
            sync.finish()
        missing |= any(p.grad is None for p in parameters)
        now = flat([p.grad for p in parameters])
        yield
        found[f"gradients of step {step + 1}"] = later = flat([p.grad for p in parameters])
        overwritten |= not unchanged(later, now)
        optimizer.step()
        yield
    if missing:  # at the end, because other ranks wait for the calls of this one
        raise Unfit(
            "expected a gradient for every parameter after finish, got None for one that this rank "
            "did not use: its bucket is sent all the same, with zeros, and the result of all ranks "
            "is its gradient"
        )
    return found | {"weights after the last step": flat(parameters), "overwritten": overwritten}


def training(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> dict[str, Any]:
    """03-5: raw torch on the default group."""
    model = given["model"]
    optimizer = torch.optim.SGD(model.parameters(), **given["options"])
    answers[0](model, given["batches"], optimizer, given["max_norm"])
    return {"weights": flat(list(model.parameters()))}
