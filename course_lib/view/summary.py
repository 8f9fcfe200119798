"""The numbers of a timeline, and its caption."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from course_lib.mesh import Conditions, Link
from course_lib.schedule import Span
from course_lib.trace import TOO_BUSY, Trace, overshoot
from course_lib.view.lanes import chunks

SOURCES = {"measured": "times measured on real ranks", "simulated": "simulated, not measured"}

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of a timeline. Times are in seconds; averages are over the ranks.

    ``idle`` is the share of total time (makespan x ranks) without compute. ``comm`` is the time
    with at least one communication in flight. ``exposed`` is the communication time without
    compute at the same moment.
    """

    ranks: int
    makespan: float
    idle: float
    comm: float
    exposed: float


def read(source: Iterable[Span | Trace]) -> tuple[list[Span], float | None]:
    """Return the spans of ``source`` in order of start, and the overshoot of its traces, if any.

    Raises ValueError without spans, and for a span that ends before it starts.
    """
    items = list(source)
    traces = [item for item in items if isinstance(item, Trace)]
    spans = [item for item in items if isinstance(item, Span)]
    spans += [span for trace in traces for span in trace.spans]
    if not spans:
        raise ValueError(
            "expected at least one span, got none: wrap the work in `with mesh.compute('F'):` "
            "and pass the traces of the run"
        )
    for span in spans:
        if not span.end >= span.start:
            raise ValueError(
                f"expected spans in seconds on one clock, got span {span.op!r} of rank "
                f"{span.rank}, which starts at {span.start} s and ends at {span.end} s"
            )
    sleeps = any(trace.sleeps for trace in traces)
    return sorted(spans, key=lambda span: span.start), overshoot(traces) if sleeps else None


def summarize(spans: Sequence[Span]) -> Summary:
    """Return makespan, idle share, communication and exposed communication of ``spans``."""
    makespan = max(span.end for span in spans) - min(span.start for span in spans)
    compute: dict[int, list[Interval]] = defaultdict(list)
    comm: dict[int, list[Interval]] = defaultdict(list)
    for span in spans:
        (comm if span.is_comm else compute)[span.rank].append((span.start, span.end))
    ranks = set(compute) | set(comm)
    busy = sum(covered(compute[rank]) for rank in ranks)
    either = sum(covered(compute[rank] + comm[rank]) for rank in ranks)
    return Summary(
        ranks=len(ranks),
        makespan=makespan,
        idle=1 - busy / (makespan * len(ranks)) if makespan else 0.0,
        comm=sum(covered(comm[rank]) for rank in ranks) / len(ranks),
        exposed=(either - busy) / len(ranks),
    )


def covered(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of ``intervals``."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def sentence(
    summary: Summary,
    *,
    source: str,
    conditions: Conditions | None = None,
    busy: float | None = None,
    note: str = "",
) -> str:
    """Return the caption of a timeline: step time, idle share, communication and conditions."""
    parts = [f"{milliseconds(summary.makespan)} in total"]
    computes = summary.idle < 1
    if computes:
        parts[0] += f", of which ranks idle {summary.idle:.1%}"
    if summary.comm:
        overlapped = milliseconds(max(0.0, summary.comm - summary.exposed))
        hidden = f", of which {overlapped} overlap with compute"
        parts.append(
            f"communication with its waiting time {milliseconds(summary.comm)} per rank"
            + (hidden if computes else "")
        )
    parts.append(source)
    if conditions is not None:
        parts.append(spoken(conditions))
    text = "; ".join(part for part in parts if part) + "."
    if busy is not None and busy > TOO_BUSY:
        text += (
            f" The machine was too busy: paced work took {busy:.0%} too long. Compare the order "
            "of the boxes, not their times, or choose a longer pace."
        )
    return f"{text} {note}".strip()


def described(spans: Sequence[Span], planned: Sequence[Span], kind: str) -> str:
    """Describe the boxes in words."""
    if kind not in SOURCES:
        raise ValueError(f"expected kind to be one of {', '.join(SOURCES)}, got {kind!r}")
    said = SOURCES[kind]
    if most := max(chunks(spans).values(), default=0):
        which = "later stages" if most > 1 else "second stage"
        said += f"; paler boxes, with ′ where it fits, are a rank's {which}"
    if planned:
        plan = summarize(planned)
        said += f"; outlines simulated: {milliseconds(plan.makespan)}, {plan.idle:.1%} idle"
    return said


def spoken(conditions: Conditions) -> str:
    """Describe pace and links in words; return "" without pace and emulated links."""
    parts = []
    if conditions.pace:
        by_time: dict[float, list[str]] = defaultdict(list)
        for op, seconds in conditions.pace.items():
            by_time[seconds].append(op if isinstance(op, str) else f"{op[0]} of stage {op[1]}")
        paces = (f"{' and '.join(ops)} {milliseconds(time)}" for time, ops in by_time.items())
        parts.append(f"compute padded by sleep to {', '.join(paces)}")
    if conditions.links is not None:
        links = conditions.links
        inside, between = _link(links.inside), _link(links.between)
        where = inside if inside == between else f"{inside} in a node, {between} between nodes"
        shared = ", shared by all axes of a rank" if links.shared else ""
        parts.append(f"emulated links of {where}{shared}")
    return ", ".join(parts)


def _link(link: Link) -> str:
    return f"{milliseconds(link.alpha)} + bytes / {link.beta / 1e9:.3g} GB/s"


def milliseconds(seconds: float) -> str:
    """Return ``seconds`` as text in ms: three digits, or whole numbers from 100."""
    value = round(seconds * 1e3, 3)
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"
