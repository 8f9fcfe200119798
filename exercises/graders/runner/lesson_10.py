"""Lesson 10 in a rank: how the answers are called."""

from __future__ import annotations

from typing import Any

import torch

from course_lib.grading.runner import Answers, Inputs
from course_lib.grading.runner_placed import OUTPUT, call_with_gradients
from course_lib.mesh import Axis, Mesh


def gradient(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> dict[str, Any]:
    """10-2: the gradient of an expert, with the three axes."""
    return {"gradients": answers[0](given["gradient"], mesh.ep, mesh.edp, mesh.dp_cp)}


def layer(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> dict[str, Any]:
    """10-4: forward and backward. The gradient of an expert that no token chose may be None."""
    found = call_with_gradients(answers, given, axis, mesh)
    for number, expert in enumerate(given["experts"]):
        for name, p in expert.named_parameters():
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            found[f"gradient of the {name} of experts[{number}]"] = gradient
    return found


def raw(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> dict[str, Any]:
    """10-5: raw torch on the default group; the expert is a function of rows."""
    matrix = given["matrix"]
    expert = lambda rows: torch.tanh(rows @ matrix)  # noqa: E731
    return {OUTPUT: answers[0](given["x_TD"], given["experts_T"], expert)}
