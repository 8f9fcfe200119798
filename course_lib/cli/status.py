"""Show on stderr what a long command is doing, so that stdout holds the result alone."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

Say = Callable[[str], object]
TICK, INTERVAL = 0.2, 5.0  # seconds between updates: of a terminal's line, of lines in a log
CLEAR = "\r\x1b[2K"


class Status:
    """One line that changes on a terminal; elsewhere, a new line every 5 s.

    ``say`` notes what happens next. It writes to a file and can be pickled, so ranks and other
    processes can call it too. A command that takes less than 5 s leaves no output.
    """

    def __init__(self, text: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="course-status-")
        self._note = Path(self._folder.name) / "note"
        self.say: Say = self._note.write_text
        self.say(text)
        self._live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show, args=(text,), daemon=True)

    def __enter__(self) -> Status:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        self._folder.cleanup()

    def line(self, text: str) -> None:
        """Print a line that stays."""
        print(f"{CLEAR if self._live else ''}{text}", file=sys.stderr, flush=True)

    def _show(self, text: str) -> None:
        start, last = time.monotonic(), ""
        while not self._over.wait(TICK if self._live else INTERVAL):
            text = self._note.read_text() or text  # empty while it is being written
            said = f"{time.monotonic() - start:4.0f} s  {text}"
            if not self._live:
                self.line(said)
            elif said != last:
                width = shutil.get_terminal_size().columns - 1
                print(f"{CLEAR}{said[:width]}", end="", file=sys.stderr, flush=True)
                last = said
        if self._live:
            print(CLEAR, end="", file=sys.stderr, flush=True)
