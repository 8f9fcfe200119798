"""06-3: gradients of what is not cut are sums over the ranks that share rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import comm, sp
from course_lib.aliases import PARAMETER_DIM
from course_lib.grading.compare import difference
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.ranked import RankCase, Ranked, Seen, Trial
from course_lib.mesh import Axis, Mesh

TWO, FOUR, THREE, ONE = range(4)
TRIALS = (Trial(2, 5), Trial(4, 6), Trial(3, 4), Trial(1, 5))  # size: D
DIMS = (None, 0, None, 1, None)  # along which each parameter is cut; None: not
REFUSAL = "this is what you are asked to write"
Parameters = Sequence[nn.Parameter]


def _shapes(size: int) -> list[tuple[int, ...]]:
    return [(size,), (2, size), (size,), (size, 3), (4, size)]


def _inputs(trial: Trial, rank: int, seed: int) -> tuple[list[Tensor]]:
    """The gradients that this rank has of the parameters."""
    own = torch.Generator().manual_seed(seed + rank)
    return ([torch.randn(shape, generator=own) for shape in _shapes(trial.size)],)


def _act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> Any:
    parameters = []
    for gradient, dim in zip(inputs[0], DIMS, strict=True):
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient.clone()
        setattr(parameter, PARAMETER_DIM, dim)
        if dim is not None:
            comm.set_shard_spec(parameter, comm.ShardSpec(mesh.world, dim))
        parameters.append(parameter)
    answers[0](parameters, mesh.world)
    found = [None if p.grad is None else p.grad.clone() for p in parameters]
    return found, all(not p.detach().any() for p in parameters)


def _given(seen: Seen) -> list[list[Tensor]]:
    """By parameter, the gradients of all ranks."""
    ranks = [_inputs(seen.trial, rank, seen.seed)[0] for rank in range(seen.trial.n)]
    return [list(one) for one in zip(*ranks, strict=True)]


def _summed(seen: Seen) -> str:
    n = seen.trial.n
    for place, (own, dim) in enumerate(zip(_given(seen), DIMS, strict=True)):
        if dim is not None:
            continue
        got = [value[0][place] for value in seen.values]
        what = f"gradients of parameter {place}, which is not cut,"
        if any(one is None for one in got):
            return f"{what} are gone"
        total = torch.stack(own).sum(0)
        says = difference(what, got, [total] * n)
        if not says or n == 1:
            if says:
                return says
            continue
        if not difference("", got, own):
            return f"{what} are still each rank's own, of its rows ({says})"
        if not difference("", got, [total / n] * n):
            return f"{what} are averaged; every position counts, so they are summed ({says})"
        return says
    return ""


def _cut_alone(seen: Seen) -> str:
    for place, (own, dim) in enumerate(zip(_given(seen), DIMS, strict=True)):
        if dim is None:
            continue
        got = [value[0][place] for value in seen.values]
        if says := difference(f"gradients of parameter {place}, which is cut,", got, own):
            return (
                f"parameter {place} is cut: the ranks hold different parts of it, and each "
                f"gradient is complete ({says})"
            )
    if not all(value[1] for value in seen.values):
        return "a parameter itself was written into; only gradients change"
    return ""


def _calls(seen: Seen) -> str:
    whole = [one[0] for one, dim in zip(_given(seen), DIMS, strict=True) if dim is None]
    payload = sum(gradient.nbytes for gradient in whole)
    for rank, observed in enumerate(seen.ranks):
        made = [(call.op, call.payload) for call in observed.calls]
        if made != [("all_reduce", payload)]:
            said = ", ".join(f"{op} of {size} bytes" for op, size in made) or "nothing"
            return (
                f"rank {rank} sent {said}; wanted is one all_reduce of {payload} bytes: all "
                "gradients that need it in one flat tensor"
            )
    return ""


def _step(parameters: Parameters, axis: Axis, *, cut_too: bool = False, scale: float = 1.0) -> None:
    whole = [p for p in parameters if cut_too or comm.shard_spec(p) is None]
    flat = torch.cat([_grad(p).flatten() for p in whole])
    total = comm.all_reduce(flat, axis) * scale
    for p, part in zip(whole, total.split([p.numel() for p in whole]), strict=True):
        p.grad = part.view_as(p)


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _right(parameters: Parameters, axis: Axis) -> None:
    _step(parameters, axis)


def _right_raw(parameters: Parameters, axis: Axis) -> None:
    """In raw torch, written back in place; reads the attribute of the first edition."""
    gradients = [_grad(p) for p in parameters if getattr(p, PARAMETER_DIM) is None]
    flat = nn.utils.parameters_to_vector(gradients)
    if axis.size > 1:
        dist.all_reduce(flat, group=axis.group)
    done = 0
    for gradient in gradients:
        gradient.copy_(flat[done : done + gradient.numel()].view_as(gradient))
        done += gradient.numel()


def _one_by_one(parameters: Parameters, axis: Axis) -> None:
    for p in parameters:
        if comm.shard_spec(p) is None:
            p.grad = comm.all_reduce(_grad(p), axis)


def _vectors_only(parameters: Parameters, axis: Axis) -> None:
    """By shape instead of by what is cut: forgets the matrix of positions."""
    _step([p for p in parameters if p.dim() == 1], axis)


def _sum_lost(parameters: Parameters, axis: Axis) -> None:
    """The sum is made, and nobody keeps it."""
    flat = torch.cat([_grad(p).flatten() for p in parameters if comm.shard_spec(p) is None])
    comm.all_reduce(flat, axis)


def _from_first(parameters: Parameters, axis: Axis) -> None:
    """Replicas agree, on rank 0's part."""
    for p in parameters:
        if comm.shard_spec(p) is None:
            p.grad = comm.broadcast(_grad(p), axis)


def _truth_of_dim(parameters: Parameters, axis: Axis) -> None:
    """Takes dim 0 for no dim."""
    specs = {p: comm.shard_spec(p) for p in parameters}
    _step([p for p, spec in specs.items() if not (spec and spec.dim)], axis, cut_too=True)


def _weights_instead(parameters: Parameters, axis: Axis) -> None:
    _step(parameters, axis)
    with torch.no_grad():
        for p in parameters:
            p.add_(1.0)


def _twice(parameters: Parameters, axis: Axis) -> None:
    """As after each of two micro-batches: the second sum adds up sums."""
    _step(parameters, axis)
    _step(parameters, axis)


def _by_library(parameters: Parameters, axis: Axis) -> None:
    sp.sum_gradients(comm.held_gradients(parameters), axis)


NORMS = Ranked(
    id="06-3",
    title="the sum that norms need",
    names=("sum_partial",),
    hints=(
        "A parameter that every rank holds was used on this rank's rows only. One that is cut saw "
        "all positions. Which of them have complete gradients?",
        "Take those whose comm.shard_spec is None, put their gradients into one flat tensor, "
        "all-reduce it and give each its piece back.",
        "flat = torch.cat([p.grad.flatten() for p in whole]); total = comm.all_reduce(flat, axis); "
        "total.split([p.numel() for p in whole]) are the pieces; p.grad = piece.view_as(p).",
    ),
    wrong=(
        Wrong(lambda parameters, axis: None, words="still each rank's own"),
        Wrong(lambda parameters, axis: _step(parameters, axis, cut_too=True), words="is cut"),
        Wrong(
            lambda parameters, axis: _step(parameters, axis, scale=1 / axis.size),
            words="are averaged; every position counts",
        ),
        Wrong(_one_by_one, words="in one flat tensor"),
        Wrong(_vectors_only, words="gradients of parameter 4, which is not cut, are still"),
        Wrong(_sum_lost, words="still each rank's own"),
        Wrong(_from_first, words="which is not cut, are wrong"),
        Wrong(_truth_of_dim, words="parameter 1 is cut"),
        Wrong(_weights_instead, words="a parameter itself was written into"),
        Wrong(_twice, words="exactly 2 times too large"),
        Wrong(_by_library, words=REFUSAL),
    ),
    right=(_right, _right_raw),
    stub=lambda parameters, axis: None,
    trials=TRIALS,
    inputs=_inputs,
    act=_act,
    looks=(
        RankCase("gradients", "of what is not cut, two ranks", TWO, _summed),
        RankCase("gradients", "of what is not cut, four ranks", FOUR, _summed),
        RankCase("gradients", "of what is not cut, three ranks", THREE, _summed),
        RankCase("gradients", "what is cut is left alone", FOUR, _cut_alone, later=True),
        RankCase("wire", "one all-reduce", FOUR, _calls),
    ),
    refused=("course_lib.sp:sum_gradients", "course_lib.comm.held:sum_gradients"),
)
