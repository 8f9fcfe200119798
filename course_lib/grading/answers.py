"""Call a learner's code safely: it may raise, run forever or print without end.

Its limits do not depend on how busy the machine is: CPU time is counted, and wall-clock time only
where an answer sleeps. They are in seconds and count from the first line of the answer.
"""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

BUSY = "not judged, because the machine was too busy, twice: end other programs, then check again"
MOST_PRINTED = 20_000  # characters of output per check
DEADLINE = 5.0  # of CPU time, per rank
BLOCKED = 2.0  # in which all ranks wait for each other
TOTAL = 60.0  # of wall-clock time
AGAIN = 180.0  # the same in the second try, when the machine was too busy for the first
START = 120.0  # of wall-clock time before that: ranks start, and inputs are drawn
TURN = 60.0  # of waiting for the launches of other checks, before a second try or after theirs
CHECK = 240.0  # of wall-clock time after which a check starts no further launch
LONGEST = CHECK + 2 * (TURN + START) + TOTAL + AGAIN  # a check ends before


class NotRight(Exception):
    """Raised when an answer cannot be judged further; the text is the message of the verdict."""


class TooBusy(Exception):
    """Raised when the machine was too busy to judge an answer; the text is the message."""


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
def guarded(cpu: float = DEADLINE, total: float = TOTAL) -> Iterator[None]:
    """Limit the output of the body and its time, both in seconds; ``exit()`` raises SystemExit.

    Raises NotRight after ``cpu`` seconds of CPU time, or after ``total`` seconds of wall-clock
    time in which the body slept. Raises TooBusy after a total in which other processes ran.
    Without signals (on Windows, or in another thread) only the timeout of the official run applies.
    """
    with bounded_output(), _staying(), _deadline(cpu, total):
        yield


@contextlib.contextmanager
def bounded_output() -> Iterator[None]:
    """Limit the output of the body."""
    with (
        contextlib.redirect_stdout(_Bounded(sys.stdout)),
        contextlib.redirect_stderr(_Bounded(sys.stderr)),
    ):
        yield


@contextlib.contextmanager
def _staying() -> Iterator[None]:
    """Let IPython's ``exit()`` raise SystemExit in the body, because it would end the kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or not hasattr(shell, "ask_exit"):
        yield
        return
    shell.ask_exit = sys.exit
    try:
        yield
    finally:
        del shell.ask_exit  # the attribute of the instance, which hid the method


@contextlib.contextmanager
def _deadline(cpu: float, total: float) -> Iterator[None]:
    if not hasattr(signal, "setitimer") or threading.current_thread() is not main_thread():
        yield
        return

    def late(signum: int, _: object) -> None:
        raise _Late(signum)

    start, delay = time.monotonic(), _delay()
    timers = {signal.SIGPROF: signal.ITIMER_PROF, signal.SIGALRM: signal.ITIMER_REAL}
    before = {signum: signal.signal(signum, late) for signum in timers}
    signal.setitimer(signal.ITIMER_PROF, cpu, 0.5)  # again, if an answer caught it
    signal.setitimer(signal.ITIMER_REAL, total, 0.5)
    try:
        yield
    except _Late as error:
        if error.args == (signal.SIGPROF,):
            raise NotRight(f"not done after {cpu:g} s: check that every loop ends") from None
        if _delay() - delay > 0.5 * (time.monotonic() - start):
            raise TooBusy(BUSY) from None
        raise NotRight(f"not done after {total:g} s: check that nothing sleeps or waits") from None
    finally:
        for timer in timers.values():
            signal.setitimer(timer, 0)
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _delay() -> float:
    """Return the seconds for which this thread has waited for a processor; 0 if unknown."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


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
