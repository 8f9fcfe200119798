"""Export spans for trace viewers: https://ui.perfetto.dev or chrome://tracing.

Format: "Trace Event Format", JSON object form, complete events ("ph": "X"), microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from course_lib.schedule import Span
from course_lib.trace import Trace
from course_lib.view.lanes import depths
from course_lib.view.summary import read


def perfetto(
    source: Iterable[Span | Trace], path: str | Path, *, title: str = "course run"
) -> Path:
    """Write ``source`` to ``path`` as a Chrome trace and return the path.

    Each rank is a process ("rank 0"). Its threads are "compute" and one "comm <axis>" per axis;
    operations of one axis that overlap get a second thread, because the events of a thread must
    nest. The earliest span starts at 0. ``args`` has the payload in bytes, the stage and the
    micro-batch, if the span has them.
    """
    spans, _ = read(source)
    zero = spans[0].start
    events: list[dict[str, Any]] = []
    ranks = sorted({span.rank for span in spans})
    for rank in ranks:
        events.append(_name("process_name", rank, 0, f"rank {rank}"))
        events.append(_meta("process_sort_index", rank, 0, sort_index=rank))
        for thread, (name, lane) in enumerate(_threads(spans, rank), start=1):
            events.append(_name("thread_name", rank, thread, name))
            events.append(_meta("thread_sort_index", rank, thread, sort_index=thread))
            events += [_event(span, thread, zero) for span in lane]
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"title": title},
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def _threads(spans: list[Span], rank: int) -> list[tuple[str, list[Span]]]:
    """Return a rank's thread names with their spans; overlapping spans get separate threads."""
    mine = [span for span in spans if span.rank == rank]
    axes = sorted({span.axis for span in mine if span.axis is not None})
    threads = []
    for axis in [None, *axes]:
        lane = [span for span in mine if span.axis == axis]
        levels = depths(lane)
        name = "compute" if axis is None else f"comm {axis}"
        for depth in range(max(levels, default=-1) + 1):
            inside = [span for span, level in zip(lane, levels, strict=True) if level == depth]
            threads.append((name if depth == 0 else f"{name} ({depth + 1})", inside))
    return threads


def _event(span: Span, thread: int, zero: float) -> dict[str, Any]:
    fields = {"stage": span.stage, "mb": span.mb, "axis": span.axis, "label": span.label or None}
    args: dict[str, Any] = {key: value for key, value in fields.items() if value is not None}
    if span.is_comm or span.payload:
        args["payload"] = span.payload
    return {
        "name": f"{span.op}{span.mb}" if span.mb is not None else span.op,
        "cat": "comm" if span.is_comm else "compute",
        "ph": "X",
        "ts": (span.start - zero) * 1e6,
        "dur": span.duration * 1e6,
        "pid": span.rank,
        "tid": thread,
        "args": args,
    }


def _name(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return _meta(what, rank, thread, name=name)


def _meta(what: str, rank: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": args}
