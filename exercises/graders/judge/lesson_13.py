"""Lesson 13, inference: what the exercises give, and what they expect."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from course_lib.grading.answers import NotRight, shown
from course_lib.grading.draw import Draw
from course_lib.grading.exercise import Case, Function, Instance, Wrong
from course_lib.grading.graders.by_hand import by_hand
from course_lib.grading.ranked import OnRanks
from course_lib.grading.runner_placed import call_forward, call_raw
from course_lib.grading.trials import TRIALS, Given, Look, Mistake, Observed, Trial, at_most

# --- 13-2 ----------------------------------------------------------------------------------------


def _fitting(
    memory: int, weights: int, layers: int, kv_heads: int, head_dim: int, room: int, tp: int,
    *, heads: Callable[[int, int], int] = lambda kv_heads, tp: max(kv_heads // tp, 1),
    tensors: int = 2, own: Callable[[int, int], int] = lambda weights, tp: weights // tp,
    itemsize: int = 2, up: bool = False, least: int | None = 0,
) -> int:  # fmt: skip
    """Return how many requests fit, or what a mistake computes."""
    left = memory - own(weights, tp)
    each = tensors * layers * heads(kv_heads, tp) * head_dim * itemsize * room
    found = -(-left // each) if up else left // each
    return found if least is None else max(found, least)


def _sizes(rng: random.Random, kv_heads: int, tp: int, requests: int, spare: float) -> Instance:
    """Sizes of a rank on which ``requests`` fit; ``spare`` of a further one is left over."""
    layers, head_dim, room = rng.randint(10, 90), 8 * rng.randint(5, 20), rng.randint(300, 5000)
    weights = tp * rng.randint(10**9, 2 * 10**10)
    each = 2 * layers * max(kv_heads // tp, 1) * head_dim * 2 * room
    memory = weights // tp + requests * each + int(spare * each)
    return {
        "memory": memory, "weights": weights, "layers": layers, "kv_heads": kv_heads,
        "head_dim": head_dim, "room": room, "tp": tp,
    }  # fmt: skip


def _some(ranks: tuple[int, ...], heads: tuple[int, ...], *, fewer: bool = False,
          exact: bool = False) -> Callable[[random.Random], list[Instance]]:  # fmt: skip
    """Five calls with ``heads`` per rank, or in all if they are ``fewer`` than the ranks."""

    def draw(rng: random.Random) -> list[Instance]:
        drawn = []
        for _ in range(5):
            tp, spare = rng.choice(ranks), 0.0 if exact else rng.uniform(0.2, 0.8)
            kv_heads = rng.choice(heads) * (1 if fewer else tp)
            drawn.append(_sizes(rng, kv_heads, tp, rng.randint(7, 90), spare))
        return drawn

    return draw


def _too_small(rng: random.Random) -> list[Instance]:
    """Calls in which weights do not fit, or no request beside them, among others."""
    drawn = [_sizes(rng, 6, 2, requests, 0.5) for requests in (rng.randint(7, 90), 0, 3, 5)]
    for sizes in drawn[2:]:
        sizes["memory"] = sizes["weights"] // sizes["tp"] * rng.randint(5, 9) // 10
    return drawn


def _as_count(value: Any) -> int:
    whole = value.is_integer() if isinstance(value, float) else hasattr(value, "__index__")
    if isinstance(value, bool) or not whole:
        raise NotRight(f"expected a whole number of requests, got {shown(value)}")
    return int(value)


ROOM = Function(
    id="13-2",
    title="requests that fit",
    names=("fitting",),
    mistakes=tuple(
        Wrong(partial(_fitting, **mistake), message)
        for mistake, message in (
            (
                {"heads": lambda kv_heads, tp: kv_heads},
                "Tensor parallelism shards the heads of the cache too: a rank has kv_heads / tp.",
            ),
            (
                {"heads": lambda kv_heads, tp: kv_heads // tp or kv_heads},
                "With fewer heads than ranks each rank holds one head, not all.",
            ),
            (
                {"tensors": 1},
                "A request takes twice as much: keys and values are both stored, with 2 bytes per "
                "element.",
            ),
            (
                {"tensors": 1, "itemsize": 1},
                "A request takes four times as much: keys and values are both stored, with 2 bytes "
                "per element.",
            ),
            ({"own": lambda weights, tp: weights}, "A rank holds weights / tp, not all weights."),
            ({"own": lambda weights, tp: 0}, "The weights take memory too."),
            ({"itemsize": 4}, "An element of the cache has 2 bytes here."),
            ({"up": True}, "Rounded up: the last request does not fit."),
            ({"least": None}, "If not even the weights fit, return 0, not a negative number."),
            ({"least": 1}, "If not even the weights fit, no request does: return 0."),
        )
    ),
    reference=_fitting,
    refused=("course_lib.formulas.inference:cache_bytes",),
    normal=_as_count,
    drawn=(
        Case("one rank", _some((1,), (2, 4, 8, 24))),
        Case("heads sharded by tp", _some((2, 3, 4, 8), (2, 3, 4, 5))),
        Case("fewer heads than ranks", _some((8, 16), (1, 2, 4), fewer=True)),
        Case("no byte left over", _some((2, 3), (2, 3, 4), exact=True)),
        Case("weights that do not fit", _too_small),
    ),
)


# --- 13-3 ----------------------------------------------------------------------------------------


def _logits(trial: Trial, draw: Draw) -> list[dict[str, Any]]:
    """Logits of seven kinds of requests. On three ranks, shards have different sizes; in the second
    call, there is one request, and one token on rank 0."""
    wide = 190 if trial.dtype == torch.bfloat16 else 4
    equal = wide + draw.size(0, 5)
    sizes = [wide + draw.size(0, 5) if trial.n == 3 else equal for _ in range(trial.n)]
    alone = trial.n == 3 and draw.call
    sizes[0] = 1 if alone else sizes[0]
    first = [sum(sizes[:rank]) for rank in range(trial.n)]
    logits_BV = draw.tensor(1 if alone else 7 * trial.n + draw.size(0, 2), sum(sizes))
    for row, request_V in enumerate(logits_BV):
        one, other = row % trial.n, (row + 1) % trial.n
        place, second = (first[rank] + row * 7 % sizes[rank] for rank in (one, other))
        kind, top = row // trial.n % 7, request_V.max() + 1.3
        if kind == 1:  # equal logits on two ranks
            request_V[place] = request_V[second] = top
        elif kind == 2:  # logits that are nearly equal
            request_V[second], request_V[place] = top, top * (1 + 8 * torch.finfo(top.dtype).eps)
        elif kind == 3:  # all below zero
            request_V -= top
        elif kind == 4:  # equal logits everywhere
            request_V.fill_(-1.5)
        elif kind == 5:  # zeros of both signs
            request_V.fill_(-1.5)
            request_V[min(place, second)], request_V[max(place, second)] = -0.0, 0.0
        elif kind == 6:  # one finite logit
            request_V.fill_(-torch.inf)[place] = -1.5
    shards = logits_BV.split(sizes, 1)
    return [{"logits_BVt": shards[rank], "first": first[rank]} for rank in range(trial.n)]


def _whole(given: Given) -> Tensor:
    return torch.cat(given["logits_BVt"], 1)


def _chosen(given: Given) -> Tensor:
    return _whole(given).argmax(1)


def _own(given: Given, *, numbered: bool) -> list[Tensor]:
    """The best token of each rank's shard."""
    return [
        logits.argmax(1) + numbered * first
        for logits, first in zip(given["logits_BVt"], given["first"], strict=True)
    ]


def _winner(given: Given, *, dtype: torch.dtype | None = None, last: bool = False) -> Tensor:
    """The rank with the largest logit, compared in ``dtype``; of equal ones the first or last."""
    best_nB = torch.stack([logits.max(1).values.to(dtype) for logits in given["logits_BVt"]])
    return given.n - 1 - best_nB.flip(0).argmax(0) if last else best_nB.argmax(0)


def _of(given: Given, winner_B: Tensor, *, numbered: bool = True) -> Tensor:
    return torch.stack(_own(given, numbered=numbered)).gather(0, winner_B[None])[0]


ROUNDED = "nearly equal logits were taken for equal: compare them in their own dtype"
LOWEST = "of equal logits the lowest token wins"

SAME_TOKEN = OnRanks(
    id="13-3",
    title="the same token on every rank",
    names=("greedy",),
    axes=("outputs",),
    trials=(
        *TRIALS[:3],
        Trial(2, dtype=torch.bfloat16, name="two ranks, bfloat16"),
        TRIALS[3],
    ),
    act=call_forward,
    draw=_logits,
    expected=lambda given: {"outputs": _chosen(given)},
    hang="Ranks may have different numbers of tokens, so their logits cannot be gathered as they "
    "are; send one logit and one token per request",
    mistakes=tuple(
        Mistake(message, {"outputs": results})
        for message, results in (
            (
                "each rank took the best token of its own shard, numbered within the shard",
                partial(_own, numbered=False),
            ),
            (
                "each rank took the best token of its own shard: compare over the ranks",
                partial(_own, numbered=True),
            ),
            (
                "the token is numbered within the shard that it is in: add `first` before you send",
                lambda given: _of(given, _winner(given), numbered=False),
            ),
            ("this is the rank that has the token, not the token", _winner),
            (LOWEST, lambda given: _of(given, _winner(given, last=True))),
            (LOWEST, lambda given: _whole(given).shape[1] - 1 - _whole(given).flip(1).argmax(1)),
            *(
                (ROUNDED, lambda given, dtype=dtype: _of(given, _winner(given, dtype=dtype)))
                for dtype in (torch.int64, torch.bfloat16, torch.float16, torch.float32)
            ),
            (
                "numbers of tokens were rounded: bfloat16 has 8 bits, send them as integers",
                lambda given: _chosen(given).to(torch.bfloat16).long(),
            ),
            ("this is the least likely token", lambda given: _whole(given).argmin(1)),
            (
                "this is the sum of the tokens of all ranks",
                lambda given: torch.stack(_own(given, numbered=True)).sum(0),
            ),
        )
    ),
    looks=(
        Look(
            "wire",
            "a logit and a token per request",
            at_most(
                lambda given, rank: 16 * len(given["logits_BVt"][0]),
                "a logit and a token per request have 16 bytes or less; do not gather the logits",
            ),
        ),
    ),
    refused=("course_lib.inference.sampling:choose",),
)


# --- 13-4 ----------------------------------------------------------------------------------------


def _cache(trial: Trial, draw: Draw) -> list[dict[str, Tensor]]:
    """Three requests or more: scores near 0, in the hundreds, and all far below zero. On three
    ranks, one head, and one row on rank 0; in the second call, one request."""
    least = trial.n == 3
    requests, heads, features = draw.size(3, 4), draw.size(2, 4), draw.size(3, 7)
    requests, heads = 1 if least and draw.call else requests, 1 if least else heads
    q_BHK = draw.normal(requests, heads, features)
    q_BHK[1:2] *= 100
    q_BHK[2:3, :, 0] = -100
    ranks = []
    for rank in range(trial.n):
        rows = (1 if least else draw.size(1, 5)) + rank
        k_BTHK, v_BTHK = (draw.normal(requests, rows, heads, features) for _ in range(2))
        k_BTHK[2:3, ..., 0] += 12
        ranks.append({"q_BHK": q_BHK, "k_BTHK": k_BTHK, "v_BTHK": v_BTHK})
    return ranks


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention on the rows of k and v, and their scores (B, H, T)."""
    scores_BHT = torch.einsum("bhk,bthk->bht", q, k) * scale
    return torch.einsum("bht,bthk->bhk", scores_BHT.softmax(-1), v), scores_BHT


def _attention(given: Given, *, power: float = -0.5) -> Tensor:
    q = given["q_BHK"][0]
    k, v = (torch.cat(given[name], 1) for name in ("k_BTHK", "v_BTHK"))
    return _attend(q, k, v, q.shape[-1] ** power)[0]


def _parts(given: Given) -> list[tuple[Tensor, Tensor]]:
    return [
        _attend(rank["q_BHK"], rank["k_BTHK"], rank["v_BTHK"], rank["q_BHK"].shape[-1] ** -0.5)
        for rank in given.ranks
    ]


def _joined(given: Given, weight: Callable[[Tensor], Tensor]) -> Tensor:
    """The average of the ranks' results, weighted by ``weight`` of their scores."""
    outs, scores = zip(*_parts(given), strict=True)
    weights = torch.stack([weight(each) for each in scores])[..., None]
    return (torch.stack(outs) * weights).sum(0) / weights.sum(0)


def _below_maximum(scores: Tensor) -> Tensor:
    return (scores - scores.amax(-1, keepdim=True)).exp().sum(-1)


JOIN = OnRanks(
    id="13-4",
    title="a cache in shards",
    names=("attend",),
    axes=("outputs",),
    act=call_forward,
    draw=_cache,
    expected=lambda given: {"outputs": _attention(given)},
    terms=2048,  # scores of several hundred: exp multiplies their rounding errors
    mistakes=tuple(
        Mistake(message, {"outputs": results})
        for message, results in (
            (
                "each rank has attention on its own rows alone",
                lambda given: [out for out, _ in _parts(given)],
            ),
            (
                "the results of the ranks are summed: weight each by its share of the sum of the "
                "exponentials",
                lambda given: sum(out for out, _ in _parts(given)),
            ),
            (
                "the results of the ranks are averaged: weight each by its share of the sum of the "
                "exponentials",
                lambda given: _joined(given, lambda scores: torch.ones_like(scores[..., 0])),
            ),
            (
                "the results of the ranks are weighted by their numbers of rows: weight each by "
                "its share of the sum of the exponentials",
                lambda given: _joined(
                    given, lambda scores: torch.full_like(scores[..., 0], scores.shape[-1])
                ),
            ),
            (
                "each rank subtracted its own maximum, and the maxima differ: multiply each sum by "
                "exp(own maximum - maximum of all ranks)",
                lambda given: _joined(given, _below_maximum),
            ),
            (
                "exp of a large score is inf, so that inf/inf is nan, and exp of all far below "
                "zero is 0, so that 0/0 is nan: subtract the maximum, or the log-sum-exp, first",
                lambda given: _joined(given, lambda scores: scores.exp().sum(-1)),
            ),
            ("divide the scores by the root of K", lambda given: _attention(given, power=0)),
            (
                "divide the scores by the root of K, not by K",
                lambda given: _attention(given, power=-1),
            ),
        )
    ),
    looks=(
        Look(
            "wire",
            "no row of the cache is sent",
            at_most(
                lambda given, rank: (
                    given["q_BHK"][0][..., 0].numel()
                    * (given["q_BHK"][0].shape[-1] + 2)
                    * given["q_BHK"][0].element_size()
                ),
                "send a result of K elements per head, and at most two for its weight; the rows of "
                "the cache are not sent",
            ),
        ),
    ),
    refused=(
        "course_lib.inference.context:attend_part",
        "course_lib.inference.context:join_parts",
    ),
)


# --- 13-5 ----------------------------------------------------------------------------------------

MARGIN = 1e-3  # of the likeliest token over the second: rounding does not decide


def _model(trial: Trial, draw: Draw) -> list[dict[str, Any]]:
    """On three ranks one request and one inner feature per rank; in the second call, one token."""
    least = trial.n == 3
    batch, hidden, new = draw.size(2, 4), draw.size(5, 9), draw.size(4, 7)
    inner, vocab = draw.size(2, 4), draw.size(5, 9)
    batch, inner, new = (1, 1, 1 if draw.call else new) if least else (batch, inner, new)
    while True:
        tokens_B = draw.integers(0, trial.n * vocab - 1, batch)
        embedding_VD = draw.normal(trial.n * vocab, hidden)
        ranks = [
            {
                "tokens_B": tokens_B,
                "embedding_VD": embedding_VD,
                "up_FtD": draw.normal(inner, hidden),
                "down_DFt": draw.normal(hidden, inner),
                "head_VtD": draw.normal(vocab, hidden),
                "new": new,
            }
            for _ in range(trial.n)
        ]
        if _generate(Given(trial, ranks), margin=MARGIN):
            return ranks


def _generate(
    given: Given, *, relu: bool = True, residuals: float = 1, summed: bool = True,
    choice: str = "all", margin: float = 0.0,
) -> list[Tensor]:  # fmt: skip
    """The tokens (B, new) of each rank, with a mistake; [] if two logits are within ``margin``."""
    tokens, embedding_VD = given["tokens_B"], given["embedding_VD"][0]
    chosen = []
    for _ in range(given["new"][0]):
        x_nBD = torch.stack([embedding_VD[each] for each in tokens])
        parts = []
        for x_BD, up, down in zip(x_nBD, given["up_FtD"], given["down_DFt"], strict=True):
            h = x_BD @ up.T
            parts.append((h.relu() if relu else h) @ down.T)
        y_nBD = residuals * x_nBD + (sum(parts) if summed else torch.stack(parts))
        z_nBV = torch.stack([y @ w.T for y, w in zip(y_nBD, given["head_VtD"], strict=True)])
        z_BV, size = torch.cat(list(z_nBV), 1), z_nBV.shape[2]
        top_B2 = z_BV.topk(2).values
        if bool((top_B2[:, 0] - top_B2[:, 1] < margin).any()):
            return []
        winner = z_BV.argmin(1) if choice == "least" else z_BV.argmax(1)
        tokens = [winner % size if choice == "no offset" else winner] * given.n
        if choice == "own":
            tokens = [z.argmax(1) + rank * size for rank, z in enumerate(z_nBV)]
        chosen.append(tokens)
    return [torch.stack(each, 1) for each in zip(*chosen, strict=True)]


def _right(given: Given) -> Tensor:
    return given.expected["outputs"][0]


def _sum_bytes(given: Given) -> int:
    x_D = given["embedding_VD"][0][0]
    return len(given["tokens_B"][0]) * len(x_D) * x_D.element_size()


def _one_sum(given: Given, ranks: list[Observed]) -> str:
    size, new = _sum_bytes(given), given["new"][0]
    for rank, observed in enumerate(ranks):
        sums = [(call.op, call.payload) for call in observed.calls].count(("all_reduce", size))
        if sums != new:
            return (
                f"expected {new} all-reduces of {size:,} bytes from rank {rank}, one sum of y per "
                f"new token, got {sums}"
            )
    return ""


GREEDY = OnRanks(
    id="13-5",
    title="a greedy loop in raw PyTorch",
    names=("generate",),
    axes=("outputs",),
    trials=(Trial(2), Trial(4, dtype=torch.float64, strided=True), Trial(3), Trial(1)),
    act=call_raw,
    draw=_model,
    expected=lambda given: {"outputs": _generate(given)},
    mistakes=tuple(
        Mistake(message, {"outputs": results})
        for message, results in (
            (
                "every rank added x before the sum, so y contains it n times: add it after the sum",
                lambda given: _generate(given, residuals=given.n),
            ),
            ("x is missing in y = x + ...", partial(_generate, residuals=0)),
            ("relu is missing", partial(_generate, relu=False)),
            (
                "the parts of y are not summed over the ranks: all-reduce them before the head",
                partial(_generate, summed=False),
            ),
            (
                "ranks took different tokens, each the best of its own shard: choose one token for "
                "all ranks",
                partial(_generate, choice="own"),
            ),
            (
                "the parts of y are not summed, and each rank took the best token of its own shard",
                partial(_generate, summed=False, choice="own"),
            ),
            (
                "the token is numbered within the shard that it is in: add rank * len(head)",
                partial(_generate, choice="no offset"),
            ),
            ("this is the least likely token each time", partial(_generate, choice="least")),
            (
                "the first column is the token that was given: return the new tokens only",
                lambda given: torch.cat((given["tokens_B"][0][:, None], _right(given)[:, :-1]), 1),
            ),
            ("this is the last token alone: return all new ones", lambda g: _right(g)[:, -1]),
            (
                "expected (B, new), a row per request; these are the tokens by step",
                lambda given: _right(given).T.contiguous(),
            ),
        )
    ),
    looks=(
        Look("wire", "one sum per token", _one_sum),
        Look(
            "wire",
            "a logit and a token per choice",
            at_most(
                lambda given, rank: (
                    given["new"][0] * (_sum_bytes(given) + 16 * len(given["tokens_B"][0]))
                ),
                "beside the sums, a logit and a token per request have 16 bytes or less; do not "
                "gather the logits",
            ),
        ),
    ),
    refused=("course_lib.comm.transfer:issue",),
)

EXERCISES = (by_hand("13-1"), ROOM, SAME_TOKEN, JOIN, GREEDY)
