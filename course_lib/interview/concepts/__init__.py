"""Concept questions of an interview, with model answers in two languages.

The texts are data: ``<language>/<topic>.toml``, with the same ids and the same names in braces in
both languages. A question names the function in ``numbers/`` that computes the values of these
names. ``python -m course_lib.interview.concepts`` writes docs/questions.md and
docs/questions.zh.md.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from course_lib.interview.questions import shown
from course_lib.interview.written import LANGUAGES
from course_lib.planner.configuration import suggestion

HERE = Path(__file__).parent
UNITS = {"days": "天", "hours": "小时", "minutes": "分钟", "bytes": "字节"}  # in Chinese


@dataclass(frozen=True)
class FollowUp:
    """A question that an interviewer asks next, with its answer."""

    ask: str
    answer: str


@dataclass(frozen=True)
class Concept:
    """A question with its model answer, in one language and with all numbers filled in.

    ``lesson`` explains it. ``short`` is the answer of 60 seconds. ``whiteboard`` has the steps of
    the answer of five minutes, ``drawing`` its drawing in monospaced text. ``wrong`` is a wrong
    answer that is often given. ``given`` has the numbers as the texts show them, by name.
    """

    id: str
    topic: str
    lesson: str
    title: str
    short: str
    whiteboard: tuple[str, ...]
    drawing: str
    wrong: str
    why_wrong: str
    follow_ups: tuple[FollowUp, ...]
    given: Mapping[str, str]


def read(language: str, name: str) -> dict[str, Any]:
    """Return the texts of ``<language>/<name>.toml``; ValueError for an unknown language."""
    if language not in LANGUAGES:
        raise ValueError(f"expected a language of {', '.join(LANGUAGES)}, got {language!r}")
    return tomllib.loads((HERE / language / f"{name}.toml").read_text(encoding="utf-8"))


def topics(language: str = "en") -> dict[str, str]:
    """Return the title of each topic, in the order in which a reader meets the topics."""
    titles: dict[str, str] = read(language, "page")["topics"]
    return {topic: title for topic, title in titles.items() if _path(language, topic).exists()}


@cache
def concepts(language: str = "en") -> tuple[Concept, ...]:
    """Return all questions in ``language``, by topic and in the order of the files."""
    found = []
    for topic in topics(language):
        texts = {one["id"]: one for one in read(language, topic)["question"]}
        found += [_filled(topic, one | texts[one["id"]], language) for one in _english(topic)]
    return tuple(found)


def concept(id: str, language: str = "en") -> Concept:
    """Return the question ``id``; ValueError with the nearest ids if there is none."""
    by_id = {one.id: one for one in concepts(language)}
    if id not in by_id:
        raise ValueError(f"no question is called {id!r}; {suggestion(id, by_id)}")
    return by_id[id]


@cache
def computed(name: str) -> Mapping[str, Any]:
    """Return the values by name that the function ``name``, as "module.function", computes."""
    module, _, function = name.partition(".")
    values: Mapping[str, Any] = getattr(
        import_module(f"course_lib.interview.concepts.numbers.{module}"), function
    )()
    return values


def _path(language: str, topic: str) -> Path:
    return HERE / language / f"{topic}.toml"


def _english(topic: str) -> list[dict[str, Any]]:
    """Return the entries that also name lesson, numbers and drawing, for all languages."""
    entries: list[dict[str, Any]] = read("en", topic)["question"]
    return entries


def _filled(topic: str, texts: Mapping[str, Any], language: str) -> Concept:
    """Return the question with its numbers in place of the names in braces."""
    given = {name: shown(value) for name, value in computed(texts["numbers"]).items()}
    if language == "zh":
        given = {name: _chinese(value) for name, value in given.items()}

    def fill(text: str) -> str:
        return " ".join(text.format_map(given).split())

    return Concept(
        id=texts["id"],
        topic=topic,
        lesson=texts["lesson"],
        **{name: fill(texts[name]) for name in ("title", "short", "wrong", "why_wrong")},
        whiteboard=tuple(map(fill, texts["whiteboard"])),
        drawing=texts["drawing"].format_map(given).strip("\n"),
        follow_ups=tuple(
            FollowUp(fill(one["ask"]), fill(one["answer"])) for one in texts["follow_ups"]
        ),
        given=given,
    )


def _chinese(value: str) -> str:
    """Return a shown value with its unit in Chinese; GB, ms and s stay."""
    return re.sub(rf"(?<=\d )({'|'.join(UNITS)})\b", lambda found: UNITS[found[0]], value)
