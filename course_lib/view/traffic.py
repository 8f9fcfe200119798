"""The ledger as a picture: what went over each axis, and what the formula says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from fractions import Fraction

from course_lib.ledger import Ledger, summarize
from course_lib.view.bars import Parts, stacked
from course_lib.view.style import WIDTH, Picture


def ledger_plot(
    ledgers: Iterable[Ledger],
    *,
    formula: Mapping[str, float | Fraction] | None = None,
    title: str = "Bytes sent on each axis",
    note: str = "",
    width: float = WIDTH,
) -> Picture:
    """Wire bytes per axis, stacked by operation, all ranks together, numbers on the bars.

    ``formula`` gives the bytes expected on an axis; a black line marks it, and the sentence says
    by how much the count is off. Control traffic is left out of the bars and told in the
    sentence. Raises ValueError when nothing was sent and nothing expected.
    """
    ledgers = list(ledgers)
    bars: dict[str, dict[str, float]] = defaultdict(dict)
    control = Fraction(0)
    for line in summarize(ledgers):
        if line.control:
            control += line.wire
        elif line.wire:
            sent = bars[line.axis]
            sent[line.op] = sent.get(line.op, 0.0) + float(line.wire)
    marks = {axis: float(value) for axis, value in (formula or {}).items()}
    for axis in marks:
        bars.setdefault(axis, {})
    if not bars:
        raise ValueError("there is nothing to draw: no rank sent anything on any axis of size > 1")
    caption = _ledger_caption(bars, marks, float(control), len(ledgers), note)
    return stacked(
        bars,
        marks=marks,
        where="sent by all ranks together",
        title=title,
        caption=caption,
        width=width,
    )


def _ledger_caption(
    bars: Mapping[str, Parts], marks: Parts, control: float, ranks: int, note: str
) -> str:
    sums = {axis: sum(parts.values()) for axis, parts in bars.items()}
    said = ", ".join(f"{value:,.0f} on {axis}" for axis, value in sums.items())
    text = f"Bytes counted on {ranks} {'rank' if ranks == 1 else 'ranks'}: {said}"
    if marks:
        off = max(abs(sums[axis] - value) for axis, value in marks.items())
        text += "; the formula (black line) "
        text += f"is off by up to {off:,.0f} bytes" if off > 1 else "says the same"
    if control:
        text += f"; {control:,.0f} of control traffic left out"
    return f"{text}. {note}".strip()
