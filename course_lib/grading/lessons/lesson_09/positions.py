"""09-2: which positions a rank holds in the zig-zag layout."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from course_lib.cp import ZIGZAG
from course_lib.grading.answers import NotRight, shown
from course_lib.grading.exercise import Case, Function, Instance, Wrong


def _positions(rank: int, n: int, chunk: int) -> list[int]:
    late = 2 * n - 1 - rank
    return [
        *range(rank * chunk, (rank + 1) * chunk),
        *range(late * chunk, (late + 1) * chunk),
    ]


def _by_library(rank: int, n: int, chunk: int) -> list[int]:
    chunks = ZIGZAG.chunks(rank, n)
    return [place for c in chunks for place in range(c * chunk, (c + 1) * chunk)]


def _every_rank(n: Callable[[random.Random], int], chunk: Callable[[random.Random], int]) -> Any:
    """Draws all ranks of one sequence."""

    def draw(rng: random.Random) -> list[Instance]:
        size, rows = n(rng), chunk(rng)
        return [{"rank": rank, "n": size, "chunk": rows} for rank in range(size)]

    return draw


def _as_list(value: Any) -> list[int]:
    value = value.tolist() if hasattr(type(value), "tolist") else value
    if isinstance(value, str | dict) or not hasattr(type(value), "__iter__"):
        raise NotRight(f"positions are wanted, such as [0, 1, 6, 7], not {shown(value)}")
    found = list(value)
    for each in found:
        if isinstance(each, bool) or not hasattr(each, "__index__"):
            raise NotRight(f"a position is a whole number, not {shown(each)}")
    return [int(each) for each in found]


def _contiguous(rank: int, n: int, chunk: int) -> list[int]:
    return list(range(2 * rank * chunk, 2 * (rank + 1) * chunk))


def _chunks(rank: int, n: int, chunk: int) -> list[int]:
    return [rank, 2 * n - 1 - rank]


def _one_too_far(rank: int, n: int, chunk: int) -> list[int]:
    late = 2 * n - rank
    return [*range(rank * chunk, (rank + 1) * chunk), *range(late * chunk, (late + 1) * chunk)]


def _of_n_chunks(rank: int, n: int, chunk: int) -> list[int]:
    late = n - 1 - rank
    return [*range(rank * chunk, (rank + 1) * chunk), *range(late * chunk, (late + 1) * chunk)]


def _striped(rank: int, n: int, chunk: int) -> list[int]:
    return list(range(rank, 2 * n * chunk, n))


def _round_robin(rank: int, n: int, chunk: int) -> list[int]:
    late = n + rank
    return [*range(rank * chunk, (rank + 1) * chunk), *range(late * chunk, (late + 1) * chunk)]


def _mirrored(rank: int, n: int, chunk: int) -> list[int]:
    """The late chunk counted backwards, position by position."""
    early = list(range(rank * chunk, (rank + 1) * chunk))
    return early + [2 * n * chunk - 1 - place for place in early]


def _late_first(rank: int, n: int, chunk: int) -> list[int]:
    found = _positions(rank, n, chunk)
    return found[chunk:] + found[:chunk]


def _by_filter(rank: int, n: int, chunk: int) -> torch.Tensor:
    place = torch.arange(2 * n * chunk)
    number = place // chunk
    return place[torch.minimum(number, 2 * n - 1 - number) == rank]


POSITIONS = Function(
    id="09-2",
    title="the positions of zig-zag",
    names=("positions",),
    hints=(
        "The sequence has 2n chunks. Rank 0 holds the first and the last, rank 1 the second and "
        "the last but one.",
        "Chunk c holds the positions from c times chunk up to (c + 1) times chunk. Rank r holds "
        "chunks r and 2n - 1 - r.",
        "[*range(rank * chunk, (rank + 1) * chunk), *range(late * chunk, (late + 1) * chunk)].",
    ),
    wrong=(
        Wrong(_contiguous, "This is the contiguous layout: two neighbouring chunks."),
        Wrong(_chunks, "These are the numbers of the chunks; their positions are wanted."),
        Wrong(_one_too_far, "The last chunk is number 2n - 1: chunks are counted from 0."),
        Wrong(_of_n_chunks, "There are 2n chunks: each rank holds two of them."),
        Wrong(_striped, "This is the striped layout: every n-th position."),
        Wrong(
            _round_robin,
            "Chunks r and n + r: the last rank then has two later chunks than the first, and more "
            "work. The second one is counted from the end.",
        ),
        Wrong(
            _mirrored,
            "The right positions, but the late ones descend: a rank holds its positions in order.",
        ),
        Wrong(_late_first, "The right chunks in the wrong order: the early one comes first."),
        Wrong(
            lambda rank, n, chunk: _positions(rank, n, chunk)[:chunk],
            "Half of them: the late chunk is missing.",
        ),
        Wrong(lambda rank, n, chunk: rank, words="positions are wanted, such as"),
        Wrong(
            lambda rank, n, chunk: [place / 1 for place in _positions(rank, n, chunk)],
            words="a position is a whole number",
        ),
        Wrong(
            lambda rank, n, chunk: ZIGZAG.chunks(rank, n),
            words="this is what you are asked to write",
        ),
    ),
    right=(_by_filter, lambda *given: tuple(_positions(*given))),
    stub=lambda rank, n, chunk: None,
    reference=_by_library,
    normal=_as_list,
    drawn=(
        Case("two ranks", _every_rank(lambda rng: 2, lambda rng: rng.randint(2, 5))),
        Case(
            "three to eight ranks",
            _every_rank(lambda rng: rng.randint(3, 8), lambda rng: rng.randint(2, 4)),
        ),
        Case(
            "chunks of one position",
            _every_rank(lambda rng: rng.randint(3, 6), lambda rng: 1),
        ),
    ),
    refused=("course_lib.cp.layout:positions", "course_lib.cp.layout:ZIGZAG.chunks"),
)
