"""The cases of system design: model, cluster and the limits that a proposal must keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from course_lib.planner import Model, configure, estimate, hardware, model, serve
from course_lib.planner.configuration import suggestion
from course_lib.planner.estimate import RESERVE
from course_lib.planner.hardware import Hardware
from course_lib.planner.mixed import estimate_mixed
from course_lib.planner.result import Estimate
from course_lib.planner.serve import Serving


@dataclass(frozen=True)
class Case:
    """A case; its texts are in design_<language>.toml.

    ``groups``: hardware and number of GPUs, in the order of ranks. ``limits`` by name, in the unit
    of the planner; the limit of memory follows from the hardware. Training fixes ``seq`` and
    ``global_batch`` (sequences per step), serving the tokens of ``prompt`` and ``generate``.
    ``good``: a proposal that keeps all limits. ``lesson`` explains it.
    """

    id: str
    lesson: str
    model_name: str
    groups: tuple[tuple[str, int], ...]
    limits: Mapping[str, float]
    good: str
    seq: int | None = None
    global_batch: int | None = None
    prompt: int | None = None
    generate: int | None = None

    @property
    def model(self) -> Model:
        """The model of the catalog."""
        return model(self.model_name)

    @property
    def machines(self) -> list[tuple[Hardware, int]]:
        """Hardware and number of GPUs."""
        return [(hardware(name), number) for name, number in self.groups]

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return sum(number for _, number in self.groups)

    @property
    def per_node(self) -> int:
        """GPUs per node."""
        return min(one.gpus_per_node for one, _ in self.machines)

    @property
    def serving(self) -> bool:
        """Whether the case is one of inference."""
        return self.prompt is not None

    @property
    def fixed(self) -> dict[str, int]:
        """The arguments that the case fixes."""
        names = ("seq", "global_batch", "prompt", "generate", "gpus")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def memory_limit(self) -> float:
        """Bytes of the smallest GPU that a plan may use."""
        return min(one.capacity_bytes for one, _ in self.machines) * (1 - RESERVE)

    def run(self, given: Mapping[str, Any]) -> Estimate | Serving:
        """Return what the planner says of a proposal; ValueError if it is impossible."""
        arguments, (first, *others) = dict(given), self.machines
        if self.serving:
            sizes: dict[str, Any] = {name: getattr(self, name) for name in ("prompt", "generate")}
            sizes["batch"] = arguments.pop("batch")
            return serve(
                self.model, first[0], configure(self.model, self.gpus, **arguments), **sizes
            )
        arguments |= {"seq": self.seq, "global_batch": self.global_batch}
        plan = configure(self.model, self.gpus, **arguments)
        if others:
            return estimate_mixed(self.model, self.machines, plan)
        return estimate(self.model, first[0], plan)


TRAINING = {"exposed": 0.25, "bubble": 0.1, "mfu": 0.42}
CASES = (
    Case(
        "dense-180b",
        "14",
        "falcon-180b",
        (("h100", 128),),
        TRAINING,
        "tp=8 pp=4 dp=4 zero=1",
        seq=2048,
        global_batch=2048,
    ),
    Case(
        "long-context",
        "09",
        "llama-3-70b",
        (("h100", 256),),
        TRAINING,
        "tp=8 cp=16 pp=2 dp=1 zero=1",
        seq=131072,
        global_batch=32,
    ),
    Case(
        "experts",
        "10",
        "mixtral-8x7b",
        (("h100", 64),),
        TRAINING,
        "tp=2 pp=2 dp=16 ep=8 zero=1",
        seq=8192,
        global_batch=512,
    ),
    Case(
        "two-kinds",
        "14",
        "llama-3-70b",
        (("a100-80", 32), ("h100", 32)),
        TRAINING,
        "tp=8 pp=4 dp=2 zero=1 layers=12,12,28,28",
        seq=8192,
        global_batch=512,
    ),
    Case(
        "latency",
        "13b",
        "llama-3-70b",
        (("h100", 16),),
        {"ttft": 3.0, "tpot": 0.009, "throughput": 7000.0},
        "tp=8 dp=2 batch=32",
        prompt=1024,
        generate=512,
    ),
)


def find(id: str) -> Case:
    """Return the case ``id``; ValueError with the nearest ids if there is none."""
    by_id = {one.id: one for one in CASES}
    if id not in by_id:
        raise ValueError(f"no case is called {id!r}; {suggestion(id, by_id)}")
    return by_id[id]
