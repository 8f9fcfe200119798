"""00-2: from coordinates to groups."""

from __future__ import annotations

import random
from collections.abc import Mapping
from math import prod
from typing import Any

from course_lib.grading.answers import NotRight, shown
from course_lib.grading.exercise import Function, Instance, Wrong
from course_lib.grading.lessons.lesson_00.layouts import (
    FOUR,
    OTHERS,
    REFUSED,
    TP_DP_PP,
    TP_PP_DP,
    case,
    coordinates_by_strides,
    layout_of,
    reversed_order,
    sizes_of,
    whole,
)
from course_lib.layout import rank_groups


def _groups(axis: str, sizes: Mapping[str, int], order: str) -> list[list[int]]:
    return layout_of(sizes, order).groups(axis)


def _each_axis(rng: random.Random, order: str) -> list[Instance]:
    sizes = sizes_of(rng, order)
    return [{"axis": axis, "sizes": sizes, "order": order} for axis in order.split("-")]


def _as_groups(value: Any) -> list[list[int]]:
    """Groups sorted by their first rank; the order of the ranks inside a group counts."""
    try:
        return sorted([whole(rank, "ranks are whole numbers") for rank in group] for group in value)
    except TypeError:
        raise NotRight(f"a list of lists of ranks is wanted, not {shown(value)}") from None


# What people get wrong.


def _other_axes(axis: str, sizes: Mapping[str, int], order: str) -> list[list[int]]:
    at = [coordinates_by_strides(rank, sizes, order)[axis] for rank in range(prod(sizes.values()))]
    return [[rank for rank, where in enumerate(at) if where == one] for one in range(sizes[axis])]


def _neighbours(axis: str, sizes: Mapping[str, int], order: str) -> list[list[int]]:
    world, size = prod(sizes.values()), sizes[axis]
    return [list(range(first, first + size)) for first in range(0, world, size)]


def _strided(axis: str, sizes: Mapping[str, int], order: str) -> list[list[int]]:
    world = prod(sizes.values())
    step = world // sizes[axis]
    return [list(range(first, world, step)) for first in range(step)]


def _groups_slowest_first(axis: str, sizes: Mapping[str, int], order: str) -> list[list[int]]:
    return _right_groups_by_stride(axis, sizes, reversed_order(order))


def _first_group(axis: str, sizes: Mapping[str, int], order: str) -> list[list[int]]:
    return _right_groups_by_stride(axis, sizes, order)[:1]


def _descending(axis: str, sizes: Mapping[str, int], order: str) -> list[list[int]]:
    return [group[::-1] for group in _right_groups_by_stride(axis, sizes, order)]


def _fixed_order(axis: str, sizes: Mapping[str, int], order: str) -> list[list[int]]:
    first = [name for name in ("tp", "cp", "dp", "pp") if name in sizes]
    return _right_groups_by_stride(axis, sizes, "-".join(first))


def _from_every_rank(axis: str, sizes: Mapping[str, int], order: str) -> list[list[int]]:
    """The note's line, for each rank."""
    before = order.split("-")[: order.split("-").index(axis)]
    stride, world = prod(sizes[name] for name in before), prod(sizes.values())
    return [[rank + step * stride for step in range(sizes[axis])] for rank in range(world)]


def _half_ranks(axis: str, sizes: Mapping[str, int], order: str) -> list[list[float]]:
    groups = _right_groups_by_stride(axis, sizes, order)
    return [[rank * 1.0 for rank in group] for group in groups]


def _right_groups_by_key(axis: str, sizes: Mapping[str, int], order: str) -> list[tuple[int, ...]]:
    """Ranks with the same other coordinates go into one bin."""
    bins: dict[tuple[int, ...], list[int]] = {}
    for rank in range(prod(sizes.values())):
        where = coordinates_by_strides(rank, sizes, order)
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
        Wrong(_from_every_rank, "A group starts at its first rank, not at every rank in it."),
        Wrong(_descending, "The ranks of a group stand in ascending order."),
        Wrong(_groups, words="this is what you are asked to write"),
        Wrong(
            lambda axis, sizes, order: rank_groups(order, **sizes)[axis],
            words="this is what you are asked to write",
        ),
        Wrong(_half_ranks, words="ranks are whole numbers"),
        Wrong(lambda axis, sizes, order: None, words="a list of lists of ranks is wanted"),
        Wrong(lambda axis, sizes, order: [[0, 1]], words=": expected "),
    ),
    right=(_right_groups_by_key, _right_groups_by_stride),
    stub=lambda axis, sizes, order: None,
    reference=_groups,
    refused=REFUSED,
    normal=_as_groups,
    drawn=(
        case("order tp-dp-pp", _each_axis, TP_DP_PP),
        case("order tp-pp-dp", _each_axis, TP_PP_DP),
        case("any order of three axes", _each_axis, *OTHERS),
        case("four axes", _each_axis, *FOUR),
    ),
)
