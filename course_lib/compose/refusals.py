"""Which combinations do not work, and which work but cost more than they should: in sentences.

No process is needed to ask. Sizes are those of the axes, ``{"tp": 2, "cp": 1, ...}``; an axis that
is left out has size 1, and ``ep`` lies inside dp and cp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf, lcm

from course_lib.compose.plan import Plan
from course_lib.cp import Nested
from course_lib.formulas.plan import AxisSizes
from course_lib.model import ModelConfig
from course_lib.schedule import Schedule, validate


def refusals(
    config: ModelConfig,
    sizes: Mapping[str, int],
    plan: Plan,
    *,
    sequences: int | None = None,
    seq_len: int | None = None,
) -> list[str]:
    """Return why this model cannot be trained so; empty when it can.

    The batch is checked where ``sequences``, of one replica in a step, and ``seq_len`` are given.
    """
    of = AxisSizes(**sizes)
    found = [*_numbers(plan), *_model(config, of, plan), *_zero(of, plan), *_experts(of, plan)]
    found += [*_pipeline(config, of, plan)]
    if sequences is not None and seq_len is not None:
        found += batch_refusals(config, of, plan, sequences, seq_len)
    return found


def discouraged(config: ModelConfig, sizes: Mapping[str, int], plan: Plan) -> list[str]:
    """Return what works but should not be used, and why; empty when there is nothing to say."""
    of = AxisSizes(**sizes)
    return [*_costly(config, of, plan), *_different(config, of, plan)]


def _numbers(plan: Plan) -> Iterator[str]:
    if plan.zero not in (0, 1, 2, 3):
        yield f"zero={plan.zero}: 0 is no ZeRO, and there are stages 1, 2 and 3"
    if plan.micro_batches < 1:
        yield f"expected micro_batches of 1 or more, got micro_batches={plan.micro_batches}"
    if plan.bucket_bytes < 1:
        yield f"expected bucket_bytes of 1 or more, got bucket_bytes={plan.bucket_bytes}"
    if plan.max_norm is not None and not plan.max_norm > 0:
        yield f"expected max_norm above 0 or None, got max_norm={plan.max_norm}"
    scale = plan.loss_scale
    if scale is not None and not 0 < scale.initial < inf:
        yield f"expected a finite loss scale above 0, got a loss scale of {scale.initial}"
    if scale is not None and scale.growth_interval is not None and scale.growth_interval < 1:
        yield f"growth_interval={scale.growth_interval}: one good step at least, or None for static"


def _model(config: ModelConfig, sizes: AxisSizes, plan: Plan) -> Iterator[str]:
    """Heads and features against tp (which leaves experts whole), heads against Ulysses."""
    t, c = sizes.tp, sizes.cp
    for name, size in (("heads", config.heads), ("ffn", 0 if plan.experts else config.ffn)):
        if size % t:
            yield f"{name}={size} is not divisible by tp={t}: every rank takes {name} / tp of them"
    kv, most = min(config.kv_heads, t), max(config.kv_heads, t)
    if most % kv:
        yield (
            f"kv_heads={config.kv_heads} and tp={t}: one must divide the other, so that each rank "
            "has whole key and value heads or shares one"
        )
    if c > 1:
        yield from _cores(config.heads // t, c, plan)


def _cores(heads: int, c: int, plan: Plan) -> Iterator[str]:
    """Heads of a rank and layout against Ulysses, alone and in a grid."""
    core, layout = plan.core, plan.layout
    if core.whole_heads and layout.per_rank > 1:
        yield (
            f"core {core.name} with the {layout.name} layout: its shards must join "
            "to the sequence in order; take the contiguous layout (its work is even anyway)"
        )
    if core.run > 1 and not (isinstance(layout, Nested) and layout.heads == core.run):
        yield (
            f"core {core.name} with the {layout.name} layout: the ring goes through runs of "
            f"{core.run} neighbors; take cp.nested(cp.ZIGZAG, {core.run})"
        )
    if c % core.run:
        yield f"core {core.name}: cp={c} is no multiple of {core.run}; choose a divisor of {c}"
    if heads % core.sharing_heads(c):
        yield (
            f"core {core.name}: a rank of tp has {heads} heads, which {core.sharing_heads(c)} "
            "ranks of cp cannot divide equally; take a ring, a gather, or a grid in runs of a "
            f"divisor of {heads}"
        )


def _zero(sizes: AxisSizes, plan: Plan) -> Iterator[str]:
    p = sizes.pp
    if plan.zero >= 2 and p > 1:
        what = {
            2: "reduce-scatters its gradients once for every micro-batch, where ZeRO-1 does so "
            "once per step",
            3: "gathers a stage's parameters twice for every micro-batch, and frees them between",
        }.get(plan.zero, "")
        yield (
            f"zero={plan.zero} with pp={p}: a pipeline needs many micro-batches, and "
            f"ZeRO-{plan.zero} {what}; use zero=1, as pp already divides gradients and parameters"
        )
    if plan.zero == 3 and plan.experts:
        yield (
            "zero=3 with experts: a block's parameters are gathered as one, but its experts are "
            "divided over ep and sharded over edp, the rest over all data ranks; take zero=2"
        )
    if plan.zero and plan.overlap:
        yield (
            f"overlap with zero={plan.zero}: ZeRO-1 scatters once, at the end of the step, and "
            "stages 2 and 3 during backward anyway; overlap is for zero=0"
        )


def _experts(sizes: AxisSizes, plan: Plan) -> Iterator[str]:
    t, e = sizes.tp, sizes.ep
    if sizes.data % e:
        yield (
            f"ep={e} does not divide dp x cp = {sizes.data}: the ranks of ep must hold different "
            "data"
        )
    if plan.experts is None:
        if e > 1:
            yield f"ep={e} without experts in the plan: there is nothing to divide"
        return
    if plan.experts.number % e:
        yield f"{plan.experts.number} experts cannot be divided equally by ep={e} ranks"
    if t > 1 and not plan.by_rows:
        yield (
            f"experts with tp={t} but whole sequences between the regions: all ranks of tp would "
            "send and compute the same tokens; take sp.REGION, where each routes its own rows"
        )


def _pipeline(config: ModelConfig, sizes: AxisSizes, plan: Plan) -> Iterator[str]:
    p = sizes.pp
    if isinstance(plan.schedule, Schedule) or p > 1:
        try:
            schedule = plan.schedule_for(p)
            if schedule is plan.schedule:  # those that have a name are legal
                validate(schedule)
        except ValueError as error:
            yield str(error)
            return
        if schedule.ranks != p:
            yield f"the schedule {schedule.name!r} is for {schedule.ranks} ranks, and pp={p}"
        if schedule.microbatches != plan.micro_batches:
            yield (
                f"the schedule {schedule.name!r} has {schedule.microbatches} micro-batches, the "
                f"plan {plan.micro_batches}; make both the same"
            )
        if config.layers < schedule.stages:
            yield (
                f"{config.layers} layers cannot be cut into the {schedule.stages} stages of "
                f"{schedule.name!r}; take fewer ranks or chunks, or more layers"
            )


def batch_refusals(
    config: ModelConfig, sizes: AxisSizes, plan: Plan, sequences: int, seq_len: int
) -> Iterator[str]:
    """Say why a batch of ``sequences`` per replica, each of ``seq_len``, cannot be split."""
    if sequences < plan.micro_batches:
        yield (
            f"micro_batches={plan.micro_batches} of {sequences} sequences in a replica: each needs "
            "one sequence at least; take fewer micro-batches or a larger batch"
        )
    if seq_len > config.max_seq_len:
        yield f"{seq_len} positions, but the model was built for max_seq_len={config.max_seq_len}"
    t, c = sizes.tp, sizes.cp
    pieces = plan.layout.per_rank * c if c > 1 else 1
    rows = t if plan.by_rows else 1
    multiple = lcm(pieces, c * rows)
    if seq_len % multiple:
        yield (
            f"{seq_len} positions: cp={c} needs {pieces} equal chunks"
            + (f", and tp={t} equal rows of each rank's" if rows > 1 else "")
            + f"; pad the sequence to a multiple of {multiple} (targets of the padding: "
            "IGNORE_INDEX)"
        )


def _costly(config: ModelConfig, sizes: AxisSizes, plan: Plan) -> Iterator[str]:
    t, c, p = sizes.tp, sizes.cp, sizes.pp
    kv = max(config.kv_heads // t, 1)
    sharing = plan.core.sharing_heads(c)
    if c > 1 and kv % sharing:
        yield (
            f"core {plan.core.name}: {sharing} ranks of cp divide {kv} key and value heads, so "
            f"that each is sent in {lcm(kv, sharing) // kv} copies; a gather would send them once"
        )
    if c > 1 and not plan.core.whole_heads and plan.layout.per_rank == 1:
        yield (
            f"the {plan.layout.name} layout with core {plan.core.name}: under a causal mask the "
            "last rank computes nearly cp times as much as the first; zig-zag is even"
        )
    if plan.zero in (2, 3) and plan.micro_batches > 1:
        what = "a reduce-scatter" if plan.zero == 2 else "gathers and a reduce-scatter"
        yield (
            f"zero={plan.zero} with {plan.micro_batches} micro-batches: {what} of everything for "
            "each, where zero=1 has one of each per step"
        )
    if p > 1 and plan.micro_batches < p:
        yield (
            f"{plan.micro_batches} micro-batches on pp={p}: more than half of the time is bubble; "
            f"take {2 * p} or more"
        )


def _different(config: ModelConfig, sizes: AxisSizes, plan: Plan) -> Iterator[str]:
    """What makes the result depend on the mesh."""
    if plan.experts and plan.experts.capacity_factor is not None and sizes.per_stage > 1:
        yield (
            f"capacity_factor={plan.experts.capacity_factor}: each rank drops among its own "
            "tokens, so that losses depend on the mesh; capacity_factor=None drops nothing"
        )
    if config.dropout and sizes.per_stage * sizes.pp > 1:
        yield (
            f"dropout={config.dropout}: masks follow from seed, step and place in the mesh, so "
            "that losses depend on the mesh (as they do on a seed)"
        )
