"""Numbers of the questions on data parallelism and ZeRO."""

from __future__ import annotations

from math import ceil
from typing import Any

from course_lib.formulas import dp, inference
from course_lib.formulas.moves import Move, of_data, wire_of
from course_lib.interview.concepts.numbers import about
from course_lib.planner import configure, estimate, hardware, model, serve
from course_lib.planner.communication import BUCKET
from course_lib.planner.flops import blocks_flops
from course_lib.planner.links import Span, seconds
from course_lib.planner.memory import RECIPES, activation_bytes, layer_activations, state_bytes
from course_lib.planner.parameters import layer_parameters, parameters
from course_lib.planner.timing import SHARE_OF_SMS, rates

BF16, FP32 = 2, 4  # bytes per element
SMALL, LLAMA, GPU = "gpt2-xl", "llama-3-70b", "h100"
DDP_BUCKET = 25 * 2**20  # bytes, PyTorch's default


def of_zero(
    stage: int, elements: int, n: int, rounds: int, width: int = BF16, once: bool = False
) -> float:
    """Return the bytes that a rank sends per step of ``rounds`` micro-batches, in bf16.

    ``width`` counts bytes per element of a gradient. With ``once``, stage 3 gathers each unit once
    per micro-batch.
    """
    found = of_data(
        stage,
        [elements],
        n,
        itemsize=BF16,
        gradient_itemsize=width,
        micro_batches=rounds,
        gathered_once=[0] if once else [],
    )
    return float(wire_of(found.moves))


def what_is() -> dict[str, Any]:
    """GPT-2 XL on 8 and on 64 GPUs, fp32 gradients."""
    count = parameters(model(SMALL))
    gradients = count * FP32
    return {
        "n": 8,
        "less": 7,
        "billions": f"{count / 1e9:.2f}",
        "many": 64,
        "batch": 64,
        "own": 64 // 8,
        "states": about(state_bytes(count).total),
        "gradients": about(gradients),
        "sent": about(dp.wire_bytes(gradients, 8)),
        "sent_many": about(dp.wire_bytes(gradients, 64)),
        "limit": about(2 * gradients),
    }


def against_model() -> dict[str, Any]:
    """Llama 3 70B on 128 H100: tp=8, pp=4, dp=4 with ZeRO-1, micro-batches of 8,192 tokens."""
    config, seq, rounds = model(LLAMA), 8192, 32
    plan = configure(config, 128, tp=8, pp=4, dp=4, zero=1, seq=seq, global_batch=4 * rounds)
    found = estimate(config, hardware(GPU), plan)
    values: dict[str, Any] = {"gpus": 128, "tp": 8, "pp": 4, "dp": 4, "m": rounds, "seq": seq}
    for axis, one in found.communication.items():
        values[f"{axis}_sent"] = about(one.wire_bytes)
        values[f"{axis}_calls"] = one.calls
        if axis != "pp":
            values[f"{axis}_exposed"] = about(one.exposed_seconds, "s", 2)
    tokens = rounds * seq
    over_tp, over_dp = (found.communication[axis].wire_bytes for axis in ("tp", "dp"))
    values["step"] = about(found.step_seconds, "s", 2)
    values["replica"] = tokens
    values["tp_double"] = about(2 * over_tp)
    values["equal"] = about(over_dp / (over_tp / tokens), "count", 2)
    return values


def in_inference() -> dict[str, Any]:
    """Llama 3 8B on 8 H100: eight replicas, or one with tp=8. Mixtral's tokens over ep=8."""
    config, gpu = model("llama-3-8b"), hardware(GPU)
    copies, shards = configure(config, 8, dp=8, zero=0), configure(config, 8, tp=8, zero=0)
    few, many = 8, 1024
    lengths: dict[str, Any] = {"prompt": 512, "generate": 128}
    values: dict[str, Any] = {"n": 8, "few": few, "many": many} | lengths
    for name, requests in (("few", few), ("many", many)):
        plans = {"dp": serve(config, gpu, copies, batch=requests // 8, **lengths)}
        plans["tp"] = serve(config, gpu, shards, batch=requests, **lengths)
        for axis, found in plans.items():
            values[f"{axis}_{name}"] = about(found.tpot_seconds, "s", 2)
            values[f"{axis}_{name}_rate"] = about(found.tokens_per_second, "token/s", 2)
            values[f"{axis}_weights"] = about(found.weights_bytes)
            values[f"{axis}_room"] = about(found.requests_in_flight, "count", 2)
    routed = model("mixtral-8x7b")
    assert routed.experts is not None
    sent = inference.even_ep_wire_bytes(routed, 1, routed.experts.top_k, 8)
    return values | {"expert_bytes": about(sent), "expert_layers": routed.layers}


def buckets() -> dict[str, Any]:
    """GPT-2 XL, fp32 gradients, on 8 nodes of 8 H100; 8 sequences of 1,024 tokens per GPU."""
    config, gpu, over, n = model(SMALL), hardware(GPU), Span(8, 8), 64
    gradients = parameters(config) * FP32
    tensors = 12 * config.layers + 4

    def spent(call: float, calls: int) -> float:
        return seconds([Move("all_reduce", int(call), n, calls)], over, gpu)

    count, wide = ceil(gradients / DDP_BUCKET), BUCKET * FP32
    plan = configure(config, n, zero=0, seq=1024, micro_batch=8, global_batch=8 * n)
    found = estimate(config, gpu, plan)
    compute = found.parts["compute"] + found.parts["elementwise"]
    return {
        "gpus": n,
        "per_node": over.inside,
        "tokens": plan.micro_batch * plan.seq,
        "gradients": about(gradients),
        "tensors": tensors,
        "latency": about(spent(1, 1), "s", 2),
        "per_tensor": about(spent(gradients / tensors, tensors), "s", 2),
        "bucket": f"{DDP_BUCKET // 2**20} MiB",
        "buckets": count,
        "in_buckets": about(spent(DDP_BUCKET, count), "s", 2),
        "wide": about(wide, digits=2),
        "wide_buckets": ceil(gradients / wide),
        "in_wide": about(spent(wide, ceil(gradients / wide)), "s", 2),
        "in_one": about(spent(gradients, 1), "s", 2),
        "backward": about(compute * 2 / 3, "s", 2),
        "tail": about(spent(wide, 1), "s", 2),
        "share": about(SHARE_OF_SMS, "share", 2),
    }


def accumulation() -> dict[str, Any]:
    """7e9 parameters on 64 ranks, bf16 messages, 8 micro-batches; activations of GPT-2 XL."""
    elements, n, rounds = 7_000_000_000, 64, 8
    config, seq = model(SMALL), 1024
    whole, one = (
        activation_bytes(config, configure(config, 1, seq=seq, micro_batch=b, global_batch=8))
        for b in (rounds, 1)
    )
    values: dict[str, Any] = {"billions": 7, "n": n, "m": rounds, "seq": seq}
    for stage in range(4):
        values[f"sent_{stage}"] = about(of_zero(stage, elements, n, rounds))
    dp_sent = of_zero(0, elements, n, 1)
    return values | {
        "each_time": about(rounds * dp_sent),
        "times_2": about(of_zero(2, elements, n, rounds) / dp_sent, "count"),
        "times_3": about(of_zero(3, elements, n, rounds) / dp_sent, "count"),
        "whole": about(whole),
        "one": about(one),
        "buffer": about(parameters(config) * FP32),
    }


def zero_stages() -> dict[str, Any]:
    """7.5e9 parameters on 64 ranks with 16 bytes each, as in the paper; 8 micro-batches."""
    elements, n, rounds, recipe = 7_500_000_000, 64, 8, 16
    weights, gradients, optimizer = RECIPES[recipe]
    once = of_zero(0, elements, n, 1)
    values: dict[str, Any] = {
        "billions": elements / 1e9,
        "n": n,
        "m": rounds,
        "w": weights,
        "g": gradients,
        "o": optimizer,
        "all": sum(RECIPES[recipe]),
        "sent": about(once),
    }
    for stage in range(4):
        held = state_bytes(elements, zero=stage, shards=n, recipe=recipe).total
        values[f"held_{stage}"] = about(held)
        if stage:
            values[f"times_{stage}"] = about(of_zero(stage, elements, n, 1) / once, "count")
            values[f"many_{stage}"] = about(of_zero(stage, elements, n, rounds) / once, "count")
    return values


def zero_or_tp() -> dict[str, Any]:
    """Llama 3 70B on 64 H100: ZeRO-3 over all GPUs, or tp=8 and ZeRO-2 over 8 replicas."""
    config, gpu, seq, n, tp = model(LLAMA), hardware(GPU), 8192, 64, 8
    alone = configure(config, n, zero=3, seq=seq, recompute="full")
    both = configure(config, n, tp=tp, zero=2, seq=seq)
    block = layer_parameters(config, 0).dense * BF16
    gather = seconds([Move("all_gather", block // n, n)], Span(8, 8), gpu)
    rate = rates(gpu, alone).products
    forward = blocks_flops(config, seq, range(1)).total / rate  # seconds per token
    x_bytes = seq * config.hidden * BF16
    steps = [estimate(config, gpu, plan) for plan in (alone, both)]
    values: dict[str, Any] = {
        "gpus": n,
        "tp": tp,
        "seq": seq,
        "block": about(block),
        "gather": about(gather, "s", 2),
        "hidden_from": about(gather / forward, "count", 2),
        "x": about(x_bytes),
        "sum": about(seconds([Move("all_reduce", x_bytes, tp)], Span(8, 1), gpu), "s", 2),
        "forward": about(seq * forward / tp, "s", 2),
        "activations": about(config.layers * layer_activations(config, alone, 0).total),
        "activations_tp": about(config.layers * layer_activations(config, both, 0).total),
        "many": 4096,
        "replicas": 4096 // tp,
        "tokens": about(4096 * seq / 1e6, "count", 2),
    }
    for name, found in zip(("alone", "both"), steps, strict=True):
        values[f"step_{name}"] = about(found.step_seconds, "s", 2)
        values[f"held_{name}"] = about(found.memory.total, digits=2)
    return values


def reshard() -> dict[str, Any]:
    """Llama 3 8B on 64 ranks: bf16 gathers, sums in bf16 and in fp32; 8 micro-batches."""
    config, n, rounds = model("llama-3-8b"), 64, 8
    count, block = parameters(config), layer_parameters(config, 0).dense * BF16

    def sent(rounds: int = 1, width: int = BF16, once: bool = False) -> Any:
        return about(of_zero(3, count, n, rounds, width, once))

    return {
        "n": n,
        "m": rounds,
        "layers": config.layers,
        "weights": about(count * BF16),
        "shard": about(count * BF16 / n),
        "block": about(block, digits=2),
        "two": about(2 * block, digits=2),
        "gather": about(of_zero(3, count, n, 1) / 3),
        "freed": sent(),
        "stays": sent(once=True),
        "freed_m": sent(rounds),
        "stays_m": sent(rounds, once=True),
        "dp": about(of_zero(0, count, n, 1)),
        "freed_fp32": sent(width=FP32),
        "dp_fp32": about(of_zero(0, count, n, 1, FP32)),
    }
