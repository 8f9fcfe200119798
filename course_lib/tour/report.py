"""What the tour prints and writes: the table, tour.json, the pictures, the Perfetto file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from course_lib.launch import Results
from course_lib.mesh import Conditions
from course_lib.pp import measured_rows
from course_lib.tour.measure import Row, Skipped
from course_lib.tour.pipelines import PacedPipeline
from course_lib.tour.timelines import LINKS, PACE
from course_lib.tour.traffic import Counted
from course_lib.trace import TOO_BUSY
from course_lib.trace.traffic import HEADER_BYTES
from course_lib.view import perfetto, timeline, traffic_plot

TITLES = {
    "overlapped": "Data parallelism with overlap: buckets are sent while backward runs",
    "bucketed": "Data parallelism without overlap: every rank waits for the gradients",
}
HEADS = (
    "loss\noff by",
    "\naxis",
    "kB sent\nformula",
    "per\nkernel",
    "step\nextra",
    "state\nkB/rank",
    "activ.\nkB/rank",
)
OVERLAY_TITLES = {
    "gpipe": "GPipe, all forwards and then all backwards",
    "1f1b": "1F1B, every backward as early as it can",
    "zb-h1": "ZB-H1, gradients of weights where a rank would wait",
}
FILES = {"overlapped": "timeline.png", "bucketed": "timeline-no-overlap.png"}


def as_json(
    rows: Sequence[Row], pipelines: Sequence[PacedPipeline], skipped: Sequence[Skipped]
) -> dict[str, Any]:
    """The tour as data: what ``--json`` prints and tour.json holds."""
    return {
        "rows": [row.as_json() for row in rows],
        "pipelines": [pipeline.as_json() for pipeline in pipelines],
        "skipped": [entry.as_json() for entry in skipped],
    }


def write_json(data: dict[str, Any], out: Path) -> list[str]:
    """Write tour.json; the names of the files written, as of the other writers."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "tour.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return ["tour.json"]


def write_pictures(measured: dict[str, Results], out: Path) -> list[str]:
    """One timeline for each measured run, and the first of them for Perfetto."""
    for name, results in measured.items():
        picture = timeline(results.traces, title=TITLES[name], conditions=Conditions(PACE, LINKS))
        picture.savefig(out / FILES[name], dpi=150)
    if measured:
        first = next(iter(measured))
        perfetto(measured[first].traces, out / "trace.json", title=TITLES[first])
    return [FILES[name] for name in measured] + ["trace.json"] * bool(measured)


def write_traffic(rows: Sequence[Row], out: Path) -> list[str]:
    """Draw the bytes by sender and receiver of the row with most axes, of 8 ranks at most."""
    small = [row for row in rows if row.formula and row.technique.ranks <= 8]
    if not small:
        return []
    row = max(small, key=lambda row: (len(row.formula), row.technique.ranks))
    picture = traffic_plot(row.kernel, row.ledgers, note=f"Row {row.technique.name}, one step.")
    picture.savefig(out / "traffic.png", dpi=150)
    return ["traffic.png"]


def write_overlays(pipelines: Sequence[PacedPipeline], out: Path) -> list[str]:
    """Simulated and measured actions of each schedule over each other."""
    for pipeline in pipelines:
        name = pipeline.schedule.name
        compute = [span for row in measured_rows(pipeline.results.traces) for span in row]
        picture = timeline(
            compute,
            title=f"{OVERLAY_TITLES[name]}: simulated above, measured below",
            overlay=pipeline.simulation.spans,
            conditions=Conditions(pipeline.pace),
            note=f"Sleeps overshot by {pipeline.overshoot:.1%}.",
        )
        picture.savefig(out / f"pipeline-{name}.png", dpi=150)
    return [f"pipeline-{pipeline.schedule.name}.png" for pipeline in pipelines]


def print_pipelines(pipelines: Sequence[PacedPipeline], console: Console) -> None:
    """Bubble predicted, simulated and measured, as shares of total time."""
    if not pipelines:
        return
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    table.add_column("pipeline")
    heads = ("predicted", "simulated", "measured", "step, ms\nsimulated", "\nmeasured", "in flight")
    for head in heads:
        table.add_column(head, justify="right")
    for pipeline in pipelines:
        data = pipeline.as_json()
        table.add_row(
            data["schedule"],
            *(f"{data['bubble'][key]:.3f}" for key in ("predicted", "simulated", "measured")),
            *(f"{1e3 * data['makespan'][key]:.0f}" for key in ("simulated", "measured")),
            " ".join(map(str, data["peak_in_flight"])),
        )
    console.print("\nBubble, as a share of total time, of a step on 4 paced ranks:")
    console.print(table)
    worst = max(pipeline.overshoot for pipeline in pipelines)
    if worst > TOO_BUSY:
        console.print(
            f"The machine was too busy (sleeps overshot by {worst:.0%}): compare order, not time."
        )


def print_table(rows: Sequence[Row], skipped: Sequence[Skipped], console: Console) -> None:
    """The table, then one sentence for each technique. State and activations are one number where
    they equal their formula.

    80 columns hold names of 19 characters: a mesh wraps, no other column has to.
    """
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0, header_style="bold")
    for head in ("technique", "mesh"):
        table.add_column(f"\n{head}", no_wrap=head == "technique")
    for head in HEADS:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.technique.name,
            " ".join(f"{axis}={size}" for axis, size in row.technique.mesh.items()) or "-",
            f"{row.max_loss_difference:.0e}",
            "\n".join(row.formula) or "-",
            *_sent(row),
            *(_against(measured, formula) for _, measured, formula in row.memory),
        )
    console.print(table)
    _print_sentences(rows, skipped, console)


def _sent(row: Row) -> tuple[str, str, str]:
    """Return a line per axis: the formula (marked if the calls differ), the kernel's count, and by
    how much the kernel's count exceeds the formula of all calls, control traffic included."""
    differs = {axis: "≠" * (row.counted.get(axis) != sent) for axis, sent in row.formula.items()}
    formula = [differs[axis] + _kilobytes(sent) for axis, sent in row.formula.items()]
    by_axis = row.kernel_by_axis
    if by_axis is None:
        kernel, extra = ["formula"] * len(formula), []
    else:
        counted = [by_axis.get(axis, Counted([0])) for axis in row.formula]
        kernel = [_kilobytes(one.bytes) for one in counted]
        extra = [_percent(one.extra / (one.expected or 1)) for one in counted]
    return "\n".join(formula) or "0", "\n".join(kernel) or "0", "\n".join(extra) or "-"


def _percent(share: Fraction) -> str:
    """Return five characters at most."""
    return f"{float(share):.1%}" if share < 1 else f"{float(share):.0%}"


def _against(measured: int, formula: int) -> str:
    """One number where formula and measurement agree, else both, marked."""
    if measured == formula:
        return _kilobytes(measured)
    return f"{_kilobytes(measured)}\n≠{_kilobytes(formula)}"


def _kilobytes(count: Fraction | int) -> str:
    """Seven characters at most, up to 99 MB: the table has 80 columns."""
    kilobytes = float(count) / 1e3
    return f"{kilobytes:,.1f}" if kilobytes < 1000 else f"{kilobytes:,.0f}"


def _kernel_sentence(rows: Sequence[Row]) -> str:
    """Say how the kernel's count compares with the formula, or that it has none here."""
    if any(row.kernel is None for row in rows):
        return "The kernel has no count of the bytes sent here: they are those of the formula."
    parts = [one for row in rows for one in (row.kernel_by_axis or {}).values()]
    exact = sum(one.extra == one.headers for one in parts)
    return (
        f"kernel: the bytes that TCP sent, counted by Linux on every rank. extra: gloo's headers, "
        f"{HEADER_BYTES} bytes per message; with them {exact} of {len(parts)} counts equal the "
        "formula (control traffic included) to the byte."
    )


def _print_sentences(rows: Sequence[Row], skipped: Sequence[Skipped], console: Console) -> None:
    for row in rows:
        name, lesson = row.technique.name, row.technique.lesson
        console.print(f"{name}: {row.technique.sentence} (lesson {lesson})", highlight=False)
    for entry in skipped:
        console.print(f"{entry.technique.name}: skipped, {entry.reason}", highlight=False)
    off = sum(bool(row.faults) for row in rows)
    console.print(
        f"kB are 1000 bytes. {len(rows) - off} of {len(rows)} rows equal the single process, and "
        "send and store what their formulas say, to the byte (the exact numbers are in tour.json).",
        highlight=False,
    )
    console.print(_kernel_sentence(rows), highlight=False)
    for name in dict.fromkeys(row.technique.reference for row in rows):
        alike = [row.losses for row in rows if row.technique.reference == name]
        if not any(alike[0]):  # nothing was trained
            continue
        where = "every row" if len(alike) == len(rows) else f"{name} and all rows equal to it"
        console.print(
            f"The loss fell from {alike[0][0]:.2f} to {alike[0][-1]:.2f} in {len(alike[0])} steps "
            f"in {where}.",
            highlight=False,
        )
