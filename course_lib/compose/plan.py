"""What one is free to choose when a model is trained on a mesh. Data alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from torch import Tensor

from course_lib import cp, dp, recompute, sp, tp
from course_lib.comm import Region
from course_lib.cp import SequenceLayout
from course_lib.mesh import Axis
from course_lib.model import Decoder
from course_lib.schedule import Schedule, make

_make = lru_cache(maxsize=64)(make)  # a search for a schedule can take seconds


@dataclass(frozen=True)
class Core:
    """A way to compute attention over rows that several ranks hold.

    ``attention`` as ``cp.parallelize`` takes it; ``wire_bytes(config, sequences, seq_len, n,
    forwards=...)`` is what a rank sends. ``whole_heads``: each rank gets whole sequences of some
    heads, so that shards must join in order and there must be as many heads as ranks. ``run``: of
    a grid (:func:`grid`) the ranks that divide heads, else 1.
    """

    name: str
    attention: Callable[..., Tensor]
    wire_bytes: Callable[..., Any]
    whole_heads: bool = False
    run: int = 1

    def on(self, axis: Axis) -> cp.ParallelAttention:
        """The attention on ``axis``. A grid makes groups: call it on every rank, once."""
        if self.run == 1:
            return self.attention
        heads, ring = cp.split_axis(axis, self.run)
        return partial(self.attention, heads_axis=heads, ring_axis=ring)

    def sharing_heads(self, ranks: int) -> int:
        """Return how many of cp's ``ranks`` divide the heads of one sequence."""
        return ranks if self.whole_heads else self.run


RING = Core("ring", cp.ring_attention, cp.ring_wire_bytes)
GATHER = Core("gather", cp.gather_attention, cp.gather_wire_bytes)
ULYSSES = Core("ulysses", cp.ulysses_attention, cp.ulysses_wire_bytes, whole_heads=True)


def grid(run: int) -> Core:
    """Ulysses among ``run`` neighbors, and a ring through all runs: for more ranks than heads.

    The layout is ``cp.nested(cp.ZIGZAG, run)``; the ledger has axes cp_heads and cp_ring.
    """
    if run < 2:
        raise ValueError(f"a grid of runs of {run}: at least 2 ranks divide heads; or use RING")
    name = f"grid in runs of {run}"
    return Core(name, cp.ulysses_ring_attention, cp.ulysses_ring_wire_bytes, run=run)


@dataclass(frozen=True)
class Experts:
    """What the model was given by ``ep.add_experts``, and how much their balance counts.

    ``coefficient`` times the auxiliary loss is added to the summed loss of each micro-batch.
    """

    number: int
    top_k: int
    capacity_factor: float | None = None
    shared: bool = False
    coefficient: float = 0.01


@dataclass(frozen=True)
class LossScale:
    """The loss is multiplied by this before backward, and gradients divided by it after.

    So that small gradients survive in a narrow dtype. A step whose gradients are not finite is
    left out. Dynamic: then the scale is halved, and after ``growth_interval`` good steps in a row
    it is doubled; static with None. Source: Micikevicius et al. 2017, arXiv:1710.03740.
    """

    initial: float = 2.0**16
    growth_interval: int | None = 2000


@dataclass(frozen=True)
class Plan:
    """How a model is trained; the sizes of the axes are the mesh's.

    ``zero``: 0 (whole gradients and optimizer on each rank) to 3. ``region``: ``tp.REGION``,
    ``sp.REGION`` or ``sp.GATHER_AGAIN``. ``core`` and ``layout``: attention over cp.
    ``schedule``: a name, made for the mesh's pp, ``micro_batches`` and ``chunks`` (None: as the
    name implies), or a Schedule of as many micro-batches.
    ``recompute``: None, ``recompute.selective`` or ``recompute.full``. ``overlap``: a stage's
    gradients are summed over the data ranks from its last backward on, while the rest goes on.
    ``seed``: of dropout's masks.
    """

    zero: int = 0
    region: Region = tp.REGION
    core: Core = RING
    layout: SequenceLayout = cp.ZIGZAG
    schedule: str | Schedule = "1f1b"
    micro_batches: int = 1
    chunks: int | None = None
    experts: Experts | None = None
    recompute: Callable[[Decoder], None] | None = None
    overlap: bool = False
    max_norm: float | None = None
    loss_scale: LossScale | None = None
    bucket_bytes: int = dp.BUCKET_BYTES
    seed: int = 0

    @property
    def by_rows(self) -> bool:
        """Whether the ranks of tp share the positions between the regions."""
        return self.region.rows is not tp.REGION.rows

    @property
    def gathers_again(self) -> bool:
        """Whether what has entered a region is gathered once more in backward."""
        return self.region == sp.GATHER_AGAIN

    @property
    def block_forwards(self) -> int:
        """How often a block runs forward in a step."""
        return 2 if self.recompute is recompute.full else 1

    @property
    def core_forwards(self) -> int:
        """How often the core of an attention runs forward in a step."""
        return 1 if self.recompute is None else 2

    def schedule_for(self, ranks: int) -> Schedule:
        """Return the schedule of ``ranks`` pipeline ranks; ValueError where there is none."""
        if isinstance(self.schedule, Schedule):
            return self.schedule
        return _make(self.schedule, ranks, self.micro_batches, self.chunks)
