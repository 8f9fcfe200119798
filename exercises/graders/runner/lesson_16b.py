"""Lesson 16b in a rank: how the answers are called."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.grading.graders.runner import lesson_03, lesson_05
from course_lib.grading.runner import Act, Answers, Inputs, Unfit
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


# --- 16b-2 ---------------------------------------------------------------------------------------


def ddp(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> Any:
    """The steps of 03-4, with parameters from the first tower to the last."""

    def built(buckets: Any, axis: Axis) -> Any:
        parameters = [p for tower in reversed(buckets) for p in tower]
        return answers[0](parameters, given["bucket_bytes"], axis.group)

    return lesson_03.overlap([built], given, axis, mesh)


# --- 16b-3 ---------------------------------------------------------------------------------------


class _MLP(nn.Module):
    """The answers as the module of 05-4; it does not communicate itself."""

    def __init__(self, answers: Answers, mlp: Any, axis: Axis) -> None:
        super().__init__()
        self.answers, self.group = list(answers), axis.group
        whole = (mlp.fc_in.weight, mlp.fc_in.bias, mlp.fc_out.weight, mlp.fc_out.bias)
        for name, weight, dim in zip(lesson_05.PARAMETERS, whole, (0, 0, 1, None), strict=True):
            shard = weight if dim is None else weight.chunk(axis.size, dim)[axis.rank]
            own = shard.detach().clone(memory_format=torch.contiguous_format)
            self.register_parameter(name, nn.Parameter(own))

    def forward(self, x: Tensor) -> Any:
        weight_in, bias_in, weight_out, bias_out = self.parameters()
        h = self.answers[0](x, weight_in, bias_in, self.group)
        if not isinstance(h, Tensor) or h.shape != (*x.shape[:-1], len(weight_in)):
            shape = list(h.shape) if isinstance(h, Tensor) else type(h).__name__
            raise Unfit(
                f"expected column_linear to return this rank's {len(weight_in)} features for each "
                f"token of x {list(x.shape)}, got {shape}"
            )
        return self.answers[1](F.gelu(h), weight_out, bias_out, self.group)


def linears(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> Any:
    """The steps of 05-4: GELU between the two linears."""
    return lesson_05.mlp([partial(_MLP, answers)], given, axis, mesh)


# --- 16b-4 ---------------------------------------------------------------------------------------


# --- 16b-5 ---------------------------------------------------------------------------------------


# --- 16b-6 ---------------------------------------------------------------------------------------
