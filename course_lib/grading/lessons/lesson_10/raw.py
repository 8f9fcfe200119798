"""10-5: dispatch and combine in raw torch.distributed: counts first, then rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import comm
from course_lib.grading.compare import difference
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.lessons.lesson_10.rows_sent import wrongly_sent
from course_lib.grading.ranked import RankCase, Ranked, Seen, Trial
from course_lib.mesh import Mesh, make_mesh

TWO, FOUR, LONELY, ONE = range(4)
TRIALS = (Trial(2, 6), Trial(4, 7), Trial(3, 5), Trial(1, 4))  # size: tokens of rank 0
HIDDEN = 16
REFUSAL = "this is what you are asked to write"
Expert = Callable[[Tensor], Tensor]


def _matrix(seed: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 100 + rank)
    return torch.randn(HIDDEN, HIDDEN, generator=generator) / 4


def _inputs(trial: Trial, rank: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, the expert of each, and the matrix of this rank's expert.

    In the trial LONELY nobody wants expert 1, and rank 2 has no tokens.
    """
    generator = torch.Generator().manual_seed(seed + rank)
    lonely = TRIALS.index(trial) == LONELY
    tokens = 0 if lonely and rank == 2 else trial.size + 2 * rank
    x_TD = torch.randn(tokens, HIDDEN, generator=generator)
    experts_T = torch.randint(trial.n, (tokens,), generator=generator)
    if lonely:
        experts_T[experts_T == 1] = 2
    elif trial.n > 1:  # never even
        experts_T[: tokens // 2 + 1] = 0
        experts_T[tokens // 2 + 1] = 1
    return x_TD, experts_T[torch.randperm(tokens, generator=generator)], _matrix(seed, rank)


def _act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> Any:
    x_TD, experts_T, matrix = inputs
    return answers[0](x_TD, experts_T, lambda rows: torch.tanh(rows @ matrix))


def _given(seen: Seen) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [_inputs(seen.trial, rank, seen.seed) for rank in range(seen.trial.n)]


def _through(x_TD: Tensor, experts_T: Tensor, seed: int) -> Tensor:
    """Each row through its expert."""
    rows = [
        torch.tanh(x @ _matrix(seed, int(expert)))
        for x, expert in zip(x_TD, experts_T, strict=True)
    ]
    return torch.stack(rows) if rows else torch.empty_like(x_TD)


def _outputs(seen: Seen) -> str:
    given, seed, n = _given(seen), seen.seed, seen.trial.n
    got = list(seen.values)
    says = difference("outputs", got, [_through(x, e, seed) for x, e, _ in given])
    if not says or n == 1:
        return says
    sort = [e.argsort(stable=True) for _, e, _ in given]
    mistakes = [
        (
            [
                _through(x[order], e[order], seed)
                for (x, e, _), order in zip(given, sort, strict=True)
            ],
            "the rows came home sorted by expert, and stay so: put each into its token's place",
        ),
        ([x for x, *_ in given], "these are the tokens as they were: no expert has seen them"),
        (
            [_through(x, torch.full_like(e, rank), seed) for rank, (x, e, _) in enumerate(given)],
            "every token went through the expert of its own rank",
        ),
    ]
    for mistaken, message in mistakes:
        if not difference("", got, mistaken):
            return f"{message} ({says})"
    return says


def _calls(seen: Seen) -> str:
    """The rows there and the rows back, each once; counts are small."""
    row = 4 * HIDDEN
    chosen = torch.cat([experts_T for _, experts_T, _ in _given(seen)])
    for rank, observed in enumerate(seen.ranks):
        leaving = row * len(_given(seen)[rank][0])
        arriving = row * int((chosen == rank).sum())
        if said := wrongly_sent(observed.calls, leaving, arriving):
            return (
                f"rank {rank} sent {said}; wanted are two all_to_alls of rows: the {leaving} bytes "
                f"of its tokens, and back the {arriving} that its expert computed"
            )
    return ""


def _left_alone(seen: Seen) -> str:
    for rank, (observed, given) in enumerate(zip(seen.ranks, _given(seen), strict=True)):
        same = [torch.equal(a, b) for a, b in zip(observed.inputs, given, strict=True)]
        if not all(same):
            return f"rank {rank} wrote into what it was given"
    return ""


def _counts_by_all_to_all(sends_N: Tensor) -> Tensor:
    receives_N = torch.empty_like(sends_N)
    dist.all_to_all_single(receives_N, sends_N)
    return receives_N


def _run(
    x_TD: Tensor,
    experts_T: Tensor,
    expert: Expert,
    *,
    counts: Callable[[Tensor], Tensor] = _counts_by_all_to_all,
    sort: bool = True,
    unsort: bool = True,
    inverse: bool = True,
    back: bool = True,
) -> Tensor:
    """Right, or with a mistake."""
    order_T = experts_T.argsort(stable=True) if sort else torch.arange(len(x_TD))
    sends_N = experts_T.bincount(minlength=dist.get_world_size())
    receives_N = counts(sends_N)
    sends, receives = sends_N.tolist(), receives_N.tolist()
    arrived = x_TD.new_empty(sum(receives), x_TD.shape[1])
    dist.all_to_all_single(arrived, x_TD[order_T], receives, sends)
    done = expert(arrived)
    if not back:
        return done
    returned = torch.empty_like(x_TD)
    dist.all_to_all_single(returned, done, sends, receives)
    if not unsort:
        return returned
    if not inverse:
        return returned[order_T]
    y_TD = torch.empty_like(returned)
    y_TD[order_T] = returned
    return y_TD


def _but(**mistake: Any) -> Answer:
    return lambda x_TD, experts_T, expert: _run(x_TD, experts_T, expert, **mistake)


def _right_otherwise(x_TD: Tensor, experts_T: Tensor, expert: Expert) -> Tensor:
    """Counts by all-gather; the inverse permutation."""
    n, rank = dist.get_world_size(), dist.get_rank()
    own = torch.tensor([int((experts_T == each).sum()) for each in range(n)])
    table = [torch.empty_like(own) for _ in range(n)]
    dist.all_gather(table, own)
    receives = [int(line[rank]) for line in table]
    values, order = torch.sort(experts_T, stable=True)
    arrived = torch.empty(sum(receives), x_TD.shape[1])
    dist.all_to_all_single(arrived, x_TD[order].contiguous(), receives, own.tolist())
    returned = torch.empty(len(values), x_TD.shape[1])
    dist.all_to_all_single(returned, expert(arrived), own.tolist(), receives)
    return returned[order.argsort()]


def _gathered(x_TD: Tensor, experts_T: Tensor, expert: Expert) -> Tensor:
    """Everybody's tokens to everybody, padded; each expert on all of them."""
    n = dist.get_world_size()
    longest = torch.tensor(len(x_TD))
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    padded = x_TD.new_zeros(int(longest), x_TD.shape[1])
    padded[: len(x_TD)] = x_TD
    every = [torch.empty_like(padded) for _ in range(n)]
    dist.all_gather(every, padded)
    done = torch.cat([expert(rows) for rows in every])
    found = [torch.empty_like(done) for _ in range(n)]
    dist.all_gather(found, done)
    first = dist.get_rank() * int(longest)
    mine = torch.stack([one[first : first + len(x_TD)] for one in found])
    return mine[experts_T, torch.arange(len(x_TD))]


def _even(x_TD: Tensor, experts_T: Tensor, expert: Expert) -> Tensor:
    """All blocks as large as the largest: no counts are needed but one."""
    n = dist.get_world_size()
    sends = experts_T.bincount(minlength=n)
    room = sends.max()
    dist.all_reduce(room, op=dist.ReduceOp.MAX)
    order = experts_T.argsort(stable=True)
    place = torch.arange(len(order)) - (sends.cumsum(0) - sends)[experts_T[order]]
    place = place + experts_T[order] * int(room)
    packed = x_TD.new_zeros(n * int(room), x_TD.shape[1])
    packed[place] = x_TD[order]
    arrived, returned = torch.empty_like(packed), torch.empty_like(packed)
    dist.all_to_all_single(arrived, packed)
    dist.all_to_all_single(returned, expert(arrived))
    y_TD = torch.empty_like(x_TD)
    y_TD[order] = returned[place]
    return y_TD


def _in_place(x_TD: Tensor, experts_T: Tensor, expert: Expert) -> Tensor:
    return x_TD.copy_(_run(x_TD, experts_T, expert))


def _by_comm(x_TD: Tensor, experts_T: Tensor, expert: Expert) -> Tensor:
    sends = experts_T.bincount(minlength=dist.get_world_size())
    axis = make_mesh().world
    receives = comm.all_gather(sends[None], axis)[:, axis.rank].tolist()
    order = experts_T.argsort(stable=True)
    return comm.all_to_all_v(x_TD[order], axis, sends.tolist(), receives)


RAW = Ranked(
    id="10-5",
    title="there and back in raw PyTorch",
    names=("through_experts",),
    hints=(
        "A rank knows what it sends, and not what comes. Which small message tells it? And rows "
        "for one rank must lie side by side.",
        "order = experts_T.argsort(stable=True); sends = experts_T.bincount(minlength=n); an "
        "all_to_all_single of sends gives receives. Then rows out with (receives, sends), the "
        "expert, rows back with (sends, receives), and y[order] = what came back.",
        "arrived = x.new_empty(sum(receives), D); dist.all_to_all_single(arrived, x[order], "
        "receives, sends); back the same with empty_like(x) and the two lists exchanged; then y = "
        "torch.empty_like(x); y[order] = returned.",
    ),
    wrong=(
        Wrong(lambda x, e, expert: None, words="from rank 0, got a NoneType"),
        Wrong(lambda x, e, expert: x, words="no expert has seen them"),
        Wrong(lambda x, e, expert: expert(x), words="the expert of its own rank"),
        Wrong(_but(unsort=False), words="put each into its token's place"),
        Wrong(_but(inverse=False), words="outputs are wrong"),
        Wrong(_but(sort=False), words="outputs are wrong"),
        Wrong(_but(back=False), words="outputs"),
        Wrong(_gathered, words="all_gather"),
        Wrong(_even, words="two all_to_alls of rows"),
        Wrong(_in_place, words="wrote into what it was given"),
        Wrong(_by_comm, words=REFUSAL),
    ),
    right=(_run, _right_otherwise),
    stub=lambda x, e, expert: None,
    trials=TRIALS,
    inputs=_inputs,
    act=_act,
    looks=(
        RankCase("outputs", "two ranks", TWO, _outputs),
        RankCase("outputs", "four ranks", FOUR, _outputs),
        RankCase("outputs", "three ranks, an expert without tokens", LONELY, _outputs),
        RankCase("outputs", "one rank", ONE, _outputs),
        RankCase("outputs", "what is given is left alone", FOUR, _left_alone, later=True),
        RankCase("wire", "the rows there and back, and no others", FOUR, _calls),
    ),
    refused=("course_lib.comm.transfer:issue",),
)
