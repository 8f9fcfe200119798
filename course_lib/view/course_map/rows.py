"""Each technique alone on the same ranks: what it keeps, sends and idles, all by formula.

One model, one batch and one number of ranks, so that the rows can be compared. What a rank keeps
is counted as in the ZeRO paper (arXiv:1910.02054): 2 bytes of weights, 2 of gradients and 12 of
optimizer state for each parameter that it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from course_lib import compose, cp, dp, ep, pp, recompute, sp
from course_lib.model import ModelConfig, parameter_count
from course_lib.schedule import Action, Costs, bubble, simulate
from course_lib.tp import formulas as tp_formulas

RANKS = 8
MODEL = ModelConfig(  # Llama 2 7B, arXiv:2307.09288
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=32,
    ffn=11008,
    max_seq_len=4096,
    vocab=32_000,
    dtype=torch.bfloat16,
)
SEQUENCES, SEQ_LEN = 32, 4096  # of a step, all ranks together
EXPERTS = compose.Experts(8, 2)
WEIGHT, GRADIENT, OPTIMIZER = 2, 2, 12  # bytes a parameter
NODE, NETWORK = 450e9, 50e9  # bytes a second a GPU: NVLink 4 one way, one 400 Gb/s adapter
GPU = 989e12  # H100 SXM, dense bfloat16, FLOP/s
SHARE_OF_PEAK = 0.4


@dataclass(frozen=True)
class Row:
    """One technique. ``state`` and ``activations`` are bytes kept by the fullest rank, ``sent`` the
    bytes that a rank sends in a step on average, ``idle`` the bubble's share of all time."""

    name: str
    lesson: str
    cuts: str
    state: Fraction
    activations: Fraction
    sent: Fraction
    travels: str
    hides: str
    idle: float
    take: str
    stops: str

    def seconds(self, bandwidth: float) -> float:
        """Return the seconds to send its bytes at ``bandwidth`` bytes per second."""
        return float(self.sent) / bandwidth


def rows() -> list[Row]:
    """The techniques in the order of the lessons, each alone on :data:`RANKS` ranks."""
    return [*_data_rows(), *_tensor_rows(), *_pipeline_rows(), _context_row(), _expert_row()]


def compute_seconds() -> float:
    """6 P T FLOPs of a step on :data:`RANKS` GPUs, at 40 % of the peak (a choice, not a law)."""
    tokens = SEQUENCES * SEQ_LEN
    return 6 * parameter_count(MODEL) * tokens / (RANKS * GPU * SHARE_OF_PEAK)


def _state(
    weights: Fraction | int, gradients: Fraction | int, optimizer: Fraction | int
) -> Fraction:
    """Bytes of as many parameters' weights, gradients and optimizer state."""
    return WEIGHT * Fraction(weights) + GRADIENT * gradients + OPTIMIZER * optimizer


def _sent(sizes: Mapping[str, int], plan: compose.Plan) -> Fraction:
    replicas = sizes.get("dp", 1)
    sent = compose.wire_bytes(MODEL, sizes, plan, SEQUENCES // replicas, SEQ_LEN)
    return sum(sent.values(), Fraction(0)) / RANKS


def _data_rows() -> list[Row]:
    whole, n = parameter_count(MODEL), RANKS
    kept = Fraction(recompute.saved_by_stage(MODEL, 1, SEQ_LEN))
    shard = Fraction(whole, n)
    micro_batches = SEQUENCES // n

    def sharded(stage: int) -> Fraction:
        return _sent({"dp": n}, compose.Plan(zero=stage, micro_batches=micro_batches))

    return [
        Row(
            "DP",
            "03",
            "the batch",
            _state(whole, whole, whole),
            kept,
            dp.wire_bytes(4 * whole, n),  # summed in float32, as ZeRO's are
            "gradients: all-reduce, once per step",
            "behind the last backward",
            0.0,
            "the model fits; first choice",
            "16 bytes per parameter on every rank",
        ),
        Row(
            "ZeRO-1",
            "04",
            "+ optimizer",
            _state(whole, whole, shard),
            kept,
            sharded(1),
            "reduce-scatter, all-gather, once per step",
            "behind backward, and forward",
            0.0,
            "always with DP; the one to use beside PP",
            "weights and gradients are whole",
        ),
        Row(
            "ZeRO-2",
            "04",
            "+ gradients",
            _state(whole, shard, shard),
            kept,
            sharded(2),
            "the reduce-scatter in every micro-batch",
            "behind each backward",
            0.0,
            "gradients do not fit",
            "many micro-batches",
        ),
        Row(
            "ZeRO-3",
            "04",
            "+ weights",
            _state(shard, shard, shard),
            kept,
            sharded(3),
            "gather twice, reduce-scatter, per micro-batch",
            "by prefetch, if layers compute longer",
            0.0,
            "the weights do not fit on a rank",
            "many micro-batches (so PP); slow networks",
        ),
    ]


def _tensor_rows() -> list[Row]:
    n, shape = RANKS, (MODEL, 1, SEQ_LEN, RANKS)
    mine = tp_formulas.parameters_per_rank(MODEL, n)
    whole = tp_formulas.saved_bytes(*shape)
    by_rows = sp.saved_bytes(*shape) + tp_formulas.saved_by_vocabulary(MODEL, SEQ_LEN, n)
    plans = {
        "TP": compose.Plan(micro_batches=SEQUENCES),
        "TP + SP": compose.Plan(region=sp.REGION, micro_batches=SEQUENCES),
    }
    return [
        Row(
            "TP",
            "05",
            "each matrix",
            _state(mine, mine, mine),
            Fraction(whole),
            _sent({"tp": n}, plans["TP"]),
            "activations: 4 all-reduces per layer",
            "no: the next product waits",
            0.0,
            "a layer is too large, inside a node",
            "across nodes; more ranks than heads",
        ),
        Row(
            "TP + SP",
            "06",
            "+ rows between",
            _state(mine, mine, mine),
            Fraction(by_rows),
            _sent({"tp": n}, plans["TP + SP"]),
            "8 gathers and scatters; TP's bytes",
            "no (in pieces, in part)",
            0.0,
            "always with TP",
            "S not divisible by n",
        ),
    ]


def _pipeline_rows() -> list[Row]:
    n, names = RANKS, {"PP, 1F1B": "1f1b", "PP, ZB-V": "zb-v"}
    found = []
    for title, name in names.items():
        plan = compose.Plan(schedule=name, micro_batches=SEQUENCES)
        schedule = plan.schedule_for(n)
        layers = pp.partition(MODEL.layers, schedule.stages)
        parts = compose.part_sizes(MODEL, {"pp": n}, plan)
        held = [
            sum(sum(part.elements) for part in parts if schedule.placement[part.stage] == rank)
            for rank in range(n)
        ]
        kept = [
            recompute.saved_by_stage(
                MODEL, 1, SEQ_LEN, sum(layers[:stage]), sum(layers[: stage + 1])
            )
            for stage in range(schedule.stages)
        ]
        most = max(_most_kept(row, kept) for row in schedule.rows)
        share = bubble(simulate(schedule, Costs.make()).rows)[0]
        loops = name == "1f1b"
        found.append(
            Row(
                title,
                "07" if loops else "08",
                "the depth" if loops else "the depth, in a V",
                _state(*[max(held)] * 3),
                Fraction(most),
                _sent({"pp": n}, plan),
                "activations: "
                + ("one transfer per stage" if loops else "two stages per rank: twice"),
                "behind other micro-batches",
                share,
                "slow links between nodes" if loops else "the bubble hurts",
                "few micro-batches" if loops else "memory of W; code that splits backward",
            )
        )
    return found


def _most_kept(row: Sequence[Action], kept: Sequence[int]) -> int:
    """Bytes at the fullest moment of a rank, if a stage's F keeps ``kept`` until B or W is done."""
    now = most = 0
    for action in row:
        now += {"F": 1, "I": 0}.get(action.op, -1) * kept[action.stage]
        most = max(most, now)
    return most


def _context_row() -> Row:
    n, whole = RANKS, parameter_count(MODEL)
    in_attention = cp.ring_saved_bytes(MODEL, 1, SEQ_LEN, n)
    kept = cp.saved_bytes(MODEL, 1, SEQ_LEN, n, in_attention)
    return Row(
        "CP, ring",
        "09",
        "the sequence",
        _state(whole, whole, whole),
        Fraction(kept),
        _sent({"cp": n}, compose.Plan(micro_batches=SEQUENCES)),
        "keys and values, round the ring; gradients",
        "behind attention, if S/n is long enough",
        0.0,
        "one sequence does not fit",
        "short sequences; no zig-zag",
    )


def _expert_row() -> Row:
    n = RANKS
    of_experts, rest = ep.parameters_per_rank(MODEL, EXPERTS.number, n)
    even = SEQ_LEN * EXPERTS.top_k // EXPERTS.number  # pairs of one rank and one expert
    counts = ((even,) * EXPERTS.number,) * n
    load = ep.Load(counts, counts)
    kept = ep.saved_bytes(MODEL, 1, SEQ_LEN, [load] * MODEL.layers, 0, EXPERTS.top_k)
    plan = compose.Plan(experts=EXPERTS, zero=0, micro_batches=SEQUENCES // n)
    return Row(
        f"EP, {EXPERTS.number} experts",
        "10",
        "the experts",
        _state(*[of_experts + rest] * 3),
        Fraction(kept),
        _sent({"dp": n, "ep": n}, plan),
        f"tokens, {EXPERTS.top_k} choices: 4 all-to-alls per layer",
        "hardly",
        0.0,
        "more parameters at the same FLOPs",
        "uneven routers: all wait for the fullest rank",
    )
