"""Lesson 05 in a rank: how the answers are called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.grading.runner import Answers, Inputs, Unfit, named, tensors_in
from course_lib.mesh import Axis, Mesh

PARAMETERS = ("weight_in", "bias_in", "weight_out", "bias_out")
STEPS, RATE = 3, 0.2
EXTRA = "bytes beside the shard"


def operators(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> Iterator[Any]:
    """05-3: both operators forward, then f forward on another axis, then both backward."""
    found: dict[str, Any] = {}
    results = []
    for letter, function in zip("fg", answers, strict=True):
        leaf = given[f"x of {letter}"].requires_grad_()
        y = function.apply(leaf, axis)
        if not isinstance(y, Tensor):
            raise Unfit(f"expected {letter}'s forward to return a tensor, got {type(y).__name__}")
        if not y.requires_grad:
            raise Unfit(f"{letter}: the result of apply has no gradient")
        found[f"outputs of {letter}"] = y.detach()
        results.append((letter, leaf, y))
    if mesh.dp.size > 1:
        answers[0].apply(leaf, mesh.dp)
    yield
    for letter, leaf, y in results:
        y.backward(given[f"dy of {letter}"])
        found[f"gradients of {letter}"] = leaf.grad
    return found


def mlp(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> Iterator[Any]:
    """05-4: one forward and backward, then steps of SGD; two instances in turn."""
    parallel = answers[0](given["mlp"], axis)
    yield
    _check_parameters(parallel)
    own = dict(parallel.named_parameters())
    stored = {each.untyped_storage() for each in tensors_in(parallel)}
    whole = {each.untyped_storage()._cdata for each in tensors_in(given["mlp"])}
    if any(storage._cdata in whole for storage in stored):
        raise Unfit(
            "a tensor of your module shares memory with the mlp that it was made from: clone() "
            "each shard, because a chunk is a view that keeps the whole matrix alive"
        )
    extra = {storage._cdata: storage.nbytes() for storage in stored}
    found: dict[str, Any] = {EXTRA: sum(extra.values()) - sum(p.nbytes for p in own.values())}
    x = given["x"].requires_grad_()
    y = parallel(x)
    found["outputs"] = y.detach() if isinstance(y, Tensor) else y
    yield
    if isinstance(y, Tensor) and y.shape != given["dy"].shape:
        return found
    if not (isinstance(y, Tensor) and y.requires_grad):
        raise Unfit("expected forward to return a tensor with a gradient")
    y.backward(given["dy"])
    found["gradient of x"] = x.grad if x.grad is None else x.grad.clone()
    for name in PARAMETERS:
        gradient = own[name].grad
        found[f"gradient of {name}"] = gradient if gradient is None else gradient.clone()
    optimizer = torch.optim.SGD(own.values(), lr=RATE)
    for _ in range(STEPS):
        yield
        optimizer.zero_grad()
        parallel(x).backward(given["dy"])
        optimizer.step()
    return found | {f"weight {name} after {STEPS} steps": own[name].detach() for name in PARAMETERS}


def _check_parameters(module: Any) -> None:
    own = dict(module.named_parameters()) if isinstance(module, nn.Module) else {}
    if missing := [name for name in PARAMETERS if name not in own]:
        raise Unfit(f"expected parameters {', '.join(PARAMETERS)}, but {missing[0]} is missing")
    if more := sorted(own.keys() - set(PARAMETERS)):
        raise Unfit(
            f"expected no parameters but {', '.join(PARAMETERS)}, got {', '.join(more)} too"
        )


def refuse_gradients_of(given: Inputs) -> None:
    """Raise Unfit if an answer left a gradient in its inputs."""
    if any(tensor.grad is not None for tensor in tensors_in(dict(given))):
        raise Unfit(
            "an input has a gradient after the call, to which the next backward would add: call "
            "requires_grad_() on a copy, such as x.detach().clone()"
        )


def attention(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> dict[str, Any]:
    """05-5: raw torch on the default group."""
    found = named(answers[0](*given.values()), "outputs", "gradient of x", "gradients")
    gradients = found.pop("gradients")
    if not isinstance(gradients, dict) or set(gradients) != set(given["weights"]):
        raise Unfit("expected the third value to be a dict of the gradients of q, k, v and o")
    if any(isinstance(value, Tensor) and value.requires_grad for value in found.values()):
        raise Unfit("expected y and dx without a graph: detach() them")
    refuse_gradients_of(given)
    return found | {f"gradient of {name}": value for name, value in gradients.items()}
