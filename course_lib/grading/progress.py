"""A learner's progress in exercises and labs; in work/.course/progress.json."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any


@dataclass
class Entry:
    """The progress in one exercise, or in a lesson's lab (which has no hints)."""

    attempts: int = 0
    best: int = 0
    total: int = 0
    hints: int = 0

    @property
    def done(self) -> bool:
        """Whether all cases have passed at least once."""
        return self.best == self.total > 0

    def attempt(self, passed: int, total: int) -> None:
        """Count an attempt. An exercise that is done stays done, also when its checks have become
        stricter since."""
        self.attempts += 1
        if not self.done or passed == total > 0:
            self.best, self.total = max(min(self.best, total), passed), total


class Progress:
    """The progress file of the course in ``root``; a file that cannot be read is renamed."""

    def __init__(self, root: Path) -> None:
        self.path = root / "work" / ".course" / "progress.json"
        self.entries: dict[str, Entry] = {}
        self.labs: dict[str, Entry] = {}
        if self.path.exists():
            try:
                data = json.loads(self.path.read_text(encoding="utf-8"))
                self.entries = _entries(data["exercises"])
                self.labs = _entries(data.get("labs", {}))  # older files have none
            except (ValueError, KeyError, TypeError, AttributeError):
                self.path.replace(self.path.with_suffix(".unreadable.json"))

    def of(self, ex: str) -> Entry:
        """Return the entry of an exercise; make it if necessary."""
        return self.entries.setdefault(ex, Entry())

    def lab(self, lesson: str) -> Entry:
        """Return the entry of a lesson's lab; make it if necessary."""
        return self.labs.setdefault(lesson, Entry())

    def attempt(self, ex: str, passed: int, total: int) -> None:
        """Count an attempt at an exercise."""
        self.of(ex).attempt(passed, total)

    def save(self) -> None:
        """Write the file atomically."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        data = {"exercises": _as_data(self.entries), "labs": _as_data(self.labs)}
        handle, name = tempfile.mkstemp(dir=self.path.parent, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1)
        Path(name).replace(self.path)


def _entries(found: Mapping[str, Any]) -> dict[str, Entry]:
    return {name: _entry(one) for name, one in found.items()}


def _as_data(entries: Mapping[str, Entry]) -> dict[str, dict[str, int]]:
    return {name: asdict(entry) for name, entry in sorted(entries.items())}


def _entry(found: Mapping[str, Any]) -> Entry:
    names = {each.name for each in fields(Entry)}
    return Entry(**{name: int(value) for name, value in found.items() if name in names})


def in_work(path: Path, root: Path) -> bool:
    """Return whether ``path`` is in the learner's folder work/, where a grade is an attempt."""
    return (root / "work").resolve() in path.resolve().parents
