"""When to review which card: FSRS schedules, and a JSON file stores the progress.

The day is always an argument. Progress is in ``state.json`` of a folder, and the imported notes
are below ``notes`` in it. A damaged file is copied before it is written again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, date, datetime, time
from itertools import count
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from fsrs import Card as Memory
from fsrs import Rating, Scheduler, State

from course_lib.interview.front_matter import BANDS, Value
from course_lib.interview.written import written

try:
    import fcntl
except ImportError:  # two sessions at once are then not kept apart
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from course_lib.interview.cards import Card

# One interval counts days. Without steps of minutes and without random days the same grades give
# the same dates.
SCHEDULER = Scheduler(learning_steps=(), relearning_steps=(), enable_fuzzing=False)
EASIEST, HARDEST = 1.0, 10.0  # FSRS' range of difficulty
LONGEST = 36500.0  # days, as in FSRS


@dataclass(frozen=True)
class Progress:
    """The progress with one card.

    ``stability``: the days after which the probability to remember is 0.9; ``difficulty``: from 1
    to 10; both None before the first review. ``graded`` counts reviews since the import of a note,
    and ``source`` is its path.
    """

    created: date
    next_review: date
    last_reviewed: date | None = None
    review_count: int = 0
    stability: float | None = None
    difficulty: float | None = None
    graded: int = 0
    source: str = ""


def graded(progress: Progress, rating: Rating, today: date) -> Progress:
    """Return the progress after a review on the day ``today``."""
    after, _ = SCHEDULER.review_card(_memory(progress), rating, _at(today))
    return replace(
        progress,
        next_review=after.due.date(),
        last_reviewed=today,
        review_count=progress.review_count + 1,
        stability=after.stability,
        difficulty=after.difficulty,
        graded=progress.graded + 1,
    )


def retrievability(progress: Progress, today: date) -> float:
    """Return the probability to remember the card on the day ``today``; 0 before a review."""
    return float(SCHEDULER.get_card_retrievability(_memory(progress), _at(today)))


def band(difficulty: float) -> str:
    """Return easy, medium or hard: the thirds of FSRS' range."""
    third = int((difficulty - EASIEST) / (HARDEST - EASIEST) * len(BANDS))
    return BANDS[min(third, len(BANDS) - 1)]


def fields(progress: Progress, today: date) -> dict[str, Value]:
    """Return the progress as the fields of a note; ``mastery_level`` is retrievability today."""
    found: dict[str, Value | None] = {
        "created": progress.created,
        "last_reviewed": progress.last_reviewed,
        "next_review": progress.next_review,
        "review_count": progress.review_count,
        "difficulty": None if progress.difficulty is None else band(progress.difficulty),
        "mastery_level": round(retrievability(progress, today), 2),
    }
    return {name: value for name, value in found.items() if value is not None}


def from_fields(values: Mapping[str, Any], today: date) -> Progress:
    """Return the progress that the fields of a note state.

    The days between the two reviews are the stability; a band of difficulty is its middle.
    """
    last, following = values.get("last_reviewed"), values.get("next_review")
    progress = Progress(
        created=values.get("created", today),
        next_review=following or last or today,
        review_count=values.get("review_count", 0),
    )
    if last is None:
        return progress
    middle = (BANDS.index(values.get("difficulty", BANDS[1])) + 0.5) / len(BANDS)
    return replace(
        progress,
        last_reviewed=last,
        stability=min(max(float((progress.next_review - last).days), 1.0), LONGEST),
        difficulty=EASIEST + middle * (HARDEST - EASIEST),
    )


def _memory(progress: Progress) -> Memory:
    last = progress.last_reviewed
    return Memory(
        card_id=0,
        state=State.Learning if progress.stability is None else State.Review,
        stability=progress.stability,
        difficulty=progress.difficulty,
        due=_at(progress.next_review),
        last_review=None if last is None else _at(last),
    )


def _at(day: date) -> datetime:
    return datetime.combine(day, time(), UTC)


@dataclass
class Reviews:
    """The progress with all cards, by id, in ``folder``; ``said`` has a sentence per problem."""

    folder: Path
    cards: dict[str, Progress] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """The file of the progress."""
        return self.folder / "state.json"

    def copy_of(self, id: str) -> Path:
        """Return where the text of the imported note ``id`` is."""
        return self.folder / "notes" / id

    def load(self) -> Reviews:
        """Read the file again; a damaged one is copied, and its readable entries are used."""
        if self.path.exists():
            with self._alone():
                self._load()
        return self

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Run the body while no other process reads and writes the file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if fcntl is None:
            yield
            return
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _load(self) -> None:
        if not self.path.exists():
            return
        found: dict[str, Progress] = {}
        try:
            entries = dict(json.loads(self.path.read_bytes())["cards"])
            read = {id: _read(entry) for id, entry in entries.items() if _inside(id)}
            found = {id: progress for id, progress in read.items() if progress is not None}
            good = f"{len(found)} of {len(entries)} cards"
            damaged = len(found) < len(entries)
        except (ValueError, KeyError, TypeError, RecursionError):
            good, damaged = "no card", True
        self.cards = found
        if damaged:
            aside = self._aside()
            self._write()
            self.said.append(
                f"{self.path.name} was damaged and is now {aside.name}; the progress with {good} "
                "could be read"
            )

    def record(self, progress: Mapping[str, Progress]) -> None:
        """Store the progress with these cards; the progress with others is read again first."""
        with self._alone():
            self._load()
            self.cards |= progress
            self._write()

    def _write(self) -> None:
        shown = {id: asdict(one) for id, one in sorted(self.cards.items())}
        text = json.dumps({"cards": shown}, indent=1, default=str)
        write_atomically(self.path, f"{text}\n".encode())

    def _aside(self) -> Path:
        """Copy the file to the first free name ``state.json.damaged-1``, ``-2`` ...

        A copy, so that a full disk leaves the file as it is.
        """
        names = (self.path.with_name(f"{self.path.name}.damaged-{n}") for n in count(1))
        free = next(name for name in names if not name.exists())
        write_atomically(free, self.path.read_bytes())
        return free


def due(reviews: Mapping[str, Progress], today: date) -> list[str]:
    """Return the ids that are due on the day ``today``, the least remembered first."""
    found = [id for id, progress in reviews.items() if progress.next_review <= today]
    return sorted(found, key=lambda id: (retrievability(reviews[id], today), id))


def unseen(
    ids: Iterable[str], reviews: Mapping[str, Progress], today: date, most: int
) -> list[str]:
    """Return the first of ``ids`` without progress, so that at most ``most`` start in a day."""
    started = sum(one.created == today and not one.source for one in reviews.values())
    return [id for id in ids if id not in reviews][: max(most - started, 0)]


def play(
    queue: Sequence[Card],
    reviews: Reviews,
    today: date,
    language: str = "en",
    ask: Callable[[str], str] = input,
    say: Callable[[str], None] = print,
) -> int:
    """Show the cards, ask for grades and store each at once; return how many reviews were done.

    A forgotten card comes again at the end. Ends early where ``ask`` raises EOFError (Ctrl-D).
    KeyboardInterrupt is the caller's.
    """
    texts, waiting, done = written("review", language), list(queue), 0
    keys = {key: Rating[name] for name, both in texts["keys"].items() for key in both}
    while waiting:
        card = waiting.pop(0)
        say("\n" + texts["left"].format(left=len(waiting) + 1, tags=", ".join(card.tags)))
        say(_lines(card.front, language))
        try:
            ask(texts["show"])
            say(_lines(card.back, language) + (f"\n\n{card.drawing}" if card.drawing else ""))
            while (rating := keys.get(ask(texts["grade"]).strip().lower())) is None:
                say(texts["unknown"])
        except EOFError:
            say("")
            return done
        progress = graded(reviews.cards.get(card.id, Progress(today, today)), rating, today)
        reviews.record({card.id: progress})
        done += 1
        say(texts["next"].format(day=progress.next_review))
        if rating == Rating.Again:
            waiting.append(card)
    return done


def _lines(text: str, language: str) -> str:
    """Return ``text`` in lines of 80 characters; a terminal breaks Chinese text well."""
    lines = text.split("\n")
    return text if language == "zh" else "\n".join(fill(line, 80) for line in lines)


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` so that ``path`` always has the old bytes or the new ones."""
    path = Path(os.path.realpath(path))  # a link stays a link
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        new.write_bytes(data)
        if path.exists():
            shutil.copymode(path, new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _inside(id: str) -> bool:
    """Whether the id is a relative path without steps upwards."""
    return bool(id) and not Path(id).is_absolute() and ".." not in Path(id).parts


def _read(entry: Any) -> Progress | None:
    """Return the progress that ``entry`` describes, None if it does not describe any."""
    try:
        last, memory = entry["last_reviewed"], (entry["stability"], entry["difficulty"])
        counts = entry["review_count"], entry["graded"]
        good = all(isinstance(each, int) and each >= 0 for each in counts)
        if memory == (None, None):
            good &= last is None
        else:
            good &= 0 < memory[0] <= LONGEST and EASIEST <= memory[1] <= HARDEST
            good &= last is not None
        return Progress(
            created=date.fromisoformat(entry["created"]),
            next_review=date.fromisoformat(entry["next_review"]),
            last_reviewed=None if last is None else date.fromisoformat(last),
            stability=memory[0],
            difficulty=memory[1],
            review_count=counts[0],
            graded=counts[1],
            source=str(entry["source"]),
        ) if good else None  # fmt: skip
    except (ValueError, KeyError, TypeError):
        return None
