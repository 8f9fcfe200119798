"""Wait for the ranks of one run: collect outcomes, show output and report failed ranks."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait

import cloudpickle

from course_lib.launch import faults
from course_lib.launch.limits import Begun, Limits, Meter
from course_lib.launch.output import RankOutput, show
from course_lib.launch.places import parse_stacks, waits
from course_lib.launch.ranks import Ranks
from course_lib.launch.task import Frame, Outcome, Task
from course_lib.launch.travel import unpack

GRACE = 0.4  # seconds for the other ranks to fail or finish, after a rank has failed
CULPRIT = 5.0  # seconds for the rank at fault to be known, if others lost their connection to it
TICK = 0.05  # seconds between two reads of the output
ANSWER = 5.0  # seconds for a rank to write its stack, on a busy machine
BOTTOM = "in <module>\n"  # the end of a stack: the main thread is the last one
Over = Callable[[], str]  # returns the name of a limit that has passed, or ""


class Run:
    """One call on a set of ranks."""

    def __init__(self, ranks: Ranks, outputs: Sequence[RankOutput]) -> None:
        self.ranks = ranks
        self.outputs = outputs
        self.checked = False
        self.meter: Meter | None = None
        self.outcomes: dict[int, Outcome] = {}
        self.closed: set[int] = set()  # ranks whose connection is closed

    def call(self, task: Task, timeout: float, limits: Limits | None = None) -> list[Outcome]:
        """Send the task and return the outcomes by rank; raises RankError if a rank failed.

        ``limits`` replace the timeout, which is in seconds.
        """
        self.checked = task.conditions.checked
        try:
            self._send(cloudpickle.dumps(task))
            self.meter = Meter(limits) if limits else None
            limit = self._collect(self._passed if limits else _after(timeout))
            if self._trouble():
                self._collect(self._settled(), stop_on_trouble=False)
                raise faults.failure(self._standing())
            if limit:
                seconds = getattr(limits, limit, timeout)
                starved = self.meter is not None and self.meter.starved
                raise faults.deadline(self._standing(), seconds, limit, starved)
        except KeyboardInterrupt:
            raise faults.interrupted(self._standing()) from None
        except EOFError:
            raise faults.server_gone() from None
        finally:
            show(self.outputs, last=True)
        return [self.outcomes[rank] for rank in range(self.ranks.n)]

    def _send(self, message: bytes) -> None:
        for rank, connection in enumerate(self.ranks.connections):
            try:
                connection.send_bytes(message)
            except OSError:
                self.closed.add(rank)  # the server reports how it ended

    def _collect(self, over: Over, *, stop_on_trouble: bool = True) -> str:
        """Read outcomes until all are there, a limit has passed or a rank has failed.

        Return the name of the limit, or "".
        """
        while True:
            self._take(TICK)
            show(self.outputs)
            if not self._waiting() or (self._trouble() and stop_on_trouble):
                return ""
            if limit := over():
                return limit

    def _passed(self) -> str:
        """Return the limit that has passed. A rank that sleeps does not wait for other ranks."""
        assert self.meter is not None
        limit = self.meter.passed(self._waiting())
        if limit == "blocked":
            stacks = Stacks(self.ranks).ask(self._waiting())
            if not all(map(waits, stacks.values())):
                self.meter.idle = 0.0
                return ""
        return limit

    def _settled(self) -> Over:
        """Return when to stop after a failure: later if the rank at fault is not yet known."""
        grace, culprit = _after(GRACE), _after(CULPRIT)

        def over() -> str:
            failed = [one for one in self.outcomes.values() if one.kind != "returned"]
            known = self._died() or not all(map(faults.lost_connection, failed))
            return grace() if known else culprit()

        return over

    def _take(self, seconds: float) -> None:
        open_ones = {
            rank: connection
            for rank, connection in enumerate(self.ranks.connections)
            if rank not in self.outcomes and rank not in self.closed
        }
        ends = self.ranks.waitables()
        ready = wait([*open_ones.values(), *ends], seconds)
        if any(end in ready for end in ends):
            self.ranks.read_ends()
        for rank, connection in open_ones.items():
            if connection in ready:
                try:
                    self._note(rank, unpack(connection.recv_bytes()))
                except (EOFError, OSError):
                    self.closed.add(rank)

    def _note(self, rank: int, message: Outcome | Begun) -> None:
        if isinstance(message, Outcome):
            self.outcomes[rank] = message
        elif self.meter is not None:
            self.meter.pids[rank] = message.pid

    def _died(self) -> dict[int, int | None]:
        ended = self.ranks.statuses
        return {rank: ended[rank] for rank in sorted(ended) if rank not in self.outcomes}

    def _waiting(self) -> list[int]:
        gone = {*self.outcomes, *self.ranks.statuses}
        return [rank for rank in range(self.ranks.n) if rank not in gone]

    def _trouble(self) -> bool:
        failed = any(outcome.kind != "returned" for outcome in self.outcomes.values())
        return failed or bool(self._died())

    def _standing(self) -> faults.Standing:
        """Return the state of every rank, with the stacks of ranks that still run or crashed."""
        stacks = Stacks(self.ranks)
        frames = stacks.ask(self._waiting())
        frames.update({rank: stacks.crash(rank) for rank in self._died()})
        return faults.Standing(self.ranks.n, self.outcomes, self._died(), frames, self.checked)


def _after(seconds: float) -> Over:
    """Return a function that returns "timeout" after ``seconds``."""
    end = time.monotonic() + seconds
    return lambda: "timeout" if time.monotonic() >= end else ""


class Stacks:
    """The files into which the ranks write their stacks, on a signal or in a crash."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def _read(self, rank: int, start: int = 0) -> str:
        try:
            return self.ranks.file(rank, "stack").read_bytes()[start:].decode(errors="replace")
        except FileNotFoundError:
            return ""

    def crash(self, rank: int) -> list[Frame]:
        """Return the stack of a rank that crashed; empty if the rank wrote none."""
        text = self._read(rank)
        start = text.rfind("Fatal Python error")
        return parse_stacks(text[start:]) if start >= 0 else []

    def ask(self, ranks: Sequence[int]) -> dict[int, list[Frame]]:
        """Return the current stacks of these ranks; empty for a rank that does not answer."""
        starts = {rank: len(self._read(rank).encode()) for rank in ranks}
        for rank in ranks:
            self.ranks.signal(rank, signal.SIGUSR1)
        texts = dict.fromkeys(ranks, "")
        end = time.monotonic() + ANSWER
        while time.monotonic() < end:
            texts = {rank: self._read(rank, starts[rank]) for rank in ranks}
            if all(text.endswith(BOTTOM) for text in texts.values()):
                break
            time.sleep(0.02)
        return {rank: parse_stacks(text) for rank, text in texts.items()}
