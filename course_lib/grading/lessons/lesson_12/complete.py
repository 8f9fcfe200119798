"""12-5: gradients become complete over three axes, in raw torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import comm
from course_lib.grading.compare import difference
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.ranked import RankCase, Ranked, Seen, Trial
from course_lib.layout import Layout, make_layout
from course_lib.mesh import Mesh, make_mesh

# tp, dp, pp of each trial; Trial.size is its place here
SIZES = ((2, 2, 1), (1, 2, 2), (2, 1, 2), (1, 1, 3), (1, 1, 1))
TP_DP, DP_PP, TP_PP, MIDDLE, ONE = range(5)
HANG = "The stage in the middle has no tied gradient: a collective over pp waits for it for ever"
TRIALS = (Trial(4, 0), Trial(4, 1), Trial(4, 2), Trial(3, 3, HANG), Trial(1, 4))
SHAPES = {"matrix": (6, 5), "norm": (7,), "expert": (4, 3), "tied": (8, 2)}
AXES = ("tp", "dp", "pp")
Gradients = dict[str, Tensor]
Groups = dict[str, Any]


def _layout(trial: Trial) -> Layout:
    t, d, p = SIZES[trial.size]
    return make_layout(trial.n, "tp-dp-pp", tp=t, dp=d, pp=p)


def _inputs(trial: Trial, rank: int, seed: int) -> tuple[Gradients, int]:
    """The rank's own part of each gradient, and the number of the trial."""
    generator = torch.Generator().manual_seed(seed + rank)
    found = {kind: torch.randn(shape, generator=generator) for kind, shape in SHAPES.items()}
    stage, stages = _layout(trial).coordinates(rank)["pp"], SIZES[trial.size][2]
    if stage not in (0, stages - 1):
        del found["tied"]
    return found, trial.size


def _act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> Gradients:
    """Runs in a rank: all groups are made on all ranks, in one order."""
    given, number = inputs
    layout, own = _layout(TRIALS[number]), {}
    for axis in AXES:
        for ranks in layout.groups(axis):
            group = dist.new_group(ranks)
            if mesh.rank in ranks:
                own[axis] = group
    gradients = {kind: gradient.clone() for kind, gradient in given.items()}
    kept = dict(gradients)
    answers[0](gradients, *(own[axis] for axis in AXES))
    return kept


Sum = Callable[[str, int, Layout], list[int]]  # kind, rank -> the ranks whose parts it adds up


def _added(kind: str, rank: int, layout: Layout) -> list[int]:
    """The ranks whose parts make a gradient complete."""

    def around(*axes: str) -> list[int]:
        return next(ranks for ranks in layout.groups(*axes) if rank in ranks)

    if kind == "expert":
        return [rank]
    if kind == "norm":
        return around("tp", "dp")
    if kind == "matrix":
        return around("dp")
    ends = (0, layout.sizes["pp"] - 1)
    return [other for other in around("dp", "pp") if layout.coordinates(other)["pp"] in ends]


def _summed(seen: Seen, kind: str, of: Sum) -> list[Tensor]:
    """That gradient on each rank that has it."""
    layout, given = _layout(seen.trial), _given(seen)
    return [
        torch.stack([given[other][kind] for other in of(kind, rank, layout)]).sum(0)
        for rank in range(seen.trial.n)
        if kind in given[rank]
    ]


def _given(seen: Seen) -> list[Gradients]:
    return [_inputs(seen.trial, rank, seen.seed)[0] for rank in range(seen.trial.n)]


def _only(*axes: str) -> Sum:
    """The ranks of these axes that have the gradient."""

    def of(kind: str, rank: int, layout: Layout) -> list[int]:
        ranks = next(ranks for ranks in layout.groups(*axes) if rank in ranks)
        ends = (0, layout.sizes["pp"] - 1)
        return [r for r in ranks if kind != "tied" or layout.coordinates(r)["pp"] in ends]

    return of


MISTAKES: dict[str, tuple[tuple[Sum, str], ...]] = {
    "matrix": (
        (_only(), "is this rank's own: sum it over dp, which has other tokens"),
        (_only("tp", "dp"), "is summed over tp too, whose ranks hold other parts of the matrix"),
        (_only("tp"), "is summed over tp, whose ranks hold other parts of the matrix, not over dp"),
        (_only("dp", "pp"), "is summed over pp too: other stages have other layers"),
        (_only("tp", "dp", "pp"), "is summed over all ranks: only those of dp hold this part"),
    ),
    "norm": (
        (_only(), "is this rank's own: sum it over dp and over tp"),
        (_only("dp"), "lacks the sum over tp: ranks of tp have other rows, and the weight is one"),
        (_only("tp"), "lacks the sum over dp, which has other tokens"),
        (_only("tp", "dp", "pp"), "is summed over pp too: other stages have other norms"),
    ),
    "expert": (
        (
            _only("dp"),
            "is summed over dp: no other rank has these experts, and all their tokens came here",
        ),
        (_only("tp", "dp", "pp"), "is summed over all ranks: no other rank has these experts"),
    ),
    "tied": (
        (_only(), "is this rank's own: sum it over dp and with the other end of pp"),
        (_only("dp"), "lacks the other end's part: the embedding is one weight on two stages"),
        (_only("pp"), "lacks the sum over dp, which has other tokens"),
        (_only("tp", "dp", "pp"), "is summed over tp too, whose ranks hold other rows of it"),
        (_only("tp", "pp"), "is summed over tp, whose ranks hold other rows of it, not over dp"),
    ),
}


def _gradients(seen: Seen) -> str:
    """All kinds, on every rank."""
    given = _given(seen)
    for kind in SHAPES:
        got = [value[kind] for value, own in zip(seen.values, given, strict=True) if kind in own]
        says = difference(f'gradients "{kind}"', got, _summed(seen, kind, _added))
        if not says:
            continue
        for of, message in MISTAKES[kind]:
            mistaken = _summed(seen, kind, of)
            if not difference("", got, mistaken):
                return f'"{kind}" {message} ({says})'
        twice = [2 * one for one in _summed(seen, kind, _added)]
        if not difference("", got, twice):
            return f'"{kind}" is summed twice ({says})'
        return says
    return ""


def _bytes(seen: Seen) -> str:
    """Nothing travels but what has to."""
    size = {kind: 4 * torch.Size(shape).numel() for kind, shape in SHAPES.items()}
    for rank, observed in enumerate(seen.ranks):
        own = [kind for kind in _given(seen)[rank] if kind != "expert"]
        most = sum(size[kind] for kind in own) + size["norm"] + ("tied" in own) * size["tied"]
        sent = sum(call.payload for call in observed.calls if call.op != "recv")
        if sent > most:
            ops = ", ".join(sorted({call.op for call in observed.calls}))
            return (
                f"rank {rank} gave {sent} bytes to {ops}; each gradient but the expert's once for "
                f"dp, the norm's once for tp, the tied one once for the other end are {most}"
            )
    return ""


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


def _but(**mistake: Any) -> Answer:
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


def _everybody(gradients: Gradients, tp: Any, dp: Any, pp: Any) -> None:
    """The stage in the middle joins an all-reduce of the tied gradient with zeros."""
    _complete(gradients, tp, dp, pp, ends=False)
    mine = gradients.get("tied", torch.zeros(SHAPES["tied"]))
    if dist.get_world_size(pp) > 1:
        dist.all_reduce(mine, group=pp)


def _by_comm(gradients: Gradients, tp: Any, dp: Any, pp: Any) -> None:
    axis = make_mesh().world
    gradients["norm"].copy_(comm.all_reduce(gradients["norm"], axis))


_completes: Answer = _complete

COMPLETE = Ranked(
    id="12-5",
    title="complete gradients, in raw PyTorch",
    names=("complete",),
    hints=(
        "For each of the four kinds: which other ranks have used this very weight, with what "
        "that this rank has not seen?",
        "matrix: dp. norm: dp, then tp. expert: nobody. tied: dp, then the other end of pp, which "
        "is the last of dist.get_process_group_ranks(pp) for the first and the first for the last.",
        "dist.all_reduce(g, group=dp) for all but the expert's; dist.all_reduce(gradients['norm'], "
        "group=tp); for tied, where pp has more than one rank: isend and irecv in one "
        "dist.batch_isend_irecv, wait for both, then +=.",
    ),
    wrong=(
        Wrong(lambda gradients, tp, dp, pp: None, words='"matrix" is this rank\'s own'),
        Wrong(_not_in_place, words='"matrix" is this rank\'s own'),
        Wrong(_but(tp_of=()), words="lacks the sum over tp"),
        Wrong(_but(tp_of=("matrix", "norm")), words="is summed over tp too"),
        Wrong(_but(dp_of=("matrix", "norm", "expert", "tied")), words="no other rank has these"),
        Wrong(_but(dp_of=("matrix", "norm")), words='"tied"'),
        Wrong(_but(ends=False), words="lacks the other end's part"),
        Wrong(_but(average=True), words="exactly 2 times too small"),
        Wrong(_world, words="is summed over tp too"),
        Wrong(_but(local=False), words="in the middle"),
        Wrong(_send_send, words="every rank waits in send"),
        Wrong(_everybody, words="gave"),
        Wrong(_by_comm, words="this is what you are asked to write"),
    ),
    right=(_completes, _but(early=True), _right_flat),
    stub=lambda gradients, tp, dp, pp: None,
    trials=TRIALS,
    inputs=_inputs,
    act=_act,
    looks=(
        RankCase("gradients", "tp and dp", TP_DP, _gradients),
        RankCase("gradients", "dp and pp", DP_PP, _gradients),
        RankCase("gradients", "tp and pp", TP_PP, _gradients),
        RankCase("gradients", "three stages", MIDDLE, _gradients),
        RankCase("gradients", "one rank", ONE, _gradients),
        RankCase("wire", "nothing travels in vain", MIDDLE, _bytes),
    ),
    refused=("course_lib.comm.transfer:issue",),
)
