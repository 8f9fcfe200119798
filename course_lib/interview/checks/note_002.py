"""Checks of the claims on what data and model parallelism send: GPT-3 and GPT-J."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import cache
from math import ceil

from course_lib.formulas import dp, inference, moves, pp, tp
from course_lib.interview.checks import Numbers
from course_lib.interview.checks.note_000 import nodes_of
from course_lib.layout import make_layout
from course_lib.ledger import wire
from course_lib.planner import configure, hardware, model
from course_lib.planner.estimate import estimate
from course_lib.planner.memory import state_bytes
from course_lib.planner.parameters import parameters
from course_lib.planner.result import Estimate
from course_lib.planner.serve import Serving, serve
from course_lib.schedule import Costs, make, simulate

GPT3, GPTJ, LLAMA = "gpt-3-175b", "gpt-j-6b", "llama-3-70b"
BATCH, SEQ = 32, 2048
STEP_BYTES = 384 * BATCH * SEQ * 12288 * 2  # payload of TP in a step, as the note counts it
GRADIENTS = 350e9
A100 = "a100-80"


def sent_over_nvlink() -> float:
    """Return the bytes per second that a ring reaches on an A100's NVLink."""
    link = hardware(A100).node
    return link.bandwidth * link.efficiency


def zero_for_replicas() -> Numbers:
    """Bytes that a rank sends per decoded token where the model is neither cut by tp nor pp."""
    config = model(GPT3)
    over_tp = inference.tp_wire_bytes(config, 1, 1, 1)
    return 0, float(over_tp + inference.pp_wire_bytes(config, 1, 1, 1))


def inference_all_reduces() -> Numbers:
    """All-reduces of GPT-3's blocks: one forward pass, and a sample of 256 generated tokens."""
    passes = 2 * model(GPT3).layers
    return 192, passes, passes * 256


def payload_is_sent() -> Numbers:
    """Bytes that a rank sends, as a multiple of the payload: n=2, and n=8."""
    return 1, *(float(wire("all_reduce", 1, n)) for n in (2, 8))


def transfer_per_layer() -> Numbers:
    return 96, pp.stage_boundaries(make("1f1b", 4, 8))


def transfers_of_4_stages() -> Numbers:
    return 3, pp.stage_boundaries(make("1f1b", 4, 8))


def all_micro_batches() -> Numbers:
    """Forward sends of a batch in units of its x_BSD: the note's 3 B/M, and M times as much."""
    schedule = make("1f1b", 4, 8)
    return 3 / 8, pp.wire_bytes(schedule, 8) / 8 / 2


def order_in_inference() -> Numbers:
    """1 if DP < PP < TP in bytes per decoded token, all ranks together: 4 ranks."""
    config = model(GPT3)
    over_tp = 4 * inference.tp_wire_bytes(config, 1, 1, 4)
    return 1, 0 < inference.pp_wire_bytes(config, 1, 1, 4) < over_tp


def growth() -> Numbers:
    """TP's bytes per token with 192 layers instead of 96, as a multiple; PP's do not change."""
    one = model(GPT3)
    two = replace(one, layers=2 * one.layers)
    assert inference.pp_wire_bytes(one, 1, 1, 4) == inference.pp_wire_bytes(two, 1, 1, 4)
    ratio = inference.tp_wire_bytes(two, 1, 1, 8) / inference.tp_wire_bytes(one, 1, 1, 8)
    return 2, float(ratio)


def one_all_reduce() -> Numbers:
    """Calls of DDP with its default buckets of 25 MiB: Llama 3 8B in bf16."""
    return 1, ceil(parameters(model("llama-3-8b")) * 2 / (25 * 2**20))


def dp_sends_model_size() -> Numbers:
    """GB that a rank sends per step for 350 GB of gradients: n=2, and n=8."""
    return 350, *(float(dp.wire_bytes(int(GRADIENTS), n)) / 1e9 for n in (2, 8))


def training_all_reduces() -> Numbers:
    """All-reduces of GPT-3's blocks: one micro-batch, and 8."""
    enter, leave = moves.entering(1, 8), moves.leaving(1, 8)
    both = [*enter.forward, *enter.backward, *leave.forward, *leave.backward]
    per_micro_batch = 2 * model(GPT3).layers * sum(move.calls for move in both)
    return 384, per_micro_batch, 8 * per_micro_batch


def tp_620_gb() -> Numbers:
    return 620, STEP_BYTES / 1e9


def gradients_350_gb() -> Numbers:
    return 350, parameters(model(GPT3)) * 2 / 1e9


def ratio_of_tp_to_dp() -> Numbers:
    """Bytes that a GPU sends over TP and over DP: tp=8 of which each has 1/8 of the gradients."""
    over_tp = wire("all_reduce", STEP_BYTES, 8)
    return 620 / 350, float(over_tp / dp.wire_bytes(int(GRADIENTS) // 8, 4))


def dp_is_global() -> Numbers:
    """Nodes per DP group: tp=8 and dp=4, and the order tp-dp-pp with tp=2, dp=2, pp=4."""
    outer = make_layout(32, "tp-dp-pp", tp=8, dp=4)
    inner = make_layout(16, "tp-dp-pp", tp=2, dp=2, pp=4)
    return 4, *(max(map(nodes_of, one.groups("dp"))) for one in (outer, inner))


@cache
def training(overlap_tp: bool = False, tp_size: int = 8) -> Estimate:
    """Return the estimate of a step of Llama 3 70B on 64 H100 GPUs, ZeRO-1, 8,192 tokens."""
    config = model(LLAMA)
    plan = configure(
        config, 64, tp=tp_size, zero=1, seq=8192, recompute="full", overlap_tp=overlap_tp
    )
    return estimate(config, hardware("h100"), plan)


def exposed(found: Estimate, axis: str) -> float:
    """Return the exposed share of the seconds of ``axis``."""
    one = found.communication[axis]
    return one.exposed_seconds / one.seconds


def tp_overlaps() -> Numbers:
    """1 if less than half of TP's time is exposed: kernels cut into pieces, and plain TP."""
    return 1, exposed(training(overlap_tp=True), "tp") < 0.5, exposed(training(), "tp") < 0.5


def tp_overlaps_rather_than_dp() -> Numbers:
    """1 if TP exposes a smaller share of its time than DP."""
    return 1, exposed(training(), "tp") < exposed(training(), "dp")


def tp_one_second() -> Numbers:
    return 1, float(wire("all_reduce", STEP_BYTES, 8)) / sent_over_nvlink()


def dp_in_a_node() -> Numbers:
    return 350 / 600, float(dp.wire_bytes(int(GRADIENTS), 8)) / sent_over_nvlink()


def dp_14_seconds() -> Numbers:
    """Seconds of the all-reduce of one GPU's gradients at 25 GB/s: tp=8, dp=4."""
    return 14, float(dp.wire_bytes(int(GRADIENTS) // 8, 4)) / 25e9


def dp_across_nodes() -> Numbers:
    """Return whether DP exposes more than 10 % of a step: with one sequence per replica, and 64."""
    config = model(LLAMA)

    def inefficient(sequences: int) -> bool:
        plan = configure(config, 64, tp=8, zero=1, seq=2048, global_batch=8 * sequences)
        found = estimate(config, hardware("h100"), plan)
        return found.communication["dp"].exposed_seconds / found.step_seconds > 0.10

    return 1, inefficient(1), inefficient(64)


def tp_across_nodes() -> Numbers:
    """1 if tp=16 over two nodes is slower than tp=8, by more than 20 %."""
    return 1, training(tp_size=16).step_seconds > 1.2 * training().step_seconds


def stars_across_nodes() -> Numbers:
    """1 if PP exposes fewer seconds than DP, and DP fewer than TP, each across nodes."""
    config = model(LLAMA)
    plan = configure(config, 64, tp=8, pp=2, zero=1, seq=8192, recompute="full")
    stages = estimate(config, hardware("h100"), plan).communication
    wide = training(tp_size=16).communication
    seconds = (stages["pp"], stages["dp"], wide["tp"])
    over_pp, over_dp, over_tp = (one.exposed_seconds for one in seconds)
    return 1, over_pp < over_dp < over_tp


def world_64() -> Numbers:
    return 64, make_layout(tp=8, pp=2, dp=4).world


def four_nodes() -> Numbers:
    return 4, make_layout(tp=8, pp=2, dp=4).world / 8


def pp_inside_a_node() -> Numbers:
    """Nodes per PP group of tp=8, pp=2, dp=4, in the two orders of pp and dp."""
    layouts = [make_layout(64, order, tp=8, pp=2, dp=4) for order in ("tp-pp-dp", "tp-dp-pp")]
    return 1, min(nodes_of(group) for one in layouts for group in one.groups("pp"))


@cache
def serving(name: str, gpus: int, batch: int, **degrees: int) -> Serving:
    """Return the plan of inference of a catalog model on A100 GPUs of 80 GB."""
    config = model(name)
    plan = configure(config, gpus, zero=0, **degrees)  # type: ignore[arg-type]
    return serve(config, hardware(A100), plan, batch=batch)


def linear_speedup() -> Numbers:
    one, eight = serving(GPTJ, 1, 8), serving(GPTJ, 8, 8, dp=8)
    return 8, eight.tokens_per_second / one.tokens_per_second


def dp_needs_one_gpu() -> Numbers:
    """Replicas possible with GPT-3 on 32 GPUs, where the model does not fit on one."""
    found = serving(GPT3, 32, 8, tp=8, dp=4)
    return 1, found.configuration.dp * found.fits


def tp_speedup() -> Numbers:
    """Speedup of one decoded token per GPU of tp=8, Llama 3 8B: the claim says 0.85."""
    one, eight = serving("llama-3-8b", 1, 1), serving("llama-3-8b", 8, 1, tp=8)
    return 0.85, one.tpot_seconds / eight.tpot_seconds / 8


def tp_speedup_across_nodes() -> Numbers:
    """The same for GPT-3, tp=32 against tp=8, where 8 GPUs count as 8."""
    eight, many = serving(GPT3, 8, 32, tp=8), serving(GPT3, 32, 32, tp=32)
    return 0.3, eight.tpot_seconds / many.tpot_seconds / 4


def pp_speedup() -> Numbers:
    """Speedup of 8 stages with 32 micro-batches over one GPU, simulated."""
    claimed = 8 / (1 + (8 - 1) / 32)
    costs = Costs.make(f=1, b=2)
    return claimed, 32 * 3 * 8 / simulate(make("1f1b", 8, 32), costs).makespan


def pp_near_linear() -> Numbers:
    """Speedup per stage, with 800 micro-batches and with 8."""
    costs = Costs.make(f=1, b=2)
    each = (3 * m / simulate(make("1f1b", 8, m), costs).makespan for m in (800, 8))
    return 1, *each


def gptj_dp() -> Numbers:
    return 160, 8 / 0.050


def gptj_tp_latency() -> Numbers:
    """Milliseconds per sample: an eighth of the 50 ms of one GPU, and 8 ms of communication."""
    return 58, 50 / 8 + 8


def gptj_tp_throughput() -> Numbers:
    """Samples per second, one at a time, at 58 ms."""
    return 55, 1 / 0.058


def dp_three_times() -> Numbers:
    """DP's throughput over TP's, both from the note's own latencies."""
    return 3, (8 / 0.050) / (1 / 0.058)


def gpt3_on_one_gpu() -> Numbers:
    """1 if GPT-3's weights in bf16 are more than a GPU of 80 GB."""
    return 1, parameters(model(GPT3)) * 2 > hardware(A100).capacity_bytes


def gpt3_on_8() -> Numbers:
    """1 if tp=8, dp=4 fits: A100 GPUs of 80 GB, and of 40 GB."""
    config = model(GPT3)
    plan = configure(config, 32, tp=8, dp=4, zero=0)
    return 1, *(serve(config, hardware(name), plan).fits for name in (A100, "a100-40"))


def tp_32() -> Numbers:
    """1 if tp=32 decodes fewer tokens per second than tp=8, dp=4 with the same requests."""
    wide, narrow = serving(GPT3, 32, 32, tp=32), serving(GPT3, 32, 8, tp=8, dp=4)
    return 1, wide.tokens_per_second < narrow.tokens_per_second


def choose(model_size: float, num_gpus: int, gpu_memory: float) -> dict[str, int]:
    """Return what the note's ``choose_parallelism_strategy`` returns, line by line."""
    if model_size < gpu_memory:
        return {"DP": num_gpus, "TP": 1, "PP": 1}
    gpus_per_node = 8
    num_nodes = num_gpus // gpus_per_node
    if num_nodes == 1:
        return {"DP": 1, "TP": num_gpus, "PP": 1}
    return {"DP": 1, "TP": gpus_per_node, "PP": num_nodes}


def fits_by_weights() -> Numbers:
    """1 if a model that the code takes for fitting fits: inference, and training. Llama 3 8B."""
    config, gpu = model("llama-3-8b"), hardware("h100")
    weights = parameters(config) * 2
    assert weights < gpu.capacity_bytes
    trained = state_bytes(parameters(config)).total < gpu.capacity_bytes
    return 1, serve(config, gpu, configure(config, 1, zero=0)).fits, trained


def chosen_replicas() -> Numbers:
    """Replicas that the code chooses for GPT-3 on 32 GPUs, where the note praises 4."""
    return 4, choose(350, 32, 80)["DP"]


def chosen_on_4_gpus() -> Numbers:
    """Product of the degrees that the code returns for 4 GPUs."""
    chosen = choose(140, 4, 80)
    return 4, chosen["DP"] * chosen["TP"] * chosen["PP"]


def chosen_on_12_gpus() -> Numbers:
    """GPUs of a node over which the code spreads TP for 12 GPUs in nodes of 8."""
    return 8, choose(140, 12, 80)["TP"]


def chosen_on_20_gpus() -> Numbers:
    chosen = choose(350, 20, 80)
    return 20, chosen["DP"] * chosen["TP"] * chosen["PP"]


def decode_overlaps_tp() -> Numbers:
    """1 if some of TP's time is hidden: two halves of a batch in turns, and one request.

    In each of 10 layers a half computes for one unit of time, then sends for half a unit.
    """

    def hidden(parts: int) -> bool:
        compute = link = 0.0  # when each is free
        ready = [0.0] * parts
        for part in [*range(parts)] * 10:
            compute = max(compute, ready[part]) + 1.0
            link = ready[part] = max(link, compute) + 0.5
        return link < parts * 10 * (1.0 + 0.5)

    return 1, hidden(2), hidden(1)


def dp_above_pp() -> Numbers:
    """1 if a GPU sends more over DP than over PP in a step: 32 micro-batches, and 1,024."""
    config = model(LLAMA)

    def more(micro_batches: int) -> bool:
        stage = dp.wire_bytes(parameters(config) * 2 // 32, 4)
        x_bytes = Fraction(8192 * config.hidden * 2, 8)
        return stage > 2 * micro_batches * x_bytes

    return 1, more(32), more(1024)


def dp_first() -> Numbers:
    """1 if DP=8 decodes more tokens per second than TP=8: GPT-J, 2,048 requests in all, and 64."""
    config, gpu = model(GPTJ), hardware(A100)

    def faster(requests: int) -> bool:
        copies, shards = configure(config, 8, dp=8, zero=0), configure(config, 8, tp=8, zero=0)
        dp8 = serve(config, gpu, copies, batch=requests // 8, prompt=128, generate=64)
        tp8 = serve(config, gpu, shards, batch=requests, prompt=128, generate=64)
        return dp8.tokens_per_second > tp8.tokens_per_second

    return 1, faster(2048), faster(64)


def frequency() -> Numbers:
    """1 if DP makes fewer calls per step than TP, buckets included."""
    found = training().communication
    return 1, found["dp"].calls < found["tp"].calls


def tp_grows_with_tokens() -> Numbers:
    """TP's bytes with twice the tokens, as a multiple."""
    config = model(GPT3)
    return 2, float(tp.wire_bytes(config, 2, SEQ, 8) / tp.wire_bytes(config, 1, SEQ, 8))
