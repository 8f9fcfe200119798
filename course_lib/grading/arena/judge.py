"""Judge rows: every illegal move with its reason, or the score and the results of the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from course_lib.grading.answers import shown
from course_lib.grading.arena.levels import CLOSE, RIVALS, Level, level
from course_lib.schedule import Action, Schedule, ScheduleError, Simulation, simulate
from course_lib.schedule.data import as_rows
from course_lib.schedule.simulate import Costs
from course_lib.schedule.validate import before, reasons, settled

TOLD = 12  # reasons that are printed
LONGEST = 40  # characters of a name
OFF = 1e-5  # gradient difference of float32 sums in another order; a mistake is much larger
HEAD = f"  {'':26}{'step':>8}{'bubble of total':>17}{'longest rank':>14}{'in flight':>11}"


@dataclass(frozen=True)
class Attempt:
    """The result of a learner's rows. ``reasons`` is empty if they are legal."""

    level: Level
    name: str
    reasons: list[str]
    simulation: Simulation | None = None
    off: float | None = None  # largest difference of a gradient from one process
    measured: float | None = None  # makespan on paced ranks, in the unit of the costs

    @property
    def ok(self) -> bool:
        """Whether the attempt is valid: legal, run, and with right gradients."""
        return self.off is not None and self.off < OFF

    @property
    def stars(self) -> int:
        """The stars by ``Level.stars``; 0 if the attempt is not valid."""
        return self.level.stars(self.simulation.makespan) if self.ok and self.simulation else 0

    def __str__(self) -> str:
        """Return the reasons, or the score and the results of the ranks."""
        if self.simulation is None:
            count = f"{len(self.reasons)} illegal move{'s' * (len(self.reasons) != 1)}"
            told = [f"  {reason}" for reason in self.reasons[:TOLD]]
            more = len(self.reasons) - TOLD
            return "\n".join([f"{count}:", *told, *([f"  and {more} more"] if more > 0 else [])])
        which, took = self.level, self.simulation.makespan
        lines = [f"Level {which.number}, {which.title}", HEAD, line(self.name, self.simulation)]
        lines += [line(name, which.rivals[name]) for name in ("1f1b", "zb-h1", "zb-v")]
        lines.append(f"  {'bound of these stages':26}{which.bound:>8.2f}  no order is shorter")
        lines += [f"  {wait}" for wait in waits(self.simulation)]
        if self.off is not None:
            said = "equal one process" if self.ok else "are WRONG"
            lines.append(f"run on {which.ranks} ranks: gradients {said} (off by {self.off:.0e})")
        if self.measured is not None:
            lines.append(
                f"compute padded by sleep: step {self.measured:.2f} measured, {took:.2f} simulated"
            )
        lines.append(self._verdict(took))
        return "\n".join(lines)

    def _verdict(self, took: float) -> str:
        which = self.level
        if not self.ok:
            return "no star: " + ("not run on ranks" if self.off is None else "wrong gradients")
        steps = [which.rivals["1f1b"].makespan, which.par, which.best]
        names = [f"1F1B's {steps[0]:g}", f"par {steps[1]:g}", f"the library's {steps[2]:g}"]
        missing = next((n for n, s in zip(names, steps, strict=True) if took > s + CLOSE), "")
        said = "*" * self.stars
        if self.stars == 5:
            return f"{said}  shorter than the library's best, {which.best:g}: report it"
        if missing:
            return f"{said}  the next star is for {missing}"
        return f"{said}  as short as the library's best" + ("; less may be possible" * which.open)


def line(name: str, simulation: Simulation, note: str = "") -> str:
    """Return a line of a table: step, bubble, longest rank and micro-batches in flight."""
    schedule = simulation.schedule
    peak = max(schedule.peak_in_flight()) * schedule.ranks / schedule.stages
    return (
        f"  {name[:25]:26}{simulation.makespan:>8.2f}{simulation.bubble_of_total:>17.1%}"
        f"{simulation.span:>14.2f}{peak:>11.2f}  {note}"
    ).rstrip()


def waits(simulation: Simulation, most: int = 3) -> Iterator[str]:
    """Yield the longest waits between a rank's actions, with the action that each waits for."""
    schedule, costs = simulation.schedule, simulation.costs
    timed = [
        list(zip(spans, actions, strict=True))
        for spans, actions in zip(simulation.rows, schedule.rows, strict=True)
    ]
    end = {fact: (s.end, a) for row in timed for s, a in row for fact in settled(a)}

    def arrives(fact: Action, rank: int) -> float:
        away = schedule.placement[fact.stage] != rank
        return end[fact][0] + costs.comm * away

    gaps = []
    for rank, row in enumerate(timed):
        free = 0.0
        for span, action in row:
            if span.start - free > CLOSE:
                last = max(before(action, schedule.stages), key=lambda one: arrives(one, rank))
                gaps.append((span.start - free, rank, free, end[last][1], action))
            free = span.end
    gaps.sort(key=lambda gap: -gap[0])  # equal gaps stay in order of ranks
    for gap, rank, free, needed, action in gaps[:most]:
        yield f"rank {rank} waits {gap:g} from {free:g} on: its {action} needs {needed}"


def read(
    which: Level, rows: str | Sequence[object] | Schedule, *, limited: bool = True
) -> tuple[Schedule | None, list[str]]:
    """Return the schedule in ``rows``, and all reasons why it is not legal.

    ``rows`` is a text with one line per rank, or a list of such lines or of lists of cells.
    """
    if isinstance(rows, Schedule):
        rows = rows.rows
    if not isinstance(rows, str | list | tuple):
        return None, [f"expected rows as a text or a list of lists, got {type(rows).__name__}"]
    lines = rows.strip().splitlines() if isinstance(rows, str) else rows
    cells = [_cells(one) for one in lines]
    actions: list[list[Action]] = []
    problems: list[str] = []
    for rank, row in enumerate(row for row in cells if row):
        actions.append([])
        for place, cell in enumerate(row):
            try:
                actions[-1].append(Action.parse(cell))
            except ScheduleError as error:
                problems.append(f"rank {rank}, cell {place}: {error}")
    if len(actions) != which.ranks:
        problems.append(f"expected {which.ranks} rows, one per rank, got {len(actions)}")
    if problems:
        return None, problems
    schedule = Schedule("yours", as_rows(actions), which.placement)
    if schedule.microbatches != which.microbatches:
        problems.append(
            f"expected {which.microbatches} micro-batches, numbered from 0, got "
            f"{schedule.microbatches - 1} as the last one"
        )
    if (
        schedule.microbatches <= 2 * which.microbatches
    ):  # else a typing error with very many missing actions
        problems += reasons(schedule, [which.limit] * which.ranks if limited else None)
    return (None if problems else schedule), problems


def _cells(row: object) -> list[str]:
    if isinstance(row, str):
        return row.replace(",", " ").split()
    return [str(cell) for cell in row] if isinstance(row, list | tuple) else [str(row)]


def checked(name: object) -> str:
    """Return ``name`` without spaces around it.

    Raises ValueError for a name that cannot be a label in tables and pictures: not a text, empty,
    too long, with control characters or line breaks, in brackets, or the name of a schedule of the
    library.
    """
    plain = name.strip() if isinstance(name, str) and name.isprintable() else ""
    if not 0 < len(plain) <= LONGEST:
        raise ValueError(
            f"expected a name of 1 to {LONGEST} printable characters, got {shown(name, 60)}; "
            'choose one such as "Ada"'
        )
    if plain[0] == "[" or plain.lower() in (*RIVALS, "searched"):
        raise ValueError(
            "expected a name without a bracket in front that is no schedule of the library, got "
            f'{plain!r}; choose one such as "Ada"'
        )
    return plain


def play(
    number: int,
    rows: str | Sequence[object] | Schedule,
    name: str = "you",
    *,
    on_ranks: bool = True,
    unit: float = 0.0,
    board: Path | None = None,
) -> Attempt:
    """Judge ``rows`` in a level; ``name`` is the learner's on the board.

    With ``unit``, the ranks pad compute by sleep to ``unit`` seconds per cost of 1. A valid
    attempt is saved to ``board``. The default is the learner's board for a notebook in work/; for
    other notebooks, nothing is saved. Raises ValueError for a wrong level or name.
    """
    from course_lib.grading.arena import board as boards

    which, name = level(number), checked(name)
    schedule, problems = read(which, rows)
    if schedule is None:
        return Attempt(which, name, problems)
    attempt = Attempt(which, name, [], simulate(schedule, which.costs))
    if on_ranks:
        off, measured = on_real_ranks(schedule, which.costs, unit)
        attempt = replace(attempt, off=off, measured=measured)
    if attempt.ok:
        boards.note(attempt, boards.own() if board is None else board)
    return attempt


def on_real_ranks(schedule: Schedule, costs: Costs, unit: float) -> tuple[float, float | None]:
    """Return the largest gradient difference from one process, and the measured makespan."""
    from course_lib.grading.arena import ranks  # torch, last

    return ranks.trial(schedule, costs, unit)
