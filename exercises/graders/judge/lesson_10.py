"""Lesson 10, expert parallelism: what the exercises give, and what they expect."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.grading.answers import NotRight, shown
from course_lib.grading.draw import Draw
from course_lib.grading.exercise import Case, Function, Instance, Wrong
from course_lib.grading.graders.by_hand import by_hand
from course_lib.grading.graders.runner import lesson_10 as runner
from course_lib.grading.placed import bytes_of
from course_lib.grading.ranked import OnRanks
from course_lib.grading.runner_placed import UPSTREAM
from course_lib.grading.trials import Given, Look, Mistake, Observed, Trial, outside
from course_lib.layout import DEFAULT_ORDER

# --- 10-2 ----------------------------------------------------------------------------------------


def _on(n: int, tp: int = 1, **fields: Any) -> Trial:
    """A trial with ``size`` ranks of ep."""
    ep = fields["size"]
    name = f"{n} ranks, {f'tp = {tp}, ' * (tp > 1)}ep = {ep}" if n > 1 else "one rank"
    return Trial(n, order=DEFAULT_ORDER, sizes={"tp": tp, "ep": ep}, axis="ep", name=name, **fields)


def _over(given: Given, same: Callable[[int, int], Any]) -> list[Tensor]:
    """By rank: the sum over the ranks for which ``same(data rank, ep)`` is equal, per tp rank."""
    tp, ep = given.trial.sizes["tp"], given.trial.size
    key = [(rank % tp, same(rank // tp, ep)) for rank in range(given.n)]
    gradients = given["gradient"]
    return [
        torch.stack([gradients[r] for r in range(given.n) if key[r] == key[rank]]).sum(0)
        for rank in range(given.n)
    ]


def _divided(tensors: list[Tensor], by: float) -> list[Tensor]:
    return [each / by for each in tensors]


def _holders(given: Given) -> list[Tensor]:
    return _over(given, lambda data, ep: data % ep)


def _data(given: Given) -> list[Tensor]:
    return _over(given, lambda data, ep: 0)


def _sizes(given: Given) -> tuple[int, int]:
    """The numbers of ranks of edp and of data."""
    data = given.n // given.trial.sizes["tp"]
    return data // given.trial.size, data


def _gradients(trial: Trial, draw: Draw) -> list[dict[str, Any]]:
    shape = draw.shape()
    return [{"gradient": draw.tensor(*shape)} for _ in range(trial.n)]


GRADIENT = OnRanks(
    id="10-2",
    title="the gradient of an expert",
    names=("expert_gradient",),
    axes=("gradients",),
    trials=(
        _on(4, size=2),
        _on(4, tp=2, size=1, dtype=torch.float64, strided=True),
        _on(6, size=2),
        _on(4, size=4),
        _on(1, size=1),
    ),
    act=runner.gradient,
    draw=_gradients,
    expected=lambda given: {"gradients": _holders(given)},
    mistakes=tuple(
        Mistake(message, {"gradients": results})
        for message, results in (
            (
                "each rank has the gradient of the tokens of its ep group: other groups hold the "
                "same experts, and had other tokens",
                lambda given: given["gradient"],
            ),
            (
                "averaged over edp: the loss was divided by the tokens of all ranks, so gradients "
                "are only summed",
                lambda given: _divided(_holders(given), _sizes(given)[0]),
            ),
            (
                "divided by the number of data ranks: the loss was divided by the tokens of all "
                "ranks already",
                lambda given: _divided(_holders(given), _sizes(given)[1]),
            ),
            (
                "summed over all data ranks: the ranks of one ep group hold different experts",
                _data,
            ),
            (
                "averaged over all data ranks, as if all held this expert",
                lambda given: _divided(_data(given), _sizes(given)[1]),
            ),
            (
                "summed over ep: these ranks hold different experts, and their tokens are in the "
                "gradient already",
                lambda given: _over(given, lambda data, ep: data // ep),
            ),
            (
                "summed over the world: ranks of tp hold different shards of the expert",
                lambda given: torch.stack(given["gradient"]).sum(0),
            ),
        )
    ),
    calls=lambda given, rank: (
        [("all_reduce", bytes_of(given["gradient"][0]))] * (_sizes(given)[0] > 1)
    ),
    calls_why="One all-reduce over edp is enough, and none if edp has one rank",
)


# --- 10-3 ----------------------------------------------------------------------------------------

Routes = list[dict[int, float]]


def _softmax(logits: list[float]) -> list[float]:
    powers = [math.exp(each - max(logits)) for each in logits]
    return [each / sum(powers) for each in powers]


def _route(
    logits: list[list[float]], choices: int, room: int,
    *, shared: Callable[[int], bool] = lambda choices: choices > 1, by_choice: bool = True,
    limited: bool = True, after: bool = False, sign: int = -1, per_choice: bool = False,
) -> Routes:  # fmt: skip
    """Return which experts serve each token, or what a mistake computes."""
    chosen: list[dict[int, float]] = []
    for token in logits:
        order, p = (
            sorted(range(len(token)), key=lambda e: sign * token[e])[:choices],
            _softmax(token),
        )
        total = sum(p[expert] for expert in order) if shared(choices) else 1.0
        chosen.append({expert: p[expert] / total for expert in order})
    pairs = [(t, c) for c in range(choices) for t in range(len(logits))]
    taken: dict[Any, int] = {}
    served: Routes = [{} for _ in logits]
    for t, c in pairs if by_choice else sorted(pairs):
        expert = list(chosen[t])[c]
        key = (expert, c * per_choice)
        taken[key] = taken.get(key, 0) + 1
        if taken[key] <= room or not limited:
            served[t][expert] = chosen[t][expert]
    if after:
        served = [{e: w / sum(own.values()) for e, w in own.items()} for own in served]
    return served


def _as_routes(value: Any) -> Routes:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise NotRight(f"expected a list of dicts, one per token, got {shown(value)}")
    try:
        return [{int(expert): float(w) for expert, w in sorted(each.items())} for each in value]
    except (TypeError, ValueError):
        raise NotRight(
            f"expected dicts from numbers of experts to weights, got {shown(value)}"
        ) from None


def _batches(choices: int, popular: int, share: float, far: int = 0) -> Any:
    """Batches in which expert 0 has larger logits, and ``share`` of an even load fits. Logits are
    exact in float32; those of some tokens are shifted by ``far`` or -``far``. The last batch is
    one token, which chooses all experts."""

    def draw(rng: random.Random) -> list[Instance]:
        found = []
        for last in (False, False, True):
            tokens, k = 1 if last else rng.randint(5, 9), choices
            k += k > 2 and rng.random() < 0.5
            experts = k if last else rng.randint(4, 7)
            logits = []
            for token in range(tokens):
                row = [each / 64 for each in rng.sample(range(-150, 150), experts)]
                row[0] += popular + 1 / 128
                logits.append([each + far * (token % 3 - 1) for each in row])
            room = max(1, round(share * tokens * k / experts))
            found.append({"logits": logits, "choices": k, "room": room})
        if far:  # one weight is 0
            found.append({"logits": [[far, -far], [0.5, 1.0]], "choices": 2, "room": 2})
        return found

    return draw


ROUTING = Function(
    id="10-3",
    title="which experts serve a token",
    names=("route",),
    mistakes=tuple(
        Wrong(partial(_route, **mistake), message)
        for mistake, message in (
            (
                {"shared": lambda choices: False},
                "These are the probabilities over all experts: with two choices or more they are "
                "divided by the sum of the chosen.",
            ),
            (
                {"shared": lambda choices: True},
                "With one choice the weight is its probability: divided by itself it would always "
                "be 1, and the router would learn nothing.",
            ),
            ({"limited": False}, "Nothing is dropped: an expert takes at most `room` pairs."),
            (
                {"by_choice": False},
                "Pairs were assigned token by token: all first choices come before any second one.",
            ),
            ({"per_choice": True}, "First and second choices share the room of an expert."),
            (
                {"after": True},
                "The weights of a token were divided again after pairs were dropped: a dropped "
                "pair is missing in the sum.",
            ),
            ({"sign": 1}, "These are the experts with the smallest logits."),
        )
    ),
    reference=_route,
    normal=_as_routes,
    relative=1e-5,  # softmax in float32
    drawn=(
        Case("two choices, room for all", _batches(2, 0, 9.0)),
        Case("one choice", _batches(1, 0, 9.0)),
        Case("a popular expert has no room", _batches(2, 2, 0.9)),
        Case("three choices or more, little room", _batches(3, 1, 0.7)),
        Case("logits of 800 and -800", _batches(2, 1, 0.9, far=800)),
    ),
    refused=("course_lib.ep.moe:route",),
)


# --- 10-4 ----------------------------------------------------------------------------------------


def _tokens(trial: Trial, draw: Draw) -> list[dict[str, Any]]:
    """Other numbers of tokens on each rank, and a weight of 0 on each. On three ranks, rank 1 has
    one token, and all choose expert 0, in the first call no other."""
    hidden, own = draw.size(9, 13), draw.size(1, 3) if trial.n == 2 else trial.n % 3 + 2
    experts = trial.n * own
    choices = min(1 + (trial.n < 3) + draw.call, experts)
    ranks = []
    for rank in range(trial.n):
        tokens = 1 if trial.n == 3 and rank == 1 else draw.size(3, 6) + 2 * (rank % 2)
        weights_TC = draw.normal(tokens, choices)
        weights_TC[-1, 0] *= trial.n == 3 and rank == 1
        liking_TE = draw.normal(tokens, experts).float()
        if trial.n == 3:
            liking_TE[:, 0], liking_TE[:, -1] = 9, -9
        linears = [nn.Linear(hidden, hidden).to(trial.dtype) for _ in range(own)]
        with torch.no_grad():
            for p in nn.ModuleList(linears).parameters():
                p.copy_(draw.normal(*p.shape, scale=0.3))
        ranks.append(
            {
                "x_TD": draw.normal(tokens, hidden),
                "experts_TC": liking_TE.topk(choices).indices,
                "weights_TC": weights_TC,
                "experts": linears,
                UPSTREAM: draw.upstream(tokens, hidden),
            }
        )
    return ranks


def _sum_of(
    given: Given, chosen: Iterable[Tensor] | None = None, *, power: int = 1, sort: bool = False
) -> list[Tensor]:
    """The layer's output per rank, from a single process with all experts; or with a mistake:
    other experts are ``chosen``, weights have a ``power``, rows are left sorted by expert."""
    experts = [expert for own in given["experts"] for expert in own]
    found = []
    for rank, numbers_TC in zip(given.ranks, chosen or given["experts_TC"], strict=True):
        x, weights = rank["x_TD"], rank["weights_TC"]
        all_TED = torch.stack([expert(x) for expert in experts], 1)
        rows_TCD = all_TED[torch.arange(len(x))[:, None], numbers_TC]
        if sort:
            order = rank["experts_TC"].flatten().argsort(stable=True)
            rows_TCD = rows_TCD.flatten(0, 1)[order].view_as(rows_TCD)
        found.append((rows_TCD * weights[..., None] ** power).sum(1))
    return found


def _trained(given: Given) -> dict[str, Any]:
    """Outputs and gradients of the single process."""
    given = Given(given.trial, deepcopy(given.ranks))
    leaves = {
        name: [each.requires_grad_() for each in given[name]] for name in ("x_TD", "weights_TC")
    }
    outputs = _sum_of(given)
    torch.autograd.backward(outputs, given[UPSTREAM])
    found: dict[str, Any] = {"outputs": [each.detach() for each in outputs]}
    found |= {f"gradient of {name}": [each.grad for each in own] for name, own in leaves.items()}
    for number in range(len(given["experts"][0])):
        for name in ("weight", "bias"):
            found[f"gradient of the {name} of experts[{number}]"] = [
                getattr(own[number], name).grad for own in given["experts"]
            ]
    return found


def _renumbered(given: Given, number: Callable[[Tensor, int, int], Tensor]) -> list[Tensor]:
    """``number(experts_TC, rank, experts per rank)``, per rank."""
    own = len(given["experts"][0])
    return [number(each, rank, own) for rank, each in enumerate(given["experts_TC"])]


def _by_expert_first(given: Given) -> list[Tensor]:
    """The experts of the pairs if arrived rows are split as if they were sorted by expert."""
    n, own = given.n, len(given["experts"][0])
    flat = [each.flatten() for each in given["experts_TC"]]
    used = [each.clone() for each in flat]
    for rank in range(n):
        places = [
            (source, int(place))
            for source, each in enumerate(flat)
            for place in each.argsort(stable=True)
            if int(each[place]) // own == rank
        ]
        numbers = sorted(int(flat[source][place]) for source, place in places)
        for (source, place), number in zip(places, numbers, strict=True):
            used[source][place] = number
    return [each.view_as(old) for each, old in zip(used, given["experts_TC"], strict=True)]


def _rows(
    chosen: str, per_rank: Callable[[Given], int], times: int
) -> Callable[[Given, list[Observed]], str]:
    """Look whether a rank sent the rows of its pairs, and back the rows that its experts computed,
    each ``times``, and beside these only small messages such as counts."""

    def look(given: Given, ranks: list[Observed]) -> str:
        own = per_rank(given)
        row = max(bytes_of(x_TD[:1]) for x_TD in given["x_TD"])  # a rank may have no tokens
        pairs = torch.cat([each.flatten() for each in given[chosen]])
        for rank, observed in enumerate(ranks):
            leaving, arriving = given[chosen][rank].numel(), int((pairs // own == rank).sum())
            calls = [(call.op, call.payload) for call in observed.calls]
            wanted = [("all_to_all", row * leaving), ("all_to_all", row * arriving)] * times
            for call in wanted:
                if call not in calls:
                    break
                calls.remove(call)
            else:
                if sum(payload for _, payload in calls) <= 16 * (given.n * given.n * own + leaving):
                    continue
            sent = ", ".join(f"{call.op} of {call.payload:,} bytes" for call in observed.calls)
            return (
                f"expected {2 * times} all-to-alls of rows from rank {rank}: its {leaving} pairs "
                f"({row * leaving:,} bytes), and back the {arriving} that it computes "
                f"({row * arriving:,} bytes){', in forward and in backward' * (times > 1)}; got "
                f"{sent or 'no network operation'}"
            )
        return outside(given, ranks)

    return look


LAYER = OnRanks(
    id="10-4",
    title="there and back",
    names=("moe_layer",),
    axes=("outputs", "gradients"),
    act=runner.layer,
    draw=_tokens,
    expected=_trained,
    terms=64,
    mistakes=tuple(
        Mistake(message, {"outputs": results})
        for message, results in (
            ("the results are summed without their weights", partial(_sum_of, power=0)),
            ("the weights are applied twice", partial(_sum_of, power=2)),
            (
                "rows came back sorted by expert, and were taken for the pairs in order: put each "
                "into its pair's place",
                partial(_sum_of, sort=True),
            ),
            (
                "each rank used its own experts: send the rows to the ranks that hold the experts",
                lambda given: _sum_of(
                    given, _renumbered(given, lambda e, rank, own: e % own + rank * own)
                ),
            ),
            (
                "experts[0] computed all rows of its rank: use the expert that each pair chose",
                lambda given: _sum_of(given, _renumbered(given, lambda e, _, own: e // own * own)),
            ),
            (
                "arrived rows were split as if they were sorted by expert: they arrive by rank, "
                "and within a rank by expert",
                lambda given: _sum_of(given, _by_expert_first(given)),
            ),
        )
    ),
    looks=(
        Look(
            "wire",
            "the rows of the pairs, and no others",
            _rows("experts_TC", lambda given: len(given["experts"][0]), 2),
        ),
    ),
    refused=(
        "course_lib.ep.parallel:ExpertParallelMoE.through_experts",
        "course_lib.ep.parallel:ExpertParallelMoE.own_experts",
        "course_lib.ep.parallel:splits",
        "course_lib.ep.parallel:sorted_by_expert",
        "course_lib.ep.parallel:combine",
    ),
)


# --- 10-5 ----------------------------------------------------------------------------------------


def _one_each(trial: Trial, draw: Draw) -> list[dict[str, Any]]:
    """On three ranks, no token chooses expert 1, rank 1 has one token and rank 2 has none."""
    hidden, alone = draw.size(9, 13), trial.n == 3
    ranks = []
    for rank in range(trial.n):
        tokens = 2 - rank if alone and rank else draw.size(4, 7) + 2 * rank
        experts_T = draw.integers(0, trial.n - 1, tokens)
        experts_T[: tokens // 3 + 1] = 0  # never even
        if alone:
            experts_T[experts_T == 1] = 2
        ranks.append(
            {
                "x_TD": draw.normal(tokens, hidden),
                "experts_T": experts_T.flip(0) if rank % 2 else experts_T,
                "matrix": draw.normal(hidden, hidden, scale=0.3),
            }
        )
    return ranks


def _computed(given: Given, rows: list[Tensor], chosen: Iterable[Tensor]) -> list[Tensor]:
    """Each of ``rows`` after its ``chosen`` expert, per rank."""
    matrices = torch.stack(given["matrix"])
    return [
        torch.tanh(torch.einsum("td,tde->te", x_TD, matrices[numbers_T]))
        for x_TD, numbers_T in zip(rows, chosen, strict=True)
    ]


def _sorted(given: Given, rows: list[Tensor]) -> list[Tensor]:
    """``rows`` in the order of their experts."""
    chosen = given["experts_T"]
    return [row[each.argsort(stable=True)] for row, each in zip(rows, chosen, strict=True)]


def _results(given: Given) -> list[Tensor]:
    return _computed(given, given["x_TD"], given["experts_T"])


RAW = OnRanks(
    id="10-5",
    title="there and back in raw PyTorch",
    names=("through_experts",),
    axes=("outputs",),
    trials=(
        Trial(2),
        Trial(4, dtype=torch.float64),
        Trial(3, name="three ranks, an expert and a rank without tokens"),
        Trial(1),
    ),
    act=runner.raw,
    draw=_one_each,
    expected=lambda given: {"outputs": _results(given)},
    mistakes=tuple(
        Mistake(message, {"outputs": results})
        for message, results in (
            (
                "the rows came back sorted by expert and stayed so: put each into its token's "
                "place",
                lambda given: _sorted(given, _results(given)),
            ),
            (
                "y = returned[order] sorts the rows again: y[order] = returned is the inverse",
                lambda given: _sorted(given, _sorted(given, _results(given))),
            ),
            (
                "the rows were not sorted before they were sent: rows for one rank must be "
                "neighbors",
                lambda given: _computed(
                    given, given["x_TD"], [each.sort().values for each in given["experts_T"]]
                ),
            ),
            (
                "these are the tokens as they were: no expert computed them",
                lambda given: given["x_TD"],
            ),
            (
                "every token went through the expert of its own rank",
                lambda given: _computed(
                    given,
                    given["x_TD"],
                    [torch.full_like(each, rank) for rank, each in enumerate(given["experts_T"])],
                ),
            ),
            (
                "these are the rows that this rank's expert computed: send them back",
                lambda given: [
                    torch.cat(
                        [
                            y[each == rank]
                            for y, each in zip(_results(given), given["experts_T"], strict=True)
                        ]
                    )
                    for rank in range(given.n)
                ],
            ),
        )
    ),
    looks=(
        Look("wire", "the rows there and back, and no others", _rows("experts_T", lambda _: 1, 1)),
    ),
    refused=("course_lib.comm.transfer:issue",),
)

EXERCISES = (by_hand("10-1"), GRADIENT, ROUTING, LAYER, RAW)
