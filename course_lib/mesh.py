"""What a rank is, in a process: its coordinate on each axis, and the process groups behind them.

:func:`make_mesh` creates the groups (the same ones in the same order on every rank) and returns a
:class:`Mesh` whose axes go to every parallel function: ``all_reduce(x, mesh.tp)``. There is no
global group. The only thing that a launch leaves behind in a rank is a :class:`RankContext`:
ledger, trace and the conditions of the run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist

from course_lib.layout import DEFAULT_ORDER, Layout, make_layout
from course_lib.ledger import Ledger
from course_lib.trace import Trace


@dataclass(frozen=True)
class Link:
    """A network link: ``alpha`` seconds a message, ``beta`` bytes a second."""

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        if self.alpha < 0 or self.beta <= 0:
            raise ValueError(
                f"Link(alpha={self.alpha}, beta={self.beta}): alpha is seconds, 0 or more; "
                "beta is bytes per second, more than 0"
            )


@dataclass(frozen=True)
class Links:
    """Emulated links: ``inside`` a node of ``ranks_per_node`` ranks, and ``between`` nodes.

    Each axis has links of its own, unless they are ``shared``: then the transfers of all axes of
    a rank queue on its one link inside the node and its one link out of it.
    """

    inside: Link
    between: Link
    ranks_per_node: int = 8
    shared: bool = False

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node={self.ranks_per_node}: at least 1 is wanted")

    def link(self, ranks: tuple[int, ...]) -> Link:
        """The slowest link class that a group of global ``ranks`` needs."""
        return self.between if self.crosses(ranks) else self.inside

    def crosses(self, ranks: tuple[int, ...]) -> bool:
        """Whether global ``ranks`` are on more than one node."""
        return len({rank // self.ranks_per_node for rank in ranks}) > 1


# Seconds by operation ("F") or by operation and stage of a pipeline (("F", 2)), which comes first.
Pace = Mapping[Any, float]


@dataclass(frozen=True)
class Conditions:
    """Under what conditions a run is made.

    ``pace`` gives a fixed time in seconds to an operation, e.g. ``{"F": 0.02, "B": 0.04}``, and
    may give another one to a stage whose hardware is slower, e.g. ``{("F", 2): 0.04}``;
    ``links`` slows communication down to the links given; ``checked`` compares every call's
    operation, shape and dtype across the ranks before it is made, and every axis before its groups
    are, and finds ranks that would wait for one another for ever.
    """

    pace: Pace = field(default_factory=dict)
    links: Links | None = None
    checked: bool = False

    def __post_init__(self) -> None:
        for op, seconds in self.pace.items():
            of_stage = isinstance(op, tuple) and [type(part) for part in op] == [str, int]
            if not (isinstance(op, str) or of_stage):
                raise ValueError(f"pace of {op!r}: an operation or (operation, stage) is wanted")
            if isinstance(seconds, bool) or not isinstance(seconds, Real) or not seconds >= 0:
                raise ValueError(f"pace of {op!r} is {seconds!r}: seconds are wanted, 0 or more")

    def pace_of(self, op: str, stage: int | None = None) -> float:
        """How many seconds ``op`` takes at least; 0 where it is not paced."""
        everywhere = self.pace.get(op, 0.0)
        return everywhere if stage is None else self.pace.get((op, stage), everywhere)


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
    # When each channel (axis, op of a message, peer) is free again: comm keeps it, a run ends it.
    channel_free_at: dict[tuple[str, str, int | None], float] = field(default_factory=dict)
    channel_lines: dict[tuple[str, str, int | None], list[Any]] = field(default_factory=dict)
    channel_lock: threading.Lock = field(default_factory=threading.Lock)
    priorities: Any = None  # comm's, while they are in force
    # Checked mode: which run this is of ranks that are kept, and what comm knows of all ranks.
    run: int = 0
    axes_made: int = 0
    last_message: dict[tuple[Any, str, int], Any] = field(default_factory=dict)
    watch: Any = None

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.rank)
        self.trace = Trace(self.rank)


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
    coordinate. ``group`` is None when the axis has size 1. ``all_ranks`` are the ranks of every
    group of this axis in the world.
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
    """All axes of one rank. ``dp_cp`` are the ranks that average the same gradients."""

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
        """Where this rank's tensors live."""
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

    @contextmanager
    def compute(self, op: str, *, stage: int | None = None, **what) -> Iterator[None]:
        """Measure the body as a compute span; in a paced run it takes at least its pace."""
        pace = self.conditions.pace_of(op, stage)
        with self.trace.span(op, at_least=pace, stage=stage, **what):
            yield


def make_mesh(
    order: str = DEFAULT_ORDER,
    *,
    tp: int = 1,
    cp: int = 1,
    dp: int | None = None,
    pp: int = 1,
    ep: int = 1,
) -> Mesh:
    """Lay this world's ranks out on axes and create their groups. Call it on every rank.

    ``dp`` left out is what remains of the world. Without a launch and without an initialised
    process group the world is this process alone. Raises ValueError as
    :func:`course_lib.layout.make_layout` does, and RuntimeError in one of several ranks that have
    no process group yet.
    """
    context = rank_context()
    if context.world_size > 1 and not dist.is_initialized():
        raise RuntimeError(
            f"this rank is one of {context.world_size}, but no process group is initialised: call "
            "torch.distributed.init_process_group first (init=False leaves that to you)"
        )
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    layout = make_layout(world, order, tp=tp, cp=cp, dp=dp, pp=pp, ep=ep)

    def axis(name: str, groups: list[list[int]]) -> Axis:
        return _make_axis(name, groups, rank, context)

    axes = {name: axis(name, layout.groups(name)) for name in layout.sizes}
    single = axis("single", [[one] for one in range(world)])
    dp_cp = axes["dp"] if layout.sizes["cp"] == 1 else axis("dp_cp", layout.groups("dp", "cp"))
    ep_axis, edp_axis = single, dp_cp
    if ep > 1:
        ep_groups, edp_groups = layout.expert_groups()
        ep_axis, edp_axis = axis("ep", ep_groups), axis("edp", edp_groups)
    everyone = tuple(range(world))
    group = dist.group.WORLD if world > 1 else None
    whole = Axis("world", rank, world, everyone, group, context, [list(everyone)])
    return Mesh(
        layout, rank, **axes, dp_cp=dp_cp, ep=ep_axis, edp=edp_axis, world=whole, context=context
    )


def _make_axis(name: str, groups: list[list[int]], rank: int, context: RankContext) -> Axis:
    """Create every group of an axis (all ranks must, in one order) and return this rank's.

    As Megatron-LM's parallel_state.initialize_model_parallel does. Each axis has groups of its
    own, even of the same ranks as another's: one group carries its calls one after another
    (github.com/meta-pytorch/torchrec/pull/4708).
    """
    if context.conditions.checked and any(len(ranks) > 1 for ranks in groups):
        _compare_groups(name, groups, context)
    mine: Axis | None = None
    for ranks in groups:
        group = dist.new_group(ranks) if len(ranks) > 1 else None
        if rank in ranks:
            mine = Axis(name, ranks.index(rank), len(ranks), tuple(ranks), group, context, groups)
    assert mine is not None, f"rank {rank} is in no group of axis {name}"
    return mine


def _compare_groups(name: str, groups: list[list[int]], context: RankContext) -> None:
    """Checked mode: raise ValueError, on every rank, unless all ranks are about to make the same.

    Unchecked, the groups of ranks that make theirs in different orders are joined as they come:
    a hang, or sums over the wrong ranks without an error (github.com/pytorch/pytorch/issues/25390).
    """
    context.axes_made += 1
    store = dist.distributed_c10d._get_default_store()  # not a group: these may be what is wrong
    store = dist.PrefixStore(f"axes/{context.run}/{context.axes_made}", store)
    store.set(str(dist.get_rank()), f"axis {name} of groups {groups}")
    said = [store.get(str(rank)).decode() for rank in range(dist.get_world_size())]
    if len(set(said)) > 1:
        lines = [f"  rank {rank}: {one}" for rank, one in enumerate(said)]
        raise ValueError(
            "\n".join(["the ranks do not make the same groups:", *lines])
            + "\nEvery rank must make all groups in one order, those of others too: call make_mesh "
            "and sub_axis with the same arguments and in the same order on every rank."
        )


def sub_axis(axis: Axis, size: int, name: str) -> Axis:
    """``axis`` cut into runs of ``size`` neighbours: the run that this rank is in, as an axis.

    It makes groups, as :func:`make_mesh` does: call it on every rank of the world, once.
    Raises ValueError when ``size`` does not divide.
    """
    _check_run(axis, size)
    starts = range(0, axis.size, size)
    runs = [ranks[start : start + size] for ranks in axis.all_ranks for start in starts]
    return _make_axis(name, runs, axis.ranks[axis.rank], axis.context)


def across_axis(axis: Axis, size: int, name: str) -> Axis:
    """The ranks of ``axis`` that have this one's place in their runs of ``size`` neighbours.

    With :func:`sub_axis`, to be called alike, it makes a grid of the axis: rank i ``size`` + j
    has place j in run i.
    """
    _check_run(axis, size)
    places = [ranks[place::size] for ranks in axis.all_ranks for place in range(size)]
    return _make_axis(name, places, axis.ranks[axis.rank], axis.context)


def _check_run(axis: Axis, size: int) -> None:
    if size < 1 or axis.size % size:
        raise ValueError(
            f"runs of {size} ranks on axis {axis.name} of {axis.size}: choose a divisor of "
            f"{axis.size}"
        )
