"""What a learner's code does when it is called: it raises, runs for ever, prints without end."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

MOST_PRINTED = 20_000  # characters that a check lets through
DEADLINE = 5.0  # seconds of a live check


class NotRight(Exception):
    """An answer that cannot be judged further; the text is the message of the verdict."""


class _Late(BaseException):
    """The deadline has come. No Exception, so that an answer does not catch it by accident."""


class _Bounded(io.TextIOBase):
    """Passes text on until there was too much of it, and says where it cut."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.left = stream, MOST_PRINTED

    def write(self, text: str) -> int:
        """Pass on what there is still room for."""
        if self.left > 0:
            self.stream.write(text[: self.left])
            if len(text) > self.left:
                self.stream.write("\n... the rest of what your code printed is left out\n")
        self.left -= len(text)
        return len(text)

    def flush(self) -> None:
        """Nothing is kept back here."""
        self.stream.flush()


@contextlib.contextmanager
def guarded(seconds: float = DEADLINE) -> Iterator[None]:
    """Inside, printing is bounded and code that runs longer than ``seconds`` is stopped.

    Raises NotRight when time is up. Where signals cannot be had (Windows, another thread) only
    the official run's timeout holds.
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
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.5)  # again, where an answer caught it
    try:
        yield
    except _Late:
        raise NotRight(f"not done after {seconds:g} s: does a loop in it ever end?") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def main_thread() -> threading.Thread:
    """The thread that signals interrupt."""
    return threading.main_thread()


def called(name: str, fn: Callable, args: dict[str, Any]) -> Any:
    """``fn`` called with ``args`` in order; what it raises becomes NotRight with the call in it."""
    try:
        return fn(*args.values())
    except NotImplementedError as error:
        raise NotRight(f"{name} is not written yet ({error})") from None
    except Exception as error:
        raise NotRight(f"{shown_call(name, args)} raised {described(error)}") from None
    except SystemExit:
        raise NotRight(f"{name} called sys.exit; a function must return") from None


def shown_call(name: str, args: dict[str, Any]) -> str:
    """``coordinates(rank=3, sizes={...})``, as one would type it."""
    return f"{name}({', '.join(f'{key}={shown(value)}' for key, value in args.items())})"


def shown(value: Any, room: int = 160) -> str:
    """``repr``, cut; a value whose repr fails is named by its type."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= room else f"{text[: room - 4]} ..."


def described(error: BaseException) -> str:
    """``KeyError: 'tp', in line 3: sizes['tp']``: the innermost line that is the learner's."""
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames[1:] if "course_lib" not in frame.filename]
    if isinstance(error, SyntaxError) or not own:
        return what
    place = f"line {own[-1].lineno} of its cell"
    return f"{what}, in {place}" + (f": {own[-1].line}" if own[-1].line else "")
