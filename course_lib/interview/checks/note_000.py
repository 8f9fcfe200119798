"""Checks of the claims on DP, TP and PP together: 512 GPUs in nodes of 8."""

from __future__ import annotations

from collections.abc import Callable

from course_lib.formulas import inference, moves, zero
from course_lib.formulas.parameters import Width
from course_lib.formulas.pp import stage_boundaries
from course_lib.interview.checks import Numbers
from course_lib.layout import Layout, make_layout
from course_lib.planner import configure, hardware, model
from course_lib.planner.estimate import estimate
from course_lib.planner.links import Span
from course_lib.planner.parameters import parameters
from course_lib.planner.result import Estimate
from course_lib.planner.serve import all_reduce_seconds, serve
from course_lib.schedule import make, predicted_bubble

PER_NODE = 8
ORDER = "tp-pp-dp"
GPT3 = "gpt-3-175b"
BF16 = Width(2)


def layout() -> Layout:
    """Return the layout of the claims: 8 x 8 x 8 ranks, tp fastest, then pp, then dp."""
    return make_layout(512, ORDER, tp=8, pp=8, dp=8)


def nodes_of(group: list[int]) -> int:
    """Return the number of nodes that ``group`` touches."""
    return len({rank // PER_NODE for rank in group})


def tp_inside_a_node() -> Numbers:
    return 1, max(map(nodes_of, layout().groups("tp")))


def pp_across_nodes() -> Numbers:
    return 8, min(map(nodes_of, layout().groups("pp")))


def three_groups() -> Numbers:
    counts = {sum(rank in group for axis in ("tp", "pp", "dp") for group in layout().groups(axis))
              for rank in (0, 77, 511)}  # fmt: skip
    return 3, max(counts) if len(counts) == 1 else 0


def replica() -> Numbers:
    flat = make_layout(64, ORDER, tp=8, dp=8)
    return 8, len(flat.groups("tp", "pp")[0]), len(layout().groups("tp", "pp")[0])


def product() -> Numbers:
    return 512, layout().world


def pipelines() -> Numbers:
    return 8, len(layout().groups("tp", "pp")), len(layout().groups("pp"))


def rank_range() -> Numbers:
    return 0, eval("0-511")


def coordinates() -> Numbers:
    here = layout()
    equal = [
        here.coordinates(rank) == {"tp": rank % 8, "pp": rank // 8 % 8, "dp": rank // 64, "cp": 0}
        for rank in range(512)
    ]
    return 512, sum(equal)


def _ranks_with(axis: str, group: Callable[[int], list[int]]) -> int:
    """Count the ranks for which the formula ``group`` gives the group of ``axis``."""
    groups = layout().groups(axis)
    return sum(group(rank) in groups for rank in range(512))


def tp_group() -> Numbers:
    return 512, _ranks_with("tp", lambda rank: [rank - rank % 8 + i for i in range(8)])


def pp_group() -> Numbers:
    return 512, _ranks_with("pp", lambda rank: [rank + i * 8 for i in range(8)])


def dp_group() -> Numbers:
    return 512, _ranks_with("dp", lambda rank: [rank + i * 64 for i in range(8)])


def groups_of_rank_0() -> Numbers:
    listed = [list(range(8)), list(range(0, 64, 8)), list(range(0, 512, 64))]
    axes = ("tp", "pp", "dp")
    return 3, sum(one in layout().groups(axis) for one, axis in zip(listed, axes, strict=True))


def data_in_a_dp_group() -> Numbers:
    here = layout()
    return 1, len({here.coordinates(rank)["dp"] for rank in here.groups("dp")[0]})


def sends_per_micro_batch() -> Numbers:
    return 8, stage_boundaries(make("1f1b", 8, 8))


def all_reduces_per_layer() -> Numbers:
    enter, leave = moves.entering(1, 8), moves.leaving(1, 8)
    forward = 2 * sum(move.calls for move in (*enter.forward, *leave.forward))
    backward = 2 * sum(move.calls for move in (*enter.backward, *leave.backward))
    return 2, forward, forward + backward


def nvlink_600() -> Numbers:
    a100, h100 = (2 * hardware(name).node.bandwidth / 1e9 for name in ("a100-80", "h100"))
    return 600, a100, h100


def separate_links() -> Numbers:
    """Kinds of link that PP and DP use."""
    found = _training().communication
    return 2, len({found[axis].link for axis in ("pp", "dp")})


def frequencies() -> Numbers:
    """1 if a rank makes more calls over TP than over PP, and more over PP than over DP."""
    calls = {axis: one.calls for axis, one in _training().communication.items()}
    return 1, calls["tp"] > calls["pp"] > calls["dp"]


def _training() -> Estimate:
    config = model(GPT3)
    plan = configure(config, 512, tp=8, pp=8, dp=8, global_batch=1536, recompute="full")
    return estimate(config, hardware("a100-80"), plan)


def tp_milliseconds(tokens: int) -> float:
    """Return the milliseconds of a layer's two all-reduces in a forward of GPT-3, tp=8."""
    payload = tokens * model(GPT3).hidden * 2
    return 2e3 * all_reduce_seconds(payload, 8, Span(8, 1), hardware("a100-80"))


def tp_5_ms() -> Numbers:
    return 5, tp_milliseconds(14 * 1024), tp_milliseconds(1)


def infiniband_25() -> Numbers:
    return 25, *(hardware(name).network.bandwidth / 1e9 for name in ("a100-80", "h100"))


def pp_50_ms() -> Numbers:
    """A stage boundary sends a micro-batch of 50,000 tokens, or of 2,048; one adapter."""
    each = model(GPT3).hidden * 2 / hardware("a100-80").network.bandwidth
    return 50, 50_000 * each * 1e3, 2048 * each * 1e3


def dp_one_second() -> Numbers:
    """All-reduce of fp32 gradients of a stage's shard at 25 GB/s."""
    elements = parameters(model(GPT3)) // 64
    sent = moves.wire_of([moves.Move("all_reduce", elements * 4, 8)])
    return 1, float(sent) / hardware("a100-80").network.bandwidth


def one_sync() -> Numbers:
    def volume(stage: int, micro_batches: int) -> float:
        return float(zero.wire_bytes(stage, [1024], 8, micro_batches=micro_batches))

    return 1, volume(1, 8) / volume(1, 1), volume(2, 8) / volume(2, 1)


def no_dp_in_inference() -> Numbers:
    """Bytes between replicas per decoded token: dense, and with experts spread over replicas."""
    experts = inference.even_ep_wire_bytes(model("mixtral-8x7b"), 1, 2, 8)
    return 0, 0, float(experts)


def inference_world() -> Numbers:
    return 512, make_layout(512, ORDER, tp=8, pp=64, dp=1).world


def stages_per_node() -> Numbers:
    here = make_layout(512, ORDER, tp=8, pp=64)
    return 8, len({here.coordinates(rank)["pp"] for rank in range(PER_NODE)})


def nodes_of_the_pipeline() -> Numbers:
    return 8, max(map(nodes_of, make_layout(512, ORDER, tp=8, pp=64).groups("pp")))


def replicas_in_inference() -> Numbers:
    """Decoded tokens per second of 512 GPUs, 32 replicas against one pipeline of 64 stages."""
    config, gpus = model(GPT3), hardware("a100-80")
    wide = serve(config, gpus, configure(config, 512, tp=8, pp=2, dp=32, zero=0), batch=64)
    deep = serve(config, gpus, configure(config, 512, tp=8, pp=64, dp=1, zero=0), batch=2048)
    return 1, wide.tokens_per_second / deep.tokens_per_second


def bubble_15() -> Numbers:
    return 15, *(100 * predicted_bubble("gpipe", 64, m) for m in (357, 64))


def efficiency_75() -> Numbers:
    return 75, 100 * (1 - 0.10) * (1 - 0.15)


def tp_share_10() -> Numbers:
    config = model(GPT3)
    found = serve(
        config, hardware("a100-80"), configure(config, 512, tp=8, pp=64, zero=0), batch=64
    )
    return 10, 100 * found.decode["tp"] / found.tpot_seconds


def standard_for_deployment() -> Numbers:
    """DeepSeek-V3's decoding unit of 320 GPUs: the product of its TP4 and DP80, without PP."""
    return 320, 4 * 80
