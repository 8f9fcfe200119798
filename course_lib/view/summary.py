"""The numbers under a timeline, and the sentence made of them."""

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
    """What a timeline shows, in numbers. Times are seconds, averages are over the ranks.

    ``idle`` is the share of total time (makespan x ranks) without compute; ``comm`` is the time
    in which some communication was going on, ``exposed`` that part of it without compute beside.
    """

    ranks: int
    makespan: float
    idle: float
    comm: float
    exposed: float


def read(source: Iterable[Span | Trace]) -> tuple[list[Span], float | None]:
    """The spans of ``source`` in order of start, and the overshoot of its traces if it has any.

    Raises ValueError when there is nothing to draw or a span ends before it starts.
    """
    items = list(source)
    traces = [item for item in items if isinstance(item, Trace)]
    spans = [item for item in items if isinstance(item, Span)]
    spans += [span for trace in traces for span in trace.spans]
    if not spans:
        raise ValueError(
            "there are no spans to draw: nothing was traced; wrap the work in "
            "`with mesh.compute('F'):` and pass the traces of the run"
        )
    for span in spans:
        if not span.end >= span.start:
            raise ValueError(
                f"span {span.op!r} of rank {span.rank} ends at {span.end} s, before it starts at "
                f"{span.start} s: times are seconds on one clock"
            )
    sleeps = any(trace.sleeps for trace in traces)
    return sorted(spans, key=lambda span: span.start), overshoot(traces) if sleeps else None


def summarize(spans: Sequence[Span]) -> Summary:
    """Makespan, idle share, communication and its exposed part of ``spans`` (at least one)."""
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
    """Length of the union of ``intervals``."""
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
    """What stands under a timeline: step time, idle share, what was paced and what measured."""
    parts = [f"{milliseconds(summary.makespan)} in all"]
    computes = summary.idle < 1
    if computes:
        parts[0] += f", ranks idle {summary.idle:.1%} of it"
    if summary.comm:
        hidden = f", {milliseconds(max(0.0, summary.comm - summary.exposed))} of it behind compute"
        parts.append(
            f"communication {milliseconds(summary.comm)} a rank, its waiting included"
            + (hidden if computes else "")
        )
    parts.append(source)
    if conditions is not None:
        parts.append(spoken(conditions))
    text = "; ".join(part for part in parts if part) + "."
    if busy is not None and busy > TOO_BUSY:
        text += (
            f" Machine too busy: compare order, not time (paced work took {busy:.0%} too long; "
            "choose a longer pace)."
        )
    return f"{text} {note}".strip()


def described(spans: Sequence[Span], planned: Sequence[Span], kind: str) -> str:
    """What the boxes are, in words."""
    if kind not in SOURCES:
        raise ValueError(f"kind={kind!r}: it is one of {', '.join(SOURCES)}")
    said = SOURCES[kind]
    if most := max(chunks(spans).values(), default=0):
        said += (
            f"; paler boxes with ′ are a rank's {'later stages' if most > 1 else 'second stage'}"
        )
    if planned:
        plan = summarize(planned)
        said += f"; outlines simulated: {milliseconds(plan.makespan)}, {plan.idle:.1%} idle"
    return said


def spoken(conditions: Conditions) -> str:
    """Pace and links in words; empty where nothing was paced or emulated."""
    parts = []
    if conditions.pace:
        by_time: dict[float, list[str]] = defaultdict(list)
        for op, seconds in conditions.pace.items():
            by_time[seconds].append(op if isinstance(op, str) else f"{op[0]} of stage {op[1]}")
        paces = (f"{' and '.join(ops)} {milliseconds(time)}" for time, ops in by_time.items())
        parts.append(f"paced by sleep to {', '.join(paces)}")
    if conditions.links is not None:
        links = conditions.links
        inside, between = _link(links.inside), _link(links.between)
        where = inside if inside == between else f"{inside} in a node, {between} between nodes"
        shared = ", which all axes of a rank share" if links.shared else ""
        parts.append(f"emulated links of {where}{shared}")
    return ", ".join(parts)


def _link(link: Link) -> str:
    return f"{milliseconds(link.alpha)} + bytes / {link.beta / 1e9:.3g} GB/s"


def milliseconds(seconds: float) -> str:
    """``seconds`` as milliseconds: three digits, or whole ones from 100."""
    value = round(seconds * 1e3, 3)
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"
