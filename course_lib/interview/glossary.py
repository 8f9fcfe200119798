"""The glossary of the course in English and Chinese (glossary.toml), and its page.

``python -m course_lib.interview.glossary`` writes docs/glossary.md.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from course_lib.planner.memory import state_bytes

TABLE = Path(__file__).with_name("glossary.toml")
PAGE = Path(__file__).parents[2] / "docs" / "glossary.md"
INTRODUCTION = """# Glossary (术语表)

These are {count} terms of the lessons in English and Chinese. The last column names the lesson that
explains the term first. `course cards` writes the terms as flash cards.
This page is written by `python -m course_lib.interview.glossary`.

| term | meaning | 术语 | 释义 | lesson |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Term:
    """A term of the course, with a definition of one sentence, in English and in Chinese.

    ``lesson`` is the first one that explains it.
    """

    id: str
    lesson: str
    en: str
    zh: str
    meaning_en: str
    meaning_zh: str


def numbers() -> dict[str, str]:
    """Return the numbers that definitions name in braces."""
    state = state_bytes(1, recipe=16)
    return {
        "state": f"{state.total:.0f}",
        "optimizer": f"{state.optimizer:.0f}",
        "gib": f"{100 * (2**30 / 1e9 - 1):.0f}",
    }


@cache
def terms() -> tuple[Term, ...]:
    """Return all terms, by lesson."""
    given, read = numbers(), tomllib.loads(TABLE.read_text(encoding="utf-8"))["term"]
    return tuple(
        Term(**{name: text.format_map(given) for name, text in entry.items()}) for entry in read
    )


def page() -> str:
    """Return docs/glossary.md, in the order of the English alphabet."""
    rows = [
        f"| {one.en} | {one.meaning_en} | {one.zh} | {one.meaning_zh} | {one.lesson} |"
        for one in sorted(terms(), key=lambda term: term.en.lower())
    ]
    return INTRODUCTION.format(count=len(rows)) + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
