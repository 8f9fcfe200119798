"""Published values (published.toml), what the planner computes for each, and the table of both.

``python -m course_lib.planner.published`` writes the table into docs/planner.md.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from inspect import signature
from math import sqrt
from pathlib import Path
from statistics import median
from typing import Any

from course_lib.planner.catalog import Model, custom_model, model
from course_lib.planner.configuration import Configuration, configure
from course_lib.planner.estimate import estimate
from course_lib.planner.hardware import Hardware, hardware
from course_lib.planner.parameters import parameters
from course_lib.planner.result import Estimate
from course_lib.schedule import Costs, make, simulate

PAGE = Path(__file__).parents[2] / "docs" / "planner.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


@dataclass(frozen=True)
class Row:
    """A published value. ``published`` has the digits as printed, ``given`` what it is about.

    ``bar`` is "digits" (equal at the printed digits), a mapping with an absolute or relative
    tolerance, or None: shown and not held, for the reason ``why``. The efficiency that a row with
    ``calibration`` uses comes from it and its like.
    """

    title: str
    source: str
    run: str
    quantity: str
    unit: str
    published: str
    bar: str | Mapping[str, float] | None
    calibration: bool
    why: str
    given: Mapping[str, Any]

    @property
    def value(self) -> float:
        """The published value as a number."""
        return float(self.published)

    @property
    def efficiency_key(self) -> tuple[str, str] | None:
        """The GPU, and the number format and generation, whose efficiency the row needs."""
        if "generation" not in self.given:
            return None
        return self.given["hardware"], f"{self.format}@{self.given['generation']}"

    @property
    def format(self) -> str:
        """The number format of the matrix products; fp16 counts as bf16."""
        dtype = str(self.given.get("plan", {}).get("dtype", "bf16"))
        return "bf16" if dtype == "fp16" else dtype


@dataclass(frozen=True)
class Result:
    """A row, and the planner's value for it."""

    row: Row
    ours: float

    @property
    def error(self) -> float:
        """The relative error."""
        return self.ours / self.row.value - 1

    @property
    def held(self) -> bool | None:
        """Whether the value is within the row's bar; None for a row without one."""
        bar, published = self.row.bar, self.row.published
        if bar is None:
            return None
        if isinstance(bar, str):
            digits = len(published.partition(".")[2])
            return f"{self.ours:.{digits}f}" == published
        if "absolute" in bar:
            return abs(self.ours - self.row.value) <= bar["absolute"]
        return abs(self.error) <= bar["relative"]


@cache
def rows() -> tuple[Row, ...]:
    """Return the rows of published.toml; what a row leaves out is its group's."""
    text = Path(__file__).with_name("published.toml").read_text(encoding="utf-8")
    found = []
    for group in tomllib.loads(text)["group"]:
        for row in group.pop("rows"):
            plan = {**group.get("plan", {}), **row.get("plan", {})}
            given = {"unit": "", "bar": None, "calibration": False, "why": "", **group, **row}
            given["plan"] = plan
            named = {name: given.pop(name) for name in Row.__dataclass_fields__ if name in given}
            found.append(Row(**named, given=given))
    return tuple(found)


def results(efficiency: Mapping[tuple[str, str], float] | None = None) -> list[Result]:
    """Return the planner's value for every row; ``efficiency`` instead of hardware.toml's."""
    return [Result(row, compute(row, efficiency)) for row in rows()]


def compute(row: Row, efficiency: Mapping[tuple[str, str], float] | None = None) -> float:
    """Return the planner's value for a row, in the row's unit."""
    return QUANTITIES[row.quantity](row, efficiency or {})


def fitted() -> dict[tuple[str, str], float]:
    """Return the efficiency of each GPU, number format and generation, to three digits.

    With it the calibration rows of that key are as often too fast as too slow: the median of
    ours over published is 1.
    """
    found = {}
    for key in sorted({row.efficiency_key for row in rows() if row.efficiency_key}):
        chosen = [row for row in rows() if row.efficiency_key == key and row.calibration]
        low, high = 0.05, 1.0
        while high - low > 1e-4:
            middle = sqrt(low * high)
            speeds = [_speed(row, {key: middle}) for row in chosen]
            low, high = (low, middle) if median(speeds) > 1 else (middle, high)
        found[key] = round(sqrt(low * high), 3)
    return found


def _speed(row: Row, efficiency: Mapping[tuple[str, str], float]) -> float:
    """Return how many times as fast as published the planner's run is."""
    ratio = compute(row, efficiency) / row.value
    return 1 / ratio if row.quantity == "step_seconds" else ratio


# --- quantities ---------------------------------------------------------------------------------

Efficiency = Mapping[tuple[str, str], float]


def _model(row: Row) -> Model:
    named = row.given["model"]
    if isinstance(named, str):
        return model(named)
    return custom_model(**named, name=row.run)


def _configuration(row: Row) -> Configuration:
    plan = {name: tuple(x) if isinstance(x, list) else x for name, x in row.given["plan"].items()}
    arguments = {name: plan.pop(name) for name in signature(configure).parameters if name in plan}
    return replace(configure(_model(row), row.given["gpus"], **arguments), **plan)


def _hardware(row: Row, efficiency: Efficiency) -> Hardware:
    found = hardware(row.given["hardware"])
    key = row.efficiency_key
    if key is None:
        return found
    value = efficiency.get(key) or found.efficiency_of(row.format, row.given["generation"])
    return replace(found, efficiency={row.format: value})


def _estimate(row: Row, efficiency: Efficiency) -> Estimate:
    return estimate(_model(row), _hardware(row, efficiency), _configuration(row))


def _parameters(row: Row, _: Efficiency) -> float:
    return parameters(_model(row))


def _parameters_in_billions(row: Row, _: Efficiency) -> float:
    return parameters(_model(row)) / 1e9


def _step_seconds(row: Row, efficiency: Efficiency) -> float:
    return _estimate(row, efficiency).step_seconds


def _tokens_per_gpu_second(row: Row, efficiency: Efficiency) -> float:
    return _estimate(row, efficiency).tokens_per_gpu_second


def _model_tflops(row: Row, efficiency: Efficiency) -> float:
    return _estimate(row, efficiency).tflops_per_gpu / 1e12


def _megatron_hfu_tflops(row: Row, efficiency: Efficiency) -> float:
    """96 B s l h^2 (1 + s/6h + V/16lh) over time and GPUs (arXiv:2104.04473, equation 3)."""
    found = _estimate(row, efficiency)
    m, c = found.model, found.configuration
    shares = 1 + c.seq / (6 * m.hidden) + m.vocab / (16 * m.layers * m.hidden)
    flops = 96 * c.tokens * m.layers * m.hidden**2 * shares
    return flops / c.world / found.step_seconds / 1e12


def _simulated_bubble(row: Row, _: Efficiency) -> float:
    """Bubble as a share of total time; a message delays its receiver and blocks no rank."""
    given = row.given
    chunks = given.get("chunks", 1)
    costs = {
        name: cost if name == "comm" else cost / chunks for name, cost in given["costs"].items()
    }
    schedule = make(given["schedule"], given["ranks"], given["micro_batches"], chunks)
    return simulate(schedule, Costs(**costs)).bubble_of_total


QUANTITIES: dict[str, Callable[[Row, Efficiency], float]] = {
    "parameters": _parameters,
    "parameters_in_billions": _parameters_in_billions,
    "step_seconds": _step_seconds,
    "tokens_per_gpu_second": _tokens_per_gpu_second,
    "model_tflops": _model_tflops,
    "megatron_hfu_tflops": _megatron_hfu_tflops,
    "simulated_bubble": _simulated_bubble,
}
