"""Limits of a run that do not depend on how busy the machine is.

They count what the ranks themselves did: the CPU time of each rank, and the time in which all
ranks waited for each other. Time in which a rank waited for a processor counts only towards the
total. Linux reports all of this in /proc (proc(5)); elsewhere only ``start`` and ``total`` apply.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

LOOK = 0.25  # seconds between two looks at the threads of the ranks
GLOO = "gloo_tcp_loop"  # this thread wakes up 100 times per second, even in a deadlock
POLLS = 0.03  # of its time a thread computes at most when it asks a store for a key again and again
BUSY = 0.5  # the machine is too busy if ranks wait for a processor for this share of the time


@dataclass(frozen=True)
class Limits:
    """The limits of a run, in seconds.

    They count from the moment when every rank has called :func:`course_lib.launch.begun`:
    ``cpu`` limits the CPU time of each rank, ``blocked`` the time in which all ranks wait for each
    other, and ``total`` the wall-clock time. ``start`` limits the wall-clock time before.
    """

    cpu: float
    blocked: float
    total: float
    start: float


@dataclass(frozen=True)
class Begun:
    """The message of a rank from which its limits count."""

    pid: int


class Thread(NamedTuple):
    """A thread: its state, the times it was scheduled, its seconds of computing and of delay.

    ``delay`` is the time in which it could have run and waited for a processor.
    """

    name: str
    state: str
    slices: int
    cpu: float
    delay: float


def threads(pid: int) -> dict[str, Thread]:
    """Return the threads of a process by id; {} if the system does not report them."""
    found = {}
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, ValueError):  # it has just ended
                name, _, rest = _read(f"{pid}/task/{task}/stat").rpartition(")")
                cpu, delay, slices = map(int, _read(f"{pid}/task/{task}/schedstat").split())
                name = name.partition("(")[2]
                found[task] = Thread(name, rest.split()[0], slices, cpu / 1e9, delay / 1e9)
    return found


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process with all its threads; 0 if the system does not report it."""
    try:
        fields = _read(f"{pid}/stat").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


def _read(name: str) -> str:
    with open(f"/proc/{name}", errors="replace") as file:
        return file.read()


class Meter:
    """Measures the ranks of one run against its limits."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pids: dict[int, int] = {}  # by rank, of those that have begun
        self.idle = 0.0  # seconds in which no rank computed or sent, up to now
        self.delay = 0.0  # seconds in which ranks waited for a processor, all ranks together
        self._start = time.monotonic()
        self._begin = self._looked = 0.0
        self._cpu: dict[int, float] = {}
        self._seen: dict[int, Mapping[str, Thread]] = {}

    def passed(self, waiting: Sequence[int]) -> str:
        """Return the name of the limit that has passed, or ""; ``waiting`` ranks still run."""
        now = time.monotonic()
        if not self._begin:
            if not self.pids.keys() >= set(waiting):
                return "start" if now - self._start >= self.limits.start else ""
            self._begin = self._looked = now
            self._cpu = {rank: cpu_seconds(self.pids[rank]) for rank in waiting}
        if now - self._looked >= LOOK:
            self._look(now, waiting)
            used = (cpu_seconds(self.pids[rank]) - self._cpu[rank] for rank in waiting)
            if max(used, default=0.0) >= self.limits.cpu:
                return "cpu"
        if self.idle >= self.limits.blocked:
            return "blocked"
        return "total" if now - self._begin >= self.limits.total else ""

    @property
    def starved(self) -> bool:
        """Whether the ranks could not run for most of the time, because the machine was busy."""
        return self.delay >= BUSY * (time.monotonic() - self._begin)

    def _look(self, now: float, waiting: Sequence[int]) -> None:
        """Compare the threads of all ranks with the last look.

        A rank that waits in ``new_group`` asks the store for a key about 100 times per second.
        """
        moved = starved = False
        little = POLLS * (now - self._looked)
        for rank in waiting:
            before, after = self._seen.get(rank, {}), threads(self.pids[rank])
            moved |= not after
            for task, thread in after.items():
                last = before.get(task)
                if thread.name == GLOO:
                    starved |= (
                        thread.state == "R" and last is not None and last.slices == thread.slices
                    )
                elif last is None:
                    moved = True
                else:
                    delay = thread.delay - last.delay
                    moved |= thread.cpu - last.cpu > little or thread.state == "D"
                    starved |= thread.state == "R" or delay > BUSY * (now - self._looked)
                    self.delay += delay
            self._seen[rank] = after
        if moved:
            self.idle = 0.0
        elif not starved:
            self.idle += now - self._looked
        self._looked = now
