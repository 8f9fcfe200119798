"""Bytes that this course's own code holds on torch's CPU backend, to the byte.

:mod:`course_lib.planner.memory` counts what fused kernels on GPUs save and leaves small tensors
out. Here every tensor counts as the meters of :mod:`course_lib.trace` see it, for the small models
that `course tour` trains. Composed of the techniques' own formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from course_lib.formulas import ep, recompute, sp, tp
from course_lib.formulas.held import (
    COUNT_BYTES,
    COUNTER_BYTES,
    buckets,
    peak_saved_bytes,
)
from course_lib.formulas.parameters import (
    accumulation_itemsize,
    block_parameter_count,
    parameter_sizes,
)
from course_lib.formulas.pp import saved_for_wgrad
from course_lib.formulas.recompute import ID_BYTES
from course_lib.formulas.zero import padded
from course_lib.planner.catalog import Model
from course_lib.planner.configuration import Configuration, stages_of
from course_lib.planner.result import Memory
from course_lib.schedule import make

BUCKET_BYTES = 25_000_000  # of gradients, as in course_lib.dp
LoadOf = Callable[[int, int], ep.Load]  # of a layer and a micro-batch


def exact_memory(
    model: Model,
    configuration: Configuration,
    stage: int = 0,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    load: LoadOf | None = None,
    ep_rank: int = 0,
) -> Memory:
    """Return the bytes on pipeline rank ``stage``: state after a step, peak of saved activations.

    The weights have the configuration's dtype, without a copy in another one. Context parallelism
    is ring attention. ``load(layer, micro_batch)`` counts the tokens of each expert, of which this
    is rank ``ep_rank``; by default routing is even. With cp and a split backward the count can be
    short by a block's input per micro-batch in flight, since a ring copies its output. Raises
    ValueError for what no formula covers: tied embeddings on two stages, selective recomputation,
    recomputation in a pipeline, published models that depart from their family.
    """
    _check(model, configuration)
    plain = replace(model, dtype=configuration.dtype)
    weights, gradients, optimizer = _states(plain, configuration, stage, bucket_bytes)
    if load is None:
        load = _even(plain, configuration)
    activations = _activations(plain, configuration, stage, load, ep_rank)
    return Memory(weights, gradients, optimizer, activations)


def _check(model: Model, configuration: Configuration) -> None:
    special = [
        name
        for name, value in (("attention_bias", None), ("mlp_bias", None), ("positions", None))
        if getattr(model, name) is not value
    ]
    special += [name for name in ("latent", "head_bias") if getattr(model, name)]
    experts = model.experts
    if experts is not None and (experts.dense_layers or experts.shared):
        special.append("dense layers or shared experts")
    if special:
        raise ValueError(
            f"expected a model of the course, got {model.name} with {', '.join(special)}; use "
            "memory()"
        )
    piped = configuration.pp > 1
    if piped and model.tied:
        raise ValueError("expected an untied embedding with pp > 1, got tied=True; use memory()")
    if configuration.recompute == "selective" or (piped and configuration.recompute != "none"):
        raise ValueError(
            f"expected recompute=none, or full without a pipeline, got recompute="
            f"{configuration.recompute} and pp={configuration.pp}; use memory()"
        )


# --- states --------------------------------------------------------------------------------------


def _states(
    model: Model, configuration: Configuration, stage: int, bucket_bytes: int
) -> tuple[int, int, int]:
    """Return the bytes of weights, gradients and optimizer state."""
    dense, experts = _tensors(model, configuration, stage)
    b, a = model.dtype.itemsize, accumulation_itemsize(model.dtype)
    data = configuration.dp * configuration.cp
    if configuration.zero == 0:
        count, elements = len(dense) + len(experts), sum(dense) + sum(experts)
        return b * elements, b * elements, 2 * b * elements + COUNTER_BYTES * count
    limit = max(1, bucket_bytes // b)
    flats = [(size, data) for size in buckets(reversed(dense), limit)]
    if configuration.zero == 3:
        block = block_parameter_count(model)
        root = sum(dense) - model.layers * block
        flats = [(size, data) for size in [root, *[block] * model.layers]]
    flats += [(size, data // configuration.ep) for size in buckets(reversed(experts), limit)]
    whole = sum(padded(size, n) for size, n in flats)
    shards = sum(padded(size, n) // n for size, n in flats)
    master = shards * a if configuration.zero < 3 and a != b else 0
    weights = whole * b if configuration.zero < 3 else shards * a + len(flats) * b
    return weights, shards * a, 2 * shards * a + master + COUNTER_BYTES * len(flats)


def _tensors(model: Model, configuration: Configuration, stage: int) -> tuple[list[int], list[int]]:
    """Return the elements of the rank's tensors outside its experts and in its experts.

    A layer with experts has a router and an MLP per expert in place of the MLP.
    """
    t, routed = configuration.tp, model.experts
    dense: list[int] = []
    experts: list[int] = []
    for rank, layers in stages_of(model, configuration):
        if rank == stage:
            dense += parameter_sizes(model, layers.start, layers.stop, t)
            if routed is not None:
                for size in _mlp(model, t) * len(layers):
                    dense.remove(size)
                dense += [model.hidden * routed.number] * len(layers)
                expert = _mlp(replace(model, ffn=routed.ffn), 1)
                experts += expert * (routed.number // configuration.ep * len(layers))
    return dense, experts


def _mlp(model: Model, t: int) -> list[int]:
    """Return the elements of the tensors of an MLP, which are the last ones of a block."""
    first_block = parameter_sizes(replace(model, layers=2), 0, 1, t)
    return first_block[-3:] if model.family == "llama" else first_block[-4:]


# --- activations ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Saved:
    """Bytes that one micro-batch saves on a rank: in a block (as if it had an MLP), at the
    embedding, at the head.

    ``batch`` are tokens or targets of all micro-batches, which share one storage.
    """

    block: int
    embedding: int
    head: int
    batch: int


def _activations(
    model: Model, configuration: Configuration, stage: int, load: LoadOf, ep_rank: int
) -> int:
    """Return the peak bytes of saved activations."""
    saved, stages = _saved(model, configuration), stages_of(model, configuration)
    last = len(stages) - 1

    def whole(number: int, micro_batch: int) -> int:
        layers = stages[number][1]
        total = (number == 0) * saved.embedding + (number == last) * saved.head
        for layer in layers if model.experts else ():
            total += _experts(model, configuration, load(layer, micro_batch), ep_rank)
        return total + len(layers) * saved.block

    if configuration.recompute == "full":
        return _recomputed(model, configuration, saved)
    if configuration.pp == 1:  # one micro-batch after another
        largest = max(whole(0, micro_batch) for micro_batch in range(configuration.micro_batches))
        return largest + 2 * saved.batch + COUNT_BYTES
    schedule = make(
        configuration.schedule,
        configuration.pp,
        configuration.micro_batches,
        configuration.chunks,
    )

    def waiting(number: int) -> int:
        layers = stages[number][1]
        rows = configuration.seq // configuration.cp
        return saved_for_wgrad(
            model,
            configuration.micro_batch,
            rows,
            layers.start,
            layers.stop,
            tp=configuration.tp,
        )

    once = {0: saved.batch, last: saved.batch}
    peak = peak_saved_bytes(schedule.rows[stage], whole, waiting, once)
    # pp.train_step divides the loss by a number, compose's trainer by a tensor.
    alone = configuration.world == configuration.pp
    return peak + COUNT_BYTES * (not alone and stages[last][0] == stage)


def _saved(model: Model, configuration: Configuration) -> _Saved:
    """Return what a micro-batch saves, by the techniques' formulas."""
    t, sequences = configuration.tp, configuration.micro_batch
    rows = configuration.seq // configuration.cp  # a ring saves as one process with these rows
    outside = recompute.saved_outside_blocks(model, sequences, rows)
    if t == 1:
        block = recompute.saved_by_block(model, sequences, rows).total
        embedding, head = outside.embedding, outside.head
        batch = ID_BYTES * configuration.sequences * rows
    else:
        by_rows, again = configuration.sequence_parallel, configuration.gather_again
        vocabulary = tp.saved_by_vocabulary(model, sequences * rows, t)
        embedding = tp.saved_by_embedding(sequences * rows)
        if by_rows:
            block = sp.saved_per_block(model, sequences, rows, t, again=again)
            ends = sp.saved_outside_blocks(model, sequences, rows, t, again=again)
            embedding += outside.positions // t
        else:
            block = tp.saved_per_block(model, sequences, rows, t)
            ends = outside.positions + outside.mask + outside.norm + outside.entered
            embedding += outside.embedding
        head, batch = ends + vocabulary - embedding, 0  # the vocabulary's shard saves copies
    return _Saved(block, embedding, head, batch)


def _experts(model: Model, configuration: Configuration, load: ep.Load, rank: int) -> int:
    """Return the bytes that router and experts save in a block, less the bytes of an MLP."""
    assert model.experts is not None
    t, routed = configuration.tp, model.experts
    tokens = configuration.micro_batch * configuration.seq // configuration.cp
    inner = (4 if model.family == "llama" else 2) * model.ffn // t
    mlp = tokens * (model.hidden + inner) * model.dtype.itemsize
    sizes = replace(model, ffn=routed.ffn)
    return ep.saved_per_layer(sizes, tokens // t, load, rank, routed.top_k) - mlp


def _even(model: Model, configuration: Configuration) -> LoadOf:
    """Return loads in which every expert gets as many tokens."""
    if model.experts is None:
        return lambda layer, micro_batch: _Even(1, 1, 0)
    tokens = configuration.micro_batch * configuration.seq // configuration.cp // configuration.tp
    number = model.experts.number
    load = _Even(configuration.ep, number, tokens * model.experts.top_k // number)
    return lambda layer, micro_batch: load


@dataclass(frozen=True)
class _Even:
    """The load of ``ranks`` of ep whose routers send ``pairs`` to every expert."""

    ranks: int
    experts: int
    pairs: int

    @property
    def kept(self) -> list[list[int]]:
        """Pairs by rank and expert."""
        return [[self.pairs] * self.experts] * self.ranks

    @property
    def by_rank(self) -> list[int]:
        """Pairs that each rank computes, from all ranks."""
        return [self.pairs * self.experts] * self.ranks


def _recomputed(model: Model, configuration: Configuration, saved: _Saved) -> int:
    """Return the peak of full recomputation without a pipeline.

    The inputs of all blocks are saved. In addition, there are either the activations of embedding
    and LM head or, after backward has freed those of head and loss, the recomputed activations of
    the last block, without its input.
    """
    rows = configuration.micro_batch * configuration.seq // configuration.cp
    divided = configuration.tp if configuration.sequence_parallel else 1
    x_bytes = rows // divided * model.hidden * model.dtype.itemsize
    positions = configuration.seq // configuration.cp * ID_BYTES
    head = saved.head + saved.batch + COUNT_BYTES
    ends = saved.embedding + saved.batch + max(head, saved.block - x_bytes)
    return model.layers * x_bytes + positions + ends
