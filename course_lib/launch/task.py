"""What travels between the launching process and a rank."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the launching process starts its server before it imports torch
    from course_lib.ledger import Ledger
    from course_lib.mesh import Conditions
    from course_lib.trace import SentBytes, Trace


@dataclass
class Task:
    """One call of one function, as a rank is told of it.

    ``call`` is (fn, args), pickled; ``cells`` names the files that are cells of the notebook;
    ``run`` counts the runs of these ranks.
    """

    call: bytes
    conditions: Conditions
    device: str
    init: bool
    n: int
    cells: dict[str, str] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    path: list[str] = field(default_factory=lambda: list(sys.path))
    cwd: str = field(default_factory=os.getcwd)
    run: int = 0


@dataclass
class Birth:
    """The first message to a rank: who it is and where its files go."""

    rank: int
    n: int
    directory: str

    def file(self, kind: str) -> str:
        """This rank's file of that kind: ``out`` for its output, ``stack`` for its stacks."""
        return f"{self.directory}/rank{self.rank}.{kind}"


@dataclass(frozen=True)
class Frame:
    """One line of a traceback or of a stack: innermost last."""

    filename: str
    line: int
    function: str


@dataclass
class Raised:
    """An exception with its traceback, and the one that led to it.

    ``parts`` are the exceptions in an ExceptionGroup.
    """

    name: str
    message: str
    frames: list[Frame]
    cause: Raised | None = None
    direct: bool = False  # "raise ... from cause"
    parts: list[Raised] = field(default_factory=list)


@dataclass
class Outcome:
    """How a call ended in one rank.

    ``kind`` is "returned", "raised", "exit" (sys.exit), "function" (it could not be rebuilt
    here) or "result" (it could not be pickled). ``value`` is pickled.
    """

    kind: str
    value: bytes = b""
    error: Raised | None = None
    hint: str = ""
    ledger: Ledger | None = None
    trace: Trace | None = None
    sent: SentBytes | None = None
    at: float = 0.0
    exception: bytes = b""
