"""FLOPs of matrix products in layers, LM head and steps; a multiplication and an addition are 2.

Two conventions count attention. "full" counts all scores: 12 L s h per token of a step (PaLM,
arXiv:2204.02311, appendix B; Megatron's papers; torchtitan). "causal" counts the half that a
causal mask leaves: 6 L s h (Llama 3; Megatron-LM today). A backward has twice the FLOPs of its
forward. Model FLOPs (MFU) leave recomputation out, hardware FLOPs (HFU) count it. Norms, softmax,
activations and the lookup of the embedding are left out, as in these sources.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from course_lib.formulas.parameters import mlp_parameters
from course_lib.planner.catalog import Model
from course_lib.planner.configuration import Configuration
from course_lib.planner.parameters import attention_matrices, is_expert_layer

SHARE_OF_SCORES = {"full": 1.0, "causal": 0.5}


@dataclass(frozen=True)
class LayerFlops:
    """Forward FLOPs of one token in one layer.

    ``projections``: the matrices of attention. ``core``: scores, and their product with V.
    ``mlp``: MLP, or router, experts and shared experts.
    """

    projections: float
    core: float
    mlp: float

    @property
    def total(self) -> float:
        """FLOPs of all three."""
        return self.projections + self.core + self.mlp


def layer_flops(model: Model, layer: int, seq: int, *, attention: str = "causal") -> LayerFlops:
    """Return the forward FLOPs of one token in ``layer``, in sequences of ``seq`` tokens."""
    if attention not in SHARE_OF_SCORES:
        raise ValueError(f'expected attention="causal" or "full", got attention={attention!r}')
    latent = model.latent
    qk, value = model.head_dim, model.head_dim
    if latent is not None:
        qk, value = latent.nope_dim + latent.rope_dim, latent.value_dim
    return LayerFlops(
        projections=2.0 * attention_matrices(model),
        core=2.0 * model.heads * (qk + value) * seq * SHARE_OF_SCORES[attention],
        mlp=2.0 * _mlp_weights(model, layer),
    )


def _mlp_weights(model: Model, layer: int) -> int:
    """Return the elements of the matrices that one token meets: of top_k experts, not of all."""
    experts = model.experts
    if experts is None or not is_expert_layer(model, layer):
        return mlp_parameters(model, bias=False)
    one = mlp_parameters(model, ffn=experts.ffn, bias=False)
    return model.hidden * experts.number + (experts.top_k + experts.shared) * one


def head_flops(model: Model) -> float:
    """Return the forward FLOPs of one token in the LM head."""
    return 2.0 * model.hidden * model.vocab


def blocks_flops(
    model: Model, seq: int, layers: Iterable[int] | None = None, *, attention: str = "causal"
) -> LayerFlops:
    """Return the forward FLOPs of one token in ``layers``, by default in all of them."""
    numbers = range(model.layers) if layers is None else layers
    dense = 0 if model.experts is None else model.experts.dense_layers
    early = late = 0  # layers are of two kinds
    for layer in numbers:
        early, late = early + (layer < dense), late + (layer >= dense)
    first = layer_flops(model, 0, seq, attention=attention)
    last = layer_flops(model, dense, seq, attention=attention)
    return LayerFlops(
        projections=(early + late) * first.projections,
        core=(early + late) * first.core,
        mlp=early * first.mlp + late * last.mlp,
    )


def step_flops(model: Model, configuration: Configuration, attention: str = "causal") -> float:
    """Return the model FLOPs of an optimizer step, of all GPUs together, which MFU counts."""
    blocks = blocks_flops(model, configuration.seq, attention=attention).total
    return 3.0 * configuration.tokens * (blocks + head_flops(model))


def recomputed_flops(
    model: Model,
    configuration: Configuration,
    attention: str = "causal",
    *,
    core_forwards: int = 1,
) -> float:
    """Return the FLOPs of a step's recomputation, of all GPUs together.

    Full recomputation runs the forward of every block again, selective recomputation the core of
    attention. ``core_forwards`` counts how many forwards of the core that costs: 1. Korthikanti et
    al. (arXiv:2205.05198) print HFU for 3: 72 B L s h^2 (1 + s/3h + v/12hL) against model FLOPs
    with s/6h. The kernel's own recomputation of scores in a fused backward is not counted.
    """
    blocks = blocks_flops(model, configuration.seq, attention=attention)
    again = {"none": 0.0, "selective": core_forwards * blocks.core, "full": blocks.total}
    return configuration.tokens * again[configuration.recompute]


def hardware_flops(
    model: Model,
    configuration: Configuration,
    attention: str = "causal",
    *,
    core_forwards: int = 1,
) -> float:
    """Return the FLOPs of a step with recomputation, of all GPUs together, which HFU counts."""
    again = recomputed_flops(model, configuration, attention, core_forwards=core_forwards)
    return step_flops(model, configuration, attention) + again
