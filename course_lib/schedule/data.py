"""A pipeline schedule as data: a row of actions per rank, and the rank of each stage.

The same rows are drawn, simulated, validated and executed. A *stage* is a virtual stage, 0 to
p*chunks-1, in the order in which a micro-batch passes them. A *rank* has one or more of them, its
*chunks*. *F* is a stage's forward, *B* its whole backward. *I* and *W* are the two halves of a
split backward, the input gradient (dgrad) and the weight gradient (wgrad): Qi et al. 2023,
arXiv:2401.10241.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

OPS = ("F", "B", "I", "W")
CELL = re.compile(r"([0-9]{1,9})([A-Z])([0-9]{1,9})")
PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")  # torch's: two actions whose messages overlap
# torch's cells that only communicate. The engine derives sends and receives from the order of the
# actions, and cells of FSDP (UNSHARD, RESHARD, REDUCE_GRAD) are ignored.
TRANSFER = re.compile(r"[0-9]+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*")


class ScheduleError(ValueError):
    """A schedule that cannot be run; the message names rank and cell and the reason."""


class Action(NamedTuple):
    """One action: ``op`` for micro-batch ``mb`` on virtual ``stage``."""

    op: str
    stage: int
    mb: int

    def __str__(self) -> str:
        """Write it as torch does: stage, op, micro-batch, such as ``0F3``."""
        return f"{self.stage}{self.op}{self.mb}"

    @classmethod
    def parse(cls, cell: str) -> Action:
        """Read ``0F3``. Raises ScheduleError for anything else."""
        match = CELL.fullmatch(cell.strip())
        if match is None or match[2] not in OPS:
            raise ScheduleError(
                f"{cell.strip()!r} is no action: write stage, one of {', '.join(OPS)}, and "
                "micro-batch, for example 0F3"
            )
        return cls(match[2], int(match[1]), int(match[3]))


@dataclass(frozen=True)
class Schedule:
    """``rows[rank]`` are a rank's actions, in order; ``placement[stage]`` is a stage's rank."""

    name: str
    rows: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks, p."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """Number of virtual stages, p * chunks."""
        return len(self.placement)

    @cached_property
    def microbatches(self) -> int:
        """Number of micro-batches, m."""
        return 1 + max((action.mb for row in self.rows for action in row), default=-1)

    def peak_in_flight(self) -> list[int]:
        """Return per rank the most (stage, micro-batch) pairs whose activations it stores at once.

        A pair is in flight from the start of its F to the end of its B or W. A rank does one
        action at a time, so the order of its row decides, and not the costs. Intervals are
        half-open: an action that ends when the next one starts does not overlap with it.
        """
        return [max(in_flight(row), default=0) for row in self.rows]

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of ``rank``, ascending."""
        return [stage for stage, owner in enumerate(self.placement) if owner == rank]


def in_flight(row: Iterable[Action]) -> Iterator[int]:
    """Yield the number of (stage, micro-batch) pairs in flight during each action of ``row``."""
    now = 0
    for action in row:
        now += action.op == "F"
        yield now
        now -= action.op in ("B", "W")


def looped(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Return the looped placement: stage s is on rank s mod p (Megatron's interleaving)."""
    return tuple(stage % ranks for stage in range(ranks * chunks))


def v_shape(ranks: int) -> tuple[int, ...]:
    """Return the V-shaped placement of two chunks: stages s and 2p-1-s share a rank."""
    return (*range(ranks), *reversed(range(ranks)))


def from_rows(rows: Iterable[Iterable[str]], name: str = "rows") -> Schedule:
    """Read a schedule from cells like ``0F0``.

    Empty cells are idle time and are left out, and so are torch's cells of communication
    (``0SEND_F0``, ``0REDUCE_GRAD``, ...); its pair ``(0F7;7B3)OVERLAP_F_B`` is read as two. The
    placement follows from the rows: a stage is on the rank that has its actions. Raises
    ScheduleError with rank and cell when two ranks have the same stage.
    """
    actions: list[list[Action]] = []
    rank_of: dict[int, int] = {}
    for rank, cells in enumerate(rows):
        actions.append([])
        for place, cell in _single(cells):
            if not cell.strip() or TRANSFER.fullmatch(cell.strip()):
                continue
            try:
                action = Action.parse(cell)
            except ScheduleError as error:
                raise ScheduleError(f"rank {rank}, cell {place}: {error}") from None
            if rank_of.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"rank {rank}, cell {place}: {action} is on stage {action.stage}, which rank "
                    f"{rank_of[action.stage]} holds; a stage's weights are on one rank"
                )
            actions[-1].append(action)
    return Schedule(name, as_rows(actions), _placement(rank_of))


def _single(cells: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield place and text of each cell, and of each half of a pair."""
    for place, cell in enumerate(cells):
        pair = PAIR.fullmatch(cell.strip())
        for one in pair[1].split(";") if pair else (cell,):
            yield place, one


def _placement(rank_of: dict[int, int]) -> tuple[int, ...]:
    """Return the ranks by stage; ``rank_of`` must have every stage from 0 on."""
    if not rank_of:
        raise ScheduleError("there is no action in any row")
    gap = next((stage for stage in range(len(rank_of)) if stage not in rank_of), None)
    if gap is not None:
        raise ScheduleError(
            f"stage {gap} appears in no row, but stage {max(rank_of)} does; stages are numbered "
            "from 0 without a gap"
        )
    return tuple(rank_of[stage] for stage in range(len(rank_of)))


def read_csv(text: str, name: str = "rows") -> Schedule:
    """Read a schedule from CSV text: one line per rank, cells as for :func:`from_rows`.

    Blank lines are skipped, and so are lines without text in any cell at the end.
    """
    try:
        lines = [line for line in csv.reader(io.StringIO(text)) if line]
    except csv.Error as error:
        raise ScheduleError(f"this is no CSV text ({error})") from None
    while lines and not any(cell.strip() for cell in lines[-1]):
        lines.pop()  # spreadsheets write lines of commas at the end
    return from_rows(lines, name)


def write_csv(schedule: Schedule) -> str:
    """Write the schedule as CSV text, which :func:`read_csv` reads."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([map(str, row) for row in schedule.rows])
    return out.getvalue()


def check_sizes(**sizes: int) -> None:
    """Raise ValueError unless every size is a whole number of 1 or more."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"expected a whole number, 1 or more, got {name}={size!r}")


def as_rows(rows: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    """Convert lists of actions to the tuples of a Schedule."""
    return tuple(tuple(row) for row in rows)
