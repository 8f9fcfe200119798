"""Lesson 11: wrong and right answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from attack import Attacks
from torch import Tensor

from course_lib import comm
from course_lib.grading import registry
from course_lib.grading.exercise import Wrong
from course_lib.mesh import Axis
from course_lib.mesh import groups as library
from course_lib.mesh.axes import rank_context

REFUSAL = "this is what you are asked to write"
Groups = dict[str, list[list[int]]]
ELEMENT = 4
Waits = Mapping[int, Sequence[int]]


def _table(**entries: Any) -> dict[str, Any]:
    return {**registry.find("11-1").wanted, **entries}  # type: ignore[attr-defined]


def _fits(gap: int, ranks: int, alpha: int, beta: int) -> int:
    turns = 2 * (ranks - 1)
    return max(0, (gap - turns * alpha) * beta * ranks // (turns * ELEMENT))


def _by_trying(gap: int, ranks: int, alpha: int, beta: int) -> int:
    """Halves the interval between one that fits and one that does not."""

    def fits(elements: int) -> bool:
        scale = ranks * beta  # whole numbers alone
        return 2 * (ranks - 1) * (alpha * scale + ELEMENT * elements) <= gap * scale

    low, high = 0, gap * beta * ranks
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


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


def _unsorted(waits: Waits, returned: Sequence[int]) -> list[int]:
    return _never(waits, returned)[::-1]


def _as_set(waits: Waits, returned: Sequence[int]) -> set[int]:
    return {*_never(waits, returned)}


def _right(smalls: list[Tensor], bucket: Tensor, tp: Axis, dp: Axis, most: int) -> Any:
    pieces = deque(bucket.split(most))
    sums, handles = [], []
    for small in smalls:
        sums.append(comm.all_reduce(small, tp))
        if pieces:
            handles.append(comm.start_all_reduce(pieces.popleft(), dp))
    handles += [comm.start_all_reduce(piece, dp) for piece in pieces]
    return sums, torch.cat([handle.wait() for handle in handles])


def _right_by_places(smalls: list[Tensor], bucket: Tensor, tp: Axis, dp: Axis, most: int) -> Any:
    """With a generator that starts a piece whenever it is asked, and a tensor filled at the end."""
    total = torch.empty_like(bucket)

    def starts() -> Iterator[tuple[int, Any]]:
        for first in range(0, len(bucket), most):
            yield first, comm.start_all_reduce(bucket[first : first + most], dp)

    left, sums, under_way = starts(), [], []
    for small in smalls:
        sums.append(comm.start_all_reduce(small, tp).wait())
        under_way += [one for one in [next(left, None)] if one]
    for first, handle in [*under_way, *left]:
        total[first : first + most] = handle.wait()
    return tuple(sums), total


def _whole_first(smalls: list[Tensor], bucket: Tensor, tp: Axis, dp: Axis, most: int) -> Any:
    handle = comm.start_all_reduce(bucket, dp)
    return [comm.all_reduce(small, tp) for small in smalls], handle.wait()


def _whole_last(smalls: list[Tensor], bucket: Tensor, tp: Axis, dp: Axis, most: int) -> Any:
    return [comm.all_reduce(small, tp) for small in smalls], comm.all_reduce(bucket, dp)


def _pieces_first(smalls: list[Tensor], bucket: Tensor, tp: Axis, dp: Axis, most: int) -> Any:
    handles = [comm.start_all_reduce(piece, dp) for piece in bucket.split(most)]
    sums = [comm.all_reduce(small, tp) for small in smalls]
    return sums, torch.cat([handle.wait() for handle in handles])


def _pieces_last(smalls: list[Tensor], bucket: Tensor, tp: Axis, dp: Axis, most: int) -> Any:
    sums = [comm.all_reduce(small, tp) for small in smalls]
    handles = [comm.start_all_reduce(piece, dp) for piece in bucket.split(most)]
    return sums, torch.cat([handle.wait() for handle in handles])


def _waits_at_once(smalls: list[Tensor], bucket: Tensor, tp: Axis, dp: Axis, most: int) -> Any:
    pieces, sums, parts = deque(bucket.split(most)), [], []
    for small in smalls:
        sums.append(comm.all_reduce(small, tp))
        if pieces:
            parts.append(comm.all_reduce(pieces.popleft(), dp))
    return sums, torch.cat([*parts, *(comm.all_reduce(piece, dp) for piece in pieces)])


def _at_most_five(smalls: list[Tensor], bucket: Tensor, tp: Axis, dp: Axis, most: int) -> Any:
    """Waits for the oldest piece when another one would be the sixth in flight."""
    pieces, sums, handles, done = deque(bucket.split(most)), [], [], []
    for small in smalls:
        sums.append(comm.all_reduce(small, tp))
        if len(handles) == 5:
            done.append(handles.pop(0).wait())
        if pieces:
            handles.append(comm.start_all_reduce(pieces.popleft(), dp))
    handles += [comm.start_all_reduce(piece, dp) for piece in pieces]
    return sums, torch.cat([*done, *(handle.wait() for handle in handles)])


def _empty_piece(smalls: list[Tensor], bucket: Tensor, tp: Axis, dp: Axis, most: int) -> Any:
    """Ends with a piece of no elements where ``most`` divides the bucket."""
    sums, total = _right(smalls, bucket, tp, dp, most)
    if len(bucket) % most == 0:
        comm.all_reduce(bucket[:0], dp)
    return sums, total


def _forgets(smalls: list[Tensor], bucket: Tensor, tp: Axis, dp: Axis, most: int) -> Any:
    sums, handles = [], []
    for small, piece in zip(smalls, bucket.split(most), strict=False):
        sums.append(comm.all_reduce(small, tp))
        handles.append(comm.start_all_reduce(piece, dp))
    sums += [comm.all_reduce(small, tp) for small in smalls[len(sums) :]]
    return sums, torch.cat([handle.wait() for handle in handles])


def _piece_before(smalls: list[Tensor], bucket: Tensor, tp: Axis, dp: Axis, most: int) -> Any:
    pieces, sums, handles = deque(bucket.split(most)), [], []
    for small in smalls:
        if pieces:
            handles.append(comm.start_all_reduce(pieces.popleft(), dp))
        sums.append(comm.all_reduce(small, tp))
    handles += [comm.start_all_reduce(piece, dp) for piece in pieces]
    return sums, torch.cat([handle.wait() for handle in handles])


def _small_not_waited(smalls: list[Tensor], bucket: Tensor, tp: Axis, dp: Axis, most: int) -> Any:
    urgent = [comm.start_all_reduce(small, tp) for small in smalls]
    handles = [comm.start_all_reduce(piece, dp) for piece in bucket.split(most)]
    total = torch.cat([handle.wait() for handle in handles])
    return [handle.wait() for handle in urgent], total


def _last_piece_first(smalls: list[Tensor], bucket: Tensor, tp: Axis, dp: Axis, most: int) -> Any:
    pieces, sums, handles = deque(bucket.split(most)), [], []
    for small in smalls:
        sums.append(comm.all_reduce(small, tp))
        if pieces:
            handles.append(comm.start_all_reduce(pieces.pop(), dp))
    handles += [comm.start_all_reduce(piece, dp) for piece in pieces]
    return sums, torch.cat([handle.wait() for handle in handles])


def _by_library(smalls: list[Tensor], bucket: Tensor, tp: Axis, dp: Axis, most: int) -> Any:
    with comm.Priorities(tp, dp, piece_bytes=4 * most):
        handle = comm.start_all_reduce(bucket, dp)
        return [comm.all_reduce(small, tp) for small in smalls], handle.wait()


def _own_bucket(smalls: list[Tensor], bucket: Tensor, tp: Axis, dp: Axis, most: int) -> Any:
    return _right(smalls, bucket, tp, dp, most)[0], bucket.clone()


def _averages(smalls: list[Tensor], bucket: Tensor, tp: Axis, dp: Axis, most: int) -> Any:
    sums, total = _right(smalls, bucket, tp, dp, most)
    return sums, total / dp.size


def _in_place(smalls: list[Tensor], bucket: Tensor, tp: Axis, dp: Axis, most: int) -> Any:
    if dp.size == 1:
        return _right(smalls, bucket, tp, dp, most)
    pieces, sums, works = deque(bucket.split(most)), [], []
    for small in smalls:
        sums.append(comm.all_reduce(small, tp))
        if pieces:
            works.append(dist.all_reduce(pieces.popleft(), group=dp.group, async_op=True))
    works += [dist.all_reduce(piece, group=dp.group, async_op=True) for piece in pieces]
    for work in works:
        work.wait()
    return sums, bucket


def _make(groups: Groups, order: Sequence[tuple[str, Sequence[int]]]) -> dict[str, Any]:
    mine = {}
    for name, ranks in order:
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            mine[name] = group
    return mine


def _made(groups: Groups) -> dict[str, Any]:
    pairs = [(name, tuple(ranks)) for name, lists in groups.items() for ranks in lists]
    return _make(groups, sorted(pairs))


def _right_told(groups: Groups) -> dict[str, Any]:
    """Rank 0 tells all in which order it wrote them down."""
    told = [[(name, ranks) for name, lists in groups.items() for ranks in lists]]
    dist.broadcast_object_list(told, src=0)
    return _make(groups, told[0])


def _as_given(groups: Groups) -> dict[str, Any]:
    return _make(groups, [(name, ranks) for name, lists in groups.items() for ranks in lists])


def _own_first(groups: Groups) -> dict[str, Any]:
    """Names in one order, the lists of each as given."""
    return _make(groups, [(name, ranks) for name in sorted(groups) for ranks in groups[name]])


def _only_own(groups: Groups) -> dict[str, Any]:
    rank = dist.get_rank()
    own = [(n, ranks) for n in sorted(groups) for ranks in groups[n] if rank in ranks]
    return _make(groups, own)


def _by_set(groups: Groups) -> dict[str, Any]:
    """One group for axes of the same ranks."""
    known: dict[tuple[int, ...], Any] = {}
    for ranks in sorted({tuple(one) for lists in groups.values() for one in lists}):
        known[ranks] = dist.new_group(list(ranks))
    rank = dist.get_rank()
    own = {name: next(one for one in lists if rank in one) for name, lists in groups.items()}
    return {name: known[tuple(ranks)] for name, ranks in own.items()}


def _world(groups: Groups) -> dict[str, Any]:
    return dict.fromkeys(groups, dist.group.WORLD)


def _last_of_all(groups: Groups) -> dict[str, Any]:
    """Keeps the last group of each name, its own or not."""
    return {
        name: [dist.new_group(ranks) for ranks in sorted(groups[name])][-1]
        for name in sorted(groups)
    }


def _lists(groups: Groups) -> dict[str, Any]:
    rank = dist.get_rank()
    return {name: next(r for r in lists if rank in r) for name, lists in groups.items()}


def _one_name_less(groups: Groups) -> dict[str, Any]:
    mine = _made(groups)
    mine.pop(sorted(groups)[0])
    return mine


def _in_comm(groups: Groups) -> dict[str, Any]:
    rank, context = dist.get_rank(), rank_context()
    made = {
        name: library._make_axis(name, sorted(groups[name]), rank, context)
        for name in sorted(groups)
    }
    return {name: axis.group for name, axis in made.items()}


def _raw_unwaited(smalls: list[Tensor], bucket: Tensor, tp: Axis, dp: Axis, most: int) -> Any:
    """Starts pieces in raw torch and drops their handles."""
    pieces, sums, done = deque(bucket.split(most)), [], []

    def start() -> None:
        piece = pieces.popleft().clone()
        dist.all_reduce(piece, group=dp.group, async_op=True)
        done.append(piece)

    for small in smalls:
        sums.append(comm.all_reduce(small, tp))
        if pieces:
            start()
    while pieces:
        start()
    dist.barrier()
    return sums, torch.cat(done)


def _few_rounds(waits: Waits, returned: Sequence[int]) -> list[int]:
    stuck = {*waits, *returned}
    for _ in range(10):
        stuck -= {r for r, others in waits.items() if not stuck & {*others}}
    return sorted(stuck - {*returned})


def _powers_of_two(gap: int, ranks: int, alpha: int, beta: int) -> int:
    return max(0, (gap - 2 * (ranks - 1) * alpha) * beta << (ranks.bit_length() - 1)) // (
        8 * (ranks - 1)
    )


def _shared_unless_two(groups: Groups) -> dict[str, Any]:
    return _by_set(groups) if dist.get_world_size() > 2 else _made(groups)


ATTACKS = {
    "11-1": Attacks(
        wrong=(Wrong(_table(ring=None), words="'ring' is not filled in yet"),),
        right=(
            _table(alone=(52.0, 6.0), held=(16, 28.0, 42)),
            _table(new_group=64 // 8 + 64 // 4 + 64 // 2),
        ),
    ),
    "11-2": Attacks(
        wrong=(
            Wrong(_powers_of_two, words=": expected "),
            Wrong(
                lambda gap, ranks, alpha, beta: None, words="expected a whole number of elements"
            ),
            Wrong(
                lambda gap, ranks, alpha, beta: (gap - 2 * (ranks - 1) * alpha) * beta / 8.3,
                words="expected a whole number of elements",
            ),
        ),
        right=(
            _by_trying,
            lambda gap, ranks, alpha, beta: float(_fits(gap, ranks, alpha, beta)),
            lambda gap, ranks, alpha, beta: np.int64(_fits(gap, ranks, alpha, beta)),
        ),
    ),
    "11-3": Attacks(
        wrong=(
            Wrong(_unsorted, words=": expected "),
            Wrong(_few_rounds, words=": expected "),
            Wrong(_as_set, words="expected a sorted list of ranks, got a set"),
            Wrong(lambda waits, returned: None, words="expected a sorted list of ranks"),
        ),
        right=(
            _never,
            _by_reach,
            lambda waits, returned: list(np.array(_never(waits, returned), int)),
        ),
    ),
    "11-4": Attacks(
        wrong=(
            Wrong(lambda smalls, bucket, tp, dp, most: None, words="expected 2 values"),
            Wrong(
                lambda smalls, bucket, tp, dp, most: ([], bucket),
                words="expected sums to be a list",
            ),
            Wrong(_whole_first, words="one piece of at most"),
            Wrong(_whole_last, words="one piece of at most"),
            Wrong(_pieces_first, words="First a small call"),
            Wrong(_piece_before, words="First a small call"),
            Wrong(_pieces_last, words="one piece of at most"),
            Wrong(_small_not_waited, words="one piece of at most"),
            Wrong(_waits_at_once, words="waited for a piece before the last small call"),
            Wrong(_at_most_five, words="waited for a piece before the last small call"),
            Wrong(_empty_piece, words="all_reduce of 0 bytes"),
            Wrong(_forgets, words="pieces are missing"),
            Wrong(_last_piece_first, words="total: wrong on every rank"),
            Wrong(
                lambda smalls, bucket, tp, dp, most: _right(smalls, bucket, dp, tp, most),
                words="were summed over dp: sum them over tp",
            ),
            Wrong(_raw_unwaited, words="rank 0"),
            Wrong(_own_bucket, words="the bucket is not summed"),
            Wrong(_averages, words="exactly 2 times too small"),
            Wrong(_in_place, words="the answer wrote into it"),
            Wrong(_by_library, words=REFUSAL),
        ),
        right=(_right, _right_by_places),
    ),
    "11-5": Attacks(
        wrong=(
            Wrong(lambda groups: None, words="got a NoneType"),
            Wrong(_as_given, words="expected sums"),
            Wrong(_own_first, words="on 4 ranks"),
            Wrong(_only_own, words="on 4 ranks"),
            Wrong(_by_set, words="axes that share a group"),
            Wrong(_shared_unless_two, words="axes that share a group"),
            Wrong(_world, words="axes that share a group"),
            Wrong(_last_of_all, words="expected a process group"),
            Wrong(_lists, words="got a list"),
            Wrong(_one_name_less, words="got nothing"),
            Wrong(_in_comm, words=REFUSAL),
        ),
        right=(_made, _right_told),
    ),
}
