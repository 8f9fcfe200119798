"""10-3: which experts serve a token, and with which weight."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch

from course_lib import ep
from course_lib.grading.answers import NotRight, shown
from course_lib.grading.exercise import Case, Function, Instance, Wrong

Routes = list[dict[int, float]]


def _softmax(logits: list[float]) -> list[float]:
    powers = [math.exp(each) for each in logits]
    return [each / sum(powers) for each in powers]


def _route(
    logits: list[list[float]],
    choices: int,
    room: int,
    *,
    shared_out: Callable[[int], bool] = lambda choices: choices > 1,
    by_choice: bool = True,
    limited: bool = True,
    after: bool = False,
    best: bool = True,
    room_of_each_choice: bool = False,
) -> Routes:
    """Right, or with a mistake."""
    wanted: list[list[int]] = []
    weights: list[list[float]] = []
    for token in logits:
        order = sorted(range(len(token)), key=lambda expert: -token[expert] if best else
                       token[expert])[:choices]  # fmt: skip
        p = _softmax(token)
        total = sum(p[expert] for expert in order) if shared_out(choices) else 1.0
        wanted.append(order)
        weights.append([p[expert] / total for expert in order])
    places = [(t, c) for c in range(choices) for t in range(len(logits))]
    if not by_choice:
        places.sort()
    taken: dict[Any, int] = {}
    served: Routes = [{} for _ in logits]
    for t, c in places:
        expert = wanted[t][c]
        key = (expert, c) if room_of_each_choice else expert
        taken[key] = taken.get(key, 0) + 1
        if taken[key] <= room or not limited:
            served[t][expert] = weights[t][c]
    if after:
        served = [{e: w / sum(own.values()) for e, w in own.items()} for own in served]
    return served


def _but(**mistake: Any) -> Callable[[list[list[float]], int, int], Routes]:
    return lambda logits, choices, room: _route(logits, choices, room, **mistake)


def _normal(value: Any) -> Routes:
    if not isinstance(value, list | tuple) or not all(isinstance(each, dict) for each in value):
        raise NotRight(f"a list of dicts is wanted, one for each token, not {shown(value)}")
    try:
        return [
            {int(expert): float(weight) for expert, weight in sorted(each.items())}
            for each in value
        ]
    except (TypeError, ValueError):
        raise NotRight(
            f"a dict goes from the number of an expert to a weight; look at {shown(value)}"
        ) from None


def _draw(choices: int, popular: float, share: float) -> Callable[..., list[Instance]]:
    """Two batches; expert 0 is wanted more by ``popular``; ``share`` of an even load fits."""

    def draw(rng: random.Random) -> list[Instance]:
        found: list[Instance] = []
        for _ in range(2):
            tokens, experts = rng.randint(5, 7), rng.randint(4, 5)
            logits = [
                [round(round(rng.gauss(popular if e == 0 else 0.0, 1.0), 2) + e / 1000, 3) for e in
                 range(experts)]
                for _ in range(tokens)
            ]  # fmt: skip
            room = math.ceil(share * tokens * choices / experts)
            found.append({"logits": logits, "choices": choices, "room": room})
        return found

    return draw


def _by_torch(logits: list[list[float]], choices: int, room: int) -> Routes:
    p_TE = torch.tensor(logits, dtype=torch.float64).softmax(-1)
    weights_TC, experts_TC = p_TE.topk(choices)
    if choices > 1:
        weights_TC = weights_TC / weights_TC.sum(-1, keepdim=True)
    left = [room] * p_TE.shape[1]
    served: Routes = [{} for _ in logits]
    for experts_T, weights_T in zip(experts_TC.T.tolist(), weights_TC.T.tolist(), strict=True):
        for token, (expert, weight) in enumerate(zip(experts_T, weights_T, strict=True)):
            if left[expert]:
                left[expert] -= 1
                served[token][expert] = weight
    return served


def _by_library(logits: list[list[float]], choices: int, room: int) -> Routes:
    routes = ep.route(torch.tensor(logits, dtype=torch.float64), choices, room)
    served: Routes = [{} for _ in logits]
    for experts_T, weights_T in zip(routes.experts_KT, routes.weights_KT, strict=True):
        for token, expert in enumerate(experts_T.tolist()):
            if expert >= 0:
                served[token][expert] = float(weights_T[token])
    return served


ROUTING = Function(
    id="10-3",
    title="who serves a token",
    names=("route",),
    hints=(
        "Softmax over all experts first. What is divided, once the best are chosen, and what if "
        "only one is? Then hand out the room.",
        "The weights of the chosen are divided by their sum when there are two or more. Room is "
        "handed out to the first choices of all tokens, in order, and only then to second ones.",
        "for c in range(choices): for t in range(tokens): expert = order[t][c]; if taken[expert] < "
        "room: taken[expert] += 1; served[t][expert] = weight[t][c].",
    ),
    wrong=(
        Wrong(
            _but(shared_out=lambda choices: False),
            "These are the probabilities over all experts: with two choices or more they are "
            "divided by the sum of the chosen.",
        ),
        Wrong(
            _but(shared_out=lambda choices: True),
            "With one choice the weight is its probability: divided by itself it would always be "
            "1, and the router would learn nothing.",
        ),
        Wrong(_but(limited=False), "Nothing is dropped: an expert has room for `room` pairs."),
        Wrong(
            _but(by_choice=False),
            "Room was handed out token by token: all first choices come before any second one.",
        ),
        Wrong(
            _but(room_of_each_choice=True),
            "First and second choices share the room of an expert.",
        ),
        Wrong(
            _but(after=True),
            "The weights of a token were divided again after pairs were dropped: what finds no "
            "room is missing in the sum.",
        ),
        Wrong(_but(best=False), "These are the experts with the smallest logits."),
        Wrong(lambda logits, choices, room: None, words="a list of dicts is wanted"),
        Wrong(lambda logits, choices, room: [[0]] * len(logits), words="a list of dicts is wanted"),
        Wrong(lambda logits, choices, room: [{} for _ in logits], words=": expected "),
        Wrong(_by_library, words="this is what you are asked to write"),
    ),
    right=(_by_torch, lambda *given: tuple(_route(*given))),
    stub=lambda logits, choices, room: None,
    reference=_by_library,
    normal=_normal,
    relative=1e-5,  # softmax in float32
    drawn=(
        Case("two choices, room for all", _draw(2, 0.0, 5.0)),
        Case("one choice", _draw(1, 0.0, 5.0)),
        Case("a popular expert has no room", _draw(2, 1.5, 1.0)),
        Case("three choices, little room", _draw(3, 1.0, 0.7)),
    ),
    refused=("course_lib.ep.moe:route",),
)
