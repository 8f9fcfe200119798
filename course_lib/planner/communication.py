"""What a GPU sends over each axis in a step: calls, bytes, links and seconds.

The calls are those of :mod:`course_lib.formulas.moves`, of which the techniques' byte formulas are
the sums; here they are placed on the stages of a pipeline and on the links of a cluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import NamedTuple

from course_lib.formulas import sp
from course_lib.formulas.moves import (
    DataMoves,
    Move,
    Passes,
    dispatch,
    entering,
    leaving,
    loss,
    of_data,
    ring,
)
from course_lib.formulas.parameters import accumulation_itemsize, padded_rows
from course_lib.formulas.tp import shared_head_parameters
from course_lib.formulas.zero import padded
from course_lib.planner.catalog import BF16, Model
from course_lib.planner.configuration import Configuration, stages_of
from course_lib.planner.parameters import (
    LayerParameters,
    is_expert_layer,
    layer_parameters,
    layers_of_rank,
    parameters_per_rank,
)
from course_lib.schedule import placement

BUCKET = 40_000_000  # elements of a bucket of gradients: Megatron-LM's default, at least


class StageKind(NamedTuple):
    """What decides the cost of a virtual stage: its layers, those with experts, and its place."""

    layers: int
    routed: int
    first: bool
    last: bool


def kind_of(model: Model, stages: Sequence[tuple[int, range]], number: int) -> StageKind:
    """Return the kind of stage ``number``."""
    layers = stages[number][1]
    routed = sum(is_expert_layer(model, layer) for layer in layers)
    return StageKind(len(layers), routed, number == 0, number + 1 == len(stages))


@dataclass(frozen=True)
class StageMoves:
    """The calls of one micro-batch on one virtual stage, by axis.

    ``onward`` and ``back`` are the messages of pp to the next stage and to the one before.
    """

    passes: dict[str, Passes]
    onward: tuple[Move, ...] = ()
    back: tuple[Move, ...] = ()


@dataclass(frozen=True)
class StepMoves:
    """The calls of one rank once per step, or in rounds: ``data`` by axis, and exposed ``sums``."""

    data: dict[str, DataMoves]
    sums: dict[str, tuple[Move, ...]]


@dataclass(frozen=True)
class Shape:
    """The sizes that the calls of a plan share.

    ``dtype`` is the number format of weights and activations.
    """

    model: Model
    plan: Configuration

    @property
    def x_bytes(self) -> int:
        """Bytes of x_BSD of one micro-batch, of the positions of a rank of cp."""
        return self.tokens * self.model.hidden * self.itemsize

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on a rank of cp."""
        return self.plan.micro_batch * self.plan.seq // self.plan.cp

    @property
    def itemsize(self) -> int:
        """Bytes of a weight and of an activation; fp8 training stores and sends 16-bit numbers."""
        return max(self.plan.dtype.itemsize, BF16.itemsize)

    @property
    def gradient_itemsize(self) -> int:
        """Bytes of an element of a summed gradient; in recipe 16 as many as a weight has."""
        wide = accumulation_itemsize(self.plan.dtype)
        return self.itemsize if self.plan.recipe == 16 else wide

    @property
    def data(self) -> int:
        """Ranks that sum the gradients of the same parameters."""
        return self.plan.cp * self.plan.dp

    @property
    def rows(self) -> bool:
        """Whether the ranks of tp share the positions between the regions."""
        return self.plan.sequence_parallel and self.plan.tp > 1


def stage_moves(model: Model, plan: Configuration) -> list[StageMoves]:
    """Return the calls of one micro-batch on each virtual stage."""
    shape, stages = Shape(model, plan), stages_of(model, plan)
    message = (Move("send", shape.x_bytes // (plan.tp if shape.rows else 1), 2),)
    alike: dict[StageKind, dict[str, Passes]] = {}  # most stages are
    found = []
    for number, (rank, _) in enumerate(stages):
        kind = kind_of(model, stages, number)
        if kind not in alike:
            alike[kind] = dict(_passes(shape, kind))
        onward = number + 1 < len(stages) and stages[number + 1][0] != rank
        back = number > 0 and stages[number - 1][0] != rank
        found.append(StageMoves(alike[kind], message * onward, message * back))
    return found


def _passes(shape: Shape, kind: StageKind) -> Iterator[tuple[str, Passes]]:
    """Yield what a stage does for one micro-batch on tp, cp and ep."""
    plan, model = shape.plan, shape.model
    blocks = 2 if plan.recompute == "full" else 1  # forward passes of a block
    cores = 1 if plan.recompute == "none" else 2
    if plan.tp > 1:
        regions = 2 * kind.layers - kind.routed * shape.rows
        yield "tp", _of_tp(shape, regions, blocks, kind.first, kind.last)
    if plan.cp > 1:
        keys_values = Fraction(shape.tokens * _kv_features(model), min(plan.tp, model.kv_heads))
        wide = accumulation_itemsize(plan.dtype)
        one = ring(keys_values * shape.itemsize, keys_values * wide, plan.cp)
        yield "cp", _times(one, kind.layers, cores)
    if plan.ep > 1 and model.experts:
        pairs = Fraction(shape.tokens * model.experts.top_k, plan.tp if shape.rows else 1)
        one = dispatch(pairs * model.hidden * shape.itemsize, plan.ep)
        yield "ep", _times(one, kind.routed, blocks)


def _of_tp(shape: Shape, regions: int, forwards: int, first: bool, last: bool) -> Passes:
    """Return the calls of regions, of the embedding (``first``), of LM head and loss (``last``)."""
    n, options = shape.plan.tp, {"rows": shape.rows}
    enter = entering(shape.x_bytes, n, again=shape.plan.gather_again, **options)
    leave = leaving(shape.x_bytes, n, **options)
    found = [_times(enter, regions, forwards), _times(leave, regions, forwards)]
    if first:
        found.append(leave)
    if last:
        wide = accumulation_itemsize(shape.plan.dtype)
        found += [enter, Passes(forward=loss(shape.tokens, wide, n))]
    return Passes(*(tuple(m for one in found for m in one[part]) for part in range(3)))


def _times(one: Passes, layers: int, forwards: int) -> Passes:
    """Return the calls of several layers. Recomputation repeats the forward in backward."""
    forward, backward, again = (tuple(m.times(layers) for m in part) for part in one)
    return Passes(forward, forward * (forwards - 1) + backward, again)


def _kv_features(model: Model) -> int:
    """Elements of K and V of a token in a layer."""
    if model.latent:
        latent = model.latent
        return model.heads * (latent.nope_dim + latent.rope_dim + latent.value_dim)
    return 2 * model.kv_heads * model.head_dim


def step_moves(model: Model, plan: Configuration, rank: int) -> StepMoves:
    """Return the calls of pipeline rank ``rank`` that sum gradients and gather parameters."""
    shape, stages = Shape(model, plan), placement(plan.schedule, plan.pp, plan.chunks)
    layers = layers_of_rank(model, plan, rank)
    ends = (stages[0] == rank, stages[-1] == rank)
    data: dict[str, DataMoves] = {}
    for axis, n, parts in _parts(shape, rank, layers, ends):
        if n > 1 and any(parts):
            data[axis] = _of_data(shape, n, parts, data.get(axis))
    sums: dict[str, tuple[Move, ...]] = {}
    if plan.tp > 1:
        shards, copies = (shape.data, shape.data // plan.ep) if plan.zero else (1, 1)
        if shape.rows:
            whole, experts = _replicated(shape, layers, ends)
            held = Fraction(whole, shards) + Fraction(experts, copies)
            sums["tp"] = (Move("all_reduce", held * shape.gradient_itemsize, plan.tp),)
        if plan.tp > model.kv_heads:
            heads = len(layers) * shared_head_parameters(replace(model, layers=1))
            held = Fraction(heads * shape.gradient_itemsize, shards)
            sums["tp_kv"] = (Move("all_reduce", held, plan.tp // model.kv_heads),)
    if model.tied and plan.pp > 1 and ends[0] != ends[1]:
        table = padded_rows(model.vocab, plan.tp) * model.hidden * shape.gradient_itemsize
        held = Fraction(table, shape.data if plan.zero else 1)
        sums["pp"] = (Move("all_reduce", held, 2),)
    return StepMoves(data, sums)


def _replicated(shape: Shape, layers: Sequence[int], ends: tuple[bool, bool]) -> tuple[int, int]:
    """Return (parameters that each rank of tp has, its experts): a rank has gradients of its rows.

    Norms, routers, shared experts and down-projections of latent attention; of gpt also the biases
    after a sum and the positions.
    """
    model, latent = shape.model, shape.model.latent
    whole = experts = 0
    for one, count in Counter(_blocks(shape, layers)).items():
        each = sp.replicated_per_layer(model, regions=1 if one.experts else 2)
        each += one.router + one.shared_experts
        if latent:
            down = latent.q_rank + latent.kv_rank + latent.rope_dim
            each += model.hidden * down + latent.q_rank + latent.kv_rank
        whole += count * each
        experts += count * (one.experts // shape.plan.ep)
    return whole + sp.replicated_at_ends(model, *ends), experts


def _parts(
    shape: Shape, rank: int, layers: Sequence[int], ends: tuple[bool, bool]
) -> Iterator[tuple[str, int, list[int]]]:
    """Yield axis, group and elements of the flat parameters: a root and blocks, then experts.

    A tied embedding that two ranks hold is flat on its own.
    """
    plan, model = shape.plan, shape.model
    axis = "dp" if plan.cp == 1 else "dp_cp"
    blocks = _blocks(shape, layers)
    dense = [block.dense for block in blocks]
    root = parameters_per_rank(model, plan, rank).dense - sum(dense)
    if model.tied and ends[0] != ends[1]:
        table = padded_rows(model.vocab, plan.tp) * model.hidden
        yield axis, shape.data, [table]
        root -= table
    yield axis, shape.data, [root, *dense]
    expert_axis = "edp" if plan.ep > 1 else axis
    experts = [block.experts // plan.ep for block in blocks if block.experts]
    yield expert_axis, shape.data // plan.ep, experts


def _blocks(shape: Shape, layers: Sequence[int]) -> list[LayerParameters]:
    """Return the parameters of ``layers``, which are of two kinds."""
    model = shape.model
    kinds = {is_expert_layer(model, layer): layer for layer in layers}
    found = {at: layer_parameters(model, layer, tp=shape.plan.tp) for at, layer in kinds.items()}
    return [found[is_expert_layer(model, layer)] for layer in layers]


def _of_data(shape: Shape, n: int, parts: Sequence[int], before: DataMoves | None) -> DataMoves:
    """Return the calls for ``parts``, added to those ``before`` on the same axis.

    Stages 0 to 2 send buckets, stage 3 a unit per block; root and last block stay gathered, as in
    FSDP2.
    """
    plan, whole = shape.plan, padded(sum(parts), n) if shape.plan.zero else sum(parts)
    found = of_data(
        plan.zero,
        [padded(part, n) for part in parts] if plan.zero == 3 else [whole],
        n,
        itemsize=shape.itemsize,
        gradient_itemsize=shape.gradient_itemsize,
        micro_batches=plan.micro_batches,
        gathered_once=(0, len(parts) - 1),
    )
    pieces = 1 if plan.zero == 3 else ceil(whole / BUCKET)
    sums, gathers = ([move.cut(pieces) for move in moves] for moves in found[:2])
    if before is not None:
        sums, gathers = [*before.sums, *sums], [*before.gathers, *gathers]
    return found._replace(sums=tuple(sums), gathers=tuple(gathers))
