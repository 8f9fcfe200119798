"""quiz: numeric questions from the formulas, marked with their units."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from course_lib.cli.app import AsJson, Language, app
from course_lib.cli.errors import INTERRUPTED
from course_lib.cli.show import accept_any_bytes, print_json

if TYPE_CHECKING:
    from course_lib.interview.questions import Question

COUNT = 5  # questions, unless --count says otherwise


@app.command()
def quiz(
    topic: Annotated[
        str | None, typer.Option(help="memory, say; default: all. --list shows them.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="The same seed asks the same; default: a new one.")
    ] = None,
    count: Annotated[int | None, typer.Option(help=f"Questions; default: {COUNT}.")] = None,
    diagnose: Annotated[
        bool,
        typer.Option("--diagnose", help="12 questions in about 15 minutes: what to read first."),
    ] = False,
    listed: Annotated[
        bool, typer.Option("--list", help="List the topics and their questions.")
    ] = False,
    language: Language = "en",
    as_json: AsJson = False,
) -> int:
    """Answer numeric questions; --json prints them with their answers, for a teacher."""
    from secrets import randbelow

    from course_lib.interview import quiz as ours

    if diagnose and (topic is not None or count is not None):
        raise ValueError("--diagnose chooses its own questions; leave out --topic and --count")
    if listed:
        return _list(topic, language, as_json)
    seed = randbelow(1_000_000) if seed is None else seed
    asked = (
        ours.diagnosis(seed, language)
        if diagnose
        else ours.questions(
            topic, seed=seed, count=COUNT if count is None else count, language=language
        )
    )
    if as_json:
        print_json({"seed": seed, "questions": [one.as_dict() for one in asked]})
        return 0
    return _play(asked, seed, language)


def _list(topic: str | None, language: str, as_json: bool) -> int:
    from course_lib.interview import quiz as ours

    found, names = ours.templates(topic), ours.texts(language)["topics"]
    if as_json:
        rows = [{"id": each.id, "topic": each.topic, "lesson": each.lesson} for each in found]
        print_json({"topics": names, "templates": rows})
        return 0
    for name, words in names.items():
        own = [each for each in found if each.topic == name]
        if own:
            print(f"{name:<8} {words}")
            for each in own:
                print(f"  {each.id:<24} lesson {each.lesson}")
    return 0


def _play(asked: list[Question], seed: int, language: str) -> int:
    """Ask, and print the score however it ends."""
    from course_lib.interview import quiz as ours

    accept_any_bytes()
    score = ours.Score(language)
    print(ours.texts(language)["loop"]["start"].format(seed=seed))
    try:
        ours.play(asked, score)
        code = 0
    except KeyboardInterrupt:
        code = INTERRUPTED
    print(f"\n{score}")
    return code
