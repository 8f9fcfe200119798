"""Lesson 01 in a rank: how the answers are called."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import comm
from course_lib.grading.answers import shown
from course_lib.grading.runner import Answers, Inputs, Unfit, named, unchanged
from course_lib.mesh import Axis, Mesh

WORDS = COMPUTE, NETWORK = "compute", "network"
GRADIENT = "all_reduce of the gradient"


@dataclass
class Machine:
    """One rank's computing, a slow link, and a clock that runs only while the rank computes, sends
    or waits for others, so that a busy computer does not matter."""

    axis: Axis
    computing: float  # seconds of this rank
    sending: float  # seconds of the whole gradient
    gradient: Tensor
    clock: float = 0.0
    steps: list[str] = field(default_factory=list)  # what it did, in order

    def now(self) -> float:
        """Return the seconds on this rank's clock."""
        return self.clock

    def compute(self) -> None:
        """Do this rank's computing of the step."""
        self.steps.append(COMPUTE)
        self.clock += self.computing

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        own = torch.tensor([self.clock], dtype=torch.float64)
        self.clock = comm.all_reduce_max(own, self.axis).item()

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over the ranks; it begins when the last rank has joined."""
        whole = x.shape == self.gradient.shape and x.equal(self.gradient)
        self.steps.append(GRADIENT if whole else "all_reduce of another tensor")
        total = comm.all_reduce(x, self.axis)
        self.barrier()
        self.clock += self.sending * x.numel() / self.gradient.numel()
        return total


def limit(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> dict[str, Any]:
    """01-4: bytes and limit, and the steps of the machine."""
    machine = Machine(axis, given["computing"], given["sending"], given["gradient"])
    found = named(answers[0](machine, given["gradient"], axis), "bytes", "limit")
    word = found["limit"].strip().lower() if isinstance(found["limit"], str) else found["limit"]
    if word not in WORDS:
        raise Unfit(
            f'expected "compute" or "network" from rank {axis.rank}, got {shown(found["limit"])}'
        )
    return {"bytes": found["bytes"], "limit": word, "steps": machine.steps}


def tensors_of(plan: Inputs) -> list[Tensor]:
    """Return the tensors of one rank in 01-5: its kind, and a few that every rank has."""
    kind, unit = plan["kind"], plan["unit"]
    beside = [
        torch.arange(plan["beside"]),
        torch.zeros(2 * plan["beside"] + 1, dtype=torch.uint8),
        torch.zeros(0),
    ]
    if kind == "plain":
        return [nn.Parameter(torch.zeros(6 * unit)), *beside]
    if kind == "narrow":  # more elements, fewer bytes
        return [torch.zeros(9 * unit, dtype=torch.bfloat16), *beside]
    if kind == "views":  # one storage, shown three times
        whole = torch.zeros(4, unit)
        return [whole, whole.T, *beside, whole[1:3]]
    if kind == "tied":
        weight = nn.Parameter(torch.zeros(4 * unit))
        return [weight, *beside, weight, weight.data]
    flat = torch.zeros(9 * unit)  # a small part of it is shown, all of it is in memory
    return [flat[unit : unit + 16], *beside]


def fullest(answers: Answers, given: Inputs, axis: Axis, mesh: Mesh) -> dict[str, Any]:
    """01-5: raw torch on the default group."""
    tensors = tensors_of(given)
    before = [tensor.detach().clone() for tensor in tensors]
    answers[0](tensors)
    value = answers[0](tensors)  # a second time: nothing may be remembered
    if not unchanged(tensors, before):
        raise Unfit(f"expected the tensors to be unchanged on rank {dist.get_rank()}")
    return named(value.tolist() if isinstance(value, Tensor) else value, "rank", "bytes")
