"""How a verb ends that cannot do its work: exit codes, and one sentence on stderr."""

from __future__ import annotations

import sys

import typer

FAILED, BAD_INPUT, ENVIRONMENT, INTERRUPTED = 1, 2, 3, 130


def explain(error: Exception) -> int:
    """One sentence for what the user can mend; a defect of ours keeps its traceback."""
    if hasattr(error, "format_message"):  # click's own errors; typer may carry a copy of click
        where = getattr(getattr(error, "ctx", None), "command_path", "course")
        return fail(f"{error.format_message()}; {where} --help says what it takes", BAD_INPUT)
    if isinstance(error, typer.Abort):
        return fail("Interrupted.", INTERRUPTED)
    if isinstance(error, ValueError):
        return fail(str(error), BAD_INPUT)
    if isinstance(error, ImportError | OSError):
        return fail(f"{error}; course doctor says what is missing here", ENVIRONMENT)
    if isinstance(error, _rank_error()):
        print(error, file=sys.stderr)  # the report of the launcher: who failed, where others stood
        return FAILED
    raise error


def _rank_error() -> type[Exception] | tuple[()]:
    """The launcher's error, without importing torch where no launch was made."""
    faults = sys.modules.get("course_lib.launch.faults")
    return faults.RankError if faults else ()


def fail(message: str, code: int) -> int:
    """Print ``message`` as one sentence on stderr."""
    sentence = " ".join(message.split()).replace(". ", "; ").replace(".;", ";").rstrip(".")
    print(sentence if sentence.endswith("?") else f"{sentence}.", file=sys.stderr)
    return code
