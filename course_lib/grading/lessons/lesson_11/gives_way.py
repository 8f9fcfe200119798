"""11-4: a bucket of dp in pieces, one behind each small call of tp."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import comm
from course_lib.grading.compare import difference
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.ranked import RankCase, Ranked, Seen, Trial
from course_lib.mesh import Axis, Mesh, across_axis, sub_axis

TWO, FOUR, ONE = range(3)
TRIALS = (Trial(2, 4), Trial(4, 8), Trial(1, 4))  # size: elements of a piece
ELEMENTS = {2: 18, 4: 13, 1: 10}  # of the bucket: more pieces than small calls, and fewer
SMALLS, SMALL = 3, 3
REFUSAL = "this is what you are asked to write"


def _inputs(trial: Trial, rank: int, seed: int) -> tuple[Any, ...]:
    """The small tensors, the bucket, and the most elements of a piece."""
    generator = torch.Generator().manual_seed(seed + rank)
    smalls = [torch.randn(SMALL, generator=generator) for _ in range(SMALLS)]
    return smalls, torch.randn(ELEMENTS[trial.n], generator=generator), trial.size


def _axes(mesh: Mesh) -> tuple[Axis, Axis]:
    """tp and dp: of the same ranks where there are two, a grid where there are four."""
    run = min(2, mesh.dp.size)
    other = across_axis if mesh.dp.size == 4 else sub_axis
    return sub_axis(mesh.dp, run, "tp"), other(mesh.dp, run, "dp")


def _act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> Any:
    smalls, bucket, most = inputs
    tp, dp = _axes(mesh)
    mesh.trace.clear()
    value = answers[0](smalls, bucket, tp, dp, most)
    return value, [span.axis for span in mesh.trace.spans]  # in the order of the waits


def _members(n: int, rank: int) -> tuple[list[int], list[int]]:
    """The ranks of ``rank``'s groups of tp and dp."""
    if n < 4:
        return list(range(n)), list(range(n))
    first = rank - rank % 2
    return [first, first + 1], [rank % 2, rank % 2 + 2]


def _formed(seen: Seen) -> str:
    for rank, (value, _) in enumerate(seen.values):
        if not (isinstance(value, tuple | list) and len(value) == 2):
            return f"rank {rank} returned a {type(value).__name__}; wanted are two: sums and total"
        if not (isinstance(value[0], tuple | list) and len(value[0]) == SMALLS):
            return f"rank {rank}: sums is to be a list of the {SMALLS} small tensors' sums"
    return ""


def _given(seen: Seen) -> list[tuple[Any, ...]]:
    return [_inputs(seen.trial, rank, seen.seed) for rank in range(seen.trial.n)]


def _sums(seen: Seen) -> str:
    if says := _formed(seen):
        return says
    given, n = _given(seen), seen.trial.n
    for place in range(SMALLS):
        got = [value[0][place] for value, _ in seen.values]
        own = [one[0][place] for one in given]
        wanted = [torch.stack([own[m] for m in _members(n, r)[0]]).sum(0) for r in range(n)]
        across = [torch.stack([own[m] for m in _members(n, r)[1]]).sum(0) for r in range(n)]
        says = difference(f"sums of small tensor {place}", got, wanted)
        if says and n == 4 and not difference("", got, across):
            return f"small tensor {place} was summed over dp, where tp is wanted ({says})"
        if says:
            return says
    return ""


def _total(seen: Seen) -> str:
    if says := _formed(seen):
        return says
    given, n = _given(seen), seen.trial.n
    got = [value[1] for value, _ in seen.values]
    own = [one[1] for one in given]
    wanted = [torch.stack([own[m] for m in _members(n, r)[1]]).sum(0) for r in range(n)]
    says = difference("totals", got, wanted)
    if says and n > 1 and not difference("", got, own):
        return f"the bucket is not summed ({says})"
    if says and all(isinstance(one, Tensor) and one.numel() < own[0].numel() for one in got):
        return f"pieces are missing: what is left goes at the end ({says})"
    return says


def _wanted_calls(trial: Trial) -> list[int]:
    """The bytes of the calls in order."""
    pieces = deque(4 * len(piece) for piece in torch.empty(ELEMENTS[trial.n]).split(trial.size))
    calls = []
    for _ in range(SMALLS):
        calls += [4 * SMALL] + ([pieces.popleft()] if pieces else [])
    return [*calls, *pieces]


def _calls(seen: Seen) -> str:
    wanted, most = _wanted_calls(seen.trial), 4 * seen.trial.size
    for rank, observed in enumerate(seen.ranks):
        ops = {call.op for call in observed.calls} - {"all_reduce"}
        if ops:
            return f"rank {rank} called {sorted(ops)[0]}: only all_reduce is wanted"
        made = [call.payload for call in observed.calls]
        if made == wanted:
            continue
        said = f"rank {rank} sent, in order, {made} bytes; {wanted} is wanted"
        if max(made, default=0) > most:
            return f"a piece has at most {most} bytes ({said})"
        if made and made[0] != wanted[0]:
            return f"a small call comes first: the bucket gives way ({said})"
        return f"one piece behind each small call, the rest at the end ({said})"
    return ""


def _waits(seen: Seen) -> str:
    for rank, (_, axes) in enumerate(seen.values):
        last = max((place for place, axis in enumerate(axes) if axis == "tp"), default=0)
        if "dp" in axes[:last]:
            return (
                f"rank {rank} waited for a piece before the last small call was through: start "
                "pieces, and wait at the end"
            )
    return ""


def _left_alone(seen: Seen) -> str:
    for rank, observed in enumerate(seen.ranks):
        smalls, bucket, _ = _inputs(seen.trial, rank, seen.seed)
        now_smalls, now_bucket, _ = observed.inputs
        if not all(map(torch.equal, (*smalls, bucket), (*now_smalls, now_bucket))):
            return f"rank {rank} wrote into what it was given: smalls and bucket stay as they are"
    return ""


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


GIVES_WAY = Ranked(
    id="11-4",
    title="a bucket that gives way",
    names=("give_way",),
    hints=(
        "Cut the bucket first. Then go through the small tensors: which call is waited for, and "
        "which is only started?",
        "bucket.split(most) gives the pieces. Behind each comm.all_reduce of a small tensor start "
        "the next piece, if there is one, and keep its handle. After the loop start the rest.",
        "pieces = deque(bucket.split(most)); for small in smalls: sums.append(comm.all_reduce("
        "small, tp)); if pieces: handles.append(comm.start_all_reduce(pieces.popleft(), dp)). "
        "Then the rest, and torch.cat([h.wait() for h in handles]).",
    ),
    wrong=(
        Wrong(lambda smalls, bucket, tp, dp, most: None, words="returned a NoneType"),
        Wrong(lambda smalls, bucket, tp, dp, most: ([], bucket), words="sums is to be a list"),
        Wrong(_whole_first, words="a piece has at most"),
        Wrong(_whole_last, words="a piece has at most"),
        Wrong(_pieces_first, words="a small call comes first"),
        Wrong(_piece_before, words="a small call comes first"),
        Wrong(_pieces_last, words="one piece behind each small call"),
        Wrong(_small_not_waited, words="one piece behind each small call"),
        Wrong(_waits_at_once, words="waited for a piece before the last small call"),
        Wrong(_forgets, words="pieces are missing"),
        Wrong(_last_piece_first, words="totals are wrong on every rank"),
        Wrong(
            lambda smalls, bucket, tp, dp, most: _right(smalls, bucket, dp, tp, most),
            words="was summed over dp, where tp is wanted",
        ),
        Wrong(_own_bucket, words="the bucket is not summed"),
        Wrong(_averages, words="exactly 2 times too small"),
        Wrong(_in_place, words="wrote into what it was given"),
        Wrong(_by_library, words=REFUSAL),
    ),
    right=(_right, _right_by_places),
    stub=lambda smalls, bucket, tp, dp, most: None,
    trials=TRIALS,
    inputs=_inputs,
    act=_act,
    looks=(
        RankCase("outputs", "sums of the small tensors, two ranks", TWO, _sums),
        RankCase("outputs", "total of the bucket, two ranks", TWO, _total),
        RankCase("outputs", "sums of the small tensors, a grid of four", FOUR, _sums),
        RankCase("outputs", "total of the bucket, a grid of four", FOUR, _total),
        RankCase("outputs", "one rank", ONE, _total),
        RankCase("outputs", "what is given is left alone", TWO, _left_alone, later=True),
        RankCase("wire", "order and bytes, more pieces than small calls", TWO, _calls),
        RankCase("wire", "order and bytes, fewer pieces", FOUR, _calls),
        RankCase("wire", "pieces are started, not waited for", TWO, _waits),
    ),
    refused=("course_lib.comm.instruments.priorities:Priorities.__enter__",),
)
