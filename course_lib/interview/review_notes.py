"""Markdown notes and the progress with them: import reads their front matter, export edits it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

from course_lib.interview.cards import Card
from course_lib.interview.front_matter import Note, parse
from course_lib.interview.review import Progress, Reviews, fields, from_fields, write_atomically

SUFFIXES = (".md", ".markdown", ".txt")
NEW = """---
created: null
last_reviewed: null
next_review: null
review_count: 0
difficulty: null
mastery_level: 0.0
tags:
{tags}
related_outlines: []
---
# {front}

{answer}
"""


@dataclass
class Report:
    """What an import or export did with each note, by name; ``refused`` says why."""

    added: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def note_cards(reviews: Reviews) -> list[Card]:
    """Return a card for each imported note: its heading or name in front, its text behind."""
    found = []
    for id, progress in sorted(reviews.cards.items()):
        if progress.source and (path := reviews.copy_of(id)).is_file():
            note = _note(path.read_bytes())
            body = _readable(note.body.removeprefix("\ufeff"))
            first, _, rest = body.lstrip().partition("\n")
            heading = first.startswith("# ")
            title = first.removeprefix("# ").strip() if heading else note.scalar("title")
            front = _readable(title or Path(id).stem)
            back = (rest if heading else body).replace("\r\n", "\n").strip()
            found.append(Card(id, front, back, ("notes", *map(_readable, note.tags))))
    return found


def _note(data: bytes) -> Note:
    """Return the note in ``data``; all of it is text if its front matter cannot be edited."""
    try:
        return parse(data)
    except ValueError:
        return Note("", None, "", data.decode("utf-8", "surrogateescape"))


def _readable(text: str) -> str:
    """Return ``text`` with a mark in place of bytes that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def import_notes(reviews: Reviews, path: Path, known: Collection[str], today: date) -> Report:
    """Read the notes of a file or folder into ``reviews``.

    A note that ``export_notes`` wrote for a card of the ids ``known`` is progress with that card.
    Where the progress here has more reviews than the note, it stays. Raises ValueError if there
    are no notes.
    """
    report, found = Report(), dict[str, Progress]()
    for name, file in _files(path):
        try:
            data = _text_of(file)
            values = parse(data).values
            own = file.stem in known
            id, source = (file.stem, "") if own else (name, str(file.resolve()))
            old = found.get(id) or reviews.cards.get(id)
            if old and old.source != source and _another(data, reviews.copy_of(id)):
                raise ValueError(
                    f"another note of this name was imported from {old.source}; rename one of them"
                )
            if not own:
                write_atomically(reviews.copy_of(id), data)
        except (ValueError, OSError) as error:
            report.refused.append(f"{file}: {error}")
            continue
        new = replace(from_fields(values, today), source=source)
        if own:  # as if reviewed here, so that an export writes it
            new = replace(new, graded=new.review_count)
        if old is None:
            report.added.append(name)
        elif new.review_count > old.review_count:
            report.updated.append(name)
        else:
            report.unchanged.append(name)
            new = replace(old, source=source)
        found[id] = new
    reviews.record(found)
    return report


def export_notes(reviews: Reviews, made: Iterable[Card], folder: Path, today: date) -> Report:
    """Write those cards ``made`` that are imported notes or were reviewed to ``folder``.

    Of a note that was reviewed here only the lines of the fields that changed differ from the file
    in ``folder``, or from the imported note where ``folder`` has none. Other files there stay:
    a file that is no note of this card, or that counts more reviews, is refused.
    """
    report, by_id = Report(), {card.id: card for card in made}
    for id, progress in sorted(reviews.cards.items()):
        name = id if progress.source else f"{id}.md"
        target, here = folder / name, (folder / name).exists()
        if id not in by_id:
            continue
        try:
            made_here = (
                reviews.copy_of(id).read_bytes() if progress.source else _new_note(by_id[id])
            )
            data = _text_of(target) if here else made_here
            note = parse(data)
            if here:
                _expect_ours(note, parse(made_here), progress, target)
            after = _updated(note, progress, today) if progress.graded else data
            if after != data or not here:
                write_atomically(target, after)
        except (ValueError, OSError) as error:
            report.refused.append(f"{target}: {error}")
            continue
        done = report.added if not here else report.unchanged if after == data else report.updated
        done.append(name)
    return report


def _text_of(file: Path) -> bytes:
    """Return the bytes of ``file``; ValueError if it is no text."""
    data = file.read_bytes()
    if b"\0" in data:
        raise ValueError("expected text in UTF-8, got a zero byte")
    return data


def _expect_ours(there: Note, ours: Note, progress: Progress, target: Path) -> None:
    """Raise ValueError if ``target`` is another file, or a note with more reviews than here."""
    own = str(target.resolve()) == progress.source or there.body == ours.body
    if not own and not there.values:
        raise ValueError("this file is no note that was exported; export to another folder")
    count = there.values.get("review_count", 0)
    if isinstance(count, int) and count > progress.review_count:
        raise ValueError(
            f"this note counts {count} reviews, and {progress.review_count} are known here; "
            "import it first"
        )


def _another(data: bytes, copy: Path) -> bool:
    """Whether the note in ``data`` has another text than the one at ``copy``."""
    return copy.exists() and parse(copy.read_bytes()).body != parse(data).body


def _updated(note: Note, progress: Progress, today: date) -> bytes:
    """Return the note with today's fields; a date of creation stays."""
    values = fields(progress, today)
    if "created" in note.values:
        del values["created"]
    return note.updated(values).encoded()


def _new_note(card: Card) -> bytes:
    tags = "\n".join(f"- {tag}" for tag in card.tags)
    front = " ".join(card.front.split())
    drawing = f"\n\n```\n{card.drawing}\n```" if card.drawing else ""
    return NEW.format(tags=tags, front=front, answer=card.back + drawing).encode()


def _files(path: Path) -> list[tuple[str, Path]]:
    """Return the notes at ``path``, each with its name relative to the folder."""
    if path.is_file():
        return [(path.name, path)]
    if not path.is_dir():
        raise ValueError(f"{path}: there is no such file or folder")
    found = [
        (file.relative_to(path).as_posix(), file)
        for file in sorted(path.rglob("*"))
        if file.suffix.lower() in SUFFIXES and file.is_file()
    ]
    visible = [
        (name, file) for name, file in found if not name.startswith(".") and "/." not in name
    ]
    if not visible:
        raise ValueError(f"{path}: expected notes ({', '.join(SUFFIXES)}), found none")
    return visible
