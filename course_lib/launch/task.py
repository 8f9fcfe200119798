"""The messages between the launching process and a rank."""

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
    """The message that asks a rank to call a function.

    ``call`` is the pickled pair (fn, args). ``cells`` maps the file names of notebook cells to
    names such as "cell 14". ``run`` is the number of this run on these ranks, from 1.
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
    """The first message to a rank: its number and the directory of its files."""

    rank: int
    n: int
    directory: str

    def file(self, kind: str) -> str:
        """Return a file of this rank: ``out`` for its output, ``stack`` for its stacks."""
        return f"{self.directory}/rank{self.rank}.{kind}"


@dataclass(frozen=True)
class Frame:
    """One line of a traceback or of a stack; in lists, the innermost frame is last."""

    filename: str
    line: int
    function: str


@dataclass
class Raised:
    """An exception with its traceback and its cause; ``parts`` are those of an ExceptionGroup."""

    name: str
    message: str
    frames: list[Frame]
    cause: Raised | None = None
    direct: bool = False  # "raise ... from cause"
    parts: list[Raised] = field(default_factory=list)


@dataclass
class Outcome:
    """The end of a call in one rank.

    ``kind`` is "returned", "raised", "exit" (sys.exit), "function" (the function could not be
    unpickled in the rank) or "result" (the result could not be pickled). ``value`` is pickled.
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
