"""The rows of the page of formulas: each formula as text, and the library's number beside it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import nan
from types import SimpleNamespace
from typing import Any

from course_lib.formulas import cp, ep, moves, pp
from course_lib.formulas.inference import cache_bytes
from course_lib.formulas.recompute import saved_outside_blocks
from course_lib.ledger import wire
from course_lib.planner.catalog import BF16, Model, custom_model
from course_lib.planner.configuration import RECIPES, Configuration
from course_lib.planner.flops import blocks_flops, head_flops, recomputed_flops, step_flops
from course_lib.planner.hardware import Link, hardware
from course_lib.planner.in_flight import in_flight
from course_lib.planner.links import Span, seconds
from course_lib.planner.memory import layer_activations, state_bytes
from course_lib.schedule import Costs, make, predicted_bubble, simulate

RECIPE = 16  # bf16 weights and gradients, fp32 master weight and two moments of AdamW
H100 = hardware("h100")
SYMBOLS: tuple[tuple[str, str, float], ...] = (
    ("P", "parameters of the model", 70_000_000_000),
    ("Q", "parameters per GPU", 2_187_500_000),
    ("t", "ranks of tp", 8),
    ("p", "stages of the pipeline (pp)", 4),
    ("d", "replicas (dp)", 4),
    ("c", "ranks of cp", 4),
    ("e", "ranks of ep", 8),
    ("n", "ranks of one collective", 8),
    ("N", "GPUs", 128),
    ("M", "micro-batches of a replica per step", 32),
    ("v", "stages per rank (chunks)", 2),
    ("r", "rank in the pipeline, from 0", 1),
    ("B", "sequences per micro-batch", 1),
    ("S", "tokens per sequence", 8192),
    ("L", "layers", 80),
    ("D", "hidden size", 8192),
    ("H", "query heads", 64),
    ("G", "key and value heads", 8),
    ("K", "features per head", 128),
    ("V", "rows of the vocabulary", 128_256),
    ("k", "experts per token", 2),
    ("g", "bytes per element of a gradient that is sent; fp32: 4", 2),
    ("A", "bytes of activations between two layers, 2 S B D", 2 * 8192 * 8192),
    ("X", "bytes of a full tensor", 10**9),
    ("T", "tokens of the training run", 10**12),
    ("R", "tokens per second per GPU", 900),
    ("u", "MFU", 0.4),
    ("C", "peak FLOP/s of a GPU", H100.peak["bf16"]),
    ("w", "memory bandwidth of a GPU, bytes/s", H100.memory_bandwidth),
    ("a", "latency of a message, seconds", 5e-6),
    ("b", "bandwidth of a link, bytes/s", 50 * 10**9),
    ("f", "forward of a micro-batch on a stage, seconds (backward: 2 f)", 0.03),
)
EXAMPLE = {name: value for name, _, value in SYMBOLS}
Sizes = SimpleNamespace  # of the example, by symbol


@dataclass(frozen=True)
class Row:
    """A quantity, its formula as text, the unit of its value, and the lesson that derives it."""

    quantity: str
    formula: str
    unit: str
    lesson: str
    library: Callable[[Sizes], float | Fraction]

    @property
    def symbols(self) -> set[str]:
        """Names in the formula."""
        return set(re.findall(r"[A-Za-z]+", self.formula)) - {"min"}

    def computed(self, values: Mapping[str, float] = EXAMPLE) -> float:
        """Return the library's number for these sizes."""
        return float(self.library(Sizes(**values)))


def _same(*values: float | Fraction) -> float | Fraction:
    """Return the value that all have; nan if they differ."""
    return values[0] if len(set(values)) == 1 else nan


def _states(elements: float, stage: int = 0, shards: int = 1) -> float:
    return state_bytes(elements, zero=stage, shards=shards, recipe=RECIPE).total


def _saved(s: Sizes, recompute: str = "selective", **plan: Any) -> float:
    """Return what a GPT layer with F = 4 D, G = H and dropout saves."""
    layer = custom_model("gpt", layers=1, hidden=s.D, heads=s.H, vocab=s.V)
    sizes = Configuration(micro_batch=s.B, seq=s.S, **plan)
    return layer_activations(layer, sizes, 0).saved(recompute)


def _llama(s: Sizes) -> Model:
    sizes = custom_model(
        "llama", layers=s.L, hidden=s.D, heads=s.H, vocab=s.V, kv_heads=s.G, max_seq_len=s.S
    )
    return replace(sizes, head_dim=s.K)


def _layer(s: Sizes) -> Model:
    return replace(_llama(s), layers=1)


def _per_parameter(recompute: str = "none") -> float:
    """Return the FLOPs per token for each parameter of a block's matrices, without scores."""
    sizes = custom_model("gpt", layers=1, hidden=64, heads=1, vocab=64)
    plan, blocks = Configuration(seq=1, recompute=recompute), blocks_flops(sizes, 1)
    scores = (4 if recompute == "full" else 3) * blocks.core
    total = step_flops(sizes, plan) + recomputed_flops(sizes, plan)
    matrices = (blocks.projections + blocks.mlp) / 2
    return (total - scores - 3 * head_flops(sizes)) / matrices


def _of_ring(s: Sizes) -> float:
    gpu = replace(H100, node=Link(bandwidth=s.b, latency=s.a))
    return seconds([moves.Move("all_reduce", s.X, s.n)], Span(s.n, 1), gpu)


def _of_tp(s: Sizes, rows: bool = False, again: bool = False) -> Fraction:
    enter = moves.entering(s.A, s.t, rows=rows, again=again)
    return 2 * (enter.wire() + moves.leaving(s.A, s.t, rows=rows).wire())


def _of_data(s: Sizes, stage: int) -> Fraction:
    """Return the bytes per step of a rank of dp, by the stage of ZeRO."""
    widths = {"itemsize": BF16.itemsize, "gradient_itemsize": s.g}
    return moves.wire_of(moves.of_data(stage, [s.Q], s.d, **widths, micro_batches=s.M).moves)


def _bubble(s: Sizes, name: str, ideal: bool = False) -> float:
    chunks = s.v if name == "interleaved" else None
    share = predicted_bubble(name, s.p, s.M, chunks, costs=Costs(1, 1, 1))
    return share / (1 - share) if ideal else share


SECTIONS: dict[str, tuple[Row, ...]] = {
    "Memory": (
        Row("parameters per GPU with tp and pp, on average", "P/(t p)", "count", "12",
            lambda s: Fraction(s.P, s.t * s.p)),
        Row("bytes per parameter: weight, gradient, AdamW", "2 + 2 + 12", "byte", "01",
            lambda s: sum(RECIPES[16])),
        Row("the same with fp32 gradients", "2 + 4 + 12", "byte", "14",
            lambda s: sum(RECIPES[18])),
        Row("states of the model", "16 P", "byte", "01", lambda s: _states(s.P)),
        Row("states per GPU, no ZeRO", "16 Q", "byte", "12", lambda s: _states(s.Q)),
        Row("states per GPU, ZeRO-1", "(4 + 12/d) Q", "byte", "04",
            lambda s: _states(s.Q, 1, s.d)),
        Row("states per GPU, ZeRO-2", "(2 + 14/d) Q", "byte", "04",
            lambda s: _states(s.Q, 2, s.d)),
        Row("states per GPU, ZeRO-3, nothing gathered", "16/d Q", "byte", "04",
            lambda s: _states(s.Q, 3, s.d)),
        Row("a GPT layer's activations, scores stored", "S B (34 D + 5 H S)", "byte", "06",
            lambda s: _saved(s, "none", fused_attention=False)),
        Row("the same with flash attention, or scores recomputed", "34 S B D", "byte", "06",
            _saved),
        Row("the same with tp", "S B D (10 + 24/t)", "byte", "06", lambda s: _saved(s, tp=s.t)),
        Row("the same with tp and sequence parallelism", "34 S B D/t", "byte", "06",
            lambda s: _saved(s, tp=s.t, sequence_parallel=True)),
        Row("the same with full recomputation", "2 S B D", "byte", "06",
            lambda s: _saved(s, "full")),
        Row("fp32 log-probabilities of a micro-batch", "4 S B V", "byte", "06b",
            lambda s: saved_outside_blocks(_llama(s), s.B, s.S).log_probabilities - 4),
        Row("micro-batches in flight on a rank: GPipe", "M", "count", "07",
            lambda s: in_flight("gpipe", s.p, s.M, s.r).total),
        Row("micro-batches in flight on a rank: 1F1B", "min(p - r, M)", "count", "07",
            lambda s: in_flight("1f1b", s.p, s.M, s.r).total),
    ),
    "Compute": (
        Row("tokens per step", "S B M d", "count", "14",
            lambda s: Configuration(
                dp=s.d, micro_batch=s.B, seq=s.S, global_batch=s.B * s.M * s.d
            ).tokens),
        Row("training FLOPs per token, matrices", "6 P", "flop", "01",
            lambda s: _per_parameter() * s.P),
        Row("the same with full recomputation", "8 P", "flop", "06",
            lambda s: _per_parameter("full") * s.P),
        Row("training FLOPs per token, causal scores", "6 L S D", "flop", "01",
            lambda s: 3 * blocks_flops(replace(_llama(s), head_dim=s.D // s.H), s.S).core),
        Row("MFU", "6 P R/C", "share", "01",
            lambda s: _per_parameter() * s.P * s.R / s.C),
        Row("seconds of a training run", "6 P T/(N C u)", "s", "01",
            lambda s: _per_parameter() * s.P * s.T / (s.N * s.C * s.u)),
    ),
    "Collectives: bytes that a rank sends": (
        Row("all-reduce", "2 (n-1)/n X", "byte", "02", lambda s: wire("all_reduce", s.X, s.n)),
        Row("reduce-scatter, all-to-all, all-gather of shards X/n", "(n-1)/n X", "byte", "02",
            lambda s: _same(wire("reduce_scatter", s.X, s.n), wire("all_to_all", s.X, s.n),
                            wire("all_gather", Fraction(s.X, s.n), s.n))),
        Row("seconds of a ring all-reduce", "2 (n-1) (a + X/(n b))", "s", "02", _of_ring),
    ),
    "Axes: bytes that a rank sends": (
        Row("DP, per step", "2 (d-1)/d g Q", "byte", "03", lambda s: _of_data(s, 0)),
        Row("ZeRO-1, per step", "(d-1)/d (g + 2) Q", "byte", "04", lambda s: _of_data(s, 1)),
        Row("ZeRO-2, per step", "(d-1)/d (g M + 2) Q", "byte", "04", lambda s: _of_data(s, 2)),
        Row("ZeRO-3, per step", "(d-1)/d (g + 2 + 2) M Q", "byte", "04",
            lambda s: _of_data(s, 3)),
        Row("TP with or without SP, per layer and micro-batch", "8 (t-1)/t A", "byte", "06",
            lambda s: _same(_of_tp(s), _of_tp(s, rows=True))),
        Row("the same if SP gathers again in backward", "10 (t-1)/t A", "byte", "06",
            lambda s: _of_tp(s, rows=True, again=True)),
        Row("ring attention, per layer and micro-batch", "16 (c-1)/c S B G K", "byte", "09",
            lambda s: cp.ring_wire_bytes(_layer(s), s.B, s.S, s.c)),
        Row("Ulysses, per layer and micro-batch", "8 (c-1)/c S B (H + G) K/c", "byte", "09b",
            lambda s: cp.ulysses_wire_bytes(_layer(s), s.B, s.S, s.c)),
        Row("EP, per layer and micro-batch, even routes", "8 (e-1)/e S B k D", "byte", "10",
            lambda s: ep.even_wire_bytes(s.S * s.B, s.k, s.D * BF16.itemsize, s.e)),
        Row("PP, per step, all stages of a replica", "2 (p-1) M A", "byte", "07",
            lambda s: pp.wire_bytes(make("1f1b", s.p, s.M), s.M * s.A)),
    ),
    "Pipelines: the bubble": (
        Row("GPipe and 1F1B, of the total time", "(p-1)/(M + p - 1)", "share", "07",
            lambda s: _same(_bubble(s, "gpipe"), _bubble(s, "1f1b"))),
        Row("GPipe and 1F1B, of the ideal time", "(p-1)/M", "share", "07",
            lambda s: _same(_bubble(s, "gpipe", True), _bubble(s, "1f1b", True))),
        Row("interleaved, of the total time", "(p-1)/(M v + p - 1)", "share", "08",
            lambda s: _bubble(s, "interleaved")),
        Row("interleaved, of the ideal time", "(p-1)/(M v)", "share", "08",
            lambda s: _bubble(s, "interleaved", True)),
        Row("ZB-H1 with F = I = W, of the total time", "(p-1)/(3 M + p - 1)", "share", "08",
            lambda s: _bubble(s, "zb-h1")),
        Row("ZB-H1 with F = I = W, of the ideal time", "(p-1)/(3 M)", "share", "08",
            lambda s: _bubble(s, "zb-h1", True)),
        Row("seconds of a 1F1B step", "(M + p - 1) (f + 2 f)", "s", "07",
            lambda s: simulate(make("1f1b", s.p, s.M), Costs.make(f=s.f, b=2 * s.f)).makespan),
    ),
    "Serving": (
        Row("KV cache per token", "4 L G K", "byte", "13",
            lambda s: cache_bytes(_llama(s), 1, 1)),
        Row("KV cache per sequence and GPU, t at most G", "4 L G K S/t", "byte", "13",
            lambda s: cache_bytes(_llama(s), 1, s.S, tp=s.t)),
        Row("least seconds per decoded token, weights alone", "2 P/(t w)", "s", "13",
            lambda s: s.P * BF16.itemsize / (s.t * s.w)),
        Row("rows from which a bf16 product is limited by compute", "C/w", "count", "13",
            lambda s: BF16.itemsize * s.C / (_per_parameter() / 3 * s.w)),
    ),
}  # fmt: skip
