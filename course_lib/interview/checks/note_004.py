"""Checks of the claims on strategies from DP to five axes: memory, FSDP, pipelines, Llama 3."""

from __future__ import annotations

import ast
import builtins
from dataclasses import replace
from math import inf

import torch
from torch import nn

from course_lib.formulas import dp, inference, moves, pp, tp, zero
from course_lib.interview.checks import Numbers
from course_lib.interview.checks.note_002 import exposed, serving, training
from course_lib.layout import make_layout
from course_lib.ledger import wire
from course_lib.planner import configure, hardware, model
from course_lib.planner.estimate import estimate
from course_lib.planner.memory import layer_activations, state_bytes
from course_lib.planner.parameters import parameters, parameters_per_rank
from course_lib.planner.result import Estimate
from course_lib.schedule import Costs, make, predicted_bubble, simulate

LLAMA, BIG, F180 = "llama-3-70b", "llama-3-405b", "falcon-180b"
EQUAL = Costs.make(f=1, b=1)
FSDP = """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy

model = MyLLM()
model = FSDP(
    model,
    sharding_strategy=ShardingStrategy.FULL_SHARD,
    mixed_precision=MixedPrecision(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
    ),
    auto_wrap_policy=transformer_auto_wrap_policy,
)
"""
OWN = {"MyLLM"}  # the reader's model


# --- memory --------------------------------------------------------------------------------------


def weights_405b() -> Numbers:
    return 810, parameters(model(BIG)) * 2 / 1e9


def adam_405b() -> Numbers:
    return 4.86, state_bytes(parameters(model(BIG)), recipe=16).optimizer / 1e12


def h100_memory() -> Numbers:
    return 80, hardware("h100").capacity_bytes / 1e9


def too_large() -> Numbers:
    """GPUs of 80 GB that the weights alone need: the claim says more than one."""
    return 1, parameters(model(BIG)) * 2 > hardware("h100").capacity_bytes


def dp_wastes() -> Numbers:
    """Copies of the optimizer state of 1e9 parameters on 8 ranks of DP."""
    return 8, 8 * state_bytes(1e9, shards=8).optimizer / state_bytes(1e9).optimizer


def _zero_table(stage: int, shards: int = 64) -> tuple[float, float, float, float]:
    """GB of weights, gradients, optimizer state and all three, of 7.5e9 parameters."""
    states = state_bytes(7.5e9, zero=stage, shards=shards, recipe=16)
    three = (states.weights / 1e9, states.gradients / 1e9, states.optimizer / 1e9)
    return *three, sum(three)


def zero_weights() -> Numbers:
    return 15, _zero_table(0)[0]


def zero_gradients() -> Numbers:
    return 15, _zero_table(0)[1]


def zero_optimizer() -> Numbers:
    return 60, _zero_table(0)[2]


def zero_total() -> Numbers:
    return 90, _zero_table(0)[3]


def zero_1() -> Numbers:
    return 15 + 15 + 60 / 64, _zero_table(1)[3]


def zero_2() -> Numbers:
    return 15 + 15 / 64 + 60 / 64, _zero_table(2)[3]


def zero_3() -> Numbers:
    return 90 / 64, _zero_table(3)[3]


def zero_1_shard() -> Numbers:
    """Optimizer state of a rank of ZeRO-1, as a share: 64 ranks."""
    return 1 / 64, _zero_table(1)[2] / _zero_table(0)[2]


def _ratio(stage: int, micro_batches: int = 1) -> float:
    """Ratio of the bytes that ZeRO and DP send in a step."""
    sent = zero.wire_bytes(stage, [6400], 64, micro_batches=micro_batches)
    return float(sent / dp.wire_bytes(6400 * 4, 64))


def zero_1_volume() -> Numbers:
    return 1, _ratio(1, 8)


def zero_2_volume() -> Numbers:
    return 1, _ratio(2), _ratio(2, 8)


def zero_3_volume() -> Numbers:
    return 1.5, _ratio(3), _ratio(3, 8)


def q5_states() -> Numbers:
    """GB of states per GPU of 70e9 parameters, tp=8 on 64 GPUs: ZeRO-3, and ZeRO-2."""
    three, two = (state_bytes(70e9 / 8, zero=z, shards=8).total / 1e9 for z in (3, 2))
    return 20, three, two


def bytes_per_parameter() -> Numbers:
    """Bytes of all states per parameter: fp32 gradients, and bf16 gradients."""
    return 18, *(state_bytes(1e9, recipe=recipe).total / 1e9 for recipe in (18, 16))


def q180_weights() -> Numbers:
    """GB of weights per GPU of 180e9 parameters, tp=8, pp=4."""
    config = model(F180)
    plan = configure(config, 128, tp=8, pp=4, dp=4)
    most = max(parameters_per_rank(config, plan, stage).dense for stage in range(4))
    return 45, most * 2 / 1e9


# --- DP and FSDP ---------------------------------------------------------------------------------


def all_reduce_volume() -> Numbers:
    """Bytes of a rank per byte of the model: 8 ranks."""
    return 2 * 7 / 8, float(wire("all_reduce", 1, 8))


def twice_the_model() -> Numbers:
    """The same: 128 ranks, and 2."""
    return 2, *(float(wire("all_reduce", 1, n)) for n in (128, 2))


def dp_and_data() -> Numbers:
    """DP's bytes with twice the batch, as a multiple."""
    config = model(LLAMA)
    plans = [configure(config, 8, zero=0, seq=8192, global_batch=batch) for batch in (512, 1024)]
    one, two = (
        estimate(config, hardware("h100"), plan, simulated=False).communication["dp"].wire_bytes
        for plan in plans
    )
    return 1, two / one


def gradients_are_cleared() -> Numbers:
    """Gradient of the second step, as a multiple: the loop has no ``zero_grad()``."""
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 1), torch.randn(8, 4)
    found = []
    for _ in range(2):
        layer(x).sum().backward()
        assert layer.weight.grad is not None
        found.append(float(layer.weight.grad.norm()))
    return 1, found[1] / found[0]


def ddp_overlaps() -> Numbers:
    """1 if less than half of DP's seconds are exposed."""
    return 1, exposed(training(), "dp") < 0.5


def one_card_only() -> Numbers:
    """Replicas of Llama 3 70B on 64 GPUs that fit, each on 8 GPUs; the claim allows none."""
    config = model(LLAMA)
    assert parameters(config) * 2 > hardware("h100").capacity_bytes
    return 0, training().configuration.dp * training().fits


def undefined_names() -> Numbers:
    """Names that the fragment uses and defines nowhere."""
    tree = ast.parse(FSDP)
    known = set(dir(builtins)) | OWN
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            known |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            known.add(node.id)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return 0, len(used - known)


# --- TP and SP -----------------------------------------------------------------------------------


def _mlp(reduced: bool) -> float:
    """Return the ratio of the summed output of two ranks to the reference."""
    torch.manual_seed(0)
    x, a, b = (torch.randn(shape, dtype=torch.float64) for shape in ((4, 8), (8, 16), (16, 8)))
    gelu = nn.functional.gelu
    y1, y2 = (gelu(x @ p) @ q for p, q in zip(a.chunk(2, 1), b.chunk(2, 0), strict=True))
    inputs = [y1, y2] if reduced else [y1 + y2, y1 + y2]  # what each rank hands to the all-reduce
    summed = inputs[0] + inputs[1]
    return float(summed.norm() / (gelu(x @ a) @ b).norm())


def mlp_split() -> Numbers:
    return 1, _mlp(reduced=True)


def all_reduce_of_sum() -> Numbers:
    return 1, _mlp(reduced=False)


def heads_divide() -> Numbers:
    """1 if tp divides 64 heads: tp=8, and tp=6."""

    def legal(ranks: int) -> bool:
        try:
            configure(model(LLAMA), ranks, tp=ranks, seq=8160)
        except ValueError:
            return False
        return True

    return 1, legal(8), legal(6)


def four_all_reduces() -> Numbers:
    enter, leave = moves.entering(1, 8), moves.leaving(1, 8)
    both = (*enter.forward, *enter.backward, *leave.forward, *leave.backward)
    return 4, 2 * sum(move.calls for move in both)


def volume_of_bsh() -> Numbers:
    """TP's bytes with twice the tokens, as a multiple."""
    config = model("gpt-3-175b")
    return 2, float(tp.wire_bytes(config, 2, 2048, 8) / tp.wire_bytes(config, 1, 2048, 8))


def nvlink_above_600() -> Numbers:
    """1 if NVLink has more than 600 GB/s in both directions: H100, and A100."""
    return 1, *(2 * hardware(name).node.bandwidth > 600e9 for name in ("h100", "a100-80"))


def nvlink_900() -> Numbers:
    return 900, 2 * hardware("h100").node.bandwidth / 1e9


def tp_in_one_node() -> Numbers:
    """1 if tp=8 has shorter steps than tp=16 over two nodes."""
    return 1, training().step_seconds < training(tp_size=16).step_seconds


def sp_bytes() -> Numbers:
    """SP's bytes per activation region over TP's: without the second gather, and with it."""

    def sent(**options: bool) -> float:
        both = moves.entering(64, 8, **options), moves.leaving(64, 8, rows="rows" in options)
        return float(sum(one.wire() for one in both))

    plain = sent()
    return 1, sent(rows=True) / plain, sent(rows=True, again=True) / plain


def sp_activations() -> Numbers:
    """Activations of a layer, as a share of one GPU's: with SP, and with TP alone."""
    config = model("megatron-175b")
    one = layer_activations(config, configure(config, 1, seq=2048), 0).total
    plan = configure(config, 8, tp=8, seq=2048)
    plans = plan, replace(plan, sequence_parallel=False)
    return 1 / 8, *(layer_activations(config, each, 0).total / one for each in plans)


def mnemonic_tp() -> Numbers:
    """Elements per layer by the convention of the note's 2M: an all-reduce counts twice."""
    return 4, 2 * four_all_reduces()[1]


# --- PP ------------------------------------------------------------------------------------------


def naive_bubble() -> Numbers:
    return 3 / 7, predicted_bubble("naive", 4, 4)


def backward_in_the_figure() -> Numbers:
    """The slot, from 1, in which GPU 0 starts its first backward: 4 stages, 4 micro-batches."""
    spans = simulate(make("gpipe", 4, 4), EQUAL).rows[0]
    return 8, 1 + min(span.start for span in spans if span.op == "B")


def bubble_formula() -> Numbers:
    """Bubble of 8 stages and 32 micro-batches: share of total time, and of ideal time."""
    found = simulate(make("gpipe", 8, 32), Costs.make(f=1, b=2))
    return 7 / (32 + 7), found.bubble_of_total, found.bubble_of_ideal


def _simulated(name: str, chunks: int | None = None) -> float:
    return simulate(make(name, 8, 32, chunks), Costs.make(f=1, b=2)).bubble_of_total


def bubble_1f1b() -> Numbers:
    """1 if the bubble of 1F1B is smaller: than the naive schedule's, and than GPipe's."""
    return 1, *(_simulated("1f1b") < _simulated(name) - 1e-9 for name in ("naive", "gpipe"))


def memory_1f1b() -> Numbers:
    """Micro-batches in flight on the first of 8 stages, of 32; GPipe has 32."""
    assert max(make("gpipe", 8, 32).peak_in_flight()) == 32
    return 8, max(make("1f1b", 8, 32).peak_in_flight())


def interleaved_bubble() -> Numbers:
    """Bubble over ideal time with 2 chunks, as a share of that with one."""
    one, two = (
        simulate(make(name, 8, 32, chunks), Costs.make(f=1, b=2)).bubble_of_ideal
        for name, chunks in (("1f1b", None), ("interleaved", 2))
    )
    return 1 / 2, two / one


def interleaved_sends() -> Numbers:
    """Stage boundaries with 2 chunks, as a multiple: 1 if there are more."""
    boundaries = [
        pp.stage_boundaries(make(name, 8, 32, chunks))
        for name, chunks in (("1f1b", None), ("interleaved", 2))
    ]
    return 1, boundaries[1] > boundaries[0]


def zero_bubble() -> Numbers:
    """Bubble in a rank's own time: zb-v with F = I = W, and zb-h1."""
    costs = Costs.make(f=1, i=1, w=1)
    return 0, predicted_bubble("zb-v", 8, 32), predicted_bubble("zb-h1", 8, 32, costs=costs)


def pp_and_model_size() -> Numbers:
    """Bytes of an activation, 70B over 8B: twice the layers alone, and the real hidden size."""
    small, large = model("llama-3-8b"), model(LLAMA)
    return 1, 1.0 * small.hidden / small.hidden, large.hidden / small.hidden


def pp_over_network() -> Numbers:
    """1 if PP's exposed time is less than 1 % of a step: Falcon 180B, tp=8, pp=4, dp=4."""
    found = _falcon(1)
    return 1, found.communication["pp"].exposed_seconds / found.step_seconds < 0.01


# --- CP ------------------------------------------------------------------------------------------


def contiguous_chunks() -> Numbers:
    """Work of the last of 4 ranks over the first's: all scores, and a causal mask."""
    causal = (4**2 - 3**2) / 1**2
    return 1, 1.0, causal


def full_attention() -> Numbers:
    """Share of the attention scores that a rank of cp=4 computes."""
    return 1, 1 / 4


def cp_divides_cache() -> Numbers:
    """Bytes of the KV cache of a rank of cp=4, as a share."""
    config = model(LLAMA)
    whole = inference.cache_bytes(config, 1, 131072)
    return 1 / 4, inference.cache_bytes(config, 1, 131072, cp=4) / whole


# --- plans ---------------------------------------------------------------------------------------


def llama_world() -> Numbers:
    return 16384, make_layout(tp=8, pp=16, dp=128).world


def llama_with_cp() -> Numbers:
    """GPUs with dp=128: cp=1, and the cp=16 of long sequences."""
    return 16384, *(make_layout(tp=8, cp=cp, pp=16, dp=128).world for cp in (1, 16))


def llama_long() -> Numbers:
    """dp with cp=16 on 16,384 GPUs."""
    return 128, make_layout(16384, tp=8, cp=16, pp=16).sizes["dp"]


def cp_inside_tp() -> Numbers:
    """Distance of neighbors over CP in the order TP, CP, PP, DP of Llama 3."""
    group = make_layout(16384, "tp-cp-pp-dp", tp=8, cp=16, pp=16, dp=8).groups("cp")[0]
    return 1, group[1] - group[0]


def dp_outermost() -> Numbers:
    """Distance of neighbors over DP: the order of Llama 3, and Megatron's default."""
    orders = ("tp-cp-pp-dp", "tp-cp-dp-pp")
    groups = [make_layout(16384, order, tp=8, pp=16, dp=128).groups("dp")[0] for order in orders]
    return 128, *(group[1] - group[0] for group in groups)


def _fits(name: str, gpus: int, **options: object) -> bool:
    config = model(name)
    plan = configure(config, gpus, **options)  # type: ignore[arg-type]
    return estimate(config, hardware("h100"), plan, simulated=False).fits


def fsdp_7b() -> Numbers:
    return 1, _fits("llama-2-7b", 8, zero=3)


def fsdp_tp_70b() -> Numbers:
    return 1, _fits(LLAMA, 64, tp=8, zero=3, seq=8192)


def three_axes_405b() -> Numbers:
    """1 if Llama 3 405B fits on 1,024 GPUs with tp=8, pp=16 and ZeRO-1."""
    plan = {"tp": 8, "pp": 16, "zero": 1, "seq": 8192, "recompute": "full", "global_batch": 128}
    return 1, _fits(BIG, 1024, **plan)


def pp_minimizes_latency() -> Numbers:
    """1 if a token of GPT-3 is faster with tp=8, pp=2 than with tp=8 on half of the GPUs."""
    tp8 = serving("gpt-3-175b", 8, 1, tp=8)
    both = serving("gpt-3-175b", 16, 1, tp=8, pp=2)
    return 1, both.tpot_seconds < tp8.tpot_seconds


def q5_nodes() -> Numbers:
    return 64, 8 * 8


def q5_groups() -> Numbers:
    return 8, make_layout(64, tp=8).sizes["dp"]


def q5_long() -> Numbers:
    return 64, make_layout(tp=8, cp=2, dp=4).world


def q5_long_fits() -> Numbers:
    """1 if 131,072 tokens fit with cp=2: full recomputation, and none."""
    options = {"tp": 8, "cp": 2, "zero": 3, "seq": 131072}
    return 1, *(_fits(LLAMA, 64, recompute=again, **options) for again in ("full", "none"))


def q5_zero_2() -> Numbers:
    return 1, _fits(LLAMA, 64, tp=8, zero=2, seq=8192)


def q180_world() -> Numbers:
    return 128, make_layout(tp=8, pp=4, dp=4).world


def q180_fsdp() -> Numbers:
    return 4, make_layout(128, tp=8, pp=4).sizes["dp"]


def _falcon(stage: int, recompute: str = "full") -> Estimate:
    config = model(F180)
    plan = configure(config, 128, tp=8, pp=4, dp=4, zero=stage, seq=2048, recompute=recompute)
    return estimate(config, hardware("h100"), plan)


def q180_zero_2() -> Numbers:
    """Step time with ZeRO-2 over that with ZeRO-1, in the proposed pipeline."""
    return 1, _falcon(2).step_seconds / _falcon(1).step_seconds


def q180_fits() -> Numbers:
    """1 if the proposed plan fits on GPUs of 80 GB with ZeRO-1, and not without ZeRO."""

    def fits(stage: int) -> list[bool]:
        return [_falcon(stage, recompute).fits for recompute in ("full", "none")]

    return 1, all(fits(1)) and not any(fits(0))


def fsdp_over_network() -> Numbers:
    """1 if a pass computes longer than it gathers at 50 GB/s: 16,384 tokens per GPU, and 2,048."""
    gpu = hardware("h100")

    def hidden(tokens: int) -> bool:
        compute = 2 * tokens / (gpu.peak["bf16"] * gpu.efficiency_of("bf16"))
        return compute > 2 / gpu.network.bandwidth

    return 1, hidden(16384), hidden(2048)


def golden_rule() -> Numbers:
    """1 if tp=8 with ZeRO-3 beats ZeRO-3 alone: Llama 3 70B on 4,096 GPUs, and on 64.

    A step has 512 sequences of 8,192 tokens. ZeRO-3 alone has no work for more than 512 GPUs.
    """
    config = model(LLAMA)

    def step(gpus: int, ranks: int, micro_batch: int) -> float:
        options = {"zero": 3, "seq": 8192, "recompute": "full", "global_batch": 512}
        try:
            plan = configure(config, gpus, tp=ranks, micro_batch=micro_batch, **options)  # type: ignore[arg-type]
        except ValueError:
            return inf
        found = estimate(config, hardware("h100"), plan, simulated=False)
        return found.step_seconds if found.fits else inf

    def wins(gpus: int) -> bool:
        return min(step(gpus, 8, m) for m in (1, 2, 4, 8)) < step(gpus, 1, 1)

    return 1, wins(4096), wins(64)


def flash_and_cp() -> Numbers:
    """1 if a plan without CP fits, with a fused kernel: 8,192 tokens, and 131,072."""
    config = model(LLAMA)
    long = configure(config, 64, tp=8, zero=3, seq=131072)
    assert layer_activations(config, long, 0).total > 4e9
    return 1, *(_fits(LLAMA, 64, tp=8, zero=3, seq=seq) for seq in (8192, 131072))
