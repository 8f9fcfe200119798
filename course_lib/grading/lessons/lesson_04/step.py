"""04-3: a step of ZeRO-1 on flat tensors: reduce-scatter, own shard, all-gather."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import comm
from course_lib.grading.compare import difference
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.ranked import RankCase, Ranked, Seen, Trial
from course_lib.ledger import wire
from course_lib.mesh import Axis, Mesh
from course_lib.zero import padded

TWO, FOUR, THREE, ONE = range(4)
STEPS, RATE, MOMENTUM, DECAY = 3, 0.1, 0.9, 0.2
TRIALS = (Trial(2, 7), Trial(4, 9), Trial(3, 8), Trial(1, 5))  # size: parameters
Rule = Callable[[Tensor, Tensor], Tensor]


class Momentum:
    """new weights = update(weights, gradients), with a moment that it keeps; notes the sizes."""

    def __init__(self) -> None:
        self.moment: Tensor | None = None
        self.sizes: list[int] = []

    def __call__(self, weights: Tensor, gradients: Tensor) -> Tensor:
        self.sizes.append(weights.numel())
        moment = gradients if self.moment is None else MOMENTUM * self.moment + gradients
        self.moment = moment
        return weights - RATE * (moment + DECAY * weights)


def _inputs(trial: Trial, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """Weights [P], equal on all ranks, and this rank's own gradients of each step [STEPS, P]."""
    shared = torch.Generator().manual_seed(seed)
    own = torch.Generator().manual_seed(seed + 1 + rank)
    return (
        torch.randn(trial.size, generator=shared),
        torch.randn(STEPS, trial.size, generator=own),
    )


def _act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> Any:
    weights, update, after = inputs[0].clone(), Momentum(), []
    for gradients in inputs[1]:
        weights = answers[0](weights, gradients.clone(), update, mesh.dp)
        if not isinstance(weights, Tensor) or weights.shape != inputs[0].shape:
            return weights, update.sizes
        after.append(weights.detach().clone())
    return torch.stack(after), update.sizes


def _all_inputs(seen: Seen) -> tuple[Tensor, Tensor]:
    """The weights [P] and every rank's gradients [n, STEPS, P]."""
    given = [_inputs(seen.trial, rank, seen.seed) for rank in range(seen.trial.n)]
    return given[0][0], torch.stack([gradients for _, gradients in given])


def _twin(seen: Seen) -> Tensor:
    """Weights of one process after each step, [STEPS, P]."""
    weights, gradients = _all_inputs(seen)
    update, after = Momentum(), []
    for total in gradients.sum(0):
        weights = update(weights, total)
        after.append(weights)
    return torch.stack(after)


def _weights(seen: Seen) -> str:
    start, _ = _all_inputs(seen)
    for rank, (value, _) in enumerate(seen.values):
        if not isinstance(value, Tensor):
            return f"rank {rank} returned a {type(value).__name__}; the new weights are wanted"
        if value.shape != (STEPS, len(start)):
            return (
                f"rank {rank} returned weights of shape {list(value.shape)}; "
                f"{list(start.shape)} is right: all ranks' shards, without the padding"
            )
    got, wanted = [value for value, _ in seen.values], _twin(seen)
    says = difference("weights", got, [wanted] * seen.trial.n)
    if not says or seen.trial.n == 1:
        return says
    first = [value[0] for value in got]
    for mistaken, message in _mistakes(seen):
        if not difference("weights", first, mistaken):
            return f"{message} ({says})"
    for rank, (_, sizes) in enumerate(seen.values):
        if len(sizes) > STEPS:
            return f"{_called(rank, sizes)}: its moment is then of several shards ({says})"
    if not difference("weights", first, [wanted[0]] * seen.trial.n):
        return (
            "the first step is right and a later one is not: the moment that update keeps has to "
            f"see the same shard every time ({says})"
        )
    return says


def _pieces(flat: Tensor, n: int) -> list[Tensor]:
    size = padded(len(flat), n)
    return list(torch.cat([flat, flat.new_zeros(size - len(flat))]).chunk(n))


def _mistakes(seen: Seen) -> list[tuple[list[Tensor], str]]:
    """What weights after the first step would be, by rank."""
    n = seen.trial.n
    start, gradients = _all_inputs(seen)
    own, size = gradients[:, 0], len(start)
    total, new = own.sum(0), _twin(seen)[0]
    w, g, right = _pieces(start, n), _pieces(total, n), _pieces(new, n)
    locals_ = [_pieces(each, n) for each in own]

    def joined(pieces: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(pieces))[:size]

    def stepped(weights: Tensor, gradient: Tensor) -> Tensor:
        return Momentum()(weights, gradient)

    everybody: list[tuple[Tensor, str]] = [
        (start, "the weights are what they were: nobody has stepped"),
        (
            joined([stepped(w[r], locals_[r][r]) for r in range(n)]),
            "every owner stepped by its own rank's gradient: the others' never came; "
            "reduce-scatter them",
        ),
        (
            stepped(start, own.mean(0)),
            "gradients are averaged over the ranks: their sum is wanted",
        ),
        (
            joined([stepped(w[r], g[(r + 1) % n]) for r in range(n)]),
            "each rank steps with the gradients of another rank's shard: rank r owns piece r",
        ),
        (
            joined([right[r - 1] for r in range(n)]),
            "the shards are joined in another order than that of the ranks",
        ),
        (stepped(new, total), "the step was taken twice"),
    ]
    found = [([weights] * n, message) for weights, message in everybody]
    alone = [joined([*w[:r], right[r], *w[r + 1 :]]) for r in range(n)]
    found.append(
        (alone, "on every rank only its own shard is new: gather the others' after the step")
    )
    found.append(
        (
            [stepped(start, gradient) for gradient in own],
            "each rank steps all weights by its own gradient: they are never summed",
        )
    )
    return found


def _called(rank: int, sizes: list[int]) -> str:
    return (
        f"rank {rank} called update {len(sizes)} times in {STEPS} steps; once a step, for the own "
        "shard, is wanted"
    )


def _one_shard(seen: Seen) -> str:
    """``update`` is called once a step, with one shard."""
    n, size = seen.trial.n, seen.trial.size
    shard = padded(size, n) // n
    for rank, (_, sizes) in enumerate(seen.values):
        if len(sizes) != STEPS:
            return _called(rank, sizes)
        if sizes != [shard] * STEPS:
            return (
                f"rank {rank} gave update {sizes[0]} elements: its moment is then as large. Only "
                f"the own shard of {shard} may be stepped here"
            )
    return ""


def _bytes(seen: Seen) -> str:
    n, size = seen.trial.n, 4 * padded(seen.trial.size, seen.trial.n)
    right = STEPS * (wire("reduce_scatter", size, n) + wire("all_gather", size // n, n))
    for rank, observed in enumerate(seen.ranks):
        sent = sum((call.wire(n) for call in observed.calls), Fraction(0))
        if sent != right:
            ops = ", ".join(sorted({call.op for call in observed.calls}))
            return (
                f"rank {rank} sent {float(sent):,g} bytes by {ops}; a reduce-scatter of the "
                f"gradients and an all-gather of the shards are {float(right):,g}: as much as one "
                "all-reduce"
            )
    return ""


def _cut(flat: Tensor, axis: Axis) -> list[Tensor]:
    return _pieces(flat, axis.size)


def _padded(flat: Tensor, axis: Axis) -> Tensor:
    return torch.cat(_cut(flat, axis))


def _right(weights: Tensor, gradients: Tensor, update: Rule, axis: Axis) -> Tensor:
    mine = comm.reduce_scatter(_padded(gradients, axis), axis)
    new = update(_cut(weights, axis)[axis.rank], mine)
    return comm.all_gather(new, axis)[: len(weights)]


def _right_in_raw_torch(weights: Tensor, gradients: Tensor, update: Rule, axis: Axis) -> Tensor:
    """Pieces by all-to-all, added by the owner; gathered into a list."""
    pieces = _padded(gradients, axis).view(axis.size, -1)
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=axis.group)
    new = update(_cut(weights, axis)[axis.rank], received.sum(0))
    gathered = [torch.empty_like(new) for _ in range(axis.size)]
    dist.all_gather(gathered, new, group=axis.group)
    return torch.cat(gathered)[: len(weights)]


def _all_reduces(weights: Tensor, gradients: Tensor, update: Rule, axis: Axis) -> Tensor:
    """Data parallelism: every rank steps everything."""
    return update(weights, comm.all_reduce(gradients, axis))


def _reduces_then_cuts(weights: Tensor, gradients: Tensor, update: Rule, axis: Axis) -> Tensor:
    mine = _cut(comm.all_reduce(gradients, axis), axis)[axis.rank]
    return comm.all_gather(update(_cut(weights, axis)[axis.rank], mine), axis)[: len(weights)]


def _every_shard(weights: Tensor, gradients: Tensor, update: Rule, axis: Axis) -> Tensor:
    """One update for each shard, on every rank; the moments get lost, but not in the first step."""
    total = _cut(comm.all_reduce(gradients, axis), axis)
    pairs = zip(_cut(weights, axis), total, strict=True)
    return torch.cat([update(w, g) for w, g in pairs])[: len(weights)]


def _no_gather(weights: Tensor, gradients: Tensor, update: Rule, axis: Axis) -> Tensor:
    pieces = _cut(weights, axis)
    mine = comm.reduce_scatter(_padded(gradients, axis), axis)
    pieces[axis.rank] = update(pieces[axis.rank], mine)
    return torch.cat(pieces)[: len(weights)]


def _gathers_before(weights: Tensor, gradients: Tensor, update: Rule, axis: Axis) -> Tensor:
    mine = comm.reduce_scatter(_padded(gradients, axis), axis)
    pieces = _cut(weights, axis)
    full = comm.all_gather(pieces[axis.rank], axis)
    full.chunk(axis.size)[axis.rank].copy_(update(pieces[axis.rank], mine))
    return full[: len(weights)]


def _own_gradient(weights: Tensor, gradients: Tensor, update: Rule, axis: Axis) -> Tensor:
    new = update(_cut(weights, axis)[axis.rank], _cut(gradients, axis)[axis.rank])
    return comm.all_gather(new, axis)[: len(weights)]


def _averages(weights: Tensor, gradients: Tensor, update: Rule, axis: Axis) -> Tensor:
    return _right(weights, gradients / axis.size, update, axis)


def _neighbour(weights: Tensor, gradients: Tensor, update: Rule, axis: Axis) -> Tensor:
    """The gradient's pieces are one rank off."""
    pieces = _cut(gradients, axis)
    mine = comm.reduce_scatter(torch.cat([*pieces[1:], pieces[0]]), axis)
    return comm.all_gather(update(_cut(weights, axis)[axis.rank], mine), axis)[: len(weights)]


def _twice(weights: Tensor, gradients: Tensor, update: Rule, axis: Axis) -> Tensor:
    mine = comm.reduce_scatter(_padded(gradients, axis), axis)
    once = update(_cut(weights, axis)[axis.rank], mine)
    return comm.all_gather(Momentum()(once, mine), axis)[: len(weights)]


def _with_padding(weights: Tensor, gradients: Tensor, update: Rule, axis: Axis) -> Tensor:
    mine = comm.reduce_scatter(_padded(gradients, axis), axis)
    return comm.all_gather(update(_cut(_padded(weights, axis), axis)[axis.rank], mine), axis)


def _no_padding(weights: Tensor, gradients: Tensor, update: Rule, axis: Axis) -> Tensor:
    mine = comm.reduce_scatter(gradients, axis)
    return comm.all_gather(update(weights.chunk(axis.size)[axis.rank], mine), axis)


def _alone(weights: Tensor, gradients: Tensor, update: Rule, axis: Axis) -> Tensor:
    return update(weights, gradients)


def _own_shard_only(weights: Tensor, gradients: Tensor, update: Rule, axis: Axis) -> Tensor:
    mine = comm.reduce_scatter(_padded(gradients, axis), axis)
    return update(_cut(weights, axis)[axis.rank], mine)


STEP = Ranked(
    id="04-3",
    title="a step of stage 1",
    names=("sharded_step",),
    hints=(
        "Three lines: what does the owner of a shard need, what does it do, and who needs the "
        "result? Padding first.",
        "Pad weights and gradients with zeros to a multiple of n. Reduce-scatter the gradients: "
        "you get the sum of your piece. update your piece of the weights with it. All-gather the "
        "new pieces, and cut the padding off.",
        "pad = -len(weights) % axis.size; g = comm.reduce_scatter(F.pad(gradients, (0, pad)), "
        "axis); w = F.pad(weights, (0, pad)).chunk(axis.size)[axis.rank]; "
        "comm.all_gather(update(w, g), axis)[: len(weights)].",
    ),
    wrong=(
        Wrong(lambda weights, gradients, update, axis: weights, words="nobody has stepped"),
        Wrong(lambda weights, gradients, update, axis: None, words="returned a NoneType"),
        Wrong(_alone, words="steps all weights by its own gradient"),
        Wrong(_all_reduces, words="Only the own shard"),
        Wrong(_reduces_then_cuts, words="as much as one all-reduce"),
        Wrong(_every_shard, words="called update 6 times in 3 steps"),
        Wrong(_no_gather, words="only its own shard is new"),
        Wrong(_gathers_before, words="only its own shard is new"),
        Wrong(_own_gradient, words="every owner stepped by its own rank's gradient"),
        Wrong(_averages, words="their sum is wanted"),
        Wrong(_neighbour, words="rank r owns piece r"),
        Wrong(_twice, words="the step was taken twice"),
        Wrong(_with_padding, words="without the padding"),
        Wrong(_own_shard_only, words="all ranks' shards"),
        Wrong(_no_padding, words="does not split into 2 equal shards"),
    ),
    right=(_right, _right_in_raw_torch),
    stub=lambda weights, gradients, update, axis: None,
    trials=TRIALS,
    inputs=_inputs,
    act=_act,
    looks=(
        RankCase("weights", "two ranks, three steps", TWO, _weights),
        RankCase("weights", "four ranks, one with padding alone", FOUR, _weights),
        RankCase("weights", "three ranks", THREE, _weights),
        RankCase("weights", "one rank", ONE, _weights),
        RankCase("outputs", "one shard is stepped", FOUR, _one_shard, later=True),
        RankCase("wire", "bytes", FOUR, _bytes),
    ),
    refused=(
        "course_lib.zero.flat:FlatParameter.start_gather",
        "course_lib.zero.flat:FlatParameter.start_reduce",
        "course_lib.zero.sharded:Sharded.step",
    ),
)
