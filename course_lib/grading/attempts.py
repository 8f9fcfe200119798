"""Where an arena remembers valid attempts: a file of JSON in work/.course."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from course_lib.grading.progress import in_work

ROOT = Path(__file__).resolve().parents[2]


def own(name: str) -> Path | None:
    """Return the path of the board ``name`` for a notebook in work/; None for other notebooks."""
    here = Path.cwd() / "notebook"
    return ROOT / "work" / ".course" / f"{name}.json" if in_work(here, ROOT) else None


def entries(board: Path | None) -> list[Any]:
    """Return the saved attempts, valid or not; a file that cannot be read is renamed."""
    if board is None or not board.exists():
        return []
    try:
        found = json.loads(board.read_text(encoding="utf-8"))["attempts"]
        if not isinstance(found, list):
            raise TypeError("the attempts are no list")
        return found
    except (ValueError, KeyError, TypeError, RecursionError):
        board.replace(board.with_suffix(".unreadable.json"))
        return []


def add(entry: Mapping[str, Any], board: Path | None) -> None:
    """Save an attempt; the same one is saved once."""
    if board is None or entry in (found := entries(board)):
        return
    board.parent.mkdir(parents=True, exist_ok=True)
    fresh = board.with_suffix(".tmp")
    fresh.write_text(json.dumps({"attempts": [*found, entry]}, indent=1), encoding="utf-8")
    fresh.replace(board)
