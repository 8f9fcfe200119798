"""Lesson 12: wrong and right answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from attack import Attacks
from torch import Tensor

from course_lib import comm
from course_lib.grading import registry
from course_lib.grading.exercise import Answer, Wrong
from course_lib.mesh import Axis, make_mesh

REFUSAL = "this is what you are asked to write"
AXES = ("tp", "dp", "pp")
Sizes = Mapping[str, int]
Gradients = dict[str, Tensor]


def _table(**entries: Any) -> dict[str, Any]:
    return {**registry.find("12-1").wanted, **entries}  # type: ignore[attr-defined]


def _by_counting(sizes: Sizes, cut: bool, expert: bool, ends: bool, sharded: bool) -> int:
    """Goes through the places of the mesh and counts those where the same is held."""
    step = sizes["ep"] if expert else 1
    ranks = range(sizes["dp"] * sizes["cp"])
    same_data = [rank for rank in ranks if rank % step == 0 and (rank == 0 or not sharded)]
    same_tp = [rank for rank in range(sizes["tp"]) if rank == 0 or not cut]
    stages = [0, -1] if ends else [0]
    return len(list(product(same_data, same_tp, stages)))


def _rank_by_rank(layers: int, hidden: int, tokens: int, sizes: Sizes) -> dict[str, float]:
    """Adds up over the ranks."""
    found = dict.fromkeys(AXES, 0.0)
    t, d, p = (sizes[axis] for axis in AXES)
    x = 4 * tokens * hidden
    for stage in range(p):
        for _ in range(t * d):
            found["tp"] += 8 * (layers / p) * (t - 1) / t * x
            found["dp"] += 2 * (d - 1) / d * 48 * hidden**2 * layers / p / t
            found["pp"] += x * ((stage > 0) + (stage < p - 1))
    return found


def _clip(
    gradients: Gradients,
    max_norm: float,
    tp: Axis,
    pp: Axis,
    *,
    copied: bool = True,
    tied: bool = True,
    by_size: bool = False,
    axes: str = "tp pp",
    mean: bool = False,
    root: bool = True,
    always: bool = False,
    in_place: bool = True,
    squared_factor: bool = False,
    divide: bool = True,
) -> Any:
    """Right, or with a mistake."""
    ends = (pp.size if by_size else min(2, pp.size)) if tied else 1
    share = {"cut": 1, "copied": tp.size if copied else 1, "tied": ends}
    square = torch.stack(
        [g.square().sum() / (share[k] if divide else 1) for k, g in gradients.items()]
    ).sum()
    for name, axis in (("tp", tp), ("pp", pp)):
        if name in axes.split():
            square = comm.all_reduce(square, axis) / (axis.size if mean else 1)
    norm = square.sqrt() if root else square
    if always or norm > max_norm:
        factor = (max_norm / norm) ** (2 if squared_factor else 1)
        for kind in gradients:
            if in_place:
                gradients[kind].mul_(factor)
            else:
                gradients[kind] = gradients[kind] * factor
    return norm


def _clip_but(**mistake: Any) -> Answer:
    return lambda gradients, max_norm, tp, pp: _clip(gradients, max_norm, tp, pp, **mistake)


def _right_by_sharing(gradients: Gradients, max_norm: float, tp: Axis, pp: Axis) -> float:
    """Only one of the holders counts; three numbers at once, in float64."""
    own = torch.zeros(3, dtype=torch.float64)
    own[0] = gradients["cut"].double().square().sum()
    if tp.rank == 0:
        own[1] = gradients["copied"].double().square().sum()
    if "tied" in gradients and pp.rank == 0:
        own[2] = gradients["tied"].double().square().sum()
    total = comm.all_reduce(comm.all_reduce(own, pp), tp)
    norm = float(total.sum()) ** 0.5
    for gradient in gradients.values():
        gradient *= min(1.0, max_norm / norm)
    return norm


def _gathers(gradients: Gradients, max_norm: float, tp: Axis, pp: Axis) -> Tensor:
    """Sends the gradients themselves."""
    cut = comm.all_gather(gradients["cut"].flatten(), tp)
    square = cut.square().sum() + gradients["copied"].square().sum()
    if "tied" in gradients:
        tied = comm.all_gather(gradients["tied"].flatten(), tp)
        square = square + tied.square().sum() / min(2, pp.size)
    norm = comm.all_reduce(square, pp).sqrt()
    for gradient in gradients.values():
        gradient.mul_((max_norm / norm).clamp(max=1.0))
    return norm


def _by_torch(gradients: Gradients, max_norm: float, tp: Axis, pp: Axis) -> Tensor:
    """What one process would do."""
    norm = torch.nn.utils.get_total_norm(list(gradients.values()))
    for gradient in gradients.values():
        gradient.mul_((max_norm / norm).clamp(max=1.0))
    return norm


def _by_library(gradients: Gradients, max_norm: float, tp: Axis, pp: Axis) -> Tensor:
    held = [comm.Held(torch.nn.Parameter(g), g) for g in gradients.values()]
    return comm.clip_grad_norm(held, [tp, pp], max_norm)


def _complete(
    gradients: Gradients,
    tp: Any,
    dp: Any,
    pp: Any,
    *,
    dp_of: Sequence[str] = ("matrix", "norm", "tied"),
    tp_of: Sequence[str] = ("norm",),
    ends: bool = True,
    average: bool = False,
    local: bool = True,
    early: bool = False,
) -> None:
    """Right, or with a mistake."""
    if early and "tied" in gradients:
        _exchange(gradients["tied"], pp)
    for kind in dp_of:
        if kind in gradients:
            _sum(gradients[kind], dp, average)
    for kind in tp_of:
        if kind in gradients:
            _sum(gradients[kind], tp, False)
    if ends and "tied" in gradients and not early:
        if local:
            _exchange(gradients["tied"], pp)
        else:
            dist.all_reduce(gradients["tied"], group=pp)


def _sum(x: Tensor, group: Any, average: bool) -> None:
    dist.all_reduce(x, group=group)
    if average:
        x /= dist.get_world_size(group)


def _exchange(x: Tensor, pp: Any) -> None:
    stages = dist.get_process_group_ranks(pp)
    if len(stages) > 1:
        other = stages[-1] if dist.get_rank() == stages[0] else stages[0]
        theirs = torch.empty_like(x)
        both = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, theirs, other)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        x += theirs


def _complete_but(**mistake: Any) -> Answer:
    return lambda gradients, tp, dp, pp: _complete(gradients, tp, dp, pp, **mistake)


def _right_flat(gradients: Gradients, tp: Any, dp: Any, pp: Any) -> None:
    """One all-reduce for dp; the first stage sends first, the last one receives first."""
    kinds = [kind for kind in gradients if kind != "expert"]
    flat = torch.cat([gradients[kind].flatten() for kind in kinds])
    dist.all_reduce(flat, group=dp)
    parts = flat.split([gradients[kind].numel() for kind in kinds])
    for kind, part in zip(kinds, parts, strict=True):
        gradients[kind].copy_(part.view_as(gradients[kind]))
    if dist.get_world_size(tp) > 1:
        dist.all_reduce(gradients["norm"], group=tp)
    stages, me = dist.get_process_group_ranks(pp), dist.get_rank()
    if "tied" in gradients and len(stages) > 1:
        theirs = torch.empty_like(gradients["tied"])
        if me == stages[0]:
            dist.send(gradients["tied"], stages[-1])
            dist.recv(theirs, stages[-1])
        else:
            dist.recv(theirs, stages[0])
            dist.send(gradients["tied"], stages[0])
        gradients["tied"].add_(theirs)


def _in_float32(gradients: Gradients, tp: Any, dp: Any, pp: Any) -> None:
    """Receives into float32, whatever is sent."""
    for kind, gradient in gradients.items():
        if kind == "tied":
            total = gradient.float()
            _exchange(total, pp)
            gradient.copy_(total)
    _complete(gradients, tp, dp, pp, ends=False)


def _not_in_place(gradients: Gradients, tp: Any, dp: Any, pp: Any) -> None:
    copies = {kind: gradient.clone() for kind, gradient in gradients.items()}
    _complete(copies, tp, dp, pp)
    gradients.update(copies)


def _world(gradients: Gradients, tp: Any, dp: Any, pp: Any) -> None:
    """Forgets group=."""
    for kind, gradient in gradients.items():
        if kind != "expert" and kind != "tied":
            dist.all_reduce(gradient)


def _send_send(gradients: Gradients, tp: Any, dp: Any, pp: Any) -> None:
    _complete(gradients, tp, dp, pp, ends=False)
    stages, me = dist.get_process_group_ranks(pp), dist.get_rank()
    if "tied" in gradients and len(stages) > 1:
        other = stages[-1] if me == stages[0] else stages[0]
        theirs = torch.empty_like(gradients["tied"])
        dist.send(gradients["tied"], other)
        dist.recv(theirs, other)
        gradients["tied"] += theirs


def _world_too(gradients: Gradients, tp: Any, dp: Any, pp: Any) -> None:
    """Right values, and an all-reduce of all ranks whose result is dropped."""
    dist.all_reduce(gradients["matrix"].clone())
    _complete(gradients, tp, dp, pp)


def _by_comm(gradients: Gradients, tp: Any, dp: Any, pp: Any) -> None:
    axis = make_mesh().world
    gradients["norm"].copy_(comm.all_reduce(gradients["norm"], axis))


def _norm_when_clipped(gradients: Gradients, max_norm: float, tp: Axis, pp: Axis) -> Any:
    norm = _clip(gradients, max_norm, tp, pp)
    return norm if norm > max_norm else torch.tensor(0.0)


def _at_least_max_norm(gradients: Gradients, max_norm: float, tp: Axis, pp: Axis) -> Any:
    return max(float(_clip(gradients, max_norm, tp, pp)), max_norm)


def _middle_keeps(gradients: Gradients, max_norm: float, tp: Axis, pp: Axis) -> Any:
    if "tied" in gradients:
        return _clip(gradients, max_norm, tp, pp)
    copies = {kind: gradient.clone() for kind, gradient in gradients.items()}
    return _clip(copies, max_norm, tp, pp)


def _adds_over_dp_again(gradients: Gradients, tp: Any, dp: Any, pp: Any) -> None:
    """Right values, and one all-reduce over dp whose result is dropped."""
    dist.all_reduce(gradients["expert"].clone(), group=dp)
    _complete(gradients, tp, dp, pp)


def _drops_handles(gradients: Gradients, tp: Any, dp: Any, pp: Any) -> None:
    _complete(gradients, tp, dp, pp, tp_of=())
    dist.all_reduce(gradients["norm"], group=tp, async_op=True)
    dist.barrier()


ATTACKS = {
    "12-1": Attacks(
        wrong=(Wrong(_table(crosses=None), words="'crosses' is not filled in yet"),),
        right=(
            _table(**{"crosses": " pp ", "squared norm": 20.0}),
            _table(groups=((12, 13), (9, 11, 13, 15), (5, 13)), tokens=(3072.0, 2304.0)),
        ),
    ),
    "12-2": Attacks(
        wrong=(
            Wrong(lambda *given: 1 / _by_counting(*given), words="expected a whole number"),
            Wrong(lambda sizes, *flags: sizes["tp"], words=": expected "),
        ),
        right=(
            _by_counting,
            lambda *given: float(_by_counting(*given)),
            lambda *given: np.int64(_by_counting(*given)),
        ),
    ),
    "12-3": Attacks(
        wrong=(
            Wrong(lambda *given: list(_rank_by_rank(*given).values()), words="expected {"),
            Wrong(lambda *given: {**_rank_by_rank(*given), "pp": None}, words="to be a number"),
            Wrong(
                lambda *given: {k: v * 1.00001 for k, v in _rank_by_rank(*given).items()},
                words=": expected",
            ),
        ),
        right=(
            _rank_by_rank,
            lambda *given: {k: Fraction(v) for k, v in _rank_by_rank(*given).items()},
            lambda *given: {k: Decimal(v) for k, v in _rank_by_rank(*given).items()},
        ),
    ),
    "12-4": Attacks(
        wrong=(
            Wrong(lambda gradients, max_norm, tp, pp: None, words="expected the norm, a number"),
            Wrong(_by_torch, words="each rank takes its own norm"),
            Wrong(_clip_but(axes=""), words="the squares are not summed over tp and pp"),
            Wrong(_clip_but(divide=False), words="every rank counts all elements"),
            Wrong(_clip_but(copied=False), words="stored tp.size times"),
            Wrong(_clip_but(tied=False), words="it is one weight, stored twice"),
            Wrong(_clip_but(by_size=True), words='"tied" is divided by pp.size'),
            Wrong(_clip_but(axes="tp"), words="summed over tp alone"),
            Wrong(_clip_but(axes="pp"), words="summed over pp alone"),
            Wrong(_clip_but(mean=True), words="averaged over the ranks"),
            Wrong(_clip_but(root=False), words="take the root"),
            Wrong(_clip_but(always=True), words="only ever scale down"),
            Wrong(_clip_but(in_place=False), words="scale them in place"),
            Wrong(_clip_but(squared_factor=True), words="the factor is squared"),
            Wrong(_norm_when_clipped, words="norm: "),
            Wrong(_at_least_max_norm, words="this is max_norm"),
            Wrong(_middle_keeps, words="wrong on rank"),
            Wrong(_gathers, words="only the sum is sent"),
            Wrong(_by_library, words="this is what you are asked to write"),
        ),
        right=(_clip, _right_by_sharing),
    ),
    "12-5": Attacks(
        wrong=(
            Wrong(lambda gradients, tp, dp, pp: None, words='"matrix" is this rank\'s own'),
            Wrong(_not_in_place, words='"matrix" is this rank\'s own'),
            Wrong(_complete_but(tp_of=()), words="lacks the sum over tp"),
            Wrong(_complete_but(tp_of=("matrix", "norm")), words="is summed over tp too"),
            Wrong(
                _complete_but(dp_of=("matrix", "norm", "expert", "tied")),
                words="no other rank has these",
            ),
            Wrong(_complete_but(dp_of=("matrix", "norm")), words='"tied"'),
            Wrong(_complete_but(ends=False), words="lacks the other stage's part"),
            Wrong(_in_float32, words="gradient 'tied': right only to the precision of float32"),
            Wrong(_complete_but(average=True), words="exactly 2 times too small"),
            Wrong(_adds_over_dp_again, words="bytes over dp"),
            Wrong(_drops_handles, words="never waited for it"),
            Wrong(_world, words="is summed over tp too"),
            Wrong(_complete_but(local=False), words="in the middle"),
            Wrong(_send_send, words="every rank waits in send"),
            Wrong(_world_too, words="the others must not take part"),
            Wrong(_by_comm, words="this is what you are asked to write"),
        ),
        right=(_complete, _complete_but(early=True), _right_flat),
    ),
}
