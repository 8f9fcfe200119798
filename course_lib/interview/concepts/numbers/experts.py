"""Numbers of the questions on expert parallelism."""

from __future__ import annotations

from math import ceil
from typing import Any

from course_lib.formulas.ep import even_wire_bytes
from course_lib.formulas.parameters import mlp_parameters
from course_lib.interview.concepts.numbers import about
from course_lib.layout import make_layout
from course_lib.planner import hardware, model
from course_lib.planner.parameters import parameters

MIXTRAL, DEEPSEEK, TOKENS = "mixtral-8x7b", "deepseek-v3", 4096


def all_to_all() -> dict[str, Any]:
    """A layer of Mixtral 8x7B on 8 ranks of 4,096 tokens."""
    config = model(MIXTRAL)
    assert config.experts is not None
    top_k, number = config.experts.top_k, config.experts.number
    row = config.hidden * config.dtype.itemsize
    sent = even_wire_bytes(TOKENS, top_k, row, 8)
    gpu = hardware("h100")
    return {
        "n": 8,
        "less": 7,
        "tokens": TOKENS,
        "top_k": top_k,
        "experts": number,
        "pairs": TOKENS * top_k,
        "row": about(row),
        "one": about(sent / 4),
        "layer": about(sent),
        "layers": config.layers,
        "all": about(config.layers * sent),
        "node_ms": f"{1e3 * float(sent / 4) / gpu.node.bandwidth:.2g} ms",
        "network_ms": f"{1e3 * float(sent / 4) / gpu.network.bandwidth:.2g} ms",
    }


def balance() -> dict[str, Any]:
    """4,096 tokens, 8 experts, 2 per token; one expert is chosen twice as often as the mean."""
    top_k, number, factor = 2, 8, 1.25
    pairs = TOKENS * top_k
    mean = pairs // number
    popular, room = 2 * mean, ceil(factor * mean)
    shares = [popular / pairs] + [(pairs - popular) / (number - 1) / pairs] * (number - 1)
    return {
        "tokens": TOKENS,
        "experts": number,
        "top_k": top_k,
        "pairs": pairs,
        "mean": mean,
        "popular": popular,
        "others": round((pairs - popular) / (number - 1)),
        "factor": f"{factor:g}",
        "room": room,
        "dropped": popular - room,
        "dropped_share": about((popular - room) / pairs, "share", 2),
        "even": f"{number * number * (1 / number) ** 2:g}",
        "loss": f"{number * sum(share * share for share in shares):.2f}",
    }


def ranks() -> dict[str, Any]:
    """dp=64 with ep=8, and DeepSeek-V3 on 1,024 GPUs with tp=2, pp=16, ep=64."""
    layout = make_layout(64, ep=8)
    ep, edp = layout.expert_groups()
    config = model(MIXTRAL)
    assert config.experts is not None
    expert = config.layers * config.experts.number * mlp_parameters(config, ffn=config.experts.ffn)
    gpus, tp, pp, deep = 1024, 2, 16, 64
    data = make_layout(gpus, tp=tp, pp=pp).sizes["dp"]
    return {
        "dp": layout.sizes["dp"],
        "ep": len(ep[0]),
        "ep_groups": len(ep),
        "edp": len(edp[0]),
        "first": ", ".join(map(str, edp[0][:3])),
        "expert": about(expert * config.dtype.itemsize, digits=2),
        "own": about(expert * config.dtype.itemsize / len(ep[0]), digits=2),
        "gpus": gpus,
        "tp": tp,
        "pp": pp,
        "deep": deep,
        "data": data,
        "product": tp * pp * deep * data,
    }


def fp8() -> dict[str, Any]:
    """A row of DeepSeek-V3: bf16, and fp8 with a scale of 4 bytes per 128 elements."""
    config = model(DEEPSEEK)
    assert config.experts is not None
    block = 128
    narrow = config.hidden + 4 * (config.hidden // block)
    wide = config.hidden * config.dtype.itemsize
    return {
        "hidden": f"{config.hidden:,}",
        "block": block,
        "scales": config.hidden // block,
        "wide": f"{wide:,}",
        "narrow": f"{narrow:,}",
        "row": about(1 - narrow / wide, "share", 2),
        "pair": f"{4 * wide:,}",
        "pair_fp8": f"{2 * wide + 2 * narrow:,}",
        "saved": about(1 - (2 * wide + 2 * narrow) / (4 * wide), "share", 2),
        "half": about(1 / 2, "share"),
        "top_k": config.experts.top_k,
        "billions": round(parameters(config) / 1e9),
    }
