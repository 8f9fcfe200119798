"""The program ``course`` itself, to which the other modules add their verbs."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from course_lib import __version__
from course_lib.cli.errors import INTERRUPTED, explain, fail

AsJson = Annotated[bool, typer.Option("--json", help="Print the data alone, as JSON.")]
Language = Annotated[str, typer.Option("--language", help="en, or zh for Chinese.")]


class Verbs(TyperGroup):
    """Runs a verb; an interrupt and a closed pipe end it without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """The exit code of the verb (None counts as 0)."""
        try:
            code = super().invoke(ctx)
            sys.stdout.flush()
        except KeyboardInterrupt:
            return fail("Interrupted.", INTERRUPTED)
        except BrokenPipeError:  # the reader of our output had enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        return code


PLAIN: dict[str, Any] = {
    "add_completion": False,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
}
app = typer.Typer(cls=Verbs, help="Parallel training, built and measured on real ranks.", **PLAIN)
benches = typer.Typer(help="Measure speed on this machine, ours beside torch's.", **PLAIN)
app.add_typer(benches, name="bench")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"course {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Read the options before a command."""


def main(argv: list[str] | None = None) -> int:
    """Run ``course`` with ``argv`` and return its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        code = app(arguments or ["--help"], prog_name="course", standalone_mode=False)
    except Exception as error:
        return explain(error)
    return code if isinstance(code, int) else 0
