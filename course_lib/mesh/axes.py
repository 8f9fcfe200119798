"""What a rank sees: its context, its coordinate on each axis, and the mesh of all axes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from course_lib.layout import Layout
from course_lib.ledger import Ledger
from course_lib.mesh.conditions import Conditions
from course_lib.trace import SentBytes, SocketMeter, Trace


class Instrument(Protocol):
    """What watches or disturbs traffic. By default it does nothing.

    A launcher installs instruments (:mod:`course_lib.comm.instruments`). ``call`` and the handle
    that ``issue(call)`` returns are those of :mod:`course_lib.comm.transfer`.
    """

    def making_groups(self, name: str, groups: list[list[int]]) -> None:
        """Every rank is about to make the groups of axis ``name``."""
        return

    def around(self, axis: Axis, call: Any, issue: Callable[[Any], Any]) -> Any:
        """A rank makes ``call``: return the handle of ``issue(call)``, or one around it."""
        return issue(call)

    def returned(self) -> None:
        """The function that was launched has returned: this rank makes no more calls."""
        return


@dataclass
class RankContext:
    """What a launch leaves behind in a rank, and reads again when the function has returned."""

    rank: int = 0
    conditions: Conditions = field(default_factory=Conditions)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    cells: dict[str, str] = field(default_factory=dict)  # file name of a cell -> "cell 14"
    world_size: int = 1  # ranks that were launched with this one, itself included
    ledger: Ledger = field(init=False)
    trace: Trace = field(init=False)
    sockets: SocketMeter = field(init=False)  # what the kernel counts
    instruments: tuple[Instrument, ...] = ()  # outermost first
    # When the last transfer of a channel (see comm.transfer) ended.
    free_at: dict[tuple[str, str, int | None], float] = field(default_factory=dict)
    group_of_one: dist.ProcessGroup | None = None  # this rank alone: for axes of size 1

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.rank)
        self.trace = Trace(self.rank)
        self.sockets = SocketMeter(self.world_size, on_cpu=self.device.type == "cpu")


_here: list[RankContext] = []


def enter_rank(context: RankContext) -> None:
    """Called by a launcher, once per run and rank: meshes made from now on use ``context``."""
    _here[:] = [context]


def rank_context() -> RankContext:
    """The context of this rank; outside a launch, a fresh one that is kept."""
    if not _here:
        rank = dist.get_rank() if dist.is_initialized() else 0
        enter_rank(RankContext(rank))
    return _here[0]


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh as one rank sees it.

    ``rank`` is the coordinate on this axis, ``ranks`` the global ranks of the group by
    coordinate. ``group`` is real on an axis of size 1 too (this rank alone), and None only where no
    process group is initialized. ``all_ranks`` are the ranks of every group of this axis.
    """

    name: str
    rank: int
    size: int
    ranks: tuple[int, ...]
    group: Any = field(default=None, repr=False, compare=False)
    context: RankContext = field(default_factory=RankContext, repr=False, compare=False)
    all_ranks: list[list[int]] = field(default_factory=list, repr=False, compare=False)

    @property
    def ledger(self) -> Ledger:
        """Where calls on this axis are written down."""
        return self.context.ledger

    @property
    def trace(self) -> Trace:
        """Where spans on this axis are written down."""
        return self.context.trace

    def global_rank(self, coordinate: int, what: str = "coordinate") -> int:
        """Return the global rank at ``coordinate``, which errors call ``what``.

        Raises ValueError where the axis has no such coordinate.
        """
        if not 0 <= coordinate < self.size:
            raise ValueError(
                f"{what}={coordinate} is no coordinate of axis {self.name}, which has {self.size} "
                f"ranks: give one of 0..{self.size - 1}"
            )
        return self.ranks[coordinate]

    @property
    def next(self) -> int:
        """Coordinate of the next rank on the ring."""
        return (self.rank + 1) % self.size

    @property
    def previous(self) -> int:
        """Coordinate of the previous rank on the ring."""
        return (self.rank - 1) % self.size


@dataclass(frozen=True)
class Mesh:
    """All axes of one rank. Gradients are summed over ``dp_cp``, which joins dp and cp."""

    layout: Layout
    rank: int
    tp: Axis
    cp: Axis
    dp: Axis
    pp: Axis
    dp_cp: Axis
    ep: Axis
    edp: Axis
    world: Axis
    context: RankContext = field(repr=False, compare=False)

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.context.device

    @property
    def ledger(self) -> Ledger:
        """What this rank sent and received."""
        return self.context.ledger

    @property
    def trace(self) -> Trace:
        """What this rank did and when."""
        return self.context.trace

    @property
    def conditions(self) -> Conditions:
        """Pace, links and checks of this run."""
        return self.context.conditions

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each axis, those of size 1 left out."""
        return {axis: size for axis, size in self.layout.sizes.items() if size > 1}

    def count_from_here(self) -> None:
        """Reset the ledger and the kernel's byte counts."""
        self.ledger.clear()
        self.context.sockets.restart()

    def kernel_bytes(self) -> AbstractContextManager[SentBytes]:
        """``with mesh.kernel_bytes() as sent``: the bytes that this rank sends in the body.

        Afterwards ``sent.by_axis`` has the kernel's counts, gloo's headers included, or is None
        where the kernel has none. Collect ``sent`` from every rank and pass the list to
        :func:`course_lib.trace.traffic_matrices` for the bytes by sender and receiver.
        """
        return self.context.sockets.inside()

    @contextmanager
    def compute(self, op: str, *, stage: int | None = None, **what: Any) -> Iterator[None]:
        """Measure the body as a compute span; in a paced run it takes at least its pace."""
        pace = self.conditions.pace_of(op, stage)
        with self.trace.span(op, at_least=pace, stage=stage, **what):
            yield
