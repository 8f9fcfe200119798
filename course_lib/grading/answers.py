"""Call a learner's code safely: it may raise, run forever or print without end."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

MOST_PRINTED = 20_000  # characters of output per check
DEADLINE = 5.0  # seconds per live check


class NotRight(Exception):
    """Raised when an answer cannot be judged further; the text is the message of the verdict."""


class _Late(BaseException):
    """Raised at the deadline. It is no Exception, so that an answer does not catch it."""


class _Bounded(io.TextIOBase):
    """Forwards text up to a limit, and writes a note where it stops."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.left = stream, MOST_PRINTED

    def write(self, text: str) -> int:
        """Forward the text up to the limit."""
        if self.left > 0:
            self.stream.write(text[: self.left])
            if len(text) > self.left:
                self.stream.write("\n... the rest of your code's output is not shown\n")
        self.left -= len(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream; this object has no buffer."""
        self.stream.flush()


@contextlib.contextmanager
def guarded(seconds: float = DEADLINE) -> Iterator[None]:
    """Limit the output of the body, and stop it after ``seconds``.

    Raises NotRight at the deadline. Without signals (on Windows, or in another thread) only the
    timeout of the official run applies.
    """
    with (
        contextlib.redirect_stdout(_Bounded(sys.stdout)),
        contextlib.redirect_stderr(_Bounded(sys.stderr)),
        _deadline(seconds),
    ):
        yield


@contextlib.contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    if not hasattr(signal, "setitimer") or threading.current_thread() is not main_thread():
        yield
        return

    def late(*_: object) -> None:
        raise _Late

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.5)  # again, if an answer caught it
    try:
        yield
    except _Late:
        raise NotRight(f"not done after {seconds:g} s: check that every loop ends") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def main_thread() -> threading.Thread:
    """Return the thread that signals interrupt."""
    return threading.main_thread()


def called(name: str, fn: Callable, args: dict[str, Any]) -> Any:
    """Call ``fn`` with ``args`` in order; its exceptions become NotRight with the call."""
    try:
        return fn(*args.values())
    except NotImplementedError as error:
        raise NotRight(f"{name} is not written yet ({error})") from None
    except Exception as error:
        raise NotRight(f"{shown_call(name, args)} raised {described(error)}") from None
    except SystemExit:
        raise NotRight(f"{name} called sys.exit; a function must return") from None


def shown_call(name: str, args: dict[str, Any]) -> str:
    """Return the call as source: ``coordinates(rank=3, sizes={...})``."""
    return f"{name}({', '.join(f'{key}={shown(value)}' for key, value in args.items())})"


def shown(value: Any, room: int = 160) -> str:
    """Return the repr, cut to ``room`` characters; if the repr fails, name the type."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= room else f"{text[: room - 4]} ..."


def described(error: BaseException) -> str:
    """Return the error with the learner's innermost line: ``KeyError: 'tp', in line 3: ...``."""
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    ours = ("course_lib", "exercises/graders")
    own = [frame for frame in frames[1:] if not any(part in frame.filename for part in ours)]
    if isinstance(error, SyntaxError) or not own:
        return what
    place = f"line {own[-1].lineno} of its cell"
    return f"{what}, in {place}" + (f": {own[-1].line}" if own[-1].line else "")
