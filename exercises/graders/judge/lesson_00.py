"""Lesson 00, from a rank to its coordinates and from coordinates to groups: no ranks are needed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from course_lib.grading.answers import NotRight, shown
from course_lib.grading.exercise import Answer, Case, Function, Instance, Wrong

REFUSED = tuple(
    f"course_lib.layout:{name}"
    for name in ("make_layout", "rank_groups", "Layout.coordinates", "Layout.groups")
)
FOUR = ("tp-cp-dp-pp", "cp-tp-pp-dp", "pp-dp-cp-tp")
THREE = ("pp-tp-dp", "dp-pp-tp", "pp-dp-tp", "dp-tp-pp")
NAMES = ("ep", "expert", "nodes", "x", "replicas", "d2", "tp", "stage")
Sizes = Mapping[str, int]
Runs = list[tuple[str, dict[str, int]]]  # (order, sizes) of runs with equal worlds


def _cases(some: Callable[[random.Random, Runs], list[Instance]]) -> tuple[Case, ...]:
    def usual(*orders: str) -> Callable[[random.Random], list[Instance]]:
        """Draw up to two orders, and the sizes of two runs with equal worlds, so that a result
        depends on each argument. Equal sizes would hide an exchanged axis."""

        def draw(rng: random.Random) -> list[Instance]:
            axes = sorted(orders[0].split("-"))
            while len(set(sizes := [rng.choice((2, 3, 4)) for _ in axes])) == 1:
                pass
            both = [dict(zip(names, sizes, strict=True)) for names in (axes, axes[1:] + axes[:1])]
            some_orders = rng.sample(orders, min(2, len(orders)))
            return some(rng, [(order, sizes) for order in some_orders for sizes in both])

        return draw

    def others(rng: random.Random) -> list[Instance]:
        found = []
        for sizes in ([5], [5, 1], [5, 1, 3, 1, 2]):
            axes = rng.sample(NAMES, len(sizes))
            given = dict(zip(axes, rng.sample(sizes, len(sizes)), strict=True))
            found += some(rng, [("-".join(rng.sample(axes, len(axes))), given)])
        return found

    return (
        Case("order tp-dp-pp", usual("tp-dp-pp")),
        Case("order tp-pp-dp", usual("tp-pp-dp")),
        Case("any order of three axes", usual(*THREE)),
        Case("four axes", usual(*FOUR)),
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


def _some_ranks(rng: random.Random, runs: Runs) -> list[Instance]:
    """Rank 0, the last rank and a few between them."""
    world = prod(runs[0][1].values())
    ranks = (0, *rng.sample(range(1, world - 1), min(4, world - 2)), world - 1)
    return [
        {"rank": rank, "sizes": sizes, "order": order} for order, sizes in runs for rank in ranks
    ]


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


COORDINATE_MISTAKES: Mapping[str, Answer] = {
    "The order is read backwards: the first-named axis is the fastest.": (
        lambda rank, sizes, order: _coordinates(rank, sizes, _reversed(order))
    ),
    "The rank is never divided: take each coordinate from what is left of the rank.": (
        lambda rank, sizes, order: {a: rank % sizes[a] for a in order.split("-")}
    ),
    "The remainder is missing: a coordinate is below the size of its axis.": _only_division,
    "The axes are taken in the order of sizes: order says otherwise.": (
        lambda rank, sizes, order: _coordinates(rank, sizes, "-".join(sizes))
    ),
    "The argument order is not used: tp is not always the fastest.": (
        lambda rank, sizes, order: _coordinates(rank, sizes, _fixed(sizes, order))
    ),
    "Coordinates count from 0, as ranks do.": lambda *given: {
        axis: where + 1 for axis, where in _coordinates(*given).items()
    },
    "The rank is divided by the size of the axis itself: divide by the product of the "
    "sizes before it.": lambda rank, sizes, order: {
        a: rank // sizes[a] % sizes[a] for a in order.split("-")
    },
}

COORDINATES = Function(
    id="00-1",
    title="from a rank to its coordinates",
    names=("coordinates",),
    mistakes=tuple(Wrong(answer, why) for why, answer in COORDINATE_MISTAKES.items()),
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


def _each_axis(rng: random.Random, runs: Runs) -> list[Instance]:
    return [
        {"axis": axis, "sizes": sizes, "order": order}
        for order, sizes in runs
        for axis in order.split("-")
    ]


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


GROUP_MISTAKES: Mapping[str, Answer] = {
    "These ranks agree on the axis and differ on the others: it is the other way round.": (
        _other_axes
    ),
    "The order is read backwards: the first-named axis is the fastest.": (
        lambda axis, sizes, order: _groups(axis, sizes, _reversed(order))
    ),
    "Only the fastest axis has groups of consecutive ranks.": _neighbors,
    "Only the slowest axis has groups with the largest stride.": _strided,
    "The argument order is not used: tp is not always the fastest.": (
        lambda axis, sizes, order: _groups(axis, sizes, _fixed(sizes, order))
    ),
    "This is only the group of rank 0: return all groups of the axis.": (
        lambda *given: _groups(*given)[:1]
    ),
    "An axis of size 1 has groups too: each rank is alone in its group.": (
        lambda *given: [group for group in _groups(*given) if len(group) > 1]
    ),
    "A group starts at its first rank, not at every rank in it.": _from_every_rank,
    "This is one group per rank, so each group is there once for every rank in it.": (
        lambda *given: [group for group in _groups(*given) for _ in group]
    ),
    "The ranks of a group are in descending order: return them in ascending order.": (
        lambda *given: [group[::-1] for group in _groups(*given)]
    ),
}

GROUPS = Function(
    id="00-2",
    title="from coordinates to groups",
    names=("groups",),
    mistakes=tuple(Wrong(answer, why) for why, answer in GROUP_MISTAKES.items()),
    reference=_groups,
    refused=REFUSED,
    normal=_as_groups,
    drawn=_cases(_each_axis),
)

EXERCISES = (COORDINATES, GROUPS)
