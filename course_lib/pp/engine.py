"""The engine: one step of one rank, whatever the schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from course_lib import comm
from course_lib.mesh import Axis, Mesh
from course_lib.model import IGNORE_INDEX, Decoder
from course_lib.pp import tied
from course_lib.pp.mail import Mail, handed_on, input_of
from course_lib.pp.split import WeightsLater
from course_lib.schedule import Action, Schedule, validate

# tokens (b, S), targets (b, S) and, where they are not 0..S-1, the positions (S,) of both
Batch = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]  # logits (b, S, V), targets (b, S) -> share of the loss
Work = Callable[[int, int, Tensor | None], Tensor | None]
StageDone = Callable[[int], None]  # the number of a stage whose gradients are complete


def nobody_waits(stage: int) -> None:
    """What is done at the end of a stage, unless something is asked for."""


@dataclass
class Engine:
    """One step of one rank.

    ``kept`` holds (input, graph of the output) from F to B or I. The output itself is not kept:
    backward does not read it, and its memory is free when it has been sent (what Megatron calls
    deallocating the output tensor). ``later`` holds what a backward in halves needs from F to W.
    """

    schedule: Schedule
    stages: Mapping[int, Decoder]
    mesh: Mesh
    micro_batches: Sequence[Batch]
    loss: Loss
    mail: Mail
    stage_done: StageDone
    kept: dict[tuple[int, int], tuple[Tensor, GradientEdge | None]] = field(default_factory=dict)
    later: dict[tuple[int, int], WeightsLater] = field(default_factory=dict)
    total: float | Tensor = 0.0
    peak_in_flight: int = 0

    def run(self) -> None:
        """Do this rank's row."""
        inputs = [*(input_of(action, self.schedule.stages) for action in self.row), None]
        last = {action.stage: place for place, action in enumerate(self.row)}
        self.mail.post(inputs[0])
        for place, action in enumerate(self.row):
            self._do(action, inputs[place], inputs[place + 1])
            if place == last[action.stage]:
                self.stage_done(action.stage)
        self.mail.close()

    @property
    def row(self) -> tuple[Action, ...]:
        """This rank's actions."""
        return self.schedule.rows[self.mesh.pp.rank]

    def _do(self, action: Action, needed: Action | None, needed_next: Action | None) -> None:
        given = None if needed is None else self.mail.take(needed)
        self.mail.post(needed_next)  # if it may come now, it travels while this rank computes
        work: dict[str, Work] = {"F": self._forward, "B": self._backward, "W": self._weights}
        with self.mesh.compute(action.op, stage=action.stage, mb=action.mb):
            result = work["B" if action.op == "I" else action.op](action.stage, action.mb, given)
        self.mail.post(needed_next, handed_on(action), result)

    def _forward(self, stage: int, mb: int, x: Tensor | None) -> Tensor | None:
        batch = self.micro_batches[mb]
        x = batch[0] if x is None else x.detach().requires_grad_()
        if Action("I", stage, mb) in self.row:
            self.later[stage, mb] = WeightsLater()
        with self._put_off(stage, mb):
            y = self.stages[stage](x, positions_of(batch))
        last = stage + 1 == self.schedule.stages
        if last:
            y = self.loss(y, batch[1])
            self.total = self.total + y.detach()
        self.kept[stage, mb] = (x, get_gradient_edge(y) if y.requires_grad else None)
        self.peak_in_flight = max(self.peak_in_flight, len(self.kept.keys() | self.later.keys()))
        return None if last else y.detach()

    def _backward(self, stage: int, mb: int, gradient: Tensor | None) -> Tensor | None:
        """B, or I where forward kept the gradients of the weights apart."""
        x, output = self.kept.pop((stage, mb))
        if output is not None:  # None: all of the first stage is frozen
            with self._put_off(stage, mb):
                torch.autograd.backward(output, gradient)
        return x.grad

    def _weights(self, stage: int, mb: int, _: Tensor | None) -> None:
        self.later.pop((stage, mb)).run()

    def _put_off(self, stage: int, mb: int) -> AbstractContextManager:
        return self.later.get((stage, mb), nullcontext())


@dataclass(frozen=True)
class Outcome:
    """``loss`` of this rank's part (a float64 scalar, 0 but where the last stage is), and how
    many (stage, micro-batch) pairs it kept at most."""

    loss: Tensor
    peak_in_flight: int


def run(
    schedule: Schedule,
    stages: Mapping[int, Decoder],
    mesh: Mesh,
    micro_batches: Sequence[Batch],
    loss: Loss,
    on_stage_done: StageDone = nobody_waits,
    sum_tied: bool = True,
) -> Outcome:
    """Forward and backward of one step; gradients are added to the parameters of ``stages``.

    ``stages`` are this rank's (see :func:`cut`). ``loss`` gives each micro-batch's *share* of
    the step's loss: it must divide by the tokens (or by m) itself, or gradients are m times too
    large. Every rank is given the same schedule and ``micro_batches``; these may differ in size.

    Stages may be cut further. Under tensor and sequence parallelism every stage is called with all
    positions of the micro-batch, and what travels are the rows that it holds outside its regions
    (``stage.own_rows``): x_bSD, or x_bScD of S/t rows. Under context parallelism a micro-batch is
    what ``cp.shard`` gives, (tokens, targets, positions) of this rank.

    ``on_stage_done(stage)`` is called for each stage of this rank as soon as its gradients are
    complete, once, while others are still at work: data parallelism may start to sum them. (Stages
    that have a tied embedding are complete when all is done. Without ``sum_tied`` the gradients of
    an embedding on two ranks are left for the caller to sum, after other sums.)

    Raises ValueError when schedule, stages, axis and micro-batches do not fit, and ScheduleError
    (a ValueError) when the schedule is not legal.
    """
    _check(schedule, stages, mesh.pp, micro_batches)
    some = next(iter(stages.values()))
    weight = next(some.parameters())

    def like(mb: int) -> Tensor:  # shape and dtype alone: it takes no memory
        batch = micro_batches[mb]
        rows = len(some.own_rows(positions_of(batch)))
        return weight.new_empty(()).expand(len(batch[0]), rows, some.config.hidden)

    with tied.summed(schedule, stages, mesh.pp, sum_tied) as wait_for_the_end:

        def stage_done(stage: int) -> None:
            if stage not in wait_for_the_end:
                on_stage_done(stage)

        mail = Mail(schedule, mesh.pp, like)
        engine = Engine(schedule, stages, mesh, micro_batches, loss, mail, stage_done)
        engine.run()
    for stage in wait_for_the_end:
        on_stage_done(stage)
    total = torch.as_tensor(engine.total, dtype=torch.float64, device=weight.device)
    return Outcome(total, engine.peak_in_flight)


def positions_of(batch: Batch) -> Tensor:
    """The positions (S,) of a micro-batch's tokens: its own, or 0..S-1.

    A stage cannot count them, for its input may have fewer rows than its attention sees.
    """
    tokens = batch[0]
    return batch[2] if len(batch) == 3 else torch.arange(tokens.shape[1], device=tokens.device)


def train_step(
    schedule: Schedule,
    stages: Mapping[int, Decoder],
    mesh: Mesh,
    micro_batches: Sequence[Batch],
    optimizer: torch.optim.Optimizer,
) -> Tensor:
    """One optimizer step; the mean loss over all tokens, on every rank (sent as control).

    ``optimizer`` holds :func:`parameters` of ``stages``.
    """
    tokens = sum(int((batch[1] != IGNORE_INDEX).sum()) for batch in micro_batches)
    if tokens == 0:
        raise ValueError("no target of any micro-batch counts: there is nothing to average")
    optimizer.zero_grad()

    def share(y: Tensor, targets: Tensor) -> Tensor:
        return stages[schedule.stages - 1].cross_entropy(y, targets)[0] / tokens

    outcome = run(schedule, stages, mesh, micro_batches, share)
    optimizer.step()
    return comm.all_reduce(outcome.loss, mesh.pp, control=True)


def _check(
    schedule: Schedule, stages: Mapping[int, Decoder], pp: Axis, batches: Sequence[Batch]
) -> None:
    validate(schedule)
    name, mine = schedule.name, schedule.stages_of(pp.rank)
    if schedule.ranks != pp.size:
        raise ValueError(
            f"the schedule {name!r} is for {schedule.ranks} ranks, axis {pp.name} has {pp.size}; "
            "make both the same"
        )
    if schedule.microbatches != len(batches):
        raise ValueError(
            f"the schedule {name!r} is for {schedule.microbatches} micro-batches, got "
            f"{len(batches)}; cut the batch into as many as the schedule has"
        )
    if sorted(stages) != mine:
        raise ValueError(
            f"rank {pp.rank} of axis {pp.name} holds stages {mine} in the schedule {name!r}, got "
            f"{sorted(stages)}; cut() makes the right ones"
        )
