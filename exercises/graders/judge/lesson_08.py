"""Lesson 08, pipelines II: what the exercises give, and what they expect."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.grading.answers import NotRight, shown
from course_lib.grading.draw import Draw
from course_lib.grading.exercise import Case, Function, Instance, Wrong
from course_lib.grading.graders.by_hand import by_hand
from course_lib.grading.graders.runner import lesson_08 as runner
from course_lib.grading.placed import bytes_of
from course_lib.grading.ranked import OnRanks
from course_lib.grading.rows import schedule_of
from course_lib.grading.runner import Observed
from course_lib.grading.trials import Given, Look, Mistake, Trial
from course_lib.schedule import Costs, from_rows, looped, lower_bound, simulate

# --- 08-2 ----------------------------------------------------------------------------------------


def _pipeline(p: tuple[int, int], v: tuple[int, int], rounds: tuple[int, int]) -> Any:
    """Draw all ranks of one pipeline, with two numbers of micro-batches."""

    def draw(rng: random.Random) -> list[Instance]:
        ranks, chunks = rng.randint(*p), rng.randint(*v)
        return [
            {"p": ranks, "v": chunks, "m": m, "rank": rank}
            for m in (6 * ranks, ranks * rng.randint(*rounds))
            for rank in range(ranks)
        ]

    return draw


def _count(value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise NotRight(f"expected a whole number of forwards, got {shown(value)}")
    return int(value)


WARM_UP = Function(
    id="08-2",
    title="the warm-up of interleaving",
    names=("warm_up",),
    mistakes=(
        Wrong(
            lambda p, v, m, rank: p - 1 - rank,
            "This is 1F1B with one stage per rank: add the chunks before the last one.",
        ),
        Wrong(
            lambda p, v, m, rank: min((v - 1) * p + (p - 1 - rank), m * v),
            "Each rank behind needs two more forwards, for the way there and the way back; this "
            "adds one.",
        ),
        Wrong(
            lambda p, v, m, rank: min(2 * (p - 1 - rank), m * v),
            "The chunks before the last one are missing: (v-1) p forwards.",
        ),
        Wrong(
            lambda p, v, m, rank: min(v * p + 2 * (p - 1 - rank), m * v),
            "This counts all v chunks of the first round; a rank begins to alternate in its last "
            "chunk, so count v-1.",
        ),
        Wrong(
            lambda p, v, m, rank: (v - 1) * p + 2 * (p - 1 - rank),
            "A rank has only m v forwards: where m is p, some ranks reach that limit.",
        ),
        Wrong(
            lambda p, v, m, rank: min((v - 1) * p + 2 * rank, m * v),
            "The ranks are in reversed order: rank 0 has the most ranks behind it.",
        ),
        Wrong(
            lambda p, v, m, rank: min((v - 1) * p + 2 * (p - rank), m * v),
            "p-1-rank ranks are behind this one, not p-rank.",
        ),
        Wrong(
            lambda p, v, m, rank: min((v - 1) * m + 2 * (p - 1 - rank), m * v),
            "Micro-batches are processed in rounds of p, not of m; rounds of m are breadth first.",
        ),
        Wrong(
            lambda p, v, m, rank: min((v - 1) * p + 2 * (p - 1 - rank), m * v) + 1,
            "This is one too many: the forward of the first pair belongs to the alternating part.",
        ),
        Wrong(
            lambda p, v, m, rank: min((v - 1) * p + 2 * (p - 1 - rank), m),
            "The limit is m v forwards: a micro-batch has one in each chunk.",
        ),
    ),
    reference=lambda p, v, m, rank: min((v - 1) * p + 2 * (p - 1 - rank), m * v),
    refused=("course_lib.schedule.named:interleaved",),
    normal=_count,
    drawn=(
        Case("two chunks", _pipeline((2, 9), (2, 2), (3, 5))),
        Case("more chunks", _pipeline((2, 9), (3, 6), (3, 5))),
        Case("as few micro-batches as ranks", _pipeline((4, 9), (2, 4), (1, 1))),
    ),
)


# --- 08-3 ----------------------------------------------------------------------------------------


def _linear(trial: Trial, draw: Draw) -> list[dict[str, Tensor]]:
    """More positions than features, and D is not F: the size of a tensor says which one it is."""
    d = draw.size(2, 5)
    f = 2 + (d - 2 + draw.size(1, 3)) % 4
    positions = [(1,), (draw.size(6, 9),), (draw.size(2, 3), draw.size(3, 5))][trial.size]
    return [
        {
            "x": draw.tensor(*positions, d),
            "weight": draw.tensor(f, d),
            "dy": draw.upstream(*positions, f) * 3,
        }
    ]


def _flat(given: Given, name: str) -> Tensor:
    x = given[name][0]
    return x.reshape(-1, x.shape[-1])


def _split(given: Given) -> dict[str, Any]:
    weight, dy = given["weight"][0], given["dy"][0]
    dweight = _flat(given, "dy").T @ _flat(given, "x")
    return {"dx": dy @ weight, "dweight": dweight, "dbias": _flat(given, "dy").sum(0)}


def _later(given: Given, ranks: list[Observed]) -> str:
    found = ranks[0].values
    if early := found[runner.EAGER] if given.trial.size else []:
        return (
            f"expected later() to compute dweight and dbias, but {early[0]} was computed before "
            "split_backward returned: move this product or sum into later()"
        )
    if not found[runner.SECOND]:
        return "expected a second later() to return the same values or to raise an error"
    return ""


def _dy_x(given: Given) -> tuple[Tensor, Tensor]:
    return given["dy"][0], given["x"][0]


HALVES = OnRanks(
    id="08-3",
    title="the split backward of a linear layer",
    names=("split_backward",),
    act=runner.split,
    draw=_linear,
    expected=_split,
    trials=(
        Trial(1, size=1, name="rows of tokens"),
        Trial(1, size=2, dtype=torch.float64, strided=True, name="sequences in float64"),
        Trial(1, size=0, dtype=torch.bfloat16, name="one token in bfloat16"),
    ),
    mistakes=(
        Mistake(
            "dweight is transposed: give it the shape (F, D) of weight",
            {"dweight": lambda given: given.expected["dweight"][0].T},
        ),
        Mistake(
            "dweight is averaged over the positions: sum it",
            {"dweight": lambda given: given.expected["dweight"][0] / len(_flat(given, "dy"))},
        ),
        Mistake(
            "dweight has one matrix per sequence: sum over all positions, sequences too",
            {"dweight": lambda given: _dy_x(given)[0].mT @ _dy_x(given)[1]},
        ),
        Mistake(
            "dbias is averaged over the positions: sum it",
            {"dbias": lambda given: _flat(given, "dy").mean(0)},
        ),
        Mistake(
            "dbias is summed over the first dim only: for (B, S, F) sum over B and S",
            {"dbias": lambda given: _dy_x(given)[0].sum(0)},
        ),
        Mistake(
            "dx is x: the gradient of the input is dy times the weight",
            {"dx": lambda given: _dy_x(given)[1]},
        ),
        Mistake(
            "dx does not use dy: multiply the gradient that arrives by the weight",
            {"dx": lambda given: torch.ones_like(_dy_x(given)[0]) @ given["weight"][0]},
        ),
    ),
    looks=(Look("outputs", "dweight and dbias are computed in later()", _later),),
    terms=32,
)


# --- 08-4 ----------------------------------------------------------------------------------------

Cells = list[list[str]]


def _facts(value: Any) -> dict[str, Any]:
    """Return what rows do, whatever cells they have."""
    schedule = schedule_of(value)
    if any(action.op == "B" for row in schedule.rows for action in row):
        raise NotRight("expected every backward to be split into I and W, got unsplit ones (B)")
    p, m = schedule.ranks, schedule.microbatches
    return {
        "ranks": p,
        "micro-batches": m,
        "one stage per rank, in order": schedule.placement == looped(p),
        "step": round(simulate(schedule, Costs()).makespan, 6),
        "in flight above p": [peak for peak in schedule.peak_in_flight() if peak > p],
    }


def delayed(p: int, m: int, delay: Callable[[int], int]) -> Cells:
    """Return rows with F and I as in 1F1B; rank r does each W ``delay(r)`` Is late."""
    rows = []
    for rank in range(p):
        late, first = delay(rank), min(p - rank, m)
        row = [f"{rank}F{mb}" for mb in range(first)]
        for mb in range(m):
            row.append(f"{rank}I{mb}")
            if mb >= late:
                row.append(f"{rank}W{mb - late}")
            if mb + first < m:
                row.append(f"{rank}F{mb + first}")
        rows.append(row + [f"{rank}W{mb}" for mb in range(max(0, m - late), m)])
    return rows


def _shortest(p: int, m: int) -> Cells:
    """Return the reference; no order is shorter."""
    rows = delayed(p, m, lambda rank: rank)
    assert simulate(from_rows(rows), Costs()).makespan == lower_bound(looped(p), m, Costs()), (p, m)
    return rows


def _sizes(p: tuple[int, int], more: tuple[int, int]) -> Callable[..., list[Instance]]:
    """Draw two sizes with m = p + ``more``."""
    return lambda rng: [
        {"p": ranks, "m": ranks + rng.randint(*more)}
        for ranks in rng.sample(range(p[0], p[1] + 1), 2)
    ]


ROWS = Function(
    id="08-4",
    title="the rows of ZB-H1",
    names=("rows_of_zb_h1",),
    mistakes=(
        Wrong(
            lambda p, m: delayed(p, m, lambda rank: 0),
            "Every W follows its I at once, so the step ends with a gap on the first ranks. Delay "
            "W on every rank that has room for it.",
        ),
        Wrong(
            lambda p, m: delayed(p, m, lambda rank: m),
            "All Ws are at the end: the step is short, but all m micro-batches are in flight.",
        ),
        Wrong(
            lambda p, m: delayed(p, m, lambda rank: p - 1 - rank),
            "The delays are in reversed order: rank 0 has p forwards in flight before its first I "
            "and no room to delay W; the last rank has the most room.",
        ),
        Wrong(
            lambda p, m: delayed(p, m, lambda rank: p - 1),
            "Every rank delays W by p-1, so the first ranks have more than p in flight.",
        ),
        Wrong(
            lambda p, m: delayed(p, m, lambda rank: rank + 1),
            "W is delayed by one too many: p+1 are in flight.",
        ),
        Wrong(lambda p, m: delayed(m, p, lambda rank: rank), "p and m are swapped."),
    ),
    reference=_shortest,
    refused=(
        "course_lib.schedule.zero_bubble:zb_h1",
        "course_lib.schedule.zero_bubble:zb_h2",
        "course_lib.schedule.zero_bubble:looped_skeletons",
        "course_lib.schedule.fill:fill",
        "course_lib.schedule.search:searched",
    ),
    normal=_facts,
    drawn=(
        Case("twice as many micro-batches and more", _sizes((3, 7), (8, 15))),
        Case("a few more than ranks", _sizes((3, 11), (1, 3))),
        Case(
            "as many as ranks, and two ranks",
            lambda rng: [{"p": 2, "m": rng.randint(3, 6)}, {"p": 4, "m": 4}, {"p": 1, "m": 3}],
        ),
    ),
)


# --- 08-5 ----------------------------------------------------------------------------------------


def _stages(trial: Trial, draw: Draw) -> Any:
    """A stage per rank. On two ranks x and y have one shape, elsewhere every stage has its own."""
    widths = [draw.size(3, 6)]
    hidden = [draw.size(7, 9) for _ in range(trial.n)]
    for _ in range(trial.n):
        widths.append(widths[-1] if trial.n == 2 else draw.size(3, 6))
    stages = []
    for inner, a, b in zip(hidden, widths[:-1], widths[1:], strict=True):
        stage = nn.Sequential(nn.Linear(a, inner), nn.Tanh(), nn.Linear(inner, b))
        for p in stage.parameters():  # so large that gradients do not fade on their way to rank 0
            p.data = draw.normal(*p.shape, scale=1.2 / p.shape[-1] ** 0.5)
        stages.append(stage)
    lead = (2, draw.size(2, 4)) if draw.call else (draw.size(3, 6),)
    lead = (1,) * len(lead) if trial.n == 3 else lead
    ranks: list[dict[str, Any]] = [
        {"stage": stage, "micro-batches": trial.size} for stage in stages
    ]
    for mb in range(trial.size):
        x = draw.normal(*lead, widths[0])
        for rank, stage in enumerate(stages):
            last = draw.upstream(*lead, widths[-1]) if rank == trial.n - 1 else None
            ranks[rank] |= {f"x of {mb}": x, f"dy of {mb}": last}
            x = stage(x).detach()
    return ranks


Hand = Callable[[Tensor, Tensor, Tensor], Tensor]  # of dx, dy and y


def _backward(
    given: Given, hand: Hand = lambda dx, dy, y: dx, *, only_last: bool = False
) -> dict[str, list[Tensor]]:
    """Return the gradients by name and rank; ``hand`` computes the tensor that a rank sends."""
    m = given.trial.size
    found: dict[str, list[Any]] = {
        f"gradient of {name}": [0] * given.n for name in runner.PARAMETERS
    }
    for mb in range(m - 1 if only_last else 0, m):
        dy = given[f"dy of {mb}"][-1]
        for rank in reversed(range(given.n)):
            x, stage = given[f"x of {mb}"][rank].detach().requires_grad_(), given["stage"][rank]
            y = stage(x)
            dx, *rest = torch.autograd.grad(y, [x, *stage.parameters()], dy)
            for by_rank, gradient in zip(found.values(), rest, strict=True):
                by_rank[rank] = by_rank[rank] + gradient
            dy = hand(dx, dy, y.detach())
    return found


def _all(make: Callable[[Given], dict[str, list[Any]]]) -> dict[str, Any]:
    return {
        key: lambda given, key=key: make(given)[key]
        for key in (f"gradient of {name}" for name in runner.PARAMETERS)
    }


def _messages(given: Given, rank: int) -> list[tuple[str, int, int]]:
    found = []
    for x in (f"x of {mb}" for mb in range(given.trial.size)):
        if rank < given.n - 1:
            found.append(("recv", bytes_of(given[x][rank + 1]), rank + 1))
        if rank > 0:
            found.append(("send", bytes_of(given[x][rank]), rank - 1))
    return found


def _early(given: Given, ranks: list[Observed]) -> str:
    for rank, observed in enumerate(ranks):
        if early := observed.values[runner.EARLY]:
            return (
                f"rank {rank} computed the gradient of {early[0]} before it sent the gradient of "
                f"its input: send first, because rank {rank - 1} waits for the message"
            )
        if again := observed.values[runner.AGAIN]:
            return (
                f"rank {rank} computed the gradient of {again[0]} twice for one micro-batch: "
                "expected once"
            )
    return ""


NO_GRADIENT = (
    "the parameters have no gradient: torch.autograd.grad returns it and leaves .grad alone"
)
HANDS_ON = "each rank must send the gradient of its own input, but here it sends "

RAW = OnRanks(
    id="08-5",
    title="send early, in raw PyTorch",
    names=("backward_in_halves",),
    axes=("gradients",),
    act=runner.halves,
    draw=_stages,
    expected=_backward,
    trials=(
        Trial(2, size=3),
        Trial(4, size=2, strided=True),
        Trial(3, size=1, name="three ranks, one micro-batch"),
        Trial(1, size=2),
    ),
    mistakes=(
        Mistake(NO_GRADIENT, _all(lambda given: dict.fromkeys(given.expected, [None] * given.n))),
        Mistake(
            "only the gradients of the last micro-batch are left: add to .grad",
            _all(lambda given: _backward(given, only_last=True)),
        ),
        Mistake(
            HANDS_ON + "dy, the gradient of its output",
            _all(lambda given: _backward(given, lambda dx, dy, y: dy)),
        ),
        Mistake(
            HANDS_ON + "its output y", _all(lambda given: _backward(given, lambda dx, dy, y: y))
        ),
        Mistake(
            "a rank before the last begins its backward anew, as if from y.sum(): use the gradient "
            "that it received",
            _all(lambda given: _backward(given, lambda dx, dy, y: torch.ones_like(dx))),
        ),
    ),
    calls=_messages,
    calls_why="Per micro-batch, one message comes from rank + 1 and one goes to rank - 1, if these "
    "ranks exist",
    looks=(Look("wire", "the message is sent before any weight's gradient", _early),),
    refused=("course_lib.comm.transfer:issue",),
    terms=64,
    hang="Per micro-batch every rank but rank 0 sends one message to rank - 1, the gradient of its "
    "input, and every rank but the last receives one of the shape of its y. A message that is "
    "never waited for may be lost",
)

EXERCISES = (by_hand("08-1"), WARM_UP, HALVES, ROWS, RAW)
