"""Read the course's own notebooks and hints with json alone.

The build writes the points of an exercise into its check cell; the hints are a data file. So
``course list`` needs neither torch nor the graders.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any

HINTS = "hints.json"  # beside the exercises
IMPORT = "from course_lib.grading import check"  # the first line of a check cell


@dataclass(frozen=True)
class ExerciseLine:
    """An exercise as the check cell of the notebook describes it."""

    id: str
    points: int


def course(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the course wrote into the metadata of a cell or of a notebook; {} if nothing."""
    found = (cell.get("metadata") or {}).get("course", {})
    return found if isinstance(found, dict) else {}


def read_cells(path: Path) -> list[dict[str, Any]]:
    """Return the cells of a notebook that the build wrote, each source as one string.

    Raises ValueError when the file is not a notebook.
    """
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        return [cell | {"source": "".join(cell["source"])} for cell in cells]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: expected a notebook; make notebooks writes it anew") from None


def exercise_lines(cells: Iterable[Mapping[str, Any]], path: Path) -> list[ExerciseLine]:
    """Return the exercises among the cells of the notebook in ``path``, in order.

    Raises ValueError when a check cell has no points.
    """
    checks = [course(cell) for cell in cells if course(cell).get("role") == "check"]
    for found in checks:
        if not isinstance(found.get("points"), int):
            raise ValueError(
                f"{path}: expected points in the check cell of {found.get('ex')}; make notebooks "
                "writes them"
            )
    return [ExerciseLine(found["ex"], found["points"]) for found in checks]


def hint_id(ex: str, rung: int) -> str:
    """Return the name of a hint in the file of hints; the first rung is 1."""
    return f"{ex}-hint-{rung}"


def read_hints(root: Path, ex: str) -> list[str]:
    """Return the hints to an exercise, in order. Raises ValueError when there are none."""
    path = root / "exercises" / HINTS
    texts = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    names = takewhile(texts.__contains__, (hint_id(ex, rung) for rung in count(1)))
    if not (found := [texts[name] for name in names]):
        raise ValueError(f"{path}: expected hints to {ex}, found none; git restores the file")
    return found
