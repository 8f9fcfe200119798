"""Checks of code that calls torch.distributed, by its signatures and documentation."""

from __future__ import annotations

import inspect
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from course_lib.interview.checks import Numbers
from course_lib.layout import rank_groups


def _parameter(function: Any, name: str) -> inspect.Parameter:
    return inspect.signature(function).parameters[name]


def new_group_calls() -> Numbers:
    """Calls of ``new_group`` per rank: every rank makes every group of 64 = 8 x 4 x 2."""
    groups = rank_groups("tp-pp-dp", 64, tp=8, pp=4, dp=2)
    alone = _parameter(dist.new_group, "use_local_synchronization").default
    return 3, 3 if alone else sum(len(groups[axis]) for axis in ("tp", "pp", "dp"))


def send_is_asynchronous() -> Numbers:
    """1 if ``dist.send`` accepts ``async_op``."""
    return 1, "async_op" in inspect.signature(dist.send).parameters


def all_reduce_is_asynchronous() -> Numbers:
    """1 if ``dist.all_reduce`` accepts ``async_op``."""
    return 1, "async_op" in inspect.signature(dist.all_reduce).parameters


def send_without_group() -> Numbers:
    """Ranks of the group that ``dist.send`` uses without ``group``, of 64 with pp=4."""
    assert _parameter(dist.send, "group").default is None
    default = "the default process group will be used" in " ".join(
        (dist.send.__doc__ or "").split()
    )
    return 4, 64 if default else 4


def destination() -> Numbers:
    """What rank 0 passes as ``dst``: the global rank of the next stage, or its coordinate."""
    text = " ".join((dist.send.__doc__ or "").split())
    assert "Destination rank on global process group (regardless of ``group`` argument)" in text
    global_rank = rank_groups("tp-pp-dp", 64, tp=8, pp=4, dp=2)["pp"][0][1]
    return global_rank, global_rank, 1


def wrap_policy() -> Numbers:
    """Arguments without a default of the policy; FSDP passes three."""
    parameters = inspect.signature(transformer_auto_wrap_policy).parameters.values()
    return 3, sum(one.default is inspect.Parameter.empty for one in parameters)


def full_shard() -> Numbers:
    """1 if FSDP is ZeRO-3: with FULL_SHARD, and with every other strategy."""
    return 1, "FULL_SHARD" in ShardingStrategy.__members__, len(ShardingStrategy) == 1
