"""What a step sends on each axis, all ranks together, composed of the techniques' own formulas.

Each technique's formula is for one rank that holds the whole depth of the model. The stages of a
pipeline hold it between them, so that the t c d ranks of tp, cp and dp count it once each. What
other axes change is the size of what a formula is given:

========  ==================================================================================
tp        S/c positions; sums of gradients are of shards under ZeRO; one region with experts
tp_kv     the same sums
cp        H/t heads; of a grid cp_heads and cp_ring
dp, dp_cp the parameters of a stage that tp leaves, experts aside
edp       E/e experts of a stage
ep        what the routers want: counted, or taken to be even
pp        S/c positions, under sequence parallelism S/(c t)
========  ==================================================================================
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from course_lib import dp, pp, sp, zero
from course_lib.compose.plan import Experts, Plan
from course_lib.ep.formulas import mlp_parameters
from course_lib.ledger import wire
from course_lib.model import ModelConfig
from course_lib.tp import formulas as tp_formulas
from course_lib.tp.layers import padded_rows


@dataclass(frozen=True)
class _Mesh:
    """Sizes of the axes, by letter."""

    t: int
    c: int
    d: int
    p: int
    e: int

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> _Mesh:
        """An axis that is left out has size 1."""
        return cls(*(sizes.get(axis, 1) for axis in ("tp", "cp", "dp", "pp", "ep")))

    @property
    def columns(self) -> int:
        """Ranks that hold a stage."""
        return self.t * self.c * self.d

    @property
    def data(self) -> int:
        """Ranks that sum the same gradients."""
        return self.c * self.d


def wire_bytes(
    config: ModelConfig,
    sizes: Mapping[str, int],
    plan: Plan,
    sequences: int,
    seq_len: int,
    *,
    leaving: int | Fraction | None = None,
) -> dict[str, Fraction]:
    """Bytes that all ranks together send in an optimizer step, by axis as the ledger names it.

    ``sequences`` are those of one replica. ``leaving`` counts the pairs of a token and an expert
    on another rank, in all layers; left out, they are taken to be even. Exact where a part of the
    parameters fits into one bucket, or dp x cp divides every bucket; else stages 1 and 2 of ZeRO
    pad each bucket with fewer than dp x cp elements more. All parameters are trained: of frozen
    ones less is sent than this says, as no gradient is summed, and backward may end sooner.
    """
    mesh = _Mesh.of(sizes)
    total: dict[str, Fraction] = defaultdict(Fraction)
    for axis, sent in [
        *_over_tp(config, mesh, plan, sequences, seq_len).items(),
        *_over_cp(config, mesh, plan, sequences, seq_len).items(),
        ("pp", _over_pp(config, mesh, plan, sequences, seq_len)),
        ("ep", _over_ep(config, mesh, plan, sequences * seq_len, leaving)),
        *_over_data(config, mesh, plan),
    ]:
        total[axis] += sent
    return {axis: sent for axis, sent in total.items() if sent}


def _over_tp(
    config: ModelConfig, mesh: _Mesh, plan: Plan, sequences: int, seq_len: int
) -> dict[str, Fraction]:
    """Activations and loss; then the sums of gradients of which a rank of tp has a part."""
    t, rows, forwards = mesh.t, seq_len // mesh.c, plan.block_forwards
    if plan.by_rows:
        again, regions = plan.gathers_again, 1 if plan.experts else 2
        moves = sp.wire_bytes(
            config, sequences, rows, t, again=again, forwards=forwards, regions=regions
        )
        moves -= wire("all_reduce", sp.replicated_parameters(config) * config.dtype.itemsize, t)
        moves += tp_formulas.loss_bytes(config, sequences * rows, t) + _of_rows(config, mesh, plan)
    else:
        moves = tp_formulas.wire_bytes(config, sequences, rows, t, forwards=forwards)
        moves -= tp_formulas.shared_head_bytes(config, t)
    held = replace(config, dtype=zero.reduce_dtype(config.dtype)) if plan.zero else config
    shared = tp_formulas.shared_head_bytes(held, t, shards=mesh.data if plan.zero else 1)
    return {"tp": mesh.columns * moves, "tp_kv": mesh.columns * shared}


def _of_rows(config: ModelConfig, mesh: _Mesh, plan: Plan) -> Fraction:
    """The sum of gradients of what is not cut, where ranks share rows; under ZeRO of shards, the
    average over the ranks that hold them."""
    whole, experts = sp.replicated_parameters(config), 0
    if plan.experts is not None:
        router, experts = _experts_of_layer(config, plan.experts, mesh.e)
        bias = config.hidden if config.family == "gpt" else 0  # of the MLP that is not there
        whole += config.layers * (router - bias)
    shards, copies = (mesh.data, mesh.data // mesh.e) if plan.zero else (1, 1)
    held = Fraction(whole, shards) + Fraction(config.layers * experts, copies)
    return held * wire("all_reduce", _held_itemsize(config, plan), mesh.t)


def _over_cp(
    config: ModelConfig, mesh: _Mesh, plan: Plan, sequences: int, seq_len: int
) -> dict[str, Fraction]:
    core, forwards = plan.core, plan.core_forwards
    share = replace(
        config,
        hidden=config.hidden // mesh.t,
        heads=config.heads // mesh.t,
        kv_heads=max(config.kv_heads // mesh.t, 1),
    )
    if mesh.c > 1 and core.run > 1:
        grid = core.run, mesh.c // core.run
        of_rank = core.wire_bytes(share, sequences, seq_len, *grid, forwards=forwards)
        return {f"cp_{way}": mesh.columns * of_rank[i] for i, way in enumerate(("heads", "ring"))}
    own = core.wire_bytes(share, sequences, seq_len, mesh.c, forwards=forwards) if mesh.c > 1 else 0
    return {"cp": Fraction(mesh.columns * own)}


def _over_pp(
    config: ModelConfig, mesh: _Mesh, plan: Plan, sequences: int, seq_len: int
) -> Fraction:
    """Activations and their gradients; a tied embedding's gradient, or its shards, both ways."""
    if mesh.p == 1:
        return Fraction(0)
    schedule = plan.schedule_for(mesh.p)
    rows = seq_len // mesh.c // (mesh.t if plan.by_rows else 1)
    activations = sequences * rows * config.hidden * config.dtype.itemsize
    sent = mesh.columns * pp.wire_bytes(schedule, activations)
    if config.tied and schedule.placement[0] != schedule.placement[-1]:
        table = padded_rows(config.vocab, mesh.t) * config.hidden * _held_itemsize(config, plan)
        sent += 2 * table * mesh.t * (1 if plan.zero else mesh.data)
    return Fraction(sent)


def _over_ep(
    config: ModelConfig, mesh: _Mesh, plan: Plan, tokens: int, leaving: int | Fraction | None
) -> Fraction:
    """Rows of pairs whose expert is elsewhere, there and back, in each forward and backward."""
    if plan.experts is None:
        return Fraction(0)
    if leaving is None:
        pairs = tokens * mesh.d * plan.experts.top_k * config.layers
        leaving = Fraction(mesh.e - 1, mesh.e) * pairs
    row = config.hidden * config.dtype.itemsize
    return Fraction(leaving) * row * 2 * (plan.block_forwards + 1)


def _over_data(config: ModelConfig, mesh: _Mesh, plan: Plan) -> list[tuple[str, Fraction]]:
    """Gradients, and what ZeRO gathers: part by part, experts over ranks of their own."""
    axis = "dp" if mesh.c == 1 else "dp_cp"
    of_experts = "edp" if mesh.e > 1 else axis
    sent = []
    for part in _parts(config, mesh, plan):
        over = mesh.data // mesh.e if part.experts else mesh.data
        own = _of_part(config, over, plan, part.elements)
        sent.append((of_experts if part.experts else axis, mesh.columns * own))
    return sent


def _of_part(config: ModelConfig, n: int, plan: Plan, elements: Sequence[int]) -> Fraction:
    """A rank's bytes for parameters that n ranks hold; ZeRO-3: root and blocks, else one."""
    if plan.zero == 0:
        return dp.wire_bytes(sum(elements) * config.dtype.itemsize, n)
    return zero.wire_bytes(
        plan.zero,
        elements if plan.zero == 3 else [sum(elements)],
        n,
        dtype=config.dtype,
        micro_batches=plan.micro_batches,
        gathered_once=(0, len(elements) - 1) if plan.zero == 3 else (),
    )


@dataclass(frozen=True)
class PartSize:
    """Elements that a rank of ``stage`` holds of a part: outside its blocks and in each block.

    A tied embedding that two stages use is a part of its own, on each rank that has one of them.
    """

    stage: int
    elements: tuple[int, ...]
    experts: bool = False


def part_sizes(config: ModelConfig, sizes: Mapping[str, int], plan: Plan) -> list[PartSize]:
    """The parts of all stages, of one rank of tp, ep and the data axes, before ZeRO cuts them."""
    return _parts(config, _Mesh.of(sizes), plan)


def _parts(config: ModelConfig, mesh: _Mesh, plan: Plan) -> list[PartSize]:
    placement: tuple[int, ...] = (0,)
    layers = [config.layers]
    if mesh.p > 1:
        placement = plan.schedule_for(mesh.p).placement
        layers = pp.partition(config.layers, len(placement))
    dense = replace(config, ffn=mesh.t) if plan.experts else config  # an MLP that is not there
    one, two = (
        tp_formulas.parameters_per_rank(replace(dense, layers=count), mesh.t) for count in (1, 2)
    )
    block, experts = two - one, 0
    if plan.experts is not None:
        router, experts = _experts_of_layer(config, plan.experts, mesh.e)
        block += router - mlp_parameters(replace(dense, ffn=1))
    gpt, table = config.family == "gpt", padded_rows(config.vocab, mesh.t) * config.hidden
    apart = config.tied and mesh.p > 1  # two stages use it
    outside = [0] * len(layers)
    outside[0] += (0 if apart else table) + (config.max_seq_len * config.hidden if gpt else 0)
    outside[-1] += (2 if gpt else 1) * config.hidden + (0 if config.tied else table)
    found = [PartSize(s, (outside[s], *[block] * count)) for s, count in enumerate(layers)]
    if experts:
        found += [PartSize(s, (experts * count,), True) for s, count in enumerate(layers)]
    if apart:
        holders = {placement[0]: 0, placement[-1]: len(layers) - 1}
        found += [PartSize(stage, (table,)) for stage in holders.values()]
    return found


def _experts_of_layer(config: ModelConfig, experts: Experts, e: int) -> tuple[int, int]:
    """Elements of (router and shared expert, this rank's experts) in a layer."""
    mlp = mlp_parameters(config)
    return config.hidden * experts.number + experts.shared * mlp, experts.number // e * mlp


def _held_itemsize(config: ModelConfig, plan: Plan) -> int:
    """Bytes of an element of the gradients that a rank holds."""
    return (zero.reduce_dtype(config.dtype) if plan.zero else config.dtype).itemsize
