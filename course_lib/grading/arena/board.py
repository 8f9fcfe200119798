"""The leaderboard: valid attempts from work/.course/arena.json, and the library's schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from course_lib.grading import attempts
from course_lib.grading.answers import shown
from course_lib.grading.arena.judge import HEAD, Attempt, checked, line, read
from course_lib.grading.arena.levels import LEVELS, Level, level
from course_lib.schedule import Schedule, Simulation, simulate, write_csv
from course_lib.view import Picture
from course_lib.view.trade import trade_plot

SHOWN = 5  # attempts per name and level
KINDS = {"level": int, "name": str, "rows": str}  # the fields of an entry


def own() -> Path | None:
    """Return the board's path for a notebook in work/; None for other notebooks."""
    return attempts.own("arena")


def note(attempt: Attempt, board: Path | None) -> None:
    """Save a valid attempt; the same rows are saved once per name."""
    if board is None or attempt.simulation is None:
        return
    entry = {
        "level": attempt.level.number,
        "name": attempt.name,
        "rows": write_csv(attempt.simulation.schedule),
    }
    attempts.add(entry, board)


def leaderboard(number: int, board: Path | None = None) -> str:
    """Return attempts and the library's schedules in one table, shortest step first.

    Equal steps are sorted by the span of the longest rank, then by memory. The last line gives the
    reason if entries of the file are left out.
    """
    which = level(number)
    lines = []
    for name, simulation in _attempts(which, board):
        lines.append((_key(simulation), line(name, simulation, "*" * _stars(which, simulation))))
    for name, rival in which.rivals.items():
        lines.append((_key(rival), line(f"[{name}]", rival, _rules(which, rival.schedule))))
    head = f"Level {which.number}, {which.title}: par {which.par:g}, bound {which.bound:g}"
    said = [text for _, text in sorted(lines, key=lambda one: one[0])]
    return "\n".join([head, HEAD, *said, *_left_out(board)])


def picture(number: int, board: Path | None = None) -> Picture:
    """Return a picture of memory against bubble: best attempts, the library's and the bound."""
    which = level(number)
    points: dict[tuple[float, float], list[str]] = {}
    for name, simulation in [*which.rivals.items(), *_best(which, board).items()]:
        schedule = simulation.schedule
        peak = max(schedule.peak_in_flight()) * schedule.ranks / schedule.stages
        points.setdefault((peak, round(simulation.bubble_of_total, 6)), []).append(name)
    work = sum(span.duration for span in which.rivals["searched"].spans) / which.ranks
    return trade_plot(
        {", ".join(names): point for point, names in points.items()},
        {},
        {"bound of these stages": 1 - work / which.bound},
        title=f"Level {number}, {which.title}: memory against bubble",
        note=f"The limit is {which.limit / which.chunks:g}.",
    )


def stars(board: Path | None = None) -> dict[int, int]:
    """Return the most stars of all names on the board, by level."""
    return {
        which.number: max((_stars(which, one) for _, one in _attempts(which, board)), default=0)
        for which in LEVELS
    }


def _fault(entry: Any) -> str:
    """Return why an entry of the file cannot be shown, "" if it can."""
    fields = ", ".join(f"{name} ({kind.__name__})" for name, kind in KINDS.items())
    if not isinstance(entry, dict):
        return f"expected an object with {fields}, got {shown(entry, 60)}; delete the entry"
    for name, kind in KINDS.items():
        if type(entry.get(name)) is not kind:
            got = shown(entry.get(name), 60)
            return f"expected {fields}, got {got} as {name}; delete the entry"
    try:
        checked(entry["name"])
    except ValueError as error:
        return str(error)
    return ""


def _left_out(board: Path | None) -> list[str]:
    """Return one sentence about the entries that are not shown; none if all are."""
    board = own() if board is None else board
    faults = [_fault(entry) for entry in attempts.entries(board)]
    bad = [(place, fault) for place, fault in enumerate(faults, 1) if fault]
    if not bad or board is None:
        return []
    (place, fault), *others = bad
    more = f" (and {len(others)} more)" if others else ""
    return [f"entry {place} of {board.name} is left out{more}: {fault}"]


def _attempts(which: Level, board: Path | None) -> list[tuple[str, Simulation]]:
    """Return the shortest attempts of each name, with their numbers.

    Each is simulated again, so that an edit of the file cannot change its result.
    """
    board = own() if board is None else board
    entries = [entry for entry in attempts.entries(board) if not _fault(entry)]
    found: dict[str, list[tuple[str, Simulation]]] = {}
    for entry in entries:
        if entry["level"] != which.number:
            continue
        name = checked(entry["name"])
        mine = found.setdefault(name, [])
        schedule, _ = read(which, entry["rows"])
        if schedule is not None:  # None: edited by hand, and not legal any more
            mine.append((f"{name} #{len(mine) + 1}", simulate(schedule, which.costs)))
    best = [sorted(mine, key=lambda one: _key(one[1]))[:SHOWN] for mine in found.values()]
    return [one for mine in best for one in mine]


def _best(which: Level, board: Path | None) -> dict[str, Simulation]:
    found: dict[str, Simulation] = {}
    for numbered, simulation in _attempts(which, board):
        found.setdefault(numbered.rpartition(" #")[0], simulation)
    return found


def _stars(which: Level, simulation: Simulation) -> int:
    return which.stars(simulation.makespan)


def _rules(which: Level, schedule: Schedule) -> str:
    """Return why a schedule of the library is not allowed in the level, "" if it is."""
    if schedule.placement != which.placement:
        return "other stages"
    return "" if which.obeys(schedule) else "over the limit"


def _key(simulation: Simulation) -> tuple[float, float, float]:
    peak = max(simulation.schedule.peak_in_flight()) / simulation.schedule.stages
    return round(simulation.makespan, 6), round(simulation.span, 6), peak
