"""Lesson 07 in a rank: how the answers are called."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from course_lib.grading.runner import Answers, Inputs, Unfit
from course_lib.mesh import Axis, Mesh
from course_lib.trace import SavedActivations

RATE = 0.5  # of plain SGD
GRADIENT, SAVED, DONE = "gradient of the stage", "saved", "done"
BEFORE, AFTER = "weights before the optimizer's step", "weights after the optimizer's step"


def mean_square(y: Tensor, target: Tensor) -> Tensor:
    """A loss of one micro-batch."""
    return (y - target).square().mean()


def mean_distance(y: Tensor, target: Tensor) -> Tensor:
    """Another loss of one micro-batch."""
    return (y - 2 * target).abs().mean()


LOSSES = (mean_square, mean_distance)


def exchanges(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> dict[str, Any]:
    """07-4: every exchange of this rank in order; ranks without one have an empty tensor."""
    nothing = {f"received {k}": torch.zeros(0) for k in range(given["exchanges"])}
    found = {
        f"received {k}": answers[0](given[f"mine {k}"], given[f"like {k}"], peer)
        for k, peer in enumerate(given["peers"])
    }
    return nothing | found


def step(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> dict[str, Any]:
    """07-5: the step of this rank, then the optimizer."""
    stage, row, batches = given["stage"], given["row"], given["micro-batches"]
    optimizer = torch.optim.SGD(stage.parameters(), lr=RATE)
    for p, gradient in zip(stage.parameters(), given[".grad before"], strict=True):
        p.grad = gradient if gradient is None else gradient.clone()
    done: list[str] = []

    def note(*call: Any) -> None:
        mb = sum("F" in each for each in done)
        done.append(f"F{mb}")
        if call[-1].requires_grad:
            call[-1].register_hook(lambda _: done.append(f"B{mb}"))

    watching = stage.register_forward_hook(note)
    with SavedActivations(stage, [tensor for pair in batches for tensor in pair]) as saved:
        loss = answers[0](row, stage, batches, LOSSES[given["loss"]], axis)
    watching.remove()
    gradients, before = [p.grad for p in stage.parameters()], flat(stage.parameters())
    optimizer.step()
    return {
        "loss": _number(loss, axis),
        GRADIENT: flat(gradients) if all(g is not None for g in gradients) else None,
        BEFORE: before,
        AFTER: flat(stage.parameters()),
        SAVED: saved.peak,
        DONE: " ".join(done),
    }


def _number(loss: Any, axis: Axis) -> Tensor:
    number = loss.numel() == 1 if isinstance(loss, Tensor) else hasattr(type(loss), "__float__")
    if isinstance(loss, bool) or not number:
        what = "the loss of the step" if axis.rank == axis.size - 1 else "0.0"
        raise Unfit(f"expected rank {axis.rank} to return {what}, got a {type(loss).__name__}")
    value = loss.detach() if isinstance(loss, Tensor) else float(loss)
    return torch.as_tensor(value, dtype=torch.float32).reshape(())


def flat(tensors: Any) -> Tensor:
    """Return the elements of all tensors in one dimension."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])
