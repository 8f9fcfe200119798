"""Lesson 06 in a rank: how the answers are called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from course_lib import comm
from course_lib.aliases import PARAMETER_DIM
from course_lib.grading.graders.runner.lesson_05 import refuse_gradients_of
from course_lib.grading.runner import Answers, Inputs, Unfit, named
from course_lib.grading.wire import WireCalls
from course_lib.mesh import Axis, Mesh

EXPERT = "vector of an expert"
# the dim in the ShardSpec of each parameter of 06-3; "replicated" ones have none
DIMS: dict[str, int | None] = {
    "replicated vector": None,
    "replicated matrix": None,
    "replicated 3-D tensor": None,
    "vector sharded along dim 0": 0,
    "matrix sharded along dim 0": 0,
    "matrix sharded along dim 1": 1,
    EXPERT: None,
}
START = 3.0  # of every parameter


def norms(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> dict[str, Any]:
    """06-3: parameters with the given gradients; their gradients and values afterwards."""
    parameters = {}
    for kind, gradient in given.items():
        parameter = nn.Parameter(gradient.new_full(gradient.shape, START))
        parameter.grad = gradient
        replicated = kind.startswith("replicated")
        # for answers of the first edition
        setattr(parameter, PARAMETER_DIM, None if replicated else DIMS[kind] or 0)
        if not replicated:
            comm.set_shard_spec(parameter, comm.ShardSpec(axis, DIMS[kind]))
        parameters[kind] = parameter
    answers[0](list(parameters.values()), axis)
    changed = [kind for kind, p in parameters.items() if bool((p.detach() != START).any())]
    found: dict[str, Any] = {"weights that changed": changed}
    return found | {f"gradients of the {kind}": p.grad for kind, p in parameters.items()}


def loss(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> Iterator[Any]:
    """06-4: forward and backward; two calls in turn, so that neither uses what the other saved."""
    leaf = given["z"].requires_grad_()
    losses = answers[0].apply(leaf, given["targets"], axis)
    yield
    found = {"losses": losses.detach() if isinstance(losses, Tensor) else losses}
    if not isinstance(losses, Tensor) or losses.shape != given["dloss"].shape:
        return found
    if not losses.requires_grad:
        raise Unfit("expected losses with a gradient, got a result that autograd did not record")
    with WireCalls() as wire:
        losses.backward(given["dloss"])
    sent = [(call.op, call.payload) for call in wire.calls]
    return found | {"gradients of the logits": leaf.grad, "sent in backward": sent}


def region(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> dict[str, Any]:
    """06-5: raw torch on the default group."""
    found = named(
        answers[0](*given.values()),
        "outputs", "gradients of x", "gradients of weight_in", "gradients of weight_out",
    )  # fmt: skip
    refuse_gradients_of(given)
    return {
        name: value.detach() if isinstance(value, Tensor) else value
        for name, value in found.items()
    }
