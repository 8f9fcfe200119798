"""01-5: the fullest rank, by storages, in raw torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import comm
from course_lib.grading.answers import shown
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.ranked import RankCase, Ranked, Seen, Trial
from course_lib.mesh import Mesh, make_mesh
from course_lib.trace import state_bytes

TWO, FOUR, THREE, ONE = range(4)
TRIALS = (Trial(2, TWO), Trial(4, FOUR), Trial(3, THREE), Trial(1, ONE))
# What each rank has in each trial; the right fullest one first, before ranks are shuffled.
KINDS = {
    TWO: ("plain", "views"),
    FOUR: ("plain", "narrow", "views", "tied"),
    THREE: ("small part", "plain", "narrow"),
    ONE: ("views",),
}
MOST_SENT = 4096  # bytes of one rank's calls: sizes, no tensors
REFUSAL = "this is what you are asked to write"
Tensors = Sequence[Tensor]
Count = Callable[[Tensors], int]


def _tensors(kind: str, unit: int, rank: int) -> list[Tensor]:
    """Of one rank; ``unit`` is drawn from the seed, so that no number is known before."""
    own = unit + 8 * rank
    counter = torch.arange(3 + rank)  # int64
    if kind == "plain":
        return [torch.zeros(6 * own), counter]
    if kind == "narrow":  # more elements, fewer bytes
        return [torch.zeros(9 * own, dtype=torch.bfloat16), counter]
    if kind == "views":  # one storage, shown three times
        whole = torch.zeros(4, own)
        return [whole, whole.T, counter, whole[1:3]]
    if kind == "tied":
        weight = torch.zeros(4 * own)
        return [weight, counter, weight]
    flat = torch.zeros(9 * own)  # a small part of it is shown, all of it is in memory
    return [flat[own : own + 16], counter]


def _inputs(trial: Trial, rank: int, seed: int) -> tuple[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    unit = 8 * int(torch.randint(100, 300, (), generator=generator))
    order = torch.randperm(trial.n, generator=generator).tolist()
    return (_tensors(KINDS[trial.size][order[rank]], unit, rank),)


def _act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> Any:
    return answers[0](inputs[0])


def _storages(tensors: Tensors) -> int:
    """Bytes, each storage once and whole."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())


def _parts_shown(tensors: Tensors) -> int:
    """Each storage once, but only the tensor that shows most of it."""
    found: dict[int, int] = {}
    for t in tensors:
        key = t.untyped_storage().data_ptr()
        found[key] = max(found.get(key, 0), t.nbytes)
    return sum(found.values())


MISTAKES: tuple[tuple[Count, str], ...] = (
    # where nothing is shared the second counts like the first: other trials tell them apart
    (_parts_shown, "a storage stays in memory whole, however small a part a tensor shows"),
    (
        lambda tensors: sum(t.nbytes for t in tensors),
        "tensors that share a storage are counted several times",
    ),
    (lambda tensors: sum(t.numel() for t in tensors), "these are elements, not bytes"),
    (
        lambda tensors: sum(4 * t.numel() for t in tensors),
        "not every element has 4 bytes: there are other dtypes",
    ),
    (
        lambda tensors: sum(t.untyped_storage().nbytes() for t in tensors),
        "storages in which several tensors lie are counted several times",
    ),
    (lambda tensors: len(tensors), "this is the number of tensors"),
)


def _as_pair(value: Any) -> tuple[int, int] | None:
    if isinstance(value, Tensor):
        value = value.tolist()
    if not isinstance(value, tuple | list) or len(value) != 2:
        return None
    try:
        return int(value[0]), int(value[1])
    except (TypeError, ValueError):
        return None


def _fullest(sizes: Sequence[int]) -> tuple[int, int]:
    return sizes.index(max(sizes)), max(sizes)


def _found(seen: Seen) -> str:
    """(rank, bytes), the same on every rank."""
    got = [_as_pair(value) for value in seen.values]
    for rank, pair in enumerate(got):
        if pair is None:
            said = shown(seen.values[rank])
            return f"rank {rank} returned {said}; a pair (rank, bytes) of numbers is wanted"
    given = [_inputs(seen.trial, rank, seed=seen.seed)[0] for rank in range(seen.trial.n)]
    sizes = [_storages(tensors) for tensors in given]
    right = _fullest(sizes)
    if all(pair == right for pair in got):
        return ""
    if seen.trial.n > 1 and got == [(rank, size) for rank, size in enumerate(sizes)]:
        return "every rank names itself: nothing was gathered"
    for count, message in MISTAKES:
        mistaken = _fullest([count(tensors) for tensors in given])
        if mistaken != right and all(pair == mistaken for pair in got):
            return f"every rank says {mistaken[1]:,} on rank {mistaken[0]}: {message}"
    return _other_mistakes(got, sizes)


def _other_mistakes(got: Sequence[Any], sizes: list[int]) -> str:
    """Right sizes, wrongly put together."""
    rank, size = got[0]
    if any(pair != got[0] for pair in got):
        return f"the ranks disagree: {', '.join(map(str, got))}"
    if (size, rank) == _fullest(sizes):
        return "(rank, bytes) is wanted: these stand the other way round"
    if size == sum(sizes):
        return "this is what all ranks keep together; the fullest one is wanted"
    if size == min(sizes):
        return "this is the emptiest rank"
    if size == max(sizes):
        return f"the bytes are right, but rank {rank} does not have them"
    return f"rank {rank} with {size:,} bytes is not the fullest"


def _small(seen: Seen) -> str:
    """Sizes travel, no tensors."""
    for rank, observed in enumerate(seen.ranks):
        sent = sum(call.payload for call in observed.calls)
        if not observed.calls:
            return f"rank {rank} sent nothing: it cannot know what the others keep"
        if sent > MOST_SENT:
            return f"rank {rank} sent {sent:,} bytes: sizes are enough, no tensors"
    return ""


def _gathered(own: Any) -> list[int]:
    mine = torch.tensor(int(own))
    parts = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return [int(part) for part in parts]


def _right(tensors: Tensors) -> tuple[int, int]:
    return _fullest(_gathered(_storages(tensors)))


def _right_by_max(tensors: Tensors) -> list[int]:
    """Rank and bytes in one number; the largest one wins."""
    n, seen, own = dist.get_world_size(), set(), 0
    for t in tensors:
        storage = t.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            own += storage.nbytes()
    packed = torch.tensor(own * n + dist.get_rank())
    dist.all_reduce(packed, op=dist.ReduceOp.MAX)
    return [int(packed) % n, int(packed) // n]


def _counting(count: Count) -> Answer:
    return lambda tensors: _fullest(_gathered(count(tensors)))


def _putting(choose: Callable[[list[int]], Any]) -> Answer:
    return lambda tensors: choose(_gathered(_storages(tensors)))


def _sends_tensors(tensors: Tensors) -> tuple[int, int]:
    """Right numbers, after everything was sent."""
    dist.all_gather_object([None] * dist.get_world_size(), list(tensors))
    return _right(tensors)


def _by_library(tensors: Tensors) -> tuple[int, int]:
    return _fullest(_gathered(state_bytes(tensors).total))


def _by_mesh(tensors: Tensors) -> tuple[int, int]:
    own = torch.tensor([_storages(tensors)])
    return _fullest(comm.all_gather(own, make_mesh().dp).tolist())


FULLEST = Ranked(
    id="01-5",
    title="the fullest rank, in raw PyTorch",
    names=("fullest",),
    hints=(
        "Which two tensors lie in the same storage? Where does a storage begin, and how many bytes "
        "has it?",
        "A dict from data_ptr() to nbytes() of each tensor's untyped_storage() has every storage "
        "once. Gather the sum of its values from all ranks, and take the largest.",
        "own = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}; x "
        "= torch.tensor(sum(own.values())); parts = [torch.zeros_like(x) for _ in "
        "range(dist.get_world_size())]; dist.all_gather(parts, x); then index of the largest.",
    ),
    wrong=(
        Wrong(lambda tensors: None, words="a pair (rank, bytes) of numbers is wanted"),
        Wrong(
            lambda tensors: (dist.get_rank(), _storages(tensors)), words="every rank names itself"
        ),
        Wrong(_counting(lambda tensors: sum(t.nbytes for t in tensors)), words="several times"),
        Wrong(_counting(_parts_shown), words="a storage stays in memory whole"),
        Wrong(_counting(lambda tensors: sum(t.numel() for t in tensors)), words="elements"),
        Wrong(
            _counting(lambda tensors: sum(t.untyped_storage().nbytes() for t in tensors)),
            words="several times",
        ),
        Wrong(_putting(lambda sizes: (max(sizes), sizes.index(max(sizes)))), words="way round"),
        Wrong(_putting(lambda sizes: (0, sum(sizes))), words="all ranks keep together"),
        Wrong(_putting(lambda sizes: (sizes.index(min(sizes)), min(sizes))), words="emptiest"),
        Wrong(
            _putting(lambda sizes: ((sizes.index(max(sizes)) + 1) % len(sizes), max(sizes))),
            words="does not have them",
        ),
        Wrong(_sends_tensors, words="sizes are enough"),
        Wrong(_by_library, words=REFUSAL),
        Wrong(_by_mesh, words=REFUSAL),
    ),
    right=(_right, _right_by_max),
    stub=lambda tensors: None,
    trials=TRIALS,
    inputs=_inputs,
    act=_act,
    looks=(
        RankCase("outputs", "two ranks", TWO, _found),
        RankCase("outputs", "four ranks, views and ties", FOUR, _found),
        RankCase("outputs", "three ranks, a part of something large", THREE, _found),
        RankCase("outputs", "one rank", ONE, _found),
        RankCase("wire", "sizes alone travel", FOUR, _small),
    ),
    refused=("course_lib.comm.transfer:issue", "course_lib.trace.memory:state_bytes"),
)
