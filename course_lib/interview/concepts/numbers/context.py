"""Numbers of the questions on context parallelism."""

from __future__ import annotations

from math import exp, log
from typing import Any

from course_lib.formulas.cp import ring_wire_bytes, ulysses_wire_bytes
from course_lib.interview.concepts.numbers import about
from course_lib.planner import configure, hardware, model
from course_lib.planner.flops import layer_flops
from course_lib.planner.memory import layer_activations

LLAMA, BIG, LONG = "llama-3-70b", "llama-3-405b", 131072


def _layer(tp: int, cp: int, fused: bool = True) -> Any:
    """Return what a layer of Llama 3 70B saves for one long sequence, on one GPU."""
    config = model(LLAMA)
    plan = configure(config, 64, tp=tp, cp=cp, zero=3, seq=LONG, fused_attention=fused)
    return layer_activations(config, plan, 0)


def sequence_or_context() -> dict[str, Any]:
    """Llama 3 70B with 131,072 tokens: what a layer saves with tp=8, and with cp=8 beside it."""
    alone, narrow, both = (_layer(*sizes).total for sizes in ((1, 1), (8, 1), (8, 8)))
    return {
        "tokens": LONG,
        "tp": 8,
        "cp": 8,
        "gpus": 64,
        "layers": model(LLAMA).layers,
        "heads": model(LLAMA).heads,
        "own_heads": model(LLAMA).heads // 8,
        "alone": about(alone, digits=2),
        "narrow": about(narrow, digits=2),
        "both": about(both, digits=2),
        "all": about(narrow * model(LLAMA).layers, digits=2),
        "all_both": about(both * model(LLAMA).layers, digits=2),
        "rows": LONG // 8,
    }


def ring() -> dict[str, Any]:
    """The merge of two blocks, and the shortest block that hides: H100 with 400 Gb/s."""
    sums, outputs = (2.0, 6.0), (6.0, 1.0)
    total = sum(sums)
    merged = sum(part * output for part, output in zip(sums, outputs, strict=True)) / total
    assert abs(sum(exp(log(part) - log(total)) for part in sums) - 1) < 1e-12
    config, gpu = model(BIG), hardware("h100")
    limit = gpu.peak["bf16"] / gpu.network.bandwidth
    grouped = 2 * limit / (config.heads / config.kv_heads)
    return {
        "sum_a": f"{sums[0]:g}",
        "sum_b": f"{sums[1]:g}",
        "out_a": f"{outputs[0]:g}",
        "out_b": f"{outputs[1]:g}",
        "total": f"{total:g}",
        "merged": f"{merged:g}",
        "limit": round(limit, -1),
        "group": config.heads // config.kv_heads,
        "grouped": round(grouped, -1),
        "cp": 16,
        "rows": LONG // 16,
        "tokens": LONG,
    }


def _scores(positions: range) -> int:
    """Return the scores of the queries at ``positions`` under a causal mask."""
    return sum(position + 1 for position in positions)


def zigzag() -> dict[str, Any]:
    """Scores of 4 and of 16 ranks for 131,072 tokens: contiguous shards and zig-zag."""

    def contiguous(n: int) -> list[int]:
        size = LONG // n
        return [_scores(range(rank * size, (rank + 1) * size)) for rank in range(n)]

    def paired(n: int) -> list[int]:
        size = LONG // (2 * n)
        chunk = [_scores(range(one * size, (one + 1) * size)) for one in range(2 * n)]
        return [chunk[rank] + chunk[2 * n - 1 - rank] for rank in range(n)]

    def busiest(work: list[int]) -> float:
        return max(work) * len(work) / sum(work)

    few, many = contiguous(4), contiguous(16)
    assert len(set(paired(4))) == len(set(paired(16))) == 1
    return {
        "n": 4,
        "pieces": 8,
        "many": 16,
        "tokens": LONG,
        "first_last": f"{few[-1] / few[0]:.0f}",
        "busiest": f"{busiest(few):.2f}",
        "busiest_many": f"{busiest(many):.2f}",
        "paired": f"{busiest(paired(4)):g}",
        "saved": about(1 - 1 / busiest(many), "share", 2),
    }


def ring_or_ulysses() -> dict[str, Any]:
    """Bytes of a layer and step, 131,072 tokens: 8 query heads per key head, and 1."""
    grouped, plain = model(LLAMA), model("llama-2-7b")

    def sent(config: Any, n: int, way: Any) -> Any:
        return about(way(config, 1, LONG, n) / config.layers, digits=2)

    return {
        "tokens": LONG,
        "heads": plain.heads,
        "grouped_heads": grouped.heads,
        "kv": grouped.kv_heads,
        "few": 4,
        "many": 16,
        "ring": sent(plain, 16, ring_wire_bytes),
        "ulysses": sent(plain, 16, ulysses_wire_bytes),
        "ring_few": sent(grouped, 4, ring_wire_bytes),
        "ulysses_few": sent(grouped, 4, ulysses_wire_bytes),
        "ring_many": sent(grouped, 16, ring_wire_bytes),
        "ulysses_many": sent(grouped, 16, ulysses_wire_bytes),
        "node": hardware("h100").gpus_per_node,
    }


def flash() -> dict[str, Any]:
    """Llama 3 70B with 131,072 tokens: scores, all else, and the FLOPs of attention."""
    plain, fused = _layer(8, 1, fused=False), _layer(8, 1)
    config = model(LLAMA)
    both = layer_flops(config, 0, 8192), layer_flops(config, 0, LONG)
    short, long = (one.core / one.total for one in both)
    return {
        "tokens": LONG,
        "tp": 8,
        "cp": 8,
        "layers": config.layers,
        "scores": about(plain.scores),
        "rest": about(fused.total, digits=2),
        "all": about(fused.total * config.layers, digits=2),
        "inputs": about(fused.entering * config.layers, digits=2),
        "room": about(hardware("h100").capacity_bytes, digits=2),
        "divided": about(_layer(8, 8).total * config.layers, digits=2),
        "short": 8192,
        "share": about(short, "share", 2),
        "share_long": about(long, "share", 2),
        "longer": f"{both[1].total / both[0].total:.1f}",
    }
