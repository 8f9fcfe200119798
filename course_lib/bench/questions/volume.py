"""Where TP sends more than DP, and DP more than PP: bytes per GPU and step.

T is the tokens of a replica per step, t, d and p the sizes of TP, DP and PP, h the hidden size, L
the layers. Elements per GPU and layer: TP sends 8 T h (t-1)/t, DP 24 h^2/t (d-1)/d in an
all-reduce of 12 h^2/t gradients (arXiv:2104.04473, 3.2). A boundary of PP sends 2 T h/t with
sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator

from course_lib.bench.questions.context import h100
from course_lib.planner.catalog import model
from course_lib.planner.configuration import configure
from course_lib.planner.estimate import estimate

MODEL, TP, PP, DP = "llama-3-70b", 8, 4, 8
SHORT = 512  # tokens of the smallest step
HIDDEN = {"GPT-2 XL": 1600, "7B": 4096, "70B": 8192, "405B": 16384}


def tp_equals_dp(hidden: int, t: int, d: int) -> float:
    """Return the tokens per replica and step at which TP and DP send equally many elements."""
    return 3 * hidden * (d - 1) / (d * (t - 1))


def dp_equals_pp(hidden: int, layers: int, p: int, d: int) -> float:
    """Return the tokens per replica and step at which DP and PP send equally many elements."""
    return 12 * hidden * (layers / p) * (d - 1) / d


def link_ratio() -> float:
    """Return how much faster NVLink is than the network, per GPU of an H100 node."""
    node, network = h100().node, h100().network
    return node.bandwidth * node.efficiency / (network.bandwidth * network.efficiency)


def sent(tokens: int, zero: int) -> dict[str, float]:
    """Return the bytes that the busiest GPU sends over each axis in a step, by the planner.

    A micro-batch is one sequence of up to 8,192 tokens.
    """
    seq = min(tokens, 8192)
    plan = configure(
        model(MODEL),
        TP * PP * DP,
        tp=TP,
        pp=PP,
        dp=DP,
        zero=zero,
        seq=seq,
        global_batch=DP * tokens // seq,
    )
    axes = estimate(model(MODEL), h100(), plan).communication
    return {axis: one.wire_bytes for axis, one in axes.items()}


def curves_by_tokens() -> dict[str, dict[float, float]]:
    """Return GB per GPU and step by thousand (1,024) tokens per replica and step."""
    found: dict[str, dict[float, float]] = {"TP": {}, "DP, ZeRO-1": {}, "DP, ZeRO-3": {}, "PP": {}}
    for tokens in (SHORT * 2**n for n in range(14)):
        one, three = sent(tokens, 1), sent(tokens, 3)
        sizes = (one["tp"], one["dp"], three["dp"], one["pp"])
        for name, size in zip(found, sizes, strict=True):
            found[name][tokens / 1024] = size / 1e9
    return found


def text() -> Iterator[str]:
    """Yield the crossings by formula and the planner's bytes."""
    yield f"5. TP > DP > PP: tokens per replica and step at the crossing, t={TP}, d={DP}"
    for name, hidden in HIDDEN.items():
        yield f"{name:<9} h={hidden:<6} TP = DP at {tp_equals_dp(hidden, TP, DP):>7,.0f} tokens"
    narrow = tp_equals_dp(HIDDEN["70B"], 2, DP)
    yield f"70B, t=2: TP = DP at {narrow:,.0f} tokens; NVLink / network = {link_ratio():.1f}"
    layers = model(MODEL).layers
    for p in (PP, 16):
        crossing = dp_equals_pp(HIDDEN["70B"], layers, p, DP)
        yield f"70B, p={p}: DP = PP at {crossing:,.0f} tokens"
    yield f"GB per GPU and step of 70B, TP {TP}, PP {PP}, DP {DP}, by the planner"
    table = curves_by_tokens()
    yield f"{'k tokens':>9}" + "".join(f"{name:>12}" for name in table)
    for tokens in table["TP"]:
        yield f"{tokens:>9g}" + "".join(f"{line[tokens]:>12.3f}" for line in table.values())
