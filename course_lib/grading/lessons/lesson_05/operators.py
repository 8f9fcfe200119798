"""05-3: the pair of operators, f and g, as autograd functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import comm
from course_lib.grading.compare import difference
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.ranked import RankCase, Ranked, Seen, Trial
from course_lib.grading.wire import WireCalls
from course_lib.mesh import Axis, Mesh

TWO, FOUR, THREE, ONE = range(4)
TRIALS = (Trial(2, 3), Trial(4, 5), Trial(3, 2), Trial(1, 4))  # size: rows
REFUSAL = "this is what you are asked to write"
F_FORWARD, F_BACKWARD, G_FORWARD, G_BACKWARD = PHASES = (
    "f forward",
    "f backward",
    "g forward",
    "g backward",
)


def _inputs(trial: Trial, rank: int, seed: int) -> tuple[Tensor, ...]:
    """x of f, equal on all ranks, and the gradient that comes back to it, a part on each; x of g,
    a part on each, and the gradient that comes back to it, equal on all."""
    shared = torch.Generator().manual_seed(seed)
    own = torch.Generator().manual_seed(seed + 1 + rank)
    shape = (trial.size, 4)
    draw = torch.randn
    whole, back = draw(shape, generator=shared), draw(shape, generator=shared)
    return whole, draw(shape, generator=own), draw(shape, generator=own), back


def _act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> Any:
    """Both operators forward and backward, and the calls of each of the four phases."""
    found: dict[str, Any] = {}
    for letter, function, (x, dy) in zip("fg", answers, (inputs[:2], inputs[2:]), strict=True):
        leaf, handed = x.clone().requires_grad_(), dy.clone()
        moved = leaf * 1  # no leaf: who writes into it is seen
        with WireCalls() as calls:
            y = function.apply(moved, mesh.world)  # type: ignore[attr-defined]
        found[f"{letter} forward"] = (_kept(y), calls.calls)
        if not (isinstance(y, Tensor) and y.requires_grad):
            found[f"{letter} backward"] = ("no gradient", [])
            continue
        with WireCalls() as calls:
            y.backward(handed)
        found[f"{letter} backward"] = (leaf.grad, calls.calls)
        found[f"{letter} left alone"] = torch.equal(moved, x) and torch.equal(handed, dy)
    return found


def _kept(y: Any) -> Any:
    return y.detach().clone() if isinstance(y, Tensor) else y


def _given(seen: Seen) -> list[tuple[Tensor, ...]]:
    return [_inputs(seen.trial, rank, seen.seed) for rank in range(seen.trial.n)]


def _wanted(seen: Seen, phase: str) -> list[Tensor]:
    given = _given(seen)
    place = PHASES.index(phase)
    if phase in (F_FORWARD, G_BACKWARD):
        return [one[place] for one in given]
    return [torch.stack([one[place] for one in given]).sum(0)] * len(given)


def _right_values(phase: str) -> Any:
    """A look at one phase of all ranks."""
    what = "outputs of" if "forward" in phase else "gradients of"

    def look(seen: Seen) -> str:
        got, n = [value[phase][0] for value in seen.values], seen.trial.n
        if any(isinstance(one, str) for one in got):
            return f"{phase}: what apply returns carries no gradient"
        if any(one is None for one in got):
            return f"{phase}: None arrived where a tensor is wanted"
        says = difference(f"{what} {phase[0]}", got, _wanted(seen, phase))
        if not says or n == 1:
            return says
        own = [one[PHASES.index(phase)] for one in _given(seen)]
        if phase in (F_BACKWARD, G_FORWARD):
            if not difference("", got, own):
                return (
                    f"{phase}: every rank still has its own part, where the sum over the ranks is "
                    f"wanted ({says})"
                )
            if not difference("", got, [torch.stack(own).mean(0)] * n):
                return f"{phase}: this is the average; the sum is wanted ({says})"
        elif not difference("", got, [n * one for one in own]):
            return f"{phase}: summed over the ranks, where all hold the same already ({says})"
        return f"{phase}: {says}"

    return look


def _left_alone(seen: Seen) -> str:
    for rank, value in enumerate(seen.values):
        for letter in "fg":
            if not value.get(f"{letter} left alone", False):
                return (
                    f"{letter} wrote into what it was given, on rank {rank}: the tensor or the "
                    "gradient may be in use elsewhere; all-reduce a copy, or use comm.all_reduce"
                )
    return ""


def _calls(seen: Seen) -> str:
    payload = _given(seen)[0][0].nbytes
    for rank, value in enumerate(seen.values):
        for phase in PHASES:
            made = [(call.op, call.payload) for call in value[phase][1]]
            wanted = [("all_reduce", payload)] if phase in (F_BACKWARD, G_FORWARD) else []
            if made != wanted:
                said = ", ".join(f"{op} of {size} bytes" for op, size in made) or "nothing"
                right = "one all_reduce of x" if wanted else "nothing"
                return f"{phase}: rank {rank} sent {said}; {right} is wanted"
    return ""


def _pair(forward: Any, backward: Any) -> Any:
    """An autograd function made of two moves."""

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, axis: Axis) -> Any:
            ctx.axis = axis
            return forward(x, axis)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
            return backward(gradient, ctx.axis), None

    return Made


def _same(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, axis: Axis) -> Tensor:
    return comm.all_reduce(x, axis)


def _raw_sum(x: Tensor, axis: Axis) -> Tensor:
    total = x.clone()
    dist.all_reduce(total, group=axis.group)
    return total


def _in_place(x: Tensor, axis: Axis) -> Tensor:
    dist.all_reduce(x, group=axis.group)
    return x.view_as(x)


def _gathered(x: Tensor, axis: Axis) -> Tensor:
    return comm.all_gather(x.unsqueeze(0), axis).sum(0)


def _mean(x: Tensor, axis: Axis) -> Tensor:
    return comm.all_reduce(x, axis) / axis.size


def _none(x: Tensor, axis: Axis) -> None:
    return None


class _Stub(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        raise NotImplementedError("write forward")


class _ByLibrary:
    @staticmethod
    def apply(x: Tensor, axis: Axis) -> Tensor:
        return comm.copy_to(x, axis)


_COPY, _REDUCE = _pair(_same, _sum), _pair(_sum, _same)

OPERATORS = Ranked(
    id="05-3",
    title="the pair of operators",
    names=("Copy", "Reduce"),
    hints=(
        "f: what does a rank have forward, and what does each rank have of the gradient when it "
        "comes back? g is the mirror of it.",
        "f passes x on; in backward it sums the gradient over the ranks. g sums x; in backward it "
        "passes the gradient on. backward returns a gradient for each argument of forward: axis "
        "has none.",
        "Copy: ctx.axis = axis; return x.view_as(x); backward: return comm.all_reduce(gradient, "
        "ctx.axis), None. Reduce: return comm.all_reduce(x, axis); backward: gradient, None.",
    ),
    wrong=(
        Wrong((_pair(_same, _same), _pair(_same, _same)), words="still has its own part"),
        Wrong((_pair(_same, _same), _REDUCE), words="f backward: every rank still has its own"),
        Wrong((_COPY, _pair(_same, _same)), words="g forward: every rank still has its own part"),
        Wrong((_REDUCE, _COPY), words="every rank still has its own part"),
        Wrong((_pair(_sum, _sum), _REDUCE), words="f forward: summed over the ranks"),
        Wrong((_COPY, _pair(_sum, _sum)), words="g backward: summed over the ranks"),
        Wrong((_COPY, _pair(_raw_sum, _raw_sum)), words="g backward: summed over the ranks"),
        Wrong((_pair(_same, _mean), _REDUCE), words="f backward: this is the average"),
        Wrong((_COPY, _pair(_mean, _same)), words="g forward: this is the average"),
        Wrong((_COPY, _pair(_sum, _none)), words="g backward: None arrived"),
        Wrong((_COPY, _pair(_in_place, _same)), words="g wrote into what it was given"),
        Wrong((_pair(_same, _in_place), _REDUCE), words="f wrote into what it was given"),
        Wrong((_pair(_same, _gathered), _REDUCE), words="f backward: rank 0 sent all_gather"),
        Wrong((_COPY, _pair(_gathered, _same)), words="g forward: rank 0 sent all_gather"),
        Wrong((_ByLibrary, _REDUCE), words=REFUSAL),
        Wrong((_COPY, _pair(_none, _same)), words="g forward: None arrived"),
    ),
    right=(
        (_COPY, _REDUCE),
        (_pair(_same, _raw_sum), _pair(_raw_sum, lambda gradient, axis: gradient)),
    ),
    stub=(_Stub, _Stub),
    trials=TRIALS,
    inputs=_inputs,
    act=_act,
    looks=(
        *(
            RankCase(axis, f"{phase}, {ranks}", trial, _right_values(phase), later=later)
            for ranks, trial in (("two ranks", TWO), ("four ranks", FOUR))
            for axis, phase, later in (
                ("outputs", F_FORWARD, True),
                ("gradients", F_BACKWARD, False),
                ("outputs", G_FORWARD, False),
                ("gradients", G_BACKWARD, True),
            )
        ),
        RankCase("gradients", "f, three ranks", THREE, _right_values(F_BACKWARD)),
        RankCase("outputs", "g, one rank", ONE, _right_values(G_FORWARD)),
        RankCase("outputs", "what is given is left alone", TWO, _left_alone, later=True),
        RankCase("wire", "one all-reduce each, and where", FOUR, _calls),
    ),
    refused=("course_lib.comm.operators:_Pair.forward",),
)
