"""05-2: where the bias of a row linear goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib import comm, tp
from course_lib.grading.compare import difference
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.ranked import RankCase, Ranked, Seen, Trial
from course_lib.mesh import Axis, Mesh

TWO, FOUR, ONE = range(3)
TRIALS = (Trial(2, 4), Trial(4, 8), Trial(1, 4))  # size: inner features, F
ROWS, OUT = 3, 5
REFUSAL = "this is what you are asked to write"


def _inputs(trial: Trial, rank: int, seed: int) -> tuple[Tensor, ...]:
    """This rank's columns of h and of the weight; the whole bias; the gradient that comes back."""
    shared = torch.Generator().manual_seed(seed)
    h_TF = torch.randn(ROWS, trial.size, generator=shared)
    weight_DF = torch.randn(OUT, trial.size, generator=shared)
    bias_D = torch.randn(OUT, generator=shared)
    dy_TD = torch.randn(ROWS, OUT, generator=shared)
    mine = [x.chunk(trial.n, 1)[rank].clone() for x in (h_TF, weight_DF)]
    return *mine, bias_D, dy_TD


def _act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> Any:
    h, weight, bias = (x.clone().requires_grad_() for x in inputs[:3])
    y = answers[0](h, weight, bias, mesh.world)
    if not isinstance(y, Tensor):
        return y, None
    if not y.requires_grad:
        return y.detach(), "no gradient"
    y.backward(inputs[3])
    return y.detach(), [None if x.grad is None else x.grad for x in (h, weight, bias)]


def _parts(seen: Seen) -> list[Tensor]:
    ranks = [_inputs(seen.trial, rank, seen.seed) for rank in range(seen.trial.n)]
    return [h @ weight.t() for h, weight, _, _ in ranks]


def _outputs(seen: Seen) -> str:
    n, bias = seen.trial.n, _inputs(seen.trial, 0, seen.seed)[2]
    parts, got = _parts(seen), [value[0] for value in seen.values]
    total = torch.stack(parts).sum(0)
    says = difference("outputs", got, [total + bias] * n)
    if not says or n == 1:
        return says
    for mistaken, message in (
        ([total + n * bias] * n, f"all {n} ranks added the bias, so that the sum has it {n} times"),
        ([total] * n, "the bias is missing"),
        (parts, "the ranks' parts are not summed, and the bias is missing"),
        ([part + bias for part in parts], "the ranks' parts are not summed"),
        ([n * (total + bias)] * n, "summed twice"),
    ):
        if not difference("outputs", got, mistaken):
            return f"{message}: {says}"
    return says


def _gradients(seen: Seen) -> str:
    for number, (value, inputs) in enumerate(
        zip(
            seen.values,
            (_inputs(seen.trial, r, seen.seed) for r in range(seen.trial.n)),
            strict=True,
        )
    ):
        got = value[1]
        if not isinstance(got, list):
            return (
                "the result carries no gradient: comm.all_reduce has no backward; use the "
                "operator comm.reduce_from"
            )
        h, weight, _, dy = inputs
        wanted = {"h": dy @ weight, "weight": dy.t() @ h, "bias": dy.sum(0)}
        for name, one, right in zip(wanted, got, wanted.values(), strict=True):
            if one is None:
                alike = "; every rank holds the whole bias, and needs its gradient"
                return f"rank {number}: no gradient reached {name}{alike * (name == 'bias')}"
            if says := difference(f"gradients of {name}", [one], [right]):
                where = f"rank {number}: {says.replace('your ', '')}"
                if name == "bias":
                    return f"{where}; every rank holds the whole bias and needs its whole gradient"
                return where
    return ""


def _one_call(seen: Seen) -> str:
    payload = ROWS * OUT * 4
    for rank, observed in enumerate(seen.ranks):
        made = [(call.op, call.payload) for call in observed.calls]
        if made != [("all_reduce", payload)]:
            said = ", ".join(f"{op} of {size} bytes" for op, size in made) or "none"
            return f"rank {rank} made {len(made)} calls ({said}); one all_reduce of y is enough"
    return ""


def _right(h: Tensor, weight: Tensor, bias: Tensor, axis: Axis) -> Tensor:
    return comm.reduce_from(F.linear(h, weight), axis) + bias


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        total = x.clone()
        if axis.size > 1:
            dist.all_reduce(total, group=axis.group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def _right_by_hand(h: Tensor, weight: Tensor, bias: Tensor, axis: Axis) -> Tensor:
    return torch.add(bias, _Sum.apply(h.matmul(weight.mT), axis))


def _on_one_rank(h: Tensor, weight: Tensor, bias: Tensor, axis: Axis) -> Tensor:
    own = bias if axis.rank == 0 else torch.zeros_like(bias)
    return comm.reduce_from(F.linear(h, weight, own), axis)


def _gathers(h: Tensor, weight: Tensor, bias: Tensor, axis: Axis) -> Tensor:
    parts = comm.gather_from_sequence(F.linear(h, weight).unsqueeze(0), axis)
    return parts.sum(0) + bias / 1


def _by_library(h: Tensor, weight: Tensor, bias: Tensor, axis: Axis) -> Tensor:
    linear = nn.Linear(weight.shape[1] * axis.size, weight.shape[0])
    return tp.RowLinear(linear, axis)(h)


BIAS = Ranked(
    id="05-2",
    title="where the bias goes",
    names=("row_linear",),
    hints=(
        "Each rank multiplies its own features. What does every rank have in full, and how often "
        "may it be in the sum?",
        "First the sum of the parts over the ranks, then the bias, once. Backward must reach the "
        "bias on every rank, undivided.",
        "comm.reduce_from(F.linear(h_TFt, weight_DFt), axis) is the sum; add bias_D to it.",
    ),
    wrong=(
        Wrong(lambda h, weight, bias, axis: None, words="from rank 0, got a NoneType"),
        Wrong(
            lambda h, weight, bias, axis: comm.reduce_from(F.linear(h, weight, bias), axis),
            words="ranks added the bias",
        ),
        Wrong(
            lambda h, weight, bias, axis: comm.reduce_from(
                F.linear(h, weight, bias / axis.size), axis
            ),
            words="every rank holds the whole bias",
        ),
        Wrong(_on_one_rank, words="every rank holds the whole bias"),
        Wrong(
            lambda h, weight, bias, axis: comm.reduce_from(F.linear(h, weight), axis),
            words="the bias is missing",
        ),
        Wrong(
            lambda h, weight, bias, axis: F.linear(h, weight) + bias,
            words="the ranks' parts are not summed",
        ),
        Wrong(
            lambda h, weight, bias, axis: comm.copy_to(F.linear(h, weight), axis) + bias,
            words="the ranks' parts are not summed",
        ),
        Wrong(
            lambda h, weight, bias, axis: comm.all_reduce(F.linear(h, weight), axis) + bias,
            words="no gradient reached h",
        ),
        Wrong(
            lambda h, weight, bias, axis: comm.reduce_from(
                comm.reduce_from(F.linear(h, weight), axis) + bias, axis
            ),
            words="summed twice",
        ),
        Wrong(
            lambda h, weight, bias, axis: (
                comm.reduce_from(comm.copy_to(F.linear(h, weight), axis), axis) + bias
            ),
            words="times too large",
        ),
        Wrong(_gathers, words="times too large"),
        Wrong(_by_library, words=REFUSAL),
    ),
    right=(_right, _right_by_hand),
    stub=lambda h, weight, bias, axis: None,
    trials=TRIALS,
    inputs=_inputs,
    act=_act,
    looks=(
        RankCase("outputs", "two ranks", TWO, _outputs),
        RankCase("outputs", "four ranks", FOUR, _outputs),
        RankCase("gradients", "of h, weight and bias, two ranks", TWO, _gradients),
        RankCase("gradients", "of h, weight and bias, four ranks", FOUR, _gradients),
        RankCase("outputs", "one rank", ONE, _outputs),
        RankCase("wire", "one all-reduce", FOUR, _one_call),
    ),
    refused=("course_lib.tp.layers:RowLinear.forward",),
)
