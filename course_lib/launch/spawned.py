"""The engine where processes cannot fork: every rank is a new Python process, which is slow."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import types
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from course_lib.launch.ranks import Ranks


class SpawnedRanks(Ranks):
    """``n`` ranks, each of which imports torch itself, in 3 to 6 s."""

    def __init__(self, directory: Path, n: int) -> None:
        from course_lib.launch.rank import serve_rank

        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(n)]
        self.processes = [
            context.Process(target=serve_rank, args=(theirs,), daemon=True) for _, theirs in pairs
        ]
        with _no_main():
            for process in self.processes:
                process.start()
        for _, theirs in pairs:
            theirs.close()
        super().__init__(directory, [ours for ours, _ in pairs])

    def waitables(self) -> list[Connection | int]:
        """Return the objects that become ready when a rank has ended."""
        alive = enumerate(self.processes)
        return [process.sentinel for rank, process in alive if rank not in self.statuses]

    def read_ends(self) -> None:
        """Collect the exit codes of ended ranks."""
        for rank, process in enumerate(self.processes):
            if (code := process.exitcode) is not None:
                self.statuses[rank] = -code if code < 0 else code << 8

    def signal(self, rank: int, signum: int) -> None:
        """Send a signal to one rank."""
        pid = self.processes[rank].pid
        if self.processes[rank].is_alive() and pid is not None:
            os.kill(pid, signum)

    def close(self) -> None:
        """Kill the ranks."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        super().close()


@contextlib.contextmanager
def _no_main() -> Iterator[None]:
    """Keep new processes from importing the main script, which may have no main guard."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
