"""12-2: on how many ranks a gradient is held."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

from course_lib.grading.answers import NotRight, shown
from course_lib.grading.exercise import Case, Function, Instance, Wrong

Sizes = Mapping[str, int]
FLAGS = ("cut", "expert", "ends", "sharded")


def _holders(
    sizes: Sizes,
    cut: bool,
    expert: bool,
    ends: bool,
    sharded: bool,
    *,
    over_tp: bool = True,
    over_ep: bool = True,
    over_ends: bool = True,
    over_cp: bool = True,
    over_data: bool = True,
    zero_everywhere: bool = False,
    cut_turned: bool = False,
) -> int:
    """Right, or with something left out."""
    if sharded and zero_everywhere:
        return 1
    data = (
        sizes["dp"] * (sizes["cp"] if over_cp else 1) // (sizes["ep"] if expert and over_ep else 1)
    )
    whole = cut if cut_turned else not cut
    return (
        (sizes["tp"] if whole and over_tp else 1)
        * (data if over_data and not sharded else 1)
        * (2 if ends and over_ends else 1)
    )


def _but(**mistake: Any) -> Callable[..., int]:
    return lambda *given: _holders(*given, **mistake)


def _by_counting(sizes: Sizes, cut: bool, expert: bool, ends: bool, sharded: bool) -> int:
    """Goes through the places of the mesh and counts those where the same is held."""
    step = sizes["ep"] if expert else 1
    ranks = range(sizes["dp"] * sizes["cp"])
    same_data = [rank for rank in ranks if rank % step == 0 and (rank == 0 or not sharded)]
    same_tp = [rank for rank in range(sizes["tp"]) if rank == 0 or not cut]
    stages = [0, -1] if ends else [0]
    return len(list(product(same_data, same_tp, stages)))


def _added(sizes: Sizes, cut: bool, expert: bool, ends: bool, sharded: bool) -> int:
    data = sizes["dp"] * sizes["cp"] // (sizes["ep"] if expert else 1)
    return (0 if cut else sizes["tp"]) + (0 if sharded else data) + (2 if ends else 0)


def _some(**fixed: bool) -> Callable[[random.Random], list[Instance]]:
    """Draws meshes, and whatever is not ``fixed``, in all combinations that can be."""

    def draw(rng: random.Random) -> list[Instance]:
        free = [flag for flag in FLAGS if flag not in fixed]
        found = []
        for values in product((False, True), repeat=len(free)):
            flags = {**dict(zip(free, values, strict=True)), **fixed}
            if not (flags["expert"] and (flags["ends"] or flags["cut"])):
                ep = rng.choice((2, 3))
                sizes = {
                    "tp": rng.choice((2, 4, 8)),
                    "cp": rng.choice((2, 3)),
                    "dp": ep * rng.choice((2, 3, 5)),
                    "ep": ep,
                }
                found.append({"sizes": sizes, **{flag: flags[flag] for flag in FLAGS}})
        return found

    return draw


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise NotRight(f"a whole number is wanted, not {shown(value)}")
    return int(value)


HOLDERS = Function(
    id="12-2",
    title="who holds a copy",
    names=("holders",),
    hints=(
        "Begin with a norm's weight without ZeRO: which axes do not change what a rank holds?",
        "Three factors, one for each reason to be a copy: tp where nothing is cut, the ranks that "
        "sum the same gradients where nothing is sharded, and the two ends.",
        "(1 if cut else sizes['tp']) * (1 if sharded else data) * ...",
    ),
    wrong=(
        Wrong(_but(over_tp=False), "What tp does not cut is on all its ranks: it counts tp times."),
        Wrong(
            _but(cut_turned=True), "cut is turned round: a weight that tp cuts has no copies there."
        ),
        Wrong(
            _but(over_ends=False),
            "A tied embedding is on two stages, and both hold the same gradient.",
        ),
        Wrong(
            _but(over_data=False),
            "Without ZeRO every rank that has summed a gradient holds all of it.",
        ),
        Wrong(
            _but(over_ep=False),
            "Ranks of ep hold different experts: use data, which knows that.",
        ),
        Wrong(_but(over_cp=False), "Ranks of cp sum the same gradients too: use data."),
        Wrong(
            _but(zero_everywhere=True),
            "ZeRO shards over the data ranks alone: tp and the other end still hold copies.",
        ),
        Wrong(_added, "Reasons to be a copy multiply: they are not added."),
        Wrong(lambda *given: 1 / _holders(*given), words="a whole number is wanted"),
        Wrong(lambda sizes, *flags: sizes["tp"], words=": expected "),
    ),
    right=(_by_counting, lambda *given: float(_holders(*given))),
    stub=lambda sizes, cut, expert, ends, sharded: None,
    reference=_holders,
    normal=_whole,
    drawn=(
        Case("matrices and norms", _some(expert=False, ends=False, sharded=False)),
        Case("a tied embedding", _some(expert=False, ends=True, sharded=False)),
        Case("experts", _some(cut=False, ends=False, sharded=False)),
        Case("shards of ZeRO", _some(sharded=True)),
    ),
)
