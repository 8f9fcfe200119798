"""Katas 16b-1 to 16b-3: ring all-reduce, data parallelism with buckets, column and row linear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from course_lib.grading.draw import Draw
from course_lib.grading.graders.judge.katas.reused import in_raw_torch
from course_lib.grading.graders.judge.lesson_02 import RING
from course_lib.grading.graders.judge.lesson_03 import OVERLAP, own_gradients
from course_lib.grading.graders.judge.lesson_05 import MLP_PAIR
from course_lib.grading.graders.runner import lesson_02
from course_lib.grading.graders.runner import lesson_16b as runner
from course_lib.grading.placed import bytes_of
from course_lib.grading.runner import Observed
from course_lib.grading.trials import Given, Look, Mistake, Trial

SUB_AXIS = Trial(2, beside=2, dtype=torch.float64, strided=True)

# --- 16b-1 ---------------------------------------------------------------------------------------


def _with_columns(trial: Trial, draw: Draw) -> list[dict[str, Tensor]]:
    """Return the inputs of 02-4 with up to three columns."""
    ranks = RING.draw(trial, draw)
    columns = next(k for k in (3, 2, 1) if ranks[0]["x"].numel() % k == 0)
    return [{"x": rank["x"].view(-1, columns)} for rank in ranks]


RING_KATA = replace(
    RING,
    id="16b-1",
    title="a ring all-reduce",
    trials=(Trial(2), SUB_AXIS, Trial(3, dtype=torch.int64, name="three ranks, whole numbers"),
            Trial(1), Trial(4, size=1)),
    act=partial(runner.in_group, lesson_02.on_axis),
    draw=_with_columns,
    refused=runner.SENDERS,
)  # fmt: skip


# --- 16b-2 ---------------------------------------------------------------------------------------
# The towers of 03-4, each with another number of inner features. Their parameters, from the last to
# the first, are packed into buckets by size.


def _uneven(trial: Trial, draw: Draw) -> list[dict[str, Any]]:
    ranks = OVERLAP.draw(trial, draw)
    width = len(ranks[0]["towers"][0][0])
    inner = draw.random.sample(range(1, 8), len(ranks[0]["towers"]))
    towers = [(draw.normal(width, many), draw.normal(many)) for many in inner]
    element = towers[0][0].element_size()
    room = {
        "towers": towers,
        "bucket_bytes": element * draw.size((width + 1) * min(inner), width * max(inner)) + 1,
    }
    return [own | room | {"rows": own["rows"] // trial.n} for own in ranks]


def _buckets(given: Given) -> list[list[tuple[int, int]]]:
    """Return the (tower, parameter) in each bucket, in the order in which the buckets leave."""
    towers, room = given["towers"][0], given["bucket_bytes"][0]
    buckets: list[list[tuple[int, int]]] = []
    used = room
    for place in [(tower, k) for tower in reversed(range(len(towers))) for k in (1, 0)]:
        size = bytes_of(towers[place[0]][place[1]])
        if used + size > room or not buckets:
            buckets, used = [*buckets, []], 0
        buckets[-1].append(place)
        used += size
    return buckets


def _bucket_calls(given: Given, rank: int) -> Sequence[tuple[str, int]]:
    towers = given["towers"][0]
    sizes = [sum(bytes_of(towers[t][k]) for t, k in bucket) for bucket in _buckets(given)]
    return [("all_reduce", size) for size in sizes] * len(given["orders"][rank])


def _average(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).mean(0)


def _mean_of_ranks(given: Given) -> Any:
    """The results of 03-4, whose sum over the ranks is the average here."""
    return OVERLAP.expected(
        replace(given, ranks=[own | {"rows": own["rows"] * given.n} for own in given.ranks])
    )


def _sent_early(given: Given, ranks: list[Observed]) -> str:
    for rank, observed in enumerate(ranks):
        for order, (early, sent, _) in zip(
            given["orders"][rank], observed.values["sent"], strict=True
        ):
            fired = [(tower, k) for tower in reversed(order) for k in (1, 0)]
            for got, done, when in (
                (early, set(fired[:-1]), "backward computed its last gradient"),
                (sent, set(fired), "backward returned"),
            ):
                full = [set(bucket) <= done for bucket in _buckets(given)]
                if got < (right := [*full, False].index(False)):
                    return (
                        f"expected {right} of {len(full)} buckets sent on rank {rank} when {when}, "
                        f"got {got}: a hook sends every bucket that is full and has no unsent "
                        "bucket before it"
                    )
    return ""


DDP_MISTAKES: dict[str, Callable[[Given], Any]] = {
    "each rank still has its own gradients: no average was written to p.grad": own_gradients,
    "only the first micro-batch was sent: a backward inside accumulate() sends nothing": (
        lambda given: _average(own_gradients(given, 1))
    ),
    "the average was added to the rank's own gradient: replace the gradient": lambda given: [
        own + _average(own_gradients(given)) for own in own_gradients(given)
    ],
}

DDP = replace(
    OVERLAP,
    id="16b-2",
    title="data parallelism with buckets",
    names=("BucketedDDP",),
    trials=(
        Trial(2),
        replace(SUB_AXIS, name="groups 0, 2 and 1, 3, gradients in another order on some ranks"),
        Trial(3, name="three ranks, parameters that a rank did not use"),
        Trial(1),
    ),
    act=runner.ddp,
    draw=_uneven,
    expected=_mean_of_ranks,
    mistakes=tuple(
        Mistake(why, {"gradients of step 1": wrong}) for why, wrong in DDP_MISTAKES.items()
    ),
    calls=_bucket_calls,
    calls_why="Fill the buckets from the last parameter to the first, and send each once per step",
    looks=(Look("wire", "as early as possible", _sent_early), OVERLAP.looks[1]),
    hang="Every rank must send all buckets, in the same order: a bucket that is full waits for its "
    "turn, and finish sends what is left, because rank 1 does not use some parameters",
    refused=(*runner.SENDERS, "torch.nn.parallel.distributed:DistributedDataParallel.forward"),
)


# --- 16b-3 ---------------------------------------------------------------------------------------

LINEARS = replace(
    MLP_PAIR,
    id="16b-3",
    title="the column-parallel and the row-parallel linear",
    names=("column_linear", "row_linear"),
    act=runner.linears,
    mistakes=in_raw_torch(MLP_PAIR.mistakes),
    refused=(*runner.SENDERS, *MLP_PAIR.refused),
)

EXERCISES = (RING_KATA, DDP, LINEARS)
