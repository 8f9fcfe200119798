"""The numbers of an estimate, without the code that computes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from course_lib.planner.catalog import Model
from course_lib.planner.configuration import Configuration
from course_lib.planner.hardware import Hardware


@dataclass(frozen=True)
class Memory:
    """Bytes on a GPU of the stage that needs most."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        """Bytes of all four."""
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class AxisTraffic:
    """The traffic of the busiest GPU over one axis in a step.

    ``payload_bytes`` are handed to the calls, ``wire_bytes`` leave the GPU. ``link`` is "node",
    "network" or "node+network". ``exposed_seconds`` are those in which nothing is computed.
    """

    calls: int
    payload_bytes: float
    wire_bytes: float
    seconds: float
    exposed_seconds: float
    link: str


@dataclass(frozen=True)
class Estimate:
    """The estimate of a step of a configuration. Times in seconds, sizes in bytes, shares 0 to 1.

    ``reasons`` says in sentences why the plan does not fit (empty if it fits), ``assumptions``
    lists the assumptions. ``parts`` splits ``step_seconds`` and adds up to it: compute (matrix
    products), elementwise (operations between them, bound by memory), bubble, exposed
    communication by axis, optimizer. The bubble is simulated with the seconds of each stage.
    ``bubble_by_formula`` is the textbook's share of total time for equal stages without
    communication, or None where there is no formula.
    """

    model: Model
    hardware: Hardware
    configuration: Configuration
    memory: Memory
    communication: Mapping[str, AxisTraffic]
    bubble_of_total: float
    bubble_of_ideal: float
    step_seconds: float
    tflops_per_gpu: float
    mfu: float
    mfu_full_attention: float
    hfu: float
    fits: bool
    headroom_bytes: float
    parameters: int
    active_parameters: int
    reasons: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    parts: Mapping[str, float] = field(default_factory=dict)
    bubble_by_formula: float | None = None

    @property
    def tokens_per_gpu_second(self) -> float:
        """Tokens per GPU and second."""
        return self.configuration.tokens / self.step_seconds / self.configuration.world

    def as_dict(self) -> dict[str, Any]:
        """Return what ``course plan --json`` prints."""
        memory = {**asdict(self.memory), "total": self.memory.total}
        plan = self.configuration
        return {
            "model": self.model.name,
            "hardware": self.hardware.name,
            "configuration": {
                **asdict(plan),
                "dtype": plan.dtype.name,
                "gpus": plan.world,
                "micro_batches": plan.micro_batches,
            },
            "memory": memory,
            "communication": {axis: asdict(one) for axis, one in self.communication.items()},
            "bubble": {
                "of_total": self.bubble_of_total,
                "of_ideal": self.bubble_of_ideal,
                "of_total_by_formula": self.bubble_by_formula,
            },
            "step_seconds": self.step_seconds,
            "parts": dict(self.parts),
            "tokens_per_gpu_second": self.tokens_per_gpu_second,
            "tflops_per_gpu": self.tflops_per_gpu,
            "mfu": self.mfu,
            "mfu_full_attention": self.mfu_full_attention,
            "hfu": self.hfu,
            "fits": self.fits,
            "headroom_bytes": self.headroom_bytes,
            "parameters": self.parameters,
            "active_parameters": self.active_parameters,
            "reasons": list(self.reasons),
            "assumptions": list(self.assumptions),
        }
