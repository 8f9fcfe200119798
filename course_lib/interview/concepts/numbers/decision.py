"""Numbers of the questions on choosing and debugging a plan."""

from __future__ import annotations

from functools import cache
from math import sqrt
from typing import Any

from course_lib.formulas import sp
from course_lib.interview.concepts.numbers import about
from course_lib.layout import make_layout
from course_lib.planner import configure, estimate, hardware, model
from course_lib.planner.estimate import RESERVE
from course_lib.planner.parameters import parameters
from course_lib.planner.result import Estimate

LLAMA, FALCON, LONG = "llama-3-70b", "falcon-180b", 131072


@cache
def _plan(name: str, gpus: int, **degrees: Any) -> Estimate:
    config = model(name)
    return estimate(config, hardware("h100"), configure(config, gpus, **degrees))


def _gb(size: float) -> Any:
    return about(size, digits=2)


def _parts(found: Estimate) -> dict[str, Any]:
    """Return memory and time of a plan by name."""
    held = found.memory
    return {
        "weights": _gb(held.weights),
        "gradients": _gb(held.gradients),
        "optimizer": _gb(held.optimizer),
        "activations": _gb(held.activations),
        "sum": _gb(held.total),
        "step": about(found.step_seconds, "s", 2),
        "mfu": about(found.mfu, "share", 2),
        "wait": about(found.parts["tp"], "s", 2),
        "m": found.configuration.micro_batches,
        "bubble": about(found.bubble_of_total, "share", 1),
    }


def b70() -> dict[str, Any]:
    """Llama 3 70B on 64 H100: lesson 14's plans."""
    one, two, three = (_plan(LLAMA, 64, tp=8, zero=stage) for stage in (1, 2, 3))
    chosen, narrow = _plan(LLAMA, 64, tp=8, pp=2), _plan(LLAMA, 64, tp=4, pp=8)
    gpu = hardware("h100")
    assert [each.fits for each in (one, two, three, chosen, narrow)] == [False, *[True] * 4]
    return {
        "billions": f"{parameters(model(LLAMA)) / 1e9:.1f}",
        "gpus": 64,
        "per": 18,
        "state": about(18 * parameters(model(LLAMA))),
        "cluster": _gb(64 * 80e9),
        "room": _gb((1 - RESERVE) * gpu.capacity_bytes),
        "tp": 8,
        "pp": chosen.configuration.pp,
        "dp": chosen.configuration.dp,
        "flat": _gb(one.memory.total),
        "flat_state": _gb(one.memory.weights + one.memory.gradients),
        "flat_dp": one.configuration.dp,
        "all_sharded": _gb(18 * parameters(model(LLAMA)) / 64),
        "zero2": _gb(two.memory.total),
        "zero2_step": about(two.step_seconds, "s", 2),
        "zero3_step": about(three.step_seconds, "s", 2),
        "narrow_tp": narrow.configuration.tp,
        "narrow_pp": narrow.configuration.pp,
        "narrow": _gb(narrow.memory.total),
        "narrow_step": about(narrow.step_seconds, "s", 2),
        "sequence": 8192,
    } | _parts(chosen)


def b180() -> dict[str, Any]:
    """Falcon 180B on 128 H100: lesson 14's plans."""
    chosen, second = _plan(FALCON, 128, tp=8, pp=4), _plan(FALCON, 128, tp=8, pp=4, zero=2)
    deep = _plan(FALCON, 128, tp=8, pp=8)
    count = parameters(model(FALCON))
    return {
        "billions": round(count / 1e9),
        "per": 18,
        "gpus": 128,
        "state": about(18 * count, digits=2),
        "cluster": _gb(128 * 80e9),
        "tp": 8,
        "pp": 4,
        "dp": 4,
        "tp_weights": _gb(2 * count / 8),
        "tp_gradients": _gb(4 * count / 8),
        "zero2": _gb(second.memory.total),
        "zero2_step": f"{second.step_seconds:.0f} s",
        "longer": f"{second.step_seconds / chosen.step_seconds:.1f}",
        "deep_pp": 8,
        "deep": _gb(deep.memory.total),
        "deep_step": about(deep.step_seconds, "s", 2),
        "sequence": chosen.configuration.seq,
    } | _parts(chosen)


def long() -> dict[str, Any]:
    """Llama 3 70B on 64 H100 with 131,072 tokens per sequence."""
    old = _plan(LLAMA, 64, tp=8, pp=2, seq=LONG)
    wide = _plan(LLAMA, 64, tp=8, cp=8, zero=3, seq=LONG)
    few = {
        again: _plan(LLAMA, 64, tp=8, cp=2, zero=3, seq=LONG, recompute=again)
        for again in ("none", "full")
    }
    assert [each.fits for each in (old, few["none"], few["full"], wide)] == [
        False,
        False,
        True,
        True,
    ]
    return {
        "tokens": LONG,
        "short": 8192,
        "factor": LONG // 8192,
        "gpus": 64,
        "tp": 8,
        "cp": 8,
        "pp": 2,
        "few": 2,
        "sequences": wide.configuration.global_batch,
        "before": old.configuration.tokens // 8192,
        "old_m": old.configuration.micro_batches,
        "old": _gb(old.memory.activations),
        "room": _gb((1 - RESERVE) * hardware("h100").capacity_bytes),
        "activations": _gb(wide.memory.activations),
        "sum": _gb(wide.memory.total),
        "step": f"{wide.step_seconds:.0f} s",
        "mfu": about(wide.mfu, "share", 2),
        "gather": f"{wide.parts['dp_cp']:.0f} s",
        "few_sum": about(few["none"].memory.total),
        "full_sum": _gb(few["full"].memory.total),
        "full_step": f"{few['full'].step_seconds:.0f} s",
        "rows": LONG // 8,
    }


def tokens() -> dict[str, Any]:
    """From how many tokens on TP sends more than DP: Llama 3 70B with tp=8, pp=2, dp=4."""
    config, gpu = model(LLAMA), hardware("h100")
    found = _plan(LLAMA, 64, tp=8, pp=2)
    tp, dp, stages = 8, found.configuration.dp, found.configuration.pp
    h = config.hidden
    mesh = 3 * h * (dp - 1) / (dp * (tp - 1))
    sent = {axis: found.communication[axis].wire_bytes for axis in ("tp", "dp", "pp")}
    return {
        "hidden": h,
        "alternatives": 3 * h,
        "tp": tp,
        "dp": dp,
        "pp": stages,
        "less_tp": tp - 1,
        "less_dp": dp - 1,
        "mesh": round(mesh),
        "wide": round(1.5 * mesh),
        "read": found.configuration.sequences * found.configuration.seq,
        "tp_sent": about(sent["tp"], digits=2),
        "dp_sent": about(sent["dp"], digits=2),
        "pp_sent": about(sent["pp"], digits=2),
        "layers": config.layers // stages,
        "passes": round(12 * h * config.layers / stages * (dp - 1) / dp, -5),
        "latency": about(tp * gpu.node.latency * gpu.node.bandwidth, digits=2),
        "alpha": about(gpu.node.latency, "s", 2),
        "beta": about(gpu.node.bandwidth, "byte/s"),
    }


def hang() -> dict[str, Any]:
    """The four ranks of tp=2, dp=2, and the groups of 4,096 ranks."""
    small = make_layout(tp=2, dp=2)
    large = make_layout(4096, tp=8, pp=16)
    groups = {axis: len(large.groups(axis)) for axis in ("tp", "pp", "dp")}
    return {
        "n": small.world,
        "tp_groups": " ".join(f"({a} {b})" for a, b in small.groups("tp")),
        "dp_groups": " ".join(f"({a} {b})" for a, b in small.groups("dp")),
        "world": large.world,
        "tp": 8,
        "pp": 16,
        "dp": large.sizes["dp"],
        "groups": sum(groups.values()),
        "own": len(groups),
    }


def norms() -> dict[str, Any]:
    """Replicated parameters of Llama 3 70B, and the norm with copies for tp=2, dp=2."""
    config = model(LLAMA)
    replicated, every = sp.replicated_parameters(config), parameters(config)
    return {
        "replicated": replicated,
        "billions": f"{every / 1e9:.1f}",
        "share": about(replicated / every, "share", 2),
        "tp": 2,
        "dp": 2,
        "matrices": f"{sqrt(2):.2f}",
        "copies": f"{sqrt(2 * 2):g}",
    }
