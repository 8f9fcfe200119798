"""Show which case of a check is running, where a reader waits for it: in a notebook or terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from typing import Any
from uuid import uuid4

CLEAR = "\r\x1b[2K"
SLOW = 1.0  # seconds of a check before it shows its case
Show = Callable[[str], object]  # replaces the shown text; "" removes it


@contextmanager
def shown_if_slow(text: str, spent: float) -> Iterator[None]:
    """Show ``text`` while the body runs, as soon as the check has taken ``SLOW`` seconds.

    ``spent`` are the seconds that the check has taken before. The text is removed afterwards.
    Nothing is shown in an official run, in an executed notebook or in a log file.
    """
    show = _notebook() or _terminal()
    if show is None:
        yield
        return
    timer = threading.Timer(max(0.0, SLOW - spent), show, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        show("")


def _notebook() -> Show | None:
    """Return how a notebook shows a text; None without a reader, who could be asked for input."""
    ipython = sys.modules.get("IPython")
    kernel = getattr(ipython.get_ipython() if ipython is not None else None, "kernel", None)
    if not getattr(kernel, "_allow_stdin", False):
        return None
    assert ipython is not None
    output: list[Any] = []

    def show(text: str) -> None:
        html = f"<span style='opacity:0.7'>{escape(text)}</span>" if text else ""
        data = {"text/plain": text, "text/html": html}
        if not output and text:
            output.append(f"course-{uuid4()}")
            ipython.display.display(data, raw=True, display_id=output[0])
        elif output:
            ipython.display.display(data, raw=True, display_id=output[0], update=True)

    return show


def _terminal() -> Show | None:
    """Return how a terminal shows a text; None in a log file."""
    if not sys.stderr.isatty():
        return None
    return lambda text: print(f"{CLEAR}{text}", end="", file=sys.stderr, flush=True)
