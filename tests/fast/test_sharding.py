"""How many ranks hold the same gradient, by ShardSpec alone: against counting them one by one."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from course_lib import comm
from course_lib.comm.held import copies
from course_lib.mesh import Axis

TP, EP, EDP, PP = 4, 2, 3, 2
PLACES = list(product(range(PP), range(EDP), range(EP), range(TP)))  # by global rank


def axis(name, place, varies):
    """The axis of the ranks that differ from ``place`` in the coordinates ``varies`` alone."""
    ranks = tuple(
        rank
        for rank, other in enumerate(PLACES)
        if all(i in varies or a == b for i, (a, b) in enumerate(zip(place, other, strict=True)))
    )
    return Axis(name, ranks.index(PLACES.index(place)), len(ranks), ranks)


def axes_of(place):
    coordinates = {"pp": [0], "edp": [1], "ep": [2], "tp": [3], "data": [1, 2], "world": range(4)}
    return {name: axis(name, place, varies) for name, varies in coordinates.items()}


KINDS = {  # what a rank holds, by its place (pp, edp, ep, tp)
    "replicated": lambda pp, edp, ep, tp: (pp,),
    "sharded": lambda pp, edp, ep, tp: (pp, tp),
    "kv head of two": lambda pp, edp, ep, tp: (pp, tp // 2),
    "kv head of all": lambda pp, edp, ep, tp: (pp,),
    "expert": lambda pp, edp, ep, tp: (pp, ep),
    "sharded under ZeRO": lambda pp, edp, ep, tp: (pp, edp, ep, tp),
    "expert under ZeRO": lambda pp, edp, ep, tp: (pp, edp, ep),
}


def held(kind, place):
    axes, parameter = axes_of(place), nn.Parameter(torch.ones(3))
    tp, t = axes["tp"], place[3]
    groups = {"kv head of two": 2, "kv head of all": TP}
    if kind in groups:
        first = t - t % groups[kind]
        ranks = tp.ranks[first : first + groups[kind]]
        group = Axis("tp_kv", t - first, len(ranks), ranks)
        comm.set_shard_spec(parameter, comm.ShardSpec(tp, 0, group))
    elif "sharded" in kind:
        comm.set_shard_spec(parameter, comm.ShardSpec(tp, 0))
    elif "expert" in kind:
        comm.set_shard_spec(parameter, comm.ShardSpec(axes["ep"]))
    data = axes["edp" if "expert" in kind else "data"]
    zero = (data,) if "ZeRO" in kind else ()
    return comm.Held(parameter, torch.full((3,), 2.0), (*zero, axes["pp"]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", [["world"], ["tp", "data", "pp"], ["tp", "ep", "edp", "pp"]])
def test_copies_are_the_ranks_that_hold_the_same(kind, names):
    for place in PLACES:
        axes = axes_of(place)
        same = sum(KINDS[kind](*other) == KINDS[kind](*place) for other in PLACES)
        assert copies(held(kind, place), [axes[name] for name in names]) == same


@pytest.mark.parametrize(
    ("kind", "names", "missing"),
    [
        ("replicated", ["tp"], "pp"),
        ("sharded", ["pp", "data"], "tp"),
        ("kv head of two", ["pp"], "tp"),
        ("expert", ["pp", "tp"], "ep"),
        ("expert", ["pp", "edp"], "ep"),
        ("sharded under ZeRO", ["tp", "pp", "ep"], "data"),
        ("expert under ZeRO", ["ep", "pp"], "edp"),
    ],
)
def test_a_norm_without_an_axis_of_shards_is_refused(kind, names, missing):
    axes = axes_of(PLACES[5])
    with pytest.raises(ValueError, match=f"sharded over axis {missing}, .* over axes: {names[0]}"):
        comm.grad_norm([held(kind, PLACES[5])], [axes[name] for name in names])


def test_a_head_that_all_ranks_hold_needs_no_sum_over_them():
    axes = axes_of(PLACES[5])
    assert copies(held("kv head of all", PLACES[5]), [axes["pp"]]) == 1


def test_a_spec_is_read_where_it_was_set_and_a_shard_is_a_copy():
    alone, two = Axis("tp", 0, 1, (0,)), Axis("tp", 1, 2, (0, 1))
    whole = nn.Parameter(torch.arange(6.0).view(3, 2))
    assert comm.shard_spec(whole) is None
    shard = comm.take_shard(whole, comm.ShardSpec(two, 1))
    assert shard.tolist() == [[1.0], [3.0], [5.0]]
    assert comm.shard_spec(shard) == comm.ShardSpec(two, 1)
    assert comm.is_sharded(shard, two)
    assert not comm.is_sharded(shard, alone)
    shard.data.zero_()
    assert whole.detach().sum() == 15
    assert comm.shard_spec(comm.take_shard(whole, comm.ShardSpec(alone, 0))) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_norm_of_half_precision_gradients_is_exact(dtype):
    """Neither rounded to 8 bits nor above the largest float16."""
    gradient = torch.full((3,), 60_000.0, dtype=dtype)
    norm = comm.grad_norm([comm.Held(torch.nn.Parameter(torch.ones(3)), gradient, ())])
    assert float(norm) == pytest.approx(float(gradient.double().norm()), rel=1e-6)


@pytest.mark.parametrize("size", [1e-7, 1e-5, 1.0])
def test_clipping_is_torchs_to_the_last_digit(size):
    """Where the norm is as small as the 1e-6 that is added to it, too."""
    ours, theirs = (torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    for parameter in (ours, theirs):
        parameter.grad = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64) * size
    norm = comm.clip_grad_norm(comm.held_gradients([ours]), [], 2 * size)
    assert float(norm) == float(torch.nn.utils.clip_grad_norm_([theirs], 2 * size))
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-15, atol=0)
