"""Inference: what a GPU stores, the time to the first token and per token, and the throughput.

A replica has tp x pp GPUs; with experts, ep replicas share them. A decoded token reads all weights
and the KV cache once, so its time is that of the memory (or of the FLOPs, if the batch is large)
plus two all-reduces per layer over tp. The prompt is limited by FLOPs. With a pipeline the batch is
divided into groups, so that all stages work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, log2
from typing import Any

from course_lib.formulas.inference import cache_bytes
from course_lib.formulas.moves import Move
from course_lib.formulas.parameters import padded_rows
from course_lib.planner.catalog import Model
from course_lib.planner.configuration import MOST, Configuration
from course_lib.planner.estimate import RESERVE
from course_lib.planner.flops import blocks_flops, head_flops
from course_lib.planner.hardware import Hardware
from course_lib.planner.links import Span, axis_span, seconds
from course_lib.planner.parameters import layers_of_rank, parameters_per_rank

REGIONS = 2  # all-reduces per layer: attention and MLP
ASSUMPTIONS = (
    "Weights and KV cache take {itemsize} per element.",
    "All requests of a batch start together and have the same lengths.",
    "Decoding reads weights and KV cache at the full {bandwidth:.2f} TB/s of the datasheet.",
    "Prefill reaches {efficiency:.0f} % of the peak.",
    "Throughput counts decoding only, without the time of the prompts.",
    "An all-reduce over tp uses the fastest of ring, tree and, inside a node, one message to each "
    "rank. No communication is hidden.",
)


@dataclass(frozen=True)
class Serving:
    """A plan of inference. Bytes are per GPU; tokens and requests count all replicas.

    ``kv_bytes`` is the cache of the whole batch at its full length. ``ttft_seconds`` is the time
    until each request of the batch has its first token, ``tpot_seconds`` the time per further
    token. ``decode`` splits the latter by cause. ``requests_in_flight`` counts the requests of
    this length whose cache fits.
    """

    model: Model
    hardware: Hardware
    configuration: Configuration
    batch: int
    prompt: int
    generate: int
    weights_bytes: float
    kv_bytes: float
    ttft_seconds: float
    tpot_seconds: float
    tokens_per_second: float
    requests_in_flight: int
    fits: bool
    headroom_bytes: float
    decode: Mapping[str, float]
    reasons: tuple[str, ...]
    assumptions: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return what ``course plan --serve --json`` prints."""
        names = (
            "batch prompt generate weights_bytes kv_bytes ttft_seconds tpot_seconds "
            "tokens_per_second requests_in_flight fits headroom_bytes"
        )
        return {
            **{name: getattr(self, name) for name in names.split()},
            "decode": dict(self.decode),
            "reasons": list(self.reasons),
            "assumptions": list(self.assumptions),
        }


def serve(
    model: Model,
    hardware: Hardware,
    configuration: Configuration,
    *,
    batch: int = 1,
    prompt: int = 1024,
    generate: int = 256,
    reserve: float = RESERVE,
    generation: str | None = None,
) -> Serving:
    """Plan inference: ``batch`` requests per replica, each of ``prompt`` + ``generate`` tokens.

    Raises ValueError for counts below 1 and for context parallelism.
    """
    for name, size in (("batch", batch), ("prompt", prompt), ("generate", generate)):
        if not 1 <= size <= MOST:
            raise ValueError(f"expected {name} from 1 to {MOST:,}, got {name}={size}")
    if configuration.cp > 1:
        raise ValueError(f"expected cp=1 with --serve, got cp={configuration.cp}; take tp or pp")
    hardware.peak_of(configuration.dtype.name)
    efficiency = hardware.efficiency_of(configuration.dtype.name, generation)
    plan = _Plan(model, hardware, configuration, batch, prompt, generate, efficiency)
    weights, request = plan.weights(), plan.cache(1, prompt + generate)
    kv = plan.cache(batch, prompt + generate)
    room = hardware.capacity_bytes * (1 - reserve) - weights
    decode = plan.decode()
    tpot = sum(decode.values())
    replicas = configuration.dp
    return Serving(
        model=model,
        hardware=hardware,
        configuration=configuration,
        batch=batch,
        prompt=prompt,
        generate=generate,
        weights_bytes=weights,
        kv_bytes=kv,
        ttft_seconds=plan.prefill(),
        tpot_seconds=tpot,
        tokens_per_second=replicas * batch / tpot,
        requests_in_flight=max(0, int(room // request)) * replicas,
        fits=room >= kv,
        headroom_bytes=room - kv,
        decode=decode,
        reasons=_reasons(hardware, weights, kv, room, reserve),
        assumptions=plan.assumptions(),
    )


def _reasons(
    hardware: Hardware, weights: float, kv: float, room: float, reserve: float
) -> tuple[str, ...]:
    if room >= kv:
        return ()
    text = (
        f"Weights of {weights / 1e9:.1f} GB, KV cache of {kv / 1e9:.1f} GB and the reserve of "
        f"{100 * reserve:.0f} % need {(kv - room) / 1e9:.1f} GB more than the "
        f"{hardware.capacity_bytes / 1e9:.0f} GB of a GPU"
    )
    remedy = "raise tp or pp" if room < 0 else "lower the batch, or raise tp or pp"
    return (f"{text}: {remedy}.",)


@dataclass(frozen=True)
class _Plan:
    """Seconds and bytes of the parts. A *group* is the share of the batch that a stage works on."""

    model: Model
    hardware: Hardware
    configuration: Configuration
    batch: int
    prompt: int
    generate: int
    efficiency: float

    @property
    def groups(self) -> int:
        return min(self.configuration.pp, self.batch)

    @property
    def rows(self) -> int:
        """Requests of a group."""
        return ceil(self.batch / self.groups)

    @property
    def speed(self) -> float:
        """FLOP/s of the replica's stage: its GPUs at the efficiency of their kernels."""
        c = self.configuration
        return self.hardware.peak[c.dtype.name] * self.efficiency * c.tp

    def layers(self, stage: int) -> int:
        return len(layers_of_rank(self.model, self.configuration, stage))

    def weights(self) -> float:
        """Bytes of the stage with most weights."""
        ranks = [
            parameters_per_rank(self.model, self.configuration, stage)
            for stage in range(self.configuration.pp)
        ]
        itemsize = self.configuration.dtype.itemsize
        return float(max(rank.dense + rank.experts for rank in ranks) * itemsize)

    def cache(self, requests: float, length: float) -> float:
        """Bytes of K and V of the stage with most layers."""
        most = max(self.layers(stage) for stage in range(self.configuration.pp))
        return requests * length * self._row(most)

    def _row(self, layers: int) -> float:
        """Bytes of one position in the cache of ``layers``."""
        model, c = self.model, self.configuration
        if model.latent:
            return layers * (model.latent.kv_rank + model.latent.rope_dim) * c.dtype.itemsize
        per_byte = c.dtype.itemsize / model.dtype.itemsize
        return cache_bytes(model, 1, 1, layers=layers, tp=c.tp) * per_byte

    def decode(self) -> dict[str, float]:
        """Seconds per token by cause: the way of one group through all stages."""
        c, hardware = self.configuration, self.hardware
        length = self.prompt + self.generate / 2
        found = dict.fromkeys(("weights", "KV cache", "compute", "tp", "ep", "pp"), 0.0)
        flops = self.flops(self.rows, 1, length) / self.speed
        for stage in range(c.pp):
            weights = self.read(stage, self.rows) / hardware.memory_bandwidth
            kv = self.rows * length * self._row(self.layers(stage)) / hardware.memory_bandwidth
            found["weights"] += weights
            found["KV cache"] += kv
            found["compute"] += max(0.0, flops / c.pp - weights - kv)
        found |= self.communication(self.rows)
        return {name: seconds for name, seconds in found.items() if seconds}

    def prefill(self) -> float:
        """Seconds until all groups have passed all stages."""
        c = self.configuration
        work = self.flops(self.rows, self.prompt, self.prompt / 2) / self.speed / c.pp
        read = self.weights() / self.hardware.memory_bandwidth
        sent = sum(self.communication(self.rows * self.prompt).values()) / c.pp
        return (c.pp + self.groups - 1) * (max(work, read) + sent)

    def flops(self, requests: int, tokens: int, context: float) -> float:
        """FLOPs of ``tokens`` per request that see ``context`` positions; one choice each."""
        blocks = blocks_flops(self.model, 1, attention="full")
        core = blocks.core * context
        each = tokens * (blocks.projections + blocks.mlp + core) + head_flops(self.model)
        return requests * each

    def read(self, stage: int, rows: int) -> float:
        """Bytes of weights that a token of ``rows`` requests reads: experts only if chosen."""
        model, c = self.model, self.configuration
        rank = parameters_per_rank(model, c, stage)
        dense, experts = rank.dense, float(rank.experts)
        if stage == 0 and not model.tied:
            dense -= padded_rows(model.vocab, c.tp) * model.hidden  # one row per token is read
        if model.experts:
            each = model.experts.top_k / model.experts.number
            experts *= 1 - (1 - each) ** (rows * c.ep)
        return (dense + experts) * c.dtype.itemsize

    def communication(self, tokens: int) -> dict[str, float]:
        """Seconds by axis for ``tokens`` to pass all stages."""
        c, model = self.configuration, self.model
        row = tokens * model.hidden * c.dtype.itemsize
        found = {}
        if c.tp > 1:
            calls = REGIONS * model.layers + 1
            found["tp"] = calls * all_reduce_seconds(row, c.tp, self.span("tp"), self.hardware)
        if c.ep > 1 and model.experts:
            layers = model.layers - model.experts.dense_layers
            pairs = Fraction(row * model.experts.top_k, c.tp)
            moves = [Move("all_to_all", pairs, c.ep, 2 * layers)]
            found["ep"] = seconds(moves, self.span("ep"), self.hardware)
        if c.pp > 1:
            moves = [Move("send", Fraction(row, c.tp), c.pp, c.pp)]
            found["pp"] = seconds(moves, self.span("pp"), self.hardware)
        return found

    def span(self, axis: str) -> Span:
        return axis_span(axis, self.configuration, self.hardware.gpus_per_node)

    def assumptions(self) -> tuple[str, ...]:
        c, hardware = self.configuration, self.hardware
        values = {
            "itemsize": "1 byte" if c.dtype.itemsize == 1 else f"{c.dtype.itemsize} bytes",
            "bandwidth": hardware.memory_bandwidth / 1e12,
            "efficiency": 100 * self.efficiency,
        }
        found = [text.format(**values) for text in ASSUMPTIONS]
        most = self.model.max_seq_len
        if self.prompt + self.generate > most:
            found.append(
                f"The {self.prompt + self.generate:,} positions are more than the {most:,} in the "
                "catalog; the model must have been trained for them."
            )
        if c.pp > 1:
            found.append(f"The batch passes the pipeline in {self.groups} groups.")
        return tuple(found)


def all_reduce_seconds(payload: int, n: int, over: Span, hardware: Hardware) -> float:
    """Return the seconds of an all-reduce of ``payload`` bytes by the fastest of three algorithms.

    Ring: as in training, hierarchical over nodes. Tree: 2 log2 n messages of the payload. One-shot,
    inside a node only: each rank sends the payload to n-1 others and pays the latency once, as the
    custom all-reduce of vLLM and TensorRT-LLM for small tensors.
    """
    ring = seconds([Move("all_reduce", payload, n)], over, hardware)
    messages = Move("send", payload, n)
    near, far = (seconds([messages], Span(1, nodes), hardware) for nodes in (1, 2))
    tree = 2 * (ceil(log2(over.inside)) * near + ceil(log2(over.nodes)) * far)
    if over.nodes > 1:
        return min(ring, tree)
    return min(ring, tree, near + (n - 2) * (near - hardware.node.latency))
