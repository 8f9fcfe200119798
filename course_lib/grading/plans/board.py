"""The board of the plan arena: valid plans from work/.course/plans.json, and the three bars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from course_lib.grading import attempts
from course_lib.grading.plans.levels import LEVELS, level

SHOWN = 5  # plans per name and level


def leaderboard(number: int, board: Path | None = None) -> str:
    """Return the saved plans of a level in one table, shortest step first, among the bars."""
    which = level(number)
    middle, par, best = which.bars
    lines = [(middle, "  [middle]"), (par, "  [par]"), (best, "  [best of the search]")]
    by_name: dict[str, list[tuple[float, str]]] = {}
    for name, choices, step in _saved(number, board):
        said = ", ".join(f"{key}={value}" for key, value in choices.items())
        text = f"  {name[:20]:21}{'*' * which.stars(step):5}{said}"
        by_name.setdefault(name, []).append((step, text))
    lines += [line for mine in by_name.values() for line in sorted(mine)[:SHOWN]]
    head = f"Level {which.number}, {which.title}: seconds of the simulated step"
    return "\n".join([head, *(f"{step:8.3f}{text}" for step, text in sorted(lines))])


def stars(board: Path | None = None) -> dict[int, int]:
    """Return by level the most stars that any name on the board has."""
    return {
        one.number: max((one.stars(step) for *_, step in _saved(one.number, board)), default=0)
        for one in LEVELS
    }


def _saved(number: int, board: Path | None) -> list[tuple[str, dict[str, Any], float]]:
    """Return (name, choices, step) of each saved plan that is still possible and fits.

    Each is predicted again, so that an edit of the file cannot change its result.
    """
    which, found = level(number), []
    for entry in attempts.entries(attempts.own("plans") if board is None else board):
        try:
            if entry["level"] != number:
                continue
            plan = which.plan(**entry["choices"])
            predicted = which.predict(plan)
            if predicted.fits and not which.refusals(plan):
                found.append((str(entry["name"]), entry["choices"], predicted.step_seconds))
        except (ValueError, KeyError, TypeError):
            continue  # edited by hand, and no plan of the level any more
    return found
