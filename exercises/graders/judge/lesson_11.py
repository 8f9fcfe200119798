"""Lesson 11, several groups at once: what the exercises give, and what they expect."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import index
from typing import Any

import torch
from torch import Tensor

from course_lib.grading.answers import NotRight, shown
from course_lib.grading.draw import Draw
from course_lib.grading.exercise import Case, Function, Instance, Wrong
from course_lib.grading.graders.by_hand import by_hand
from course_lib.grading.graders.runner import lesson_11 as runner
from course_lib.grading.placed import bytes_of
from course_lib.grading.ranked import OnRanks
from course_lib.grading.runner import Observed
from course_lib.grading.trials import Given, Look, Mistake, Trial

# --- 11-2 ----------------------------------------------------------------------------------------


def _fits(gap: int, ranks: int, alpha: int, beta: int, *, steps: int = 0, messages: int = -1,
          least: int | None = 0, element: int = 4, share: int = 0) -> int:  # fmt: skip
    """The right number, or one with other steps, messages, bytes per element or share of a rank."""
    steps = steps or 2 * (ranks - 1)
    left = gap - (steps if messages < 0 else messages) * alpha
    found = left * beta * (share or ranks) // (steps * element)
    return found if least is None else max(least, found)


def _whole(value: Any) -> int:
    try:
        return int(value) if isinstance(value, float) and value == int(value) else index(value)
    except (TypeError, ValueError, OverflowError):
        got = shown(value)
        raise NotRight(f"expected a whole number of elements, got {got}: round down") from None


def _gaps(rng: random.Random, ranks: Sequence[int], short: int) -> list[Instance]:
    """Five gaps; in ``short`` of them not even an empty piece fits. Without short ones, the last
    two pieces fit exactly; on six ranks the last one only by whole numbers, not by floats."""
    found = []
    for number in range(5):
        exact = number > 2 and not short
        n, alpha = 6 if exact and 6 in ranks else rng.choice(ranks), rng.randrange(2, 30)
        latency = 2 * (n - 1) * alpha
        gap = rng.randrange(1, latency) if number < short else latency + rng.randrange(50, 5_000)
        beta = rng.randrange(1_001, 50_000, 2)
        while exact:
            gap, beta = latency + 4 * rng.randrange(12, 1_000), 10 * rng.randrange(101, 5_000)
            cut_off = int((gap / (2 * n - 2) - alpha) * n * beta / 4)
            exact = n == 6 and cut_off == _fits(gap, n, alpha, beta)
        found.append({"gap": gap, "ranks": n, "alpha": alpha, "beta": beta})
    return found


PIECE = Function(
    id="11-2",
    title="the piece that fits",
    names=("elements_that_fit",),
    mistakes=(
        Wrong(
            lambda *given: _fits(*given, messages=0), "The latency of 2(n-1) messages is missing."
        ),
        Wrong(
            lambda *given: _fits(*given, messages=1),
            "Each of the 2(n-1) messages pays alpha, not only the first.",
        ),
        Wrong(
            lambda *given: _fits(*given, share=2 * (given[1] - 1)),
            "A rank sends 2(n-1)/n of the piece, not the piece once.",
        ),
        Wrong(lambda *given: _fits(*given, element=1), "These are bytes; a float32 element has 4."),
        Wrong(
            lambda *given: _fits(*given, least=None),
            "If the latency alone is longer than the gap, nothing fits: return 0.",
        ),
        Wrong(
            lambda *given: _fits(*given, steps=given[1] - 1),
            "This is half a ring, a reduce-scatter. An all-reduce has 2(n-1) steps.",
        ),
        Wrong(
            lambda gap, ranks, alpha, beta: _fits(gap, 2, alpha, beta),
            "The number of ranks is not used.",
        ),
        Wrong(
            lambda gap, *rest: max(0, -_fits(-gap, *rest[:1], -rest[1], rest[2], least=None)),
            "This is rounded up: one element too many for the gap.",
        ),
    ),
    reference=_fits,
    normal=_whole,
    drawn=(
        Case("two ranks", lambda rng: _gaps(rng, [2], short=0)),
        Case("more ranks", lambda rng: _gaps(rng, [3, 5, 6, 8, 12], short=0)),
        Case("some gaps too short", lambda rng: _gaps(rng, [2, 3, 4, 7], short=2)),
    ),
)


# --- 11-3 ----------------------------------------------------------------------------------------

Waits = Mapping[int, Sequence[int]]


def _never(waits: Waits, returned: Sequence[int], *, rounds: int = 1_000,
           any_is_enough: bool = False) -> list[int]:  # fmt: skip
    """Remove from all waiting ranks those that wait for no stuck rank, until none is left."""
    stuck = {*waits, *returned}
    for _ in range(rounds):
        free = {
            rank
            for rank, others in waits.items()
            if not (stuck >= {*others} if any_is_enough else stuck & {*others})
        }
        stuck -= free
    return sorted(stuck - {*returned})


def _behind(waits: Waits, first: Sequence[int]) -> set[int]:
    """All ranks that wait for one of ``first``, directly or through others."""
    found = {*first}
    while more := {rank for rank in waits if rank not in found and found & {*waits[rank]}}:
        found |= more
    return found


def _on_rings(waits: Waits, returned: Sequence[int]) -> list[int]:
    ahead = {rank: [one for one in waits if rank in _behind(waits, [one])] for rank in waits}
    return sorted(rank for rank in waits if any(rank in waits[one] for one in ahead[rank]))


def _as_ranks(value: Any) -> list[int]:
    if isinstance(value, set | frozenset):
        raise NotRight("expected a sorted list of ranks, got a set: use sorted()")
    try:
        return [index(rank) for rank in value]
    except TypeError:
        raise NotRight(f"expected a sorted list of ranks, got {shown(value)}") from None


def _renamed(rng: random.Random, waits: Waits, returned: Sequence[int]) -> Instance:
    """Give the ranks random numbers and an arbitrary order."""
    ranks = sorted({*waits, *returned, *chain(*waits.values())})
    new = dict(zip(ranks, rng.sample(range(2 * len(ranks)), k=len(ranks)), strict=True))
    entries = [(new[rank], [new[one] for one in others]) for rank, others in waits.items()]
    rng.shuffle(entries)
    return {"waits": dict(entries), "returned": [new[rank] for rank in returned]}


def _ring(length: int) -> dict[int, list[int]]:
    return {rank: [(rank + 1) % length] for rank in range(length)}


def _rings(rng: random.Random) -> list[Instance]:
    """A ring, and beside it ranks that wait for one that computes."""
    free = {8: [9], 10: [8], 11: []}
    return [_renamed(rng, _ring(length) | free, []) for length in (2, 4)]


def _chains(rng: random.Random) -> list[Instance]:
    """Long chains behind a ring, behind a rank that returned, behind one that computes."""
    found = [_renamed(rng, _ring(3) | {3: [0], 4: [3], 5: [6]}, [])]
    for end in (50, 60):  # 50 has returned, 60 computes
        line = {rank: [rank + 1] for rank in range(rng.randint(12, 30))}
        line[max(line)] = [end]
        found.append(_renamed(rng, line | {70: [71]}, [50, 72]))
    return found


def _all_needed(rng: random.Random) -> list[Instance]:
    """One stuck member of several is enough; several that compute are not."""
    waits = _ring(2) | {2: [0, 8], 3: [8, 9], 4: [3, 2]}
    return [_renamed(rng, waits, []), _renamed(rng, {0: [8, 7], 1: [8, 9], 2: [9, 0]}, [7])]


def _graphs(rng: random.Random) -> list[Instance]:
    """Random ones, and one in which all ranks continue."""
    found = [_renamed(rng, {0: [1, 2], 1: [2], 2: [9], 3: []}, [8]), _renamed(rng, {}, [8])]
    for _ in range(6):
        waits = {
            rank: rng.sample([one for one in range(10) if one != rank], k=rng.choice((1, 1, 2)))
            for rank in rng.sample(range(8), k=6)
        }
        outside = [rank for rank in range(10) if rank not in waits]
        found.append(_renamed(rng, waits, rng.sample(outside, k=1)))
    return found


NEVER = Function(
    id="11-3",
    title="which ranks never continue",
    names=("never",),
    mistakes=(
        Wrong(
            lambda waits, returned: sorted(
                r for r in waits if any(r in waits.get(one, ()) for one in waits[r])
            ),
            "A ring may have more than two ranks, and other ranks may wait behind it.",
        ),
        Wrong(
            _on_rings, "A rank that waits for a rank of a ring, or for a returned one, is stuck."
        ),
        Wrong(
            lambda waits, returned: sorted({*_never(waits, returned), *returned}),
            "A rank that has returned does not wait: leave it out of the result.",
        ),
        Wrong(
            lambda waits, returned: _never(waits, []),
            "A rank that has returned never joins: a rank that waits for it is stuck.",
        ),
        Wrong(
            lambda waits, returned: [
                r for r in _never(waits, returned, any_is_enough=True) if waits[r]
            ],
            "A rank needs all ranks that it waits for: one that never joins blocks it.",
        ),
        Wrong(
            lambda waits, returned: _never(waits, returned, rounds=1),
            "A rank whose partner waits may continue when the partner does: repeat the step.",
        ),
        Wrong(lambda waits, returned: sorted(waits), "Not every waiting rank waits forever."),
        Wrong(
            lambda waits, returned: sorted(_behind(waits, returned) - {*returned}),
            "A ring waits forever even if no rank has returned.",
        ),
    ),
    reference=_never,
    normal=_as_ranks,
    refused=("course_lib.comm.instruments.watch:stuck",),
    drawn=(
        Case("rings", _rings),
        Case("long chains behind a ring or a returned rank", _chains),
        Case("a rank needs all that it waits for", _all_needed),
        Case("any situation", _graphs),
    ),
)


# --- 11-4 ----------------------------------------------------------------------------------------


def _traffic(trial: Trial, draw: Draw) -> list[dict[str, Any]]:
    """More pieces than small tensors in one call, which are many; fewer in the other, where
    ``most`` divides the bucket."""
    smalls, most = draw.size(7, 8) if draw.call else draw.size(2, 4), draw.size(3, 6)
    pieces = smalls + draw.size(2, 3) if draw.call else max(1, smalls - draw.size(1, 2))
    elements = pieces * most - (draw.call and draw.size(1, most - 1))
    shapes = [draw.shape() for _ in range(smalls)]
    return [
        {
            "smalls": [draw.tensor(*shape) for shape in shapes],
            "bucket": draw.tensor(elements),
            "most": most,
        }
        for _ in range(trial.n)
    ]


def _members(given: Given, rank: int, axis: str) -> list[int]:
    """The ranks of ``rank``'s group: pairs of neighbors are tp, the others dp."""
    if given.n < 4:
        return list(range(given.n))
    first = rank - rank % 2
    return [first, first + 1] if axis == "tp" else [rank % 2, rank % 2 + 2]


def _sum(given: Given, axis: str, values: Sequence[Tensor]) -> list[Tensor]:
    return [
        torch.stack([values[member] for member in _members(given, rank, axis)]).sum(0)
        for rank in range(given.n)
    ]


def _small(given: Given, number: int) -> list[Tensor]:
    return [smalls[number] for smalls in given["smalls"]]


def _sums(given: Given) -> dict[str, Any]:
    names = range(len(given["smalls"][0]))
    return {f"sum of small tensor {k}": _sum(given, "tp", _small(given, k)) for k in names} | {
        "total": _sum(given, "dp", given["bucket"])
    }


def _in_order(given: Given, rank: int) -> list[tuple[str, int]]:
    bucket = given["bucket"][0]
    pieces = deque(bytes_of(piece) for piece in bucket.split(given["most"][0]))
    calls = []
    for small in given["smalls"][0]:
        calls += [bytes_of(small)] + ([pieces.popleft()] if pieces else [])
    return [("all_reduce", payload) for payload in [*calls, *pieces]]


def _waits_late(given: Given, ranks: list[Observed]) -> str:
    """Every small call is waited for at once, and no piece before the last small call."""
    many = len(given["smalls"][0])
    for rank, observed in enumerate(ranks):
        pieces = len(observed.calls) - many  # after each small call one piece, while there are any
        places = [number + min(number, pieces) for number in range(many)]
        smalls = [observed.calls[place] for place in places]
        rest = [call for place, call in enumerate(observed.calls) if place not in places]
        last = max(call.ended for call in smalls)
        if any(call.ended < last for call in rest):
            return (
                f"rank {rank} waited for a piece before the last small call had finished: start "
                "the pieces, and wait for them at the end"
            )
        if any(call.ended != call.begun + 1 for call in smalls):
            return (
                f"rank {rank} started another call before it waited for a small one: the next "
                "computation needs its sum at once"
            )
    return ""


GIVES_WAY = OnRanks(
    id="11-4",
    title="a bucket that gives way",
    names=("give_way",),
    trials=(
        Trial(4, order="tp-dp", sizes={"tp": 2, "dp": 2}, name="tp 2, dp 2"),
        Trial(2, strided=True, dtype=torch.float64),
        Trial(1),
    ),
    act=runner.give_way,
    draw=_traffic,
    expected=_sums,
    mistakes=(
        Mistake(
            "the small tensors were summed over dp: sum them over tp",
            {"sum of small tensor 0": lambda given: _sum(given, "dp", _small(given, 0))},
        ),
        Mistake("the bucket is not summed", {"total": lambda given: given["bucket"]}),
        Mistake(
            "the bucket was summed over tp: sum it over dp",
            {"total": lambda given: _sum(given, "tp", given["bucket"])},
        ),
        Mistake(
            "pieces are missing: start the remaining pieces after the last small call",
            {
                "total": lambda given: [
                    x[: given["most"][0] * len(given["smalls"][0])]
                    for x in _sum(given, "dp", given["bucket"])
                ]
            },
        ),
    ),
    calls=_in_order,
    calls_why=(
        "First a small call, then one piece of at most `most` elements, and so on; the remaining "
        "pieces at the end"
    ),
    looks=(Look("wire", "pieces are started, small calls waited for", _waits_late),),
    refused=("course_lib.comm.instruments.priorities:Priorities.__enter__",),
)


# --- 11-5 ----------------------------------------------------------------------------------------

MESHES: dict[int, list[list[list[int]]]] = {
    2: [[[0, 1]], [[0, 1]], [[0, 1]]],
    4: [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 2], [1, 3]]],
    6: [[[0, 1], [2, 3], [4, 5]], [[0, 2, 4], [1, 3, 5]], [[0], [1], [2], [3], [4], [5]]],
}


def _axes(trial: Trial, draw: Draw) -> Any:
    """All groups by name, in an order of its own on each rank: its own groups first."""
    names = draw.random.sample(["tp", "cp", "dp", "pp", "ep", "edp", "norms"], k=3)
    axes = dict(zip(names, MESHES[trial.n], strict=True))
    ranks = []
    for rank in range(trial.n):
        turned = names[rank % 3 :] + names[: rank % 3]
        own_first = {
            name: sorted(axes[name], key=lambda ranks, rank=rank: rank not in ranks)
            for name in turned
        }
        ranks.append({"groups": own_first})
    return ranks, axes


def _group_sums(given: Given) -> dict[str, Any]:
    def total(rank: int, number: int, name: str) -> float:
        own = next(ranks for ranks in given.whole[name] if rank in ranks)
        return float(sum(number * 10**member for member in own))

    names = list(enumerate(sorted(given.whole), 1))
    return {
        "sums": [{name: total(rank, k, name) for k, name in names} for rank in range(given.n)],
        "axes that share a group": [[]] * given.n,
    }


MADE = OnRanks(
    id="11-5",
    title="groups made right, in raw PyTorch",
    names=("make_groups",),
    trials=(Trial(2), Trial(4), Trial(6)),
    act=runner.make_groups,
    draw=_axes,
    expected=_group_sums,
    hang="every rank must call new_group for every group, in one order",
    refused=("course_lib.mesh.groups:_make_axis",),
)

EXERCISES = (by_hand("11-1"), PIECE, NEVER, GIVES_WAY, MADE)
