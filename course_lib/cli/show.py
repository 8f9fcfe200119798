"""What the verbs print: JSON for programs, colors for a terminal."""

from __future__ import annotations

import io
import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def print_json(data: object) -> None:
    """The data alone, on stdout."""
    print(json.dumps(data))


def accept_any_bytes() -> None:
    """Replace typed bytes that are no text, which must not end a session."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def console() -> Console:
    """Return a console with colors if the terminal supports them."""
    from rich.console import Console

    return Console(highlight=False)  # honours NO_COLOR, and is plain where stdout is no terminal
