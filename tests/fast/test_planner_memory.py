"""Memory and FLOPs of a plan, held to printed values, to closed forms and to this course's runs."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.planner.catalog import DTYPES, Experts, Model, custom_model, model
from course_lib.planner.configuration import Configuration, configure, stages_of
from course_lib.planner.flops import (
    blocks_flops,
    hardware_flops,
    head_flops,
    layer_flops,
    recomputed_flops,
    step_flops,
)
from course_lib.planner.in_flight import in_flight
from course_lib.planner.memory import (
    activation_bytes,
    layer_activations,
    memory,
    stage_memory,
    stage_states,
    state_bytes,
    state_memory,
)
from course_lib.planner.parameters import layer_parameters, parameters, parameters_per_rank
from course_lib.schedule import SCHEDULES, make

GB, MB, GiB = 1e9, 2**20, 2**30


# --- states --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "printed"),
    [
        (1, (120, 120, 120)),
        (4, (52.5, 41.3, 30)),
        (16, (35.6, 21.6, 7.5)),
        (64, (31.4, 16.6, 1.88)),
        (256, (30.4, 15.4, 0.47)),
        (1024, (30.1, 15.1, 0.12)),
    ],
)
def test_zero_table_1(n, printed):
    """Rajbhandari et al. 2020, 7.5B parameters, per device."""
    for stage, expected in enumerate(printed, start=1):
        states = state_bytes(7.5e9, zero=stage, shards=n, recipe=16)
        assert states.total / GB == pytest.approx(expected, abs=0.06)
    assert state_bytes(7.5e9, zero=0, shards=n, recipe=16).total == 120e9


@pytest.mark.parametrize("d", [1, 2, 8, 128])
def test_the_distributed_optimizer_takes_6_and_12_over_d(d):
    states = state_bytes(1000, zero=1, shards=d)
    assert states.total == pytest.approx(1000 * (6 + 12 / d))
    assert (states.weights, states.gradients) == (2000, 4000)


def test_deepspeed_estimators():
    zero_2 = state_bytes(2851e6, zero=2, shards=8, recipe=20).total
    zero_3 = state_bytes(2851e6, zero=3, shards=8, recipe=20, gathered=32e6).total
    assert zero_2 == 4 * 2851e6 + 16 * 2851e6 / 8
    assert zero_3 == 4 * 32e6 + 18 * 2851e6 / 8
    assert (round(zero_2 / GiB, 2), round(zero_3 / GiB, 2)) == (15.93, 6.09)


def test_wide_formats_have_no_master_weight():
    for name, each in (("fp32", (4, 4, 8)), ("fp64", (8, 8, 16))):
        states = state_bytes(10, dtype=DTYPES[name], recipe=20)
        assert (states.weights, states.gradients, states.optimizer) == tuple(10 * b for b in each)
    for name in ("fp16", "fp8"):
        assert state_bytes(10, dtype=DTYPES[name]) == state_bytes(10)
    with pytest.raises(ValueError, match="recipe=16, 18 or 20 bytes per parameter, got recipe=17"):
        state_bytes(10, recipe=17)


def megatron_parameters(layers: int, hidden: int, vocab: int, *, tp: int = 1, pp: int = 1) -> float:
    """Elements on the fullest shard by theoretical_memory_usage.py: no biases, no positions."""
    matrices = 12 * hidden * hidden * layers / pp + vocab * hidden
    norms = 2 * hidden * (2 * layers + 1) / pp
    return matrices / tp + norms


def test_megatron_theoretical_weights_and_optimizer():
    gpt2, gpt3 = (48, 1600, 50304), (96, 12288, 51200)
    assert round(18 * megatron_parameters(*gpt2) / MB, 2) == 26699.47
    assert round(18 * megatron_parameters(*gpt3, tp=8, pp=8) / MB, 2) == 48016.18
    # Ours has biases and positions too, and rows of vocabulary that are not padded.
    ours = state_memory(model("gpt2-xl"), Configuration(seq=1024))
    assert ours.total == 18 * parameters(model("gpt2-xl"))
    assert ours.total / MB == pytest.approx(26699.47, rel=0.002)
    sizes = Configuration(tp=8, pp=8, schedule="interleaved", chunks=3, global_batch=64)
    assert state_memory(model("megatron-175b"), sizes).total / MB == pytest.approx(
        48016.18, rel=0.01
    )


def test_experts_are_sharded_over_fewer_ranks():
    mixtral = model("mixtral-8x7b")
    plan = configure(mixtral, 32, ep=8, zero=1, global_batch=32)
    held = parameters_per_rank(mixtral, plan, 0)
    states = stage_states(mixtral, plan, 0)
    assert states.optimizer == pytest.approx(12 * (held.dense / 32 + held.experts / 4))
    assert states.weights == 2 * (held.dense + held.experts)


def test_zero_3_gathers_two_blocks_beside_its_shards():
    llama = model("llama-3-8b")
    plan = configure(llama, 64, zero=3)
    total, block = parameters(llama), layer_parameters(llama, 0).dense
    head = llama.vocab * llama.hidden
    states = stage_states(llama, plan, 0)
    assert states.weights == pytest.approx(2 * (total / 64 + block + max(block, head)))
    assert states.gradients + states.optimizer == pytest.approx(16 * total / 64)
    one = custom_model("llama", layers=1, hidden=64, heads=4, vocab=64)
    assert stage_states(one, configure(one, 2, zero=3), 0).weights <= 2 * parameters(one)


# --- activations ---------------------------------------------------------------------------------

SEQ, HIDDEN, HEADS = 2048, 12288, 96
SCORES = 5 * HEADS * SEQ / HIDDEN


@pytest.mark.parametrize("b", [1, 4])
@pytest.mark.parametrize("t", [2, 8])
def test_korthikanti_per_layer(t, b):
    plain = Configuration(fused_attention=False, micro_batch=b)
    tp = replace(plain, tp=t)
    both = replace(tp, sequence_parallel=True)
    for plan, recompute, expected in (
        (plain, "none", 34 + SCORES),
        (tp, "none", 10 + 24 / t + SCORES / t),
        (both, "none", 34 / t + SCORES / t),
        (tp, "selective", 10 + 24 / t),
        (both, "selective", 34 / t),
        (tp, "full", 2),
        (both, "full", 2 / t),
    ):
        layer = layer_activations(model("megatron-175b"), plan, 0)
        assert layer.saved(recompute) == pytest.approx(SEQ * b * HIDDEN * expected)
        fused = replace(plan, fused_attention=True)
        fused_layer = layer_activations(model("megatron-175b"), fused, 0)
        assert fused_layer.saved("none") == layer.saved("selective")


def test_korthikanti_outside_layers():
    """sbhp/t of the embedding's dropout and, when p = 1, 4sbh(1 + v/h)/t of the output layer."""
    gpt = model("megatron-175b")
    sbh = SEQ * HIDDEN
    for t in (1, 8):
        plan = Configuration(tp=t, sequence_parallel=t > 1, recompute="selective")
        expected = 96 * 34 * sbh / t + sbh / t + 4 * sbh * (1 + 51200 / HIDDEN) / t
        assert activation_bytes(gpt, plan) == pytest.approx(expected)
        piped = replace(plan, pp=8, global_batch=64)
        assert activation_bytes(gpt, piped) == pytest.approx(96 * 34 * sbh / t + 8 * sbh / t)


def test_megatron_theoretical_activations():
    plan = configure(
        model("megatron-175b"),
        64,
        tp=8,
        pp=8,
        chunks=3,
        micro_batch=1,
        global_batch=64,
        seq=2048,
        recompute="selective",
    )
    ours = activation_bytes(model("megatron-175b"), plan)
    # 8 bytes per token of ids are not counted: 0.02 MB.
    assert ours / MB == pytest.approx(12679.02, abs=0.03)


@pytest.mark.parametrize("name", ["gpt-3-175b", "custom"])
def test_a_gpt_layer_saves_34_sbh(name):
    gpt = custom_model("gpt", layers=2, hidden=HIDDEN, heads=HEADS, vocab=51200)
    gpt = gpt if name == "custom" else model(name)
    assert layer_activations(gpt, Configuration(), 0).total == 34 * SEQ * HIDDEN


def test_a_fused_swiglu_block_by_hand():
    llama = model("llama-3-70b")
    layer = layer_activations(llama, Configuration(seq=1), 0)
    norms, columns, heads, keys, mlp = 4 * 8192, 4 * 8192, 4 * 8192, 2 * 2 * 1024, 6 * 28672
    assert layer.total == norms + columns + heads + keys + mlp
    wide = layer_activations(llama, Configuration(seq=1, dtype=DTYPES["fp32"]), 0)
    assert wide.total == 2 * layer.total
    eighth = layer_activations(llama, Configuration(seq=1, tp=8, sequence_parallel=True), 0)
    assert eighth.total == layer.total / 8
    kept = layer_activations(
        llama, Configuration(seq=1, tp=8, sequence_parallel=True, gather_again=False), 0
    )
    assert kept.total == eighth.total + 4 * 8192 * 7 / 8
    shared = layer_activations(llama, Configuration(seq=1, tp=16, sequence_parallel=True), 0)
    assert shared.total == (layer.total - keys) / 16 + keys / 8


def test_experts_save_rows_of_top_k():
    mixtral, one = model("mixtral-8x7b"), Configuration(seq=1)
    dense = replace(mixtral, experts=None)
    rows = 2 * (2 * 4096 + 6 * 14336) + 4 * 8
    more = layer_activations(mixtral, one, 0).total - layer_activations(dense, one, 0).total
    assert more == rows - 6 * 14336


def test_context_parallelism_divides_the_sequence():
    llama = model("llama-3-8b")
    one, four = (configure(llama, n, cp=n, zero=0, global_batch=1) for n in (1, 4))
    assert activation_bytes(llama, four) == pytest.approx(activation_bytes(llama, one) / 4)


def test_full_recomputation_keeps_inputs_and_one_block():
    llama = model("llama-3-8b")
    plan = configure(llama, 1, recompute="full", global_batch=1, seq=8192)
    x_bytes, layer = 2 * 8192 * 4096, layer_activations(llama, plan, 0)
    logits = 2 * x_bytes + 4 * 8192 * llama.vocab
    working = layer.total - x_bytes
    assert activation_bytes(llama, plan) == 32 * x_bytes + max(logits, working)


@pytest.mark.parametrize("name", SCHEDULES)
def test_in_flight_is_that_of_the_rows(name):
    chunks = (1, 2, 3) if name in ("naive", "gpipe", "interleaved") else (None,)
    for v in chunks:
        for p in (1, 2, 3, 4, 5):
            for m in (1, 2, 3, 4, 5, 7, 8, 12):
                rows = make(name, p, m, v).peak_in_flight()
                assert [in_flight(name, p, m, r, v).total for r in range(p)] == rows


def test_the_first_stage_under_each_schedule():
    llama = custom_model("llama", layers=32, hidden=1024, heads=8, vocab=1024)
    layer = layer_activations(llama, Configuration(), 0).total

    def layers_kept(schedule, **sizes):
        plan = configure(llama, 4, pp=4, schedule=schedule, global_batch=16, seq=2048, **sizes)
        return activation_bytes(llama, plan, 0) / layer

    assert layers_kept("1f1b") == 32
    assert layers_kept("gpipe") == 8 * 16
    assert layers_kept("interleaved", chunks=2) == pytest.approx(32 * (1 + 3 / (4 * 2)))
    assert layers_kept("zb-h1") == 32
    assert layers_kept("zb-h2") == 8 * 7
    assert layers_kept("zb-v") > 32  # the last stage, with the head, is on this rank too
    assert layers_kept("1f1b", micro_batch=8) == 8 * 8 * 2  # two micro-batches of 8 sequences


def test_the_worst_stage_is_the_worst_of_all():
    llama = model("llama-3-405b")
    for layers in (None, (7, *[8] * 14, 7)):
        plan = configure(
            llama, 16384, tp=8, pp=16, zero=2, seq=8192, global_batch=2048, stage_layers=layers
        )
        every = [stage_memory(llama, plan, rank).total for rank in range(16)]
        assert memory(llama, plan).total == max(every)


def test_llama_3_405b_fits_without_recomputation():
    """FSDP shards gradients too, and both ends have a layer less (arXiv:2407.21783, 3.3.2)."""
    layers = (7, *[8] * 14, 7)
    plan = configure(
        model("llama-3-405b"),
        16384,
        tp=8,
        pp=16,
        zero=2,
        seq=8192,
        global_batch=2048,
        stage_layers=layers,
    )
    assert 60e9 < memory(model("llama-3-405b"), plan).total < 80e9 * 0.92


# --- properties ----------------------------------------------------------------------------------


@st.composite
def plans(draw):
    family = draw(st.sampled_from(["gpt", "llama"]))
    layers = draw(st.sampled_from([8, 16, 32]))
    heads = draw(st.sampled_from([8, 16]))
    sizes = custom_model(
        family,
        layers=layers,
        hidden=128 * heads,
        heads=heads,
        kv_heads=draw(st.sampled_from([4, heads])),
        vocab=32000,
        experts=draw(st.sampled_from([0, 8])) if family == "llama" else 0,
    )
    if draw(st.booleans()):
        sizes = replace(sizes, dropout=0.0)
    plan = Configuration(
        tp=draw(st.sampled_from([1, 2, 4])),
        pp=draw(st.sampled_from([1, 2, 4])),
        cp=draw(st.sampled_from([1, 2])),
        dp=draw(st.sampled_from([1, 4])),
        zero=draw(st.integers(0, 3)),
        micro_batch=draw(st.sampled_from([1, 2])),
        global_batch=64,
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        sequence_parallel=True,
        recipe=draw(st.sampled_from([16, 18, 20])),
        fused_attention=draw(st.booleans()),
    )
    return sizes, plan


@given(plans())
@settings(max_examples=60, deadline=None)
def test_memory_never_grows_with_zero_tp_pp_or_recompute(drawn):
    sizes, plan = drawn
    now = memory(sizes, plan).total
    more = {
        "zero": replace(plan, zero=min(plan.zero + 1, 3)),
        "tp": replace(plan, tp=2 * plan.tp),
        "pp": replace(plan, pp=2 * plan.pp),
        "cp": replace(plan, cp=2 * plan.cp),
        "recompute": replace(plan, recompute={"none": "selective"}.get(plan.recompute, "full")),
    }
    if sizes.dropout:  # p micro-batches in flight keep masks of the embedding: sbhp/t
        del more["pp"]
    for name, other in more.items():
        assert memory(sizes, other).total <= now * (1 + 1e-9), name


@given(plans())
@settings(max_examples=30, deadline=None)
def test_sums(drawn):
    sizes, plan = drawn
    held = memory(sizes, plan)
    assert held.total == held.weights + held.gradients + held.optimizer + held.activations
    assert min(held.weights, held.gradients, held.optimizer, held.activations) > 0
    plan = replace(plan, zero=0, tp=1)
    every = sum(stage_states(sizes, plan, rank).total for rank in range(plan.pp))
    twice = sizes.vocab * sizes.hidden * (sizes.tied and plan.pp > 1)
    assert every == plan.recipe * (parameters(sizes) + twice)


# --- FLOPs ---------------------------------------------------------------------------------------

SIZES = [(6144, 48, 64, 4), (12288, 96, 96, 64), (2304, 24, 24, 512), (20480, 105, 128, 2520)]


@pytest.mark.parametrize(("h", "layers", "heads", "batch"), SIZES)
def test_megatron_closed_forms(h, layers, heads, batch):
    s, v = 2048, 51200
    gpt = custom_model("gpt", layers=layers, hidden=h, heads=heads, vocab=v)
    full = Configuration(global_batch=batch, recompute="full")
    closed = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert hardware_flops(gpt, full, "full") == pytest.approx(closed, rel=1e-12)
    model_flops = 72 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert step_flops(gpt, full, "full") == pytest.approx(model_flops, rel=1e-12)
    selective = replace(full, recompute="selective")
    printed = 72 * batch * s * layers * h**2 * (1 + s / (3 * h) + v / (12 * layers * h))
    assert hardware_flops(gpt, selective, "full", core_forwards=3) == pytest.approx(printed)
    assert recomputed_flops(gpt, replace(full, recompute="none")) == 0


@pytest.mark.parametrize(
    ("name", "gpus", "batch", "seconds", "mfu", "hfu"),
    [("megatron-22b", 8, 4, 1.10, 41.5, 43.7), ("megatron-175b", 64, 64, 13.75, 51.4, 52.8)],
)
def test_korthikanti_pairs(name, gpus, batch, seconds, mfu, hfu):
    plan = Configuration(global_batch=batch, recompute="selective")
    share = 100 / (seconds * gpus * 312e12)
    assert step_flops(model(name), plan, "full") * share == pytest.approx(mfu, abs=0.2)
    hardware = hardware_flops(model(name), plan, "full", core_forwards=3)
    assert hardware * share == pytest.approx(hfu, abs=0.2)


def test_two_conventions_of_attention():
    llama, seq = model("llama-3-8b"), 8192
    full, causal = (layer_flops(llama, 0, seq, attention=a) for a in ("full", "causal"))
    assert (3 * full.core, 3 * causal.core) == (12 * seq * 4096, 6 * seq * 4096)
    assert full.projections == causal.projections == 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    assert full.mlp == 2 * 3 * 4096 * 14336
    with pytest.raises(ValueError, match='expected attention="causal" or "full"'):
        layer_flops(llama, 0, seq, attention="half")


def test_experts_and_latent_attention():
    mixtral = layer_flops(model("mixtral-8x7b"), 0, 1)
    assert mixtral.mlp == 2 * (4096 * 8 + 2 * 3 * 4096 * 14336)
    deepseek = model("deepseek-v3")
    layer, latent = layer_flops(deepseek, 60, 4096), deepseek.latent
    weights = layer_parameters(deepseek, 60)
    norms = latent.q_rank + latent.kv_rank
    assert layer.projections == 2 * (weights.attention - norms)
    assert layer.core == 128 * (192 + 128) * 4096
    expert = 3 * 7168 * 2048
    assert layer.mlp == 2 * (7168 * 256 + 9 * expert)
    assert layer_flops(deepseek, 0, 1).mlp == 2 * 3 * 7168 * deepseek.ffn
    blocks = blocks_flops(deepseek, 4096)
    assert blocks.mlp == 3 * 2 * 3 * 7168 * deepseek.ffn + 58 * layer.mlp
    plan = Configuration(global_batch=2, seq=4096)
    assert step_flops(deepseek, plan) == 3 * 8192 * (blocks.total + head_flops(deepseek))


# --- what is impossible --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": 3, "gpus": 3}, "tp to divide 32 heads, got tp=3; choose 1, 2 or 4"),
        ({"tp": 64, "gpus": 64}, "tp to divide 32 heads, got tp=64"),
        ({"pp": 64, "gpus": 64}, "at most 32 stages, one per layer, got pp x chunks = 64 x 1"),
        ({"pp": 8, "chunks": 5}, "at most 32 stages, one per layer, got pp x chunks = 8 x 5"),
        ({"pp": 3}, "tp x pp x cp to divide 8 GPUs, got 1 x 3 x 1 = 3"),
        ({"dp": 3}, "tp x pp x cp x dp to be 8 GPUs, got 1 x 1 x 1 x 3 = 3"),
        ({"ep": 2}, "expected ep=1, as llama-3-8b has no experts, got ep=2"),
        ({"cp": 8, "seq": 8200}, "seq to be a multiple of 16"),
        ({"tp": 8, "seq": 8196}, "seq to be a multiple of 8"),
        ({"global_batch": 12}, "8 x 1 = 8 to divide the global batch, got global_batch=12"),
        ({"schedule": "1f1"}, "no schedule is called '1f1'; did you mean 1f1b"),
        ({"recompute": "ful"}, "no recompute is called 'ful'; choose none, selective or full"),
        ({"dtype": "bf8"}, "no dtype is called 'bf8'; did you mean"),
        ({"zero": 4}, "zero from 0 to 3, got zero=4"),
        ({"zero": -1}, "zero from 0 to 3, got zero=-1"),
        ({"pp": 8, "schedule": "1f1b", "chunks": 2}, "expected chunks=1 for 1f1b, got chunks=2"),
        ({"pp": 8, "schedule": "zb-v", "chunks": 3}, "expected chunks=2 for zb-v, got chunks=3"),
        ({"chunks": 2}, "expected chunks=1 without a pipeline, got chunks=2"),
        ({"gpus": 2**20 + 1}, "a whole number from 1 to 1,048,576 as gpus, got gpus=1048577"),
        ({"tp": 0}, "a whole number from 1 to 1,048,576 as tp, got tp=0"),
        ({"tp": 2.0}, "as tp, got tp=2.0"),
        ({"micro_batch": -1}, "as micro_batch, got micro_batch=-1"),
        ({"recipe": 17}, "recipe=16, 18 or 20 bytes per parameter, got recipe=17"),
        ({"pp": 2, "stage_layers": (16, 15)}, "2 stages, one layer or more each and 32 in all"),
        ({"pp": 2, "stage_layers": (32, 0)}, "2 stages, one layer or more each and 32 in all"),
        ({"pp": 2, "stage_layers": (16, 8, 8)}, "got 16, 8, 8: 3 stages with 32 layers"),
    ],
)
def test_impossible_configurations(changes, message):
    with pytest.raises(ValueError) as caught:
        configure(model("llama-3-8b"), **{"gpus": 8, **changes})
    assert message in str(caught.value)


def test_impossible_experts():
    mixtral = model("mixtral-8x7b")
    with pytest.raises(ValueError, match="ep to divide dp x cp = 2, got ep=4; choose 1 or 2"):
        configure(mixtral, 8, tp=4, ep=4)
    with pytest.raises(ValueError, match="ep to divide 8 experts, got ep=16; choose 1, 2, 4 or 8"):
        configure(mixtral, 16, ep=16)
    grouped = custom_model("llama", layers=2, hidden=96, heads=12, kv_heads=4, ffn=288, vocab=64)
    with pytest.raises(ValueError, match="4 key and value heads or to be a multiple of them"):
        configure(grouped, 6, tp=6)
    assert configure(grouped, 12, tp=12, seq=1200).tp == 12


def test_defaults():
    llama = model("llama-3-8b")
    plan = configure(llama, 64, tp=8, pp=2, chunks=2)
    assert (plan.dp, plan.zero, plan.schedule, plan.sequence_parallel) == (
        4,
        1,
        "interleaved",
        True,
    )
    assert (plan.recipe, plan.fused_attention, plan.tokens) == (18, True, 2**22)
    assert configure(llama, 1).zero == 0
    assert configure(llama, 8, pp=4, schedule="zb-v").chunks == 2
    uneven = configure(llama, 4, pp=4, stage_layers=(7, 9, 9, 7))
    assert [len(layers) for _, layers in stages_of(llama, uneven)] == [7, 9, 9, 7]
    assert configure(llama, 12, pp=3, global_batch=28, micro_batch=7).micro_batches == 1


def toy(experts: Experts | None = None) -> Model:
    """The model of `course tour`."""
    return Model(
        name="toy",
        family="llama",
        layers=4,
        hidden=64,
        heads=8,
        kv_heads=4,
        ffn=192,
        vocab=256,
        max_seq_len=64,
        head_dim=8,
        experts=experts,
    )


def test_the_toy_model_to_the_byte_is_another_mode():
    """Its rows are held to the tour's in tests/fast/test_planner_toy.py."""
    plan = Configuration(global_batch=8, micro_batch=8, seq=64, dtype=DTYPES["fp32"])
    held = memory(toy(), plan, exact=True)
    assert held.weights == held.gradients == 4 * parameters(toy())
    assert held.activations == 12_036_108
    with pytest.raises(ValueError, match="expected recompute=none, or full without a pipeline"):
        memory(toy(), replace(plan, recompute="selective"), exact=True)
    with pytest.raises(ValueError, match="expected a model of the course, got deepseek-v3"):
        memory(model("deepseek-v3"), Configuration(), exact=True)
