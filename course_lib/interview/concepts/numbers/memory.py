"""Numbers of the questions on memory in training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from course_lib.formulas import inference, moves
from course_lib.interview.concepts.numbers import about
from course_lib.planner import Configuration, configure, estimate, hardware, model
from course_lib.planner.flops import blocks_flops, head_flops
from course_lib.planner.in_flight import in_flight
from course_lib.planner.memory import (
    RECIPES,
    head_activations,
    layer_activations,
    memory,
    state_bytes,
)
from course_lib.planner.parameters import parameters

GPT3, LLAMA = "gpt-3-175b", "llama-3-8b"


def what() -> dict[str, Any]:
    """Llama 3 8B on one H100, one sequence of 8,192 tokens; its cache for the same sequence."""
    config, gpu, seq = model(LLAMA), hardware("h100"), 8192
    plan = configure(config, 1, zero=0, seq=seq, global_batch=1)
    found, less = (memory(config, each) for each in (plan, replace(plan, recompute="full")))
    logits = head_activations(config, plan)
    sharded = memory(config, configure(config, 8, zero=3, seq=seq, global_batch=8))
    return {
        "per": plan.recipe,
        "billions": f"{parameters(config) / 1e9:.2f}",
        "seq": seq,
        "weights": about(found.weights),
        "gradients": about(found.gradients),
        "optimizer": about(found.optimizer),
        "activations": about(found.activations),
        "logits": about(logits, digits=2),
        "less": about(less.activations, digits=2),
        "total": about(found.total),
        "room": about(gpu.capacity_bytes),
        "n": 8,
        "sharded": about(sharded.total - sharded.activations, digits=2),
        "sharded_total": about(sharded.total, digits=2),
        "cache": about(inference.cache_bytes(config, 1, seq)),
    }


def per_parameter() -> dict[str, Any]:
    """The three recipes for Llama 3 8B; ZeRO-1 over 8 ranks."""
    config = model(LLAMA)
    count, gpu = parameters(config), hardware("h100")
    weights, gradients, optimizer = RECIPES[18]
    master, moment = 4, 4
    assert optimizer == master + 2 * moment
    values: dict[str, Any] = {
        "w": weights,
        "g": gradients,
        "master": master,
        "moment": moment,
        "o": optimizer,
        "fp32": sum(WIDE),
        "billions": f"{count / 1e9:.2f}",
        "all": sum(RECIPES[18]),
        "largest": about(gpu.capacity_bytes / sum(RECIPES[18]) / 1e9, "count", 2),
        "room": about(gpu.capacity_bytes),
        "n": 8,
        "per_1": about(state_bytes(1.0, zero=1, shards=8).total, "count"),
        "held_1": about(state_bytes(count, zero=1, shards=8).total),
        "weights": about(count * weights),
        "steps": 2**8,  # an update below this fraction of a bf16 weight rounds away
    }
    for recipe, sizes in RECIPES.items():
        assert sum(sizes) == recipe
        values[f"per_{recipe}"] = recipe
        values[f"held_{recipe}"] = about(state_bytes(count, recipe=recipe).total)
    return values


WIDE = (4, 4, 8)  # weights, gradients and two moments in fp32


def activations() -> dict[str, Any]:
    """A layer of GPT-3 in units of sbh, for one sequence of 2,048 tokens; tp=8."""
    config, seq, tp, pp = model(GPT3), 2048, 8, 8
    unit = seq * config.hidden

    def layer(t: int = 1, rows: bool = False, fused: bool = True) -> float:
        plan = Configuration(tp=t, seq=seq, sequence_parallel=rows, fused_attention=fused)
        return layer_activations(config, plan, 0).total

    inside = (layer() - layer(tp)) / unit / (1 - 1 / tp)
    scores = layer(fused=False) - layer()
    return {
        "seq": seq,
        "tp": tp,
        "pp": pp,
        "layers": config.layers,
        "unit": about(unit / 1e6, "count"),
        "all": round(layer() / unit),
        "inside": round(inside),
        "outside": round(layer() / unit - inside),
        "mlp": 2 * 2 * config.ffn // config.hidden,
        "one": about(layer()),
        "whole": about(config.layers * layer(), digits=2),
        "scores": round(scores / unit),
        "scores_whole": about(config.layers * scores, digits=2),
        "per_tp": round(layer(tp) / unit),
        "tp_whole": about(config.layers * layer(tp), digits=2),
        "per_sp": about(layer(tp, True) / unit, "count"),
        "sp_whole": about(config.layers * layer(tp, True), digits=2),
        "stage": config.layers // pp,
        "in_flight": in_flight("1f1b", pp, 64, 0).total,
        "input": about(2 * unit),
    }


def recompute() -> dict[str, Any]:
    """A layer of GPT-3 in units of sbh; Llama 3 70B on 64 H100 with tp=8 and ZeRO-2."""
    config, seq = model(GPT3), 2048
    unit = seq * config.hidden
    layer = layer_activations(config, Configuration(seq=seq, fused_attention=False), 0)
    flops = blocks_flops(config, seq, attention="full")
    step = 3 * (flops.total + head_flops(config))
    region = (moves.entering(1, 8), moves.leaving(1, 8))
    forward = 2 * sum(move.calls for one in region for move in one.forward)
    backward = 2 * sum(move.calls for one in region for move in one.backward)
    values: dict[str, Any] = {
        "seq": seq,
        "all": round(layer.total / unit),
        "rest": round(layer.saved("selective") / unit),
        "scores": round(layer.scores / unit),
        "input": round(layer.saved("full") / unit),
        "share": about(layer.scores / layer.total, "share", 2),
        "one": about(layer.total),
        "one_full": about(layer.saved("full"), digits=2),
        "more": about(flops.total / step, "share", 2),
        "more_selective": about(flops.core / step, "share", 2),
        "calls": forward + backward,
        "calls_full": 2 * forward + backward,
        "gpus": 64,
        "tp": 8,
    }
    llama, gpu = model("llama-3-70b"), hardware("h100")
    for name in ("none", "full"):
        plan = configure(llama, 64, tp=8, zero=2, seq=8192, recompute=name)
        found = estimate(llama, gpu, plan)
        values[f"saved_{name}"] = about(found.memory.activations, digits=2)
        values[f"step_{name}"] = about(found.step_seconds, "s", 2)
        values[f"mfu_{name}"] = about(found.mfu, "share", 2)
    return values | {"hfu": about(found.hfu, "share", 2)}
