"""Bytes on a GPU: weights, gradients, optimizer state and activations of the stage that needs most.

Sources: Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054) for states, Korthikanti et al. 2022
(arXiv:2205.05198) for activations, Megatron-LM's theoretical_memory_usage.py for both. Not
counted: gradients of activations, buffers of collectives and kernels, the CUDA context and
fragmentation. The reserve of an estimate stands for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from course_lib.formulas.parameters import padded_rows
from course_lib.planner.catalog import BF16, Dtype, Model
from course_lib.planner.configuration import RECIPES, Configuration, outer_ranks, stages_of
from course_lib.planner.exact import exact_memory
from course_lib.planner.in_flight import InFlight, in_flight
from course_lib.planner.parameters import (
    is_expert_layer,
    layer_parameters,
    layers_of_rank,
    parameters_per_rank,
)
from course_lib.planner.result import Memory

# --- states --------------------------------------------------------------------------------------

WIDE = {"fp32": (4, 4, 8), "fp64": (8, 8, 16)}  # no copy in another format


@dataclass(frozen=True)
class States:
    """Bytes of weights, gradients and optimizer state on one GPU."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Bytes of all three."""
        return self.weights + self.gradients + self.optimizer

    def __add__(self, other: States) -> States:
        return States(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
        )


def state_bytes(
    elements: float,
    *,
    zero: int = 0,
    shards: int = 1,
    recipe: int = 18,
    dtype: Dtype = BF16,
    gathered: float = 0.0,
) -> States:
    """Return the bytes that ``elements`` parameters take on one of ``shards`` ranks of ZeRO.

    With weights of 2 bytes, the optimizer state is an fp32 master weight and Adam's two moments:

    ==========  =========  ============  =========  ======================================
    recipe      weights    gradients     optimizer  source
    ==========  =========  ============  =========  ======================================
    16          2          2             12         ZeRO, section 3.1
    18          2          4             12         Megatron-LM: fp32 main gradients
    20          2          2             16         DeepSpeed: also fp32 gradients
    fp32, fp64  4, 8       4, 8          8, 16      no master weight
    ==========  =========  ============  =========  ======================================

    ZeRO-1 divides the optimizer state by n = ``shards``, ZeRO-2 also the gradients, ZeRO-3 also the
    weights. Recipe 18 with ZeRO-1 takes 6 + 12/n bytes: Megatron's distributed optimizer. FSDP2
    stores fp32 weights, gradients and two moments: recipe 16 with ZeRO-3. Recipe 20 divides what
    DeepSpeed's estimators divide: 4 + 16/n bytes with ZeRO-2, 18/n with ZeRO-3, and its 16-bit
    gradients are those of one unit.

    ``gathered`` counts the elements of the units that ZeRO-3 has gathered at once, beside its
    shards; it never takes more than the whole weights. Raises ValueError for an unknown recipe.
    """
    if recipe not in RECIPES:
        raise ValueError(f"expected recipe=16, 18 or 20 bytes per parameter, got recipe={recipe}")
    weights, gradients, optimizer = WIDE.get(dtype.name, RECIPES[recipe])
    sharded = shards > 1 and zero >= 3
    units = min(gathered, elements * (1 - 1 / shards)) if sharded else 0.0
    one = gradients * elements
    if recipe == 20 and dtype.name not in WIDE:
        one = gradients * units if sharded else one
    elif zero >= 2:
        one /= shards
    return States(
        weights=weights * (elements / shards + units if sharded else elements),
        gradients=one,
        optimizer=optimizer * elements / (shards if zero >= 1 else 1),
    )


def stage_states(model: Model, configuration: Configuration, stage: int) -> States:
    """Return the bytes of states on a GPU of pipeline rank ``stage``.

    ZeRO shards dense parameters over dp x cp ranks, and experts over the dp x cp / ep ranks that
    have the same ones. With ZeRO-3 two neighboring units are gathered at once, the one that is
    computed and the next (:func:`course_lib.formulas.zero.peak_bytes`): two blocks, or a block and
    the LM head. Adam's step counters and the padding of shards are left out.
    """
    held = parameters_per_rank(model, configuration, stage)
    data = configuration.dp * configuration.cp
    dense, experts = _gathered(model, configuration, stage) if configuration.zero == 3 else (0, 0)

    def of(elements: int, shards: int, gathered: int) -> States:
        return state_bytes(
            elements,
            zero=configuration.zero,
            shards=shards,
            recipe=configuration.recipe,
            dtype=configuration.dtype,
            gathered=gathered,
        )

    return of(held.dense, data, dense) + of(held.experts, data // configuration.ep, experts)


def _gathered(model: Model, configuration: Configuration, stage: int) -> tuple[int, int]:
    """Return the (dense, expert) elements of the two largest units that are gathered at once."""
    layers = layers_of_rank(model, configuration, stage)
    kinds = {is_expert_layer(model, layer): layer for layer in layers}
    blocks = [layer_parameters(model, layer, tp=configuration.tp) for layer in kinds.values()]
    dense = max(block.dense for block in blocks)
    experts = max(block.experts for block in blocks) // configuration.ep
    head = 0
    if stages_of(model, configuration)[-1][0] == stage:
        head = padded_rows(model.vocab, configuration.tp) * model.hidden
    neighbor = dense if len(layers) > 1 else 0
    return dense + max(neighbor, head), experts * min(2, len(layers))


def state_memory(model: Model, configuration: Configuration) -> States:
    """Return the bytes of states on the pipeline rank that has most of them."""
    ranks = range(configuration.pp)
    return max((stage_states(model, configuration, rank) for rank in ranks), key=_total)


# --- activations ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerActivations:
    """Bytes that one layer saves for backward of one micro-batch, on one GPU.

    ``entering`` is the input of the layer, ``scores`` grow with the square of the sequence, and
    ``rest`` is what else is saved.
    """

    entering: float
    rest: float
    scores: float

    @property
    def total(self) -> float:
        """Bytes without recomputation."""
        return self.entering + self.rest + self.scores

    def saved(self, recompute: str) -> float:
        """Return the bytes that are saved: full recomputation saves the input alone."""
        if recompute == "full":
            return self.entering
        return self.entering + self.rest + (self.scores if recompute == "none" else 0.0)

    def working(self, recompute: str) -> float:
        """Return the bytes that recomputation adds while backward is in this layer."""
        return self.total - self.saved(recompute)


def layer_activations(model: Model, configuration: Configuration, layer: int) -> LayerActivations:
    """Return the bytes that ``layer`` saves for one micro-batch, on one GPU.

    With s/c positions per rank of cp, b sequences, hidden size h, numbers of w bytes, H query and G
    key heads of K features, f inner features and t ranks of tp, each token saves:

    ===================  ====================================  ==========================
    inputs of norms      2 w h                                 divided by t with SP
    dropout masks        2 h, if the model has dropout         divided by t with SP
    inputs of columns    2 w h: of q, k, v and of the MLP      divided by t with SP (again)
    q, k, v, and output  w (2 H + 2 G) K                       divided by t
    MLP                  gpt 2 w f; llama 3 w f                divided by t
    scores               s H (2 w + 1), or s H w (no dropout)  divided by t; fused: none
    ===================  ====================================  ==========================

    A gpt layer of 2-byte numbers with G = H, f = 4h and dropout saves Korthikanti's 34 sbh, and
    5as/h sbh of scores. A fused SwiGLU saves gate and up, its input, and recomputes silu (Megatron-
    LM's SwiGLUFunction; torchtitan under torch.compile); its output is the input of down. With SP
    the inputs of columns are saved as shards and gathered again in backward, as in Megatron-LM,
    unless ``gather_again`` is off.

    A layer with experts saves top_k rows of input and inner features for each token (Megatron-LM's
    grouped experts, which scale the inner features by the router's weight, and so need no output),
    an MLP for each shared expert, and the router's probabilities in fp32. tp leaves routed experts
    whole, and with SP each rank routes its own rows. Routing is taken to be even. Latent attention
    saves its latent vectors, before and after their norms.

    Statistics of norms and of softmax, one or two numbers per row and head, are left out. fp8
    training saves 16-bit activations.
    """
    w, t = _width(configuration), configuration.tp
    tokens = configuration.micro_batch * configuration.seq / configuration.cp
    rows = tokens / t if configuration.sequence_parallel else tokens
    masks = 2 * model.hidden if model.dropout else 0
    outside: float = model.block_norms * w * model.hidden + masks
    entered = (
        (rows if configuration.gather_again else tokens) * model.block_norms * w * model.hidden
    )
    heads, kv_heads = model.heads // t, max(model.kv_heads // t, 1)
    latent = model.latent
    if latent is None:
        inside: float = w * model.head_dim * 2 * (heads + kv_heads)
    else:
        outside += w * (2 * (latent.q_rank + latent.kv_rank) + latent.rope_dim)
        inside = 2 * w * heads * (latent.nope_dim + latent.rope_dim + latent.value_dim)
    copies = 3 if model.family == "llama" else 2
    experts = model.experts
    if experts is not None and is_expert_layer(model, layer):
        outside += 4 * experts.number + experts.top_k * w * (model.hidden + copies * experts.ffn)
        inside += w * copies * experts.shared * experts.ffn / t
    else:
        inside += w * copies * model.ffn / t
    score = 2 * w + 1 if model.dropout else w
    entering = rows * w * model.hidden
    return LayerActivations(
        entering=entering,
        rest=rows * outside + entered + tokens * inside - entering,
        scores=0.0 if configuration.fused_attention else tokens * configuration.seq * heads * score,
    )


def _width(configuration: Configuration) -> int:
    """Return the bytes of a number in a saved activation."""
    return max(configuration.dtype.itemsize, 2)


def head_activations(model: Model, configuration: Configuration) -> float:
    """Return the bytes that final norm, LM head and loss save for one micro-batch.

    4 sbh (1 + v/h)/t of 2-byte numbers with SP: input of norm and head, and fp32 logits.
    """
    tokens = configuration.micro_batch * configuration.seq / configuration.cp
    logits = padded_rows(model.vocab, configuration.tp) * max(configuration.dtype.itemsize, 4)
    norm = _entering(model, configuration)
    whole = tokens * model.hidden * _width(configuration)
    return norm + (norm if configuration.gather_again else whole) + tokens * logits


def _entering(model: Model, configuration: Configuration) -> float:
    """Return the bytes of a micro-batch between layers."""
    tokens = configuration.micro_batch * configuration.seq / configuration.cp
    rows = tokens / configuration.tp if configuration.sequence_parallel else tokens
    return rows * model.hidden * _width(configuration)


def activation_bytes(model: Model, configuration: Configuration, stage: int = 0) -> float:
    """Return the peak bytes of activations on a GPU of pipeline rank ``stage``.

    Each micro-batch in flight (:func:`course_lib.planner.in_flight.in_flight`) saves what its
    layers save. The first stage also saves a mask of the embedding's dropout, counted as Megatron
    does for as many micro-batches as the rank has in flight on average over its chunks. The last
    stage saves what the LM head saves. Recomputation adds the working set of one layer, or of all
    layers of a stage where W is split off and waits. It does so after the loss has freed the
    logits, so that only the larger of the two counts.

    A micro-batch that waits for W stores inputs and output gradients of the linears: about as much
    as the layers save with selective recomputation, and output gradients of the LM head.
    """
    found, recompute = _in_flight(configuration, stage), configuration.recompute
    stages = stages_of(model, configuration)
    own = [(number, layers) for number, (rank, layers) in enumerate(stages) if rank == stage]
    kinds = _layer_kinds(model, configuration, [layer for _, layers in own for layer in layers])
    kept, working = 0.0, max(kind.working(recompute) for kind in kinds.values())
    for (number, layers), whole, later in zip(own, found.whole, found.weight, strict=True):
        of_layers = [kinds[is_expert_layer(model, layer)] for layer in layers]
        saved = sum(one.saved(recompute) for one in of_layers)
        waiting = sum(one.saved("selective") for one in of_layers)
        if configuration.schedule in SPLIT_BACKWARD:
            working = max(working, waiting - saved)
        kept += whole * saved + later * waiting
        if number == 0 and model.dropout:
            mask = _entering(model, configuration) / _width(configuration)
            kept += mask * found.total / len(own)
        if number == len(stages) - 1:
            head = head_activations(model, configuration)
            working = max(working, head)
            kept += (whole - 1) * head + later * _head_waiting(model, configuration)
    return kept + working


def _layer_kinds(
    model: Model, configuration: Configuration, layers: Iterable[int]
) -> dict[bool, LayerActivations]:
    """Return what layers of the two kinds save, by whether they have experts."""
    found = {is_expert_layer(model, layer): layer for layer in layers}
    return {kind: layer_activations(model, configuration, at) for kind, at in found.items()}


# Their backward goes through all layers of a stage before the first W of that stage.
SPLIT_BACKWARD = ("zb-h1", "zb-h2", "zb-v", "dualpipe-v")


def _in_flight(configuration: Configuration, stage: int) -> InFlight:
    """Return the micro-batches in flight on a pipeline rank."""
    return in_flight(
        configuration.schedule,
        configuration.pp,
        configuration.micro_batches,
        stage,
        configuration.chunks,
    )


def _head_waiting(model: Model, configuration: Configuration) -> float:
    """Return the bytes that the LM head stores between I and W: its input and output gradient."""
    tokens = configuration.micro_batch * configuration.seq / configuration.cp
    logits = padded_rows(model.vocab, configuration.tp) * _width(configuration)
    return _entering(model, configuration) + tokens * logits


# --- total ---------------------------------------------------------------------------------------


def memory(model: Model, configuration: Configuration, *, exact: bool = False) -> Memory:
    """Return the bytes on a GPU of the pipeline rank whose total is largest.

    With ``exact`` they are those of this course's own code on torch's CPU backend, to the byte
    (:func:`course_lib.planner.exact.exact_memory`).
    """
    if exact:
        every = range(configuration.pp)
        return max((exact_memory(model, configuration, rank) for rank in every), key=_total)
    ranks = outer_ranks(model, configuration)
    return max((stage_memory(model, configuration, rank) for rank in ranks), key=_total)


def exceeds(model: Model, configuration: Configuration, limit: float) -> bool:
    """Return whether a pipeline rank needs more than ``limit`` bytes; it stops at the first."""
    ranks = outer_ranks(model, configuration)
    return any(stage_memory(model, configuration, rank).total > limit for rank in ranks)


def _total(held: Memory | States) -> float:
    return held.total


def stage_memory(model: Model, configuration: Configuration, stage: int) -> Memory:
    """Return the bytes on a GPU of pipeline rank ``stage``."""
    states = stage_states(model, configuration, stage)
    return Memory(
        weights=states.weights,
        gradients=states.gradients,
        optimizer=states.optimizer,
        activations=activation_bytes(model, configuration, stage),
    )
