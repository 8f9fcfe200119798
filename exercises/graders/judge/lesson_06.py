"""Lesson 06, sequence parallelism: what the exercises give, and what they expect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from course_lib.grading.draw import Draw
from course_lib.grading.graders.by_hand import by_hand
from course_lib.grading.graders.runner import lesson_06 as runner
from course_lib.grading.placed import Placed, bytes_of, sharded
from course_lib.grading.ranked import OnRanks
from course_lib.grading.runner import Observed
from course_lib.grading.trials import TRIALS, Given, Look, Mistake, Trial, on_axis

# --- 06-2 ----------------------------------------------------------------------------------------


def _column(trial: Trial, draw: Draw) -> dict[str, Tensor]:
    """On three ranks one sequence, and one position and one feature per rank."""
    most = 1 if trial.n == 3 else 4
    batch, rows, features, hidden = (
        draw.size(min(2, most), each) for each in (most, most, most, 5)
    )
    return {
        "x": draw.normal(batch, trial.n * rows, hidden),
        "weight": draw.normal(trial.n * features, hidden),
    }


def _own_rows_of_own_gradient(given: Given) -> list[Tensor]:
    own = zip(given["gradient that arrives"], given["weight"], strict=True)
    return [(dy @ w).chunk(given.n, 1)[rank] for rank, (dy, w) in enumerate(own)]


SCATTERS = {"all_to_all": "reduce_scatter"}  # comm on gloo: shards to their ranks, which sum them


def _gather_and_scatter(given: Given, ranks: list[Observed]) -> str:
    rows = bytes_of(given["x"][0])
    wanted = [("all_gather", rows), ("reduce_scatter", rows * given.n)]
    for rank, seen in enumerate(ranks):
        if [(SCATTERS.get(call.op, call.op), call.payload) for call in seen.calls] != wanted:
            made = ", ".join(f"{call.op} of {call.payload:,} bytes" for call in seen.calls)
            return (
                f"expected an all_gather of {rows:,} bytes forward and a reduce_scatter of "
                f"{rows * given.n:,} bytes backward from rank {rank}, got {made or 'no operation'}"
            )
    return ""


ENTER = Placed(
    id="06-2",
    title="rows enter a region",
    names=("column_on_rows",),
    axes=("outputs", "gradients"),
    whole=_column,
    inputs={"x": sharded(1), "weight": sharded(0)},
    output=sharded(2),
    reference=F.linear,
    mistakes=(
        Mistake(
            "these are this rank's rows only: the region needs all positions",
            {"outputs": lambda given: list(map(F.linear, given["x"], given["weight"]))},
        ),
        Mistake(
            "the positions are not joined along dim 1",
            {
                "outputs": lambda given: [
                    F.linear(torch.cat(given["x"]), weight) for weight in given["weight"]
                ]
            },
        ),
        Mistake(
            "the product was computed first and then gathered: each rank has other features, so "
            "gather x",
            {
                "outputs": lambda given: torch.cat(
                    list(map(F.linear, given["x"], given["weight"])), 1
                )
            },
        ),
        Mistake(
            "backward took this rank's rows of its own gradient, but every rank used these rows, "
            "each for its own features: sum them over the ranks",
            {"gradient of x": _own_rows_of_own_gradient},
        ),
        Mistake(
            "the gradients of the weights are summed over ranks that hold different features: each "
            "rank's gradient is complete",
            {"gradient of weight": lambda given: sum(given.expected["gradient of weight"])},
        ),
    ),
    looks=(Look("wire", "one gather, one reduce-scatter", _gather_and_scatter),),
    refused=("course_lib.sp:enter", "course_lib.sp:_EnterAgain.forward"),
)


# --- 06-3 ----------------------------------------------------------------------------------------

REPLICATED = [kind for kind in runner.DIMS if kind.startswith("replicated")]
OWN = [kind for kind in runner.DIMS if kind not in REPLICATED]


def _gradients(trial: Trial, draw: Draw) -> list[dict[str, Tensor]]:
    """Every rank has the parameters in the same order, with gradients of its own."""
    kinds = draw.random.sample(sorted(runner.DIMS), len(runner.DIMS))
    count = {"vector": 1, "matrix": 2, "3-D": 3}
    least = 1 + trial.strided  # a dim of 1 would hide gaps
    shapes = {
        kind: [draw.size(least, 5) for _ in range(max(count.get(w, 0) for w in kind.split()))]
        for kind in kinds
    }
    return [{kind: draw.tensor(*shapes[kind]) for kind in kinds} for _ in range(trial.n)]


def _total(given: Given, kind: str) -> Tensor:
    return torch.stack(given[kind]).sum(0)


NORMS = OnRanks(
    id="06-3",
    title="the sum that norms need",
    names=("sum_partial",),
    axes=("gradients", "weights"),
    later=("weights",),
    act=runner.norms,
    draw=_gradients,
    expected=lambda given: (
        {"weights that changed": [[] for _ in range(given.n)]}
        | {f"gradients of the {kind}": _total(given, kind) for kind in REPLICATED}
        | {f"gradients of the {kind}": given[kind] for kind in OWN}
    ),
    mistakes=tuple(
        Mistake(message, {f"gradients of the {kind}": lambda given, k=kind, r=results: r(given, k)})
        for message, kinds, results in (
            (
                "each rank still has the gradient of its own rows: sum it over the ranks",
                REPLICATED,
                lambda given, kind: given[kind],
            ),
            (
                "this is the average over the ranks: sum, do not divide",
                REPLICATED,
                lambda given, kind: _total(given, kind) / given.n,
            ),
            (
                "every rank has the gradient of rank 0: sum the gradients of all ranks",
                REPLICATED,
                lambda given, kind: given[kind][0],
            ),
            (
                "each rank has a parameter of its own here, as of an expert, whose ShardSpec has "
                "the dim None: leave its gradient as it is",
                [runner.EXPERT],
                _total,
            ),
            (
                "the ranks store different shards of this parameter, and each shard's gradient is "
                "fully reduced: leave it as it is",
                OWN,
                _total,
            ),
        )
        for kind in kinds
    ),
    calls=lambda given, rank: [
        ("all_reduce", sum(bytes_of(given[kind][rank]) for kind in REPLICATED))
    ],
    calls_why="Put all gradients that need the sum into one flat tensor",
    in_place=tuple(runner.DIMS),
    refused=("course_lib.sp:sum_gradients", "course_lib.comm.held:sum_gradients"),
)  # fmt: skip


# --- 06-4 ----------------------------------------------------------------------------------------


def _parts(whole: Tensor, n: int, padding: float) -> list[Tensor]:
    """Return the columns of each rank, padded to equal widths. Of three ranks with four words or
    two, the last has padding alone."""
    words = -(-whole.shape[1] // n)
    padded = F.pad(whole, (0, words * n - whole.shape[1]), value=padding)
    return [part.contiguous() for part in padded.chunk(n, 1)]


def _logits(trial: Trial, draw: Draw) -> Any:
    tokens, words = 1 if trial.n == 1 else draw.size(3, 7), draw.size(2, 5)
    vocabulary = trial.n * words - (trial.size and draw.size(1, words - 1))
    if trial.n == 3:
        vocabulary = 4 - 2 * draw.call
    many = tokens > 1  # a loss near 0 would not be exact: one token has small logits
    heights = draw.normal(tokens, 1, scale=200 * many)
    heights[:2] = torch.tensor([[300.0], [-300.0]])[:tokens] * many
    z = draw.normal(tokens, vocabulary, scale=2 if many else 0.5) + heights
    z[2:3] = heights[2:3]  # equal logits
    targets = draw.integers(0, vocabulary - 1, tokens)
    targets[0], targets[1:2] = 0, vocabulary - 1
    given = {"targets": targets, "dloss": draw.upstream(tokens)}
    ranks = [{"z": part} | given for part in _parts(z, trial.n, -torch.inf)]
    return ranks, {"z": z} | given


def _cross_entropy(given: Given) -> dict[str, Any]:
    z = given.whole["z"].clone().requires_grad_()
    losses = F.cross_entropy(z, given.whole["targets"], reduction="none")
    losses.backward(given.whole["dloss"])
    assert z.grad is not None
    return {"losses": losses.detach(), "gradients of the logits": _parts(z.grad, given.n, 0.0)}


def _simulated(
    given: Given, *, top: str = "all", own_sum: bool = False, target: str = "all"
) -> list[Tensor]:
    """Return each rank's losses with a mistake in the maximum, the sum or the target's logit."""
    parts, width = given["z"], given["z"][0].shape[1]
    tops = [part.amax(1) for part in parts]
    if top != "own":
        most = torch.stack(tops).amax(0)
        tops = [most if top == "all" else torch.zeros_like(most)] * given.n
    sums = [(part - m[:, None]).exp().sum(1) for part, m in zip(parts, tops, strict=True)]
    hits = []
    for rank, part in enumerate(parts):
        local = given.whole["targets"] - (rank * width if target != "global ids" else 0)
        mine = (local >= 0) & (local < width)
        logits = part.gather(1, local.masked_fill(~mine, 0)[:, None])[:, 0]
        hits.append(logits if target == "not masked" else logits.masked_fill(~mine, 0.0))
    return [
        (sums[rank] if own_sum else sum(sums)).log()
        + tops[rank]
        - (hits[rank] if target == "own" else sum(hits))
        for rank in range(given.n)
    ]


def _losses(message: str, **mistake: Any) -> Mistake:
    return Mistake(message, {"losses": lambda given: _simulated(given, **mistake)})


def _dz(message: str, change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Mistake:
    """Return a mistake in backward: ``change(softmax, one-hot targets, dloss)`` is its result."""

    def results(given: Given) -> list[Tensor]:
        z, dloss = given.whole["z"], given.whole["dloss"][:, None]
        onehot = F.one_hot(given.whole["targets"], z.shape[1]).to(z.dtype)
        return _parts(change(z.softmax(1), onehot, dloss), given.n, 0.0)

    return Mistake(message, {"gradients of the logits": results})


def _three_numbers(given: Given, ranks: list[Observed]) -> str:
    most = 3 * bytes_of(given.whole["dloss"])
    for rank, seen in enumerate(ranks):
        if backward := seen.values["sent in backward"]:
            op, size = backward[0]
            return f"expected no call in backward from rank {rank}, got {op} of {size:,} bytes"
        made = ", ".join(f"{call.op} of {call.payload:,} bytes" for call in seen.calls)
        sent = sum(call.payload for call in seen.calls)
        if sent > most or any(call.op != "all_reduce" for call in seen.calls):
            return (
                f"forward: expected all_reduces of {most:,} bytes at most from rank {rank}, three "
                f"numbers per token, got {made}"
            )
    return ""


LOSS = OnRanks(
    id="06-4",
    title="a loss that never gathers logits",
    names=("VocabLoss",),
    axes=("outputs", "gradients"),
    trials=(*on_axis(TRIALS[:2], size=1), *TRIALS[2:]),  # size 1: with padding
    act=runner.loss,
    draw=_logits,
    expected=_cross_entropy,
    terms=600,  # a logit of several hundred is subtracted from another
    mistakes=(
        _losses("e to the power of a logit is infinite or 0: subtract the maximum", top="none"),
        _losses("each rank subtracted its own maximum: all ranks need the same one", top="own"),
        _losses("each rank divided by the sum over its own words: all words count", own_sum=True),
        _losses("the target's logit is on one rank only: sum it over the ranks", target="own"),
        _losses("a rank without the target's word adds a logit: it adds 0", target="not masked"),
        _losses("targets are words of the full vocabulary: subtract rank times words",
                target="global ids"),
        _dz("subtract 1 from softmax at the target's word", lambda p, onehot, dloss: p * dloss),
        _dz("the gradient that arrives at each token's loss is missing",
            lambda p, onehot, dloss: p - onehot),
    ),
    looks=(Look("wire", "three numbers per token, forward only", _three_numbers),),
    refused=(
        "course_lib.tp.layers:loss_sum",
        "course_lib.tp.layers:_VocabCrossEntropy.forward",
    ),
)  # fmt: skip


# --- 06-5 ----------------------------------------------------------------------------------------

DIMS = {"x": 0, "weight_in": 0, "weight_out": 1, "dy": 0}


def _region(trial: Trial, draw: Draw) -> Any:
    """On three ranks one token and one feature per rank; in the second call, x has a row of 0."""
    least = trial.n == 3
    tokens, hidden, inner = draw.size(1, 3), draw.size(3, 6), draw.size(2, 4)
    tokens, inner = (trial.n * (1 if least else size) for size in (tokens, inner))
    whole = {
        "x": draw.normal(tokens, hidden),
        "weight_in": draw.normal(hidden, inner).mT,  # not contiguous
        "weight_out": draw.normal(hidden, inner),
        "dy": draw.normal(tokens, hidden),
    }
    if draw.call:
        whole["x"][-1] = 0
    return [
        {name: x.chunk(trial.n, DIMS[name])[rank].clone() for name, x in whole.items()}
        for rank in range(trial.n)
    ], whole


def _step(x: Tensor, weight_in: Tensor, weight_out: Tensor, dy: Tensor) -> dict[str, Tensor]:
    leaves = [each.clone().requires_grad_() for each in (x, weight_in, weight_out)]
    y = (leaves[0] @ leaves[1].mT).relu() @ leaves[2].mT
    gradients = torch.autograd.grad(y, leaves, dy)
    names = (f"gradients of {name}" for name in ("x", "weight_in", "weight_out"))
    return {"outputs": y.detach()} | dict(zip(names, gradients, strict=True))


def _shards(given: Given) -> dict[str, list[Tensor]]:
    found = _step(**given.whole)
    return {
        name: list(each.chunk(given.n, DIMS.get(name.removeprefix("gradients of "), 0)))
        for name, each in found.items()
    }


def _own(name: str) -> Callable[[Given], list[Tensor]]:
    """Return each rank's rows of its own part of a sum."""

    def results(given: Given) -> list[Tensor]:
        x, dy = given.whole["x"], given.whole["dy"]
        weights = zip(given["weight_in"], given["weight_out"], strict=True)
        parts = [_step(x, a, b, dy)[name] for a, b in weights]
        return [part.chunk(given.n)[rank] for rank, part in enumerate(parts)]

    return results


def _in_of_own_dy(given: Given) -> list[Tensor]:
    """Return the gradients of weight_in with dy of the rank's own rows, and zeros elsewhere."""
    found = []
    for rank, dy in enumerate(given["dy"]):
        own = [torch.zeros_like(dy)] * given.n
        own[rank] = dy
        weights = given["weight_in"][rank], given["weight_out"][rank]
        found.append(_step(given.whole["x"], *weights, torch.cat(own))["gradients of weight_in"])
    return found


def _two_and_two(given: Given, ranks: list[Observed]) -> str:
    most = 4 * bytes_of(given.whole["x"]) * (given.n - 1) // given.n
    for rank, seen in enumerate(ranks):
        if (sent := sum(call.wire(given.n) for call in seen.calls)) > most:
            made = ", ".join(f"{call.op} of {call.payload:,} bytes" for call in seen.calls)
            return (
                f"expected rank {rank} to send {most:,} bytes at most, two gathers of rows and two "
                f"reduce-scatters, got {int(sent):,} ({made})"
            )
    return ""


REGION = OnRanks(
    id="06-5",
    title="a region between rows in raw PyTorch",
    names=("region_step",),
    axes=("outputs", "gradients"),
    trials=(Trial(2), Trial(4), Trial(3), Trial(1)),
    act=runner.region,
    draw=_region,
    expected=_shards,
    terms=64,
    mistakes=(
        Mistake(
            "dy was not gathered: inside the region every rank needs dy of all tokens",
            {
                "gradients of x": _own("gradients of x"),
                "gradients of weight_in": _in_of_own_dy,
            },
        ),
        *(
            Mistake(
                f"{name} has this rank's rows of its own part, but every rank has a part of these "
                "rows, from its features: use a reduce-scatter",
                {key: _own(key)},
            )
            for name, key in (("y", "outputs"), ("dx", "gradients of x"))
        ),
        *(
            Mistake(
                "this is summed over ranks that hold different features: each rank's gradient is "
                "complete",
                {key: lambda given, key=key: sum(given.expected[key])},
            )
            for key in ("gradients of weight_in", "gradients of weight_out")
        ),
    ),
    looks=(Look("wire", "at most the bytes of two all-reduces", _two_and_two),),
    refused=("course_lib.comm.transfer:issue",),
)


EXERCISES = (by_hand("06-1"), ENTER, NORMS, LOSS, REGION)
