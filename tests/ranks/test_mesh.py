"""The mesh on real ranks: coordinates, members and working groups of every axis."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from course_lib import comm
from course_lib.layout import make_layout
from course_lib.mesh import make_mesh, sub_axis

MESHES = [
    (1, {}),
    (2, {"tp": 2}),
    (2, {"pp": 2, "order": "pp-tp-cp-dp"}),
    (4, {"tp": 2}),
    (4, {"tp": 2, "order": "dp-tp"}),
    (4, {"cp": 2, "pp": 2}),
    (4, {"cp": 2}),
    (4, {"ep": 2}),
    (8, {"tp": 2, "pp": 2}),
    (8, {"tp": 2, "pp": 2, "order": "pp-dp-cp-tp"}),
    (8, {"tp": 2, "cp": 2, "order": "cp-dp-tp"}),
    (8, {"cp": 2, "ep": 4}),
    (8, {"tp": 2, "ep": 2, "order": "tp-dp"}),
]


def describe(sizes):
    """Every axis of this rank: (name, coordinate, ranks, sum of the members' ranks)."""
    mesh = make_mesh(**sizes)
    rank = torch.tensor([mesh.rank])
    axes = {}
    for field in ("tp", "cp", "dp", "pp", "dp_cp", "ep", "edp", "world"):
        axis = getattr(mesh, field)
        summed = int(comm.all_reduce(rank, axis))
        passed = int(comm.exchange(rank, axis, axis.next, axis.previous))
        gathered = comm.all_gather(rank, axis).tolist()
        last = int(comm.broadcast(rank, axis, source=axis.size - 1))
        axes[field] = (axis.rank, axis.size, axis.ranks, summed, passed, last, gathered)
    return axes, mesh.sizes


@pytest.mark.parametrize(("n", "sizes"), MESHES, ids=str)
def test_every_axis_has_the_members_of_the_layout_and_its_group_works(worlds, n, sizes):
    layout = make_layout(n, **sizes)
    groups = {axis: layout.groups(axis) for axis in ("tp", "cp", "dp", "pp")}
    groups |= {"dp_cp": layout.groups("dp", "cp"), "world": [list(range(n))]}
    groups["ep"], groups["edp"] = layout.expert_groups()
    for rank, (axes, shown) in enumerate(worlds(n).run(describe, sizes)):
        assert shown == {axis: size for axis, size in layout.sizes.items() if size > 1}
        for axis, coordinate in layout.coordinates(rank).items():
            assert axes[axis][:2] == (coordinate, layout.sizes[axis])
        for axis, (coordinate, size, ranks, summed, passed, last, gathered) in axes.items():
            (mine,) = (group for group in groups[axis] if rank in group)
            assert list(ranks) == gathered == mine, f"axis {axis} of rank {rank}"
            assert ranks[coordinate] == rank
            assert size == len(mine)
            assert summed == sum(mine)
            assert passed == mine[coordinate - 1]
            assert last == mine[-1]


def test_groups_are_created_by_all_ranks_in_one_order(worlds):
    """On nccl another order hangs; every rank also calls for the groups that it is not in."""

    def created():
        asked = []
        real = dist.new_group

        def note(ranks, **alone):
            if not alone:  # the group of this rank alone is made without the others
                asked.append(list(ranks))
            return real(ranks, **alone)

        dist.new_group = note
        try:
            make_mesh(tp=2, pp=2, cp=2)
        finally:
            dist.new_group = real
        return asked

    results = worlds(8).run(created)
    assert results[1:] == results[:-1]
    assert len(results[0]) == 4 * 4, "tp, cp, pp and dp_cp have four groups each; dp has none"


def test_axes_of_one_rank_share_one_group_and_others_what_is_the_same(worlds):
    def shared():
        mesh = make_mesh()
        alone = {getattr(mesh, axis).group for axis in ("tp", "cp", "pp", "ep")}
        alone.add(sub_axis(mesh.dp, 1, "one").group)
        return (
            [dist.get_process_group_ranks(group) for group in alone],
            mesh.dp_cp is mesh.dp,
            mesh.edp is mesh.dp,
            mesh.world.group is dist.group.WORLD,
        )

    for rank, found in enumerate(worlds(2).run(shared)):
        assert found == ([[rank]], True, True, True)


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("sizes", [{"dp": 4}, {"tp": 4}, {"tp": 2, "pp": 2}], ids=str)
def test_raw_torch_on_an_axis_of_one_rank_sums_over_that_rank_alone(worlds, sizes, checked):
    def summed():
        mesh = make_mesh(**sizes)
        names = [name for name in ("tp", "cp", "dp", "pp", "ep") if getattr(mesh, name).size == 1]
        x = torch.full([3], float(1 + mesh.rank))
        for name in names:
            dist.all_reduce(x, group=getattr(mesh, name).group)
        return names, x.tolist()

    for rank, (names, x) in enumerate(worlds(4).run(summed, checked=checked)):
        assert len(names) == 5 - len(sizes)
        assert x == [1.0 + rank] * 3


def test_two_meshes_in_one_run_share_the_ledger(worlds):
    def both():
        first, second = make_mesh(tp=2), make_mesh(dp=2)
        comm.all_reduce(torch.ones(1), first.tp)
        comm.all_reduce(torch.ones(1), second.dp)
        return [one.axis for one in first.ledger.records], first.ledger is second.ledger

    assert worlds(2).run(both) == [(["tp", "dp"], True)] * 2


def test_without_a_process_group_the_world_is_this_process():
    assert not dist.is_initialized()
    mesh = make_mesh()
    assert (mesh.rank, mesh.sizes, mesh.world.size) == (0, {}, 1)
    x = torch.arange(4.0)
    assert torch.equal(comm.all_reduce(x, mesh.dp), x)
    assert mesh.ledger.records == []
    with pytest.raises(ValueError, match="tp=2"):
        make_mesh(tp=2)


def test_sizes_that_do_not_fit_the_world_are_refused_on_every_rank(worlds):
    def refused():
        try:
            make_mesh(tp=3)
        except ValueError as error:
            return str(error)

    assert all(
        "expected tp=3 x cp=1 x pp=1 = 3 to divide the world of 4 ranks" in said
        for said in worlds(4).run(refused)
    )
