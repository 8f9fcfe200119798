"""cards: flash cards for Anki and other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from course_lib.cli.app import AsJson, Language, app
from course_lib.cli.show import print_json

Topic = Annotated[
    str | None,
    typer.Option(help="glossary, concepts, formulas, claims or lesson-05, say; default: all."),
]
SUFFIXES = {"tsv": ".tsv", "anki": ".apkg"}


@app.command()
def cards(
    out: Annotated[
        Path | None, typer.Option(help="File or folder to write to; .apkg is an Anki deck.")
    ] = None,
    language: Language = "en",
    format: Annotated[
        str | None, typer.Option(help="tsv or anki; default: as the name of --out says.")
    ] = None,
    topic: Topic = None,
    as_json: AsJson = False,
) -> int:
    """Write flash cards: the glossary, concept questions, formulas and common claims."""
    from course_lib.interview import cards as ours

    made = ours.cards(language, topic)
    if as_json:
        rows = [{name: getattr(card, name) for name in (*ours.COLUMNS, "drawing")} for card in made]
        print_json({"language": language, "cards": rows})
        return 0
    if out is None:
        raise ValueError("expected --out with a file or a folder, such as --out cards.tsv")
    path, chosen = _path(out, format, language)
    if chosen == "anki":
        from time import time

        ours.write_anki(made, path, time(), language)
    else:
        path.write_text(ours.tsv(made, language), encoding="utf-8", newline="\n")
    print(f"{path}: {len(made)} cards")
    return 0


def _path(out: Path, format: str | None, language: str) -> tuple[Path, str]:
    """Return the file to write and its format; its folder exists then."""
    of_name = {suffix: name for name, suffix in SUFFIXES.items()}.get(out.suffix.lower())
    chosen = format or of_name or "tsv"
    if chosen not in SUFFIXES:
        raise ValueError(f"--format: expected tsv or anki, got {chosen!r}")
    if of_name and of_name != chosen:
        raise ValueError(
            f"--out {out}: expected a name in {SUFFIXES[chosen]} for --format {chosen}"
        )
    if out.is_dir() or not out.suffix:
        out = out / f"parallel-training-{language}{SUFFIXES[chosen]}"
    if out.is_dir():
        raise ValueError(f"--out {out}: this is a folder; give another name")
    from course_lib.cli.place import make_folder

    make_folder(out.parent, "--out")
    return out, chosen
