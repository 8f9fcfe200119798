"""interview: a timed mock interview with a score sheet."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from course_lib.cli.app import AsJson, Language, app
from course_lib.cli.errors import ENVIRONMENT, INTERRUPTED, fail
from course_lib.cli.place import course_folder, make_folder
from course_lib.cli.show import accept_any_bytes, print_json

if TYPE_CHECKING:
    from course_lib.interview.agenda import Plan
    from course_lib.interview.sheet import Keeper, Sheet

SHORTEST, LONGEST = 1, 600  # minutes


@app.command()
def interview(
    minutes: Annotated[
        float | None, typer.Option(help="Planned minutes, which are only shown; default: 45.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="The same seed asks the same; default: a new one.")
    ] = None,
    part: Annotated[
        str | None, typer.Option(help="numbers, concepts or design alone; default: all three.")
    ] = None,
    case: Annotated[
        str | None,
        typer.Option(help="dense-180b, long-context, experts, two-kinds or latency; default: any."),
    ] = None,
    language: Language = "en",
    out: Annotated[
        Path | None,
        typer.Option(help="A new file for the score sheet; default: one in work/interview."),
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="List the questions, and ask none.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Hold a mock interview; --json prints the score sheet at its end, with --list the answers."""
    from datetime import date
    from secrets import randbelow

    from course_lib.interview.agenda import make_plan
    from course_lib.interview.sheet import Keeper, Sheet

    if minutes is not None and not SHORTEST <= minutes <= LONGEST:
        raise ValueError(f"expected --minutes from {SHORTEST} to {LONGEST}, got {minutes:g}")
    seed = randbelow(1_000_000) if seed is None else seed
    plan = make_plan(seed, language=language, minutes=minutes, part=part, case=case)
    if listed:
        return _list(plan, as_json)
    if out is not None and out.exists():
        raise ValueError(f"expected --out to name a new file, but {out} exists; choose another")
    keeper = Keeper(_folder(), out)
    make_folder(keeper.folder if out is None else out.parent, "--out")
    sheet = Sheet(seed, language, plan.minutes, len(plan.asked), date.today().isoformat())
    return _hold(plan, sheet, keeper, as_json)


def _folder() -> Path:
    """Return work/interview of the course, or of this folder if only the package is installed."""
    try:
        return course_folder() / "work" / "interview"
    except OSError:
        return Path("work") / "interview"


def _list(plan: Plan, as_json: bool) -> int:
    from course_lib.interview.written import written

    if as_json:
        print_json(plan.as_dict())
        return 0
    said = written("interview", plan.language)
    print(said["sheet"]["list"].format(seed=plan.seed, minutes=f"{plan.minutes:g}"))
    for item in plan.items():
        words = {**item.head(), "part": said["parts"][item.part], "planned": f"{item.planned:g}"}
        print("  " + said["sheet"]["line"].format_map(words))
    return 0


def _hold(plan: Plan, sheet: Sheet, keeper: Keeper, as_json: bool) -> int:
    """Ask, and print and keep the score sheet however the interview ends."""
    from course_lib.interview import mock
    from course_lib.interview.written import written

    accept_any_bytes()
    to = sys.stderr if as_json else sys.stdout

    def say(text: str) -> None:
        print(text, file=to, flush=True)

    def ask(prompt: str) -> str:
        print(prompt, end="", file=to, flush=True)
        typed = input()
        if not sys.stdin.isatty():  # a terminal shows what is typed
            say(typed)
        return typed

    failed: OSError | None = None

    def keep(sheet: Sheet) -> None:
        nonlocal failed
        try:
            keeper(sheet)
            failed = None
        except OSError as error:  # a full disk must not end the interview
            failed = error

    code = 0
    try:
        mock.play(plan, sheet, ask=ask, say=say, keep=keep)
    except EOFError:
        say("")
    except KeyboardInterrupt:
        code = INTERRUPTED
        say("")
    if sheet.answered:
        keep(sheet)
    say(f"\n{sheet}")
    stored = sheet.answered and failed is None
    if stored:
        say(written("interview", plan.language)["sheet"]["file"].format(path=keeper.path))
    if as_json:
        path = str(keeper.path) if stored else None
        print_json({"plan": plan.as_dict(), "sheet": sheet.as_dict(), "file": path})
    if failed is not None:
        return fail(f"the score sheet could not be written: {failed}", ENVIRONMENT)
    return code
