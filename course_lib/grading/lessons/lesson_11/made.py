"""11-5: groups made in one order on all ranks, in raw torch.distributed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.ranked import RankCase, Ranked, Seen, Trial
from course_lib.mesh import Mesh
from course_lib.mesh import groups as library
from course_lib.mesh.axes import rank_context

TWO, FOUR = range(2)
NEVER = "new_group wants every rank, for every group, in one order"
TRIALS = (Trial(2, 3, NEVER), Trial(4, 3, NEVER))  # size: axes
AXES: dict[int, dict[str, list[list[int]]]] = {
    2: {"activations": [[0, 1]], "gradients": [[0, 1]], "norms": [[0, 1]]},
    4: {"tp": [[0, 1], [2, 3]], "dp": [[0, 2], [1, 3]], "edp": [[0, 2], [1, 3]]},
}
REFUSAL = "this is what you are asked to write"
Groups = dict[str, list[list[int]]]


def _inputs(trial: Trial, rank: int, seed: int) -> tuple[Any, ...]:
    """All groups, in this rank's own order: names turned by rank, its own groups first."""
    axes = AXES[trial.n]
    names = sorted(axes)
    turn = (seed + rank) % len(names)
    own_first = {name: sorted(axes[name], key=lambda ranks: rank not in ranks) for name in names}
    return ({name: own_first[name] for name in names[turn:] + names[:turn]},)


def _own(trial: Trial, rank: int, name: str) -> list[int]:
    return next(ranks for ranks in AXES[trial.n][name] if rank in ranks)


def _act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> Any:
    """What is wrong with the groups, as text; or (sum, name) of each, all sums started at once."""
    (groups,) = inputs
    made = answers[0](groups)
    says = _unfit(made, groups)
    anyone = torch.tensor([float(bool(says))])
    dist.all_reduce(anyone)  # lest some ranks wait on groups that others do not have
    if anyone.item():
        return says
    started = []
    for number, name in enumerate(sorted(groups), 1):
        x = torch.tensor([float(number * 10**mesh.rank)])
        started.append((name, x, dist.all_reduce(x, group=made[name], async_op=True)))
    found = {}
    for name, x, work in started:
        work.wait()
        found[name] = (x.item(), str(made[name].group_name))
    return found


def _unfit(made: Any, groups: Groups) -> str:
    if not isinstance(made, Mapping):
        return f"returned a {type(made).__name__}; a dict from names to groups is wanted"
    for name in sorted(groups):
        if name not in made:
            return f"returned no group of {name!r}"
        if not isinstance(made[name], dist.ProcessGroup):
            return f"returned for {name!r} a {type(made[name]).__name__}; the group is wanted"
    return ""


def _wanted(trial: Trial, rank: int, name: str) -> float:
    number = sorted(AXES[trial.n]).index(name) + 1
    return float(sum(number * 10**member for member in _own(trial, rank, name)))


def _sums(seen: Seen) -> str:
    unfit = [(rank, value) for rank, value in enumerate(seen.values) if isinstance(value, str)]
    if unfit:
        rank, says = next((one for one in unfit if one[1]), unfit[0])
        return f"rank {rank} {says}"
    for rank, value in enumerate(seen.values):
        for name, (got, _) in sorted(value.items()):
            wanted = _wanted(seen.trial, rank, name)
            if got != wanted:
                members = " ".join(map(str, _own(seen.trial, rank, name)))
                return (
                    f"rank {rank}: the sum on {name} is {got:g}, {wanted:g} is right: the group "
                    f"that it got is not the one that ranks {members} use for {name}"
                )
    return ""


def _apart(seen: Seen) -> str:
    for rank, value in enumerate(seen.values):
        if isinstance(value, str):
            return f"rank {rank} {value or 'was given a group that others lack'}"
        first: dict[str, str] = {}
        for name, (_, called) in sorted(value.items()):
            if called in first:
                return (
                    f"rank {rank}: {first[called]} and {name} have one group, which is one queue: "
                    "each wants its own"
                )
            first[called] = name
    return ""


def _make(groups: Groups, order: Sequence[tuple[str, Sequence[int]]]) -> dict[str, Any]:
    mine = {}
    for name, ranks in order:
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            mine[name] = group
    return mine


def _right(groups: Groups) -> dict[str, Any]:
    pairs = [(name, tuple(ranks)) for name, lists in groups.items() for ranks in lists]
    return _make(groups, sorted(pairs))


def _right_told(groups: Groups) -> dict[str, Any]:
    """Rank 0 tells all in which order it wrote them down."""
    told = [[(name, ranks) for name, lists in groups.items() for ranks in lists]]
    dist.broadcast_object_list(told, src=0)
    return _make(groups, told[0])


def _as_given(groups: Groups) -> dict[str, Any]:
    return _make(groups, [(name, ranks) for name, lists in groups.items() for ranks in lists])


def _own_first(groups: Groups) -> dict[str, Any]:
    """Names in one order, the lists of each as given."""
    return _make(groups, [(name, ranks) for name in sorted(groups) for ranks in groups[name]])


def _only_own(groups: Groups) -> dict[str, Any]:
    rank = dist.get_rank()
    own = [(n, ranks) for n in sorted(groups) for ranks in groups[n] if rank in ranks]
    return _make(groups, own)


def _by_set(groups: Groups) -> dict[str, Any]:
    """One group for axes of the same ranks."""
    known: dict[tuple[int, ...], Any] = {}
    for ranks in sorted({tuple(one) for lists in groups.values() for one in lists}):
        known[ranks] = dist.new_group(list(ranks))
    rank = dist.get_rank()
    own = {name: next(one for one in lists if rank in one) for name, lists in groups.items()}
    return {name: known[tuple(ranks)] for name, ranks in own.items()}


def _world(groups: Groups) -> dict[str, Any]:
    return dict.fromkeys(groups, dist.group.WORLD)


def _last_of_all(groups: Groups) -> dict[str, Any]:
    """Keeps the last group of each name, its own or not."""
    return {
        name: [dist.new_group(ranks) for ranks in sorted(groups[name])][-1]
        for name in sorted(groups)
    }


def _lists(groups: Groups) -> dict[str, Any]:
    rank = dist.get_rank()
    return {name: next(r for r in lists if rank in r) for name, lists in groups.items()}


def _one_name_less(groups: Groups) -> dict[str, Any]:
    mine = _right(groups)
    mine.pop(sorted(groups)[0])
    return mine


def _in_comm(groups: Groups) -> dict[str, Any]:
    rank, context = dist.get_rank(), rank_context()
    made = {
        name: library._make_axis(name, sorted(groups[name]), rank, context)
        for name in sorted(groups)
    }
    return {name: axis.group for name, axis in made.items()}


MADE = Ranked(
    id="11-5",
    title="groups made right, in raw PyTorch",
    names=("make_groups",),
    hints=(
        "torch names groups by counting calls of new_group. What must be equal on all ranks, so "
        "that they count alike?",
        "Go through names and lists in an order that does not depend on the rank. Make every "
        "group, and keep the one that this rank is in.",
        "for name in sorted(groups): for ranks in sorted(groups[name]): group = dist.new_group("
        "ranks); if dist.get_rank() in ranks: mine[name] = group.",
    ),
    wrong=(
        Wrong(lambda groups: None, words="returned a NoneType; a dict"),
        Wrong(_as_given, words="is not the one that ranks 0 1 use"),
        Wrong(_own_first, words="on 4 ranks"),
        Wrong(_only_own, words="on 4 ranks"),
        Wrong(_by_set, words="have one group, which is one queue"),
        Wrong(_world, words="the sum on"),
        Wrong(_last_of_all, words="the group is wanted"),
        Wrong(_lists, words="a list; the group is wanted"),
        Wrong(_one_name_less, words="returned no group of"),
        Wrong(_in_comm, words=REFUSAL),
    ),
    right=(_right, _right_told),
    stub=lambda groups: None,
    trials=TRIALS,
    inputs=_inputs,
    act=_act,
    looks=(
        RankCase("outputs", "three axes of the same two ranks", TWO, _sums),
        RankCase("outputs", "a grid of four, two axes of it alike", FOUR, _sums),
        RankCase("outputs", "each axis has a group of its own", TWO, _apart),
    ),
    refused=("course_lib.mesh.groups:_make_axis",),
)
