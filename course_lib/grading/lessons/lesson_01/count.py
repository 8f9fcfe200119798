"""01-3: the parameters of a decoder of the llama kind, from its shapes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from course_lib.grading.answers import NotRight, shown
from course_lib.grading.exercise import Case, Function, Instance, Wrong
from course_lib.model import ModelConfig, parameter_count

Count = Callable[[int, int, int, int, int, int, bool], int]


def _right(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, tied: bool
) -> int:
    """The library's count."""
    shapes = (layers, hidden, heads, kv_heads, ffn)
    return parameter_count(ModelConfig("llama", *shapes, vocab=vocab, tied=tied))


def _on_meta(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, tied: bool
) -> int:
    """Right too: modules without memory."""
    kv = hidden // heads * kv_heads
    linears = [(hidden, hidden)] * 2 + [(hidden, kv)] * 2 + [(hidden, ffn)] * 3
    with torch.device("meta"):
        block = nn.ModuleList(nn.Linear(*shape, bias=False) for shape in linears)
        block.extend([nn.RMSNorm(hidden), nn.RMSNorm(hidden)])
        ends = nn.ModuleList([nn.Embedding(vocab, hidden), nn.RMSNorm(hidden)])
        if not tied:
            ends.append(nn.Linear(hidden, vocab, bias=False))
    sizes = [sum(p.numel() for p in part.parameters()) for part in (block, ends)]
    return layers * sizes[0] + sizes[1]


def _by_hand(la: int, h: int, a: int, kv: int, f: int, v: int, tied: bool) -> int:
    """What the mistakes start from: the library's own count refuses in an answer."""
    return la * (2 * h * h + 2 * h * kv * (h // a) + 3 * h * f + 2 * h) + h + v * h * (2 - tied)


def _off(more: Callable[[int, int, int, int, int, int, bool], int]) -> Count:
    """The right count and what ``more`` adds to it."""
    return lambda *given: _by_hand(*given) + more(*given)


def _as_whole(value: Any) -> int:
    if isinstance(value, bool) or not (hasattr(value, "__index__") or isinstance(value, float)):
        raise NotRight(f"a whole number is wanted, not {shown(value)}")
    if int(value) != value:
        raise NotRight(f"parameters are counted in whole numbers, not {shown(value)}")
    return int(value)


def _draw(*, grouped: bool, tied: bool) -> Callable[[random.Random], list[Instance]]:
    """Three models of other sizes; ``grouped``: fewer heads of keys and values than of queries."""

    def draw(rng: random.Random) -> list[Instance]:
        found = []
        for _ in range(3):
            kv_heads = rng.choice((2, 4, 8))
            heads = kv_heads * (rng.choice((2, 4, 8)) if grouped else 1)
            hidden = heads * rng.choice((32, 64, 128))
            found.append(
                {
                    "layers": rng.randint(3, 126),
                    "hidden": hidden,
                    "heads": heads,
                    "kv_heads": kv_heads,
                    "ffn": 64 * rng.randint(5, 400),
                    "vocab": rng.randint(300, 130_000),
                    "tied": tied,
                }
            )
        return found

    return draw


COUNT = Function(
    id="01-3",
    title="parameters from shapes",
    names=("count",),
    hints=(
        "Count a block first: which matrices has it, and what shape has each? Then what stands "
        "before and after all blocks.",
        "q and o are hidden x hidden; k and v are hidden x (kv_heads * size of a head); the MLP is "
        "three times hidden x ffn; two norms of hidden. The ends: one norm and one or two tables.",
        "kv = kv_heads * (hidden // heads); block = 2*hidden*hidden + 2*hidden*kv + 3*hidden*ffn + "
        "2*hidden; layers * block + hidden + vocab * hidden * (1 if tied else 2).",
    ),
    wrong=(
        Wrong(
            _off(lambda la, h, a, kv, f, v, tied: la * 2 * h * (h - kv * (h // a))),
            "Keys and values have kv_heads heads, not as many as queries.",
        ),
        Wrong(
            _off(lambda la, h, a, kv, f, v, tied: la * 2 * h * (kv - kv * (h // a))),
            "kv_heads counts heads: each has hidden / heads features.",
        ),
        Wrong(
            _off(lambda la, h, a, kv, f, v, tied: -la * h * f),
            "The MLP has three matrices: gate, up and down.",
        ),
        Wrong(
            _off(lambda la, h, a, kv, f, v, tied: -(2 * la + 1) * h),
            "The norms are left out: two in a block, one after them.",
        ),
        Wrong(
            _off(lambda la, h, a, kv, f, v, tied: -la * h),
            "A block has two norms: one before attention, one before the MLP.",
        ),
        Wrong(
            _off(lambda la, h, a, kv, f, v, tied: -h),
            "One more norm stands between the last block and the head.",
        ),
        Wrong(
            _off(lambda la, h, a, kv, f, v, tied: v * h if tied else 0),
            "Tied embedding and head are one table: it counts once.",
        ),
        Wrong(
            _off(lambda la, h, a, kv, f, v, tied: 0 if tied else -v * h),
            "Where they are not tied, embedding and head are two tables.",
        ),
        Wrong(
            _off(lambda la, h, a, kv, f, v, tied: -la * h * h),
            "Attention has an output matrix too: o.",
        ),
        Wrong(
            lambda la, h, a, kv, f, v, tied: 12 * la * h * h,
            "12 L h^2 is a rule of thumb: count what is really there.",
        ),
        Wrong(
            _off(lambda la, h, a, kv, f, v, tied: la * (2 * kv * (h // a) + 2 * f + 3 * h)),
            "These linears have no biases.",
        ),
        Wrong(lambda *given: parameter_count(ModelConfig()), words="this is what you are asked"),
        Wrong(lambda *given: None, words="a whole number is wanted"),
    ),
    right=(_on_meta, lambda *given: float(_on_meta(*given))),
    stub=lambda *given: None,
    reference=_right,
    refused=(
        "course_lib.model.counting:parameter_sizes",
        "course_lib.model.counting:parameter_count",
        "course_lib.model.counting:block_parameter_count",
        "course_lib.model.decoder:build_model",
    ),
    normal=_as_whole,
    drawn=(
        Case("as many heads of keys as of queries", _draw(grouped=False, tied=False)),
        Case("grouped queries", _draw(grouped=True, tied=False)),
        Case("tied", _draw(grouped=True, tied=True)),
    ),
)
