"""Published values (published.toml), what the planner computes for each, and the table of both.

``python -m course_lib.planner.published`` writes the table into docs/planner.md.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from inspect import signature
from itertools import groupby
from math import sqrt
from pathlib import Path
from statistics import median
from typing import Any

from course_lib.formulas.moves import Move, entering, leaving, of_data
from course_lib.formulas.pp import stage_boundaries
from course_lib.ledger import wire
from course_lib.planner.catalog import Model, custom_model, model, models
from course_lib.planner.configuration import Configuration, configure
from course_lib.planner.estimate import estimate
from course_lib.planner.flops import hardware_flops, step_flops
from course_lib.planner.hardware import Hardware, hardware
from course_lib.planner.in_flight import in_flight
from course_lib.planner.links import Span, seconds
from course_lib.planner.memory import (
    activation_bytes,
    layer_activations,
    memory,
    state_bytes,
    state_memory,
)
from course_lib.planner.parameters import parameters
from course_lib.planner.result import Estimate
from course_lib.schedule import Costs, make, simulate

PAGE = Path(__file__).parents[2] / "docs" / "planner.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
RUNS = "Runs"


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
    """Return the rows: the counts in models.toml, and those of published.toml.

    What a row of published.toml leaves out is its group's.
    """
    found = [_count_row(one) for one in map(model, models()) if one.published]
    for group in _data()["group"]:
        shared = {name: entry for name, entry in group.items() if name != "rows"}
        for row in group["rows"]:
            given = {"unit": "", "bar": None, "calibration": False, "why": "", **shared, **row}
            given["plan"] = {**shared.get("plan", {}), **row.get("plan", {})}
            named = {name: given.pop(name) for name in Row.__dataclass_fields__ if name in given}
            found.append(Row(**named, given=given))
    return tuple(found)


def _count_row(one: Model) -> Row:
    """Return the row of a model of the catalog, which prints "18.4B", "174,600M" or all digits."""
    digits, unit = one.published.replace(",", ""), ""
    if digits.endswith(("B", "M")):
        unit = "10^9"
        digits = digits[:-1] if digits.endswith("B") else f"{float(digits[:-1]) / 1000:g}"
    given = {"model": one.name}
    quantity = "parameters_in_billions" if unit else "parameters"
    return Row(
        "Parameters", one.source, one.name, quantity, unit, digits, "digits", False, "", given
    )


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))


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


# --- the table ----------------------------------------------------------------------------------


def table(found: Sequence[Result]) -> str:
    """Return the results as Markdown: by title and source, then the efficiencies and errors."""
    lines = []
    for title, of_title in groupby(found, key=lambda one: one.row.title):
        lines += ["", f"### {title}"]
        for (source, why), same in groupby(
            of_title, key=lambda one: (_source(one.row), one.row.why)
        ):
            lines += ["", f"{source}{f' Not held: {why}.' if why else ''}", ""]
            lines += ["| run | plan | published | ours | error | |", "|---|---|--:|--:|--:|---|"]
            lines += [_line(one) for one in same]
    return "\n".join([*summary(found), *lines]) + "\n"


def summary(found: Sequence[Result]) -> list[str]:
    """Return the lines of the table of bars, and of the table of efficiencies."""
    lines = [
        "| values | rows | within the bar | median error | largest error |",
        "|---|--:|--:|--:|--:|",
    ]
    for title in dict.fromkeys(one.row.title for one in found):
        held = [one for one in found if one.row.title == title and one.held is not None]
        lines.append(_errors(title, [one for one in held if not one.row.calibration]))
        if title == RUNS:
            lines.append(
                _errors("Runs used for calibration", [one for one in held if one.row.calibration])
            )
    lines += [
        "",
        "| GPU | format | software | efficiency | rows used | rows not used | their median error |",
    ]
    lines += ["|---|---|---|--:|--:|--:|--:|"]
    for key in sorted({one.row.efficiency_key for one in found if one.row.efficiency_key}):
        name, (dtype, generation) = key[0], key[1].split("@")
        of_key = [one for one in found if one.row.efficiency_key == key]
        others = [one for one in of_key if not one.row.calibration]
        value = hardware(name).efficiency_of(dtype, generation)
        lines.append(
            f"| {name} | {dtype} | {generation} | {value:.3f} | {len(of_key) - len(others)} | "
            f"{len(others)} | {median(abs(one.error) for one in others):.1%} |"
        )
    return lines


def _errors(title: str, held: Sequence[Result]) -> str:
    errors = [abs(one.error) for one in held]
    within = sum(bool(one.held) for one in held)
    return f"| {title} | {len(held)} | {within} | {median(errors):.1%} | {max(errors):.1%} |"


def _source(row: Row) -> str:
    unit = f", in {row.unit}" if row.unit and row.unit != "%" else ""
    return f"{row.source[0].upper()}{row.source[1:]}{unit}."


def _line(one: Result) -> str:
    row = one.row
    mark = "calibration" if row.calibration else {False: "**misses**"}.get(one.held, "")  # type: ignore[arg-type]
    run = f"{row.run}, {row.given['gpus']:,} GPUs" if row.given.get("gpus", 1) > 1 else row.run
    ours = f"{one.ours:.{len(row.published.partition('.')[2])}f}"
    return f"| {run} | {_plan(row.given.get('plan', {}))} | {row.published} | {ours} | {one.error:+.1%} | {mark} |"


def _plan(plan: Mapping[str, Any]) -> str:
    """Return the degrees and the batch of a plan in short."""
    names = {"tp": "tp", "pp": "pp", "chunks": "v", "cp": "cp", "ep": "ep", "zero": "zero"}
    parts = [f"{short} {plan[name]}" for name, short in names.items() if plan.get(name, 1) != 1]
    if "micro_batch" in plan:
        parts.append(f"b {plan['micro_batch']}")
    if "global_batch" in plan:
        parts.append(f"B {plan['global_batch']:,}")
    return ", ".join(parts)


def write() -> None:
    """Write the table into docs/planner.md, between its two markers."""
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{table(results())}{END}{after}", encoding="utf-8")


# --- quantities ---------------------------------------------------------------------------------

Efficiency = Mapping[tuple[str, str], float]


def _model(row: Row) -> Model:
    name = row.given["model"]
    sizes = _data()["models"].get(name)
    return model(name) if sizes is None else custom_model(**sizes, name=name)


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
    others = {name: x for name, x in found.efficiency.items() if name.split("@")[0] != row.format}
    return replace(found, efficiency={**others, row.format: value})


def _estimate(row: Row, efficiency: Efficiency) -> Estimate:
    return estimate(_model(row), _hardware(row, efficiency), _configuration(row))


def _parameters(row: Row, _: Efficiency) -> float:
    return parameters(_model(row))


def _states(row: Row) -> float:
    """Bytes of states that ``elements`` take on one of ``shards`` ranks."""
    given = row.given
    return state_bytes(
        given["elements"],
        zero=given["zero"],
        shards=given["shards"],
        recipe=given["recipe"],
        gathered=given.get("gathered", 0.0),
    ).total


def _layer_activations_in_sbh(row: Row, _: Efficiency) -> float:
    m, c = _model(row), _configuration(row)
    saved = layer_activations(m, c, 0).saved(c.recompute)
    return saved / (c.seq * c.micro_batch * m.hidden)


def _saved_gib(row: Row, _: Efficiency) -> float:
    """GiB that the layers of the first stage save, without what recomputation needs at a time."""
    m, c = _model(row), _configuration(row)
    saved = layer_activations(m, c, 0).saved(c.recompute)
    whole = in_flight(c.schedule, c.pp, c.micro_batches, 0, c.chunks).whole
    return sum(whole) * saved * m.layers / c.pp / c.chunks / 2**30


def _activation_mib(row: Row, _: Efficiency) -> float:
    return activation_bytes(_model(row), _configuration(row), 0) / 2**20


def _weight_and_optimizer_mib(row: Row, _: Efficiency) -> float:
    return state_memory(_model(row), _configuration(row)).total / 2**20


def _memory_gib(row: Row, _: Efficiency) -> float:
    return memory(_model(row), _configuration(row)).total / 2**30


def _data_elements_per_parameter(row: Row, _: Efficiency) -> float:
    """Elements that a rank sends per step and parameter; all numbers have one size."""
    n = row.given["ranks"]
    moves = of_data(row.given["zero"], [n], n, itemsize=1, gradient_itemsize=1).moves
    return float(sum(move.wire for move in moves)) / n


def _tp_elements_in_bsh(row: Row, _: Efficiency) -> float:
    """Elements that a rank sends in a layer: two regions, entered and left."""
    n, by_rows = row.given["ranks"], row.given.get("rows", False)
    both = entering(n, n, rows=by_rows).wire(row.given.get("forwards", 1))
    both += leaving(n, n, rows=by_rows).wire(row.given.get("forwards", 1))
    return float(2 * both) / n


def _stage_boundaries(row: Row, _: Efficiency) -> float:
    given = row.given
    return stage_boundaries(make(given["schedule"], given["ranks"], 24, given["chunks"]))


def _bus_factor(row: Row, _: Efficiency) -> float:
    return float(wire(row.given["op"], row.given["ranks"], row.given["ranks"]) / row.given["ranks"])


def _bus_gb_per_second(row: Row, _: Efficiency) -> float:
    op, machine = row.given["op"], hardware(row.given["hardware"])
    over = Span(machine.gpus_per_node, row.given["nodes"])
    n = over.inside * over.nodes
    payload = Fraction(int(row.given["payload"]), n if op == "all_gather" else 1)
    move = Move(op, payload, n)
    return float(move.wire) / seconds([move], over, machine) / 1e9


def _mfu_of_time(row: Row, _: Efficiency) -> float:
    return _percent_of_time(row, step_flops(_model(row), _configuration(row), "full"))


def _hfu_of_time(row: Row, _: Efficiency) -> float:
    flops = hardware_flops(_model(row), _configuration(row), "full", core_forwards=3)
    return _percent_of_time(row, flops)


def _percent_of_time(row: Row, flops: float) -> float:
    peak = hardware(row.given["hardware"]).peak["bf16"]
    return 100 * flops / row.given["gpus"] / row.given["seconds"] / peak


def _share_of_peak(row: Row, _: Efficiency) -> float:
    return 100 * row.given["tflops"] * 1e12 / hardware(row.given["hardware"]).peak["bf16"]


def _training_days(row: Row, _: Efficiency) -> float:
    """8TP/nX: a forward more than model FLOPs, attention and LM head left out."""
    flops = 8 * row.given["tokens"] * parameters(_model(row))
    return flops / row.given["gpus"] / row.given["tflops"] / 1e12 / 86400


def _simulated_bubble(row: Row, _: Efficiency) -> float:
    """Bubble as a share of total time; a message delays its receiver and blocks no rank."""
    given = row.given
    v = given.get("chunks", 1)
    costs = {name: cost if name == "comm" else cost / v for name, cost in given["costs"].items()}
    schedule = make(given["schedule"], given["ranks"], given["micro_batches"], v)
    return simulate(schedule, Costs(**costs)).bubble_of_total


def _step_seconds(row: Row, efficiency: Efficiency) -> float:
    return _estimate(row, efficiency).step_seconds


def _tokens_per_gpu_second(row: Row, efficiency: Efficiency) -> float:
    return _estimate(row, efficiency).tokens_per_gpu_second


def _model_tflops(row: Row, efficiency: Efficiency) -> float:
    return _estimate(row, efficiency).tflops_per_gpu


def _megatron_hfu_tflops(row: Row, efficiency: Efficiency) -> float:
    """96 B s l h^2 (1 + s/6h + V/16lh) over time and GPUs (arXiv:2104.04473, equation 3)."""
    found = _estimate(row, efficiency)
    flops = hardware_flops(found.model, found.configuration, "full")
    return flops / found.configuration.world / found.step_seconds / 1e12


QUANTITIES: dict[str, Callable[[Row, Efficiency], float]] = {
    "parameters": _parameters,
    "parameters_in_billions": lambda row, _: parameters(_model(row)) / 1e9,
    "state_gb": lambda row, _: _states(row) / 1e9,
    "state_gib": lambda row, _: _states(row) / 2**30,
    "state_bytes_per_parameter": lambda row, _: _states(row) / row.given["elements"],
    "layer_activations_in_sbh": _layer_activations_in_sbh,
    "saved_gib": _saved_gib,
    "activation_mib": _activation_mib,
    "weight_and_optimizer_mib": _weight_and_optimizer_mib,
    "memory_gib": _memory_gib,
    "data_elements_per_parameter": _data_elements_per_parameter,
    "tp_elements_in_bsh": _tp_elements_in_bsh,
    "stage_boundaries": _stage_boundaries,
    "bus_factor": _bus_factor,
    "bus_gb_per_second": _bus_gb_per_second,
    "mfu_of_time": _mfu_of_time,
    "hfu_of_time": _hfu_of_time,
    "share_of_peak": _share_of_peak,
    "training_days": _training_days,
    "simulated_bubble": _simulated_bubble,
    "step_seconds": _step_seconds,
    "tokens_per_gpu_second": _tokens_per_gpu_second,
    "model_tflops": _model_tflops,
    "megatron_hfu_tflops": _megatron_hfu_tflops,
}


if __name__ == "__main__":
    write()
