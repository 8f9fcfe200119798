"""Bytes that a step sends on each axis, all ranks together, composed of the techniques' formulas.

Each technique's formula is for one rank that holds all layers. In a pipeline the stages divide the
layers, so the formula counts once for each of the t c d ranks of tp, cp and dp. The other axes
change the sizes that a formula is given:

========  ==================================================================================
tp        S/c positions; sums of gradients are of shards under ZeRO; one region with experts
tp_kv     the same sums
cp        H/t heads; USP has the axes cp_heads and cp_ring
dp, dp_cp the parameters of a stage that tp leaves, without experts
edp       E/e experts of a stage
ep        the pairs of the routers: counted, or spread evenly
pp        S/c positions, under sequence parallelism S/(c t)
========  ==================================================================================
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from course_lib.formulas import cp, dp, pp, sp, tp, zero
from course_lib.formulas.parameters import (
    Sizes,
    accumulation_itemsize,
    attention_parameters,
    mlp_parameters,
    norm_parameters,
    padded_rows,
)
from course_lib.formulas.plan import AxisSizes, Plan
from course_lib.ledger import wire


def wire_bytes(
    config: Sizes,
    sizes: Mapping[str, int],
    plan: Plan,
    sequences: int,
    seq_len: int,
    *,
    leaving: int | Fraction | None = None,
    layers: Sequence[int] | None = None,
) -> dict[str, Fraction]:
    """Return the bytes that all ranks together send per optimizer step, by axis as in the ledger.

    ``sequences`` counts those of one replica. ``leaving`` counts the pairs of a token and an expert
    on another rank, in all layers; by default pairs are spread evenly. ``layers`` as in
    :func:`part_sizes`.
    The result is exact where a part of the parameters fits into one bucket, or dp x cp divides
    every bucket. Otherwise stages 1 and 2 of ZeRO pad each bucket with fewer than dp x cp elements
    more. All parameters are trained; with frozen ones fewer bytes are sent.
    """
    step = _Step(config, AxisSizes(**sizes), plan, sequences, seq_len, layers)
    total: dict[str, Fraction] = defaultdict(Fraction)
    for axis, sent in [
        *step.over_tp().items(),
        *step.over_cp().items(),
        ("pp", step.over_pp()),
        ("ep", step.over_ep(leaving)),
        *step.over_data(),
    ]:
        total[axis] += sent
    return {axis: sent for axis, sent in total.items() if sent}


@dataclass(frozen=True)
class PartSize:
    """Elements of a part on a rank of ``stage``: outside its blocks, and in each block.

    A tied embedding that two stages use is a part of its own, on each rank that has one of them.
    """

    stage: int
    elements: tuple[int, ...]
    experts: bool = False


def part_sizes(
    config: Sizes, sizes: Mapping[str, int], plan: Plan, *, layers: Sequence[int] | None = None
) -> list[PartSize]:
    """Return the parts of all stages, on one rank of tp, ep and the data axes, before ZeRO.

    ``layers`` counts the blocks of each stage, by default as even as possible.
    """
    return _Step(config, AxisSizes(**sizes), plan, layers=layers).parts()


@dataclass(frozen=True)
class _Step:
    """A model, a mesh, a plan and the batch of a replica; methods give the bytes per axis."""

    config: Sizes
    sizes: AxisSizes
    plan: Plan
    sequences: int = 0
    seq_len: int = 0
    layers: Sequence[int] | None = None

    def over_tp(self) -> dict[str, Fraction]:
        """Activations and loss, then the sums of gradients whose terms are spread over tp."""
        config, plan, t = self.config, self.plan, self.sizes.tp
        batch = self.sequences, self.seq_len // self.sizes.cp
        forwards = plan.block_forwards
        if plan.by_rows:
            again, regions = plan.gathers_again, 1 if plan.experts else 2
            moves = sp.wire_bytes(
                config, *batch, t, again=again, forwards=forwards, regions=regions
            )
            moves -= wire("all_reduce", sp.replicated_parameters(config) * config.dtype.itemsize, t)
            moves += tp.loss_bytes(config, batch[0] * batch[1], t) + self.of_rows()
        else:
            moves = tp.wire_bytes(config, *batch, t, forwards=forwards)
            moves -= tp.shared_head_bytes(config, t)
        shards = self.sizes.data if plan.zero else 1
        shared = tp.shared_head_bytes(config, t, shards=shards, itemsize=self.gradient_itemsize())
        return {"tp": self.sizes.per_stage * moves, "tp_kv": self.sizes.per_stage * shared}

    def of_rows(self) -> Fraction:
        """The sum of gradients of replicated parameters under sequence parallelism.

        Under ZeRO each rank sums its shards, and this is the average over the ranks.
        """
        config, plan, data = self.config, self.plan, self.sizes.data
        router, experts = self.experts_of_layer()
        # With experts, the bias of an MLP that is not there.
        bias = config.hidden if plan.experts and config.family == "gpt" else 0
        whole = sp.replicated_parameters(config) + config.layers * (router - bias)
        shards, copies = (data, data // self.sizes.ep) if plan.zero else (1, 1)
        held = Fraction(whole, shards) + Fraction(config.layers * experts, copies)
        return held * wire("all_reduce", self.gradient_itemsize(), self.sizes.tp)

    def over_cp(self) -> dict[str, Fraction]:
        """Attention on the heads that a rank of tp has."""
        config, core, t, c = self.config, self.plan.core, self.sizes.tp, self.sizes.cp
        if c == 1:
            return {}
        shard = cp.shard_of_heads(config, t, max(config.kv_heads // t, 1))
        n = (c,) if core.run == 1 else (core.run, c // core.run)
        forwards = self.plan.core_forwards
        sent = core.wire_bytes(shard, self.sequences, self.seq_len, *n, forwards=forwards)
        by_axis = {"cp": sent} if core.run == 1 else {"cp_heads": sent[0], "cp_ring": sent[1]}
        return {axis: self.sizes.per_stage * one for axis, one in by_axis.items()}

    def over_pp(self) -> Fraction:
        """Activations and their gradients; the gradient of a tied embedding."""
        config, sizes = self.config, self.sizes
        if sizes.pp == 1:
            return Fraction(0)
        schedule = self.plan.schedule_for(sizes.pp)
        rows = self.seq_len // sizes.cp // (sizes.tp if self.plan.by_rows else 1)
        activations = self.sequences * rows * config.hidden * config.dtype.itemsize
        sent = sizes.per_stage * pp.wire_bytes(schedule, activations)
        if config.tied and schedule.placement[0] != schedule.placement[-1]:
            copies = 1 if self.plan.zero else sizes.data  # of each shard over tp
            sent += 2 * self.table() * self.gradient_itemsize() * sizes.tp * copies
        return Fraction(sent)

    def over_ep(self, leaving: int | Fraction | None) -> Fraction:
        """Rows sent to experts on other ranks and back, in forward and in backward."""
        config, plan, e = self.config, self.plan, self.sizes.ep
        if plan.experts is None:
            return Fraction(0)
        if leaving is None:
            tokens = self.sequences * self.seq_len * self.sizes.dp
            leaving = Fraction(e - 1, e) * tokens * plan.experts.top_k * config.layers
        row = config.hidden * config.dtype.itemsize
        return Fraction(leaving) * row * 2 * (plan.block_forwards + 1)

    def over_data(self) -> list[tuple[str, Fraction]]:
        """Gradients and what ZeRO gathers, part by part; experts have their own axis."""
        data, e = self.sizes.data, self.sizes.ep
        axis = "dp" if self.sizes.cp == 1 else "dp_cp"
        over = {False: (axis, data), True: ("edp" if e > 1 else axis, data // e)}
        sent = []
        for part in self.parts():
            name, n = over[part.experts]
            sent.append((name, self.sizes.per_stage * self.of_part(part.elements, n)))
        return sent

    def of_part(self, elements: Sequence[int], n: int) -> Fraction:
        """Bytes of one of n ranks for a part; ZeRO-3 has a unit for the root and one per block."""
        config, plan = self.config, self.plan
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

    def parts(self) -> list[PartSize]:
        """The parts of all stages, before ZeRO shards them."""
        config, t = self.config, self.sizes.tp
        placement: tuple[int, ...] = (0,)
        if self.sizes.pp > 1:
            placement = self.plan.schedule_for(self.sizes.pp).placement
        layers = self.layers or pp.partition(config.layers, len(placement))
        router, experts = self.experts_of_layer()
        mlp = router if self.plan.experts else mlp_parameters(config, t)
        block = attention_parameters(config, t) + mlp + 2 * norm_parameters(config)
        table, apart = self.table(), config.tied and self.sizes.pp > 1  # two stages use it
        outside = [0] * len(layers)
        positions = config.max_seq_len * config.hidden if config.family == "gpt" else 0
        outside[0] += (0 if apart else table) + positions
        outside[-1] += norm_parameters(config) + (0 if config.tied else table)
        found = [PartSize(s, (outside[s], *[block] * count)) for s, count in enumerate(layers)]
        if experts:
            found += [PartSize(s, (experts * count,), True) for s, count in enumerate(layers)]
        if apart:
            holders = {placement[0]: 0, placement[-1]: len(layers) - 1}
            found += [PartSize(stage, (table,)) for stage in holders.values()]
        return found

    def table(self) -> int:
        """Elements of a rank's shard of the embedding, or of the LM head."""
        return padded_rows(self.config.vocab, self.sizes.tp) * self.config.hidden

    def experts_of_layer(self) -> tuple[int, int]:
        """Elements of (router and shared expert, this rank's experts) in a layer."""
        experts, mlp = self.plan.experts, mlp_parameters(self.config)
        if experts is None:
            return 0, 0
        router = self.config.hidden * experts.number
        return router + experts.shared * mlp, experts.number // self.sizes.ep * mlp

    def gradient_itemsize(self) -> int:
        """Bytes per element of a rank's gradients."""
        dtype = self.config.dtype
        return accumulation_itemsize(dtype) if self.plan.zero else dtype.itemsize
