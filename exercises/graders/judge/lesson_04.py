"""Lesson 04, ZeRO: what the exercises give, and what they expect."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from course_lib.grading.answers import NotRight, shown
from course_lib.grading.draw import Draw
from course_lib.grading.exercise import Case, Function, Instance, Wrong
from course_lib.grading.graders.by_hand import by_hand
from course_lib.grading.graders.runner import lesson_04 as runner
from course_lib.grading.placed import bytes_of
from course_lib.grading.ranked import OnRanks
from course_lib.grading.runner import Observed
from course_lib.grading.trials import TRIALS, Given, Look, Mistake, Trial
from course_lib.ledger import wire

STORED, AT_1000 = "kept, GB", "kept, 1000 ranks"
SENT, FOUR_BATCHES = "sent, GB", "sent, 4 micro-batches"


# --- 04-2 ----------------------------------------------------------------------------------------

Pair = tuple[Any, Any]


def _bounds(elements: int, n: int, rank: int) -> Pair:
    shard = -(-elements // n)
    return min(rank * shard, elements), min((rank + 1) * shard, elements)


def _every_rank(
    lengths: Callable[[random.Random, int], Sequence[int]], more: int = 1
) -> Callable[[random.Random], list[Instance]]:
    """Draw every rank of two flat tensors on n ranks, and of the first on n + ``more``, so that a
    result depends on each argument."""

    def draw(rng: random.Random) -> list[Instance]:
        n = rng.randint(5, 8)
        first, second = lengths(rng, n)
        pairs = ((first, n), (second, n), (first, n + more))
        return [{"elements": e, "n": n, "rank": rank} for e, n in pairs for rank in range(n)]

    return draw


def _as_pair(value: Any) -> Pair:
    try:
        begin, end = value
    except (TypeError, ValueError):
        raise NotRight(f"expected a pair (begin, end), got {shown(value)}") from None
    for each in (begin, end):
        if isinstance(each, bool) or not hasattr(each, "__index__"):
            raise NotRight(f"expected begin and end to be whole numbers, got {shown(each)}")
    return int(begin), int(end)


def _uneven(elements: int, n: int, rank: int) -> Pair:
    """Sizes that differ by one, as torch.tensor_split makes them."""
    size, more = divmod(elements, n)
    begin = rank * size + min(rank, more)
    return begin, begin + size + (rank < more)


def _in_front(elements: int, n: int, rank: int) -> Pair:
    shard = -(-elements // n)
    padding = n * shard - elements
    return max(rank * shard - padding, 0), max((rank + 1) * shard - padding, 0)


BOUNDS_MISTAKES: Mapping[str, Callable[[int, int, int], Pair]] = {
    "Rounded down: no rank owns the last elements.": (
        lambda elements, n, rank: (rank * (elements // n), (rank + 1) * (elements // n))
    ),
    "The last rank takes the remainder, so its shard is the largest: a collective needs equal "
    "shards, so round up and pad.": lambda elements, n, rank: (
        rank * (elements // n),
        elements if rank == n - 1 else (rank + 1) * (elements // n),
    ),
    "The padding is included: there are no elements after the last one.": (
        lambda elements, n, rank: (rank * -(-elements // n), (rank + 1) * -(-elements // n))
    ),
    "Where a shard is all padding, begin is larger than end: both are elements there.": (
        lambda elements, n, rank: (rank * -(-elements // n), _bounds(elements, n, rank)[1])
    ),
    "These sizes differ by one, as torch.tensor_split makes them: shards have equal places, and "
    "only the end of the flat tensor is padding.": _uneven,
    "One place too many where n divides the elements: there is no padding then.": (
        lambda elements, n, rank: (
            min(rank * (elements // n + 1), elements),
            min((rank + 1) * (elements // n + 1), elements),
        )
    ),
    "The padding is in front: it belongs at the end.": _in_front,
    "end is the place after the last own element, as in a slice.": (
        lambda *given: (_bounds(*given)[0], _bounds(*given)[1] - 1)
    ),
    "This is (begin, length): expected (begin, end).": (
        lambda *given: (_bounds(*given)[0], _bounds(*given)[1] - _bounds(*given)[0])
    ),
}

BOUNDS = Function(
    id="04-2",
    title="the bounds of a shard",
    names=("bounds",),
    mistakes=tuple(Wrong(answer, why) for why, answer in BOUNDS_MISTAKES.items()),
    reference=_bounds,
    normal=_as_pair,
    drawn=(
        Case(
            "n divides the elements",
            _every_rank(lambda rng, n: [n * (n + 1) * k for k in (rng.randint(1, 9), 2**55 + 1)]),
        ),
        Case(
            "padding in the last shard",
            _every_rank(lambda rng, n: [n * (n + 1) * k - 1 for k in rng.sample(range(1, 9), 2)]),
        ),
        Case("shards that are all padding", _every_rank(lambda rng, n: (n + 1, n + 2), -1)),
        Case("fewer elements than ranks", _every_rank(lambda rng, n: rng.sample(range(1, n), 2))),
    ),
)


# --- shards and bytes ----------------------------------------------------------------------------


def _cut(flat: Tensor, n: int) -> list[Tensor]:
    """Return the shards of a flat tensor, zeros at the end."""
    return [each.clone() for each in F.pad(flat, (0, -len(flat) % n)).chunk(n)]


def _own(flats: Sequence[Tensor], n: int) -> list[Tensor]:
    """Return by rank the shards of several flat tensors, in one tensor."""
    return [torch.cat([_cut(flat, n)[rank] for flat in flats]) for rank in range(n)]


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum(0)


def _bytes_sent(given: Given, ranks: list[Observed], right: Sequence[Fraction], why: str) -> str:
    """Expect one of the numbers of bytes in ``right`` from each rank."""
    for rank, observed in enumerate(ranks):
        sent = sum((call.wire(given.n) for call in observed.calls), Fraction(0))
        if sent not in right:
            ops = ", ".join(sorted({call.op for call in observed.calls})) or "no operation"
            return (
                f"expected {float(right[0]):,g} bytes from rank {rank}, got {float(sent):,g} by "
                f"{ops}: {why}"
            )
    return ""


# --- 04-3 ----------------------------------------------------------------------------------------

PADDED = "four ranks, one with padding only"


def step_inputs(trial: Trial, draw: Draw) -> Any:
    """In the second of three steps all gradients are zero, or they cancel."""
    elements = 3 * draw.size(2, 3) if trial.name == PADDED else draw.size(3, 20)
    elements = 1 if trial.n == 3 and draw.call else elements
    if trial.strided:  # first with padding, then without
        elements += -elements % trial.n + (not draw.call)
    weights, rate = draw.normal(elements), draw.random.uniform(0.05, 0.3)
    gradients = [draw.tensor(runner.STEPS, elements) for _ in range(trial.n)]
    for own in gradients[2 * draw.call * (trial.n > 1) :]:
        own[1] = 0
    if draw.call and trial.n > 1:
        gradients[0][1] = -gradients[1][1]
    rule = {"rate": rate, "rule": runner.Momentum}
    return [{"weights": weights, "gradients": own, **rule} for own in gradients]


def _stepped(given: Given, weights: Tensor, *gradients: Tensor, **other: Any) -> list[Tensor]:
    """Return the weights of one process after a step by each of ``gradients``. ``other`` are
    arguments of the rule."""
    update, found = given["rule"][0](given["rate"][0], **other), []
    for gradient in gradients:
        weights = update(weights, gradient)
        found.append(weights)
    return found


def after_steps(given: Given, **other: Any) -> dict[str, Any]:
    """Return the weights of one process after each step."""
    after = _stepped(given, given["weights"][0], *_sum(given["gradients"]), **other)
    return {runner.after(step): new for step, new in enumerate(after, 1)}


def _start(given: Given) -> Tensor:
    return given["weights"][0]


def _first(given: Given) -> list[Tensor]:
    """Return each rank's gradient of the first step."""
    return [each[0] for each in given["gradients"]]


def _new(given: Given) -> Tensor:
    return _stepped(given, _start(given), _sum(_first(given)))[0]


def _joined(given: Given, gradients: Sequence[Tensor]) -> Tensor:
    """Return the weights if rank r updates its shard with ``gradients[r]``."""
    shards = zip(_cut(_start(given), given.n), gradients, strict=True)
    return torch.cat([_stepped(given, w, g)[0] for w, g in shards])[: len(_start(given))]


def _own_gradients(given: Given) -> Tensor:
    return _joined(given, [_cut(g, given.n)[rank] for rank, g in enumerate(_first(given))])


def _of_next(given: Given) -> Tensor:
    shards = _cut(_sum(_first(given)), given.n)
    return _joined(given, [*shards[1:], shards[0]])


def _other_order(given: Given) -> Tensor:
    shards = _cut(_new(given), given.n)
    return torch.cat([shards[-1], *shards[:-1]])[: len(_start(given))]


def _own_only(old: Tensor, new: Tensor, n: int) -> list[Tensor]:
    """Return by rank the old values, with the new ones of the own shard."""
    cut, right = _cut(old, n), _cut(new, n)
    return [torch.cat([*cut[:r], right[r], *cut[r + 1 :]])[: len(old)] for r in range(n)]


def _one_shard(given: Given, ranks: list[Observed]) -> str:
    """Expect one call of update per step, with the own shard."""
    shard = len(_cut(_start(given), given.n)[0])
    for rank, observed in enumerate(ranks):
        if (sizes := observed.values[runner.SIZES]) != [shard] * runner.STEPS:
            return (
                f"expected update to get the own shard of {shard} elements once per step, got "
                f"{sizes} elements on rank {rank}: its moment is as large as what it updates"
            )
    return ""


AFTER_1 = runner.after(1)
STEP_MISTAKES: Mapping[str, Callable[[Given], Any]] = {
    "the weights have not changed: no rank has made a step": _start,
    "each owner updated its shard with its own rank's gradient: reduce-scatter the gradients "
    "first": _own_gradients,
    "the gradients are averaged over the ranks: expected their sum": (
        lambda given: _stepped(given, _start(given), _sum(_first(given)) / given.n)[0]
    ),
    "each rank updates its shard with the gradients of another one: rank r owns shard r": _of_next,
    "the shards are joined in another order than that of the ranks": _other_order,
    "the step was made twice": (lambda given: _stepped(given, _new(given), _sum(_first(given)))[0]),
    "on every rank only its own shard is new: gather the shards after the step": (
        lambda given: _own_only(_start(given), _new(given), given.n)
    ),
    "each rank updates all weights with its own gradient: the gradients are never summed": (
        lambda given: [_stepped(given, _start(given), g)[0] for g in _first(given)]
    ),
}


def _step_bytes(given: Given, ranks: list[Observed]) -> str:
    size = bytes_of(_cut(_start(given), given.n)[0])
    right = wire("reduce_scatter", size * given.n, given.n) + wire("all_gather", size, given.n)
    why = (
        f"in {runner.STEPS} steps, each with a reduce-scatter of the padded gradients and an "
        "all-gather of the shards, as much as one all-reduce"
    )
    return _bytes_sent(given, ranks, [runner.STEPS * right], why)


STEP = OnRanks(
    id="04-3",
    title="a step of stage 1",
    names=("sharded_step",),
    axes=("weights",),
    trials=(*TRIALS, Trial(4, name=PADDED)),
    act=runner.stage_1,
    draw=step_inputs,
    expected=after_steps,
    mistakes=tuple(Mistake(why, {AFTER_1: compute}) for why, compute in STEP_MISTAKES.items()),
    looks=(
        Look("outputs", "update gets one shard", _one_shard, one_rank=True),
        Look("wire", "bytes", _step_bytes),
    ),
    refused=(
        "course_lib.zero.flat:FlatParameter.start_gather",
        "course_lib.zero.flat:FlatParameter.start_reduce",
        "course_lib.zero.sharded:Sharded.step",
    ),
)


# --- 04-4 ----------------------------------------------------------------------------------------

STEPS = 2


def _training(trial: Trial, draw: Draw) -> Any:
    """Towers of three parameters, one bucket each, and ``trial.size`` micro-batches. Four ranks
    have large buckets, and in the second call fewer elements than ranks in each."""
    towers, width = draw.size(2, 5), draw.size(3, 8)
    if trial.n == 4:
        towers, width = (2, 1) if draw.call else (8, 2 * draw.size(23, 25) + 1)
    shapes = ((width, width), (width,), (1,))
    buckets = [[draw.normal(*shape, scale=0.25) for shape in shapes] for _ in range(towers)]
    count, rows = (STEPS, trial.size, runner.ROWS), runner.ROWS * trial.size * trial.n
    return [
        {"buckets": buckets, "x": draw.normal(*count, width), "y": draw.normal(*count),
         "rows": rows}
        for _ in range(trial.n)
    ]  # fmt: skip


def _micro(given: Given, buckets: Sequence[list[Tensor]], step: int) -> list[list[list[Tensor]]]:
    """Return the flat gradients by rank, micro-batch and bucket."""
    leaves = [[p.detach().clone().requires_grad_() for p in bucket] for bucket in buckets]
    parameters = [p for bucket in leaves for p in bucket]

    def gradients(x: Tensor, y: Tensor) -> list[Tensor]:
        loss = runner.loss_of(leaves, x, y) / given["rows"][0]
        found = torch.autograd.grad(loss, parameters)
        return [runner.flat(found[at : at + 3]) for at in range(0, len(found), 3)]

    return [
        [gradients(x, y) for x, y in zip(rank["x"][step], rank["y"][step], strict=True)]
        for rank in given.ranks
    ]


def _total(batches: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the sum over micro-batches, by bucket."""
    return [_sum(each) for each in zip(*batches, strict=True)]


def _all_batches(given: Given, buckets: Sequence[list[Tensor]], step: int) -> list[Tensor]:
    return _total([batch for rank in _micro(given, buckets, step) for batch in rank])


def _twin(given: Given, *, keeps: bool = False) -> dict[str, Any]:
    """Return the results of one process; ``keeps``: gradients of the step before are kept."""
    buckets = [[p.clone() for p in bucket] for bucket in given["buckets"][0]]
    flats = [runner.flat(bucket).requires_grad_() for bucket in buckets]
    optimizer, found = runner.sgd(flats), {}
    for step in range(STEPS):
        total = _all_batches(given, buckets, step)
        found.setdefault(runner.SHARDS, _own(total, given.n))
        for flat, gradient in zip(flats, total, strict=True):
            flat.grad = gradient if flat.grad is None or not keeps else flat.grad + gradient
        optimizer.step()
        for bucket, flat in zip(buckets, flats, strict=True):
            values = flat.detach().split([p.numel() for p in bucket])
            bucket[:] = [each.view_as(p) for each, p in zip(values, bucket, strict=True)]
        found[runner.after(step + 1)] = runner.flat(flats)
    return found


def _before(given: Given) -> list[Tensor]:
    return [runner.flat(bucket) for bucket in given["buckets"][0]]


def _gathers_nothing(given: Given) -> list[Tensor]:
    """Return by rank the weights after a step if each puts only its own shards into them."""
    old = _before(given)
    new = given.expected[AFTER_1][0].split([len(each) for each in old])
    by_bucket = [_own_only(a, b, given.n) for a, b in zip(old, new, strict=True)]
    return [torch.cat(each) for each in zip(*by_bucket, strict=True)]


def _shards_of(pick: Callable[[list[list[list[Tensor]]], int], list[Tensor]]) -> Any:
    """Return the results of a mistake: ``pick(micro, rank)`` is the gradient, by bucket, of which
    the rank has its shards."""

    def compute(given: Given) -> list[Tensor]:
        micro = _micro(given, given["buckets"][0], 0)
        return [_own(pick(micro, rank), given.n)[rank] for rank in range(given.n)]

    return {runner.SHARDS: compute}


def _repeated(micro: list[list[list[Tensor]]], rank: int) -> list[Tensor]:
    batches = [batch for each in micro for i, batch in enumerate(each) for _ in each[i:]]
    return _total(batches)


# what a mistake has the shards of, by bucket: made from [rank][micro-batch][bucket] and the rank
BUCKET_MISTAKES: Mapping[str, Callable[[list[list[list[Tensor]]], int], list[Tensor]]] = {
    "only the last micro-batch is in the shard: add what arrives to shard.grad": (
        lambda micro, rank: _total([each[-1] for each in micro])
    ),
    "only the first micro-batch is in the shard: after a bucket is sent, all its gradients are "
    "missing again": lambda micro, rank: _total([each[0] for each in micro]),
    "earlier micro-batches count several times: their gradients are still in p.grad when the next "
    "one is added, so free them": _repeated,
    "the shard has this rank's own gradient: sum over the ranks with a reduce-scatter": (
        lambda micro, rank: _total(micro[rank])
    ),
    "gradients are averaged over the ranks: the losses are divided already, so sum them": (
        lambda micro, rank: [g / len(micro) for g in _total([b for each in micro for b in each])]
    ),
}


def _bucket_calls(given: Given, ranks: list[Observed]) -> str:
    """Expect a reduce-scatter per bucket and micro-batch, then an all-gather per bucket."""
    n, batches = given.n, given.trial.size
    sizes = [n * bytes_of(_cut(each, n)[0]) for each in _before(given)]
    early = len(sizes) * batches
    for rank, observed in enumerate(ranks):
        ops = [call.op for call in observed.calls]
        made = ops.index("all_gather") if "all_gather" in ops else len(ops)
        if made != early:
            return (
                f"expected {early} calls in the backwards of a step on rank {rank}, one for each "
                f"of {len(sizes)} buckets and {batches} micro-batches, got {made}"
            )
    right = sum((batches * wire("reduce_scatter", size, n) + wire("all_gather", size // n, n)
                 for size in sizes), Fraction(0))  # fmt: skip
    why = f"(M+1)(n-1)/n of the bytes of the gradients per step, with M = {batches}, in two steps"
    return _bytes_sent(given, ranks, [STEPS * right], why)


def _freed(given: Given, ranks: list[Observed]) -> str:
    """Expect no full gradients: neither left nor at the peak."""
    shards = [_cut(each, given.n)[0] for each in _before(given)]
    limit = given.n * sum(map(bytes_of, shards))
    for rank, observed in enumerate(ranks):
        found = observed.values
        if found["left"]:
            return (
                f"rank {rank}: {found['left']} parameters still have a gradient after backward: "
                "free what was sent, p.grad = None"
            )
        if (peak := found["peak"] - limit // given.n) >= limit >= 2**16:
            return (
                f"expected less than {limit:,} bytes alive in backward on rank {rank} beside the "
                f"shards, those of all gradients, got {peak:,}: send and free a bucket as soon as "
                "it is full, and store no buffer for each"
            )
        if found["updated"] != (share := sum(map(len, shards))):
            return (
                f"expected the optimizer of rank {rank} to update {share:,} elements, its shards, "
                f"got {found['updated']:,}"
            )
    return ""


BUCKETS = OnRanks(
    id="04-4",
    title="gradients leave while backward runs",
    names=("Zero2",),
    axes=("gradients", "weights"),
    trials=(
        Trial(2, size=1),
        Trial(2, size=2, beside=2, dtype=torch.float64, strided=True),
        Trial(3, size=3),
        Trial(4, size=2),
        Trial(1, size=2),
    ),
    act=runner.stage_2,
    draw=_training,
    expected=_twin,
    terms=128,
    mistakes=(
        *(Mistake(why, _shards_of(pick)) for why, pick in BUCKET_MISTAKES.items()),
        Mistake(
            "no parameter has changed: step updates the shards first, and then gathers them into "
            "the parameters",
            {AFTER_1: lambda given: torch.cat(_before(given))},
        ),
        Mistake(
            "each rank has new values in its own shards only: gather the shards after the step",
            {AFTER_1: _gathers_nothing},
        ),
        Mistake(
            "the second step has the gradients of the first one too: set shard.grad to None in "
            "step",
            {runner.after(2): lambda given: _twin(given, keeps=True)[runner.after(2)]},
        ),
    ),
    looks=(
        Look("wire", "calls and bytes", _bucket_calls),
        Look("peak", "gradients are freed", _freed),
    ),
    refused=(
        "course_lib.zero.flat:FlatParameter.start_gather",
        "course_lib.zero.flat:FlatParameter.start_reduce",
        "course_lib.zero.sharded:Sharded.step",
        "course_lib.zero.stages:Zero2._ready",
    ),
)


# --- 04-5 ----------------------------------------------------------------------------------------


def _layers(trial: Trial, draw: Draw) -> Any:
    """``trial.size`` layers; ``whole`` are their weights."""
    width = 2 * draw.size(15, 17) + 1 if trial.n == 4 else draw.size(3, 8)
    width = 1 if trial.n == 3 and draw.call else width
    weights = [draw.normal(width, width, scale=width**-0.5) for _ in range(trial.size)]
    shards = [[_cut(w.flatten(), trial.n)[rank] for w in weights] for rank in range(trial.n)]
    rows = draw.size(1, 4)
    return [
        {"shards": own, "x": draw.normal(width, rows).T, "dy": draw.upstream(rows, width)}
        for own in shards
    ], weights


def _pass(given: Given, rank: int, weights: Sequence[Tensor] = ()) -> tuple[Tensor, list[Tensor]]:
    """Return y of a rank's rows, and the gradients of all layers."""
    leaves = [w.detach().clone().requires_grad_() for w in weights or given.whole]
    y = given["x"][rank]
    for w in leaves:
        y = torch.tanh(y @ w)
    return y.detach(), list(torch.autograd.grad(y, leaves, given["dy"][rank]))


def _layer_shards(gradients: Sequence[Tensor], rank: int, n: int) -> Tensor:
    return torch.stack([_cut(g.flatten(), n)[rank] for g in gradients])


def _summed(given: Given) -> list[Tensor]:
    by_rank = [_pass(given, rank)[1] for rank in range(given.n)]
    return [_sum(each) for each in zip(*by_rank, strict=True)]


def _with(given: Given, weights: Callable[[list[Tensor], int], Tensor]) -> list[Tensor]:
    """Return y of each rank if ``weights(shards, rank)`` is a layer, flat and padded."""
    found, d = [], given.whole[0].shape[0]
    for rank in range(given.n):
        flat = [weights(_cut(w.flatten(), given.n), rank) for w in given.whole]
        found.append(_pass(given, rank, [each[: d * d].view(d, d) for each in flat])[0])
    return found


def _alone(shards: list[Tensor], rank: int) -> Tensor:
    return torch.cat([s if r == rank else torch.zeros_like(s) for r, s in enumerate(shards)])


# what a mistake has the shards of
SHARD_MISTAKES: Mapping[str, Callable[[Given, int], Sequence[Tensor]]] = {
    "these are the shards of each rank's own gradient: sum them over the ranks": (
        lambda given, rank: _pass(given, rank)[1]
    ),
    "the gradients are averaged over the ranks: expected the sum, not the average": (
        lambda given, rank: [g / given.n for g in _summed(given)]
    ),
    "the layers are in the order of backward: gradients[l] belongs to layer l": (
        lambda given, rank: _summed(given)[::-1]
    ),
    "dW is transposed: dW = x.T @ dz": (
        lambda given, rank: [g.mT.contiguous() for g in _summed(given)]
    ),
}


def _shards(given: Given, pick: Callable[[Given, int], Sequence[Tensor]], of: int = 0) -> Any:
    """Return shard rank + ``of`` of ``pick(given, rank)`` by rank."""
    n = given.n
    return [_layer_shards(pick(given, rank), (rank + of) % n, n) for rank in range(n)]


def _pass_bytes(given: Given, ranks: list[Observed]) -> str:
    """Expect two gathers (one for the last layer, if it stays) and a reduce-scatter per layer."""
    n, shards = given.n, given["shards"][0]
    gather = wire("all_gather", bytes_of(shards[0]), n)
    most = len(shards) * (2 * gather + wire("reduce_scatter", n * bytes_of(shards[0]), n))
    why = "two gathers and one reduce-scatter per layer (one gather less if the last layer stays)"
    return _bytes_sent(given, ranks, [most, most - gather], why)


def _pass_peak(given: Given, ranks: list[Observed]) -> str:
    limit = sum(map(bytes_of, given.whole))
    for rank, observed in enumerate(ranks):
        if observed.peak >= limit >= 2**16:
            return (
                f"expected less than {limit:,} bytes alive on rank {rank}, those of the weights of "
                f"all {len(given.whole)} layers, got {observed.peak:,}: free a layer's weights and "
                "its full gradient before you gather the next layer"
            )
    return ""


RAW = OnRanks(
    id="04-5",
    title="gather, use, free, in raw PyTorch",
    names=("sharded_pass",),
    axes=("outputs", "gradients"),
    trials=(
        Trial(2, size=2),
        Trial(4, size=12, dtype=torch.float64, name="four ranks, twelve layers"),
        Trial(3, size=3),
        Trial(1, size=1),
    ),
    act=runner.stage_3,
    draw=_layers,
    expected=lambda given: {
        "outputs": [_pass(given, rank)[0] for rank in range(given.n)],
        "gradients": _shards(given, lambda given, rank: _summed(given)),
    },
    terms=128,
    mistakes=(
        Mistake("y is x: no layer was run", {"outputs": lambda given: given["x"]}),
        Mistake(
            "each rank computed with its own shard and zeros: gather the weights",
            {"outputs": lambda given: _with(given, _alone)},
        ),
        Mistake(
            "the shards were joined in another order than that of the ranks",
            {"outputs": lambda given: _with(given, lambda shards, rank: torch.cat(shards[::-1]))},
        ),
        *(
            Mistake(why, {"gradients": partial(_shards, pick=pick)})
            for why, pick in SHARD_MISTAKES.items()
        ),
        Mistake(
            "these are the shards of another rank",
            {"gradients": lambda given: _shards(given, lambda *_: _summed(given), 1)},
        ),
    ),
    looks=(
        Look("wire", "bytes", _pass_bytes),
        Look("peak", "never all at once", _pass_peak),
    ),
    refused=("course_lib.comm.transfer:issue",),
)

EXERCISES = (by_hand("04-1"), BOUNDS, STEP, BUCKETS, RAW)
