"""06-5: a region between rows, forward and backward, in raw torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import comm
from course_lib.grading.compare import difference
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.ranked import RankCase, Ranked, Seen, Trial
from course_lib.mesh import Mesh, make_mesh

TWO, FOUR, THREE, ONE = range(4)
TRIALS = (Trial(2, 6), Trial(4, 8), Trial(3, 6), Trial(1, 4))  # size: tokens, T
HIDDEN, PER_RANK = 4, 3  # D; inner features of a rank
REFUSAL = "this is what you are asked to write"
NAMES = ("y", "dx", "gradient of weight_in", "gradient of weight_out")


def _whole(trial: Trial, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inner = PER_RANK * trial.n
    x, dy = (torch.randn(trial.size, HIDDEN, generator=generator) for _ in range(2))
    weight_in = torch.randn(inner, HIDDEN, generator=generator)
    return x, weight_in, torch.randn(HIDDEN, inner, generator=generator), dy


def _inputs(trial: Trial, rank: int, seed: int) -> tuple[Tensor, ...]:
    """This rank's rows of x, its parts of the weights, and its rows of dy."""
    x, weight_in, weight_out, dy = _whole(trial, seed)
    n = trial.n
    cut = (
        x.chunk(n)[rank],
        weight_in.chunk(n)[rank],
        weight_out.chunk(n, 1)[rank],
        dy.chunk(n)[rank],
    )
    return tuple(one.clone() for one in cut)


def _act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> Any:
    return answers[0](*inputs)


@cache
def _serial(trial: Trial, seed: int) -> tuple[list[Tensor], ...]:
    """By name, what each rank is to have."""
    x, weight_in, weight_out, dy = (one.requires_grad_() for one in _whole(trial, seed))
    y = (x @ weight_in.mT).relu() @ weight_out.mT
    dx, d_in, d_out = torch.autograd.grad(y, [x, weight_in, weight_out], dy)
    n = trial.n
    return [*y.detach().chunk(n)], [*dx.chunk(n)], [*d_in.chunk(n)], [*d_out.chunk(n, 1)]


def _parts(seen: Seen) -> tuple[list[Tensor], list[Tensor]]:
    """y and dx of all rows, each rank's share of the features alone."""
    x, weight_in, weight_out, dy = _whole(seen.trial, seen.seed)
    n, ys, dxs = seen.trial.n, [], []
    for a, b in zip(weight_in.chunk(n), weight_out.chunk(n, 1), strict=True):
        inner = x @ a.mT
        ys.append(inner.relu() @ b.mT)
        dxs.append((dy @ b * (inner > 0)) @ a)
    return ys, dxs


def _formed(seen: Seen) -> str:
    for rank, value in enumerate(seen.values):
        if not (isinstance(value, tuple | list) and len(value) == 4):
            return (
                f"rank {rank} returned a {type(value).__name__}; wanted are four tensors: y, dx, "
                "the gradients of weight_in and weight_out"
            )
    return ""


def _look(place: int) -> Any:
    """A look at one of the four results on all ranks."""

    def look(seen: Seen) -> str:
        if says := _formed(seen):
            return says
        n, wanted = seen.trial.n, _serial(seen.trial, seen.seed)[place]
        got = [value[place] for value in seen.values]
        says = difference(f"values of {NAMES[place]}", got, wanted)
        if not says or n == 1:
            return says
        if place < 2:
            own = [part.chunk(n)[rank] for rank, part in enumerate(_parts(seen)[place])]
            if not difference("", got, own):
                return (
                    f"{NAMES[place]} has this rank's rows of its own part; every rank has a part "
                    f"of these rows, from its features: reduce-scatter ({says})"
                )
        elif not difference("", got, [torch.stack(wanted).sum(0)] * n):
            return (
                f"the {NAMES[place]} is summed over ranks that hold different features: each "
                f"keeps its own ({says})"
            )
        return says

    return look


def _sent(seen: Seen) -> str:
    n, x = seen.trial.n, _whole(seen.trial, seen.seed)[0]
    most = 4 * x.nbytes * (n - 1) // n
    for rank, observed in enumerate(seen.ranks):
        sent = sum(call.wire(n) for call in observed.calls)
        if sent > most or len(observed.calls) > 4:
            said = ", ".join(f"{call.op} of {call.payload} bytes" for call in observed.calls)
            return (
                f"rank {rank} sent {int(sent)} bytes ({said}); {most} do: two gathers of rows and "
                "two reduce-scatters"
            )
    return ""


def _left_alone(seen: Seen) -> str:
    for rank, observed in enumerate(seen.ranks):
        given = _inputs(seen.trial, rank, seen.seed)
        if not all(torch.equal(a, b) for a, b in zip(observed.inputs, given, strict=True)):
            return f"rank {rank} wrote into what it was given"
    return ""


def _gather(rows: Tensor) -> Tensor:
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.contiguous())
    return torch.cat(parts)


def _scatter(part: Tensor) -> Tensor:
    pieces = [piece.contiguous() for piece in part.chunk(dist.get_world_size())]
    rows = torch.empty_like(pieces[0])
    dist.reduce_scatter(rows, pieces)
    return rows


def _own(part: Tensor) -> Tensor:
    return part.chunk(dist.get_world_size())[dist.get_rank()].clone()


def _all_reduced(part: Tensor) -> Tensor:
    total = part.clone()
    dist.all_reduce(total)
    return _own(total)


def _whole_sum(part: Tensor) -> Tensor:
    total = part.clone()
    dist.all_reduce(total)
    return total


def _mean(part: Tensor) -> Tensor:
    return _scatter(part) / dist.get_world_size()


def _summed(gradient: Tensor) -> Tensor:
    dist.all_reduce(gradient)
    return gradient


def _own_dy(rows: Tensor) -> Tensor:
    """Zeros where another rank has dy."""
    whole = torch.zeros(len(rows) * dist.get_world_size(), rows.shape[1])
    whole.chunk(dist.get_world_size())[dist.get_rank()].copy_(rows)
    return whole


def _step(
    x: Tensor,
    weight_in: Tensor,
    weight_out: Tensor,
    dy: Tensor,
    *,
    gather: Answer = _gather,
    gather_dy: Answer = _gather,
    leave: Answer = _scatter,
    back: Answer = _scatter,
    relu: bool = True,
    weights: Answer = lambda gradient: gradient,
) -> Any:
    """Right, or with a mistake."""
    whole, dy_whole = gather(x), gather_dy(dy)
    inner = whole @ weight_in.mT
    h = inner.relu()
    y = leave(h @ weight_out.mT)
    d_inner = dy_whole @ weight_out
    if relu:
        d_inner = d_inner * (inner > 0)
    d_out, d_in = dy_whole.mT @ h, d_inner.mT @ whole
    return y, back(d_inner @ weight_in), weights(d_in), weights(d_out)


def _but(**mistake: Any) -> Answer:
    return lambda x, weight_in, weight_out, dy: _step(x, weight_in, weight_out, dy, **mistake)


def _right_by_autograd(x: Tensor, weight_in: Tensor, weight_out: Tensor, dy: Tensor) -> Any:
    """Leaves and autograd.grad; rows to their owners by all-to-all, who add them up."""
    n = dist.get_world_size()

    def scatter(part: Tensor) -> Tensor:
        received = torch.empty_like(part)
        dist.all_to_all_single(received, part.contiguous())
        return torch.stack(received.chunk(n)).sum(0)

    whole = _gather(x).requires_grad_()
    a, b = (one.clone().requires_grad_() for one in (weight_in, weight_out))
    part = (whole @ a.mT).relu() @ b.mT
    dx_part, d_in, d_out = torch.autograd.grad(part, [whole, a, b], _gather(dy))
    return scatter(part.detach()), scatter(dx_part), d_in, d_out


def _gathers_again(x: Tensor, weight_in: Tensor, weight_out: Tensor, dy: Tensor) -> Any:
    """The other variant: right, but its bytes are not those that are asked for."""
    _gather(x)
    return _step(x, weight_in, weight_out, dy)


def _by_comm(x: Tensor, weight_in: Tensor, weight_out: Tensor, dy: Tensor) -> Any:
    axis = make_mesh().world
    return _step(x, weight_in, weight_out, dy, gather=lambda rows: comm.all_gather(rows, axis, 0))


REGION = Ranked(
    id="06-5",
    title="a region between rows in raw PyTorch",
    names=("region_step",),
    hints=(
        "Inside the region every rank has all tokens and its share of the features. What has it "
        "to gather before forward, what before backward, and of what does it have parts?",
        "Gather x; the product of your features is a part of y for all tokens: reduce-scatter it. "
        "Gather dy; backward gives complete gradients of your weights, and a part of dx for all "
        "tokens: reduce-scatter that.",
        "dist.all_gather(parts, x); whole = torch.cat(parts); part = (whole @ a.mT).relu() @ b.mT; "
        "dist.reduce_scatter(y, list(part.detach().chunk(n))); then the same with dy and "
        "torch.autograd.grad(part, [whole, a, b], dy_whole).",
    ),
    wrong=(
        Wrong(lambda x, weight_in, weight_out, dy: None, words="returned a NoneType"),
        Wrong(_but(leave=_own), words="y has this rank's rows of its own part"),
        Wrong(_but(back=_own), words="dx has this rank's rows of its own part"),
        Wrong(_but(leave=_whole_sum), words="expected values of y of shape"),
        Wrong(_but(leave=_mean), words="exactly 2 times too small"),
        Wrong(_but(back=_mean), words="exactly 2 times too small"),
        Wrong(_but(gather_dy=_own_dy), words="values of dx are wrong"),
        Wrong(_but(relu=False), words="values of dx are wrong"),
        Wrong(_but(weights=_summed), words="each keeps its own"),
        Wrong(_but(leave=_all_reduced), words="all_reduce"),
        Wrong(_but(back=_all_reduced), words="all_reduce"),
        Wrong(_gathers_again, words="two gathers of rows"),
        Wrong(_by_comm, words=REFUSAL),
    ),
    right=(_step, _right_by_autograd),
    stub=lambda x, weight_in, weight_out, dy: None,
    trials=TRIALS,
    inputs=_inputs,
    act=_act,
    looks=(
        RankCase("outputs", "two ranks", TWO, _look(0)),
        RankCase("gradients", "of x, two ranks", TWO, _look(1)),
        RankCase("gradients", "of weight_in, two ranks", TWO, _look(2)),
        RankCase("gradients", "of weight_out, two ranks", TWO, _look(3)),
        RankCase("outputs", "four ranks", FOUR, _look(0)),
        RankCase("gradients", "of x, four ranks", FOUR, _look(1)),
        RankCase("gradients", "of x, three ranks", THREE, _look(1)),
        RankCase("outputs", "one rank", ONE, _look(0)),
        RankCase("outputs", "what is given is left alone", FOUR, _left_alone, later=True),
        RankCase("wire", "the bytes of two all-reduces", FOUR, _sent),
    ),
    refused=("course_lib.comm.transfer:issue",),
)
