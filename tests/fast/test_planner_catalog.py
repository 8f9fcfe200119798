"""The catalog of models and hardware: counts as published, sources, and what it refuses."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.formulas.parameters import parameter_sizes
from course_lib.model import Decoder, ModelConfig, build_model
from course_lib.planner import Configuration, custom_model, hardware, hardware_names, model, models
from course_lib.planner.parameters import (
    active_parameters,
    is_expert_layer,
    layer_parameters,
    layers_of_rank,
    parameters,
    parameters_per_rank,
)

COUNTS = {
    "gpt2-xl": 1_557_611_200,
    "gpt-j-6b": 6_050_882_784,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "falcon-180b": 179_522_565_120,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_419_200,
}


def rounded(count: int, printed: str) -> str:
    """The count with as many digits as the source prints: 18449756160 as "18.4B"."""
    if not printed.endswith("B"):
        return f"{count:,}"
    return f"{count / 1e9:.{len(printed.partition('.')[2][:-1])}f}B"


@pytest.mark.parametrize("name", models())
def test_parameters_are_those_that_the_source_prints(name):
    one = model(name)
    assert one.source
    assert rounded(parameters(one), one.published) == one.published
    if one.published_active:
        assert rounded(active_parameters(one), one.published_active) == one.published_active
    assert parameters(one) == COUNTS.get(name, parameters(one))


def test_exact_counts_are_of_catalog_entries():
    assert set(COUNTS) == {name for name in models() if "B" not in model(name).published}


@pytest.mark.parametrize("name", [name for name in models() if name.startswith("megatron")])
def test_megatron_formula(name):
    """P = 12 l h^2 (1 + 13/12h + (V + s)/12lh), equation 2 of arXiv:2104.04473, less a norm."""
    m = model(name)
    h, layers = m.hidden, m.layers
    formula = 12 * layers * h**2 + 13 * layers * h + (m.vocab + m.max_seq_len) * h
    assert parameters(m) == formula + 2 * h


def test_the_card_of_gpt_j_counts_copies():
    """Biases and norms on each of 8 cores, and an embedding bias, which the checkpoint folds in."""
    m = model("gpt-j-6b")
    core = parameters_per_rank(m, Configuration(tp=8), 0)
    assert 8 * (core.dense + m.hidden) == 6_053_381_344


def test_active_parameters():
    for name in models():
        m = model(name)
        assert (active_parameters(m) < parameters(m)) == (m.experts is not None)
    v3 = model("deepseek-v3")  # the paper prints 37B, without the input embedding
    assert rounded(active_parameters(v3) - v3.vocab * v3.hidden, "37B") == "37B"
    layer = layer_parameters(v3, 3)
    assert layer.experts == 256 * layer.shared_experts
    assert not layer.mlp
    assert [is_expert_layer(v3, n) for n in (2, 3)] == [False, True]


CONFIGS = st.builds(
    lambda family, layers, kv, groups, width, ffn, vocab, tied: ModelConfig(
        family=family,
        layers=layers,
        hidden=kv * groups * width,
        heads=kv * groups,
        kv_heads=kv,
        ffn=4 * ffn,
        vocab=vocab,
        max_seq_len=8,
        tied=tied,
    ),
    st.sampled_from(["gpt", "llama"]),
    st.integers(1, 6),
    st.sampled_from([4, 8]),
    st.sampled_from([1, 2]),
    st.sampled_from([2, 4]),
    st.integers(1, 8),
    st.integers(256, 300),
    st.booleans(),
)


def as_model(config: ModelConfig, experts: int = 0):
    """The same sizes in the catalog's form."""
    sizes = {f.name: getattr(config, f.name) for f in fields(ModelConfig)}
    names = ("family", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "max_seq_len")
    made = custom_model(**{name: sizes[name] for name in names}, experts=experts)
    return replace(made, tied=config.tied)


@settings(max_examples=25, deadline=None)
@given(CONFIGS)
def test_counts_are_those_of_the_built_model(config):
    built: Decoder = build_model(config)
    assert parameters(as_model(config)) == sum(p.numel() for p in built.parameters())


@settings(max_examples=200, deadline=None)
@given(
    config=CONFIGS,
    tp=st.sampled_from([1, 2, 4]),
    schedule=st.sampled_from([("1f1b", 1), ("interleaved", 2), ("zb-v", 2)]),
    pp=st.integers(1, 3),
    experts=st.sampled_from([0, 4]),
    ep=st.sampled_from([1, 2, 4]),
)
def test_ranks_add_up_to_the_model(config, tp, schedule, pp, experts, ep):
    """The ranks of tp, pp and ep hold each element once, replicas and padding taken off."""
    name, chunks = schedule
    ep = ep if experts else 1
    config = replace(config, layers=max(config.layers, pp * chunks))
    m = as_model(config, experts)
    plan = Configuration(tp=tp, pp=pp, ep=ep, dp=ep, schedule=name, chunks=chunks)
    ranks = [parameters_per_rank(m, plan, stage) for stage in range(pp)]
    layers = sorted(layer for stage in range(pp) for layer in layers_of_rank(m, plan, stage))
    assert layers == list(range(m.layers)), "each layer is on one rank"

    gpt, hidden = config.family == "gpt", config.hidden
    norm = hidden * (2 if gpt else 1)
    biases = hidden * gpt * (1 if experts else 2)  # of the two linears that tp divides by rows
    router = hidden * experts
    replicated = m.layers * (2 * norm + biases + router) + norm + config.max_seq_len * hidden * gpt
    padding = (-config.vocab % tp) * hidden * (1 if config.tied else 2)
    again = config.tied and name != "zb-v" and pp > 1  # the last rank has a copy of the embedding
    copy = (config.vocab + -config.vocab % tp) * hidden if again else 0
    held = tp * sum(rank.dense for rank in ranks) - (tp - 1) * replicated - padding - copy
    assert held + ep * sum(rank.experts for rank in ranks) == parameters(m)


@settings(max_examples=50, deadline=None)
@given(CONFIGS, st.sampled_from([1, 2, 4, 8]))
def test_a_rank_of_tp_holds_its_part_of_each_parameter(config, tp):
    """A rank has as many parameters as the model, none larger; KV heads are shared if too few."""
    config = replace(config, hidden=8 * config.head_dim, heads=8, ffn=8 * config.ffn)
    whole, part = parameter_sizes(config), parameter_sizes(config, n=tp)
    assert len(whole) == len(part)
    assert all(size <= all_ <= size * tp for size, all_ in zip(part, whole, strict=True))
    rank = parameters_per_rank(as_model(config), Configuration(tp=tp), 0)
    assert rank.dense == sum(part)


def test_uneven_stages():
    m = model("llama-3-405b")
    plan = Configuration(tp=8, pp=16, stage_layers=(7, *[8] * 14, 7))
    assert [len(layers_of_rank(m, plan, stage)) for stage in (0, 1, 15)] == [7, 8, 7]


@pytest.mark.parametrize(
    ("asked", "offered"),
    [
        ("llama-3.1-405b", "llama-3-405b"),
        ("70b", "llama-3-70b"),
        ("70b", "llama-2-70b"),
        ("Llama-3-8B", "llama-3-8b"),
        ("gpt3", "gpt-3-175b"),
        ("mixtral", "mixtral-8x7b"),
        ("no such model", "choose from gpt2-xl"),
    ],
)
def test_an_unknown_model_brings_suggestions(asked, offered):
    with pytest.raises(ValueError, match=rf"^no model is called '{asked}'.*{offered}"):
        model(asked)


def test_unknown_hardware_brings_suggestions():
    with pytest.raises(ValueError, match="no hardware is called 'a100'; did you mean a100-40 or"):
        hardware("a100")


SIZES = {"family": "llama", "layers": 4, "hidden": 64, "heads": 8, "vocab": 1000}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"family": "bert"}, "family 'bert': choose one of gpt, llama"),
        ({"layers": 0}, "expected a whole number from 1 to 10,000, got layers=0"),
        ({"layers": 10**9}, "got layers=1000000000"),
        ({"layers": 2.5}, "got layers=2.5"),
        ({"hidden": -64}, "got hidden=-64"),
        ({"heads": 0}, "got heads=0"),
        ({"heads": 7}, "heads=7 does not divide hidden=64"),
        ({"kv_heads": 3}, "kv_heads=3 does not divide heads=8"),
        ({"kv_heads": 16}, "kv_heads=16 does not divide heads=8"),
        ({"heads": 64}, "RoPE rotates pairs"),
        ({"vocab": 0}, "got vocab=0"),
        ({"vocab": True}, "got vocab=True"),
        ({"ffn": 0}, "got ffn=0"),
        ({"max_seq_len": -1}, "got max_seq_len=-1"),
        ({"experts": 4, "top_k": 5}, "got top_k=5 and experts=4; choose fewer"),
        ({"experts": 4, "top_k": 0}, "got top_k=0"),
        ({"experts": -1}, "got experts=-1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(change, says):
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        custom_model(**{**SIZES, **change})


def test_defaults_of_a_custom_model():
    m = custom_model(**{**SIZES, "hidden": 4096, "heads": 32})
    assert (m.ffn, m.kv_heads, m.head_dim, m.tied) == (11008, 32, 128, False)
    gpt = custom_model(**{**SIZES, "family": "gpt"}, experts=4, top_k=1)
    assert (gpt.ffn, gpt.tied, gpt.experts.ffn) == (256, True, 256)
    assert hash(gpt) == hash(replace(gpt))


@pytest.mark.parametrize("name", hardware_names())
def test_hardware_is_plausible_and_has_a_source(name):
    h = hardware(name)
    assert h.source
    assert 15e9 < h.capacity_bytes < 200e9
    assert h.peak["fp32"] < h.peak["fp16"]
    assert h.peak.get("bf16", h.peak["fp16"]) == h.peak["fp16"] <= h.peak.get("fp8", 1e18)
    assert h.peak["fp64"] <= h.peak["fp32"] <= h.peak.get("tf32", 1e18)
    assert h.network.bandwidth < h.node.bandwidth < h.memory_bandwidth
    assert 1e-6 < h.node.latency < h.network.latency < 1e-4
    assert 0 < h.node.efficiency <= h.network.efficiency == 1
    assert h.gpus_per_node in (8, 16)


def test_peaks_are_dense_and_links_count_one_direction():
    assert hardware("a100-80").peak["bf16"] == 312e12
    assert hardware("h100").peak == {**hardware("h200").peak, "bf16": 989e12, "fp8": 1979e12}
    ways = {
        name: hardware(name).node.bandwidth / 1e9 for name in ("a100-80", "h100", "h800", "b200")
    }
    assert ways == {"a100-80": 300, "h100": 450, "h800": 200, "b200": 900}
    assert hardware("h100").network.bandwidth == 50e9
    ring = hardware("h100").node
    assert ring.bandwidth * ring.efficiency == pytest.approx(370e9, rel=0.01)
    assert "bf16" not in hardware("v100-32").peak
