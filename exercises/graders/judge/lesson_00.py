"""Lesson 00, from a rank to its coordinates and from coordinates to groups: no ranks are needed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from course_lib.grading.answers import NotRight, shown
from course_lib.grading.exercise import Case, Function, Instance, Wrong

REFUSED = tuple(
    f"course_lib.layout:{name}"
    for name in ("make_layout", "rank_groups", "Layout.coordinates", "Layout.groups")
)
USUAL = ("tp-dp-pp",), ("tp-pp-dp",), ("pp-tp-dp", "dp-pp-tp", "pp-dp-tp", "dp-tp-pp")
FOUR = ("tp-cp-dp-pp", "cp-tp-pp-dp", "pp-dp-cp-tp")
NAMES = ("ep", "expert", "nodes", "x", "replicas", "d2", "tp", "stage")
Sizes = Mapping[str, int]


def _sizes(rng: random.Random, order: str) -> dict[str, int]:
    """Draw sizes that are not all equal, because equal ones hide an exchanged axis."""
    axes = sorted(order.split("-"))
    while len(set(sizes := [rng.choice((2, 3, 4)) for _ in axes])) == 1:
        pass
    return dict(zip(axes, sizes, strict=True))


def _cases(some: Callable[[random.Random, str, dict[str, int]], list[Instance]]) -> Any:
    def usual(orders: tuple[str, ...]) -> Callable[[random.Random], list[Instance]]:
        def draw(rng: random.Random) -> list[Instance]:
            order = rng.choice(orders)
            return some(rng, order, _sizes(rng, order))

        return draw

    def others(rng: random.Random) -> list[Instance]:
        found = []
        for many in (1, 2, 5):
            axes = rng.sample(NAMES, many)
            sizes = [5, 1, 3, 1, 2][:many]
            rng.shuffle(sizes)
            given = dict(zip(axes, sizes, strict=True))
            found += some(rng, "-".join(rng.sample(axes, many)), given)
        return found

    return (
        Case("order tp-dp-pp", usual(USUAL[0])),
        Case("order tp-pp-dp", usual(USUAL[1])),
        Case("any order of three axes", usual(USUAL[2])),
        Case("four axes", usual(FOUR)),
        Case("axes with other names, one to five of them, also of size 1", others),
    )


def _reversed(order: str) -> str:
    return "-".join(reversed(order.split("-")))


def _fixed(sizes: Sizes, order: str) -> str:
    """Return the axes as if tp were always the fastest."""
    first = [axis for axis in ("tp", "cp", "dp", "pp") if axis in sizes]
    return "-".join([*first, *(axis for axis in order.split("-") if axis not in first)])


def _whole(value: Any, what: str) -> int:
    """Return ``value`` as an int; 1.0 is none, because it fails later as an index."""
    try:
        return (None if isinstance(value, bool) else value).__index__()  # type: ignore[union-attr]
    except (AttributeError, TypeError):
        raise NotRight(f"{what}, got {shown(value)}") from None


# --- 00-1 ----------------------------------------------------------------------------------------


def _coordinates(rank: int, sizes: Sizes, order: str) -> dict[str, int]:
    found, stride = {}, 1
    for axis in order.split("-"):
        found[axis] = rank // stride % sizes[axis]
        stride *= sizes[axis]
    return found


def _some_ranks(rng: random.Random, order: str, sizes: dict[str, int]) -> list[Instance]:
    """Rank 0, the last rank and a few between them."""
    world = prod(sizes.values())
    between = rng.sample(range(1, world - 1), min(4, world - 2))
    return [{"rank": rank, "sizes": sizes, "order": order} for rank in (0, *between, world - 1)]


def _as_coordinates(value: Any) -> dict[str, int]:
    if not isinstance(value, Mapping):
        raise NotRight(f"expected a dict from axis to coordinate, got {shown(value)}")
    says = "expected coordinates that are whole numbers, by rank // size and not rank / size"
    found = {axis: _whole(where, says) for axis, where in value.items()}
    return dict(sorted(found.items(), key=lambda item: shown(item[0])))  # shown in one order


def _only_division(rank: int, sizes: Sizes, order: str) -> dict[str, int]:
    found = {}
    for axis in order.split("-"):
        found[axis] = rank
        rank //= sizes[axis]
    return found


COORDINATES = Function(
    id="00-1",
    title="from a rank to its coordinates",
    names=("coordinates",),
    mistakes=(
        Wrong(
            lambda rank, sizes, order: _coordinates(rank, sizes, _reversed(order)),
            "The order is read backwards: the first-named axis is the fastest.",
        ),
        Wrong(
            lambda rank, sizes, order: {axis: rank % sizes[axis] for axis in order.split("-")},
            "The rank is never divided: take each coordinate from what is left of the rank.",
        ),
        Wrong(
            _only_division, "The remainder is missing: a coordinate is below the size of its axis."
        ),
        Wrong(
            lambda rank, sizes, order: _coordinates(rank, sizes, "-".join(sizes)),
            "The axes are taken in the order of sizes: order says otherwise.",
        ),
        Wrong(
            lambda rank, sizes, order: _coordinates(rank, sizes, _fixed(sizes, order)),
            "The argument order is not used: tp is not always the fastest.",
        ),
        Wrong(
            lambda rank, sizes, order: {
                axis: where + 1 for axis, where in _coordinates(rank, sizes, order).items()
            },
            "Coordinates count from 0, as ranks do.",
        ),
        Wrong(
            lambda rank, sizes, order: {
                axis: rank // sizes[axis] % sizes[axis] for axis in order.split("-")
            },
            "The rank is divided by the size of the axis itself: divide by the product of the "
            "sizes before it.",
        ),
    ),
    reference=_coordinates,
    refused=REFUSED,
    normal=_as_coordinates,
    drawn=_cases(_some_ranks),
)


# --- 00-2 ----------------------------------------------------------------------------------------


def _groups(axis: str, sizes: Sizes, order: str) -> list[list[int]]:
    before = order.split("-")[: order.split("-").index(axis)]
    stride, world = prod(sizes[name] for name in before), prod(sizes.values())
    firsts = [rank for rank in range(world) if rank // stride % sizes[axis] == 0]
    return [[first + step * stride for step in range(sizes[axis])] for first in firsts]


def _each_axis(rng: random.Random, order: str, sizes: dict[str, int]) -> list[Instance]:
    return [{"axis": axis, "sizes": sizes, "order": order} for axis in order.split("-")]


def _as_groups(value: Any) -> list[list[int]]:
    """Return the groups sorted by their first rank; the order inside a group counts."""
    try:
        says = "expected ranks that are whole numbers"
        groups = sorted([_whole(rank, says) for rank in group] for group in value)
    except TypeError:
        raise NotRight(f"expected a list of lists of ranks, got {shown(value)}") from None
    rank, times = max(
        Counter(each for group in groups for each in group).items(),
        key=lambda each: each[1],
        default=(0, 0),
    )
    if times > 1:
        raise NotRight(
            f"expected every rank in exactly one group, got rank {rank} {times} times: "
            f"{shown(groups)}"
        )
    return groups


def _of_rank(rank: int, axis: str, sizes: Sizes, order: str) -> list[int]:
    return next(group for group in _groups(axis, sizes, order) if rank in group)


def _other_axes(axis: str, sizes: Sizes, order: str) -> list[list[int]]:
    at = [_coordinates(rank, sizes, order)[axis] for rank in range(prod(sizes.values()))]
    return [[rank for rank, where in enumerate(at) if where == one] for one in range(sizes[axis])]


def _neighbors(axis: str, sizes: Sizes, order: str) -> list[list[int]]:
    world, size = prod(sizes.values()), sizes[axis]
    return [list(range(first, first + size)) for first in range(0, world, size)]


def _strided(axis: str, sizes: Sizes, order: str) -> list[list[int]]:
    world = prod(sizes.values())
    step = world // sizes[axis]
    return [list(range(first, world, step)) for first in range(step)]


def _from_every_rank(axis: str, sizes: Sizes, order: str) -> list[list[int]]:
    """The note's line, for each rank."""
    before = order.split("-")[: order.split("-").index(axis)]
    stride, world = prod(sizes[name] for name in before), prod(sizes.values())
    return [[rank + step * stride for step in range(sizes[axis])] for rank in range(world)]


GROUPS = Function(
    id="00-2",
    title="from coordinates to groups",
    names=("groups",),
    mistakes=(
        Wrong(
            _other_axes,
            "These ranks agree on the axis and differ on the others: it is the other way round.",
        ),
        Wrong(
            lambda axis, sizes, order: _groups(axis, sizes, _reversed(order)),
            "The order is read backwards: the first-named axis is the fastest.",
        ),
        Wrong(_neighbors, "Only the fastest axis has groups of consecutive ranks."),
        Wrong(_strided, "Only the slowest axis has groups with the largest stride."),
        Wrong(
            lambda axis, sizes, order: _groups(axis, sizes, _fixed(sizes, order)),
            "The argument order is not used: tp is not always the fastest.",
        ),
        Wrong(
            lambda axis, sizes, order: _groups(axis, sizes, order)[:1],
            "This is only the group of rank 0: return all groups of the axis.",
        ),
        Wrong(
            lambda axis, sizes, order: [
                group for group in _groups(axis, sizes, order) if len(group) > 1
            ],
            "An axis of size 1 has groups too: each rank is alone in its group.",
        ),
        Wrong(_from_every_rank, "A group starts at its first rank, not at every rank in it."),
        Wrong(
            lambda axis, sizes, order: [
                _of_rank(rank, axis, sizes, order) for rank in range(prod(sizes.values()))
            ],
            "This is one group per rank, so each group is there once for every rank in it.",
        ),
        Wrong(
            lambda axis, sizes, order: [group[::-1] for group in _groups(axis, sizes, order)],
            "The ranks of a group are in descending order: return them in ascending order.",
        ),
    ),
    reference=_groups,
    refused=REFUSED,
    normal=_as_groups,
    drawn=_cases(_each_axis),
)

EXERCISES = (COORDINATES, GROUPS)
