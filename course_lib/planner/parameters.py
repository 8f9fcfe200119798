"""Parameter counts of a model of the catalog: whole, per token, per layer and per rank.

What the two families have is counted in :mod:`course_lib.formulas.parameters`; this file adds what
published models have beyond it: experts, latent attention, a parallel block, a biased LM head.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from course_lib.formulas.parameters import (
    attention_parameters,
    embedding_sizes,
    mlp_parameters,
    norm_parameters,
    padded_rows,
)
from course_lib.planner.catalog import Model
from course_lib.planner.configuration import Configuration, stages_of
from course_lib.schedule import placement


@dataclass(frozen=True)
class LayerParameters:
    """Parameters of one layer by part, on one rank of tp. ``experts`` counts all routed experts."""

    attention: int
    mlp: int
    router: int
    experts: int
    shared_experts: int
    norms: int

    @property
    def dense(self) -> int:
        """Parameters outside the routed experts."""
        return self.attention + self.mlp + self.router + self.shared_experts + self.norms


@dataclass(frozen=True)
class RankParameters:
    """Elements on one rank, before ZeRO: ``experts`` are divided by ep, ``dense`` are not."""

    dense: int
    experts: int


def layer_parameters(model: Model, layer: int, *, tp: int = 1) -> LayerParameters:
    """Return the parameters of ``layer`` on one rank of ``tp``.

    tp divides the matrices of attention and MLP. Each rank has the whole norms, router, experts
    and down-projections of latent attention; a rank routes its own rows of the sequence.
    """
    experts = model.experts if is_expert_layer(model, layer) else None
    expert = mlp_parameters(model, ffn=experts.ffn, bias=model.mlp_bias) if experts else 0
    return LayerParameters(
        attention=_attention(model, tp),
        mlp=0 if experts else mlp_parameters(model, tp, bias=model.mlp_bias),
        router=experts.number * (model.hidden + experts.router_bias) if experts else 0,
        experts=experts.number * expert if experts else 0,
        shared_experts=experts.shared * expert if experts else 0,
        norms=model.block_norms * norm_parameters(model),
    )


def is_expert_layer(model: Model, layer: int) -> bool:
    """Return whether ``layer`` has experts in place of an MLP."""
    return model.experts is not None and layer >= model.experts.dense_layers


def attention_matrices(model: Model, tp: int = 1) -> int:
    """Return the elements of the matrices of one attention on one rank of ``tp``: no bias, no norm.

    Of latent attention tp divides the up-projections and the output, not the down-projections.
    """
    latent, heads = model.latent, model.heads // tp
    if latent is None:
        return attention_parameters(model, tp, bias=False)
    down = model.hidden * (latent.q_rank + latent.kv_rank + latent.rope_dim)
    up_q = latent.q_rank * heads * (latent.nope_dim + latent.rope_dim)
    up_kv = latent.kv_rank * heads * (latent.nope_dim + latent.value_dim)
    return down + up_q + up_kv + heads * latent.value_dim * model.hidden


def _attention(model: Model, tp: int) -> int:
    """Return the parameters of one attention: its matrices, biases and the norms of MLA."""
    latent = model.latent
    if latent is None:
        return attention_parameters(model, tp, bias=model.attention_bias)
    return attention_matrices(model, tp) + latent.q_rank + latent.kv_rank


def parameters(model: Model) -> int:
    """Return the parameters of the whole model; a tied embedding counts once."""
    rank = parameters_per_rank(model, Configuration(), 0)
    return rank.dense + rank.experts


def active_parameters(model: Model) -> int:
    """Return the parameters that a token uses: all but the experts that it is not routed to.

    The embedding counts as a whole, as in Mixtral's 12.9B, so that all parameters of a model
    without experts are active. DeepSeek-V3's 37B leaves out the input embedding.
    """
    if model.experts is None:
        return parameters(model)
    one = layer_parameters(model, model.layers - 1).experts // model.experts.number
    idle = model.experts.number - model.experts.top_k
    return parameters(model) - (model.layers - model.experts.dense_layers) * idle * one


def parameters_per_rank(model: Model, configuration: Configuration, stage: int) -> RankParameters:
    """Return the elements on one rank of pipeline rank ``stage``: all its virtual stages.

    tp divides matrices and the padded vocabulary, pp the layers, ep the experts. Embedding and LM
    head are on the first and the last virtual stage. A tied embedding is on both, counted once if
    one rank has both.
    """
    tp = configuration.tp
    table, *positions = embedding_sizes(model, tp, positions=model.positions)
    stages = placement(configuration.schedule, configuration.pp, configuration.chunks)
    dense = experts = 0
    own = layers_of_rank(model, configuration, stage)
    for routed, count in Counter(is_expert_layer(model, layer) for layer in own).items():
        one = layer_parameters(model, model.layers - 1 if routed else 0, tp=tp)
        dense += count * one.dense
        experts += count * one.experts // configuration.ep
    if stages[0] == stage:
        dense += table + sum(positions)
    if stages[-1] == stage:
        tied = model.tied and stages[0] == stage
        bias = padded_rows(model.vocab, tp) if model.head_bias else 0
        dense += norm_parameters(model) + bias + (0 if tied else table)
    return RankParameters(dense, experts)


def layers_of_rank(model: Model, configuration: Configuration, stage: int) -> list[int]:
    """Return the numbers of the layers on pipeline rank ``stage``, of all its virtual stages."""
    stages = stages_of(model, configuration)
    return [layer for rank, own in stages if rank == stage for layer in own]
