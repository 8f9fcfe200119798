"""A learner's progress: attempts, best marks, hints taken; in work/.course/progress.json."""

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
    """What is known of one exercise."""

    attempts: int = 0
    best: int = 0
    total: int = 0
    hints: int = 0

    @property
    def done(self) -> bool:
        """Whether all cases passed once."""
        return self.best == self.total > 0


class Progress:
    """The progress file of the course in ``root``; a file that cannot be read is put aside."""

    def __init__(self, root: Path) -> None:
        self.path = root / "work" / ".course" / "progress.json"
        self.entries: dict[str, Entry] = {}
        if self.path.exists():
            try:
                data = json.loads(self.path.read_text(encoding="utf-8"))
                self.entries = {ex: _entry(found) for ex, found in data["exercises"].items()}
            except (ValueError, KeyError, TypeError, AttributeError):
                self.path.replace(self.path.with_suffix(".unreadable.json"))

    def of(self, ex: str) -> Entry:
        """The entry of an exercise, made when it is new."""
        return self.entries.setdefault(ex, Entry())

    def attempt(self, ex: str, passed: int, total: int) -> None:
        """Note an attempt."""
        entry = self.of(ex)
        entry.attempts += 1
        entry.best, entry.total = max(min(entry.best, total), passed), total

    def save(self) -> None:
        """Write the file, whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        data = {"exercises": {ex: asdict(entry) for ex, entry in sorted(self.entries.items())}}
        handle, name = tempfile.mkstemp(dir=self.path.parent, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1)
        Path(name).replace(self.path)


def _entry(found: Mapping[str, Any]) -> Entry:
    names = {each.name for each in fields(Entry)}
    return Entry(**{name: int(value) for name, value in found.items() if name in names})


def in_work(path: Path, root: Path) -> bool:
    """Whether ``path`` lies in the learner's folder work/: only there a grade is an attempt."""
    return (root / "work").resolve() in path.resolve().parents
