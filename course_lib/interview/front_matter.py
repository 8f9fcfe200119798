"""The front matter of a Markdown note, edited line by line: all other bytes stay as they are.

Front matter is YAML between a first line ``---`` and a later line ``---`` or ``...``. This module
reads and writes the scalars of :data:`KEYS` and reads ``tags``; it needs no YAML parser.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime

BANDS = ("easy", "medium", "hard")
MOST = 1_000_000  # reviews of a note
Value = date | int | float | str
MARK = re.compile(r"\ufeff?---[ \t]*\r?\n")
END = re.compile(r"(?:---|\.\.\.)[ \t]*(?:\r?\n)?")
FIELD = re.compile(
    r"""(?P<head>(?P<quoted>["']?)(?P<key>[\w.-]+)(?P=quoted)[ \t]*:)(?P<space>[ \t]*)
    (?P<value>'(?:[^'\r\n]|'')*'|"(?:[^"\\\r\n]|\\.)*"|[^\s\#](?:[^\r\n]*?\S)??|)
    (?P<tail>(?:[ \t]+\#[^\r\n]*|[ \t]*)\r?\n?)""",
    re.VERBOSE,
)
NULL = ("", "~", "null", "Null", "NULL")


def _date(text: str) -> date:
    return datetime.fromisoformat(text).date()


def _count(text: str) -> int:
    if not 0 <= (count := int(text)) <= MOST:
        raise ValueError
    return count


def _share(text: str) -> float:
    if not 0 <= (share := float(text)) <= 1:
        raise ValueError
    return share


def _band(text: str) -> str:
    return BANDS[BANDS.index(text.lower())]


KEYS: Mapping[str, tuple[Callable[[str], Value], str]] = {
    "created": (_date, "a date such as '2026-01-31'"),
    "last_reviewed": (_date, "a date such as '2026-01-31', or null"),
    "next_review": (_date, "a date such as '2026-01-31', or null"),
    "review_count": (_count, "a count such as 3"),
    "difficulty": (_band, "easy, medium or hard"),
    "mastery_level": (_share, "a number from 0 to 1"),
}


@dataclass(frozen=True)
class Note:
    """A note as text: a byte order mark and ``---``, lines, ``---``, and the text below.

    ``lines`` is None, and ``start`` and ``end`` are empty, where the note has no front matter.
    """

    start: str
    lines: tuple[str, ...] | None
    end: str
    body: str

    @property
    def values(self) -> dict[str, Value]:
        """The known fields that have a value. ValueError names the line of one that is wrong."""
        found: dict[str, Value] = {}
        for number, match in self._fields():
            key, text = match["key"], _plain(match["value"])
            read, expected = KEYS[key]
            found.pop(key, None)  # of several equal keys, YAML takes the last
            nested = not text and self._goes_on(number)
            if text in NULL and not nested:
                continue
            try:
                if nested:
                    raise ValueError
                found[key] = read(text)
            except ValueError:
                got = "several lines" if nested else repr(text[:60])
                where = f"line {number + 2}: expected {expected} after {key}:"
                raise ValueError(f"{where} on the same line, got {got}") from None
        return found

    def scalar(self, key: str) -> str:
        """Return the text of a field on one line, known or not; empty if there is none."""
        matches = [FIELD.fullmatch(line) for line in self.lines or ()]
        return next((_plain(each["value"]) for each in matches if each and each["key"] == key), "")

    @property
    def tags(self) -> tuple[str, ...]:
        """The entries of ``tags``, as a list in brackets or one per line."""
        lines, found = self.lines or (), list[str]()
        for number, line in enumerate(lines):
            if match := re.match(r"tags[ \t]*:[ \t]*(.*?)\s*$", line):
                flow = match[1].removeprefix("[").removesuffix("]").split(",")
                found = [_plain(each.strip()) for each in flow]
                for below in lines[number + 1 :]:
                    if not (item := re.match(r"[ \t]*-[ \t]+(.*?)\s*$", below)):
                        break
                    found.append(_plain(item[1]))
        return tuple(each for each in found if each not in NULL)

    def updated(self, values: Mapping[str, Value]) -> Note:
        """Return the note with ``values``; lines with an equal value stay as they are."""
        old = self.values
        new = {key: value for key, value in values.items() if old.get(key) != value}
        if not new:
            return self
        if self.lines is None:
            end = "\r\n" if "\r\n" in self.body else "\n"
            added = tuple(_line(key, new[key], "'", end) for key in KEYS if key in new)
            mark = "\ufeff" if self.body.startswith("\ufeff") else ""
            return Note(f"{mark}---{end}", added, f"---{end}", self.body.removeprefix(mark))
        lines, last = list(self.lines), {match["key"]: each for each, match in self._fields()}
        dates = (m["value"][:1] for _, m in self._fields() if m["key"] in old and "-" in m["value"])
        quote = next((each if each in "'\"" else "" for each in dates), "'")
        for key in KEYS:
            if key in new and key in last:
                lines[last[key]] = _edited(lines[last[key]], new[key], quote)
            elif key in new:
                lines.append(_line(key, new[key], quote, "\r\n" if "\r" in self.start else "\n"))
        return Note(self.start, tuple(lines), self.end, self.body)

    def encoded(self) -> bytes:
        """Return the bytes of the note."""
        text = self.start + "".join(self.lines or ()) + self.end + self.body
        return text.encode("utf-8", "surrogateescape")

    def _fields(self) -> list[tuple[int, re.Match[str]]]:
        """The known fields, each with the number of its line, from 0."""
        matches = ((each, FIELD.fullmatch(line)) for each, line in enumerate(self.lines or ()))
        return [(each, match) for each, match in matches if match and match["key"] in KEYS]

    def _goes_on(self, number: int) -> bool:
        """Whether the value of the field in line ``number`` is on the lines below."""
        below = (line for line in (self.lines or ())[number + 1 :] if line.strip())
        following = next(below, "x")
        return following[0] in " \t" or following.startswith("- ")


def parse(data: bytes) -> Note:
    """Return the note in ``data``, UTF-8; ``parse(data).encoded() == data`` for all bytes.

    Raises ValueError where the front matter is a list, indented, or a mapping in braces.
    """
    text = data.decode("utf-8", "surrogateescape")
    mark, lines = MARK.match(text), list[str]()
    for line in re.findall(r"[^\n]*\n|[^\n]+", text[mark.end() :]) if mark else ():
        if not END.fullmatch(line):
            lines.append(line)
            continue
        first = next((each for each in lines if each.strip() and each[0] != "#"), ":")
        if first[0] in "{[-? \t":
            raise ValueError("expected fields that begin their line, such as review_count: 0")
        if ":" not in first:  # text between two horizontal rules
            break
        start = text[: mark.end()] if mark else ""
        return Note(start, tuple(lines), line, text[len(start) + len("".join([*lines, line])) :])
    return Note("", None, "", text)


def _plain(value: str) -> str:
    """Return a scalar without its quotes."""
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1].replace("''", "'") if value[0] == "'" else value[1:-1]
    return value


def _shown(value: Value, quote: str) -> str:
    """Return ``value`` as the notes write it; dates are strings."""
    return f"{quote}{value}{quote}" if isinstance(value, date) else str(value)


def _line(key: str, value: Value, quote: str, end: str) -> str:
    return f"{key}: {_shown(value, quote)}{end}"


def _edited(line: str, value: Value, quote: str) -> str:
    """Return the line of a field with another value: quotes, spaces and comment are the same."""
    match = FIELD.fullmatch(line)
    assert match is not None  # the line of a field
    old = match["value"]
    if old not in NULL:
        quote = old[0] if old[0] in "'\"" else ""
        shown = f"{quote}{value}{quote}"
    else:
        shown = _shown(value, quote)
    return f"{match['head']}{match['space'] or ' '}{shown}{match['tail']}"
