"""Published values (published.toml), what the planner computes for each, and the table of both.

``python -m course_lib.planner.published`` writes the table into docs/planner.md; with ``--fit`` it
prints the efficiencies that the calibration rows give, for hardware.toml.
"""

from __future__ import annotations

import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from inspect import signature
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from course_lib.formulas.cp import ulysses_wire_bytes
from course_lib.formulas.ep import even_wire_bytes
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
COUNTS, RUNS = "Parameters", "Runs"
ORDER = (RUNS, "Pipelines", "Memory", "Communication", "Utilization", COUNTS)


@dataclass(frozen=True)
class Row:
    """A published value. ``published`` has the digits as printed, ``given`` what it is about.

    ``bar`` is "digits" (equal at the printed digits), a mapping with an absolute or relative
    tolerance, or None: shown and not held, for the reason ``why``. ``calibration``: the efficiency
    of the GPU, number format and generation comes from this row and its like.
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
        """The relative error; 0 for two zeros."""
        return self.ours / self.row.value - 1 if self.row.value else self.ours

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
    """Return the rows: parameter counts from models.toml, and the rows of published.toml.

    What a row of published.toml leaves out is its group's.
    """
    found: list[Row] = []
    for group in _data()["group"]:
        shared = {name: entry for name, entry in group.items() if name != "rows"}
        for row in group["rows"]:
            given = {"unit": "", "bar": None, "calibration": False, "why": "", **shared, **row}
            given["plan"] = {**shared.get("plan", {}), **row.get("plan", {})}
            named = {name: given.pop(name) for name in Row.__dataclass_fields__ if name in given}
            found.append(Row(**named, given=given))
    found += [_count_row(one) for one in map(model, models()) if one.published]
    return tuple(_with_calibration(sorted(found, key=lambda row: ORDER.index(row.title))))


def _with_calibration(found: Sequence[Row]) -> Iterator[Row]:
    """Yield the rows; the first, third, fifth ... held row of a generation is for calibration.

    At most half of the rows: the last one of an odd number is not.
    """
    numbers = Counter(row.efficiency_key for row in found if row.bar is not None)
    seen: Counter[tuple[str, str] | None] = Counter()
    for row in found:
        key = row.efficiency_key
        if key is not None and row.bar is not None:
            chosen = seen[key] % 2 == 0 and seen[key] + 1 < numbers[key]
            seen[key] += 1
            row = replace(row, calibration=chosen)
        yield row


def _count_row(one: Model) -> Row:
    """Return the row of a model of the catalog, which prints "18.4B", "174,600M" or all digits."""
    digits, unit = one.published.replace(",", ""), ""
    if digits.endswith(("B", "M")):
        unit = "10^9"
        digits = digits[:-1] if digits.endswith("B") else f"{float(digits[:-1]) / 1000:g}"
    given = {"model": one.name}
    quantity = "parameters_in_billions" if unit else "parameters"
    return Row(COUNTS, one.source, one.name, quantity, unit, digits, "digits", False, "", given)


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

    It is the median of those with which the planner's speed of a calibration row is as published.
    fp8 training needs bf16 too: hardware.toml's.
    """
    found = {}
    for key in sorted({row.efficiency_key for row in rows() if row.efficiency_key}):
        chosen = [row for row in rows() if row.efficiency_key == key and row.calibration]
        if not chosen:  # another GPU of the same chip
            continue
        found[key] = round(median(_own_efficiency(row, key) for row in chosen), 3)
    return found


def _own_efficiency(row: Row, key: tuple[str, str]) -> float:
    """Return the efficiency that reproduces a row: seconds are nearly A / efficiency + B."""
    low, high = 0.4, 0.6
    times = [1 / _speed(row, {key: low}), 1 / _speed(row, {key: high})]
    for _ in range(3):
        slope = (times[0] - times[1]) / (1 / low - 1 / high)
        low, high = high, slope / (1 - times[1] + slope / high)
        times = [times[1], 1 / _speed(row, {key: high})]
        if abs(times[1] - 1) < 1e-4:
            break
    return high


def _speed(row: Row, efficiency: Mapping[tuple[str, str], float]) -> float:
    """Return how many times as fast as published the planner's run is."""
    ratio = compute(row, efficiency) / row.value
    return 1 / ratio if row.quantity == "step_seconds" else ratio


# --- the table ----------------------------------------------------------------------------------


def table(found: Sequence[Result]) -> str:
    """Return the results as Markdown: bars and efficiencies, then every value by source."""
    lines = [*_bars(found), "", *_efficiencies(found)]
    for title, of_title in groupby(found, key=lambda one: one.row.title):
        lines += ["", f"### {title}"]
        if title == COUNTS:  # nearly every row has a source of its own
            lines += ["", "| model | published | ours | source |", "|---|--:|--:|---|"]
            lines += [_cells(_run(one), *_values(one), one.row.source) for one in of_title]
            continue
        for (source, why), same in groupby(
            of_title, key=lambda one: (_source(one.row), one.row.why)
        ):
            rest = list(same)
            plans = any(one.row.given["plan"] for one in rest)
            lines += ["", f"{source}{f' Not held: {why}.' if why else ''}", ""]
            lines += [_cells("run", *["plan"] * plans, "published", "ours", "error", "")]
            lines += [_cells("---", *["---"] * plans, "--:", "--:", "--:", "---")]
            lines += [_line(one, plans) for one in rest]
    return "\n".join(lines) + "\n"


def _bars(found: Sequence[Result]) -> list[str]:
    """Return a table: how many rows are held to a bar, and how far they are from it."""
    lines = [
        "| values | rows | within the bar | median error | largest error |",
        "|---|--:|--:|--:|--:|",
    ]
    for title in dict.fromkeys(one.row.title for one in found):
        held = [one for one in found if one.row.title == title and one.held is not None]
        used = [one for one in held if one.row.calibration]
        name = f"{title}, not used for calibration" if used else title
        for kind, chosen in ((name, held), (f"{title}, used for calibration", used)):
            those = [one for one in chosen if chosen is used or not one.row.calibration]
            if those:
                within = sum(bool(one.held) for one in those)
                errors = [abs(one.error) for one in those]
                shares = f"{median(errors):.1%}", f"{max(errors):.1%}"
                lines.append(_cells(kind, str(len(those)), str(within), *shares))
    return lines


def _efficiencies(found: Sequence[Result]) -> list[str]:
    """Return a table of the calibrated numbers, and of the errors of the rows not used."""
    lines = [
        "| GPU | format | software | efficiency | rows used | not used | their median error |",
        "|---|---|---|--:|--:|--:|--:|",
    ]
    held = [one for one in found if one.row.efficiency_key and one.held is not None]
    for key in sorted({one.row.efficiency_key for one in held if one.row.efficiency_key}):
        name, (dtype, generation) = key[0], key[1].split("@")
        of_key = [one for one in held if one.row.efficiency_key == key]
        others = [abs(one.error) for one in of_key if not one.row.calibration]
        value = hardware(name).efficiency_of(dtype, generation)
        used = len(of_key) - len(others)
        counts = f"{value:.3f}", str(used), str(len(others)), f"{median(others):.1%}"
        lines.append(_cells(name, dtype, generation, *counts))
    return lines


def _source(row: Row) -> str:
    return f"{row.source}{f' ({row.unit})' if row.unit else ''}."


def _line(one: Result, plans: bool) -> str:
    mark = "**misses**" if one.held is False else "calibration" if one.row.calibration else ""
    plan = [_plan(one.row.given["plan"])] * plans
    return _cells(_run(one), *plan, *_values(one), f"{one.error:+.1%}", mark)


def _run(one: Result) -> str:
    gpus = one.row.given.get("gpus", 1)
    return f"{one.row.run}, {gpus:,} GPUs" if gpus > 1 else one.row.run


def _values(one: Result) -> tuple[str, str]:
    """Return the published value, and ours at as many digits."""
    digits = len(one.row.published.partition(".")[2])
    unit = " 10^9" if one.row.unit == "10^9" else ""
    grouped = f"{float(one.row.published):,.{digits}f}"
    return f"{grouped}{unit}", f"{one.ours:,.{digits}f}{unit}"


def _cells(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


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
    sizes = dict(_data()["models"].get(name, {}))
    if not sizes:
        return model(name)
    dropout = sizes.pop("dropout", None)
    found = custom_model(**sizes, name=name)
    return found if dropout is None else replace(found, dropout=dropout)


def _configuration(row: Row) -> Configuration:
    plan: dict[str, Any] = dict(row.given["plan"])
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


def estimate_of(row: Row, efficiency: Efficiency | None = None) -> Estimate:
    """Return the estimate of the run that a row is about."""
    return estimate(_model(row), _hardware(row, efficiency or {}), _configuration(row))


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


def _ulysses_elements(row: Row, _: Efficiency) -> float:
    """Elements that a rank sends in forward, which is half of forward and backward."""
    m, n = _model(row), row.given["ranks"]
    sent = ulysses_wire_bytes(m, 1, m.max_seq_len, n) / m.dtype.itemsize / m.layers / 2
    return float(sent * n / m.max_seq_len / m.hidden)


def _expert_elements(row: Row, _: Efficiency) -> float:
    return float(even_wire_bytes(1, row.given["top_k"], 1, row.given["ranks"]))


def _in_flight(row: Row, _: Efficiency) -> float:
    given = row.given
    chunks = given.get("chunks", 1)
    found = in_flight(given["schedule"], given["ranks"], given["micro_batches"], 0, chunks)
    return found.total / chunks


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


def _waiting_in_f(row: Row, _: Efficiency) -> float:
    """Waiting of a rank from its first to its last action, in units of F = I = W."""
    given = row.given
    found = simulate(
        make(given["schedule"], given["ranks"], given["micro_batches"], given.get("chunks", 1)),
        Costs(),
    )
    chunks = given.get("chunks", 1)
    return (found.span - found.work) / chunks


def _step_seconds(row: Row, efficiency: Efficiency) -> float:
    return estimate_of(row, efficiency).step_seconds


def _tokens_per_gpu_second(row: Row, efficiency: Efficiency) -> float:
    return estimate_of(row, efficiency).tokens_per_gpu_second


def _model_tflops(row: Row, efficiency: Efficiency) -> float:
    return estimate_of(row, efficiency).tflops_per_gpu


def _megatron_hfu_tflops(row: Row, efficiency: Efficiency) -> float:
    """96 B s l h^2 (1 + s/6h + V/16lh) over time and GPUs (arXiv:2104.04473, equation 3)."""
    found = estimate_of(row, efficiency)
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
    "ulysses_elements": _ulysses_elements,
    "expert_elements": _expert_elements,
    "in_flight": _in_flight,
    "bus_factor": _bus_factor,
    "bus_gb_per_second": _bus_gb_per_second,
    "mfu_of_time": _mfu_of_time,
    "hfu_of_time": _hfu_of_time,
    "share_of_peak": _share_of_peak,
    "training_days": _training_days,
    "simulated_bubble": _simulated_bubble,
    "waiting_in_f": _waiting_in_f,
    "step_seconds": _step_seconds,
    "tokens_per_gpu_second": _tokens_per_gpu_second,
    "model_tflops": _model_tflops,
    "megatron_hfu_tflops": _megatron_hfu_tflops,
}


if __name__ == "__main__":
    if "--fit" in sys.argv[1:]:
        for (gpu, key), value in fitted().items():
            print(f"{gpu} {key} {value}")
    else:
        write()
