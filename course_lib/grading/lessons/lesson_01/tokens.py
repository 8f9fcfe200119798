"""01-2: how many tokens a GPU must have for data parallelism to compute as long as it sends."""

from __future__ import annotations

import random
from collections.abc import Callable
from numbers import Real
from typing import Any

from torch import Tensor

from course_lib.grading.answers import NotRight, shown
from course_lib.grading.exercise import Case, Function, Instance, Wrong


def _least(n: int, width: int, per_parameter: int, flops: float, gbits: int) -> float:
    return 2 * (n - 1) / n * width / (gbits * 1e9 / 8) * flops / per_parameter


def _by_seconds(n: int, width: int, per_parameter: int, flops: float, gbits: int) -> float:
    """Right too: the seconds of both for one parameter."""
    sending = 16 * width * (n - 1) / (n * gbits * 10**9)
    return sending / (per_parameter / flops)


def _draw(width: int, per_parameter: int, *sizes: int) -> Callable[[random.Random], list[Instance]]:
    """Three links and GPUs, each with another number of ranks."""

    def draw(rng: random.Random) -> list[Instance]:
        return [
            {
                "n": n,
                "width": width,
                "per_parameter": per_parameter,
                "flops": rng.randint(50, 900) * 1e12,
                "gbits": rng.choice((25, 100, 200, 400, 800, 3600)),
            }
            for n in rng.sample(sizes, 3)
        ]

    return draw


def _as_tokens(value: Any) -> float:
    if isinstance(value, Tensor) and value.dim() == 0:
        value = value.item()
    if not isinstance(value, Real) or isinstance(value, bool):
        raise NotRight(f"expected a number of tokens, got {shown(value)}")
    return float(value)


def _times(factor: Callable[[int, int, int], float]) -> Callable[..., float]:
    """The right result times ``factor(n, width, per_parameter)``."""
    return lambda n, width, per_parameter, flops, gbits: (
        _least(n, width, per_parameter, flops, gbits) * factor(n, width, per_parameter)
    )


TOKENS = Function(
    id="01-2",
    title="the tokens that a link wants",
    names=("least_tokens",),
    hints=(
        "Write down the seconds of computing and of sending for a model of P parameters and t "
        "tokens. Where is P on both sides?",
        "Computing: per_parameter P t / flops. Sending: 2(n-1)/n P width over the bytes a second; "
        "gbits are 1e9 bits each. P cancels.",
        "2 * (n - 1) / n * width / (gbits * 1e9 / 8) * flops / per_parameter.",
    ),
    wrong=(
        Wrong(_times(lambda n, width, per: 1 / 8), "Gb/s are bits: a byte has eight of them."),
        Wrong(
            _times(lambda n, width, per: 1 / 64),
            "Gb/s over eight are GB/s: you multiplied.",
        ),
        Wrong(
            _times(lambda n, width, per: 1 / 2),
            "An all-reduce has two halves, and each sends (n-1)/n of the gradients.",
        ),
        Wrong(
            _times(lambda n, width, per: n / (n - 1)),
            "A rank's own piece does not travel: 2(n-1)/n, not 2.",
        ),
        Wrong(_times(lambda n, width, per: n), "That is all ranks together; one GPU is asked for."),
        Wrong(_times(lambda n, width, per: 1 / width), "These are elements: each has width bytes."),
        Wrong(
            _times(lambda n, width, per: per / 6),
            "With full recomputation a parameter costs 8 FLOPs a token: use per_parameter.",
        ),
        Wrong(
            _times(lambda n, width, per: 2 / width),
            "This takes 2 bytes for every gradient: use width.",
        ),
        Wrong(
            _times(lambda n, width, per: per / 2),
            "2 FLOPs are those of the forward: per_parameter has the backward too.",
        ),
        Wrong(
            lambda n, width, per_parameter, flops, gbits: (
                1 / _least(n, width, per_parameter, flops, gbits)
            ),
            "The fraction is upside down: a faster GPU needs more tokens, a faster link fewer.",
        ),
        Wrong(
            _times(lambda n, width, per: 1e9),
            "gbits counts 1e9 bits a second each.",
        ),
        Wrong(
            lambda n, width, per_parameter, flops, gbits: None, words="expected a number of tokens"
        ),
        Wrong(
            lambda n, width, per_parameter, flops, gbits: gbits["beta"], words="raised TypeError"
        ),
    ),
    right=(_by_seconds, lambda *given: float(_least(*given))),
    stub=lambda n, width, per_parameter, flops, gbits: None,
    reference=_least,
    normal=_as_tokens,
    drawn=(
        Case("bfloat16, six FLOPs", _draw(2, 6, 2, 4, 8, 16)),
        Case("float32 gradients", _draw(4, 6, 3, 8, 24, 64)),
        Case("full recomputation", _draw(2, 8, 8, 32, 128, 512)),
        Case("a thousand GPUs and more", _draw(4, 8, 1024, 2048, 16_384)),
    ),
)
