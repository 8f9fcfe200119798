"""03-3: the gradients of one bucket travel as one flat tensor."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from course_lib import comm, dp
from course_lib.grading.compare import difference
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.ranked import RankCase, Ranked, Seen, Trial
from course_lib.ledger import wire
from course_lib.mesh import Axis, Mesh

TWO, FOUR, UNUSED, ONE = range(4)
TRIALS = (Trial(2, 4), Trial(4, 8), Trial(3, 3), Trial(1, 2))  # size: a dim of the tensors
REFUSAL = "this is what you are asked to write"
Parameters = Sequence[nn.Parameter]


def _inputs(trial: Trial, rank: int, seed: int) -> tuple[list[Tensor], list[Tensor | None]]:
    """Weights and gradients of one bucket; on three ranks each rank lacks another gradient.

    The three that may be lacking are of one size: an answer that leaves them out hangs nobody.
    """
    size = trial.size
    shapes = ((size, 4), (4 * size,), (2, 2, size), (7,))
    own = torch.Generator().manual_seed(seed + rank)
    weights = [torch.randn(shape, generator=own) for shape in shapes]
    gradients: list[Tensor | None] = [torch.randn(shape, generator=own) for shape in shapes]
    if trial.n == 3:
        gradients[rank] = None
    return weights, gradients


def _act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> Any:
    parameters = [nn.Parameter(weight.clone()) for weight in inputs[0]]
    for parameter, gradient in zip(parameters, inputs[1], strict=True):
        parameter.grad = None if gradient is None else gradient.clone()
    answers[0](parameters, mesh.dp)
    return [p.grad for p in parameters], [p.detach() for p in parameters]


def _wanted(seen: Seen) -> list[Tensor]:
    """The sums over the ranks, by parameter."""
    given = [_inputs(seen.trial, rank, seen.seed) for rank in range(seen.trial.n)]
    sums = [torch.zeros_like(weight) for weight in given[0][0]]
    for _, gradients in given:
        for total, gradient in zip(sums, gradients, strict=True):
            total += 0 if gradient is None else gradient
    return sums


def _sums(seen: Seen) -> str:
    wanted = _wanted(seen)
    for rank, (gradients, weights) in enumerate(seen.values):
        if difference("weights", weights, _inputs(seen.trial, rank, seen.seed)[0]):
            return f"rank {rank}'s weights were written: only gradients are to be summed"
        for number, gradient in enumerate(gradients):
            if gradient is None:
                return (
                    f"rank {rank} still has no gradient for parameter {number}: one that a rank "
                    "did not use counts as zeros, and gets the sum of the others"
                )
    flat = torch.cat([total.flatten() for total in wanted])
    got = [torch.cat([gradient.flatten() for gradient in value[0]]) for value in seen.values]
    says = difference("gradients", got, [flat] * seen.trial.n)
    return _half_done(seen, got, says) if says and seen.trial.n > 1 else says


def _half_done(seen: Seen, got: list[Tensor], says: str) -> str:
    """Whether the gradients are still those of before, were added to those, or were averaged."""
    before = []
    for rank in range(seen.trial.n):
        weights, gradients = _inputs(seen.trial, rank, seen.seed)
        pairs = zip(weights, gradients, strict=True)
        own = [torch.zeros_like(w) if g is None else g for w, g in pairs]
        before.append(torch.cat([gradient.flatten() for gradient in own]))
    if not difference("gradients", got, before):
        return f"every rank still has its own gradients: nothing arrived in p.grad ({says})"
    if not difference("gradients", got, [own + torch.stack(before).sum(0) for own in before]):
        return f"the sum was added to the rank's own gradient, which it has to replace: {says}"
    if not difference("gradients", got, [torch.stack(before).mean(0)] * len(got)):
        return f"this is the average; the sum is wanted: {says}"
    return says


def _one_call(seen: Seen) -> str:
    for rank, observed in enumerate(seen.ranks):
        if len(observed.calls) != 1:
            return (
                f"rank {rank} made {len(observed.calls)} calls for a bucket of "
                f"{len(_wanted(seen))} parameters; one is wanted, for one flat tensor"
            )
    return ""


def _bytes(seen: Seen) -> str:
    n, payload = seen.trial.n, sum(total.nbytes for total in _wanted(seen))
    right = wire("all_reduce", payload, n)
    for rank, observed in enumerate(seen.ranks):
        sent = sum((call.wire(n) for call in observed.calls), Fraction(0))
        if sent != right:
            ops = ", ".join(sorted({call.op for call in observed.calls}))
            return (
                f"rank {rank} sent {float(sent):,g} bytes by {ops} for {payload:,} bytes of "
                f"gradients; an all-reduce sends 2(n-1)/n of them, {float(right):,g}"
            )
    return ""


def _gradients(parameters: Parameters) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]


def _set(parameters: Parameters, flat: Tensor) -> None:
    parts = flat.split([p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)


def _flat(parameters: Parameters) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in _gradients(parameters)])


def _right(parameters: Parameters, axis: Axis) -> None:
    _set(parameters, comm.all_reduce(_flat(parameters), axis))


def _right_in_raw_torch(parameters: Parameters, axis: Axis) -> None:
    gradients = _gradients(parameters)
    flat = _flatten_dense_tensors(gradients)
    dist.all_reduce(flat, group=axis.group)
    for parameter, total in zip(parameters, _unflatten_dense_tensors(flat, gradients), strict=True):
        if parameter.grad is None:
            parameter.grad = total
        else:
            parameter.grad.copy_(total)


def _averages(parameters: Parameters, axis: Axis) -> None:
    _set(parameters, comm.all_reduce(_flat(parameters), axis) / axis.size)


def _twice(parameters: Parameters, axis: Axis) -> None:
    _right(parameters, axis)
    _right(parameters, axis)


def _adds(parameters: Parameters, axis: Axis) -> None:
    own = _flat(parameters)
    _set(parameters, own + comm.all_reduce(own, axis))


def _one_by_one(parameters: Parameters, axis: Axis) -> None:
    for parameter, gradient in zip(parameters, _gradients(parameters), strict=True):
        parameter.grad = comm.all_reduce(gradient, axis)


def _loses_the_sum(parameters: Parameters, axis: Axis) -> None:
    comm.all_reduce(_flat(parameters), axis)


def _sums_weights(parameters: Parameters, axis: Axis) -> None:
    flat = comm.all_reduce(torch.cat([p.detach().flatten() for p in parameters]), axis)
    with torch.no_grad():
        for parameter, part in zip(
            parameters, flat.split([p.numel() for p in parameters]), strict=True
        ):
            parameter.copy_(part.view_as(parameter))


def _skips_unused(parameters: Parameters, axis: Axis) -> None:
    _right([p for p in parameters if p.grad is not None], axis)


def _keeps_none(parameters: Parameters, axis: Axis) -> None:
    """Sends zeros for an unused parameter, and gives the sum only to the others."""
    unused = [p for p in parameters if p.grad is None]
    _right(parameters, axis)
    for parameter in unused:
        parameter.grad = None


def _gathers(parameters: Parameters, axis: Axis) -> None:
    everybody = comm.all_gather(_flat(parameters).unsqueeze(0), axis)
    _set(parameters, everybody.sum(0))


def _mixes_up(parameters: Parameters, axis: Axis) -> None:
    """Flattens from the last to the first, and splits from the first to the last."""
    _set(parameters, comm.all_reduce(_flat(parameters[::-1]), axis))


BUCKET = Ranked(
    id="03-3",
    title="one bucket, one all-reduce",
    names=("sum_bucket",),
    hints=(
        "torch.cat makes one tensor of many flat ones. What stands in for a gradient that is None?",
        "Three steps: flatten all gradients into one tensor, all-reduce it once, give every "
        "parameter its piece of the sum, in its own shape.",
        "grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]; "
        "torch.cat([g.flatten() for g in grads]); comm.all_reduce; split([p.numel() for p in "
        "parameters]); p.grad = piece.view_as(p).",
    ),
    wrong=(
        Wrong(lambda parameters, axis: None, words="nothing arrived in p.grad"),
        Wrong(_loses_the_sum, words="nothing arrived in p.grad"),
        Wrong(_averages, words="this is the average; the sum is wanted"),
        Wrong(_twice, words="your gradients are exactly 2 times too large"),
        Wrong(_adds, words="which it has to replace"),
        Wrong(_sums_weights, words="only gradients are to be summed"),
        Wrong(_mixes_up, words="gradients are wrong on every rank"),
        Wrong(_keeps_none, words="counts as zeros"),
        Wrong(_skips_unused, words="counts as zeros"),
        Wrong(_one_by_one, words="made 4 calls for a bucket of 4 parameters"),
        Wrong(_gathers, words="by all_gather"),
        Wrong(lambda parameters, axis: dp.Bucketed(parameters, axis).finish(), words=REFUSAL),
        Wrong(lambda parameters, axis: dp.Naive(parameters, axis).finish(), words=REFUSAL),
        Wrong(
            lambda parameters, axis: comm.start_all_reduce_flat(_gradients(parameters), axis),
            words=REFUSAL,
        ),
        Wrong(
            lambda parameters, axis: _set(
                parameters, comm.all_reduce(comm.flatten(_gradients(parameters)), axis)
            ),
            words=REFUSAL,
        ),
    ),
    right=(_right, _right_in_raw_torch),
    stub=lambda parameters, axis: None,
    trials=TRIALS,
    inputs=_inputs,
    act=_act,
    looks=(
        RankCase("gradients", "two ranks", TWO, _sums),
        RankCase("gradients", "four ranks", FOUR, _sums),
        RankCase("gradients", "a parameter that a rank did not use", UNUSED, _sums),
        RankCase("gradients", "one rank", ONE, _sums),
        RankCase("wire", "one call", FOUR, _one_call),
        RankCase("wire", "bytes", FOUR, _bytes),
    ),
    refused=(
        "course_lib.comm.flat:flatten",
        "course_lib.comm.flat:unflatten",
        "course_lib.comm.flat:start_all_reduce_flat",
        "course_lib.dp:Naive.finish",
        "course_lib.dp:Bucketed.finish",
        "course_lib.dp:Overlapped.finish",
    ),
)
