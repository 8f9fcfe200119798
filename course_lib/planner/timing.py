"""Seconds of one micro-batch on each stage: compute at the efficiency, and exposed communication.

Which calls are hidden behind which computation is an assumption; :func:`assumptions` lists them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from course_lib.planner.catalog import Model
from course_lib.planner.communication import StageKind, StageMoves, StepMoves, kind_of
from course_lib.planner.configuration import Configuration, stages_of
from course_lib.planner.flops import blocks_flops, head_flops
from course_lib.planner.hardware import Hardware
from course_lib.planner.links import axis_span, seconds
from course_lib.planner.memory import layer_activations
from course_lib.planner.parameters import is_expert_layer
from course_lib.planner.pipeline import StageSeconds

# Bytes that the operations between matrix products read and write in forward and in backward, over
# the bytes that they save. Counted for a gpt layer with fused kernels, in sbh bytes of 34 saved:
# forward norms 8, GELU 16, dropouts with residuals 14; backward norms 12, GELU 24, dropouts 10,
# residuals 12, biases 18. For a llama layer with f = 3.5 h the same count gives 1.35 and 1.9.
MOVED = (1.1, 2.2)


# The same for casts to fp8: a product's input and the gradient of its output are read as 2 bytes
# and written as 1 byte twice, once transposed (Transformer Engine on Hopper). Of 34 sbh saved, a
# llama layer with f = 3.5 h casts 6.5 sh in forward, norms cast theirs, and 10.5 sh in backward.
CASTS = (0.65, 1.25)

# Multiprocessors that calls occupy while products run beside them, 20 of 132 of an H800
# (DeepSeek-V3, arXiv:2412.19437, section 3.2.2): so much of the hidden time is not hidden.
SHARE_OF_SMS = 20 / 132


class Rates(NamedTuple):
    """FLOP/s of matrix products, and of the core of attention and LM head, at their efficiency."""

    products: float
    core: float


@dataclass(frozen=True)
class Stage:
    """Seconds of one micro-batch on a virtual stage; ``exposed`` by axis, in forward and in I.

    ``elementwise`` of the seconds of ``compute`` are those of operations bound by memory.
    """

    compute: StageSeconds
    exposed: Mapping[str, tuple[float, float]]
    elementwise: float

    @property
    def total(self) -> StageSeconds:
        """Compute and exposed communication."""
        f, i, w = self.compute
        forward, backward = (sum(one[part] for one in self.exposed.values()) for part in (0, 1))
        return StageSeconds(f + forward, i + backward, w)


def rates(hardware: Hardware, plan: Configuration, generation: str | None = None) -> Rates:
    """Return the FLOP/s that kernels reach; in fp8 training core and LM head are in bf16.

    DeepSeek-V3 (arXiv:2412.19437, section 3.3.1), Transformer Engine and torchtitan do so.
    Raises ValueError when the GPU does not have the number format.
    """
    name = plan.dtype.name
    core = "bf16" if name == "fp8" else name
    return Rates(
        *(
            hardware.peak_of(one) * hardware.efficiency_of(one, generation if one == name else None)
            for one in (name, core)
        )
    )


def stage_seconds(
    model: Model,
    hardware: Hardware,
    plan: Configuration,
    moves: Sequence[StageMoves],
    rate: Rates,
) -> list[Stage]:
    """Return the seconds of one micro-batch on each virtual stage."""
    tokens = plan.micro_batch * plan.seq / plan.cp / plan.tp  # a GPU does the FLOPs of so many
    attention = "causal" if plan.fused_attention else "full"
    stages = stages_of(model, plan)
    spans = {axis: axis_span(axis, plan, hardware.gpus_per_node) for axis in ("tp", "cp", "ep")}
    alike: dict[StageKind, Stage] = {}
    for number, (_, layers) in enumerate(stages):
        kind = kind_of(model, stages, number)
        if kind in alike:
            continue
        blocks = blocks_flops(model, plan.seq, layers, attention=attention)
        core = tokens * blocks.core / rate.core
        products = tokens * (blocks.projections + blocks.mlp) / rate.products
        once = _saved(model, plan, layers, hardware)
        casts = CASTS if plan.dtype.name == "fp8" else (0.0, 0.0)
        ahead, back = ((moved + cast) * once for moved, cast in zip(MOVED, casts, strict=True))
        again = {"none": 0.0, "selective": core, "full": core + products + ahead}[plan.recompute]
        products += kind.last * tokens * head_flops(model) / rate.core
        compute = StageSeconds(
            core + products + ahead, 2 * core + products + back + again, products
        )
        exposed = {}
        for axis, passes in moves[number].passes.items():
            f, i, late = (seconds(part, spans[axis], hardware) for part in passes)
            i += max(0.0, late - products)
            if axis == "tp" and plan.overlap_tp:
                f = max(f / plan.tp, f - products)
                i = max(i / plan.tp, i - 2 * products)
            if axis == "cp" and not hardware.emulated:  # a turn behind each block but the last
                hidden = core * (plan.cp - 1) / plan.cp
                cores = 2 if plan.recompute == "none" else 3
                f, i = max(0.0, f - hidden), max(0.0, i - cores * hidden)
            if axis == "ep" and plan.schedule == "dualpipe-v" and plan.pp > 1:
                left = max(0.0, 1 - compute.total / (f + i)) if f + i else 0.0
                f, i = left * f, left * i
            exposed[axis] = (f, i)
        repeated = 2 if plan.recompute == "full" else 1
        alike[kind] = Stage(compute, exposed, repeated * ahead + back)
    return [alike[kind_of(model, stages, number)] for number in range(len(stages))]


def _saved(model: Model, plan: Configuration, layers: Iterable[int], hardware: Hardware) -> float:
    """Return the seconds to read or write once all bytes that ``layers`` save."""
    kinds = Counter(is_expert_layer(model, layer) for layer in layers)
    dense = model.experts.dense_layers if model.experts else 0
    saved = sum(
        number * layer_activations(model, plan, dense if routed else 0).total
        for routed, number in kinds.items()
    )
    return saved / hardware.memory_bandwidth


def exposed_data(
    hardware: Hardware, plan: Configuration, moves: StepMoves, stages: Sequence[Stage]
) -> dict[str, float]:
    """Return the seconds of a step in which a rank with ``stages`` waits for its data axes.

    Sums of gradients are hidden behind the backward of the last micro-batch, or of each one where
    it has its own round (ZeRO-2 and 3); gathers of parameters behind the forward of the first, or
    with ZeRO-3 behind the forward and the backward of each. Of the hidden time
    :data:`SHARE_OF_SMS` counts too.
    """
    forward = sum(stage.total.f for stage in stages)
    backward = sum(stage.total.i + stage.total.w for stage in stages)
    sums, gathers, rounds = {}, {}, (1, 1)
    for axis, data in moves.data.items():
        over = axis_span(axis, plan, hardware.gpus_per_node)
        sums[axis] = seconds(data.sums, over, hardware)
        gathers[axis] = seconds(data.gathers, over, hardware)
        rounds = data.sum_rounds, data.gather_rounds
    whole_sums, whole_gathers = sum(sums.values()), sum(gathers.values())
    if hardware.emulated and plan.zero == 1:
        waits = whole_sums + whole_gathers
    elif plan.zero == 3:
        half = whole_gathers / 2
        waits = max(0.0, half - forward) + max(0.0, half + whole_sums - backward)
        waits *= rounds[0]
    else:
        waits = rounds[0] * max(0.0, whole_sums - backward) + max(0.0, whole_gathers - forward)
    whole = rounds[0] * whole_sums + rounds[1] * whole_gathers
    if not hardware.emulated:
        waits += SHARE_OF_SMS * (whole - waits)
    whole = whole_sums + whole_gathers
    return {axis: waits * (sums[axis] + gathers[axis]) / whole for axis in sums} if whole else {}


def assumptions(model: Model, plan: Configuration) -> Iterator[str]:
    """Yield the assumptions behind the seconds of ``plan``, one or two sentences each."""
    if plan.fused_attention:
        yield ("FlashAttention saves no scores and computes only those below the diagonal.")
    else:
        yield "Attention is not fused: it computes and saves all scores."
    if plan.tp > 1 and plan.overlap_tp:
        yield (
            "TP is hidden behind the products, which are cut into tp pieces; one piece of each "
            "call is exposed (Transformer Engine's userbuffers, --tp-comm-overlap)."
        )
    elif plan.tp > 1:
        yield (
            "TP is exposed: the next product needs the whole sum or the gathered rows. Only "
            "overlap_tp assumes kernels that split the product and hide it."
        )
    if plan.tp > 1 and plan.sequence_parallel and plan.gather_again:
        yield ("SP gathers inputs again in backward, beside the input gradient (Megatron-LM).")
    if plan.cp > 1:
        yield (
            "CP is a zig-zag ring: each transfer of K and V is hidden behind the attention of the "
            "previous block, up to its duration (arXiv:2310.01889)."
        )
    if plan.ep > 1 and plan.schedule == "dualpipe-v" and plan.pp > 1:
        yield (
            "Routing is even. DualPipe pairs micro-batches: the compute of one hides EP of the "
            "other, up to its duration (arXiv:2412.19437, section 3.2.1)."
        )
    elif plan.ep > 1:
        yield (
            "EP is exposed, and routing is even: the experts wait for their tokens "
            "(arXiv:2006.16668)."
        )
    if plan.dp * plan.cp > 1:
        yield from _of_data(plan)
    if plan.pp > 1:
        yield (
            "A message of PP delays the next stage but does not block the sender; its time is part "
            "of the bubble, which is simulated with the seconds of each stage."
        )
    yield (
        "Elementwise operations read and write 1.1 times the saved bytes in forward and 2.2 times "
        "in backward, at the GPU's memory bandwidth."
    )
    yield (
        "The optimizer starts after all gradients are summed. It reads and writes its state once, "
        "at the GPU's memory bandwidth."
    )


def _of_data(plan: Configuration) -> Iterator[str]:
    """Yield which calls of the data axes are hidden."""
    yield (
        f"Hidden calls of the data axes use {100 * SHARE_OF_SMS:.0f} % of the multiprocessors, so "
        "this share of their time counts as exposed (arXiv:2412.19437, section 3.2.2)."
    )
    behind = "each micro-batch" if plan.zero > 1 else "the last micro-batch"
    yield (
        f"The backward of {behind} hides the sums of gradients, up to its duration (bucket by "
        "bucket, as DDP, arXiv:2006.15704). The rank of the first stage counts: its backward "
        "ends last."
    )
    if plan.zero == 3:
        yield "ZeRO-3 gathers a block while the previous one computes, as FSDP (arXiv:2304.11277)."
    elif plan.zero:
        yield (
            "The forward of the first micro-batch hides the gathering of updated weights, as in "
            "Megatron-LM with --overlap-param-gather."
        )
