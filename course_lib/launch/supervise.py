"""Wait for the ranks of one run: collect outcomes, show output and report failed ranks."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import wait

import cloudpickle

from course_lib.launch import faults
from course_lib.launch.output import RankOutput, show
from course_lib.launch.places import parse_stacks
from course_lib.launch.ranks import Ranks
from course_lib.launch.task import Frame, Outcome, Task
from course_lib.launch.travel import unpack

GRACE = 0.4  # seconds for the other ranks to fail or finish, after a rank has failed
TICK = 0.05  # seconds between two reads of the output
ANSWER = 0.5  # seconds for a rank to write its stack


class Run:
    """One call on a set of ranks."""

    def __init__(self, ranks: Ranks, outputs: Sequence[RankOutput]) -> None:
        self.ranks = ranks
        self.outputs = outputs
        self.checked = False
        self.outcomes: dict[int, Outcome] = {}
        self.closed: set[int] = set()  # ranks whose connection is closed

    def call(self, task: Task, timeout: float) -> list[Outcome]:
        """Send the task and return the outcomes by rank; raises RankError if a rank failed."""
        self.checked = task.conditions.checked
        try:
            self._send(cloudpickle.dumps(task))
            end = time.monotonic() + timeout
            trouble = self._collect(end)
            if trouble and len(self.outcomes) < self.ranks.n:
                self._collect(time.monotonic() + GRACE, stop_on_trouble=False)
            if trouble:
                raise faults.failure(self._standing())
            if len(self.outcomes) < self.ranks.n:
                raise faults.deadline(self._standing(), timeout)
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

    def _collect(self, end: float, *, stop_on_trouble: bool = True) -> bool:
        """Read outcomes until all are there, time is up or a rank has failed.

        Return whether a rank has failed.
        """
        while True:
            self._take(max(0.0, min(TICK, end - time.monotonic())))
            show(self.outputs)
            if self._trouble() and stop_on_trouble:
                return True
            waiting = self._waiting()
            if not waiting or time.monotonic() >= end:
                return self._trouble()

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
                    self.outcomes[rank] = unpack(connection.recv_bytes())
                except (EOFError, OSError):
                    self.closed.add(rank)

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
            before, texts = texts, {rank: self._read(rank, starts[rank]) for rank in ranks}
            if texts == before and all(text.endswith("\n") for text in texts.values()):
                break
            time.sleep(0.02)
        return {rank: parse_stacks(text) for rank, text in texts.items()}
