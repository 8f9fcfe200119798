"""review: repeat the cards that are due today, and exchange progress with Markdown notes."""

from __future__ import annotations

import sys
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from course_lib.cli.app import PLAIN, AsJson, Language, app
from course_lib.cli.cards import Topic
from course_lib.cli.errors import BAD_INPUT, INTERRUPTED, fail
from course_lib.cli.place import course_folder, make_folder
from course_lib.cli.show import accept_any_bytes, print_json

if TYPE_CHECKING:
    from course_lib.interview.cards import Card
    from course_lib.interview.review import Reviews
    from course_lib.interview.review_notes import Report

NEW = 10  # cards per day, unless --new says otherwise
FIRST, LAST = date(2000, 1, 1), date(2999, 12, 31)


def _day(text: str) -> date:
    try:
        day = date.fromisoformat(text)
    except ValueError:
        day = None
    if day is None or not FIRST <= day <= LAST:
        raise typer.BadParameter(f"expected a day such as 2026-01-31, got {text!r}")
    return day


Today = Annotated[
    Any, typer.Option("--today", parser=_day, metavar="DAY", help="A day, such as 2026-01-31.")
]
New = Annotated[int, typer.Option("--new", min=0, max=1000, help="New cards per day.")]

reviews_app = typer.Typer(
    help="Repeat the cards that are due today; each grade sets the next day.",
    invoke_without_command=True,
    **PLAIN,
)
app.add_typer(reviews_app, name="review")


@reviews_app.callback()
def review(
    ctx: typer.Context,
    topic: Topic = None,
    new: New = NEW,
    language: Language = "en",
    today: Today = None,
) -> int:
    """Repeat the cards that are due today; each grade sets the next day."""
    if ctx.invoked_subcommand:
        for name in ctx.params:
            source = ctx.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                raise ValueError(
                    f"--{name} must follow the command: course review {ctx.invoked_subcommand} "
                    f"--{name} VALUE"
                )
        return 0
    from course_lib.interview.review import play
    from course_lib.interview.written import written

    today = today or date.today()
    texts = written("review", language)
    reviews = _reviews()
    queue, unseen = _queue(reviews, topic, new, language, today)
    if not queue and not unseen:
        days = [one.next_review for one in reviews.cards.values() if one.next_review > today]
        print(texts["nothing" if days else "empty"].format(day=today, next=min(days, default="")))
        return 0
    print(texts["start"].format(day=today, due=len(queue), new=len(unseen)))
    accept_any_bytes()
    code, before = 0, sum(one.graded for one in reviews.cards.values())
    try:
        play([*queue, *unseen], reviews, today, language)
    except KeyboardInterrupt:
        code = INTERRUPTED
    after = sum(one.graded for one in reviews.cards.values())
    print("\n" + texts["done"].format(done=after - before))
    _say(reviews)
    return code


@reviews_app.command()
def due(
    topic: Topic = None,
    new: New = NEW,
    language: Language = "en",
    today: Today = None,
    as_json: AsJson = False,
) -> int:
    """List the cards that are due today."""
    from course_lib.interview.review import fields

    today, reviews = today or date.today(), _reviews()
    queue, unseen = _queue(reviews, topic, new, language, today)
    if as_json:
        rows = [_row(card) | fields(reviews.cards[card.id], today) for card in queue]
        data = {"today": today, "due": rows, "new": list(map(_row, unseen))}
        print_json(_plain(data))
        return 0
    for card in (*queue, *unseen):
        progress = reviews.cards.get(card.id)
        print(f"{progress.next_review if progress else 'new'!s:<12}{card.front.splitlines()[0]}")
    print(f"{len(queue)} due, {len(unseen)} new")
    return 0


@reviews_app.command("import")
def import_(
    path: Annotated[Path, typer.Argument(metavar="FILE|DIR", help="Markdown notes.")],
    today: Today = None,
) -> int:
    """Read Markdown notes, which become cards."""
    from course_lib.interview.cards import cards
    from course_lib.interview.review_notes import import_notes

    reviews = _reviews()
    known = {card.id for card in cards()}
    return _reported("imported", import_notes(reviews, path, known, today or date.today()))


@reviews_app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write notes to.")],
    topic: Annotated[
        str | None, typer.Option(help="notes: only those that you imported; default: all.")
    ] = None,
    language: Language = "en",
    today: Today = None,
) -> int:
    """Write notes with your progress."""
    from course_lib.interview.review_notes import export_notes

    reviews = _reviews()
    made = _cards(reviews, topic, language)
    make_folder(folder, "export")
    report = export_notes(reviews, made, folder, today or date.today())
    return _reported("exported", report, folder)


def _reviews() -> Reviews:
    from course_lib.interview.review import Reviews

    reviews = Reviews(course_folder() / "work" / "review").load()
    _say(reviews)
    return reviews


def _say(reviews: Reviews) -> None:
    """Print what was wrong with the file, once."""
    for sentence in reviews.said:
        fail(sentence, 0)
    reviews.said.clear()


def _cards(reviews: Reviews, topic: str | None, language: str) -> list[Card]:
    """Return the imported notes and the cards of the course."""
    from course_lib.interview.cards import cards, with_topic
    from course_lib.interview.review_notes import note_cards

    return with_topic([*note_cards(reviews), *cards(language)], topic)


def _queue(
    reviews: Reviews, topic: str | None, new: int, language: str, today: date
) -> tuple[list[Card], list[Card]]:
    """Return the cards that are due, and those that start today."""
    from course_lib.interview.review import due, unseen

    by_id = {card.id: card for card in _cards(reviews, topic, language)}
    queue = [by_id[id] for id in due(reviews.cards, today) if id in by_id]
    return queue, [by_id[id] for id in unseen(by_id, reviews.cards, today, new)]


def _row(card: Card) -> dict[str, Any]:
    return {"id": card.id, "front": card.front, "tags": list(card.tags)}


def _plain(value: Any) -> Any:
    """Return ``value`` with days as text."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value.isoformat() if isinstance(value, date) else value


def _reported(what: str, report: Report, folder: Path | None = None) -> int:
    """Print the counts, and on stderr why a note was refused."""
    from course_lib.interview.written import written

    counts = {name: len(names) for name, names in vars(report).items()}
    print(written("review")[what].format(folder=folder, **counts))
    for sentence in report.refused:
        fail(sentence, BAD_INPUT)
    sys.stdout.flush()
    return BAD_INPUT if report.refused else 0
