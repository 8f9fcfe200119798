"""04-2: which elements of a flat tensor a rank owns."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from course_lib.grading.answers import NotRight, shown
from course_lib.grading.exercise import Case, Function, Instance, Wrong

Pair = tuple[int, int]


def _bounds(elements: int, n: int, rank: int) -> Pair:
    shard = -(-elements // n)
    return min(rank * shard, elements), min((rank + 1) * shard, elements)


def _some(elements: Callable[[random.Random, int], int]) -> Callable[..., list[Instance]]:
    """Draws every rank of one flat tensor; ``elements(rng, n)`` are how many it has."""

    def draw(rng: random.Random) -> list[Instance]:
        n = rng.randint(4, 9)
        size = elements(rng, n)
        return [{"elements": size, "n": n, "rank": rank} for rank in range(n)]

    return draw


def _as_pair(value: Any) -> Pair:
    try:
        begin, end = value
    except (TypeError, ValueError):
        raise NotRight(f"a pair (begin, end) is wanted, not {shown(value)}") from None
    for each in (begin, end):
        if isinstance(each, bool) or not hasattr(each, "__index__"):
            raise NotRight(f"begin and end are whole numbers, not {shown(each)}")
    return int(begin), int(end)


def _uneven(elements: int, n: int, rank: int) -> Pair:
    """Sizes that differ by one, as torch.tensor_split makes them."""
    size, more = divmod(elements, n)
    begin = rank * size + min(rank, more)
    return begin, begin + size + (rank < more)


def _in_front(elements: int, n: int, rank: int) -> Pair:
    shard = -(-elements // n)
    padding = n * shard - elements
    return max(rank * shard - padding, 0), max((rank + 1) * shard - padding, 0)


def _last_takes_the_rest(elements: int, n: int, rank: int) -> Pair:
    shard = elements // n
    return rank * shard, elements if rank == n - 1 else (rank + 1) * shard


def _by_walking(elements: int, n: int, rank: int) -> Pair:
    shard = (elements + n - 1) // n
    own = [place for place in range(elements) if place // shard == rank]
    return (own[0], own[-1] + 1) if own else (elements, elements)


BOUNDS = Function(
    id="04-2",
    title="the bounds of a shard",
    names=("bounds",),
    hints=(
        "How many places has a shard, padding included? Round up.",
        "With f places in a shard, rank r has the places from r f to (r + 1) f. Which of them hold "
        "elements, and which padding?",
        "f = -(-elements // n); both r f and (r + 1) f are cut down to elements, with min.",
    ),
    wrong=(
        Wrong(
            lambda elements, n, rank: (rank * (elements // n), (rank + 1) * (elements // n)),
            "Rounded down: the last elements then have no owner.",
        ),
        Wrong(
            _last_takes_the_rest,
            "The last rank takes what is left over, so that its shard is the largest: a collective "
            "wants equal shards, so round up and pad.",
        ),
        Wrong(
            lambda elements, n, rank: (rank * -(-elements // n), (rank + 1) * -(-elements // n)),
            "The padding is counted in: nothing lies beyond the last element.",
        ),
        Wrong(
            lambda elements, n, rank: (
                rank * -(-elements // n),
                min((rank + 1) * -(-elements // n), elements),
            ),
            "Where a shard is all padding, begin lies behind end: both are elements there.",
        ),
        Wrong(
            _uneven,
            "These sizes differ by one, as torch.tensor_split makes them: shards have equal "
            "places, and only the end of the flat tensor is padding.",
        ),
        Wrong(
            lambda elements, n, rank: (
                min(rank * (elements // n + 1), elements),
                min((rank + 1) * (elements // n + 1), elements),
            ),
            "One place too many where n divides the elements: there is no padding then.",
        ),
        Wrong(_in_front, "The padding stands in front: it belongs at the end."),
        Wrong(
            lambda elements, n, rank: (
                _bounds(elements, n, rank)[0],
                _bounds(elements, n, rank)[1] - 1,
            ),
            "end is the place after the last own element, as in a slice.",
        ),
        Wrong(
            lambda elements, n, rank: (
                _bounds(elements, n, rank)[0],
                _bounds(elements, n, rank)[1] - _bounds(elements, n, rank)[0],
            ),
            "That is (begin, length); (begin, end) is wanted.",
        ),
        Wrong(lambda elements, n, rank: rank, words="a pair (begin, end) is wanted"),
        Wrong(
            lambda elements, n, rank: (rank * elements / n, (rank + 1) * elements / n),
            words="begin and end are whole numbers",
        ),
    ),
    right=(_by_walking, lambda *given: list(_bounds(*given))),
    stub=lambda elements, n, rank: None,
    reference=_bounds,
    normal=_as_pair,
    drawn=(
        Case("n divides the elements", _some(lambda rng, n: n * rng.randint(2, 20))),
        Case("padding in the last shard", _some(lambda rng, n: n * rng.randint(9, 20) - 1)),
        Case("shards that are all padding", _some(lambda rng, n: n + 1)),
        Case("fewer elements than ranks", _some(lambda rng, n: rng.randint(2, n - 1))),
    ),
)
