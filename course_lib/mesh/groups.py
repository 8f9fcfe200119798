"""The process groups behind the axes: the same ones, in the same order, on every rank."""

from __future__ import annotations

import torch.distributed as dist

from course_lib.layout import DEFAULT_ORDER, make_layout
from course_lib.mesh.axes import Axis, Mesh, RankContext, rank_context


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

    ``dp`` left out is what remains of the world. Without a launch and without an initialized
    process group the world is this process alone. Raises ValueError as
    :func:`course_lib.layout.make_layout` does, and RuntimeError in one of several ranks that have
    no process group yet.
    """
    context = rank_context()
    if context.world_size > 1 and not dist.is_initialized():
        raise RuntimeError(
            f"this rank is one of {context.world_size}, but no process group is initialized: call "
            "torch.distributed.init_process_group first (init=False leaves that to you)"
        )
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    layout = make_layout(world, order, tp=tp, cp=cp, dp=dp, pp=pp, ep=ep)
    context.group_of_one = _group_of_one(world, rank)

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
    whole = Axis("world", rank, world, everyone, dist.group.WORLD, context, [list(everyone)])
    context.ledger.groups["world"] = everyone
    return Mesh(
        layout, rank, **axes, dp_cp=dp_cp, ep=ep_axis, edp=edp_axis, world=whole, context=context
    )


def _group_of_one(world: int, rank: int) -> dist.ProcessGroup | None:
    """The group of all axes of size 1, so that ``group=axis.group`` never means the whole world.

    It is made here without the other ranks. Without a process group there is none.
    """
    if world == 1:
        return dist.group.WORLD
    return dist.new_group([rank], use_local_synchronization=True)


def _make_axis(name: str, groups: list[list[int]], rank: int, context: RankContext) -> Axis:
    """Create every group of an axis (all ranks must, in one order) and return this rank's.

    As Megatron-LM's parallel_state.initialize_model_parallel does. Each axis has groups of its
    own, even of the same ranks as another's: the calls of one group keep an order, in nccl each
    waits for the one before (github.com/meta-pytorch/torchrec/pull/4708).
    """
    if any(len(ranks) > 1 for ranks in groups):
        for instrument in context.instruments:
            instrument.making_groups(name, groups)
    mine: Axis | None = None
    with context.sockets.opening(name, size=max(map(len, groups))):
        for ranks in groups:
            group = dist.new_group(ranks) if len(ranks) > 1 else context.group_of_one
            if rank in ranks:
                place = ranks.index(rank)
                mine = Axis(name, place, len(ranks), tuple(ranks), group, context, groups)
    assert mine is not None, f"rank {rank} is in no group of axis {name}"
    context.ledger.groups[name] = mine.ranks
    return mine


def sub_axis(axis: Axis, size: int, name: str) -> Axis:
    """Split ``axis`` into groups of ``size`` consecutive ranks; return this rank's group.

    It makes groups, as :func:`make_mesh` does: call it on every rank of the world, once.
    Raises ValueError when ``size`` does not divide.
    """
    _check_run(axis, size)
    starts = range(0, axis.size, size)
    runs = [ranks[start : start + size] for ranks in axis.all_ranks for start in starts]
    return _make_axis(name, runs, axis.ranks[axis.rank], axis.context)


def across_axis(axis: Axis, size: int, name: str) -> Axis:
    """Return the ranks of ``axis`` with this rank's place in their groups of ``size`` ranks.

    Together with :func:`sub_axis`, which is called alike, it splits the axis into two dimensions:
    coordinate i * ``size`` + j is place j of group i.
    """
    _check_run(axis, size)
    places = [ranks[place::size] for ranks in axis.all_ranks for place in range(size)]
    return _make_axis(name, places, axis.ranks[axis.rank], axis.context)


def _check_run(axis: Axis, size: int) -> None:
    if size < 1 or axis.size % size:
        raise ValueError(
            f"expected size to divide the {axis.size} ranks of axis {axis.name}, got size={size}; "
            f"choose a divisor of {axis.size}"
        )
