"""Call an answer with its inputs and the axis, and go backward if there is a gradient for it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from course_lib.grading.runner import Answers, Inputs, Unfit
from course_lib.mesh import Axis, Mesh

OUTPUT, UPSTREAM = "outputs", "gradient that arrives"


def call_forward(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> dict[str, Any]:
    """Call ``answer(*inputs, axis)``."""
    return {OUTPUT: answers[0](*given.values(), axis)}


def call_raw(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> dict[str, Any]:
    """Call ``answer(*inputs)``, which uses the default group."""
    return {OUTPUT: answers[0](*given.values())}


def call_with_gradients(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> dict[str, Any]:
    """Call ``answer(*inputs, axis)`` and its backward."""
    inputs = {name: value for name, value in given.items() if name != UPSTREAM}
    leaves = {
        name: value.requires_grad_()
        for name, value in inputs.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    y = answers[0](*inputs.values(), axis)
    if not isinstance(y, Tensor) or y.shape != given[UPSTREAM].shape:
        return {OUTPUT: y.detach() if isinstance(y, Tensor) else y}
    if not y.requires_grad:
        raise Unfit(
            "expected a result with a gradient: the collectives of comm have no backward; use its "
            "operators, such as comm.reduce_from"
        )
    y.backward(given[UPSTREAM])
    found: dict[str, Any] = {OUTPUT: y.detach()}
    return found | {f"gradient of {name}": leaf.grad for name, leaf in leaves.items()}
