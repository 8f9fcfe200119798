"""Lesson 00: wrong and right answers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from itertools import product
from math import prod
from typing import Any

import numpy as np
from attack import Attacks

from course_lib.grading.exercise import Answer, Wrong
from course_lib.layout import make_layout, rank_groups

REFUSAL = "this is what you are asked to write"
Sizes = Mapping[str, int]


def _coordinates(rank: int, sizes: Sizes, order: str) -> dict[str, int]:
    found = {}
    for axis in order.split("-"):
        rank, found[axis] = divmod(rank, sizes[axis])
    return found


def _by_counting(rank: int, sizes: Sizes, order: str) -> dict[str, int]:
    """Right: goes through all coordinates, the last axis of a product being the fastest."""
    axes = order.split("-")[::-1]
    every = list(product(*(range(sizes[axis]) for axis in axes)))
    return dict(zip(axes, every[rank], strict=True))


def _numpy(rank: int, sizes: Sizes, order: str) -> dict[str, int]:
    """Right, with numpy integers."""
    axes = order.split("-")
    where = np.unravel_index(rank, [sizes[axis] for axis in axes], order="F")
    return dict(zip(axes, where, strict=True))


def _true_division(rank: int, sizes: Sizes, order: str) -> dict[str, float]:
    found: dict[str, float] = {}
    left: float = rank
    for axis in order.split("-"):
        found[axis] = left % sizes[axis]
        left = left / sizes[axis]
    return found


def _uses_up_sizes(rank: int, sizes: dict[str, int], order: str) -> dict[str, int]:
    """Right once: the caller has no sizes left."""
    found = {}
    for axis in order.split("-"):
        rank, found[axis] = divmod(rank, sizes.pop(axis))
    return found


def _no_first_rank(rank: int, sizes: Sizes, order: str) -> dict[str, int]:
    return _coordinates(rank, sizes, order) if rank else {}


def _two_letters(rank: int, sizes: Sizes, order: str) -> dict[str, int]:
    axes = [order[place : place + 2] for place in range(0, len(order), 3)]
    return _coordinates(rank, sizes, "-".join(axes))


def _leaves_out_ones(rank: int, sizes: Sizes, order: str) -> dict[str, int]:
    found = _coordinates(rank, sizes, order)
    return {axis: where for axis, where in found.items() if sizes[axis] > 1}


def _remembering(answer: Answer, key: Callable[..., object]) -> Answer:
    """Right once: calls with the same key return the result of the first of them."""
    known: dict[object, Any] = {}
    return lambda *given: copy.deepcopy(known.setdefault(key(*given), answer(*given)))


def _groups(axis: str, sizes: Sizes, order: str) -> list[tuple[int, ...]]:
    """Right: ranks with the same other coordinates are in one group."""
    bins: dict[tuple[int, ...], list[int]] = {}
    for rank in range(prod(sizes.values())):
        where = _coordinates(rank, sizes, order)
        bins.setdefault(tuple(where[name] for name in where if name != axis), []).append(rank)
    return [tuple(ranks) for ranks in bins.values()][::-1]


ATTACKS = {
    "00-1": Attacks(
        wrong=(
            Wrong(_uses_up_sizes, words="changed its argument sizes"),
            Wrong(
                lambda rank, sizes, order: make_layout(None, order, **sizes).coordinates(rank),
                words=REFUSAL,
            ),
            Wrong(_true_division, words="rank // size and not rank / size"),
            Wrong(
                lambda rank, sizes, order: {
                    axis: float(at) for axis, at in _coordinates(rank, sizes, order).items()
                },
                words="coordinates that are whole numbers",
            ),
            Wrong(lambda rank, sizes, order: None, words="expected a dict from axis to coordinate"),
            Wrong(lambda rank, sizes, order: dict.fromkeys(sizes, 0), words="expected {"),
            Wrong(lambda rank, sizes, order: sizes["rank"], words="raised KeyError: 'rank'"),
            Wrong(_no_first_rank, words="got {}"),
            Wrong(_two_letters, words="raised KeyError"),
            Wrong(_leaves_out_ones, words="expected {"),
            Wrong(
                _remembering(
                    _coordinates,
                    lambda rank, sizes, order: (rank, order, len(sizes), max(sizes.values())),
                ),
                words="expected {",
            ),
            Wrong(
                _remembering(_coordinates, lambda rank, sizes, order: (rank, str(sizes))),
                words="expected {",
            ),
        ),
        right=(_by_counting, _numpy),
    ),
    "00-2": Attacks(
        wrong=(
            Wrong(
                lambda axis, sizes, order: make_layout(None, order, **sizes).groups(axis),
                words=REFUSAL,
            ),
            Wrong(
                lambda axis, sizes, order: rank_groups(order, **sizes)[axis],
                words=REFUSAL,
            ),
            Wrong(
                lambda axis, sizes, order: [
                    [rank * 1.0 for rank in group] for group in _groups(axis, sizes, order)
                ],
                words="ranks that are whole numbers",
            ),
            Wrong(lambda axis, sizes, order: None, words="expected a list of lists of ranks"),
            Wrong(lambda axis, sizes, order: [[0, 1]], words="expected ["),
            Wrong(
                lambda axis, sizes, order: 2 * _groups(axis, sizes, order),
                words="expected every rank in exactly one group",
            ),
            Wrong(
                _remembering(_groups, lambda axis, sizes, order: (axis, order, sizes[axis])),
                words="expected [[",
            ),
            Wrong(
                _remembering(_groups, lambda axis, sizes, order: (axis, prod(sizes.values()))),
                words="expected [[",
            ),
        ),
        right=(_groups, lambda axis, sizes, order: [list(g) for g in _groups(axis, sizes, order)]),
    ),
}
