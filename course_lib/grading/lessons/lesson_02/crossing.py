"""02-2: from which size on a ring all-reduce is faster than a tree."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import ceil, log2
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from course_lib.comm.alpha_beta import crossing
from course_lib.grading.answers import NotRight, shown
from course_lib.grading.exercise import Case, Function, Instance, Wrong
from course_lib.mesh import Link


def _draw(*sizes: int) -> Callable[[random.Random], list[Instance]]:
    """Three links of other speed, each with another number of ranks; the first is always one."""

    def draw(rng: random.Random) -> list[Instance]:
        return [
            {"n": n, "link": Link(rng.randint(2, 90) / 1e6, rng.randint(5, 400) * 1e8)}
            for n in (sizes[0], *rng.sample(sizes[1:], 2))
        ]

    return draw


def _as_bytes(value: Any) -> float:
    if isinstance(value, Tensor):
        raise NotRight("a plain number is wanted, not a tensor: .item() gives it")
    if isinstance(value, int) and not isinstance(value, bool):
        raise NotRight("S is wanted as the division gives it, not cut off to whole bytes")
    if not isinstance(value, Real) or isinstance(value, bool):
        raise NotRight(f"a number of bytes is wanted, not {shown(value)}")
    return float(value)


def _size(link: Link, more: float, fewer: float) -> float:
    """Bytes at which ``more`` alphas are made up for by ``fewer`` times S / beta."""
    return link.alpha * link.beta * more / fewer


def _whole_tensors(n: int, link: Link) -> float:
    levels = ceil(log2(n))
    return _size(link, n - 1 - levels, levels - (n - 1))


def _one_half(n: int, link: Link) -> float:
    levels = ceil(log2(n))
    return _size(link, 2 * (n - 1) - 2 * levels, 2 * levels - (n - 1) / n)


def _tree_one_way(n: int, link: Link) -> float:
    levels = ceil(log2(n))
    return _size(link, 2 * (n - 1) - levels, levels - 2 * (n - 1) / n)


def _not_rounded(n: int, link: Link) -> float:
    return _size(link, n - 1 - log2(n), log2(n) - (n - 1) / n)


def _n_turns(n: int, link: Link) -> float:
    return _size(link, n - ceil(log2(n)), ceil(log2(n)) - 1)


def _units(n: int, link: Link) -> float:
    return crossing_by_search(n, link) / link.beta**2


def _piece(n: int, link: Link) -> float:
    return crossing_by_search(n, link) / n


def _four(n: int, link: Link) -> float:
    return 0.8 * link.alpha * link.beta


def _upside_down(n: int, link: Link) -> float:
    levels = ceil(log2(n))
    return _size(link, levels - (n - 1) / n, n - 1 - levels)


def _elements(n: int, link: Link) -> float:
    return crossing_by_search(n, link) / 4


def _cut_off(n: int, link: Link) -> float:
    return int(crossing_by_search(n, link))


def crossing_by_search(n: int, link: Link) -> float:
    """A right answer of another kind: where the straight line of the difference is zero."""

    def ahead(size: float) -> float:
        ring = 2 * (n - 1) * (link.alpha + size / n / link.beta)
        return ring - 2 * ceil(log2(n)) * (link.alpha + size / link.beta)

    return ahead(0) / (ahead(0) - ahead(1e6)) * 1e6


def _right_in_seconds(n: int, link: Link) -> float:
    rounds, turns = 2 * (n - 1).bit_length(), 2 * n - 2
    slope = rounds / link.beta - turns / n / link.beta
    return (turns - rounds) * link.alpha / slope


CROSSING = Function(
    id="02-2",
    title="the size where ring and tree are equal",
    names=("crossing",),
    hints=(
        "Write down the seconds of both for S bytes. Each is a number of alphas plus a number of "
        "S / beta.",
        "The ring has 2(n-1) alphas and 2(n-1)/n S/beta, the tree 2L of both, with L = ceil(log2 "
        "n). Set them equal and solve for S.",
        "With L = ceil(log2(n)): alpha * (n - 1 - L) = S / beta * (L - (n - 1) / n). Now S stands "
        "alone after one division and one multiplication.",
    ),
    wrong=(
        Wrong(_whole_tensors, "In a turn of the ring a rank sends S/n bytes, not S."),
        Wrong(_one_half, "The ring has two halves, and both send: 2(n-1)/n S in all."),
        Wrong(_tree_one_way, "The tree goes up and down: 2 ceil(log2 n) messages."),
        Wrong(_not_rounded, "A tree of 5 ranks has 3 levels: log2 n must be rounded up."),
        Wrong(_n_turns, "A ring of n ranks has n-1 turns in each half, not n."),
        Wrong(_units, "alpha / beta is no number of bytes: seconds times bytes a second is."),
        Wrong(_piece, "This is the piece that travels, S/n; the whole S is wanted."),
        Wrong(_four, "This is the crossing of 4 ranks: it depends on n."),
        Wrong(_upside_down, "The fraction is upside down: more alphas, a larger S."),
        Wrong(_elements, "These are numbers of 4 bytes; bytes are wanted."),
        Wrong(_cut_off, words="not cut off to whole bytes"),
        Wrong(lambda n, link: torch.tensor(crossing_by_search(n, link)), words=".item() gives it"),
        Wrong(crossing, words="this is what you are asked to write"),
        Wrong(lambda n, link: None, words="a number of bytes is wanted"),
        Wrong(lambda n, link: link["alpha"], words="raised TypeError"),
    ),
    right=(crossing_by_search, _right_in_seconds),
    stub=lambda n, link: None,
    reference=crossing,
    refused=("course_lib.comm.alpha_beta:crossing",),
    normal=_as_bytes,
    drawn=(
        Case("a power of two", _draw(4, 8, 16, 32, 64)),
        Case("another number of ranks", _draw(5, 6, 7, 9, 12, 24, 100)),
        Case("a thousand ranks and more", _draw(2500, 1000, 1024, 4096, 16_384)),
    ),
)
