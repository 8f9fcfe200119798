"""Lesson 02 in a rank: how the answers are called."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from course_lib.grading.runner import Answers, Inputs, Unfit
from course_lib.mesh import Axis, Mesh


def on_axis(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> dict[str, Any]:
    """02-3 and 02-4."""
    return _called(answers, axis, given["x"], axis)


def on_default_group(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> dict[str, Any]:
    """02-5: raw torch, without an axis."""
    return _called(answers, axis, given["x"])


def _called(answers: Answers, axis: Axis, x: Tensor, *more: Axis) -> dict[str, Any]:
    before = x._version  # torch counts the writes, also one that puts the old values back
    outputs = answers[0](x, *more)
    if x._version != before:
        raise Unfit(
            f"expected x to be unchanged on rank {axis.rank} at all times, but the answer wrote "
            "into it: receive into another tensor, and change a copy"
        )
    return {"outputs": outputs}
