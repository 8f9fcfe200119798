"""Which gradients are summed over which ranks, in what order, and their norm.

A gradient is fully reduced after these sums, in this order:

==================  ==============================  ==================================
missing             summed over                     gradients of
==================  ==============================  ==================================
other tokens        dp_cp; experts: edp             all parameters
other rows          tp, in sequence parallelism     replicated parameters, experts
other queries       the KV replication group        key and value heads fewer than tp
the other stage     first and last stage            a tied embedding
==================  ==============================  ==================================

Data parallelism or ZeRO makes the first sum. ZeRO leaves a shard, and the other sums then send the
shard alone. No sum is divided: the loss was divided by the tokens of all ranks. The norm comes
last, because it needs fully reduced gradients; every element counts once, wherever it is held.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from course_lib import comm, dp, sp, tp, zero
from course_lib.comm import Held
from course_lib.compose.plan import Plan
from course_lib.ep import MoE
from course_lib.mesh import Axis, Mesh
from course_lib.model import Decoder
from course_lib.pp.tied import tied_weight
from course_lib.schedule import Schedule


@dataclass(frozen=True)
class Part:
    """Parameters of one stage whose gradients are summed over the ranks of one axis.

    ``sync`` sums them, and ``optimizer`` updates them; under ZeRO one object does both.
    ``stage`` is None for a tied embedding, which two stages use.
    """

    parameters: list[nn.Parameter]
    axis: Axis
    stage: int | None
    sync: dp.GradientSync | zero.Sharded
    optimizer: torch.optim.Optimizer | zero.Sharded

    @property
    def held(self) -> list[Held]:
        """What this rank holds of the sums, once the sync has finished."""
        if isinstance(self.sync, zero.Sharded):
            return self.sync.held_gradients()
        return comm.held_gradients(self.parameters)


def make_parts(
    stages: Mapping[int, Decoder],
    tied: nn.Parameter | None,
    mesh: Mesh,
    plan: Plan,
    make_optimizer: zero.MakeOptimizer,
) -> list[Part]:
    """The parts of this rank, in an order that is the same on all ranks of dp, cp and tp.

    ``tied`` is the embedding if two stages use it, on this rank or on two.
    """
    parts = []
    for number, stage in stages.items():
        experts = [p for m in stage.modules() if isinstance(m, MoE) for p in m.experts.parameters()]
        known = {*experts, tied}
        rest = [p for p in stage.parameters() if p not in known]
        for parameters, axis in ((rest, mesh.dp_cp), (experts, mesh.edp)):
            if trained := [p for p in parameters if p.requires_grad]:
                parts.append(_part(number, stage, trained, axis, plan, make_optimizer))
    if tied is not None and tied.requires_grad:
        some = next(iter(stages.values()))
        whole = Plan(zero=plan.zero, bucket_bytes=tied.nbytes)  # two stages: no last backward
        parts.append(_part(None, some, [tied], mesh.dp_cp, whole, make_optimizer))
    return parts


def _part(
    number: int | None,
    stage: Decoder,
    parameters: list[nn.Parameter],
    axis: Axis,
    plan: Plan,
    make_optimizer: zero.MakeOptimizer,
) -> Part:
    if plan.zero:
        sharded: zero.Sharded
        if plan.zero == 3:
            sharded = zero.Zero3(stage, list(stage.blocks), axis, make_optimizer)
        else:
            kind = zero.Zero1 if plan.zero == 1 else zero.Zero2
            sharded = kind(parameters, axis, make_optimizer, plan.bucket_bytes)
        return Part(parameters, axis, number, sharded, sharded)
    sync = (dp.Overlapped if plan.overlap else dp.Bucketed)(parameters, axis, plan.bucket_bytes)
    return Part(parameters, axis, number, sync, make_optimizer(parameters))


class Gradients:
    """All gradients of this rank: reduce them, compute their norm, update with them."""

    def __init__(
        self,
        stages: Mapping[int, Decoder],
        schedule: Schedule | None,
        mesh: Mesh,
        plan: Plan,
        make_optimizer: zero.MakeOptimizer,
    ) -> None:
        self.mesh, self.plan = mesh, plan
        self._tied = tied = None if schedule is None else tied_weight(stages)
        self.parts = make_parts(stages, tied, mesh, plan, make_optimizer)
        ranks = {schedule.placement[0], schedule.placement[-1]} if schedule else set()
        apart = tied is not None and tied.requires_grad and len(ranks) == 2
        self._other_stage = sum(ranks - {mesh.pp.rank}) if apart else None

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Around a backward that is not the last of the step."""
        with ExitStack() as all_parts:
            for part in self.parts:
                all_parts.enter_context(part.sync.accumulate())
            yield

    def stage_done(self, stage: int) -> None:
        """Start the sums of a stage after its last backward, while other stages go on."""
        for part in self.parts:
            if part.stage == stage and isinstance(part.sync, dp.Overlapped):
                part.sync.send_all()

    def complete(self) -> list[Held]:
        """Make every sum, after the last backward."""
        for part in self.parts:
            part.sync.finish()
        held = [one for part in self.parts for one in part.held]
        self.sum_rows(held)
        self.sum_heads(held)
        self.sum_tied(held)
        return held

    def sum_rows(self, held: Sequence[Held]) -> None:
        """Sum replicated parameters over tp where its ranks hold different rows."""
        if self.plan.by_rows:
            sp.sum_gradients(held, self.mesh.tp)

    def sum_heads(self, held: Sequence[Held]) -> None:
        """Sum key and value heads that several ranks hold: each used its own queries."""
        tp.sum_shared_gradients(held)

    def sum_tied(self, held: Sequence[Held]) -> None:
        """Sum the tied embedding over the first and the last stage, which both used it."""
        gradients = [one.gradient for one in held if one.parameter is self._tied]
        if self._other_stage is None or not gradients:
            return
        other, mine = self._other_stage, comm.flatten(gradients)
        theirs = comm.exchange(mine, self.mesh.pp, to=other, source=other)
        for gradient, part in zip(gradients, comm.unflatten(theirs, gradients), strict=True):
            gradient += part

    def norm(self, held: Sequence[Held]) -> Tensor:
        """Return the norm of the whole model's gradient; one control number per rank is sent."""
        return comm.grad_norm(self.counted(held), [self.mesh.world])

    def counted(self, held: Sequence[Held]) -> list[Held]:
        """Return what this rank counts in the norm: gradients that no other stage counts."""
        pp = self.mesh.pp
        skipped = (
            self._tied if self._other_stage is not None and self._other_stage < pp.rank else None
        )
        return [one._replace(axes=(*one.axes, pp)) for one in held if one.parameter is not skipped]

    def zero_grad(self) -> None:
        """Clear the gradients of the last step, and ZeRO's flat gradients of an aborted one."""
        for part in self.parts:
            if isinstance(part.optimizer, zero.Sharded):
                part.optimizer.reset()
            else:
                part.optimizer.zero_grad()

    def update(self) -> None:
        """One step of every optimizer."""
        for part in self.parts:
            part.optimizer.step()
