"""Numbers of the questions on serving."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from course_lib.formulas.inference import cache_bytes, pp_wire_bytes, tp_wire_bytes
from course_lib.interview.concepts.numbers import about
from course_lib.planner import configure, hardware, model, serve
from course_lib.planner.estimate import RESERVE
from course_lib.planner.parameters import parameters
from course_lib.planner.serve import Serving

SMALL, LLAMA, H100 = "llama-3-8b", "llama-3-70b", "h100"
PROMPT, SHORT, ANSWER = 8192, 512, 128


def _served(name: str, gpus: int, batch: int, *, prompt: int = SHORT, **degrees: Any) -> Serving:
    config = model(name)
    plan = configure(config, gpus, zero=0, **degrees)
    return serve(config, hardware(H100), plan, batch=batch, prompt=prompt, generate=ANSWER)


def decode() -> dict[str, Any]:
    """Llama 3 8B on one H100: 1 and 32 requests, with about 600 and with 8,192 positions."""
    config, gpu = model(SMALL), hardware(H100)
    one, some = _served(SMALL, 1, 1), _served(SMALL, 1, 32)
    long = _served(SMALL, 1, 32, prompt=PROMPT - ANSWER)
    cache = cache_bytes(config, 1, PROMPT)
    return {
        "read": about(one.decode["weights"] * gpu.memory_bandwidth),
        "bandwidth": about(gpu.memory_bandwidth, "byte/s"),
        "weights": about(one.decode["weights"], "s", 2),
        "compute": f"{2e3 * parameters(config) / gpu.peak['bf16']:.2g} ms",
        "ridge": round(gpu.peak["bf16"] / gpu.memory_bandwidth),
        "batch": 32,
        "one": about(one.tpot_seconds, "s", 2),
        "some": about(some.tpot_seconds, "s", 2),
        "faster": f"{some.tokens_per_second / one.tokens_per_second:.0f}",
        "positions": PROMPT,
        "long": about(long.tpot_seconds, "s", 2),
        "cache": about(cache),
        "caches": about(32 * cache),
    }


def layouts() -> dict[str, Any]:
    """Llama 3 8B on a node of 8 H100: DP8, TP8 and TP4 x PP2 with 8 and with 2,048 requests."""
    config = model(SMALL)
    plans = {"dp": {"dp": 8}, "tp": {"tp": 8}, "pp": {"tp": 4, "pp": 2}}
    found: dict[str, Any] = {}
    for total in (8, 2048):
        for name, degrees in plans.items():
            batch = total // degrees.get("dp", 1)
            one = _served(SMALL, 8, batch, **degrees)
            key = name if total == 8 else f"{name}_many"
            found[f"{key}_ms"] = f"{1e3 * one.tpot_seconds:.2g} ms"
            found[f"{key}_rate"] = about(one.tokens_per_second, "token/s", 2)
    return found | {
        "n": 8,
        "few": 8,
        "many": 2048,
        "prompt": SHORT,
        "generate": ANSWER,
        "calls": 2 * config.layers + 1,
        "tp_sent": about(tp_wire_bytes(config, 1, 1, 8)),
        "pp_sent": about(pp_wire_bytes(config, 1, 1, 2)),
    }


def cache() -> dict[str, Any]:
    """Llama 3 70B: bytes per token and request, with 8 heads and with 64, on 8 H100 GPUs."""
    config = model(LLAMA)
    every = replace(config, kv_heads=config.heads)
    node = _served(LLAMA, 8, 1, prompt=PROMPT - ANSWER, tp=8)
    gpu = hardware(H100)
    left = (1 - RESERVE) * gpu.capacity_bytes - node.weights_bytes
    return {
        "layers": config.layers,
        "kv": config.kv_heads,
        "heads": config.heads,
        "dim": config.head_dim,
        "tp": 8,
        "token": about(cache_bytes(config, 1, 1)),
        "positions": PROMPT,
        "request": about(cache_bytes(config, 1, PROMPT)),
        "every": about(cache_bytes(every, 1, PROMPT)),
        "share": about(cache_bytes(config, 1, PROMPT, tp=8)),
        "wide": 16,
        "share_wide": about(cache_bytes(config, 1, PROMPT, tp=16)),
        "weights": about(node.weights_bytes),
        "reserve": about(RESERVE, "share"),
        "left": about(left, digits=2),
        "requests": node.requests_in_flight,
    }


def disaggregated() -> dict[str, Any]:
    """A prompt of 8,192 tokens for Llama 3 70B on 8 H100 GPUs at 40 % of the peak."""
    config, gpu = model(LLAMA), hardware(H100)
    read = parameters(config) - config.vocab * config.hidden  # the embedding is not multiplied
    prefill = 2 * read * PROMPT / (8 * 0.40 * gpu.peak["bf16"])
    step = read * config.dtype.itemsize / (8 * gpu.memory_bandwidth)
    kept = cache_bytes(config, 1, PROMPT)
    slow, fast = 100e9 / 8, 8 * gpu.network.bandwidth
    return {
        "tokens": PROMPT,
        "gpus": 8,
        "efficiency": about(0.40, "share"),
        "prefill": about(prefill, "s", 2),
        "step": about(step, "s", 2),
        "steps": round(prefill / step),
        "cache": about(kept),
        "adapters": 8,
        "gbit": 400,
        "slow_gbit": 100,
        "fast": about(kept / fast, "s", 2),
        "slow": about(kept / slow, "s"),
        "slow_share": about(kept / slow / prefill, "share", 2),
    }
