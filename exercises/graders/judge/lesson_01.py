"""Lesson 01, memory, FLOPs and traffic: what the exercises give, and what they expect."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from course_lib.grading.answers import NotRight, shown
from course_lib.grading.draw import Draw
from course_lib.grading.exercise import Case, Function, Instance, Wrong
from course_lib.grading.graders.by_hand import by_hand
from course_lib.grading.graders.runner import lesson_01 as runner
from course_lib.grading.placed import bytes_of
from course_lib.grading.ranked import OnRanks
from course_lib.grading.runner import Observed
from course_lib.grading.trials import TRIALS, Given, Look, Mistake, Trial, outside
from course_lib.ledger import wire

# --- 01-2 ----------------------------------------------------------------------------------------


def _as_tokens(value: Any) -> float:
    number = value.item() if callable(getattr(value, "item", None)) else value
    if not isinstance(number, Real | Decimal) or isinstance(number, bool):
        raise NotRight(f"expected a number of tokens, got {shown(value)}")
    return float(number)


def _least(n: int, width: int, per_parameter: int, flops: float, gbits: int) -> float:
    return 2 * (n - 1) / n * width / (gbits * 1e9 / 8) * flops / per_parameter


def _links(width: int, per_parameter: int, *sizes: int) -> Callable[[random.Random], Any]:
    """Three links and GPUs, each with another number of ranks."""
    return lambda rng: [_link(rng, n, width, per_parameter) for n in rng.sample(sizes, 3)]


def _link(rng: random.Random, n: int, width: int, per_parameter: int) -> Instance:
    rates = {"flops": rng.randint(50, 900) * 1e12, "gbits": rng.choice((25, 100, 200, 400, 3600))}
    return {"n": n, "width": width, "per_parameter": per_parameter, **rates}


def _large(rng: random.Random) -> list[Instance]:
    first, other = rng.sample((1024, 2048, 16_384), 2)
    return _one_by_one(_link(rng, first, 4, 8), _link(rng, other, 2, 6) | {"gbits": 800})


def _one_by_one(call: Instance, other: Instance) -> list[Instance]:
    """Return a call, then one call per argument, with that argument alone taken from ``other``.
    An answer that remembers results by only some of its arguments fails."""
    return [call, *({**call, name: value} for name, value in other.items())]


# each is the right result times a factor, made from (n, width, per_parameter)
FACTORS: Mapping[str, Callable[[int, int, int], float]] = {
    "Gb/s are bits: a byte has eight of them.": lambda n, width, per: 1 / 8,
    "Gb/s divided by eight are GB/s: you multiplied.": lambda n, width, per: 1 / 64,
    "An all-reduce has two halves, and each sends (n-1)/n of the gradients.": lambda *_: 1 / 2,
    "A rank does not send its own shard to itself: 2(n-1)/n, not 2.": lambda n, *_: n / (n - 1),
    "That is all ranks together: return the tokens of one GPU.": lambda n, width, per: n,
    "These are elements: each has width bytes.": lambda n, width, per: 1 / width,
    "A parameter costs 8 FLOPs per token with full recomputation: per_parameter.": (
        lambda n, width, per: per / 6
    ),
    "This takes 2 bytes for every gradient: use width.": lambda n, width, per: 2 / width,
    "2 FLOPs are those of the forward: per_parameter has the backward too.": (
        lambda n, width, per: per / 2
    ),
    "gbits counts 1e9 bits per second each.": lambda n, width, per: 1e9,
}

TOKENS = Function(
    id="01-2",
    title="enough tokens for a link",
    names=("least_tokens",),
    mistakes=(
        *(
            Wrong(lambda *given, by=by: _least(*given) * by(*given[:3]), why)
            for why, by in FACTORS.items()
        ),
        Wrong(
            lambda *given: 1 / _least(*given),
            "The fraction is upside down: a faster GPU needs more tokens, a faster link fewer.",
        ),
    ),
    reference=_least,
    normal=_as_tokens,
    relative=1e-9,
    drawn=(
        Case("bfloat16, six FLOPs", _links(2, 6, 1, 2, 4, 7)),
        Case("float32 gradients", _links(4, 6, 3, 8, 24, 64)),
        Case("full recomputation", _links(2, 8, 8, 32, 128, 500)),
        Case("a thousand GPUs and more", _large),
    ),
)


# --- 01-3 ----------------------------------------------------------------------------------------


def _count(la: int, h: int, a: int, kv: int, f: int, v: int, tied: bool) -> int:
    return la * (2 * h * h + 2 * h * kv * (h // a) + 3 * h * f + 2 * h) + h + v * h * (2 - tied)


def _as_whole(value: Any) -> int:
    if isinstance(value, bool) or not (hasattr(value, "__index__") or isinstance(value, float)):
        raise NotRight(f"expected a whole number, got {shown(value)}")
    if int(value) != value:
        raise NotRight(f"expected a whole number of parameters, got {shown(value)}")
    return int(value)


def _model(rng: random.Random, kv_heads: int, per_kv: int, tied: bool = False) -> Instance:
    """One model with ``per_kv`` query heads per head of keys. With 11, a count by floats that are
    cut off is too small."""
    heads = kv_heads * per_kv
    while True:
        hidden = heads * 2 * rng.randrange(33, 200, 2)
        by_floats = int(2 * hidden**2 * (1 + 1 / 11)), int(hidden * 2 * (1 + 1 / 11) * hidden)
        if per_kv != 11 or max(by_floats) < 2 * hidden * (hidden + hidden // 11):
            break
    return {
        "layers": rng.randint(3, 126),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": rng.randint(301, 20_000),
        "vocab": rng.randrange(30_001, 130_000, 2),
        "tied": tied,
    }


def _models(*per_kv: int) -> Callable[[random.Random], list[Instance]]:
    return lambda rng: [_model(rng, rng.choice((1, 3, 5)), each) for each in per_kv]


def _tied(rng: random.Random) -> list[Instance]:
    call = _model(rng, 2, rng.choice((3, 5, 7)), tied=True)
    other = _model(rng, 1, 2) | {"layers": 1, "hidden": 3 * call["hidden"]}
    return _one_by_one(call, other | {"heads": 2 * call["heads"]})


# what each adds to the right count
Added = Callable[[int, int, int, int, int, int, bool], int]
ADDED: Mapping[str, Added] = {
    "Keys and values have kv_heads heads, not as many as queries.": (
        lambda la, h, a, kv, f, v, tied: la * 2 * h * (h - kv * (h // a))
    ),
    "kv_heads counts heads: each has hidden / heads features.": (
        lambda la, h, a, kv, f, v, tied: la * 2 * h * (kv - kv * (h // a))
    ),
    "The MLP has three matrices: gate, up and down.": lambda la, h, a, kv, f, v, tied: -la * h * f,
    "The norms are left out: two in a block, one after them.": lambda la, h, *_: -(2 * la + 1) * h,
    "A block has two norms: one before attention, one before the MLP.": lambda la, h, *_: -la * h,
    "There is one more norm between the last block and the head.": lambda la, h, *_: -h,
    "Tied embedding and head are one table: it counts once.": (
        lambda la, h, a, kv, f, v, tied: v * h if tied else 0
    ),
    "Where they are not tied, embedding and head are two tables.": (
        lambda la, h, a, kv, f, v, tied: 0 if tied else -v * h
    ),
    "Attention has an output matrix too: o.": lambda la, h, *_: -la * h * h,
    "These linears have no biases.": (
        lambda la, h, a, kv, f, v, tied: la * (2 * kv * (h // a) + 2 * f + 3 * h)
    ),
    "The count was rounded: float32 has 24 bits, so add up whole numbers.": (
        lambda *given: int(torch.tensor(_count(*given)).float()) - _count(*given)
    ),
    "The count was cut off: kv_heads / heads is no exact float, so divide with //.": (
        lambda la, h, a, kv, *_: la * (int(2 * h * h * (1 + kv / a)) - 2 * h * (h + kv * (h // a)))
    ),
}

COUNT = Function(
    id="01-3",
    title="parameters from shapes",
    names=("count",),
    mistakes=(
        *(
            Wrong(lambda *given, more=more: _count(*given) + more(*given), why)
            for why, more in ADDED.items()
        ),
        Wrong(
            lambda la, h, *rest: 12 * la * h * h,
            "12 L h^2 is a rule of thumb: count every matrix.",
        ),
    ),
    reference=_count,
    refused=(
        "course_lib.formulas.parameters:parameter_sizes",
        "course_lib.formulas.parameters:parameter_count",
        "course_lib.formulas.parameters:block_parameter_count",
        "course_lib.model.decoder:build_model",
    ),
    normal=_as_whole,
    drawn=(
        Case("as many heads of keys as of queries", _models(1, 1, 1)),
        Case("grouped queries", _models(2, 7, 11)),
        Case("tied", _tied),
    ),
)


# --- 01-4 ----------------------------------------------------------------------------------------


def _situation(trial: Trial, call: int) -> tuple[list[float], float]:
    """Return the seconds of computing by rank, and the seconds of the all-reduce.

    In their order: equal ranks; a slow link; a late rank 0, for which an all-reduce without a
    barrier waits; ranks whose sum is longer than the all-reduce; a late last rank, which the mean
    and rank 0 hide.
    """
    others = trial.n - 1
    if trial.beside > 1:
        return ([0.7] + [0.6] * others, 1.0) if call else ([1.5] + [0.05] * others, 0.3)
    if trial.n == 3:
        return ([0.5] * trial.n, 0.9) if call else ([0.1] * others + [1.0], 0.6)
    if trial.n == 1:
        return [0.2 + call], 0.0
    return [0.1 if call else 1.0] * trial.n, 1.2 if call else 0.2


def _step(trial: Trial, draw: Draw) -> Any:
    computing, sending = _situation(trial, draw.call)
    scale = 0.05 * float(draw.integers(10, 30))
    elements = draw.size(300, 900)
    return [
        {
            "gradient": draw.tensor(4 * elements + draw.call),
            "computing": scale * seconds,
            "sending": scale * sending,
        }
        for seconds in computing
    ]


def _limits(given: Given, *, together: bool = True, over: Any = max) -> list[str]:
    """Return what each rank says with a barrier or without one. ``over`` makes one time of the
    computing of all ranks; None: each rank has its own."""
    computing, sending = given["computing"], given["sending"][0]
    sent = [sending + (not together) * (max(computing) - own) for own in computing]
    if over is None:
        return [runner.WORDS[a <= b] for a, b in zip(computing, sent, strict=True)]
    return [runner.WORDS[over(computing) <= max(sent)]] * given.n


def _ring(given: Given) -> float:
    return float(wire("all_reduce", bytes_of(given["gradient"][0]), given.n))


def _longer(given: Given, ranks: list[Observed], name: str) -> str:
    return "" if name == "bytes" else "the limit is what takes longer by machine.now()"


def _gradient_sent(given: Given, ranks: list[Observed]) -> str:
    for rank, observed in enumerate(ranks):
        steps = observed.values["steps"]
        if runner.GRADIENT not in steps:
            return (
                f"expected machine.all_reduce(gradient) on rank {rank}, got {_said(steps)}: a step "
                "sums the gradient itself, not a part of it or another tensor"
            )
        if runner.GRADIENT not in steps[(*steps, runner.COMPUTE).index(runner.COMPUTE) :]:
            return (
                f"expected machine.compute() before machine.all_reduce(gradient) on rank {rank}, "
                f"got {_said(steps)}: a step first computes the gradient, and then sends it"
            )
    return outside(given, ranks)


def _said(steps: Sequence[str]) -> str:
    return ", then ".join(steps) or "neither computing nor an all-reduce"


# what the wrong formulas give: the ring's bytes, the bytes of an element and n -> bytes
BYTES: Mapping[str, Callable[[float, int, int], float]] = {
    "not every element has 4 bytes: use gradient.nbytes": lambda ring, size, n: ring * 4 / size,
    "an all-reduce has two halves, and each sends (n-1)/n of the gradient": (
        lambda ring, size, n: ring / 2
    ),
    "that is the gradient itself; a rank sends 2(n-1)/n of it": (
        lambda ring, size, n: ring * n / (2 * (n - 1))
    ),
    "a rank does not send its own shard to itself: 2(n-1)/n, not 2": (
        lambda ring, size, n: ring * n / (n - 1)
    ),
    "these are elements; each has gradient.element_size() bytes": (
        lambda ring, size, n: ring / size
    ),
    "that is what all ranks send together: return the bytes of one rank": (
        lambda ring, size, n: ring * n
    ),
}
DISAGREE = (
    "the ranks disagree: a step is as long as its slowest rank; take the maximum over the ranks"
)
LIMITS: Sequence[tuple[str, Callable[[Given], list[str]]]] = (
    (DISAGREE, lambda given: _limits(given, over=None)),
    (DISAGREE, lambda given: _limits(given, together=False, over=None)),
    (
        "the times of the ranks are added, but the ranks compute at the same time: take the "
        "maximum over the ranks",
        lambda given: _limits(given, over=sum),
    ),
    (
        "this is not the time of the slowest rank, which is the last one here: take the maximum "
        "over the ranks, not the mean or rank 0's time",
        lambda given: (
            _limits(given, over=lambda times: sum(times) / len(times))
            if max(given["computing"]) == given["computing"][-1]
            else []
        ),
    ),
    (
        "an all-reduce that some ranks begin early contains the wait for the rank that is late: let"
        " all ranks begin it together, after machine.barrier(), and take the maximum of compute() "
        "over the ranks, not the minimum",
        lambda given: _limits(given, together=False),
    ),
)

LIMIT = OnRanks(
    id="01-4",
    title="which limit binds",
    names=("limit",),
    act=runner.limit,
    draw=_step,
    expected=lambda given: {"bytes": _ring(given), "limit": _limits(given)},
    mistakes=(
        *(
            Mistake(
                why,
                {
                    "bytes": lambda given, wrong=wrong: wrong(
                        _ring(given), given["gradient"][0].element_size(), given.n
                    )
                },
            )
            for why, wrong in BYTES.items()
        ),
        *(Mistake(why, {"limit": limits}) for why, limits in LIMITS),
    ),
    explain=_longer,
    trials=(
        TRIALS[0],
        Trial(
            2,
            beside=2,
            dtype=torch.float64,
            strided=True,
            name="groups 0, 2 and 1, 3, one rank is late",
        ),
        Trial(3, dtype=torch.bfloat16, name="three ranks, the last one is late"),
        Trial(1),
    ),
    looks=(Look("wire", "the gradient is sent", _gradient_sent),),
)


# --- 01-5 ----------------------------------------------------------------------------------------

# What each rank has: the fullest first, before the ranks are shuffled. No two have equal bytes.
KINDS = {
    4: ("plain", "narrow", "views", "tied"),
    2: ("plain", "views"),
    3: ("small part", "plain", "narrow"),
    1: ("views",),
}
LARGE = 500_000  # bytes of a storage that float32 can no longer count exactly: 36 times this
MOST_SENT = 4096  # bytes of one rank's calls


def _plans(trial: Trial, draw: Draw) -> Any:
    unit = 8 * draw.size(100, 300) + (LARGE if trial.n == 3 else 0)
    order = draw.integers(0, 2**30, trial.n).argsort().tolist()
    if trial.n == 4:  # a loop that leaves out the last rank or the first one is wrong
        order.remove(0)
        order.insert(0 if draw.call else trial.n - 1, 0)
    return [
        {"kind": KINDS[trial.n][kind], "unit": unit + 8 * rank, "beside": 3 + 2 * rank}
        for rank, kind in enumerate(order)
    ]


def _storages(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of all storages, each once."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())


def _parts_shown(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of the largest tensor in each storage."""
    found: dict[int, int] = {}
    for t in tensors:
        key = t.untyped_storage().data_ptr()
        found[key] = max(found.get(key, 0), t.nbytes)
    return sum(found.values())


def _sizes(given: Given, count: Callable[[Sequence[Tensor]], int] = _storages) -> list[int]:
    return [count(runner.tensors_of(plan)) for plan in given.ranks]


def _chosen(sizes: Sequence[int], pick: Callable[..., int] = max) -> dict[str, Any]:
    return {"rank": sizes.index(pick(sizes)), "bytes": pick(sizes)}


def _pair(message: str, both: Callable[[Given], dict[str, Any]]) -> Mistake:
    return Mistake(
        message,
        {name: lambda given, name=name: both(given)[name] for name in ("rank", "bytes")},
    )


def _who(given: Given, ranks: list[Observed], name: str) -> str:
    pairs = [(each.values["rank"], each.values["bytes"]) for each in ranks]
    if any(pair != pairs[0] for pair in pairs):
        return f"the ranks disagree: {', '.join(map(str, pairs))}"
    if pairs[0][1] == sum(_sizes(given)):
        return "this is what all ranks store together: return the bytes of the fullest rank"
    if name == "rank" and pairs[0][1] == max(_sizes(given)):
        return f"the bytes are right, but rank {pairs[0][0]} does not have them"
    return ""


def _small(given: Given, ranks: list[Observed]) -> str:
    for rank, observed in enumerate(ranks):
        if (sent := sum(call.payload for call in observed.calls)) > MOST_SENT:
            return (
                f"expected at most {MOST_SENT:,} bytes from rank {rank}, got {sent:,}: sizes are "
                "enough, send no tensors"
            )
    return ""


FULLEST = OnRanks(
    id="01-5",
    title="the fullest rank, in raw PyTorch",
    names=("fullest",),
    trials=(
        Trial(4, name="four ranks, views and ties"),
        Trial(2),
        Trial(3, name="three ranks, a part of a large storage"),
        Trial(1),
    ),
    act=runner.fullest,
    draw=_plans,
    expected=lambda given: _chosen(_sizes(given)),
    mistakes=(
        _pair(
            "every rank names itself: nothing was gathered",
            lambda given: {"rank": list(range(given.n)), "bytes": _sizes(given)},
        ),
        *(
            _pair(message, lambda given, count=count: _chosen(_sizes(given, count)))
            for count, message in (
                (
                    lambda tensors: int(torch.tensor(_storages(tensors)).float()),
                    "the bytes were rounded: float32 has 24 bits, so send whole numbers (int64)",
                ),
                (
                    _parts_shown,
                    "a storage stays in memory in full, however small a part a tensor shows",
                ),
                (
                    lambda tensors: sum(t.nbytes for t in tensors),
                    "tensors that share a storage are counted several times",
                ),
                (
                    lambda tensors: sum(t.numel() for t in tensors),
                    "these are elements, not bytes",
                ),
                (
                    lambda tensors: sum(4 * t.numel() for t in tensors),
                    "not every element has 4 bytes: there are other dtypes",
                ),
                (
                    lambda tensors: sum(t.untyped_storage().nbytes() for t in tensors),
                    "storages of several tensors are counted several times",
                ),
                (len, "this is the number of tensors"),
            )
        ),
        _pair(
            "expected (rank, bytes): these are exchanged",
            lambda given: dict(
                zip(("bytes", "rank"), _chosen(_sizes(given)).values(), strict=True)
            ),
        ),
        _pair("the last rank is left out", lambda given: _chosen(_sizes(given)[:-1])),
        _pair(
            "rank 0 is left out",
            lambda given: _chosen([0, *_sizes(given)[1:]]),
        ),
        _pair("this is the rank with the least", lambda given: _chosen(_sizes(given), min)),
    ),
    explain=_who,
    looks=(Look("wire", "sizes alone are sent", _small),),
    refused=("course_lib.comm.transfer:issue", "course_lib.trace.memory:state_bytes"),
)

EXERCISES = (by_hand("01-1"), TOKENS, COUNT, LIMIT, FULLEST)
