"""Numbers of the concept questions, against arithmetic by hand and figures that lessons print."""

from __future__ import annotations

from math import sqrt
from pathlib import Path

import pytest

from course_lib.interview.concepts import computed
from course_lib.interview.questions import shown

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"

H, FFN, L, SEQ = 8192, 28672, 80, 8192  # Llama 3 70B and its sequence
P70 = 2 * 128256 * H + L * (2 * H * H + 2 * H * 1024 + 3 * H * FFN + 2 * H) + H
X = SEQ * H * 2
RING = 2 * 7 / 8  # of an all-reduce over 8 ranks
LONG = 131072
EXPERT = 3 * 4096 * 14336  # Mixtral's
TOKEN = 2 * 80 * 8 * 128 * 2  # bytes of the KV cache


def said(value: float, digits: int, size: float, unit: str) -> str:
    """Return a value as a text shows it: "235 MB"."""
    return f"{float(f'{value:.{digits}g}') / size:,.4g} {unit}"


def mb(value: float, digits: int = 3) -> str:
    return said(value, digits, 1e6, "MB")


def gb(value: float, digits: int = 3) -> str:
    return said(value, digits, 1e9, "GB")


def percent(value: float, digits: int = 3) -> str:
    return f"{100 * float(f'{value:.{digits}g}'):.4g} %"


def saved(tokens: float, divided: int) -> float:
    """Return what a layer of Llama 3 70B saves if its ranks divide everything evenly.

    Per token, in bf16: 4 h outside regions and in them, q, k, v, output, and 3 f of the MLP.
    """
    return tokens * 2 * (4 * H + 2 * H + 2 * 1024 + 3 * FFN) / divided


def triangle(first: int, last: int) -> int:
    """Return the scores of the positions ``first`` to ``last`` - 1 under a causal mask."""
    return (last * (last + 1) - first * (first + 1)) // 2


BY_HAND = {
    "tensor.columns_rows": {"x": mb(X), "sent": mb(RING * X), "own": "3,584", "wide": "7"},
    "tensor.inside_node": {"ratio": "9", "forwards": "160", "longer": "1.5"},
    "tensor.per_layer": {
        "one": mb(RING * X),
        "forward": mb(2 * RING * X),
        "layer": mb(4 * RING * X),
        "all": gb(4 * RING * X * L),
        "once": gb(2 * RING * X * L),
    },
    "tensor.sequence": {
        "tensor": f"{10 + 24 / 8:g}",
        "kept": f"{4 + 30 / 8:g}",
        "again": f"{34 / 8:g}",
        "floor": "10",
        "inner": "24",
        "gathered": "4",
        "divided": "30",
        "share": percent(13 / 34, 2),
        "alone_bytes": mb(34 * 2048 * 12288),
        "again_bytes": mb(34 / 8 * 2048 * 12288),
        "more": "1.25",
        "norms": f"{(2 * L + 1) * H:,}",
    },
    "pipelines.bubble": {
        "bubble": percent(7 / 39),
        "ideal": percent(7 / 32),
        "bubble_many": percent(7 / 135),
        "bubble_few": percent(7 / 15),
        "bubble_v": percent(7 / (4 * 32 + 7)),
        "bubble_h1": percent(7 / (3 * 32 + 7)),
        "boundaries_v": f"{8 * 4 - 1}",
        "peak": "8",
        "peak_h2": f"{2 * 8 - 1}",
    },
    "pipelines.memory": {"bubble": percent(7 / 39), "bubble_double": percent(7 / 71)},
    "pipelines.interleaving": {
        "ideal_v": percent(7 / (32 * 4)),
        "total_v": percent(7 / (32 * 4 + 7)),
        "boundaries": "7",
        "boundaries_v": "31",
        "memory": f"{1 + 7 / (8 * 4):.2f}",
    },
    "pipelines.zero_bubble": {
        "step": f"{(8 + 3) * 3}",
        "gap": f"{3 * 3}",
        "gap_h1": f"{3 * (1 + 1 - 1)}",
        "step_h1": f"{8 * 3 + 3}",
        "span_h2": f"{8 * 3}",
        "peak_h2": f"{2 * 4 - 1}",
    },
    "pipelines.slow_stage": {"equal": "33", "busy": f"{8 * 3 * 2}"},
    "context.sequence_or_context": {
        "alone": gb(saved(LONG, 1), 2),
        "narrow": gb(saved(LONG, 8), 2),
        "both": mb(saved(LONG, 64), 2),
        "all": gb(saved(LONG, 8) * L, 2),
        "rows": "16,384",
    },
    "context.ring": {"merged": "2.25", "limit": "19,780", "grouped": "2,470", "rows": "8,192"},
    "context.zigzag": {
        "first_last": f"{triangle(98304, LONG) / triangle(0, 32768):.0f}",
        "busiest": f"{4 * triangle(98304, LONG) / triangle(0, LONG):.2f}",
        "busiest_many": f"{2 - 1 / 16:.2f}",
        "saved": percent(1 - 1 / (2 - 1 / 16), 2),
    },
    # Forward and backward: K and V, and in backward their gradients in fp32; q, k, v and out.
    "context.ring_or_ulysses": {
        "ring": gb(15 * LONG / 16 * 2 * 4096 * (2 + 2 + 4), 2),
        "ulysses": mb(2 * 15 / 16 * LONG / 16 * 4 * 4096 * 2, 2),
        "ring_few": gb(3 * LONG / 4 * 2 * 1024 * (2 + 2 + 4), 2),
        "ulysses_few": gb(2 * 3 / 4 * LONG / 4 * (2 * H + 2 * 1024) * 2, 2),
        "ulysses_many": mb(2 * 15 / 16 * LONG / 16 * (2 * H + 2 * 2048) * 2, 2),
    },
    "context.flash": {
        "scores": gb(LONG * LONG * 8 * 2),
        "rest": gb(saved(LONG, 8), 2),
        "inputs": gb(LONG * H * 2 / 8 * L, 2),
        "divided": gb(saved(LONG, 64) * L, 2),
        "share_long": percent(
            LONG * H * 2 / (LONG * H * 2 + 2 * (2 * H * H + 2 * H * 1024 + 3 * H * FFN)), 2
        ),
    },
    "experts.all_to_all": {
        "one": mb(7 / 8 * 8192 * 8192),
        "layer": mb(4 * 7 / 8 * 8192 * 8192),
        "all": gb(32 * 4 * 7 / 8 * 8192 * 8192),
        "network_ms": said(7 / 8 * 8192 * 8192 / 50e9, 2, 1e-3, "ms"),
    },
    "experts.balance": {
        "mean": "1,024",
        "room": "1,280",
        "dropped": f"{2048 - 1280}",
        "dropped_share": percent(768 / 8192, 2),
        "others": f"{(8192 - 2048) / 7:.0f}",
        "even": "1",
        "loss": f"{8 * (1 / 16 + 7 * (3 / 28) ** 2):.2f}",
    },
    "experts.ranks": {
        "edp": f"{64 // 8}",
        "first": "0, 8, 16",
        "expert": gb(32 * 8 * EXPERT * 2, 2),
        "own": gb(32 * EXPERT * 2, 2),
        "data": f"{1024 // 32}",
        "product": f"{2 * 16 * 64 * 32:,}",
    },
    "experts.fp8": {
        "narrow": f"{7168 + 4 * 56:,}",
        "pair_fp8": f"{2 * 14336 + 2 * 7392:,}",
        "row": percent(1 - 7392 / 14336, 2),
        "saved": percent((14336 - 7392) / (2 * 14336), 2),
    },
    "serving.decode": {
        "ridge": f"{989e12 / 3.35e12:.0f}",
        "cache": gb(2 * 32 * 8 * 128 * 2 * 8192),
        "caches": gb(32 * 2 * 32 * 8 * 128 * 2 * 8192),
    },
    "serving.layouts": {
        "calls": "65",
        "tp_sent": said(65 * RING * 4096 * 2 + 7 * 8, 3, 1e3, "kB"),
        "pp_sent": said(4096 * 2 + 8, 3, 1e3, "kB"),
    },
    "serving.cache": {
        "token": said(TOKEN, 3, 1e3, "kB"),
        "request": gb(TOKEN * 8192),
        "every": gb(8 * TOKEN * 8192),
        "share": mb(TOKEN * 8192 / 8),
        "share_wide": mb(TOKEN * 8192 / 8),
    },
    "serving.disaggregated": {
        "prefill": said(2 * (P70 - 128256 * H) * 8192 / (8 * 0.4 * 989e12), 2, 1e-3, "ms"),
        "steps": "69",
        "fast": said(TOKEN * 8192 / 400e9, 2, 1e-3, "ms"),
        "slow": said(TOKEN * 8192 / 12.5e9, 3, 1e-3, "ms"),
    },
    "decision.b70": {
        "billions": f"{P70 / 1e9:.1f}",
        "state": said(18 * P70, 3, 1e12, "TB"),
        "all_sharded": gb(18 * P70 / 64, 2),
        "flat_state": gb(6 * P70 / 8, 2),
        "m": "128",
        "bubble": percent(1 / 129, 1),
    },
    "decision.b180": {"m": "512", "bubble": percent(3 / 515, 1), "tp_weights": "45 GB"},
    "decision.long": {
        # The layers, then input of norm and head, and the logits in fp32, of one rank's positions.
        "activations": gb(saved(LONG, 64) * L + LONG / 8 * (2 * 2 * H + 4 * 128256) / 8, 2),
        "before": f"{2**22 // 8192}",
        "sequences": f"{2**22 // LONG}",
        "old_m": f"{2**22 // LONG // 4}",
    },
    "decision.tokens": {
        "alternatives": f"{3 * H:,}",
        "mesh": f"{3 * H * 3 / (4 * 7):,.0f}",
        "wide": f"{1.5 * 3 * H * 3 / (4 * 7):,.0f}",
        "read": f"{128 * SEQ:,}",
        "dp_sent": gb(3 / 4 * 6 * P70 / 16, 2),  # sums in fp32, gathers in bf16
        "pp_sent": gb(128 * X / 8, 2),
        "passes": f"{round(12 * H * 40 * 3 / 4, -5):,.0f}",
        "latency": mb(8 * 3.4e-6 * 450e9, 2),
    },
    "decision.hang": {
        "tp_groups": "(0 1) (2 3)",
        "dp_groups": "(0 2) (1 3)",
        "groups": f"{512 + 256 + 128}",
        "own": "3",
    },
    "decision.norms": {
        "replicated": f"{(2 * L + 1) * H:,}",
        "share": percent((2 * L + 1) * H / P70, 2),
        "matrices": f"{sqrt(2):.2f}",
        "copies": "2",
    },
}

# What a lesson says in its text, and the number of ours that it repeats.
PRINTED = {
    "08_pipelines_2": {
        ("pipelines.zero_bubble", "step"): "takes {} units of time",
        ("pipelines.zero_bubble", "work"): "works for {} of them",
        ("pipelines.zero_bubble", "peak_h2"): "ZB-H2 stores {} micro-batches per rank",
    },
    "09_context_parallelism": {
        ("context.ring", "limit"): "needs {}\n",
        ("context.ring", "grouped"): "about {}.",
    },
    "10_expert_parallelism": {("experts.all_to_all", "layer"): "8,192 bytes = {}."},
    "11_groups_in_anger": {("decision.hang", "groups"): "512 + 256 + 128 = {}"},
    "13b_parallel_serving": {
        ("serving.disaggregated", "prefill"): "would wait {}.",
        ("serving.disaggregated", "steps"): "read their weights for {} decode",
    },
    "14_the_decision": {
        ("decision.b70", "flat"): "The first plan needs {}.",
        ("decision.b70", "flat_state"): "stores {} of",
        ("decision.b180", "m"): "computes {} micro-batches",
    },
}


@pytest.mark.parametrize("name", BY_HAND)
def test_the_numbers_by_hand(name):
    found = {key: shown(value) for key, value in computed(name).items()}
    assert {key: found[key] for key in BY_HAND[name]} == BY_HAND[name]


@pytest.mark.parametrize(
    ("lesson", "name", "key", "sentence"),
    [(lesson, *at, text) for lesson, rows in PRINTED.items() for at, text in rows.items()],
)
def test_a_lesson_says_the_same_number(lesson, name, key, sentence):
    text = (NOTEBOOKS / f"{lesson}.py").read_text(encoding="utf-8").replace("\n# ", " ")
    assert sentence.strip().format(shown(computed(name)[key])) in text


def test_the_spoken_answers_have_the_same_numbers():
    text = (NOTEBOOKS.parent / "docs" / "interview.md").read_text(encoding="utf-8")
    spoken = text[text.index("## Two answers to speak") :].replace("\n> ", " ")
    for name, phrases in {
        "decision.b70": {
            "flat": "The sum is {}",
            "zero2": "needs {}",
            "sum": "with ZeRO-1 need {}",
            "step": "I estimate {}",
            "mfu": "an MFU of {}",
        },
        "decision.b180": {
            "sum": "The sum is {}",
            "longer": "becomes {} times as long",
            "step": "I estimate {}",
            "mfu": "an MFU of {}",
            "deep": "With pp=8 I need {}",
        },
    }.items():
        for key, phrase in phrases.items():
            number = shown(computed(name)[key])
            for ours, theirs in ((" s", " seconds"), (" GB", "")):
                number = number.removesuffix(ours) + (theirs if number.endswith(ours) else "")
            assert phrase.format(number) in spoken, (name, key)
