"""Which ranks belong together: the published layouts literally, then properties for any layout."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.layout import AXES, drawing, make_layout, rank_groups


def as_sets(groups: list[list[int]]) -> set[frozenset[int]]:
    assert all(len(set(group)) == len(group) for group in groups)
    result = {frozenset(group) for group in groups}
    assert len(result) == len(groups), "a group appears twice"
    return result


def every(step: int, size: int, firsts: list[int]) -> set[frozenset[int]]:
    return {frozenset(first + step * i for i in range(size)) for first in firsts}


def test_512_gpus_tp_pp_dp():
    """The 3D note: tp = rank % 8, pp = rank // 8 % 8, dp = rank // 64."""
    groups = rank_groups("tp-pp-dp", 512, tp=8, pp=8, dp=8)
    assert groups["tp"][0] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert groups["pp"][0] == [0, 8, 16, 24, 32, 40, 48, 56]
    assert groups["dp"][0] == [0, 64, 128, 192, 256, 320, 384, 448]
    assert as_sets(groups["tp"]) == every(1, 8, list(range(0, 512, 8)))
    assert as_sets(groups["pp"]) == every(8, 8, [64 * d + t for d in range(8) for t in range(8)])
    assert as_sets(groups["dp"]) == every(64, 8, list(range(64)))
    assert as_sets(groups["mp"]) == every(1, 64, list(range(0, 512, 64)))


def test_64_gpus_tp_pp_dp():
    """The process-group note: 64 = tp 8 x pp 4 x dp 2.

    The note writes ``[rank + i * 8 for i in range(4)]``, which holds for a first rank only; the
    sets below follow its coordinates tp = rank % 8, pp = rank // 8 % 4, dp = rank // 32.
    """
    groups = rank_groups("tp-pp-dp", 64, tp=8, pp=4, dp=2)
    assert as_sets(groups["tp"]) == every(1, 8, list(range(0, 64, 8)))
    assert as_sets(groups["pp"]) == every(8, 4, [*range(8), *range(32, 40)])
    assert as_sets(groups["dp"]) == every(32, 2, list(range(32)))


def test_16_gpus_tp_dp_pp():
    """Two machines of 8: the groups as the note lists them, g0 to g15."""
    groups = rank_groups("tp-dp-pp", 16, tp=2, dp=2, pp=4)
    mp = [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]
    tp = [[0, 1], [4, 5], [8, 9], [12, 13], [2, 3], [6, 7], [10, 11], [14, 15]]
    pp = [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    dp = [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    for name, listed in {"mp": mp, "tp": tp, "pp": pp, "dp": dp}.items():
        assert as_sets(groups[name]) == as_sets(listed), name
        assert groups[name] == sorted(listed), f"{name}: not sorted by first rank"
    assert groups["cp"] == [[rank] for rank in range(16)]


sizes = st.fixed_dictionaries({axis: st.integers(1, 5) for axis in AXES})
orders = st.permutations(AXES)


@given(sizes, orders)
def test_every_rank_is_in_one_group_of_each_axis(sizes, order):
    groups = rank_groups("-".join(order), **sizes)
    world = int(np.prod(list(sizes.values())))
    expected = {**sizes, "mp": sizes["tp"] * sizes["pp"], "dp_cp": sizes["dp"] * sizes["cp"]}
    assert groups.keys() == expected.keys()
    for name, size in expected.items():
        assert sorted(itertools.chain(*groups[name])) == list(range(world))
        assert all(len(group) == size and group == sorted(group) for group in groups[name])
        assert groups[name] == sorted(groups[name])


@given(sizes, orders)
def test_groups_are_the_transposes_of_a_reshaped_range(sizes, order):
    """The picture in numpy: ranks in an array whose last axis is the fastest."""
    ranks = np.arange(np.prod(list(sizes.values()))).reshape([sizes[a] for a in reversed(order)])
    groups = rank_groups("-".join(order), **sizes)
    for axis in AXES:
        last = np.moveaxis(ranks, len(order) - 1 - order.index(axis), -1)
        assert as_sets(groups[axis]) == as_sets(last.reshape(-1, sizes[axis]).tolist())
    where = [len(order) - 1 - order.index(axis) for axis in ("tp", "pp")]
    both = np.moveaxis(ranks, where, [-2, -1]).reshape(-1, sizes["tp"] * sizes["pp"])
    assert as_sets(groups["mp"]) == as_sets(both.tolist())


@given(sizes, orders)
def test_coordinates_name_one_rank_and_agree_with_the_groups(sizes, order):
    layout = make_layout(order="-".join(order), **sizes)
    coordinates = [layout.coordinates(rank) for rank in range(layout.world)]
    assert len({tuple(sorted(one.items())) for one in coordinates}) == layout.world
    for axis in AXES:
        for group in layout.groups(axis):
            assert [coordinates[rank][axis] for rank in group] == list(range(sizes[axis]))
            others = [{**coordinates[rank], axis: None} for rank in group]
            assert all(other == others[0] for other in others)


@given(sizes, st.data())
def test_expert_groups_divide_dp_cp(sizes, data):
    ranks = sizes["dp"] * sizes["cp"]
    ep = data.draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    layout = make_layout(**sizes, ep=ep)
    ep_groups, edp_groups = layout.expert_groups()
    everyone = list(range(layout.world))
    for found, size in ((ep_groups, ep), (edp_groups, ranks // ep)):
        assert sorted(itertools.chain(*found)) == everyone
        assert all(len(group) == size for group in found)
    for group in layout.groups("dp", "cp"):
        inside = [one for one in ep_groups if set(one) <= set(group)]
        assert len(inside) == ranks // ep, "an ep group leaves its dp_cp group"
        for edp in (one for one in edp_groups if set(one) <= set(group)):
            assert all(len(set(edp) & set(one)) == 1 for one in inside)


def test_ep_is_no_factor_of_the_world():
    groups = rank_groups(dp=4, cp=2, ep=4)
    assert groups["ep"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups["edp"] == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_an_absent_axis_of_size_1_and_an_omitted_dp():
    layout = make_layout(16, "tp-dp-pp", tp=2, pp=4)
    assert dict(layout.sizes) == {"tp": 2, "dp": 2, "pp": 4, "cp": 1}
    assert layout.order == ("tp", "dp", "pp", "cp")


def test_16384_ranks_quickly():
    start = time.perf_counter()
    groups = rank_groups("tp-cp-dp-pp", 16_384, tp=8, cp=16, dp=8, pp=16)
    assert time.perf_counter() - start < 5  # 0.01 s here; a quadratic way takes a minute
    assert {name: len(found) for name, found in groups.items()} == {
        "tp": 2048, "cp": 1024, "dp": 2048, "pp": 1024, "mp": 128, "dp_cp": 128,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"world": 16, "tp": 3}, ["16", "tp=3", "to divide the world"]),
        ({"world": 16, "tp": 2, "dp": 4}, ["tp=2", "dp=4", "8", "16"]),
        ({"tp": 0}, ["tp", "0"]),
        ({"dp": -2}, ["dp", "-2"]),
        ({"pp": 2.0}, ["pp", "2.0"]),
        ({"world": 0}, ["world", "0"]),
        ({"world": "16"}, ["world", "'16'"]),
        ({"order": "tp-xp"}, ["'xp'", "tp, cp, dp, pp"]),
        ({"order": ""}, ["''"]),
        ({"order": "tp-dp-tp"}, ["tp", "more than once"]),
        ({"order": "tp-dp", "pp": 2}, ["expected axis pp of size 2", "tp-dp"]),
        ({"tp": True}, ["for tp, got tp=True"]),
        ({"dp": 4, "ep": 3}, ["ep=3", "dp x cp = 4"]),
    ],
)
def test_errors_name_axis_and_value(arguments, words):
    with pytest.raises(ValueError) as caught:
        rank_groups(**arguments)
    assert [word for word in words if word not in str(caught.value)] == []


def test_rank_and_axis_out_of_range():
    layout = make_layout(8, tp=2)
    with pytest.raises(ValueError, match="rank 8"):
        layout.coordinates(8)
    with pytest.raises(ValueError, match="ep"):
        layout.groups("ep")


def test_drawing_shows_nodes_coordinates_and_groups():
    text = drawing(make_layout(16, "tp-dp-pp", tp=2, dp=2, pp=4))
    lines = text.splitlines()
    second = lines.index("node 1")
    assert lines[second + 1].split() == ["rank", *map(str, range(8, 16))]
    assert lines[second + 2].split() == ["tp", *"01010101"]
    assert lines[second + 4].split() == ["pp", *"22223333"]
    assert "node 2" not in text
    assert "  pp  4 groups of 4, across nodes" in lines
    assert "  tp  8 groups of 2, each inside one node" in lines
    assert "      [0 4 8 12] [1 5 9 13] [2 6 10 14] [3 7 11 15]" in lines


@given(sizes, orders, st.integers(1, 20))
def test_drawing_keeps_to_its_width(sizes, order, per_node):
    text = drawing(make_layout(order="-".join(order), **sizes), per_node)
    assert max(map(len, text.splitlines())) <= 80


def test_drawing_of_a_large_world_is_cut_and_says_so():
    text = drawing(make_layout(16_384, tp=8, cp=16, pp=16))
    assert "node 7" in text
    assert "node 8" not in text
    assert "... and 2,040 more nodes, not drawn" in text
    assert "... and 2,041 more groups" in text
    assert len(text.splitlines()) < 100
    one_node = drawing(make_layout(16_384, tp=8, cp=16, pp=16), per_node=16_384)
    assert "... and 16,320 more ranks" in one_node
    assert len(one_node.splitlines()) < 100
    with pytest.raises(ValueError, match="per_node to be 1 or more, got per_node=0"):
        drawing(make_layout(2), per_node=0)


def test_drawing_counts_groups_that_cross_nodes():
    assert "6 groups of 2, 2 of them across nodes" in drawing(make_layout(12, tp=2), per_node=3)
