"""12-4: the norm across tp and pp, in which every element counts once, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from course_lib import comm
from course_lib.grading.compare import difference, times
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.ranked import RankCase, Ranked, Seen, Trial
from course_lib.mesh import Axis, Mesh, across_axis, sub_axis

TP, FOUR, MIDDLE, ONE = range(4)
# size: ranks of pp; the others are tp
TRIALS = (Trial(2, 1), Trial(4, 2), Trial(3, 3), Trial(1, 1))
SMALL, LARGE = 0.25, 4.0  # max_norm as a share of the norm: clipped, and left alone
SHAPES = {"cut": (5, 3), "copied": (7,), "tied": (4, 2)}
Gradients = dict[str, Tensor]


def _drawn(trial: Trial, rank: int, seed: int) -> Gradients:
    """What a rank holds: the places that decide a tensor are its seed."""
    p = trial.size
    t = trial.n // p
    at, stage = rank % t, rank // t
    places = {"cut": (at, stage), "copied": (0, stage), "tied": (at, 0)}
    if stage not in (0, p - 1):
        del places["tied"]
    found = {}
    for kind, (part, layer) in places.items():
        numbers = (seed, list(SHAPES).index(kind), part, layer)
        generator = torch.Generator().manual_seed(hash(numbers) % 2**31)
        found[kind] = torch.randn(SHAPES[kind], generator=generator)
    return found


Squares = list[dict[str, float]]  # by rank and kind


def _squares(trial: Trial, seed: int) -> Squares:
    return [
        {k: float(g.double().square().sum()) for k, g in _drawn(trial, rank, seed).items()}
        for rank in range(trial.n)
    ]


def _norm(trial: Trial, squares: Squares) -> float:
    """Every element once."""
    p = trial.size
    t = trial.n // p
    share = {"cut": 1, "copied": t, "tied": 2 if p > 1 else 1}
    return math.sqrt(sum(value / share[k] for own in squares for k, value in own.items()))


def _inputs(trial: Trial, rank: int, seed: int) -> tuple[Gradients, float, int]:
    """The gradients of this rank, the norm of all of them, and the size of pp."""
    return _drawn(trial, rank, seed), _norm(trial, _squares(trial, seed)), trial.size


@dataclass
class Done:
    """What one call returned, and what it left in the gradients."""

    norm: Any
    gradients: Gradients


def _act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> list[Done]:
    """Runs in a rank: once with a small max_norm, once with a large one."""
    gradients, norm, stages = inputs
    neighbours = mesh.world.size // stages
    tp = sub_axis(mesh.world, neighbours, "tp")
    pp = across_axis(mesh.world, neighbours, "pp")
    found = []
    for share in (SMALL, LARGE):
        given = {kind: gradient.clone() for kind, gradient in gradients.items()}
        kept = dict(given)
        value = answers[0](given, share * norm, tp, pp)
        value = value.detach().clone() if isinstance(value, Tensor) else value
        found.append(Done(value, kept))
    return found


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return None


def _norms(seen: Seen) -> str:
    """The norm of both calls, on every rank."""
    trial, squares = seen.trial, _squares(seen.trial, seen.seed)
    wanted = _norm(trial, squares)
    got: list[float] = []
    for rank, done in enumerate(seen.values):
        for one in done:
            value = _number(one.norm)
            if value is None:
                return f"rank {rank} returned a {type(one.norm).__name__}; the norm is wanted"
        value = _number(done[0].norm)
        assert value is not None
        got.append(value)
    if all(math.isclose(value, wanted, rel_tol=1e-4) for value in got):
        return ""
    for candidate, message in _mistakes(trial, squares):
        if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(got, candidate, strict=True)):
            return f"{message} (rank 0: {got[0]:.4g} where {wanted:.4g} is right)"
    shown = ", ".join(f"{value:.4g}" for value in got)
    return f"the norms by rank are {shown}; {wanted:.4g} is right on all"


def _mistakes(trial: Trial, squares: Squares) -> list[tuple[list[float], str]]:
    """Norms by rank that a mistake gives."""
    n, p = trial.n, trial.size
    t = n // p
    ends = 2 if p > 1 else 1

    def total(ranks: Sequence[int], copied: int, tied: int) -> float:
        share = {"cut": 1, "copied": copied, "tied": tied}
        return sum(value / share[k] for rank in ranks for k, value in squares[rank].items())

    everybody = range(n)
    columns = [[rank for rank in everybody if rank // t == own // t] for own in everybody]
    rows = [[rank for rank in everybody if rank % t == own % t] for own in everybody]
    alike: list[tuple[float, str]] = [
        (
            total(everybody, 1, 1),
            "every rank counts all that it holds, copies too: divide the square of what k ranks "
            "hold by k",
        ),
        (
            total(everybody, 1, ends),
            '"copied" is counted on every rank of tp: it is one weight, held tp.size times',
        ),
        (
            total(everybody, t, 1),
            '"tied" is counted at both ends of pp: it is one weight, held twice',
        ),
        (
            total(everybody, t, p),
            '"tied" is divided by pp.size: only the first and the last stage hold it',
        ),
        (total(everybody, t, ends) / n, "the squares are averaged over the ranks: sum them"),
    ]
    found = [([math.sqrt(square)] * n, message) for square, message in alike]
    found += [
        ([total([rank], 1, 1) ** 0.5 for rank in everybody], "each rank takes its own norm: "
         "nothing was summed, and each would scale by another factor"),
        ([total([rank], t, ends) ** 0.5 for rank in everybody], "nothing was summed over tp and "
         "pp: each rank would scale by another factor"),
        ([total(ranks, t, ends) ** 0.5 for ranks in columns], "the squares are summed over tp "
         "alone: the other stages' gradients are missing"),
        ([total(ranks, t, ends) ** 0.5 for ranks in rows], "the squares are summed over pp alone: "
         "the other parts of tp are missing"),
        ([_norm(trial, squares) ** 2] * n, "this is the squared norm: take the root"),
        ([sum(math.sqrt(sum(own.values())) for own in squares)] * n, "norms were added: add "
         "squares, and take the root at the end"),
    ]  # fmt: skip
    return found


def _scaled(seen: Seen) -> str:
    """Every gradient times the same factor; untouched where the norm is small."""
    right = _norm(seen.trial, _squares(seen.trial, seen.seed))
    for call, share in enumerate((SMALL, LARGE)):
        factor = min(1.0, share)
        for kind in SHAPES:
            got, wanted = [], []
            for rank, done in enumerate(seen.values):
                start = _drawn(seen.trial, rank, seen.seed)
                if kind in start:
                    got.append(done[call].gradients[kind])
                    wanted.append(factor * start[kind])
            says = difference(f'gradients "{kind}"', got, wanted)
            if says:
                return _why(says, call, got, [each / factor for each in wanted], right)
    return ""


def _why(says: str, call: int, got: list[Tensor], start: list[Tensor], norm: float) -> str:
    """With the classic mistake, if it is one."""
    unchanged = not difference("", got, start)
    if call == 0 and unchanged:
        return f"gradients are what they were: scale them in place, with mul_ ({says})"
    if call == 1:
        return f"a norm below max_norm leaves gradients alone: only ever scale down ({says})"
    ratios = [float((a * b).sum() / (b * b).sum()) for a, b in zip(got, start, strict=True)]
    if max(ratios) - min(ratios) > 1e-3:
        return f"ranks scale by different factors, so that copies drift apart ({says})"
    ratio = ratios[0] / SMALL
    return f"the factor is {times(ratio)}: it is max_norm / norm ({says})"


def _small_calls(seen: Seen) -> str:
    """Only single numbers travel."""
    for rank, observed in enumerate(seen.ranks):
        mine = observed.calls
        if large := [call for call in mine if call.payload > 32]:
            return (
                f"rank {rank} sent {large[0].payload} bytes by {large[0].op}: each rank squares "
                "what it holds, and only the sum travels"
            )
        if len(mine) > 12:
            return f"rank {rank} made {len(mine)} calls in two clippings; one on each axis will do"
    return ""


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


def _but(**mistake: Any) -> Answer:
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


_clips: Callable[..., Any] = _clip

CLIP = Ranked(
    id="12-4",
    title="clip across two axes",
    names=("clip",),
    hints=(
        "Squares add up, norms do not. What does this rank hold alone, and what do others hold "
        "too?",
        "Add the squares of this rank, each divided by how many ranks hold the same: 1, tp.size, "
        "and 2 for the tied one (1 where pp has one rank). Sum that over tp, then over pp; only "
        "then the root.",
        "norm = comm.all_reduce(comm.all_reduce(square, tp), pp).sqrt(); if norm > max_norm: "
        "gradient.mul_(max_norm / norm) for every gradient.",
    ),
    wrong=(
        Wrong(lambda gradients, max_norm, tp, pp: None, words="the norm is wanted"),
        Wrong(_by_torch, words="each rank takes its own norm"),
        Wrong(_but(axes=""), words="nothing was summed over tp"),
        Wrong(_but(divide=False), words="counts all that it holds"),
        Wrong(_but(copied=False), words="held tp.size times"),
        Wrong(_but(tied=False), words="it is one weight, held twice"),
        Wrong(_but(by_size=True), words='"tied" is divided by pp.size'),
        Wrong(_but(axes="tp"), words="summed over tp alone"),
        Wrong(_but(axes="pp"), words="summed over pp alone"),
        Wrong(_but(mean=True), words="averaged over the ranks"),
        Wrong(_but(root=False), words="take the root"),
        Wrong(_but(always=True), words="only ever scale down"),
        Wrong(_but(in_place=False), words="scale them in place"),
        Wrong(_but(squared_factor=True), words="it is max_norm / norm"),
        Wrong(_gathers, words="only the sum travels"),
        Wrong(_by_library, words="this is what you are asked to write"),
    ),
    right=(_clips, _right_by_sharing),
    stub=lambda gradients, max_norm, tp, pp: None,
    trials=TRIALS,
    inputs=_inputs,
    act=_act,
    looks=(
        RankCase("outputs", "the norm over tp and pp", FOUR, _norms),
        RankCase("outputs", "the norm over tp alone", TP, _norms),
        RankCase("outputs", "the norm of a stage in the middle", MIDDLE, _norms),
        RankCase("gradients", "scaled on four ranks", FOUR, _scaled),
        RankCase("outputs", "one rank", ONE, _norms),
        RankCase("wire", "single numbers", FOUR, _small_calls),
    ),
    refused=(
        "course_lib.comm.held:grad_norm",
        "course_lib.comm.held:clip_grad_norm",
    ),
)
