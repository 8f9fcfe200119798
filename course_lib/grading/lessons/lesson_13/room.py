"""13-2: how many requests fit beside the weights."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from course_lib.grading.answers import NotRight, shown
from course_lib.grading.exercise import Case, Function, Instance, Wrong

CALLS = 5  # of one case
HALF = "A request takes twice as much: keys and values are both kept, 2 bytes a number."


def _fitting(
    memory: int, weights: int, layers: int, kv_heads: int, head_dim: int, room: int, tp: int
) -> int:
    heads = max(kv_heads // tp, 1)
    return max((memory - weights // tp) // (2 * layers * heads * head_dim * 2 * room), 0)


def _sizes(
    rng: random.Random, kv_heads: int, tp: int, slots: int, *, exact: bool = False
) -> Instance:
    """Sizes of a rank on which ``slots`` requests fit; with ``exact`` without a byte left over."""
    layers, head_dim, room = rng.randint(10, 90), rng.choice((64, 96, 128)), 512 * rng.randint(1, 9)
    weights = tp * rng.randint(10**9, 2 * 10**10)
    each = 2 * layers * max(kv_heads // tp, 1) * head_dim * 2 * room
    left = slots * each + (0 if exact else rng.randint(each // 4, 3 * each // 4))
    sizes = {"memory": weights // tp + left, "weights": weights, "layers": layers}
    return sizes | {"kv_heads": kv_heads, "head_dim": head_dim, "room": room, "tp": tp}


def _some(heads_and_ranks: Callable[[random.Random], tuple[int, int]]) -> Callable[..., Any]:
    def draw(rng: random.Random) -> list[Instance]:
        return [_sizes(rng, *heads_and_ranks(rng), rng.randint(7, 90)) for _ in range(CALLS)]

    return draw


def _exactly(rng: random.Random) -> list[Instance]:
    return [_sizes(rng, 8, 2, rng.randint(7, 90), exact=True) for _ in range(CALLS)]


def _too_small(rng: random.Random) -> list[Instance]:
    """Some whose weights alone do not fit, among others that do."""
    drawn = [_sizes(rng, 8, 2, rng.randint(7, 90)) for _ in range(CALLS)]
    for sizes in drawn[1:3]:
        sizes["memory"] = sizes["weights"] // sizes["tp"] * 4 // 5
    return drawn


def _as_count(value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise NotRight(f"a whole number of requests is wanted, not {shown(value)}")
    return int(value)


def _but(
    *,
    heads: Callable[[int, int], int] = lambda kv_heads, tp: max(kv_heads // tp, 1),
    both: int = 2,
    cut: bool = True,
    itemsize: int = 2,
    up: bool = False,
    least: int | None = 0,
) -> Callable[..., int]:
    """Right, or with a mistake."""

    def fitting(
        memory: int, weights: int, layers: int, kv_heads: int, head_dim: int, room: int, tp: int
    ) -> int:
        left = memory - (weights // tp if cut else weights)
        each = both * layers * heads(kv_heads, tp) * head_dim * itemsize * room
        found = -(-left // each) if up else left // each
        return found if least is None else max(found, least)

    return fitting


def _by_walking(
    memory: int, weights: int, layers: int, kv_heads: int, head_dim: int, room: int, tp: int
) -> int:
    position = 4 * layers * head_dim * (kv_heads // tp or 1)
    left, found = memory - weights / tp, 0
    while left >= (found + 1) * position * room:
        found += 1
    return found


ROOM = Function(
    id="13-2",
    title="requests that fit",
    names=("fitting",),
    hints=(
        "What is left of the memory beside this rank's weights? What does one request take of it?",
        "A request takes 2 x layers x heads on this rank x head_dim x 2 bytes x room. A rank holds "
        "kv_heads / tp heads, and one at least.",
        "(memory - weights // tp) // (2 * layers * max(kv_heads // tp, 1) * head_dim * 2 * room), "
        "and 0 where that is negative.",
    ),
    wrong=(
        Wrong(
            _but(heads=lambda kv_heads, tp: kv_heads),
            "Tensor parallelism cuts the heads of the cache too: a rank has kv_heads / tp of them.",
        ),
        Wrong(
            _but(heads=lambda kv_heads, tp: max(kv_heads // tp, 0) or kv_heads),
            "With fewer heads than ranks each rank holds one head, not all.",
        ),
        Wrong(_but(both=1), HALF),
        Wrong(_but(cut=False), "A rank holds weights / tp, not all weights."),
        Wrong(_but(itemsize=4), "A number of the cache has 2 bytes here."),
        Wrong(_but(itemsize=1), words=HALF),
        Wrong(_but(up=True), "Rounded up: the last request does not fit."),
        Wrong(_but(least=None), "Where not even the weights fit, 0 requests do: not fewer."),
        Wrong(_but(least=1), "Where not even the weights fit, no request does."),
        Wrong(
            lambda memory, weights, layers, kv_heads, head_dim, room, tp: (
                (memory - weights / tp) / (4 * layers * max(kv_heads / tp, 1) * head_dim * room)
            ),
            words="a whole number of requests is wanted",
        ),
        Wrong(
            lambda memory, weights, layers, kv_heads, head_dim, room, tp: (
                memory // (4 * layers * max(kv_heads // tp, 1) * head_dim * room)
            ),
            "The weights take memory too.",
        ),
    ),
    right=(_by_walking, _but()),
    stub=lambda memory, weights, layers, kv_heads, head_dim, room, tp: None,
    reference=_fitting,
    refused=("course_lib.inference.cache:cache_bytes",),
    normal=_as_count,
    drawn=(
        Case("one rank", _some(lambda rng: (rng.choice((4, 8, 32)), 1))),
        Case(
            "heads cut by tp", _some(lambda rng: (rng.choice((8, 16, 32)), rng.choice((2, 4, 8))))
        ),
        Case("fewer heads than ranks", _some(lambda rng: (rng.choice((1, 2, 4)), 8))),
        Case("no byte left over", _exactly),
        Case("weights that do not fit", _too_small),
    ),
)
