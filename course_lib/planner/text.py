"""An estimate as plain text for any terminal: at most 80 columns, about 50 lines."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from course_lib.planner.compare import Comparison
from course_lib.planner.configuration import Configuration
from course_lib.planner.result import Estimate
from course_lib.schedule.named import V_SHAPED

if TYPE_CHECKING:
    from course_lib.planner.search import Found
    from course_lib.planner.serve import Serving

WIDTH = 80
HARD_SPACE = "\xa0"
UNIT = r"(?<=\d) (?=(?:%|[MG]B|GB/s|TFLOP/s|FLOP|ms|us|s|[MBT])(?![\w/]))"  # a space before one
CITATION = r" \((?=[^()]*arXiv)[^()]*\)"


def report(estimate: Estimate, changes: Mapping[str, float] | None = None) -> str:
    """Describe the estimate. ``changes`` are those of :func:`course_lib.planner.sensitivity`."""
    lines = [*_title(estimate), "", *_memory(estimate), "", *_communication(estimate)]
    lines += ["", *_step(estimate)]
    if changes:
        lines += wrapped(bandwidth(changes))
    lines += ["", *wrapped(f"Terms: {'; '.join(_terms(estimate))}.")]
    if estimate.assumptions:
        lines += ["", "Assumptions"]
        for assumption in estimate.assumptions:
            lines += wrapped(re.sub(CITATION, "", assumption), "  - ")
    return "\n".join(lines)


def layout(plan: Configuration) -> str:
    """Return the degrees and the main choices: tp 8, pp 4, dp 2, ZeRO-1, 1f1b, micro-batch 1."""
    degrees = {"tp": plan.tp, "cp": plan.cp, "pp": plan.pp, "dp": plan.dp, "ep": plan.ep}
    words = [f"{axis} {n}" for axis, n in degrees.items() if n > 1] or ["one GPU"]
    if plan.zero:
        words.append(f"ZeRO-{plan.zero}")
    if plan.pp > 1:
        looped = plan.chunks > 1 and plan.schedule not in V_SHAPED
        words.append(plan.schedule + (f" x {plan.chunks}" if looped else ""))
    words.append(f"micro-batch {plan.micro_batch}")
    if plan.recompute != "none":
        words.append(f"{plan.recompute} recompute")
    return ", ".join(words)


def number(value: float, digits: int = 3) -> str:
    """Return ``value`` with thousands separators and about ``digits`` significant digits."""
    if value == 0:
        return "0"
    size = abs(value)
    places = 0
    while places < digits + 3 and size < 10 ** (digits - 1 - places):
        places += 1
    return f"{value:,.{places}f}"


def duration(seconds: float) -> str:
    """Return seconds with a suitable unit: 1.23 s, 45.6 ms, 7.89 us."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size or seconds == 0:
            return f"{number(seconds / size)} {unit}"
    return f"{number(seconds / 1e-6)} us"


def count(value: float) -> str:
    """Return a count with a prefix: 70.6 B, 4.19 M, 512."""
    for letter, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.4g} {letter}"
    return f"{value:,.0f}"


def percent(share: float) -> str:
    """Return a share as percent."""
    return f"{100 * share:.1f} %"


def bandwidth(changes: Mapping[str, float]) -> str:
    """Say by how much the step time changes with the bandwidth of each link."""
    found = []
    for sign, word in (("+", "more"), ("-", "less")):
        links = [
            f"{name.split()[0]} {100 * change:+.1f} %".replace("-0.0", "0.0").replace("+0.0", "0.0")
            for name, change in changes.items()
            if f" {sign}" in name
        ]
        found.append(f"20 % {word} bandwidth: {', '.join(links)}")
    return f"Step time with {'; '.join(found)}"


def table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Align columns: the first ``left`` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def wrapped(text: str, first: str = "") -> list[str]:
    """Return ``text`` in lines of at most 80 characters; the first one begins with ``first``."""
    indent = " " * (len(first) or 2)
    lines = textwrap.wrap(
        re.sub(UNIT, HARD_SPACE, text),
        WIDTH,
        initial_indent=first,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return [line.replace(HARD_SPACE, " ") for line in lines]


def verdict(estimate: Estimate) -> str:
    """Return whether the plan fits, and why not."""
    if not estimate.fits:
        return f"Does not fit. {' '.join(estimate.reasons)}"
    return f"Fits: {estimate.headroom_bytes / 1e9:.1f} GB are left beside the reserve."


def _title(estimate: Estimate) -> list[str]:
    plan, model = estimate.configuration, estimate.model
    size = f"{count(estimate.parameters)} parameters"
    if estimate.active_parameters != estimate.parameters:
        size += f" ({count(estimate.active_parameters)} active)"
    gpus = f"{plan.world:,} x {estimate.hardware.name}"
    return [
        *wrapped(f"{model.name}, {size}, on {gpus}: {layout(plan)}"),
        *wrapped(
            f"Step: {plan.global_batch:,} sequences of {plan.seq:,} = {count(plan.tokens)} tokens, "
            f"{plan.micro_batches:,} micro-batch{'es' * (plan.micro_batches != 1)} per replica, "
            f"{plan.dtype.name}"
        ),
    ]


def _memory(estimate: Estimate) -> list[str]:
    capacity = estimate.hardware.capacity_bytes
    rows = [("", "GB", f"of {capacity / 1e9:.0f} GB")]
    for name in ("weights", "gradients", "optimizer", "activations", "total"):
        size = getattr(estimate.memory, name)
        rows.append((name, f"{size / 1e9:.2f}", f"{100 * size / capacity:.0f} %"))
    return [
        "Memory per GPU of the stage that needs most",
        *table(rows),
        *wrapped(verdict(estimate)),
    ]


def _communication(estimate: Estimate) -> list[str]:
    if not estimate.communication:
        return ["Communication: none on this plan."]
    rows = [("axis", "link", "calls", "GB sent", "ms", "exposed ms")]
    rows += [
        (
            axis,
            one.link,
            f"{one.calls:,}",
            number(one.wire_bytes / 1e9),
            number(one.seconds * 1e3),
            number(one.exposed_seconds * 1e3),
        )
        for axis, one in estimate.communication.items()
    ]
    return ["Communication per step, busiest GPU", *table(rows, left=2)]


def _step(estimate: Estimate) -> list[str]:
    step = estimate.step_seconds
    parts = [
        f"{name} {percent(seconds / step)}" for name, seconds in _largest_first(estimate.parts)
    ]
    split = f" = {' + '.join(parts)}" if parts else ""
    return [
        *wrapped(f"Step time: {duration(step)}{split}"),
        *wrapped(
            f"Speed: {estimate.tokens_per_gpu_second:,.0f} tokens/s per GPU, "
            f"{estimate.tflops_per_gpu:.0f} TFLOP/s, MFU {percent(estimate.mfu)} (causal "
            f"attention), {percent(estimate.mfu_full_attention)} (full), HFU "
            f"{percent(estimate.hfu)}"
        ),
        *wrapped(
            f"Bubble: {percent(estimate.bubble_of_total)} of total, "
            f"{percent(estimate.bubble_of_ideal)} of ideal"
        ),
    ]


def _terms(estimate: Estimate) -> Iterable[str]:
    """Yield the meaning of each term of the report that needs one."""
    axes = {
        "dp_cp": "dp_cp, the ranks of dp and cp",
        "edp": "edp, the ranks that store the same experts",
        "tp_kv": "tp_kv, the ranks that share a KV head",
    }
    yield from (text for axis, text in axes.items() if axis in estimate.communication)
    if estimate.communication:
        yield "exposed, communication that no computation hides"
    if "elementwise" in estimate.parts:
        yield "elementwise, operations between products, bound by memory"
    yield "MFU and HFU, FLOP/s over the peak without and with recomputation"


def _largest_first(parts: Mapping[str, float]) -> Iterable[tuple[str, float]]:
    return sorted(((k, v) for k, v in parts.items() if v > 0), key=lambda one: -one[1])


def comparison(a: Estimate, b: Estimate, result: Comparison) -> str:
    """Describe two plans beside each other, and which one is better."""
    lines = []
    for name, one in (("A", a), ("B", b)):
        gpus = f"{one.configuration.world:,} x {one.hardware.name}"
        lines += wrapped(f"{name}: {gpus}, {layout(one.configuration)}")
    rows = [("", "", "A", "B", "difference", "better")]
    axes = {*a.communication, *b.communication}
    for row in result.differences:
        change = f"{row.b - row.a:+,.2f}" if abs(row.b - row.a) >= 0.005 else "0"
        name = f"{row.name} exposed" if row.name in axes else row.name
        rows.append((name, row.unit, number(row.a), number(row.b), change, row.better))
    lines += ["", *table(rows, left=2)]
    for name, one in (("A", a), ("B", b)):
        if not one.fits:
            lines += wrapped(f"{name} does not fit. {' '.join(one.reasons)}")
    best = f"{result.winner} is better" if result.winner else "Neither is better"
    return "\n".join([*lines, "", *wrapped(f"{best}: {result.why}.")])


def ranking(found: Found) -> str:
    """List the best plans, and why each one is behind the first."""
    lines = wrapped(
        f"{found.model.name} on {found.gpus:,} x {found.hardware.name}: {found.legal:,} legal "
        f"plans; memory of {found.examined:,} and step of {found.estimated:,} computed; schedules "
        f"{', '.join(found.schedules)}"
    )
    if not found.plans:
        return "\n".join([*lines, *wrapped(found.advice)])
    rows = [("", "step", "MFU", "memory", "plan")]
    for place, one in enumerate(found.plans, 1):
        memory = f"{one.memory.total / 1e9:.0f} GB"
        rows.append((str(place), duration(one.step_seconds), percent(one.mfu), memory, ""))
    head, *body = table(rows, left=0)
    indent = head.index("plan")
    lines += ["", f"{head}, and why it is behind the first"]
    for row, one, reason in zip(body, found.plans, found.reasons, strict=True):
        lines += wrapped(layout(one.configuration), row.ljust(indent))
        if reason:
            lines += wrapped(reason, " " * indent)
    return "\n".join(lines)


def serving(plan: Serving) -> str:
    """Describe a plan of inference."""
    c, model = plan.configuration, plan.model
    per_replica = plan.requests_in_flight // c.dp
    capacity = plan.hardware.capacity_bytes
    degrees = {"tp": c.tp, "pp": c.pp, "ep": c.ep, "replicas (dp)": c.dp}
    words = ", ".join(f"{axis} {n}" for axis, n in degrees.items() if n > 1) or "one GPU"
    fits = f"Fits: {plan.headroom_bytes / 1e9:.1f} GB are left beside the reserve."
    lines = [
        *wrapped(
            f"{model.name} served on {c.world:,} x {plan.hardware.name}: {words}, {c.dtype.name}"
        ),
        *wrapped(
            f"Batch of {plan.batch:,} per replica, prompts of {plan.prompt:,} tokens, "
            f"{plan.generate:,} generated"
        ),
        "",
        "Memory per GPU",
        *table(
            [
                ("", "GB", f"of {capacity / 1e9:.0f} GB"),
                *(
                    (name, f"{size / 1e9:.2f}", f"{100 * size / capacity:.0f} %")
                    for name, size in (("weights", plan.weights_bytes), ("KV cache", plan.kv_bytes))
                ),
            ]
        ),
        *wrapped(fits if plan.fits else f"Does not fit. {' '.join(plan.reasons)}"),
        *wrapped(
            f"The KV cache has room for {plan.requests_in_flight:,} requests of this length, "
            f"{per_replica:,} per replica"
        ),
        "",
        f"Time to first token  {duration(plan.ttft_seconds)}",
        *wrapped(
            f"Time per token       {duration(plan.tpot_seconds)} = "
            + " + ".join(
                f"{name} {percent(seconds / plan.tpot_seconds)}"
                for name, seconds in _largest_first(plan.decode)
            )
        ),
        f"Throughput           {plan.tokens_per_second:,.0f} tokens/s on all GPUs",
        "",
        "Assumptions",
    ]
    for assumption in plan.assumptions:
        lines += wrapped(assumption, "  - ")
    return "\n".join(lines)
