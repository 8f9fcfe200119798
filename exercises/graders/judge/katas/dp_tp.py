"""Katas 16b-1 to 16b-3: ring all-reduce, data parallelism with buckets, column and row linear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
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
from course_lib.grading.trials import Given, Look, Mistake, Trial, outside

SUB_AXIS = Trial(2, beside=2, dtype=torch.float64, strided=True)

# --- 16b-1 ---------------------------------------------------------------------------------------


def _with_columns(trial: Trial, draw: Draw) -> list[dict[str, Tensor]]:
    """Return the inputs of 02-4 with up to three columns."""
    ranks = RING.draw(trial, draw)
    columns = next(k for k in (3, 2, 1) if ranks[0]["x"].numel() % k == 0)
    return [{"x": rank["x"].view(-1, columns)} for rank in ranks]


def _even(given: Given, ranks: list[Observed]) -> str:
    """Expect shards that differ by one element at most."""
    x, n = given["x"][0], given.n
    for rank, observed in enumerate(ranks):
        for call in observed.calls:
            many = call.payload // x.element_size()
            if call.op == "send" and abs(many - x.numel() / n) >= 1:
                return (
                    f"expected shards of {x.numel() // n} or {-(-x.numel() // n)} elements, but "
                    f"rank {rank} sent one of {many}: shards may differ by one element"
                )
    return ""


RING_KATA = replace(
    RING,
    id="16b-1",
    title="a ring all-reduce",
    trials=(Trial(2), SUB_AXIS, Trial(3, dtype=torch.int64, name="three ranks, whole numbers"),
            Trial(1), Trial(4, size=1)),
    act=partial(runner.in_group, lesson_02.on_axis),
    draw=_with_columns,
    looks=(
        *RING.looks,
        Look("wire", "shards of equal size", _even),
        Look("wire", "messages in the group", outside),
    ),
    refused=runner.SENDERS,
)  # fmt: skip


# --- 16b-2 ---------------------------------------------------------------------------------------
# The towers of 03-4, each with another number of inner features. Their parameters, from the last to
# the first, are packed into buckets by size.


UNUSED = Trial(2, name="two ranks, a parameter that the last backward did not use")


def _uneven(trial: Trial, draw: Draw) -> list[dict[str, Any]]:
    ranks = OVERLAP.draw(trial, draw)
    width = len(ranks[0]["towers"][0][0])
    inner = draw.random.sample(range(1, 8), len(ranks[0]["towers"]))
    towers = [(draw.normal(width, many), draw.normal(many)) for many in inner]
    element = towers[0][0].element_size()
    most = element * draw.size((width + 1) * min(inner), width * max(inner))
    filled = accumulate(bytes_of(p) for tower in reversed(towers) for p in reversed(tower))
    if not draw.call:  # the first bucket is exactly full
        most = max((size for size in filled if size <= most), default=most)
    changed = {"towers": towers, "bucket_bytes": most}
    if trial == UNUSED and draw.call:
        ranks[1]["earlier"] = deepcopy(ranks[1]["orders"])
        ranks[1]["orders"][0].remove(1)
    return [own | changed | {"rows": own["rows"] // trial.n} for own in ranks]


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


def _without_earlier(given: Given) -> Tensor:
    """A parameter that the last backward did not use counts as zeros."""
    found = []
    for own, gradients in zip(given.ranks, own_gradients(given), strict=True):
        sizes = [(t, p.numel()) for t, tower in enumerate(own["towers"]) for p in tower]
        shards = zip(sizes, gradients.split([size for _, size in sizes]), strict=True)
        found.append(torch.cat([g * (t in own["orders"][0]) for (t, _), g in shards]))
    return _average(found)


DDP_MISTAKES: dict[str, Callable[[Given], Any]] = {
    "each rank still has its own gradients: no average was written to p.grad": own_gradients,
    "only the first micro-batch was sent: a backward inside accumulate() sends nothing": (
        lambda given: _average(own_gradients(given, 1))
    ),
    "a parameter that only the backwards inside accumulate() used lost its gradient: send what is "
    "in its p.grad, not zeros": _without_earlier,
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
        UNUSED,
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


def _any_dims(trial: Trial, draw: Draw) -> Any:
    """The inputs of 05-4, with x of two, three or four dimensions."""
    _, given = MLP_PAIR.draw(trial, draw)
    *tokens, hidden = given["x"].shape
    shape = (-1, hidden) if draw.call else (*tokens, *[1] * trial.strided, hidden)
    given |= {name: given[name].reshape(shape) for name in ("x", "dy")}
    return [dict(given) for _ in range(trial.n)], given


def _without_inner_bias(given: Given) -> Tensor:
    mlp = given.whole["mlp"]
    return mlp.fc_out(F.gelu(F.linear(given.whole["x"], mlp.fc_in.weight))).detach()


def _scaled(message: str, *names: str, up: bool) -> Mistake:
    """Return a mistake that makes some gradients n times too large or too small."""

    def results(name: str) -> Callable[[Given], Any]:
        return lambda given: [
            g * (given.n if up else 1 / given.n) for g in given.expected[f"gradient of {name}"]
        ]

    return Mistake(message, {f"gradient of {name}": results(name) for name in names})


LINEAR_MISTAKES = (
    Mistake("the inner bias is missing in column_linear", {"outputs": _without_inner_bias}),
    _scaled(
        "the backward of row_linear sums the gradient that arrives, which is already the whole one "
        "on every rank: return it as it is",
        "x", "bias_in", up=True,
    ),
    _scaled("column_linear averages the gradient of x: expected the sum", "x", up=False),
    _scaled(
        "the gradient of the outer bias is summed over the ranks: each has the whole one",
        "bias_out", up=True,
    ),
    _scaled(
        "each rank added 1/n of the outer bias, so its gradient is 1/n too: add bias after the sum",
        "bias_out", up=False,
    ),
)  # fmt: skip

LINEARS = replace(
    MLP_PAIR,
    id="16b-3",
    title="the column-parallel and the row-parallel linear",
    names=("column_linear", "row_linear"),
    act=runner.linears,
    draw=_any_dims,
    mistakes=(*in_raw_torch(MLP_PAIR.mistakes), *LINEAR_MISTAKES),
    refused=(*runner.SENDERS, *MLP_PAIR.refused),
)

EXERCISES = (RING_KATA, DDP, LINEARS)
