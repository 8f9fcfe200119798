"""A simulated schedule as plain text, one line per rank, for any terminal. No torch here.

``F0--`` is the forward of micro-batch 0, ``B0==`` its backward, dots are idle time: the bubble.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from course_lib.schedule.simulate import Costs, Factor, Simulation
from course_lib.schedule.span import Span

FILLS = {"F": "-", "B": "=", "I": "+", "W": "x"}
WORDS = {"F": "F forward", "B": "B backward", "I": "I input gradient", "W": "W weight gradient"}
IDLE, MIXED = ".", "#"
NARROWEST = 40
MOST_RANKS = 32  # drawn; with more, only the first and the last ones
MOST_STAGES = 16  # with more, the title does not list their costs
WIDEST = 8  # columns of the shortest action


def drawing(simulation: Simulation, width: int = 80) -> str:
    """Draw the schedule to scale in lines of at most ``width`` characters, with its numbers.

    Each line ends with the rank's peak in flight. The text says where actions are too short for
    the number of their micro-batch, or for a column of their own.
    """
    if width < NARROWEST:
        raise ValueError(f"expected a width of at least {NARROWEST} characters, got width={width}")
    peaks = [f" peak {peak}" for peak in simulation.schedule.peak_in_flight()]
    margin = len(f"rank {len(peaks) - 1} ")
    scale, roomy = _scale(simulation, width - margin - max(map(len, peaks)))
    draw = _actions if roomy else _mostly
    lines = []
    for rank in _drawn(len(peaks)):
        if rank is None:
            lines.append(f"... {len(peaks) - MOST_RANKS} ranks between them are not drawn")
        else:
            lines.append(f"rank {rank}".ljust(margin) + draw(simulation, rank, scale) + peaks[rank])
    drawn = "".join(line[margin:] for line in lines)
    end = margin + round(simulation.makespan * scale)
    lines.append("0".rjust(margin + 1) + _number(simulation.makespan).rjust(end - margin - 1))
    key = _key(simulation, drawn) if roomy else _key_of_columns(simulation, drawn, scale)
    if simulation.costs.per_stage is not None:
        key = f"{unequal(simulation.costs.per_stage)} {key}"
    above, below = (
        textwrap.wrap(text, width, break_on_hyphens=False)
        for text in (title_of(simulation), f"{key} {numbers(simulation)}")
    )
    return "\n".join([*above, *lines, *below])


def title_of(simulation: Simulation) -> str:
    """Return the title: the schedule, its size and its costs."""
    schedule = simulation.schedule
    chunks = schedule.stages / schedule.ranks
    parts = [_count(schedule.ranks, "rank")]
    if chunks != 1:
        parts.append(f"{schedule.stages} stages")
    parts.append(_count(schedule.microbatches, "micro-batch"))
    return f"{schedule.name}, {', '.join(parts)}; {spoken(simulation.costs, _ops(simulation))}"


def spoken(costs: Costs, ops: Collection[str] = "FB") -> str:
    """Return the costs of ``ops`` in words."""
    text = f"F {_number(costs.f)}, B {_number(costs.i + costs.w)}"
    if {"I", "W"} & set(ops):
        text += f" (I {_number(costs.i)} + W {_number(costs.w)})"
    return f"{text}, transfer {_number(costs.comm)}"


def unequal(factors: Sequence[Factor]) -> str:
    """Return a sentence on how the stages' costs differ."""
    if len(factors) > MOST_STAGES:
        return f"The {len(factors)} stages differ in cost."
    each = (factor if isinstance(factor, tuple) else (factor,) for factor in factors)
    return f"Stages cost {', '.join(':'.join(map(_number, one)) for one in each)} times that."


def numbers(simulation: Simulation) -> str:
    """Return makespan, bubble with both bases and peak in flight, as one sentence."""
    peaks = simulation.schedule.peak_in_flight()
    most = max(peaks)
    return (
        f"Makespan {_number(simulation.makespan)}, of which the busiest rank works "
        f"{_number(simulation.work)}: the bubble is {simulation.bubble_of_total:.1%} of total "
        f"time, {simulation.bubble_of_ideal:.1%} of ideal time; at most {most} in flight, on "
        f"rank {peaks.index(most)}."
    )


def scored(name: str, points: Mapping[str, Any]) -> str:
    """Return a score as a small table, with the distance from the lower bound."""
    lines = ["Same work on every rank:       makespan   longest rank   bubble of total   peak"]
    for label, row in [(name, points), *points["beside"].items()]:
        lines.append(
            f"{label[:24]:<28}{_number(row['makespan']):>11}{_number(row['span']):>15}"
            f"{row['bubble']['of_total']:>18.1%}{_number(row['peak']):>7}"
        )
    lines.append(
        f"No order with these stages on these ranks takes less than "
        f"{_number(points['lower_bound'])}: that is {points['efficiency']:.1%} of the makespan."
    )
    lines.append("Peak: micro-batches in flight, of all stages of a rank together.")
    return "\n".join(lines)


def _ops(simulation: Simulation) -> set[str]:
    return {action.op for row in simulation.schedule.rows for action in row}


def _scale(simulation: Simulation, room: int) -> tuple[float, bool]:
    """Return columns per unit of time, and whether every action has at least one."""
    durations = [span.duration for span in simulation.spans if span.duration > 0]
    shortest = min(durations, default=simulation.makespan)  # none where rounding makes all 0
    shortest = round(shortest, 12) or shortest
    columns = min(WIDEST, int(room / simulation.makespan * shortest + 1e-9))
    return (columns / shortest, True) if columns else (room / simulation.makespan, False)


def _drawn(ranks: int) -> Iterator[int | None]:
    """Yield the ranks to draw, and None where some are left out."""
    if ranks <= MOST_RANKS:
        yield from range(ranks)
        return
    yield from range(MOST_RANKS // 2)
    yield None
    yield from range(ranks - MOST_RANKS // 2, ranks)


def _actions(simulation: Simulation, rank: int, scale: float) -> str:
    """Draw a row in which every action has at least one column."""
    stages = simulation.schedule.stages_of(rank)
    line = [IDLE] * round(simulation.makespan * scale)
    for span in simulation.rows[rank]:
        first, last = round(span.start * scale), round(span.end * scale)
        name = f"{span.op}{span.mb}{_primes(stages, span)}"
        text = name if len(name) <= last - first else span.op
        line[first:last] = text.ljust(last - first, FILLS[span.op])[: last - first]
    return "".join(line)


def _primes(stages: Sequence[int], span: Span) -> str:
    """Return one ' for the second stage of a rank, two for the third."""
    assert span.stage is not None
    return "'" * stages.index(span.stage)


def _mostly(simulation: Simulation, rank: int, scale: float) -> str:
    """Draw a row of columns longer than an action: each shows the operation that fills most."""
    columns = round(simulation.makespan * scale)
    shares: list[dict[str, float]] = [{} for _ in range(columns)]
    for span in simulation.rows[rank]:
        column, start = int(span.start * scale), span.start * scale
        while column < columns and start < span.end * scale:
            end = min(column + 1.0, span.end * scale)
            shares[column][span.op] = shares[column].get(span.op, 0.0) + end - start
            column, start = column + 1, end
    crowded = len(simulation.rows[rank]) > columns
    return "".join(_letter(share, crowded) for share in shares)


def _letter(share: dict[str, float], crowded: bool) -> str:
    """Return the operation that fills most of a column; MIXED if crowded and it fills under 4/5."""
    busy = sum(share.values())
    if busy < 0.5:
        return IDLE
    most = max(share, key=share.__getitem__)
    return MIXED if crowded and share[most] < 0.8 * busy else most


def _key(simulation: Simulation, drawn: str) -> str:
    """Explain the letters and what was left out."""
    words = [word for op, word in WORDS.items() if op in _ops(simulation)]
    text = f"{', '.join(words)}, {IDLE} idle; peak: most (stage, micro-batch) pairs in flight."
    if "'" in drawn:
        third = ", '' its third" if "''" in drawn else ""
        text += f" ' marks a rank's second stage{third}."
    if re.search(r"[FBIW](?!\d)", drawn):
        text += " Where a box is too short, the number of its micro-batch is left out."
    return text


def _key_of_columns(simulation: Simulation, drawn: str, scale: float) -> str:
    """Explain the letters where columns are longer than actions."""
    text = f"{_key(simulation, '')} Scaled down: a column is {_number(1 / scale)} of time and "
    return text + "shows what took most of it." + f" {MIXED}: several." * (MIXED in drawn)


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1e4 else f"{value:.4g}"
