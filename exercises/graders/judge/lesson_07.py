"""Lesson 07, pipelines I: what the exercises give, and what they expect."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.grading.answers import NotRight, shown
from course_lib.grading.draw import Draw
from course_lib.grading.exercise import Case, Function, Instance, Wrong
from course_lib.grading.graders.by_hand import by_hand
from course_lib.grading.graders.runner import lesson_07 as runner
from course_lib.grading.placed import bytes_of
from course_lib.grading.ranked import OnRanks
from course_lib.grading.rows import schedule_of
from course_lib.grading.runner import Observed
from course_lib.grading.trials import Given, Look, Mistake, Trial
from course_lib.schedule import (
    Costs,
    Schedule,
    gpipe,
    naive,
    one_f_one_b,
    simulate,
)
from course_lib.trace import SavedActivations

# --- 07-2 ----------------------------------------------------------------------------------------


def _limits(ranks: tuple[int, int], limits: tuple[int, int]) -> Callable[..., list[Instance]]:
    """Draw five calls; no limit is met exactly."""

    def draw(rng: random.Random) -> list[Instance]:
        found: list[Instance] = []
        while len(found) < 5:
            p, percent = rng.randint(*ranks), rng.randint(*limits)
            if (p - 1) * (100 - percent) % percent:
                found.append({"p": p, "percent": percent})
        return found

    return draw


def _micro_batches(value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise NotRight(f"expected a whole number of micro-batches, got {shown(value)}")
    return int(value)


ENOUGH = Function(
    id="07-2",
    title="micro-batches enough",
    names=("enough",),
    mistakes=(
        Wrong(
            lambda p, percent: math.ceil(100 * (p - 1) / percent),
            "This is m+p-1 (or m for a share of ideal time, (p-1)/m): the share of total time is "
            "(p-1)/(m+p-1).",
        ),
        Wrong(
            lambda p, percent: math.ceil(p * (100 - percent) / percent),
            "Use p-1, not p: the bubble is (p-1)/(m+p-1).",
        ),
        Wrong(
            lambda p, percent: (p - 1) * (100 - percent) // percent,
            "This is rounded down: with that m the bubble is still above the limit.",
        ),
        Wrong(
            lambda p, percent: round((p - 1) * (100 - percent) / percent),
            "This is rounded to the nearest: where that is down, the bubble is above the limit.",
        ),
        Wrong(
            lambda p, percent: math.ceil((p - 1) * (1 - percent) / percent),
            "The limit is in percent: 10 means 10/100.",
        ),
        Wrong(
            lambda p, percent: math.ceil(2 * (p - 1) * (100 - percent) / percent),
            "The bubble is counted twice: a rank waits (p-1)(F+B) in total.",
        ),
        Wrong(
            lambda p, percent: math.ceil((p - 1) * percent / (100 - percent)),
            "The limit is taken as the share in which a rank works; it is the share in which it "
            "waits.",
        ),
        Wrong(
            lambda p, percent: (p - 1) * (100 - percent) // percent + 1,
            "This is one too many where a bubble meets the limit: at most, not below.",
        ),
        Wrong(
            lambda p, percent: max(2, math.ceil((p - 1) * (100 - percent) / percent)),
            "One micro-batch can be enough, where the limit is high.",
        ),
    ),
    reference=lambda p, percent: max(1, -(-(p - 1) * (100 - percent) // percent)),
    refused=("course_lib.schedule.named:predicted_bubble",),
    normal=_micro_batches,
    drawn=(
        Case("a few ranks", _limits((2, 16), (5, 30))),
        Case("hundreds of ranks", _limits((128, 512), (2, 30))),
        Case("a high limit", _limits((8, 64), (31, 80))),
        Case(
            "a limit met exactly",
            lambda rng: [
                {"p": p, "percent": percent}
                for k in [rng.randint(1, 9)]
                for p, percent in ((k + 2, 25), (k + 2, 50), (7 * k + 1, 7), (11 * k + 1, 11))
            ],
        ),
        Case(
            "one micro-batch is enough",
            lambda rng: [
                {"p": 2, "percent": rng.randint(51, 99)},
                {"p": 3, "percent": rng.randint(67, 99)},
                {"p": 6, "percent": rng.randint(51, 60)},
            ],
        ),
    ),
)


# --- 07-3 ----------------------------------------------------------------------------------------

Cells = list[list[str]]


def cells(schedule: Schedule) -> Cells:
    """Return the rows of a schedule in the form of an answer."""
    return [[str(action) for action in row] for row in schedule.rows]


def _facts(value: Any) -> dict[str, Any]:
    """Return what rows do, whatever cells they have."""
    schedule = schedule_of(value)
    return {
        "ranks": schedule.ranks,
        "micro-batches": schedule.microbatches,
        "step": round(simulate(schedule, Costs.make(f=1, b=2)).makespan, 6),
        "in flight": schedule.peak_in_flight(),
    }


def _sizes(p: tuple[int, int], more: tuple[int, int]) -> Callable[..., list[Instance]]:
    """Draw three sizes with m = p + ``more``, at least 1, and three different p."""
    return lambda rng: [
        {"p": size, "m": max(1, size + rng.randint(*more))}
        for size in rng.sample(range(p[0], p[1] + 1), 3)
    ]


def in_parts(p: int, m: int, first: Callable[[int], int], order: str = "FB") -> Cells:
    """Return rows in the three parts of 1F1B; a rank begins with ``first(rank)`` forwards."""
    rows = []
    for rank in range(p):
        begin = first(rank)
        row = [f"{rank}F{mb}" for mb in range(begin)]
        for mb in range(m - begin):
            pair = {"F": f"{rank}F{begin + mb}", "B": f"{rank}B{mb}"}
            row += [pair[op] for op in order]
        rows.append(row + [f"{rank}B{mb}" for mb in range(max(m - begin, 0), m)])
    return rows


def three_parts(p: int, m: int) -> Cells:
    """Return the rows of 1F1B."""
    return in_parts(p, m, lambda rank: min(p - 1 - rank, m))


def _newest_first(p: int, m: int) -> Cells:
    """Take the newest micro-batch in backward, as from a stack."""
    rows = []
    for row in three_parts(p, m):
        stack: list[str] = []
        found = []
        for cell in row:
            if "F" in cell:
                stack.append(cell)
            found.append(cell if "F" in cell else stack.pop().replace("F", "B"))
        rows.append(found)
    return rows


def _from_one(p: int, m: int) -> Cells:
    rows = three_parts(p, m + 1)
    return [[cell for cell in row if not cell.endswith(("F0", "B0"))] for row in rows]


ROWS = Function(
    id="07-3",
    title="the rows of 1F1B",
    names=("rows_of_1f1b",),
    mistakes=(
        Wrong(
            lambda p, m: cells(gpipe(p, m)),
            "This is GPipe: legal and as fast, but every rank has all m micro-batches in flight.",
        ),
        Wrong(
            lambda p, m: cells(naive(p, m)),
            "Every rank alternates from its first forward on, so only one rank computes at a time. "
            "Rank r begins with p-1-r forwards.",
        ),
        Wrong(
            lambda p, m: in_parts(p, m, lambda rank: min(p - rank, m)),
            "This is one forward too many before the first backward: it gains no time, and its "
            "activations are stored longer.",
        ),
        Wrong(
            lambda p, m: in_parts(p, m, lambda rank: min(max(p - 2 - rank, 0), m)),
            "This is one forward too few before the first backward: each rank waits where it could "
            "compute.",
        ),
        Wrong(
            lambda p, m: in_parts(p, m, lambda rank: min(rank, m)),
            "Rank r begins with r forwards: rank 0 needs the most, so begin with p-1-r.",
        ),
        Wrong(
            lambda p, m: three_parts(p, m)[::-1],
            "The rows are in reversed order: row r is for rank r, which stores stage r.",
        ),
        Wrong(
            lambda p, m: in_parts(p, m, lambda rank: p - 1 - rank),
            "With fewer micro-batches than p-1-r a rank can begin with m forwards at most.",
        ),
        Wrong(
            lambda p, m: in_parts(p, m, lambda rank: min(p - 1 - rank, m), "BF"),
            "In the alternating part the forward comes before the backward.",
        ),
        Wrong(
            _newest_first,
            "The backward takes the newest micro-batch; it must take the oldest in flight.",
        ),
        Wrong(_from_one, "Micro-batches are numbered from 0."),
        Wrong(lambda p, m: three_parts(m, p), "p and m are swapped."),
    ),
    reference=lambda p, m: cells(one_f_one_b(p, m)),
    refused=("course_lib.schedule.named:one_f_one_b",),
    normal=_facts,
    drawn=(
        Case("more micro-batches than ranks", _sizes((2, 6), (1, 8))),
        Case("fewer micro-batches than ranks", _sizes((3, 8), (-5, -1))),
        Case("two-digit numbers", _sizes((9, 13), (2, 9))),
        Case(
            "one rank too",
            lambda rng: [
                {"p": p, "m": m} for p, m in ((1, rng.randint(2, 5)), (1, 1), (3, 1), (3, 4))
            ],
        ),
    ),
)


# --- 07-4 ----------------------------------------------------------------------------------------

Messages = Callable[[Given, int], Sequence[tuple[str, int, int]]]  # of a rank: (op, peer, bytes)


def _in_any_order(wanted: Messages) -> Callable[[Given, list[Observed]], str]:
    """Return a look at the messages of every rank, which may start in any order."""

    def look(given: Given, ranks: list[Observed]) -> str:
        for rank, observed in enumerate(ranks):
            got = Counter((call.op, call.peer, call.payload) for call in observed.calls)
            right = Counter(wanted(given, rank))
            if got != right:
                return f"expected {_listed(right)} from rank {rank}, got {_listed(got)}"
            if given.trial.beside > 1 and any(len(c.ranks) > given.n for c in observed.calls):
                return f"rank {rank} used the group of all ranks: expected that of the axis"
        return ""

    return look


def _listed(messages: Counter[Any]) -> str:
    found = [
        f"{number} {op}{'s' * (number > 1)} {'to' if op == 'send' else 'from'} rank {peer} of "
        f"{size:,} bytes"
        if peer is not None
        else f"{number} {op}"
        for (op, peer, size), number in sorted(messages.items(), key=str)
    ]
    return ", ".join(found[:5]) + ", ..." * (len(found) > 5) or "no message"


def _peers(trial: Trial, rank: int) -> list[int]:
    """The next and the previous rank; ``trial.size`` is the distance."""
    return [peer for peer in (rank + trial.size, rank - trial.size) if 0 <= peer < trial.n]


def _exchanges(trial: Trial, draw: Draw) -> Any:
    """Tensors for the previous rank have another dtype; whole numbers go beyond 2**24."""
    rounds = draw.size(2, 3)
    to_next, to_previous = draw.shape(), draw.shape()

    def tensor(forward: bool) -> Tensor:
        if forward:
            return draw.tensor(*to_next)
        if trial.dtype == torch.float32:
            return draw.integers(-(2**40), 2**40, *to_previous)
        return draw.tensor(*to_previous).float()

    ranks: list[dict[str, Any]] = [
        {"peers": _peers(trial, rank) * rounds} for rank in range(trial.n)
    ]
    most = max(len(given["peers"]) for given in ranks)
    for rank, given in enumerate(ranks):
        given["exchanges"] = most
        for k, peer in enumerate(given["peers"]):
            given[f"mine {k}"], given[f"like {k}"] = tensor(peer > rank), tensor(peer < rank)
    return ranks


def _received(given: Given) -> dict[str, list[Tensor]]:
    """The k-th exchange with a peer matches the peer's k-th exchange with this rank."""
    found = {f"received {k}": [torch.zeros(0)] * given.n for k in range(given["exchanges"][0])}
    for rank, peers in enumerate(given["peers"]):
        for k, peer in enumerate(peers):
            turn = peers[:k].count(peer)
            theirs = [j for j, other in enumerate(given["peers"][peer]) if other == rank][turn]
            found[f"received {k}"][rank] = given.ranks[peer][f"mine {theirs}"]
    return found


def _messages_of_exchanges(given: Given, rank: int) -> list[tuple[str, int, int]]:
    own = given.ranks[rank]
    return [
        (op, peer, bytes_of(own[f"{name} {k}"]))
        for k, peer in enumerate(own["peers"])
        for op, name in (("send", "mine"), ("recv", "like"))
    ]


SWAP = OnRanks(
    id="07-4",
    title="an exchange that cannot deadlock, in raw torch",
    names=("swap",),
    act=runner.exchanges,
    draw=_exchanges,
    expected=_received,
    trials=(
        Trial(2, size=1),
        Trial(4, size=1, dtype=torch.float64, name="four ranks in a row"),
        Trial(4, size=2, dtype=torch.bfloat16, name="ranks 0, 2 and 1, 3"),
        Trial(3, size=1),
    ),
    mistakes=(
        Mistake(
            "expected the tensor that the peer sends, got mine",
            {"received 0": lambda given: given["mine 0"]},
        ),
        Mistake(
            "expected the tensor that the peer sends, got like, which only shows shape and dtype",
            {"received 0": lambda given: given["like 0"]},
        ),
    ),
    looks=(Look("wire", "messages, peers and bytes", _in_any_order(_messages_of_exchanges)),),
    terms=0,
    hang="Only the two ranks of an exchange call `swap`, so a collective or another peer waits "
    "forever. The message that arrives has the shape and dtype of like, not of mine. A message may "
    "be lost if its handle is dropped before wait()",
)


# --- 07-5 ----------------------------------------------------------------------------------------


def _pipeline(trial: Trial, draw: Draw) -> Any:
    """1F1B; on two ranks GPipe, whose backwards begin with the last micro-batch."""
    least = draw.call and trial.n != 2  # one micro-batch of one token
    m = 1 if least else trial.size - draw.call
    width, inner = draw.size(3, 6), draw.size(7, 12)
    shape = (2, draw.size(2, 4), width) if draw.call else (draw.size(3, 6), width)
    shape = (1, 1, width) if least else shape
    batches = [(draw.normal(*shape), draw.normal(*shape)) for _ in range(m)]
    rows = [[(a.op, a.mb) for a in row] for row in one_f_one_b(trial.n, m).rows]
    if trial.n == 2 and trial.beside == 1:
        row = [("F", mb) for mb in range(m)] + [("B", mb) for mb in reversed(range(m))]
        rows = [row, row]
    ranks = []
    for row in rows:
        stage = nn.Sequential(nn.Linear(width, inner), nn.Tanh(), nn.Linear(inner, width))
        for p in stage.parameters():  # so large that gradients do not fade on their way to rank 0
            p.data = draw.normal(*p.shape, scale=1.2 / p.shape[-1] ** 0.5)
        before = [draw.normal(*p.shape) if draw.call else None for p in stage.parameters()]
        ranks.append(
            {
                "row": row,
                "stage": stage,
                "micro-batches": batches,
                "loss": draw.call,
                ".grad before": before,
            }
        )
    return ranks


Hand = Callable[[Tensor, Tensor], Tensor]  # of dx and x


def _forward(given: Given) -> list[list[Tensor]]:
    """The inputs of every stage by rank, then the outputs of the last one."""
    found = [[x for x, _ in given["micro-batches"][0]]]
    for stage in given["stage"]:
        found.append([stage(x).detach() for x in found[-1]])
    return found


def gradients_of(
    given: Given,
    hand: Hand = lambda dx, x: dx,
    *,
    newest: bool = False,
    only_last: bool = False,
    before: bool = True,
) -> list[Tensor]:
    """Return the gradients by rank. ``hand`` computes the tensor that a rank sends back."""
    inputs, batches, found = _forward(given), given["micro-batches"][0], []
    loss_of, last, arrived = runner.LOSSES[given["loss"][0]], given.n - 1, {}
    for rank in reversed(range(given.n)):
        stage, in_flight, sent = given["stage"][rank], [], {}
        total = [torch.zeros_like(p) for p in stage.parameters()]
        for op, mb in given["row"][rank]:
            if op == "F":
                in_flight.append(mb)
                continue
            used = in_flight.pop() if newest else mb
            x = inputs[rank][used].clone().requires_grad_()
            y = stage(x)
            if rank == last:
                y = loss_of(y, batches[used][1]) / len(batches)
            dx, *own = torch.autograd.grad(y, [x, *stage.parameters()], arrived.get(mb))
            total = own if only_last else [a + b for a, b in zip(total, own, strict=True)]
            sent[mb] = hand(dx, x.detach())
        arrived = sent
        held = [b for b in given[".grad before"][rank] if before and b is not None]
        found.append(runner.flat(total) + (runner.flat(held) if held else 0))
    return found[::-1]


def _losses(given: Given, outputs: list[Tensor] | None = None) -> list[Tensor]:
    """The loss of every micro-batch."""
    loss_of = runner.LOSSES[given["loss"][0]]
    outputs = _forward(given)[-1] if outputs is None else outputs
    batches = given["micro-batches"][0]
    return [loss_of(y, target) for y, (_, target) in zip(outputs, batches, strict=True)]


def _by_rank(given: Given, loss: Tensor) -> list[Tensor]:
    """The loss as a float32, because an answer may add up in float32."""
    return [torch.zeros(())] * (given.n - 1) + [loss.detach().float()]


def _fed_with_the_batch(given: Given) -> list[Tensor]:
    outputs = [given["stage"][-1](x).detach() for x, _ in given["micro-batches"][0]]
    return _by_rank(given, torch.stack(_losses(given, outputs)).mean())


def _step(given: Given) -> dict[str, list[Tensor]]:
    gradients = gradients_of(given)
    weights = [runner.flat(stage.parameters()) for stage in given["stage"]]
    return {
        "loss": _by_rank(given, torch.stack(_losses(given)).mean()),
        runner.GRADIENT: gradients,
        runner.BEFORE: weights,
        runner.AFTER: [w - runner.RATE * g for w, g in zip(weights, gradients, strict=True)],
    }


def _messages_of_step(given: Given, rank: int) -> list[tuple[str, int, int]]:
    m, size = len(given["micro-batches"][0]), bytes_of(given["micro-batches"][0][0][0])
    peers = [peer for peer in (rank - 1, rank + 1) if 0 <= peer < given.n]
    return [(op, peer, size) for peer in peers for op in ("send", "recv")] * m


def in_order(given: Given, ranks: list[Observed]) -> str:
    for rank, observed in enumerate(ranks):
        row = " ".join(f"{op}{mb}" for op, mb in given["row"][rank])
        if (done := observed.values[runner.DONE]) != row:
            return (
                f"expected rank {rank} to do {row}, got {done or 'nothing with its stage'}: do the "
                "expected actions in their order"
            )
    return ""


def _in_flight(given: Given, ranks: list[Observed]) -> str:
    """A rank saves activations only for the micro-batches that are in flight in its row."""
    for rank, observed in enumerate(ranks):
        most = max(accumulate(1 if op == "F" else -1 for op, _ in given["row"][rank]))
        one = _saved_by_one(given, rank)
        if observed.values[runner.SAVED] > (most + 0.5) * one:
            return (
                f"expected rank {rank} to store the activations of {most} micro-batches at most, "
                f"got {observed.values[runner.SAVED] / one:.0f}: do the expected actions in their "
                "order, and drop x and y of a micro-batch after its backward"
            )
    return ""


def _saved_by_one(given: Given, rank: int) -> int:
    stage, (x, target) = given["stage"][rank], given["micro-batches"][0][0]
    leaf = x if rank == 0 else x.clone().requires_grad_()
    with SavedActivations(stage, [x, target]) as saved:
        y = stage(leaf)
        if rank == given.n - 1:
            y = runner.LOSSES[given["loss"][0]](y, target)
    return saved.peak


def _loss_of(outputs: Callable[[Given], Tensor]) -> dict[str, Any]:
    return {"loss": lambda given: _by_rank(given, outputs(given))}


ONLY_LAST = "only the last micro-batch is in the loss: add up all micro-batches"
HANDS_ON = "expected every rank to send back the gradient of its own input, got "

STEP = OnRanks(
    id="07-5",
    title="one rank's step of a pipeline",
    names=("one_step",),
    axes=("outputs", "gradients", "weights"),
    act=runner.step,
    draw=_pipeline,
    expected=_step,
    trials=(
        Trial(2, size=4),
        Trial(2, beside=2, size=5, dtype=torch.float64),
        Trial(4, size=6),
        Trial(1, size=3),
    ),
    mistakes=(
        Mistake(
            "the losses of the micro-batches are summed: each is a mean, and counts 1/m",
            {"loss": lambda given: _by_rank(given, torch.stack(_losses(given)).sum())},
        ),
        Mistake(ONLY_LAST, _loss_of(lambda given: _losses(given)[-1])),
        Mistake(ONLY_LAST, _loss_of(lambda given: _losses(given)[-1] / len(_losses(given)))),
        Mistake(
            "every stage got the micro-batch as its input, not the output of the stage before",
            {"loss": _fed_with_the_batch},
        ),
        Mistake(
            "every rank returned the loss: expected 0.0 on all ranks but the last",
            {"loss": lambda given: given.expected["loss"][-1]},
        ),
        Mistake(
            "the gradients of the micro-batches are summed: each loss is a mean, and counts 1/m",
            {
                runner.GRADIENT: lambda given: [
                    len(given["micro-batches"][0]) * each
                    for each in gradients_of(given, before=False)
                ]
            },
        ),
        Mistake(
            "only the gradients of the last micro-batch are left: backward must add to .grad",
            {runner.GRADIENT: lambda given: gradients_of(given, only_last=True)},
        ),
        Mistake(
            "the gradients that were in .grad before the step are lost: add to them",
            {runner.GRADIENT: lambda given: gradients_of(given, before=False)},
        ),
        Mistake(
            "a rank before the last begins its backward anew, as if from y.sum(): use the gradient "
            "that it received",
            {runner.GRADIENT: lambda given: gradients_of(given, lambda dx, x: torch.ones_like(x))},
        ),
        Mistake(
            HANDS_ON + "the input itself",
            {runner.GRADIENT: lambda given: gradients_of(given, lambda dx, x: x)},
        ),
        Mistake(
            "backward uses the newest micro-batch: use the expected one",
            {runner.GRADIENT: lambda given: gradients_of(given, newest=True)},
        ),
    ),
    looks=(
        Look("gradients", "forwards and backwards in the order of the row", in_order),
        Look("wire", "messages, peers and bytes", _in_any_order(_messages_of_step)),
        Look("peak", "saved activations", _in_flight),
    ),
    in_place=("stage",),
    terms=64,
    refused=("course_lib.pp.engine:run", "course_lib.pp.engine:Engine.run"),
    hang="A rank waits for a message that is never sent: per micro-batch an activation goes to the "
    "next rank and a gradient to the previous one. A message that is never waited for may be lost",
)

EXERCISES = (by_hand("07-1"), ENOUGH, ROWS, SWAP, STEP)
