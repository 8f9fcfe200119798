"""Inference: each number by hand, and what must be true of any plan."""

from __future__ import annotations

import json
import shlex

import pytest

from course_lib import cli
from course_lib.formulas.inference import cache_bytes
from course_lib.planner import configure, hardware, model
from course_lib.planner.links import Span
from course_lib.planner.parameters import parameters
from course_lib.planner.serve import Serving, all_reduce_seconds, serve
from course_lib.planner.text import serving

H100 = hardware("h100")


def plan(name: str = "llama-3-8b", gpus: int = 1, on: str = "h100", **options) -> Serving:
    sizes = {key: options.pop(key) for key in ("batch", "prompt", "generate") if key in options}
    reserve = {"reserve": options.pop("reserve")} if "reserve" in options else {}
    made = configure(model(name), gpus, **options)
    return serve(model(name), hardware(on), made, **sizes, **reserve)


def test_one_gpu_by_hand():
    """Llama 3 8B, 32 layers, 8 KV heads of 128: 131,072 bytes of cache per token in bf16."""
    found = plan(batch=4, prompt=1000, generate=200)
    assert found.weights_bytes == 2 * 8_030_261_248
    assert found.kv_bytes == 4 * 1200 * 131_072
    table = 128_256 * 4096  # of the embedding only one row per token is read
    read = (2 * (8_030_261_248 - table) + 4 * 1100 * 131_072) / 3.35e12
    assert found.tpot_seconds == pytest.approx(read)
    assert found.tokens_per_second == pytest.approx(4 / read)
    matrices = 2 * (8_030_261_248 - 2 * table)  # per token, all layers (with a few norms)
    attention = 32 * 4 * 4096 * 1000 / 2
    flops = 4 * (1000 * (matrices + attention) + 2 * table)
    speed = 989.4e12 * H100.efficiency_of("bf16")
    assert found.ttft_seconds == pytest.approx(flops / speed, rel=1e-3)
    free = 0.92 * H100.capacity_bytes - found.weights_bytes
    assert found.requests_in_flight == free // (1200 * 131_072)


def test_the_cache_is_the_one_of_inference():
    """Grouped queries, and fewer heads than ranks, which are stored in copies."""
    for name, tp in (("llama-3-70b", 8), ("llama-3-70b", 16), ("gpt-j-6b", 4)):
        found = plan(name, tp, tp=tp, batch=3, prompt=512, generate=128)
        assert found.kv_bytes == cache_bytes(model(name), 3, 640, tp=tp)


def test_latent_attention_stores_latent_vectors():
    """DeepSeek-V3: 512 + 64 numbers per token and layer, whatever tp is (arXiv:2412.19437)."""
    for tp in (1, 8):
        found = plan("deepseek-v3", 64, tp=tp, batch=2, prompt=100, generate=100, dtype="fp8")
        assert found.kv_bytes == 2 * 200 * 61 * (512 + 64)


def test_dp_copies_and_tp_shards():
    one, copies, shards = plan(), plan(gpus=8), plan(gpus=8, tp=8)
    assert (copies.weights_bytes, copies.tpot_seconds) == (one.weights_bytes, one.tpot_seconds)
    assert copies.tokens_per_second == pytest.approx(8 * one.tokens_per_second)
    assert copies.requests_in_flight == 8 * one.requests_in_flight
    assert one.weights_bytes / 8 < shards.weights_bytes < one.weights_bytes / 7.9  # norms are whole
    assert shards.tpot_seconds < one.tpot_seconds
    assert shards.tokens_per_second < copies.tokens_per_second
    assert shards.decode["tp"] > 0


def test_latency_dominates_small_all_reduces():
    """Two per layer and the embedding's, of 8 KB: one message each inside a node."""
    found = plan(gpus=8, tp=8, batch=1)
    node = H100.node
    sent = 7 * 8192 / node.bandwidth / node.efficiency
    assert found.decode["tp"] == pytest.approx(65 * (node.latency + sent))


def test_tp_over_nodes_is_slower():
    inside = plan("gpt-3-175b", 32, "a100-80", tp=8, pp=4, batch=8)
    across = plan("gpt-3-175b", 32, "a100-80", tp=32, batch=8)
    assert across.decode["tp"] > 5 * inside.decode["tp"]
    assert across.tokens_per_second < inside.tokens_per_second


@pytest.mark.parametrize("payload", [1e3, 1e6, 1e9])
@pytest.mark.parametrize(("inside", "nodes"), [(2, 1), (8, 1), (8, 4), (1, 16)])
def test_the_all_reduce_takes_the_fastest_algorithm(payload, inside, nodes):
    n, node, network = inside * nodes, H100.node, H100.network
    ring = 2 * (inside - 1) * (node.latency + payload / inside / node.bandwidth / node.efficiency)
    far = payload / n / network.bandwidth / network.efficiency
    ring += 2 * (nodes - 1) * (network.latency + far)
    found = all_reduce_seconds(int(payload), n, Span(inside, nodes), H100)
    assert found <= ring * (1 + 1e-9)
    if payload == 1e9:
        assert found == pytest.approx(ring, rel=0.01)  # of two ranks one message less


def test_pipeline_stages_work_on_groups():
    """Four groups of two requests: the way through all stages reads all weights once."""
    whole = plan("llama-3-70b", 8, tp=8, batch=8)
    stages = plan("llama-3-70b", 32, tp=8, pp=4, batch=8)
    assert stages.weights_bytes < 0.3 * whole.weights_bytes
    assert stages.decode["weights"] == pytest.approx(whole.decode["weights"], rel=1e-3)
    assert stages.decode["KV cache"] == pytest.approx(whole.decode["KV cache"] / 4, rel=1e-3)
    assert stages.tokens_per_second < 4 * whole.tokens_per_second


def test_a_token_reads_only_its_experts():
    """Mixtral: one token reads 2 of 8 experts, a large batch nearly all."""
    one, many = (plan("mixtral-8x7b", 2, tp=2, batch=batch) for batch in (1, 64))
    assert one.decode["weights"] < 0.35 * many.decode["weights"]
    whole = 2 * parameters(model("mixtral-8x7b"))
    assert many.decode["weights"] * H100.memory_bandwidth < whole


def test_large_batches_are_limited_by_flops():
    found = plan(batch=512, prompt=128, generate=128)
    assert found.decode["compute"] > 0
    assert found.tpot_seconds > plan(batch=1, prompt=128, generate=128).tpot_seconds


def test_what_does_not_fit_is_a_result():
    weights = plan("llama-3-70b")
    assert (weights.fits, weights.requests_in_flight) == (False, 0)
    assert "raise tp or pp" in weights.reasons[0]
    cache = plan(batch=4096, prompt=4096)
    assert not cache.fits
    assert 0 < cache.requests_in_flight < 4096
    assert "lower the batch" in cache.reasons[0]
    assert "Does not fit." in serving(cache)
    free = plan(reserve=0.0)
    assert free.headroom_bytes - plan().headroom_bytes == pytest.approx(0.08 * H100.capacity_bytes)


def test_serve_by_command(capfd):
    line = "plan gpt-j-6b --gpus 8 --hardware a100-80 --serve --batch 4 --prompt 500 --generate 100"
    assert cli.main(shlex.split(f"{line} --json")) == 0
    data = json.loads(capfd.readouterr().out)
    assert set(data) >= {
        "weights_bytes", "kv_bytes", "ttft_seconds", "tpot_seconds", "tokens_per_second",
        "requests_in_flight", "fits", "assumptions",
    }  # fmt: skip
    assert data["kv_bytes"] == 4 * 600 * 28 * 2 * 4096 * 2
    assert sum(data["decode"].values()) == pytest.approx(data["tpot_seconds"])
    assert cli.main(shlex.split(line)) == 0
    text = capfd.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    for words in ("Time to first token", "Time per token", "Throughput", "Assumptions"):
        assert words in text


def test_long_requests_are_named():
    assert "3,072" in " ".join(plan("gpt-j-6b", prompt=3000, generate=72).assumptions)
