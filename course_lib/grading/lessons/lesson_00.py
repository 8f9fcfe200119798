"""Lesson 00: from a rank to its coordinates, and from coordinates to groups. No ranks needed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import product
from math import prod
from typing import Any

from course_lib.grading.answers import NotRight, shown
from course_lib.grading.exercise import Case, Function, Instance, Wrong
from course_lib.layout import Layout, make_layout, rank_groups

REFUSED = tuple(
    f"course_lib.layout:{name}"
    for name in ("make_layout", "rank_groups", "Layout.coordinates", "Layout.groups")
)
TP_DP_PP, TP_PP_DP = "tp-dp-pp", "tp-pp-dp"  # the two orders that frameworks use


def _layout(sizes: Mapping[str, int], order: str) -> Layout:
    return make_layout(None, order, **dict(sizes))


def _coordinates(rank: int, sizes: Mapping[str, int], order: str) -> dict[str, int]:
    found = _layout(sizes, order).coordinates(rank)
    return {axis: found[axis] for axis in order.split("-")}


def _groups(axis: str, sizes: Mapping[str, int], order: str) -> list[list[int]]:
    return _layout(sizes, order).groups(axis)


def _reversed(order: str) -> str:
    return "-".join(reversed(order.split("-")))


def _sizes(rng: random.Random, order: str) -> dict[str, int]:
    """Sizes of 2, 3 or 4, not all equal: equal ones hide a mixed-up axis."""
    axes = sorted(order.split("-"))
    while len(set(sizes := [rng.choice((2, 3, 4)) for _ in axes])) == 1:
        pass
    return dict(zip(axes, sizes, strict=True))


def _some_ranks(rng: random.Random, order: str) -> list[Instance]:
    """Five ranks of one layout, the last rank among them."""
    sizes = _sizes(rng, order)
    world = prod(sizes.values())
    ranks = [*rng.sample(range(1, world - 1), 4), world - 1]
    return [{"rank": rank, "sizes": sizes, "order": order} for rank in ranks]


def _each_axis(rng: random.Random, order: str) -> list[Instance]:
    sizes = _sizes(rng, order)
    return [{"axis": axis, "sizes": sizes, "order": order} for axis in order.split("-")]


def _case(title: str, draw: Any, *orders: str) -> Case:
    return Case(title, lambda rng: draw(rng, rng.choice(orders)))


OTHERS = ("pp-tp-dp", "dp-pp-tp", "pp-dp-tp", "dp-tp-pp")
FOUR = ("tp-cp-dp-pp", "cp-tp-pp-dp", "pp-dp-cp-tp")


def _as_coordinates(value: Any) -> dict[str, int]:
    if not isinstance(value, Mapping):
        raise NotRight(f"a dict from axis to coordinate is wanted, not {shown(value)}")
    return dict(value)


def _as_groups(value: Any) -> list[list[int]]:
    """Groups sorted by their first rank; the order of the ranks inside a group counts."""
    try:
        groups = [list(map(int, group)) for group in value]
    except (TypeError, ValueError):
        raise NotRight(f"a list of lists of ranks is wanted, not {shown(value)}") from None
    return sorted(groups)


# What people get wrong, first in coordinates.


def _slowest_first(rank: int, sizes: Mapping[str, int], order: str) -> dict[str, int]:
    return _right_by_strides(rank, sizes, _reversed(order))


def _only_modulo(rank: int, sizes: Mapping[str, int], order: str) -> dict[str, int]:
    return {axis: rank % sizes[axis] for axis in order.split("-")}


def _only_division(rank: int, sizes: Mapping[str, int], order: str) -> dict[str, int]:
    found = {}
    for axis in order.split("-"):
        found[axis] = rank
        rank //= sizes[axis]
    return found


def _order_of_dict(rank: int, sizes: Mapping[str, int], order: str) -> dict[str, int]:
    return _right_by_strides(rank, sizes, "-".join(sizes))


def _always_tp_dp_pp(rank: int, sizes: Mapping[str, int], order: str) -> dict[str, int]:
    first = [axis for axis in ("tp", "cp", "dp", "pp") if axis in sizes]
    return _right_by_strides(rank, sizes, "-".join(first))


def _from_one(rank: int, sizes: Mapping[str, int], order: str) -> dict[str, int]:
    return {axis: where + 1 for axis, where in _right_by_strides(rank, sizes, order).items()}


def _block_from_first(rank: int, sizes: Mapping[str, int], order: str) -> dict[str, int]:
    """Divides by the size of the axis itself where the stride of those before it belongs."""
    return {axis: rank // sizes[axis] % sizes[axis] for axis in order.split("-")}


def _right_by_strides(rank: int, sizes: Mapping[str, int], order: str) -> dict[str, int]:
    found, stride = {}, 1
    for axis in order.split("-"):
        found[axis] = rank // stride % sizes[axis]
        stride *= sizes[axis]
    return found


def _right_by_counting(rank: int, sizes: Mapping[str, int], order: str) -> dict[str, int]:
    """Goes through all coordinates, the last axis of a product being the fastest."""
    axes = order.split("-")[::-1]
    every = list(product(*(range(sizes[axis]) for axis in axes)))
    return dict(zip(axes, every[rank], strict=True))


COORDINATES = Function(
    id="00-1",
    title="from a rank to its coordinates",
    names=("coordinates",),
    hints=(
        "Write the ranks 0..7 down for sizes tp=2, dp=4 and the order tp-dp. Which axis changes "
        "from each rank to the next?",
        "A rank is a number whose digits are the coordinates, each axis with its own base: the "
        "first-named axis is the last digit.",
        "Go through order.split('-'): divmod(rank, sizes[axis]) gives what is left of the rank, "
        "and the coordinate on that axis.",
    ),
    wrong=(
        Wrong(_slowest_first, "The order is read backwards: the first-named axis is the fastest."),
        Wrong(_only_modulo, "The rank is never divided: each axis takes its digit off the rank."),
        Wrong(_only_division, "The remainder is missing: a coordinate is below its axis's size."),
        Wrong(_order_of_dict, "The axes are taken in the order of sizes: order says otherwise."),
        Wrong(_always_tp_dp_pp, "The argument order is not used: tp is not always the fastest."),
        Wrong(_from_one, "Coordinates count from 0, as ranks do."),
        Wrong(
            _block_from_first,
            "The rank is divided by the size of the axis itself: divide by the product of the "
            "sizes before it.",
        ),
        Wrong(_coordinates, words="this is what you are asked to write"),
        Wrong(lambda rank, sizes, order: None, words="a dict from axis to coordinate is wanted"),
        Wrong(lambda rank, sizes, order: dict.fromkeys(sizes, 0), words="right is"),
        Wrong(lambda rank, sizes, order: sizes["ep"], words="raised KeyError: 'ep'"),
    ),
    right=(_right_by_strides, _right_by_counting),
    stub=lambda rank, sizes, order: None,
    reference=_coordinates,
    refused=REFUSED,
    normal=_as_coordinates,
    drawn=(
        _case("order tp-dp-pp", _some_ranks, TP_DP_PP),
        _case("order tp-pp-dp", _some_ranks, TP_PP_DP),
        _case("any order of three axes", _some_ranks, *OTHERS),
        _case("four axes", _some_ranks, *FOUR),
    ),
)


# And in groups.


def _other_axes(axis: str, sizes: Mapping[str, int], order: str) -> list[list[int]]:
    at = [_right_by_strides(rank, sizes, order)[axis] for rank in range(prod(sizes.values()))]
    return [[rank for rank, where in enumerate(at) if where == one] for one in range(sizes[axis])]


def _neighbours(axis: str, sizes: Mapping[str, int], order: str) -> list[list[int]]:
    world, size = prod(sizes.values()), sizes[axis]
    return [list(range(first, first + size)) for first in range(0, world, size)]


def _strided(axis: str, sizes: Mapping[str, int], order: str) -> list[list[int]]:
    world = prod(sizes.values())
    step = world // sizes[axis]
    return [list(range(first, world, step)) for first in range(step)]


def _groups_slowest_first(axis: str, sizes: Mapping[str, int], order: str) -> list[list[int]]:
    return _right_groups_by_stride(axis, sizes, _reversed(order))


def _first_group(axis: str, sizes: Mapping[str, int], order: str) -> list[list[int]]:
    return _right_groups_by_stride(axis, sizes, order)[:1]


def _descending(axis: str, sizes: Mapping[str, int], order: str) -> list[list[int]]:
    return [group[::-1] for group in _right_groups_by_stride(axis, sizes, order)]


def _fixed_order(axis: str, sizes: Mapping[str, int], order: str) -> list[list[int]]:
    first = [name for name in ("tp", "cp", "dp", "pp") if name in sizes]
    return _right_groups_by_stride(axis, sizes, "-".join(first))


def _right_groups_by_key(axis: str, sizes: Mapping[str, int], order: str) -> list[tuple[int, ...]]:
    """Ranks with the same other coordinates go into one bin."""
    bins: dict[tuple[int, ...], list[int]] = {}
    for rank in range(prod(sizes.values())):
        where = _right_by_strides(rank, sizes, order)
        bins.setdefault(tuple(where[name] for name in where if name != axis), []).append(rank)
    return [tuple(ranks) for ranks in bins.values()][::-1]


def _right_groups_by_stride(axis: str, sizes: Mapping[str, int], order: str) -> list[list[int]]:
    before = order.split("-")[: order.split("-").index(axis)]
    stride, world = prod(sizes[name] for name in before), prod(sizes.values())
    firsts = [rank for rank in range(world) if rank // stride % sizes[axis] == 0]
    return [[first + step * stride for step in range(sizes[axis])] for first in firsts]


GROUPS = Function(
    id="00-2",
    title="from coordinates to groups",
    names=("groups",),
    hints=(
        "Two ranks are in one group of an axis when they differ on that axis and on no other. "
        "Which ranks share rank 0's group of dp?",
        "Compute the coordinates of every rank; ranks whose other coordinates agree belong "
        "together.",
        "Use a dict from the tuple of the other coordinates to a list of ranks: go through the "
        "ranks in ascending order, and the lists are the groups.",
    ),
    wrong=(
        Wrong(
            _other_axes,
            "These ranks agree on the axis and differ on the others: it is the other way round.",
        ),
        Wrong(
            _groups_slowest_first, "The order is read backwards: the first-named axis is fastest."
        ),
        Wrong(_neighbours, "Only the fastest axis has groups of consecutive ranks."),
        Wrong(_strided, "Only the slowest axis has groups with the largest stride."),
        Wrong(_fixed_order, "The argument order is not used: tp is not always the fastest."),
        Wrong(_first_group, "This is only the group of rank 0: all groups of the axis are wanted."),
        Wrong(_descending, "The ranks of a group stand in ascending order."),
        Wrong(_groups, words="this is what you are asked to write"),
        Wrong(
            lambda axis, sizes, order: rank_groups(order, **sizes)[axis],
            words="this is what you are asked to write",
        ),
        Wrong(lambda axis, sizes, order: None, words="a list of lists of ranks is wanted"),
        Wrong(lambda axis, sizes, order: [[0, 1]], words="right is"),
    ),
    right=(_right_groups_by_key, _right_groups_by_stride),
    stub=lambda axis, sizes, order: None,
    reference=_groups,
    refused=REFUSED,
    normal=_as_groups,
    drawn=(
        _case("order tp-dp-pp", _each_axis, TP_DP_PP),
        _case("order tp-pp-dp", _each_axis, TP_PP_DP),
        _case("any order of three axes", _each_axis, *OTHERS),
        _case("four axes", _each_axis, *FOUR),
    ),
)

EXERCISES = (COORDINATES, GROUPS)
