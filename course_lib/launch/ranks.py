"""What every engine of one machine hands to the supervisor: ranks with a connection to each."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from course_lib.launch.task import Birth


class Ranks:
    """Ranks from their birth to their end. ``statuses`` has the wait status of those that ended."""

    def __init__(self, directory: Path, connections: Sequence[Connection]) -> None:
        self.n = len(connections)
        self.directory = directory
        self.connections = connections
        self.statuses: dict[int, int] = {}
        for rank, connection in enumerate(connections):
            connection.send_bytes(pickle.dumps(self.birth(rank)))

    def birth(self, rank: int) -> Birth:
        """What the rank is told first."""
        return Birth(rank, self.n, str(self.directory))

    def file(self, rank: int, kind: str = "out") -> Path:
        """A file of one rank: ``out`` for its output, ``stack`` for its stacks."""
        return Path(self.birth(rank).file(kind))

    def waitables(self) -> list[Connection | int]:
        """What becomes ready when a rank has ended."""
        raise NotImplementedError

    def read_ends(self) -> None:
        """Learn which ranks have ended."""
        raise NotImplementedError

    def signal(self, rank: int, signum: int) -> None:
        """Send a signal to one rank, if it has not ended."""
        raise NotImplementedError

    def close(self) -> None:
        """Let the ranks go, and remove their files."""
        for connection in self.connections:
            connection.close()
        shutil.rmtree(self.directory, ignore_errors=True)
