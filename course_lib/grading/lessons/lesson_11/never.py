"""11-3: which ranks wait for ever."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from course_lib.grading.answers import NotRight, shown
from course_lib.grading.exercise import Case, Function, Instance, Wrong

Waits = Mapping[int, Sequence[int]]


def _never(waits: Waits, returned: Sequence[int]) -> list[int]:
    """From all that wait, those are taken out who wait for nobody that is stuck."""
    stuck = {*waits, *returned}
    while free := [r for r, others in waits.items() if r in stuck and not stuck & {*others}]:
        stuck -= {*free}
    return sorted(stuck - {*returned})


def _by_reach(waits: Waits, returned: Sequence[int]) -> list[int]:
    """Stuck is who reaches a returned rank, or some rank that reaches itself."""

    def reach(rank: int) -> set[int]:
        found: set[int] = set()
        ahead = list(waits.get(rank, ()))
        while ahead:
            one = ahead.pop()
            if one not in found:
                found.add(one)
                ahead += waits.get(one, ())
        return found

    on_rings = {rank for rank in waits if rank in reach(rank)}
    return sorted(rank for rank in waits if {rank, *reach(rank)} & {*on_rings, *returned})


def _as_ranks(value: Any) -> list[int]:
    if isinstance(value, set | frozenset):
        raise NotRight("a sorted list of ranks is wanted, not a set")
    if not isinstance(value, list | tuple) or any(type(rank) is not int for rank in value):
        raise NotRight(f"a sorted list of ranks is wanted, not {shown(value)}")
    return list(value)


# Situations. Ranks are renamed at random, so that no rank's number tells anything.


def _renamed(rng: random.Random, waits: Waits, returned: Sequence[int]) -> Instance:
    ranks = sorted({*waits, *returned, *(one for others in waits.values() for one in others)})
    names = rng.sample(range(16), k=len(ranks))
    new = dict(zip(ranks, names, strict=True))
    entries = [(new[rank], [new[one] for one in others]) for rank, others in waits.items()]
    rng.shuffle(entries)
    return {"waits": dict(entries), "returned": [new[rank] for rank in returned]}


def _ring(first: int, length: int) -> dict[int, list[int]]:
    ranks = range(first, first + length)
    return {rank: [first + (rank - first + 1) % length] for rank in ranks}


def _rings(rng: random.Random) -> list[Instance]:
    """A ring, and beside it ranks that wait for one that computes."""
    found = []
    for length in (2, 4):
        free = {8: [9], 10: [8], 11: []}
        found.append(_renamed(rng, _ring(0, length) | free, []))
    return found


def _chains(rng: random.Random) -> list[Instance]:
    """Ranks that wait behind a ring, or behind one that has returned."""
    behind_ring = _ring(0, 3) | {3: [0], 4: [3], 5: [6]}
    behind_returned = {0: [1], 1: [2], 2: [7], 3: [8]}
    return [_renamed(rng, behind_ring, []), _renamed(rng, behind_returned, [7, 9])]


def _all_needed(rng: random.Random) -> list[Instance]:
    """One stuck member of several is enough; several that compute are not."""
    waits = _ring(0, 2) | {2: [0, 8], 3: [8, 9], 4: [3, 2]}
    return [_renamed(rng, waits, []), _renamed(rng, {0: [8, 7], 1: [8, 9], 2: [9, 0]}, [7])]


def _drawn_graphs(rng: random.Random) -> list[Instance]:
    """Random ones, and one in which all will go on."""
    found = [_renamed(rng, {0: [1, 2], 1: [2], 2: [9], 3: []}, [8])]
    for _ in range(6):
        waits = {
            rank: rng.sample([one for one in range(10) if one != rank], k=rng.choice((1, 1, 2)))
            for rank in rng.sample(range(8), k=6)
        }
        outside = [rank for rank in range(10) if rank not in waits]
        found.append(_renamed(rng, waits, rng.sample(outside, k=1)))
    return found


# What people get wrong.


def _only_pairs(waits: Waits, returned: Sequence[int]) -> list[int]:
    return sorted(r for r in waits if any(r in waits.get(one, ()) for one in waits[r]))


def _only_rings(waits: Waits, returned: Sequence[int]) -> list[int]:
    return [r for r in _by_reach(waits, returned) if _reaches_itself(waits, r)]


def _reaches_itself(waits: Waits, rank: int) -> bool:
    ahead = list(waits[rank])
    seen: set[int] = set()
    while ahead:
        one = ahead.pop()
        if one not in seen:
            seen.add(one)
            ahead += waits.get(one, ())
    return rank in seen


def _with_returned(waits: Waits, returned: Sequence[int]) -> list[int]:
    return sorted({*_never(waits, returned), *returned})


def _ignores_returned(waits: Waits, returned: Sequence[int]) -> list[int]:
    return _never(waits, [])


def _any_is_enough(waits: Waits, returned: Sequence[int]) -> list[int]:
    stuck = {*waits, *returned}
    while free := [r for r, others in waits.items() if r in stuck and not {*others} <= stuck]:
        stuck -= {*free}
    return sorted(r for r in stuck - {*returned} if waits[r])


def _one_pass(waits: Waits, returned: Sequence[int]) -> list[int]:
    stuck = {*waits, *returned}
    return sorted(r for r, others in waits.items() if stuck & {*others})


def _everyone(waits: Waits, returned: Sequence[int]) -> list[int]:
    return sorted(waits)


def _from_returned(waits: Waits, returned: Sequence[int]) -> list[int]:
    stuck = {*returned}
    while more := [r for r in waits if r not in stuck and stuck & {*waits[r]}]:
        stuck |= {*more}
    return sorted(stuck - {*returned})


def _unsorted(waits: Waits, returned: Sequence[int]) -> list[int]:
    return _never(waits, returned)[::-1]


def _as_set(waits: Waits, returned: Sequence[int]) -> set[int]:
    return {*_never(waits, returned)}


def _said(draw: Callable[[random.Random], list[Instance]], title: str) -> Case:
    return Case(title, draw)


NEVER = Function(
    id="11-3",
    title="who never goes on",
    names=("never",),
    hints=(
        "Begin with the ranks that surely go on: those that wait for nobody, or only for ranks "
        "that compute. Who goes on because of them?",
        "Take all that wait and all that have returned as stuck. Take out every waiting rank none "
        "of whose awaited ranks is among the stuck. Again, until nothing changes.",
        "stuck = {*waits, *returned}; while free := [r for r, others in waits.items() if r in "
        "stuck and not stuck & {*others}]: stuck -= {*free}. Then without the returned, sorted.",
    ),
    wrong=(
        Wrong(_only_pairs, "A ring may go through more than two ranks, and others wait behind it."),
        Wrong(_only_rings, "Who waits for a rank of the ring, or for one that returned, is stuck."),
        Wrong(_with_returned, "A rank that has returned waits for nobody: it is not asked for."),
        Wrong(
            _ignores_returned, "A rank that has returned never comes: who waits for it is stuck."
        ),
        Wrong(
            _any_is_enough, "A rank needs all that it waits for: one that never comes is enough."
        ),
        Wrong(_one_pass, "A rank whose partner waits may go on when that one does: look again."),
        Wrong(_everyone, "Not everybody who waits waits for ever."),
        Wrong(_from_returned, "Rings wait for ever, too, without anybody having returned."),
        Wrong(_unsorted, words=": expected "),
        Wrong(_as_set, words="a sorted list of ranks is wanted, not a set"),
        Wrong(lambda waits, returned: None, words="a sorted list of ranks is wanted"),
    ),
    right=(_never, _by_reach),
    stub=lambda waits, returned: None,
    reference=_never,
    normal=_as_ranks,
    refused=("course_lib.comm.instruments.watch:stuck",),
    drawn=(
        _said(_rings, "rings"),
        _said(_chains, "behind a ring, behind one that returned"),
        _said(_all_needed, "a rank needs all that it waits for"),
        _said(_drawn_graphs, "any situation"),
    ),
)
