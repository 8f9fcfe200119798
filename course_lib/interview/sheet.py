"""The score sheet of a mock interview: points and time by question, and what to read first."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from course_lib.interview.lines import folded
from course_lib.interview.written import written

READ_FIRST = 3  # lessons
MOST_FILES = 10_000  # of one day and seed


@dataclass
class FollowedUp:
    """A follow-up that was asked: what was typed, and the point that the candidate gave; or None
    before that."""

    ask: str
    answers: list[str] = field(default_factory=list)
    points: int | None = None


@dataclass
class Item:
    """A question that was asked. ``planned`` in minutes; ``of`` is the number of points."""

    part: str
    id: str
    title: str
    lesson: str
    planned: float
    seconds: float = 0.0
    points: int = 0
    of: int = 0
    finished: bool = False
    skipped: bool = False
    spoken: bool = False
    mistake: str | None = None
    answers: list[str] = field(default_factory=list)
    proposals: list[dict[str, Any]] = field(default_factory=list)
    follow_ups: list[FollowedUp] = field(default_factory=list)

    def head(self) -> dict[str, Any]:
        """Return what names the question."""
        names = ("part", "id", "title", "lesson", "planned")
        return {name: getattr(self, name) for name in names}

    @property
    def answered(self) -> bool:
        """Whether the candidate answered anything."""
        return bool(self.answers or self.spoken or self.proposals)

    @property
    def score(self) -> tuple[int, int]:
        """The points earned and the points possible, follow-ups included."""
        given = [one.points for one in self.follow_ups if one.points is not None]
        return self.points + sum(given), self.of + len(given)


@dataclass
class Sheet:
    """What was answered so far, of ``count`` questions."""

    seed: int
    language: str
    minutes: float
    count: int
    date: str
    items: list[Item] = field(default_factory=list)

    @property
    def answered(self) -> bool:
        """Whether any question was answered."""
        return any(item.answered for item in self.items)

    @property
    def score(self) -> tuple[int, int]:
        """The points and the number of points of all items."""
        return _sum(self.items)

    def read_first(self) -> list[str]:
        """Return the lessons of the questions that lost the largest share of points, at most 3."""
        lost: dict[str, float] = {}
        for item in self.items:
            points, of = item.score
            lost[item.lesson] = max(lost.get(item.lesson, 0.0), 1 - points / of if of else 1.0)
        found = sorted((lesson for lesson in lost if lost[lesson] > 0), key=lambda one: -lost[one])
        return found[:READ_FIRST]

    def as_dict(self) -> dict[str, Any]:
        """Return what is written to the file."""
        points, of = self.score
        return {
            "date": self.date,
            "seed": self.seed,
            "language": self.language,
            "minutes": self.minutes,
            "questions": self.count,
            "finished": self.finished,
            "points": points,
            "of": of,
            "seconds": sum(item.seconds for item in self.items),
            "read_first": self.read_first(),
            "items": [asdict(item) for item in self.items],
        }

    @property
    def finished(self) -> bool:
        """Whether all questions were asked to their end."""
        return len(self.items) == self.count and all(item.finished for item in self.items)

    def __str__(self) -> str:
        said = written("interview", self.language)
        texts, lines = said["sheet"], []
        if not self.answered:
            return str(texts["no-answer"])
        lines.append(texts["title"].format(seed=self.seed))
        if not self.finished:
            lines.append(texts["early"].format(asked=len(self.items), count=self.count))
        for part, name in said["parts"].items():
            own = [item for item in self.items if item.part == part]
            if own:
                lines.append(texts["part"].format(part=name, **_words(own)))
            for item in own:
                notes = [texts["item"].format(title=item.title, **_words([item]))]
                notes += [texts["mistake"].format(mistake=item.mistake)] if item.mistake else []
                notes += [] if item.finished else [texts["unfinished"]]
                lines.append("  - " + texts["semicolon"].join(notes))
        lines.append(texts["total"].format(**_words(self.items)))
        lessons = texts["comma"].join(self.read_first())
        lines.append(texts["read-first"].format(lessons=lessons) if lessons else texts["all-right"])
        return "\n".join(map(folded, lines))


def _sum(items: list[Item]) -> tuple[int, int]:
    scores = [item.score for item in items]
    return sum(points for points, _ in scores), sum(of for _, of in scores)


def _words(items: list[Item]) -> dict[str, Any]:
    """Return points and minutes of the items."""
    points, of = _sum(items)
    used = sum(item.seconds for item in items) / 60
    planned = sum(item.planned for item in items)
    return {"points": points, "of": of, "used": f"{used:.1f}", "planned": f"{planned:g}"}


@dataclass
class Keeper:
    """Writes the sheet to a new file in ``folder``, or to ``path``, again after each answer.

    No file of an earlier interview is overwritten. Raises FileExistsError if ``path`` exists.
    """

    folder: Path
    path: Path | None = None
    begun: bool = False

    def __call__(self, sheet: Sheet) -> None:
        """Write the sheet, by way of a second file, so that no write leaves half of it."""
        if not self.begun:
            self.path, self.begun = self._new(f"{sheet.date}-{sheet.seed}"), True
        assert self.path is not None
        beside = self.path.with_name(self.path.name + ".part")
        text = json.dumps(sheet.as_dict(), ensure_ascii=False, indent=1) + "\n"
        try:
            beside.write_text(text, encoding="utf-8")
            os.replace(beside, self.path)
        finally:
            beside.unlink(missing_ok=True)

    def _new(self, stem: str) -> Path:
        """Make an empty file whose name no other interview has."""
        names = (
            [self.path]
            if self.path
            else [
                self.folder / f"{stem}{f'-{n}' if n > 1 else ''}.json" for n in range(1, MOST_FILES)
            ]
        )
        for path in names:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                path.open("x").close()
            except FileExistsError:
                continue
            return path
        raise FileExistsError(f"expected --out to name a new file, but {names[0]} exists")
