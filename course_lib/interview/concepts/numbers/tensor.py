"""Numbers of the questions on tensor and sequence parallelism."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from course_lib.formulas import sp
from course_lib.formulas.moves import entering, leaving, wire_of
from course_lib.interview.concepts.numbers import about
from course_lib.ledger import wire
from course_lib.planner import configure, estimate, hardware, model
from course_lib.planner.memory import layer_activations
from course_lib.planner.result import Estimate

LLAMA, SEQ, TP = "llama-3-70b", 8192, 8
GPT = "megatron-175b"


def columns_rows() -> dict[str, Any]:
    """The MLP of Llama 3 70B on 8 ranks, a sequence of 8,192 tokens."""
    config = model(LLAMA)
    x = SEQ * config.hidden * config.dtype.itemsize
    return {
        "tp": TP,
        "hidden": config.hidden,
        "ffn": config.ffn,
        "own": config.ffn // TP,
        "tokens": SEQ,
        "x": about(x),
        "sent": about(wire("all_reduce", x, TP)),
        "wide": 2 * config.ffn // config.hidden,  # gate and up, in units of x
    }


@cache
def _step(tp: int) -> Estimate:
    """Return a step on 64 H100 GPUs with full recomputation and ZeRO-1."""
    config = model(LLAMA)
    plan = configure(config, 64, tp=tp, zero=1, seq=SEQ, recompute="full")
    return estimate(config, hardware("h100"), plan)


def inside_node() -> dict[str, Any]:
    """The same model on 64 H100 GPUs: tp=8 in a node, and tp=16 over two."""
    gpu, inner, outer = hardware("h100"), _step(8), _step(16)
    return {
        "gpus": inner.configuration.world,
        "layers": model(LLAMA).layers,
        "nvlink": about(gpu.node.bandwidth, "byte/s"),
        "network": about(gpu.network.bandwidth, "byte/s"),
        "ratio": round(gpu.node.bandwidth / gpu.network.bandwidth),
        "forwards": 2 * model(LLAMA).layers,
        "tp": 8,
        "far": 16,
        "step": about(inner.step_seconds, "s"),
        "step_far": f"{outer.step_seconds:.0f} s",
        "wait": about(inner.parts["tp"], "s"),
        "wait_far": about(outer.parts["tp"], "s"),
        "longer": f"{outer.step_seconds / inner.step_seconds:.1f}",
    }


def per_layer() -> dict[str, Any]:
    """Bytes of a layer and of a micro-batch: Llama 3 70B, tp=8, one sequence of 8,192 tokens."""
    config = model(LLAMA)
    x = SEQ * config.hidden * config.dtype.itemsize
    enter, leave = entering(x, TP), leaving(x, TP)
    layer = 2 * (enter.wire() + leave.wire())
    plan = configure(config, 64, tp=TP, pp=2)
    step = estimate(config, hardware("h100"), plan)
    return {
        "gpus": plan.world,
        "tp": TP,
        "less": TP - 1,
        "hidden": config.hidden,
        "tokens": SEQ,
        "layers": config.layers,
        "x": about(x),
        "one": about(wire("all_reduce", x, TP)),
        "layer": about(layer),
        "forward": about(2 * wire_of(leave.forward)),
        "all": about(config.layers * layer),
        "once": about(config.layers * layer / 2),
        "wait": about(step.parts["tp"], "s", 2),
        "step": about(step.step_seconds, "s", 2),
    }


def _whole(saved: float, alone: float) -> float:
    """Return the part of ``alone`` that ranks do not divide, from what one of TP ranks saves."""
    return (saved * TP - alone) / (TP - 1)


def sequence() -> dict[str, Any]:
    """A layer of 175B on 8 ranks: bytes that it saves per token and feature, and bytes sent."""
    config = model(GPT)
    seq = config.max_seq_len
    plan = configure(config, TP, tp=TP, seq=seq)
    unit = seq * config.hidden

    def saved(one: Any) -> float:
        return layer_activations(config, one, 0).total

    alone = saved(configure(config, 1, seq=seq))
    tensor = saved(replace(plan, sequence_parallel=False, gather_again=False))
    kept, again = saved(replace(plan, gather_again=False)), saved(plan)
    one = entering(1, TP).wire() + leaving(1, TP).wire()
    both = entering(1, TP, rows=True, again=True).wire() + leaving(1, TP, rows=True).wire()
    return {
        "tp": TP,
        "alone": f"{alone / unit:g}",
        "tensor": f"{tensor / unit:g}",
        "kept": f"{kept / unit:g}",
        "again": f"{again / unit:g}",
        "floor": f"{_whole(tensor, alone) / unit:g}",
        "inner": f"{(alone - _whole(tensor, alone)) / unit:g}",
        "gathered": f"{_whole(kept, alone) / unit:g}",
        "divided": f"{(alone - _whole(kept, alone)) / unit:g}",
        "share": about(tensor / alone, "share", 2),
        "alone_bytes": about(alone),
        "tensor_bytes": about(tensor),
        "again_bytes": about(again),
        "more": f"{float(both / one):g}",
        "norms": sp.replicated_parameters(model(LLAMA)),
    }
