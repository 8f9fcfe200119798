"""Lesson 03, data parallelism: what the exercises give, and what they expect."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.grading.compare import agrees
from course_lib.grading.draw import Draw
from course_lib.grading.graders.by_hand import by_hand
from course_lib.grading.graders.runner import lesson_03 as runner
from course_lib.grading.placed import bytes_of
from course_lib.grading.ranked import OnRanks
from course_lib.grading.runner import Observed
from course_lib.grading.trials import Given, Look, Mistake, Trial
from course_lib.ledger import wire

# --- 03-2 ----------------------------------------------------------------------------------------


def _tokens(trial: Trial, draw: Draw) -> Any:
    """Where both calls have the same sizes, rank 0 has one count in both, other ranks have two."""
    counts = 9 * draw.call + draw.integers(1, 4, trial.n).cumsum(0)
    counts[0] = draw.size(1, 9)
    if trial.n == 3:
        counts[-1] = 0
    features = draw.size(3, 6)
    w = draw.normal(features)
    return [
        {
            "x": draw.normal(int(count), features),
            "y": draw.normal(int(count)),
            "w": w,
            "count": count.clone(),
        }
        for count in counts
    ]


def _divided(divide: Callable[[Given, int], float]) -> Callable[[Given], dict[str, Any]]:
    """Return the results of an answer that divides the summed loss by ``divide(given, rank)``."""

    def results(given: Given) -> dict[str, Any]:
        losses, gradients = [], []
        for rank, own in enumerate(given.ranks):
            w = own["w"].clone().requires_grad_()
            loss = runner.squares(own["x"], own["y"], w) / divide(given, rank)
            loss.backward()
            losses.append(loss.detach())
            gradients.append(w.grad)
        return {"loss": losses, "gradient of w": gradients}

    return results


def _all_tokens(given: Given) -> int:
    return int(sum(given["count"]))


def _one_count(given: Given, ranks: list[Observed]) -> str:
    for rank, observed in enumerate(ranks):
        payload = sum(call.payload for call in observed.calls)
        if len(observed.calls) != 1 or payload > 8:
            return (
                f"expected one call with one element from rank {rank}, the token count, got "
                f"{len(observed.calls)} with {payload} bytes"
            )
    return ""


WRONG_SCALES: Mapping[str, Callable[[Given, int], float]] = {
    "nothing is divided": lambda given, rank: 1,
    "each rank divides by its own tokens (comm.all_reduce returns the sum, and leaves its input as "
    "it is)": lambda given, rank: int(given["count"][rank]),
    "this is the mean of the ranks' means: every rank weighs the same": (
        lambda given, rank: int(given["count"][rank]) * given.n
    ),
    "this divides by the number of ranks; the mean is over tokens": lambda given, rank: given.n,
    "divided by the number of ranks once more, but gradients are summed, not averaged": (
        lambda given, rank: _all_tokens(given) * given.n
    ),
    "divided by the average number of tokens per rank, so the sum of the gradients is n times too "
    "large": lambda given, rank: _all_tokens(given) / given.n,
}

SCALE = OnRanks(
    id="03-2",
    title="the scale before the sum",
    names=("local_loss",),
    axes=("outputs", "gradients"),
    trials=(
        Trial(2),
        Trial(2, beside=2, strided=True),
        Trial(3, name="three ranks, one without tokens"),
        Trial(1),
    ),
    act=runner.scale,
    draw=_tokens,
    expected=_divided(lambda given, rank: _all_tokens(given)),
    mistakes=tuple(
        Mistake(why, {"loss": lambda given, divide=divide: _divided(divide)(given)["loss"]})
        for why, divide in WRONG_SCALES.items()
    ),
    looks=(Look("wire", "one call with one element", _one_count),),
    hang="The last rank has no tokens, and must make the call too",
    refused=("course_lib.dp:global_tokens",),
)


# --- 03-3 ----------------------------------------------------------------------------------------


def _bucket(trial: Trial, draw: Draw) -> Any:
    """On three ranks, each rank has no gradient for another parameter. These have equal sizes, so
    that no rank waits forever if an answer leaves them out. On one rank, and in the second call on
    two, no rank has a gradient for the first parameter."""
    a, b = draw.size(2, 4), draw.size(2, 3)
    shapes = [(a, b), (a * b,), (b, 1, a)] if trial.n == 3 else []
    shapes += [draw.shape(low=1) for _ in range(draw.size(2, 3))] + [()]
    if draw.call and not trial.strided:
        shapes.insert(1, draw.shape())
    nowhere = trial.n == 1 or (trial.world == 2 and draw.call)
    return [
        {
            "weights": [draw.normal(*shape) for shape in shapes],
            "gradients": [
                None if number == (0 if nowhere else rank) and (nowhere or trial.n == 3)
                else draw.tensor(*shape)
                for number, shape in enumerate(shapes)
            ],
        }
        for rank in range(trial.n)
    ]  # fmt: skip


def _own(given: Given) -> list[Tensor]:
    """Return the flat gradients of each rank before the call."""
    return [
        runner.flat(
            [
                torch.zeros_like(w) if g is None else g
                for w, g in zip(rank["weights"], rank["gradients"], strict=True)
            ]
        )
        for rank in given.ranks
    ]


def _sum(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)


ALONE = "each rank still has its own gradients: no sum was written to p.grad"
ADDED = "the sum was added to the rank's own gradient: replace the gradient by the sum"


def _overwritten(given: Given, ranks: list[Observed], name: str) -> str:
    if not any(rank.values["overwritten"] for rank in ranks):
        return ""
    return (
        "the gradients were overwritten when those of another model were summed: expected each "
        "bucket to have memory of its own"
    )


BUCKET = OnRanks(
    id="03-3",
    title="one bucket, one all-reduce",
    names=("sum_bucket",),
    axes=("gradients",),
    trials=(
        Trial(2),
        Trial(2, beside=2, strided=True),
        Trial(3, name="three ranks, parameters that a rank did not use"),
        Trial(1),
    ),
    act=runner.bucket,
    draw=_bucket,
    expected=lambda given: {"gradients": _sum(_own(given))},
    terms=4,
    mistakes=(
        Mistake(ALONE, {"gradients": _own}),
        Mistake(
            ADDED,
            {"gradients": lambda given: [own + _sum(_own(given)) for own in _own(given)]},
        ),
        Mistake(
            "this is the average over the ranks: sum, do not divide",
            {"gradients": lambda given: _sum(_own(given)) / given.n},
        ),
    ),
    explain=_overwritten,
    calls=lambda given, rank: [("all_reduce", bytes_of(_own(given)[0]))],
    calls_why="One all-reduce of one flat tensor is enough for all parameters",
    in_place=("gradients",),
    refused=(
        "course_lib.comm.flat:flatten",
        "course_lib.comm.flat:unflatten",
        "course_lib.comm.flat:start_all_reduce_flat",
        "course_lib.dp:Naive.finish",
        "course_lib.dp:Bucketed.finish",
        "course_lib.dp:Overlapped.finish",
    ),
)


# --- 03-4 ----------------------------------------------------------------------------------------
# The model is a sum of towers, one bucket each, the last tower first. A rank that uses them in
# another order has the same gradients, but its hooks fire in another order.

STEPS, ROWS = 3, 4


def _towers(trial: Trial, draw: Draw) -> Any:
    towers, width = 3 + draw.call, draw.size(3, 5)
    weights = [(draw.normal(width, width), draw.normal(width)) for _ in range(towers)]
    micro_batches = draw.size(2, 3) if draw.call and trial.n != 3 else 1
    ranks = []
    for rank in range(trial.n):
        order = list(range(towers))
        if trial.beside > 1 and draw.call:
            draw.random.shuffle(order)
        elif trial.beside > 1 and rank:
            order.reverse()
        orders = [list(order) for _ in range(STEPS)]
        if trial.n == 3 and rank == 1:
            orders[0].remove(1)
            orders[2].remove(1)
        batches = [
            [(draw.normal(ROWS, width), draw.normal(ROWS)) for _ in range(micro_batches)]
            for _ in range(STEPS)
        ]
        rows = ROWS * micro_batches * trial.n
        ranks.append({"towers": weights, "orders": orders, "batches": batches, "rows": rows})
        ranks[-1]["earlier"] = orders
    return ranks


def _one_process(given: Given) -> dict[str, Any]:
    towers = [[nn.Parameter(w.clone()) for w in tower] for tower in given["towers"][0]]
    parameters = [p for tower in towers for p in tower]
    optimizer = torch.optim.SGD(parameters, lr=runner.RATE, momentum=runner.MOMENTUM)
    found = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        for own in given.ranks:
            for order, (x, y) in zip(runner.used(own, step), own["batches"][step], strict=True):
                (runner.loss_of(towers, order, x, y) / own["rows"]).backward()
        found[f"gradients of step {step + 1}"] = runner.flat([p.grad for p in parameters])
        optimizer.step()
    return found | {"weights after the last step": runner.flat(parameters)}


def own_gradients(given: Given, micro_batches: int | None = None) -> list[Tensor]:
    """Return the flat gradients of each rank of step 1: of its first micro-batches, or of all."""
    found = []
    for own in given.ranks:
        towers = [[w.clone().requires_grad_() for w in tower] for tower in own["towers"]]
        losses = [
            runner.loss_of(towers, order, x, y) / own["rows"]
            for order, (x, y) in list(zip(runner.used(own, 0), own["batches"][0], strict=True))[
                :micro_batches
            ]
        ]
        gradients = torch.autograd.grad(
            sum(losses, torch.zeros(())),
            [w for tower in towers for w in tower],
            allow_unused=True,
            materialize_grads=True,
        )
        found.append(runner.flat(gradients))
    return found


def _by_tower(given: Given, micro_batches: int | None = None) -> list[Tensor]:
    """Return each rank's own gradients of the first step, [towers, elements of a tower]."""
    towers = len(given["towers"][0])
    return [flat.view(towers, -1) for flat in own_gradients(given, micro_batches)]


def _flat_sum(parts: list[Tensor]) -> Tensor:
    return _sum(parts).flatten()


def _in_firing_order(given: Given) -> list[Tensor]:
    """Each rank sends a bucket as soon as it is full."""
    own, fired = _by_tower(given), [orders[0][::-1] for orders in given["orders"]]
    mixed = [torch.empty_like(gradient) for gradient in own]
    for together in zip(*fired, strict=True):
        total = _sum([gradient[tower] for gradient, tower in zip(own, together, strict=True)])
        for gradient, tower in zip(mixed, together, strict=True):
            gradient[tower] = total
    return [gradient.flatten() for gradient in mixed]


def _next_of_any(given: Given) -> Tensor:
    """Any full bucket makes the next one in order leave, with the gradients that it has then."""
    sent = []
    for gradient, orders in zip(_by_tower(given), given["orders"], strict=True):
        fired = orders[0][::-1]
        place = {tower: time for time, tower in enumerate(fired)}
        late = [tower for k, tower in enumerate(sorted(fired, reverse=True)) if place[tower] > k]
        sent.append(gradient.clone())
        sent[-1][late] = 0
    return _flat_sum(sent)


def _second_only(given: Given) -> Tensor:
    """A bucket is sent when its first gradient, of the second parameter, is ready."""
    found = _sum(_by_tower(given)).clone()
    found[:, : -given["towers"][0][0][1].numel()] = 0
    return found.flatten()


def _complete_inside(given: Given) -> Tensor:
    """All buckets leave at the first hook of the last backward."""
    sent = _by_tower(given, len(given["batches"][0][0]) - 1)
    width = given["towers"][0][0][1].numel()
    for gradient, own in zip(sent, _by_tower(given), strict=True):
        gradient[-1, -width:] = own[-1, -width:]
    return _flat_sum(sent)


def _after_step_1(given: Given, ranks: list[Observed], name: str) -> str:
    if name == "gradients of step 1" or _overwritten(given, ranks, name):
        return _overwritten(given, ranks, name)
    return (
        "step 1 is right and a later one is not: is everything reset in finish? Reset every "
        "bucket, also one that no hook sent, and send zeros for a parameter that this rank did not "
        "use"
    )


def _sendable(fired: Sequence[int], towers: int) -> int:
    """Return how many buckets may leave after these towers are complete."""
    return len(list(takewhile(lambda tower: tower in fired, reversed(range(towers)))))


def _sent_early(given: Given, ranks: list[Observed]) -> str:
    for rank, observed in enumerate(ranks):
        towers = len(given["towers"][rank])
        for step, (early, sent, _) in enumerate(observed.values["sent"]):
            fired = given["orders"][rank][step][::-1]
            for got, done, when in (
                (early, fired[:-1], "backward computed its last gradient"),
                (sent, fired, "backward returned"),
            ):
                if got < (right := _sendable(done, towers)):
                    return (
                        f"expected {right} of {towers} buckets sent on rank {rank} when {when}, "
                        f"got {got}: send every bucket that is full and has no unsent bucket before"
                        " it, several at once if need be"
                    )
    return ""


def _no_wait(given: Given, ranks: list[Observed]) -> str:
    for rank, observed in enumerate(ranks):
        for _, sent, waited in observed.values["sent"]:
            if waited:
                return (
                    f"expected no wait before backward returns, but rank {rank} had waited for "
                    f"{waited} of {sent} buckets: while a hook waits, backward stops; only finish "
                    "may wait"
                )
    return ""


OVERLAP_MISTAKES: Mapping[str, Callable[[Given], Any]] = {
    ALONE: lambda given: [own.flatten() for own in _by_tower(given)],
    ADDED: lambda given: [(own + _sum(_by_tower(given))).flatten() for own in _by_tower(given)],
    "only the first micro-batch was sent: a backward inside accumulate() sends no bucket and "
    "completes no gradient": lambda given: _flat_sum(_by_tower(given, 1)),
    "gradients counted as complete inside accumulate(), so the first hook after it sent every "
    "bucket": _complete_inside,
    "each rank sent its buckets in the order in which its own hooks filled them, so different "
    "buckets were added together": _in_firing_order,
    "a full bucket made an earlier one leave in its place, before that one's own gradients were "
    "computed": _next_of_any,
    "a bucket was sent before all of its gradients were computed": _second_only,
}

OVERLAP = OnRanks(
    id="03-4",
    title="buckets that leave while backward runs",
    names=("Overlapped",),
    axes=("gradients", "weights"),
    trials=(
        Trial(2),
        Trial(
            2,
            beside=2,
            strided=True,
            name="groups 0, 2 and 1, 3, hooks in another order on some ranks",
        ),
        Trial(3, name="three ranks, a bucket that a rank did not use"),
        Trial(1),
    ),
    act=runner.overlap,
    draw=_towers,
    expected=_one_process,
    terms=64,
    mistakes=tuple(
        Mistake(why, {"gradients of step 1": results}) for why, results in OVERLAP_MISTAKES.items()
    ),
    explain=_after_step_1,
    calls=lambda given, rank: (
        [("all_reduce", sum(map(bytes_of, tower))) for tower in given["towers"][0]] * STEPS
    ),
    calls_why="Each bucket is sent in one all-reduce per step, after the last micro-batch",
    looks=(
        Look("wire", "as early as possible", _sent_early),
        Look("wire", "no wait while backward runs", _no_wait),
    ),
    hang="Rank 1 did not use the parameters of one bucket, so none of its hooks fired there: "
    "finish must send what is left",
    refused=(
        "course_lib.dp:Overlapped._ready",
        "course_lib.dp:Overlapped.finish",
        "course_lib.dp:Bucketed.finish",
        "course_lib.dp:Naive.finish",
    ),
)


# --- 03-5 ----------------------------------------------------------------------------------------


ROW_COUNT = 8  # bytes, as an int64


def _training(trial: Trial, draw: Draw) -> Any:
    """The targets of the first step are large, so that its gradient is clipped."""
    features, inner, steps = draw.size(3, 7), draw.size(4, 8), 3
    options = {"lr": draw.size(20, 40) / 1000, "momentum": draw.size(5, 9) / 10}
    options["weight_decay"] = draw.size(1, 5) / 100 if draw.call else 0.0
    models, batches = [], []
    for rank in range(trial.n):
        model = nn.Sequential(
            nn.Linear(features, inner), nn.Tanh(), nn.Linear(inner, 1), nn.Flatten(0)
        ).to(trial.dtype)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(draw.normal(*p.shape, scale=0.5))
        models.append(model)
        rows = draw.integers(1, 7, steps) + rank
        rows[1] = 0 if trial.n == 3 and rank == 2 else rows[1]
        batches.append(
            [
                (draw.normal(features, int(many)).T, draw.normal(int(many)) + 5 * (step == 0))
                for step, many in enumerate(rows)
            ]
        )
    x, y = (torch.cat(parts) for parts in zip(*(own[0] for own in batches), strict=True))
    max_norm = _gradient(models[0], x, y).norm().item() / len(x) * 0.4
    return [
        {"model": model, "batches": own, "options": options, "max_norm": max_norm}
        for model, own in zip(models, batches, strict=True)
    ]


def _gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the flat gradient of the summed loss."""
    return runner.flat(torch.autograd.grad(((model(x) - y) ** 2).sum(), list(model.parameters())))


def _clipped(gradient: Tensor, limit: float) -> Tensor:
    """Return what torch's clip_grad_norm_ leaves of the gradient."""
    return gradient * min(1.0, limit / (gradient.norm().item() + 1e-6))


# the gradients of the summed loss by rank, the rows of each, the limit -> what each rank steps by
Combine = Callable[[list[Tensor], list[int], float], list[Tensor]]


def _law(own: list[Tensor], rows: list[int], limit: float) -> list[Tensor]:
    return [_clipped(_sum(own) / sum(rows), limit)] * len(own)


@dataclass(frozen=True)
class How:
    """A way to train: how gradients are combined, whether the ranks start equal, after which steps
    the weights are averaged, whether old gradients are zeroed, and whether ranks step at all."""

    combine: Combine = _law
    equal: bool = True
    averaged: tuple[int, ...] = ()
    zeroed: bool = True
    steps: bool = True

    def __call__(self, given: Given) -> list[Tensor]:
        """Return the weights of each rank, computed in one process."""
        models = [deepcopy(given["model"][rank * (not self.equal)]) for rank in range(given.n)]
        options = given["options"][0]
        optimizers = [torch.optim.SGD(model.parameters(), **options) for model in models]
        totals: list[Tensor] = []
        for step in range(len(given["batches"][0]) * self.steps):
            batches = [own[step] for own in given["batches"]]
            rows = [len(x) for x, _ in batches]
            own = [_gradient(m, x, y) for m, (x, y) in zip(models, batches, strict=True)]
            if totals and not self.zeroed:
                own = [new + sum(rows) * old for new, old in zip(own, totals, strict=True)]
            totals = self.combine(own, rows, given["max_norm"][0])
            for model, optimizer, total in zip(models, optimizers, totals, strict=True):
                parts = total.split([p.numel() for p in model.parameters()])
                for p, part in zip(model.parameters(), parts, strict=True):
                    p.grad = part.view_as(p).clone()
                optimizer.step()
            if step in self.averaged:
                mean = torch.stack([runner.flat(list(m.parameters())) for m in models]).mean(0)
                for model in models:
                    nn.utils.vector_to_parameters(mean.clone(), model.parameters())
        return [runner.flat(list(model.parameters())) for model in models]


def _alone(own: list[Tensor], rows: list[int], limit: float) -> list[Tensor]:
    return [_clipped(gradient / sum(rows), limit) for gradient in own]


def _means(own: list[Tensor], rows: list[int]) -> list[Tensor]:
    """Return each rank's gradient of the mean over its own rows."""
    return [gradient / max(count, 1) for gradient, count in zip(own, rows, strict=True)]


def _alone_by_means(own: list[Tensor], rows: list[int], limit: float) -> list[Tensor]:
    return [_clipped(gradient, limit) for gradient in _means(own, rows)]


def _for_all(combine: Callable[[list[Tensor], list[int], float], Tensor]) -> How:
    return How(lambda own, rows, limit: [combine(own, rows, limit)] * len(own))


def _ranks_differ(given: Given, ranks: list[Observed], name: str) -> str:
    first = ranks[0].values[name]
    if all(agrees(rank.values[name], first, 64) for rank in ranks):
        return ""
    return (
        "the ranks end with different weights: make them start equal and step by the same gradient"
    )


def _sent(given: Given, ranks: list[Observed]) -> str:
    n, size = given.n, bytes_of(ranks[0].values["weights"])
    steps = len(given["batches"][0])
    right = wire("broadcast", size, n) + steps * wire("all_reduce", size, n)
    most = right + steps * wire("all_reduce", ROW_COUNT, n)
    for rank, observed in enumerate(ranks):
        sent = sum(call.wire(n) for call in observed.calls)
        if not right <= sent <= most:
            return (
                f"expected {float(right):,g} to {float(most):,g} bytes from rank {rank}, got "
                f"{float(sent):,g}: send the weights once, by broadcast, and the gradients and one "
                "row count once per step, by all-reduce"
            )
    return ""


OWN = "each rank steps by its own gradient: sum the gradients over the ranks"
AVERAGED = "the weights are averaged where the gradients should be summed"
WAYS: Mapping[How, str] = {
    How(equal=False, steps=False): "the weights did not change: nothing was trained",
    How(steps=False): "every rank still has rank 0's first weights: no step changed them "
    "(dist.all_reduce works in place and returns no gradient)",
    How(_alone): OWN,
    How(_alone_by_means): OWN,
    How(equal=False): "the ranks did not start equal: broadcast rank 0's weights",
    _for_all(lambda own, rows, limit: _clipped(_sum(_means(own, rows)), limit)): (
        "each rank divides by its own rows, and then the gradients are summed"
    ),
    _for_all(lambda own, rows, limit: _clipped(_sum(_means(own, rows)) / len(own), limit)): (
        "this averages the ranks' means: a rank with one row weighs as much as one with seven"
    ),
    _for_all(lambda own, rows, limit: _clipped(_sum(own) / sum(rows) / len(own), limit)): (
        "divided by the rows of all ranks and by the number of ranks: the rows are enough"
    ),
    _for_all(lambda own, rows, limit: _sum(_alone(own, rows, limit))): (
        "each rank clips its own gradient: clip after the sum"
    ),
    _for_all(lambda own, rows, limit: _sum(own) / sum(rows)): "nothing is clipped",
    How(zeroed=False): "the gradients of the step before are still in p.grad: "
    "optimizer.zero_grad() is missing",
    **{
        How(combine, averaged=steps): AVERAGED
        for combine in (_alone, _alone_by_means)
        for steps in ((2,), (0, 1, 2))
    },
}

RAW = OnRanks(
    id="03-5",
    title="the same in raw PyTorch",
    names=("train",),
    axes=("weights",),
    trials=(
        Trial(2),
        Trial(4, dtype=torch.float64),
        Trial(3, name="three ranks, one without rows in one step"),
        Trial(1),
    ),
    act=runner.training,
    draw=_training,
    expected=lambda given: {"weights": How()(given)},
    terms=512,
    in_place=("model",),
    mistakes=tuple(Mistake(why, {"weights": how}) for how, why in WAYS.items()),
    explain=_ranks_differ,
    looks=(Look("wire", "bytes", _sent),),
    hang="The last rank has no rows in one step: it must make all calls of that step too",
    refused=(
        "course_lib.comm.transfer:issue",
        "course_lib.dp:start_equal",
        "course_lib.dp:global_tokens",
        "course_lib.dp:train_step",
        "torch.nn.parallel.distributed:DistributedDataParallel.forward",
    ),
)

EXERCISES = (by_hand("03-1"), SCALE, BUCKET, OVERLAP, RAW)
