"""The tour from end to end: measure, judge, print, write."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from course_lib.launch import Results, available_ranks, is_reporter, run
from course_lib.tour import measure, pipelines, report, timelines

DEFAULT_OUT = Path("out/tour")


def run_tour(out: Path = DEFAULT_OUT, as_json: bool = False) -> int:
    """Run the tour, print its table (or, ``as_json``, its data alone) and write its files.

    Returns the exit code: 0, or 1 when a loss or a byte count is off.
    """
    reporter = is_reporter()
    if reporter:
        out.mkdir(parents=True, exist_ok=True)  # a folder that cannot be written fails now
    progress = Console(stderr=True, quiet=not reporter, highlight=False)

    def say(text: str) -> None:
        progress.print(f"… {text}")

    rows, skipped = measure.measure(say)
    paced = pipelines.measure_pipelines(say)
    pictures = measure_pictures(say)
    faults = [fault for row in rows for fault in row.faults]
    if reporter:
        data = report.as_json(rows, paced, skipped)
        written = [
            *report.write_json(data, out),
            *report.write_overlays(paced, out),
            *report.write_pictures(pictures, out),
            *report.write_traffic(rows, out),
        ]
        if as_json:
            print(json.dumps(data, indent=2))
        else:
            console = Console()
            report.print_table(rows, skipped, console)
            report.print_pipelines(paced, console)
            console.print(f"Written to {out}: {', '.join(written)}")
        for fault in faults:
            progress.print(f"WRONG: {fault}")
    return 1 if faults else 0


def measure_pictures(say: Callable[[str], None]) -> dict[str, Results]:
    """One paced step of each data parallel, for the timelines."""
    limit = available_ranks()
    ranks = timelines.RANKS if limit is None else min(limit, timelines.RANKS)
    measured = {}
    for name in timelines.SYNCS if ranks > 1 else ():
        say(f"timeline: one paced step, {name}, on {ranks} ranks")
        measured[name] = run(
            timelines.one_step,
            name,
            n=ranks,
            pace=timelines.PACE,
            links=timelines.LINKS,
        )
    return measured


def main(arguments: list[str] | None = None) -> int:
    """``python -m course_lib.tour [--out DIR] [--json]``."""
    import argparse

    parser = argparse.ArgumentParser(
        prog="python -m course_lib.tour",
        description="The main job: train with every technique, compare with one process.",
    )
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder for the files")
    parser.add_argument("--json", action="store_true", help="print the data alone")
    given = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    return run_tour(given.out, given.json)
