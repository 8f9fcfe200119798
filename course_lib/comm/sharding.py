"""How a parameter is sharded: one :class:`ShardSpec` per parameter, set and read here alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from course_lib.mesh import Axis

_FIELD = "shard_spec"  # of the parameter: the spec lives as long as the parameter does


@dataclass(frozen=True)
class ShardSpec:
    """How the ranks of ``axis`` divide one parameter.

    ``dim``: the dimension that they divide; None where ranks hold different whole parameters, as
    expert parallelism does. ``kv_group``: the replication group, the neighbors on ``axis`` that
    hold the same shard, where key and value heads are fewer than ranks; else None.
    ``unpadded``: the size of ``dim`` in the whole parameter without padding; None without padding.
    """

    axis: Axis
    dim: int | None = None
    kv_group: Axis | None = None
    unpadded: int | None = None

    @property
    def copies(self) -> int:
        """How many ranks of the axis hold this rank's shard."""
        return 1 if self.kv_group is None else self.kv_group.size

    @property
    def shards(self) -> int:
        """How many different shards the axis holds."""
        return self.axis.size // self.copies

    @property
    def index(self) -> int:
        """Which of the shards this rank holds."""
        return self.axis.rank // self.copies

    def shards_on(self, axis: Axis) -> int:
        """Return how many different shards the ranks of another ``axis`` hold."""
        places = [self.axis.ranks.index(rank) for rank in axis.ranks if rank in self.axis.ranks]
        return len({place // self.copies for place in places})


def set_shard_spec(parameter: nn.Parameter, spec: ShardSpec) -> None:
    """Record how ``parameter`` is sharded."""
    vars(parameter)[_FIELD] = spec


def shard_spec(parameter: Tensor) -> ShardSpec | None:
    """Return how ``parameter`` is sharded, or None if every rank holds all of it."""
    spec: ShardSpec | None = vars(parameter).get(_FIELD)
    return spec


def is_sharded(parameter: Tensor, axis: Axis) -> bool:
    """Return whether the ranks of ``axis`` hold shards of ``parameter``."""
    spec = shard_spec(parameter)
    return spec is not None and spec.axis == axis


def take_shard(parameter: Tensor, spec: ShardSpec) -> nn.Parameter:
    """Return this rank's shard of the whole ``parameter`` as a parameter with ``spec``.

    The shard is a copy, so that the full tensor can be freed. On an axis of one rank it is all of
    the parameter and has no spec. Raises ValueError for a spec without a dimension.
    """
    if spec.dim is None:
        raise ValueError(f"a shard of axis {spec.axis.name} needs a dimension: give ShardSpec dim=")
    mine = parameter.detach().chunk(spec.shards, spec.dim)[spec.index]
    shard = nn.Parameter(mine.clone(memory_format=torch.contiguous_format))
    shard.requires_grad_(parameter.requires_grad)
    if spec.axis.size > 1:
        set_shard_spec(shard, spec)
    return shard
