"""06-2: rows enter a region: a gather, and what stands behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from course_lib import comm, sp
from course_lib.grading.compare import difference
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.ranked import RankCase, Ranked, Seen, Trial
from course_lib.mesh import Axis, Mesh

TWO, FOUR, ONE = range(3)
TRIALS = (Trial(2, 6), Trial(4, 8), Trial(1, 3))  # size: positions, S
BATCH, HIDDEN, OUT = 2, 3, 2
SCATTERS = {"all_to_all": "reduce_scatter"}  # comm's on gloo: pieces to owners, who add them up
REFUSAL = "this is what you are asked to write"


def _inputs(trial: Trial, rank: int, seed: int) -> tuple[Tensor, ...]:
    """This rank's rows of x; its part of the weight; the gradient that comes back to its y."""
    shared = torch.Generator().manual_seed(seed)
    x_BSD = torch.randn(BATCH, trial.size, HIDDEN, generator=shared)
    weights = torch.randn(trial.n, OUT, HIDDEN, generator=shared)
    back = torch.randn(trial.n, BATCH, trial.size, OUT, generator=shared)
    return x_BSD.chunk(trial.n, 1)[rank].clone(), weights[rank].clone(), back[rank].clone()


def _act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> Any:
    x, weight = (one.clone().requires_grad_() for one in inputs[:2])
    y = answers[0](x, weight, mesh.world)
    if not isinstance(y, Tensor) or y.shape != inputs[2].shape:
        return y.detach() if isinstance(y, Tensor) else y, None
    if not y.requires_grad:
        return y.detach(), "no gradient"
    y.backward(inputs[2])
    return y.detach(), [x.grad, weight.grad]


def _given(seen: Seen) -> list[tuple[Tensor, ...]]:
    return [_inputs(seen.trial, rank, seen.seed) for rank in range(seen.trial.n)]


def _outputs(seen: Seen) -> str:
    given = _given(seen)
    whole = torch.cat([x for x, _, _ in given], 1)
    got = [value[0] for value in seen.values]
    says = difference("outputs", got, [F.linear(whole, weight) for _, weight, _ in given])
    rows = [F.linear(x, weight) for x, weight, _ in given]
    if says and seen.trial.n > 1 and not difference("", got, rows):
        return f"these are this rank's rows only: the region needs all positions ({says})"
    return says


def _own_gradients(seen: Seen) -> list[Tensor]:
    """The gradient of all rows through each rank's own features."""
    return [dy @ weight for _, weight, dy in _given(seen)]


def _row_gradients(seen: Seen) -> str:
    n, own = seen.trial.n, _own_gradients(seen)
    if any(not isinstance(value[1], list) for value in seen.values):
        return "the result carries no gradient"
    got = [value[1][0] for value in seen.values]
    if any(one is None for one in got):
        return "no gradient reached x: comm.all_gather is for numbers, an operator has a backward"
    wanted = list(torch.stack(own).sum(0).chunk(n, 1))
    says = difference("gradients of x", got, wanted)
    if says and n > 1 and not difference("", got, [d.chunk(n, 1)[r] for r, d in enumerate(own)]):
        return (
            "backward kept this rank's rows of its own gradient; but every rank used these rows, "
            f"each for its own features: they have to be summed ({says})"
        )
    return says


def _weight_gradients(seen: Seen) -> str:
    given = _given(seen)
    whole = torch.cat([x for x, _, _ in given], 1).flatten(0, 1)
    if any(not isinstance(value[1], list) for value in seen.values):
        return "the result carries no gradient"
    got = [value[1][1] for value in seen.values]
    return difference(
        "gradients of the weight", got, [dy.flatten(0, 1).t() @ whole for *_, dy in given]
    )


def _calls(seen: Seen) -> str:
    rows = _given(seen)[0][0].nbytes
    wanted = [("all_gather", rows), ("reduce_scatter", rows * seen.trial.n)]
    for rank, observed in enumerate(seen.ranks):
        made = [(SCATTERS.get(call.op, call.op), call.payload) for call in observed.calls]
        if made != wanted:
            said = ", ".join(f"{op} of {size} bytes" for op, size in made) or "nothing"
            return (
                f"rank {rank} sent {said}; wanted are one all_gather of its rows forward and one "
                "reduce_scatter backward"
            )
    return ""


def _right(x: Tensor, weight: Tensor, axis: Axis) -> Tensor:
    return F.linear(comm.gather_from_sequence(x, axis, 1), weight)


class _Enter(torch.autograd.Function):
    """The same in raw torch: positions first, as the flat collectives want them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        if axis.size == 1:
            return x.clone()
        parts = [torch.empty_like(x) for _ in range(axis.size)]
        dist.all_gather(parts, x.contiguous(), group=axis.group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.axis.size == 1:
            return gradient, None
        parts = [part.contiguous() for part in gradient.chunk(ctx.axis.size, 1)]
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts, group=ctx.axis.group)
        return mine, None


def _right_raw(x: Tensor, weight: Tensor, axis: Axis) -> Tensor:
    return _Enter.apply(x, axis) @ weight.mT


ENTER = Ranked(
    id="06-2",
    title="rows enter a region",
    names=("column_on_rows",),
    hints=(
        "The product needs all positions. Which operator of comm makes them from rows, and what "
        "does its backward do?",
        "Every rank uses all rows, each for its own features: the gradient of a row is a sum over "
        "ranks, and its owner needs it. That is a gather whose backward is a reduce-scatter, along "
        "dim 1.",
        "F.linear(comm.gather_from_sequence(x_BScD, axis, 1), weight_FtD).",
    ),
    wrong=(
        Wrong(lambda x, weight, axis: None, words="from rank 0, got a NoneType"),
        Wrong(lambda x, weight, axis: F.linear(x, weight), words="got shape [2, 3, 2]"),
        Wrong(
            lambda x, weight, axis: F.linear(comm.gather_from_sequence(x, axis, 0), weight),
            words="expected outputs of shape",
        ),
        Wrong(
            lambda x, weight, axis: F.linear(comm.gather_from(x, axis, 1), weight),
            words="backward kept this rank's rows of its own gradient",
        ),
        Wrong(
            lambda x, weight, axis: F.linear(comm.all_gather(x, axis, 1), weight),
            words="no gradient reached x",
        ),
        Wrong(
            lambda x, weight, axis: comm.gather_from_sequence(F.linear(x, weight), axis, 1),
            words="outputs are wrong on every rank",
        ),
        Wrong(
            lambda x, weight, axis: F.linear(
                comm.gather_from_sequence(x, axis, 1) / axis.size, weight
            ),
            words="exactly 2 times too small",
        ),
        Wrong(
            lambda x, weight, axis: F.linear(
                comm.gather_from_sequence(x.detach(), axis, 1), weight
            ),
            words="no gradient reached x",
        ),
        Wrong(
            lambda x, weight, axis: F.linear(
                comm.copy_to(comm.gather_from(x, axis, 1), axis), weight
            ),
            words="all_reduce",
        ),
        Wrong(
            lambda x, weight, axis: F.linear(
                comm.gather_from(comm.copy_to(x, axis), axis, 1), weight
            ),
            words="gradients of x are wrong",
        ),
        Wrong(lambda x, weight, axis: F.linear(sp.enter(x, axis), weight), words=REFUSAL),
    ),
    right=(_right, _right_raw),
    stub=lambda x, weight, axis: None,
    trials=TRIALS,
    inputs=_inputs,
    act=_act,
    looks=(
        RankCase("outputs", "two ranks", TWO, _outputs),
        RankCase("gradients", "of x, two ranks", TWO, _row_gradients),
        RankCase("gradients", "of the weight, two ranks", TWO, _weight_gradients),
        RankCase("outputs", "four ranks", FOUR, _outputs),
        RankCase("gradients", "of x, four ranks", FOUR, _row_gradients),
        RankCase("outputs", "one rank", ONE, _outputs),
        RankCase("wire", "one gather, one scatter", FOUR, _calls),
    ),
    refused=("course_lib.sp:enter", "course_lib.sp:_EnterAgain.forward"),
)
