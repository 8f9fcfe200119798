"""Wait for the ranks of one run: collect outcomes, show output, and find out who failed."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import wait

import cloudpickle

from course_lib.launch import faults
from course_lib.launch.local import Family
from course_lib.launch.output import RankOutput, show
from course_lib.launch.places import parse_stacks
from course_lib.launch.task import Frame, Outcome, Task
from course_lib.launch.travel import unpack

GRACE = 0.4  # seconds for the other ranks to fail or finish too, once one has failed
TICK = 0.05  # seconds between looks at the output
ANSWER = 0.5  # seconds for a rank to write its stack


class Run:
    """One call on the ranks of a family."""

    def __init__(self, family: Family, outputs: Sequence[RankOutput]) -> None:
        self.family = family
        self.outputs = outputs
        self.outcomes: dict[int, Outcome] = {}
        self.closed: set[int] = set()  # ranks whose connection is closed

    def call(self, task: Task, timeout: float) -> list[Outcome]:
        """Send the task and return every rank's outcome, by rank; raises a RankError."""
        try:
            self._send(cloudpickle.dumps(task))
            end = time.monotonic() + timeout
            trouble = self._collect(end)
            if trouble and len(self.outcomes) < self.family.n:
                self._collect(time.monotonic() + GRACE, stop_on_trouble=False)
            if trouble:
                raise faults.failure(self._standing())
            if len(self.outcomes) < self.family.n:
                raise faults.deadline(self._standing(), timeout)
        except KeyboardInterrupt:
            raise faults.interrupted(self._standing()) from None
        except EOFError:
            raise faults.server_gone() from None
        finally:
            show(self.outputs, last=True)
        return [self.outcomes[rank] for rank in range(self.family.n)]

    def _send(self, message: bytes) -> None:
        for rank, connection in enumerate(self.family.connections):
            try:
                connection.send_bytes(message)
            except OSError:
                self.closed.add(rank)  # its end is reported by the server

    def _collect(self, end: float, *, stop_on_trouble: bool = True) -> bool:
        """Take in outcomes until all are there, time is up or a rank has failed (True)."""
        while True:
            self._take(max(0.0, min(TICK, end - time.monotonic())))
            show(self.outputs)
            if self._trouble() and stop_on_trouble:
                return True
            waiting = self._waiting()
            if not waiting or time.monotonic() >= end:
                return self._trouble()

    def _take(self, seconds: float) -> None:
        connections = {
            connection: rank
            for rank, connection in enumerate(self.family.connections)
            if rank not in self.outcomes and rank not in self.closed
        }
        for ready in wait([*connections, self.family.link], seconds):
            if ready is self.family.link:
                self.family.read_ends()
                continue
            rank = connections[ready]
            try:
                self.outcomes[rank] = unpack(ready.recv_bytes())
            except (EOFError, OSError):
                self.closed.add(rank)

    def _died(self) -> dict[int, int | None]:
        ended = self.family.statuses
        return {rank: ended[rank] for rank in sorted(ended) if rank not in self.outcomes}

    def _waiting(self) -> list[int]:
        gone = {*self.outcomes, *self.family.statuses}
        return [rank for rank in range(self.family.n) if rank not in gone]

    def _trouble(self) -> bool:
        failed = any(outcome.kind != "returned" for outcome in self.outcomes.values())
        return failed or bool(self._died())

    def _standing(self) -> faults.Standing:
        """Ask every rank that is still busy for its stack."""
        stacks = Stacks(self.family)
        frames = stacks.ask(self._waiting())
        frames.update({rank: stacks.crash(rank) for rank in self._died()})
        return faults.Standing(self.family.n, self.outcomes, self._died(), frames)


class Stacks:
    """The files into which the ranks write their stacks when they are asked, or crash."""

    def __init__(self, family: Family) -> None:
        self.family = family

    def _read(self, rank: int, start: int = 0) -> str:
        try:
            return self.family.file(rank, "stack").read_bytes()[start:].decode(errors="replace")
        except FileNotFoundError:
            return ""

    def crash(self, rank: int) -> list[Frame]:
        """The stack of a rank that crashed; empty if it left without one."""
        text = self._read(rank)
        start = text.rfind("Fatal Python error")
        return parse_stacks(text[start:]) if start >= 0 else []

    def ask(self, ranks: Sequence[int]) -> dict[int, list[Frame]]:
        """The stacks of these ranks now. A rank that does not answer has an empty one."""
        starts = {rank: len(self._read(rank).encode()) for rank in ranks}
        for rank in ranks:
            self.family.signal(rank, signal.SIGUSR1)
        texts = dict.fromkeys(ranks, "")
        end = time.monotonic() + ANSWER
        while time.monotonic() < end:
            before, texts = texts, {rank: self._read(rank, starts[rank]) for rank in ranks}
            if texts == before and all(text.endswith("\n") for text in texts.values()):
                break
            time.sleep(0.02)
        return {rank: parse_stacks(text) for rank, text in texts.items()}
