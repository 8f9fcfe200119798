"""The true values of the predictions that the lessons ask for, without torch.

A number is compared by its ratio, and a string or a list must be equal. Values that only a run of
the lesson gives are data; a test compares all of them with the outputs of the lessons.
"""

from __future__ import annotations

from functools import cache
from math import ceil

from course_lib.formulas import dp, inference, pp, zero
from course_lib.layout import make_layout
from course_lib.ledger import wire
from course_lib.planner import configure, hardware, model
from course_lib.planner.estimate import estimate
from course_lib.planner.memory import state_bytes
from course_lib.planner.parameters import parameters
from course_lib.schedule import Costs, make, predicted_bubble, simulate

Truth = float | str | list[int]
MACHINE = {("02", "alpha"): r"alpha = ([\d.]+) microseconds"}  # printed in the learner's own run


def _all_reduce(size: int, n: int) -> float:
    return float(wire("all_reduce", size, n))


def _ring_ms(size: int, n: int, alpha: float, beta: float) -> float:
    """Milliseconds of a ring all-reduce; ``alpha`` in seconds, ``beta`` in bytes per second."""
    return 1e3 * (2 * (n - 1) * alpha + _all_reduce(size, n) / beta)


def _group_of_5(world: int, pp_size: int) -> list[int]:
    """The DP group of rank 5 with tp=2 and dp=2."""
    groups = make_layout(world, "tp-dp-pp", tp=2, dp=2, pp=pp_size).groups("dp")
    return next(group for group in groups if 5 in group)


def _step(name: str, gpus: int, **degrees: int) -> tuple[float, float]:
    """GB per GPU and seconds per step of a plan on H100 GPUs."""
    one = model(name)
    found = estimate(one, hardware("h100"), configure(one, gpus, **degrees))  # type: ignore[arg-type]
    return found.memory.total / 1e9, found.step_seconds


@cache
def truths() -> dict[str, dict[str, Truth]]:
    """Return the true value of each prediction: lesson -> name without "predicted_" -> value."""
    seventy, p_405b = model("llama-3-70b"), parameters(model("llama-3-405b"))
    gpipe, interleaved = make("gpipe", 4, 8), make("interleaved", 4, 8, 2)
    zb_step = simulate(make("zb-h1", 4, 8), Costs(1, 1, 1)).makespan
    x_bytes = 8 * 64 * 64 * 4  # an activation of lessons 05 and 06
    kv_bytes = 2 * 4 * 64 * 2 * 8 * 4  # keys and values of a layer in lesson 09
    small_ms, bucket_ms = (_ring_ms(4 * n, 2, 0.0005, 400e3) for n in (1_000, 5_000))
    falcon = {"tp": 8, "pp": 4}
    h100 = hardware("h100").peak["bf16"]
    return {
        "00": {
            "value": 1 + 2 + 3 + 4,
            "bytes": _all_reduce(4096, 4),
            "dp_group": _group_of_5(16, 4),
            "axis": "pp",
        },
        "01": {
            "gb_7b": 16 * parameters(model("llama-2-7b")) / 1e9,
            "gpus_405b": ceil(16 * p_405b / 80e9),
            "days_70b": 6 * parameters(seventy) * 15e12 / (0.4 * h100 * 86400),
            "cache_gb": float(inference.cache_bytes(seventy, 1, 8192)) / 1e9,
            "speedup": 240 / (240 / 4 + _ring_ms(4_000_000, 4, 0.001, 100e6)),
        },
        "02": {
            "ring_bytes": _all_reduce(1_000_000, 4),
            "tree_bytes": 2 * 1_000_000,
            "ring_ms": _ring_ms(1_000_000, 4, 0.020, 12.5e6),
            "tree_ms": 4 * (20 + 1e3 * 1_000_000 / 12.5e6),
            "crossing": (6 - 4) * 0.020 * 12.5e6 / (4 - 1.5),
        },
        "03": {
            "growth": _all_reduce(1, 128) / _all_reduce(1, 64),
            "calls": 39,
            "bytes": _all_reduce(4 * 229_952, 4),
            "bytes_m4": _all_reduce(4 * 229_952, 4),
            "exposed": 0.41,
            "error": 0.29,
        },
        "04": {
            "gb": state_bytes(7.5e9, zero=1, shards=64, recipe=16).total / 1e9,
            "stage_1": float(zero.wire_bytes(1, [1024], 4) / dp.wire_bytes(4096, 4)),
            "stage_2_m4": float(
                zero.wire_bytes(2, [1024], 4, micro_batches=4) / dp.wire_bytes(4096, 4)
            ),
            "stage_3": 1.40,
            "peak": 0.35,
        },
        "05": {
            "calls": 4,
            "bytes": 4 * 4 * _all_reduce(x_bytes, 4),
            "saved": 929_792 / 2_121_728,
            "hidden": 0.0,
        },
        "06": {
            "bytes": 4 * 4 * _all_reduce(x_bytes, 4),
            "saved": 727_040 / 2_121_728,
            "selective": 1 - 8_421_376 / 8_486_912,
        },
        "06b": {"loss": 3 * _all_reduce(4 * 512, 4)},
        "07": {
            "gpipe_ms": simulate(gpipe, Costs.make(f=20, b=40)).makespan,
            "bubble_of_total": predicted_bubble("gpipe", 4, 8),
            "peak_gpipe": gpipe.peak_in_flight()[0],
            "peak_1f1b": make("1f1b", 4, 8).peak_in_flight()[0],
            "bytes": float(pp.wire_bytes(gpipe, 8 * 64 * 64 * 4)),
            "ratio": 1_404_928 / 1_518_852,
        },
        "08": {
            "interleaved": simulate(interleaved, Costs(0.5, 0.5, 0.5)).makespan,
            "sends": pp.stage_boundaries(interleaved) / pp.stage_boundaries(gpipe),
            "zb_h1": zb_step,
            "saved": 131_072 / 175_360,
            "best": zb_step,
        },
        "09": {
            "busiest": sum(range(49, 65)) / (sum(range(1, 65)) / 4),
            "forward": 3 / 4 * kv_bytes,
            "step": 3 * 3 / 4 * kv_bytes,
            "least": "gather",
            "targets": 7,
        },
        "10": {
            "elsewhere": 0.74,
            "bytes": 2 * 4 * 3 / 4 * 128 * 256,
            "busiest": 1.78,
            "dropped": 0.117,
            "factor": 4,
        },
        "11": {
            "one_group": bucket_ms + 2 * small_ms,
            "own_groups": 2 * small_ms,
            "shared": bucket_ms + 2 * small_ms,
            "new_groups": sum(
                len(make_layout(64, tp=8, pp=4, dp=2).groups(axis)) for axis in ("tp", "pp", "dp")
            ),
            "sums": [101, 101],
        },
        "12": {"group": _group_of_5(8, 2), "axis": "tp", "norm": 1.92, "tokens": 3 * 64},
        "13": {"rows": 157 / 1654, "cache": 1_048_576, "steps": 34},
        "13b": {"calls": 2 * 4 + 2, "busy": 1 / 4, "winner": "tp4", "winner_64": "dp4"},
        "14": {
            "gb": _step("llama-3-70b", 64, tp=8)[0],
            "factor": _step("falcon-180b", 128, zero=2, **falcon)[1]
            / _step("falcon-180b", 128, **falcon)[1],
            "crosses": "pp",
            "speedup": 4 / (1 + 3 / 8),
        },
        "16": {"gb": state_bytes(13e9, zero=1, shards=16, recipe=16).total / 1e9},
    }
