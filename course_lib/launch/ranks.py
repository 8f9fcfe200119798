"""The interface between the engines of one machine and the supervisor: a set of ranks."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from course_lib.launch.task import Birth


class Ranks:
    """A set of ranks, one connection per rank; ``statuses`` has wait statuses of ended ranks."""

    def __init__(self, directory: Path, connections: Sequence[Connection]) -> None:
        self.n = len(connections)
        self.directory = directory
        self.connections = connections
        self.statuses: dict[int, int] = {}
        for rank, connection in enumerate(connections):
            connection.send_bytes(pickle.dumps(self.birth(rank)))

    def birth(self, rank: int) -> Birth:
        """Return the first message to the rank."""
        return Birth(rank, self.n, str(self.directory))

    def file(self, rank: int, kind: str = "out") -> Path:
        """Return a file of one rank: ``out`` for its output, ``stack`` for its stacks."""
        return Path(self.birth(rank).file(kind))

    def waitables(self) -> list[Connection | int]:
        """Return the objects that become ready when a rank has ended."""
        raise NotImplementedError

    def read_ends(self) -> None:
        """Collect the wait statuses of ended ranks."""
        raise NotImplementedError

    def signal(self, rank: int, signum: int) -> None:
        """Send a signal to one rank, if it has not ended."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the connections, upon which the ranks end, and remove their files."""
        for connection in self.connections:
            connection.close()
        shutil.rmtree(self.directory, ignore_errors=True)
