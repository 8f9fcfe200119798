"""Checks of the claims on dividing machines: 16 GPUs in two nodes of 8."""

from __future__ import annotations

import torch

from course_lib.formulas import dp, moves, pp, tp
from course_lib.formulas.pp import partition
from course_lib.interview.checks import Numbers
from course_lib.interview.checks.note_000 import nodes_of
from course_lib.layout import Layout, make_layout, rank_groups
from course_lib.planner import configure, hardware, model
from course_lib.planner.estimate import estimate
from course_lib.planner.memory import memory, state_bytes
from course_lib.planner.parameters import parameters, parameters_per_rank
from course_lib.schedule import make

LLAMA = "llama-3-70b"
TP = [[0, 1], [4, 5], [8, 9], [12, 13], [2, 3], [6, 7], [10, 11], [14, 15]]
PP = [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
DP = [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
MP = [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]


def layout() -> Layout:
    """Return the layout of the claims: tp=2, then dp=2, then pp=4."""
    return make_layout(16, "tp-dp-pp", tp=2, dp=2, pp=4)


def replica_memory() -> Numbers:
    """Bytes of states of 1e9 parameters: one GPU, and each of 8 GPUs of DP."""
    return state_bytes(1e9).total / 1e9, state_bytes(1e9, shards=8).total / 1e9


def syncs_per_epoch() -> Numbers:
    """GPT-3 was trained on 300e9 tokens, in batches of 3.2e6."""
    return 1, 300e9 / 3.2e6


def all_gradients() -> Numbers:
    """Bytes per step on 2 ranks, for all parameters of the model in bf16."""
    count = parameters(model(LLAMA)) * 2
    return count / 1e9, float(dp.wire_bytes(count, 2)) / 1e9


def weights_of_tp() -> Numbers:
    """Parameters per rank of tp=8, as a share of the model's."""
    config = model(LLAMA)
    rank = parameters_per_rank(config, configure(config, 8, tp=8), 0)
    return 1 / 8, rank.dense / parameters(config)


def tp_in_both_passes() -> Numbers:
    enter, leave = moves.entering(1, 8), moves.leaving(1, 8)
    return 2, bool(enter.forward or leave.forward) + bool(enter.backward or leave.backward)


def concat() -> Numbers:
    calls = (moves.entering(1, 8), moves.leaving(1, 8))
    return 1, sum(move.op == "all_gather" for one in calls for way in one[:2] for move in way)


def _sent(micro_batches: int) -> tuple[float, float, float]:
    """Return GB per GPU and step over tp, dp and pp: Llama 3 70B, tp=8, pp=4, dp=4."""
    config = model(LLAMA)
    plan = configure(
        config, 128, tp=8, pp=4, dp=4, zero=0, seq=8192, global_batch=4 * micro_batches
    )
    found = estimate(config, hardware("h100"), plan).communication
    return tuple(found[axis].wire_bytes / 1e9 for axis in ("tp", "dp", "pp"))  # type: ignore[return-value]


def order_of_volumes() -> Numbers:
    """1 if TP > DP > PP: with 32 micro-batches per step, and with 1,024."""

    def ordered(micro_batches: int) -> int:
        over_tp, over_dp, over_pp = _sent(micro_batches)
        return over_tp > over_dp > over_pp

    return 1, ordered(32), ordered(1024)


def tp_above_dp() -> Numbers:
    """1 if TP sends more than DP: 8,192 tokens per rank of DP, and 128 tokens."""
    config = model(LLAMA)
    gradients = float(dp.wire_bytes(parameters(config) * 2 // 8, 8))
    many, few = (float(tp.wire_bytes(config, 1, tokens, 8)) > gradients for tokens in (8192, 128))
    return 1, many, few


def pp_is_small() -> Numbers:
    """1 if PP sends less than TP."""
    over_tp, _, over_pp = _sent(32)
    return 1, over_pp < over_tp


def _listed(axis: str, groups: list[list[int]]) -> Numbers:
    found = rank_groups("tp-dp-pp", 16, tp=2, dp=2, pp=4)[axis]
    return len(groups), len(found) if sorted(found) == sorted(groups) else 0


def mp_groups() -> Numbers:
    return _listed("mp", MP)


def tp_groups() -> Numbers:
    return _listed("tp", TP)


def pp_groups() -> Numbers:
    return _listed("pp", PP)


def dp_groups() -> Numbers:
    return _listed("dp", DP)


def all_subgroups() -> Numbers:
    found = rank_groups("tp-dp-pp", 16, tp=2, dp=2, pp=4)
    return 22, sum(len(found[axis]) for axis in ("tp", "dp", "pp", "mp"))


def replicas() -> Numbers:
    return 2, layout().sizes["dp"]


def layers_per_gpu() -> Numbers:
    """GPT-3's 96 layers on 4 stages."""
    return 1, max(partition(model("gpt-3-175b").layers, 4))


def tp_and_dp_in_a_node() -> Numbers:
    """Nodes that a group touches: the largest of TP and DP."""
    return 1, max(nodes_of(group) for axis in ("tp", "dp") for group in layout().groups(axis))


def pp_over_nodes() -> Numbers:
    return 2, min(map(nodes_of, layout().groups("pp")))


def volume_decides() -> Numbers:
    """1 if TP, which sends more than DP, also exposes more: plain TP, and with cut kernels.

    Llama 3 70B on 64 GPUs with tp=8 and ZeRO-3.
    """
    config = model(LLAMA)

    def exposes_more(overlap_tp: bool) -> bool:
        plan = configure(
            config, 64, tp=8, zero=3, seq=8192, recompute="full", overlap_tp=overlap_tp
        )
        found = estimate(config, hardware("h100"), plan).communication
        assert found["tp"].wire_bytes > found["dp"].wire_bytes
        return found["tp"].exposed_seconds > found["dp"].exposed_seconds

    return 1, exposes_more(False), exposes_more(True)


def peak_memory() -> Numbers:
    """1 if the peak is above 80 GB where the states alone fit: Llama 3 70B at 32,768 tokens."""
    config = model(LLAMA)
    found = memory(config, configure(config, 64, tp=8, zero=3, seq=32768))
    return 1, found.total - found.activations < 80e9 < found.total


def codegeex() -> Numbers:
    return 1536, make_layout(tp=8, dp=192).world


def processes() -> Numbers:
    return 16, layout().world


def named_pairs() -> Numbers:
    """g0 and g2 exchange gradients, g4 and g8 activations."""
    pairs = [("dp", 0, 2), ("pp", 4, 8)]
    here = layout()
    return 2, sum(any({a, b} <= set(group) for group in here.groups(axis)) for axis, a, b in pairs)


def dp_size() -> Numbers:
    """dp of 16 GPUs with tp=2 and pp=4, and with cp=2 beside them."""
    return 2, layout().sizes["dp"], make_layout(16, "tp-cp-dp-pp", tp=2, cp=2, pp=4).sizes["dp"]


def unused_gpus() -> Numbers:
    """GPUs that the formula uses of 20."""
    return 20, 20 // (2 * 4) * 2 * 4


def mp_size() -> Numbers:
    return 8, len(layout().groups("tp", "pp")[0])


def both_ways() -> Numbers:
    """Messages between two stages per micro-batch: an activation, and its gradient."""
    return 2, pp.wire_bytes(make("1f1b", 2, 1), 1)


def columns_twice() -> Numbers:
    """Largest error, relative, of an MLP whose two matrices are both cut by columns."""
    torch.manual_seed(0)
    x, a, b = torch.randn(4, 8).double(), torch.randn(8, 16).double(), torch.randn(16, 8).double()
    whole = torch.nn.functional.gelu(x @ a) @ b
    halves = [torch.nn.functional.gelu(x @ part) for part in a.chunk(2, 1)]
    by_rows = sum(half @ part for half, part in zip(halves, b.chunk(2, 0), strict=True))
    assert torch.allclose(whole, torch.as_tensor(by_rows))
    # Cut by columns, the second matrix needs all 16 features; a rank has 8.
    return 16, halves[0].shape[1]
