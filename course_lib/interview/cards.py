"""Flash cards from the glossary, the concept questions, the formulas and the common claims.

A card's id does not depend on the language. ``tsv`` and ``write_anki`` add the language, so that
Anki updates the notes of an earlier import and shows two languages side by side.
"""

from __future__ import annotations

import re
import sqlite3
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from itertools import count
from pathlib import Path

from course_lib.interview.claims import stated, table
from course_lib.interview.concepts import concepts
from course_lib.interview.formula_rows import SECTIONS, SYMBOLS
from course_lib.interview.glossary import terms
from course_lib.interview.written import written
from course_lib.planner.configuration import suggestion

# Anki finds an earlier import by these numbers: they never change.
MODEL, DECKS = 1_722_430_851, {"en": 1_722_430_852, "zh": 1_722_430_853}
ENGLISH_ONLY = ("formulas", "claims")
COLUMNS = ("id", "front", "back", "tags")


@dataclass(frozen=True)
class Card:
    """A question, its answer and the tags; ``drawing`` belongs to the answer, in monospace."""

    id: str
    front: str
    back: str
    tags: tuple[str, ...]
    drawing: str = ""

    @property
    def answer(self) -> str:
        """The answer and its drawing."""
        return f"{self.back}\n\n{self.drawing}" if self.drawing else self.back


def cards(language: str = "en", topic: str | None = None) -> list[Card]:
    """Return the cards with the tag ``topic``, by default all, in the order of the lessons.

    Formulas and claims are in English only. Raises ValueError for an unknown language or topic.
    """
    made = [*_of_glossary(language), *_of_concepts(language)]
    if language == "en":
        made += [*_of_formulas(), *_of_claims()]
    return with_topic(sorted(made, key=_lesson), topic)


def with_topic(made: list[Card], topic: str | None) -> list[Card]:
    """Return the cards with the tag ``topic``, all for None; ValueError if no card has it."""
    found = [card for card in made if topic is None or topic in card.tags]
    if not found:
        known = sorted({tag for card in made for tag in card.tags})
        if topic in ENGLISH_ONLY:
            raise ValueError(f"the cards on {topic} are in English only; choose --language en")
        raise ValueError(f"no card has the topic {topic!r}; {suggestion(str(topic), known)}")
    return found


def _lesson(card: Card) -> str:
    """Return the lesson's tag; cards of no lesson are last."""
    return next((tag for tag in card.tags if tag.startswith("lesson-")), "~")


def _of_glossary(language: str) -> Iterator[Card]:
    texts = written("cards", language)
    for term in terms():
        own, other = (term.en, term.zh) if language == "en" else (term.zh, term.en)
        meaning = term.meaning_en if language == "en" else term.meaning_zh
        yield Card(
            id=f"term-{term.id}",
            front=texts["term"].format(term=own),
            back=f"{meaning}\n{other}" if other != own else meaning,
            tags=("glossary", f"lesson-{term.lesson}"),
        )


def _of_concepts(language: str) -> Iterator[Card]:
    texts = written("cards", language)
    for one in concepts(language):
        tags = ("concepts", f"lesson-{one.lesson}")
        steps = "\n".join(f"{n}. {step}" for n, step in enumerate(one.whiteboard, 1))
        back = f"{one.short}\n\n{texts['whiteboard']}\n{steps}"
        yield Card(f"concept-{one.id}", one.title, back, tags, one.drawing)
        yield Card(f"wrong-{one.id}", texts["wrong"].format(wrong=one.wrong), one.why_wrong, tags)


def _of_formulas() -> Iterator[Card]:
    texts, whole = written("cards"), ""
    for section, rows in SECTIONS.items():
        for row in rows:
            same = row.quantity.startswith("the same")
            whole = whole if same else row.quantity
            name = f"{whole}; {row.quantity}" if same else whole
            symbols = row.symbols
            used = [f"{each}: {meaning}" for each, meaning, _ in SYMBOLS if each in symbols]
            yield Card(
                id=f"formula-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}",
                front="\n".join([texts["formula"].format(section=section, name=name), *used]),
                back=row.formula,
                tags=("formulas", f"lesson-{row.lesson}"),
            )


def _of_claims() -> Iterator[Card]:
    for claim in table().claims:
        if claim.verdict != "illustrative":
            texts = written("cards")
            yield Card(
                id=f"claim-{claim.id}",
                front=texts["claim"].format(claim=claim.claim),
                back=f"{texts['verdicts'][claim.verdict]} {stated()[claim.id]}",
                tags=("claims", claim.verdict),
            )


def _html(text: str) -> str:
    """Return ``text`` as HTML in one line, without tabs and double quotes."""
    return escape(text, quote=False).replace('"', "&quot;").replace("\t", "&#9;").replace(
        "\n", "<br>"
    )  # fmt: skip


def _fields(card: Card) -> tuple[str, str]:
    drawing = f"<pre>{_html(card.drawing)}</pre>" if card.drawing else ""
    return _html(card.front), _html(card.back) + drawing


def tsv(made: Iterable[Card], language: str = "en") -> str:
    """Return the cards as lines of id, front, back and tags, for Anki's importer.

    The texts are HTML, so that a card is one line. The id is Anki's guid.
    """
    lines = ["#separator:tab", "#html:true", "#guid column:1", "#tags column:4"]
    lines.append(f"#deck:{written('cards', language)['deck']}")
    lines.append("#columns:" + "\t".join(COLUMNS))
    for card in made:
        lines.append("\t".join([f"{card.id}-{language}", *_fields(card), " ".join(card.tags)]))
    return "\n".join(lines) + "\n"


def write_anki(made: Iterable[Card], path: Path, timestamp: float, language: str = "en") -> None:
    """Write the cards as an Anki deck (.apkg) that was changed at ``timestamp``, in seconds.

    A later import updates the notes with a newer ``timestamp``. Raises ImportError without genanki.
    """
    try:
        import genanki
    except ImportError:
        said = "an Anki deck needs the package genanki; install it with pip install genanki"
        raise ImportError(said) from None
    model = genanki.Model(
        MODEL,
        "Parallel training",
        fields=[{"name": "Front"}, {"name": "Back"}],
        templates=[
            {
                "name": "Card",
                "qfmt": "{{Front}}",
                "afmt": '{{FrontSide}}<hr id="answer">{{Back}}',
            }
        ],
        css=".card { font-family: sans-serif; font-size: 18px; } pre { font-size: 12px; }",
    )
    deck = genanki.Deck(DECKS[language], written("cards", language)["deck"])
    for card in made:
        guid = f"{card.id}-{language}"
        deck.add_note(genanki.Note(model, list(_fields(card)), guid=guid, tags=list(card.tags)))
    # Package.write_to_file leaves its database in the folder of temporary files.
    with sqlite3.connect(":memory:") as base:
        package = genanki.Package(deck)
        package.write_to_db(base.cursor(), timestamp, count(int(1000 * timestamp)))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("collection.anki2", base.serialize())
        archive.writestr("media", "{}")
