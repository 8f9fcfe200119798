"""00-1: from a rank to its coordinates."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import product
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


def _coordinates(rank: int, sizes: Mapping[str, int], order: str) -> dict[str, int]:
    found = layout_of(sizes, order).coordinates(rank)
    return {axis: found[axis] for axis in order.split("-")}


def _some_ranks(rng: random.Random, order: str) -> list[Instance]:
    """Five ranks of one layout, the last rank among them."""
    sizes = sizes_of(rng, order)
    world = prod(sizes.values())
    ranks = [*rng.sample(range(1, world - 1), 4), world - 1]
    return [{"rank": rank, "sizes": sizes, "order": order} for rank in ranks]


def _as_coordinates(value: Any) -> dict[str, int]:
    if not isinstance(value, Mapping):
        raise NotRight(f"a dict from axis to coordinate is wanted, not {shown(value)}")
    says = "coordinates are whole numbers; rank // size gives one, rank / size does not"
    found = {axis: whole(where, says) for axis, where in value.items()}
    return dict(sorted(found.items(), key=lambda item: shown(item[0])))  # told in one order


# What people get wrong.


def _slowest_first(rank: int, sizes: Mapping[str, int], order: str) -> dict[str, int]:
    return coordinates_by_strides(rank, sizes, reversed_order(order))


def _only_modulo(rank: int, sizes: Mapping[str, int], order: str) -> dict[str, int]:
    return {axis: rank % sizes[axis] for axis in order.split("-")}


def _only_division(rank: int, sizes: Mapping[str, int], order: str) -> dict[str, int]:
    found = {}
    for axis in order.split("-"):
        found[axis] = rank
        rank //= sizes[axis]
    return found


def _order_of_dict(rank: int, sizes: Mapping[str, int], order: str) -> dict[str, int]:
    return coordinates_by_strides(rank, sizes, "-".join(sizes))


def _always_tp_dp_pp(rank: int, sizes: Mapping[str, int], order: str) -> dict[str, int]:
    first = [axis for axis in ("tp", "cp", "dp", "pp") if axis in sizes]
    return coordinates_by_strides(rank, sizes, "-".join(first))


def _from_one(rank: int, sizes: Mapping[str, int], order: str) -> dict[str, int]:
    return {axis: where + 1 for axis, where in coordinates_by_strides(rank, sizes, order).items()}


def _block_from_first(rank: int, sizes: Mapping[str, int], order: str) -> dict[str, int]:
    """Divides by the size of the axis itself where the stride of those before it belongs."""
    return {axis: rank // sizes[axis] % sizes[axis] for axis in order.split("-")}


def _true_division(rank: int, sizes: Mapping[str, int], order: str) -> dict[str, float]:
    found: dict[str, float] = {}
    left: float = rank
    for axis in order.split("-"):
        found[axis] = left % sizes[axis]
        left = left / sizes[axis]
    return found


def _floats(rank: int, sizes: Mapping[str, int], order: str) -> dict[str, float]:
    return {axis: float(at) for axis, at in coordinates_by_strides(rank, sizes, order).items()}


def _uses_up_sizes(rank: int, sizes: dict[str, int], order: str) -> dict[str, int]:
    """Right once: whoever calls it has no sizes left."""
    found = {}
    for axis in order.split("-"):
        rank, found[axis] = divmod(rank, sizes.pop(axis))
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
        Wrong(_uses_up_sizes, words="changed its argument sizes"),
        Wrong(_coordinates, words="this is what you are asked to write"),
        Wrong(_true_division, words="rank // size gives one, rank / size does not"),
        Wrong(_floats, words="coordinates are whole numbers"),
        Wrong(lambda rank, sizes, order: None, words="a dict from axis to coordinate is wanted"),
        Wrong(lambda rank, sizes, order: dict.fromkeys(sizes, 0), words=": expected "),
        Wrong(lambda rank, sizes, order: sizes["ep"], words="raised KeyError: 'ep'"),
    ),
    right=(coordinates_by_strides, _right_by_counting),
    stub=lambda rank, sizes, order: None,
    reference=_coordinates,
    refused=REFUSED,
    normal=_as_coordinates,
    drawn=(
        case("order tp-dp-pp", _some_ranks, TP_DP_PP),
        case("order tp-pp-dp", _some_ranks, TP_PP_DP),
        case("any order of three axes", _some_ranks, *OTHERS),
        case("four axes", _some_ranks, *FOUR),
    ),
)
