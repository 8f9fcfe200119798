"""Lesson 16b in a rank: how the answers are called."""

from __future__ import annotations

from typing import Any

from course_lib.grading.runner import Act, Answers, Inputs
from course_lib.mesh import Axis, Mesh

# All of comm that sends is refused, because the answers are to be raw torch.
SENDERS = tuple(
    f"course_lib.comm.{name}"
    for name in ("transfer:issue", "p2p:start_exchange", "p2p:start_send", "p2p:start_recv")
)


def in_group(act: Act, answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> Any:
    """Call the act of another lesson; the answers get ``axis.group`` in the place of the axis."""
    return act([_with_group(answer) for answer in answers], given, axis, mesh)


def _with_group(answer: Any) -> Any:
    return lambda *inputs: answer(*inputs[:-1], inputs[-1].group)


# --- 16b-1 ---------------------------------------------------------------------------------------


# --- 16b-2 ---------------------------------------------------------------------------------------


# --- 16b-3 ---------------------------------------------------------------------------------------


# --- 16b-4 ---------------------------------------------------------------------------------------


# --- 16b-5 ---------------------------------------------------------------------------------------


# --- 16b-6 ---------------------------------------------------------------------------------------
