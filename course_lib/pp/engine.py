"""The engine: it runs one step of one rank, for any schedule."""

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
from course_lib.pp.exchange import P2PExchange, input_of, messages, output_of
from course_lib.pp.split import DeferredWeightGradients, WeightSlot, weights_of
from course_lib.pp.tied import summed_gradient
from course_lib.schedule import Action, Schedule

# tokens (b, S), targets (b, S) and the positions (S,) of both where they are not 0..S-1
Batch = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]  # logits (b, S, V), targets (b, S) -> term of the loss
Work = Callable[[int, int, Tensor | None], Tensor | None]
StageDone = Callable[[int], None]  # the number of a stage whose gradients are complete


def no_op(stage: int) -> None:
    """Do nothing when a stage is complete: the default of ``on_stage_done``."""


@dataclass
class Engine:
    """One step of one rank.

    ``saved`` stores (input, graph of the output) from F to B or I. The output itself is not saved,
    because backward does not read it. P2PExchange frees it when a later message shows that it was
    received; Megatron frees it when the send has returned (deallocate_pipeline_outputs).
    ``deferred`` stores what a split backward needs from F to W.
    """

    schedule: Schedule
    stages: Mapping[int, Decoder]
    mesh: Mesh
    micro_batches: Sequence[Batch]
    loss: Loss
    exchange: P2PExchange
    stage_done: StageDone
    saved: dict[tuple[int, int], tuple[Tensor, GradientEdge | None]] = field(default_factory=dict)
    deferred: dict[tuple[int, int], DeferredWeightGradients] = field(default_factory=dict)
    weights: dict[int, list[WeightSlot]] = field(default_factory=dict)
    total: float | Tensor = 0.0
    peak_in_flight: int = 0

    def run(self) -> None:
        """Run this rank's row of the schedule."""
        inputs = [*(input_of(action, self.schedule.stages) for action in self.row), None]
        last_of_stage = {action.stage: index for index, action in enumerate(self.row)}
        self.exchange.post(inputs[0])
        for index, action in enumerate(self.row):
            self._do(action, inputs[index], inputs[index + 1])
            if index == last_of_stage[action.stage]:
                self.stage_done(action.stage)
        self.exchange.wait()

    @property
    def row(self) -> tuple[Action, ...]:
        """This rank's actions."""
        return self.schedule.rows[self.mesh.pp.rank]

    def _do(self, action: Action, needed: Action | None, needed_next: Action | None) -> None:
        received = None if needed is None else self.exchange.take(needed)
        self.exchange.post(needed_next)  # so that it can arrive while this rank computes
        work: dict[str, Work] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward,
            "W": self._weights,
        }
        with self.mesh.compute(action.op, stage=action.stage, mb=action.mb):
            result = work[action.op](action.stage, action.mb, received)
        self.exchange.post(needed_next, output_of(action), result)

    def _forward(self, stage: int, mb: int, x: Tensor | None) -> Tensor | None:
        batch = self.micro_batches[mb]
        x = batch[0] if x is None else x.detach().requires_grad_()
        if Action("I", stage, mb) in self.row:
            if stage not in self.weights:
                self.weights[stage] = weights_of(self.stages[stage])
            self.deferred[stage, mb] = DeferredWeightGradients(self.weights[stage])
        with self._deferring(stage, mb):
            y = self.stages[stage](x, positions_of(batch))
        last = stage + 1 == self.schedule.stages
        if last:
            y = self.loss(y, batch[1])
            self.total = self.total + y.detach()
        self.saved[stage, mb] = (x, get_gradient_edge(y) if y.requires_grad else None)
        in_flight = len(self.saved.keys() | self.deferred.keys())
        self.peak_in_flight = max(self.peak_in_flight, in_flight)
        return None if last else y.detach()

    def _backward(self, stage: int, mb: int, gradient: Tensor | None) -> Tensor | None:
        """Run B, or I where the backward is split."""
        x, output = self.saved.pop((stage, mb))
        if output is not None:  # None: all of the first stage is frozen
            with self._deferring(stage, mb):
                torch.autograd.backward(output, gradient)
        return x.grad

    def _weights(self, stage: int, mb: int, _: Tensor | None) -> None:
        self.deferred.pop((stage, mb)).run()

    def _deferring(self, stage: int, mb: int) -> AbstractContextManager:
        """Defer weight gradients inside, if this backward is split."""
        return self.deferred.get((stage, mb), nullcontext())


@dataclass(frozen=True)
class Outcome:
    """The result of a step: ``loss`` is a float64 scalar, 0 except on the last stage's rank.

    ``peak_in_flight`` is the most (stage, micro-batch) pairs whose activations the rank stored.
    """

    loss: Tensor
    peak_in_flight: int


def run(
    schedule: Schedule,
    stages: Mapping[int, Decoder],
    mesh: Mesh,
    micro_batches: Sequence[Batch],
    loss: Loss,
    on_stage_done: StageDone = no_op,
    sum_tied: bool = True,
) -> Outcome:
    """Run forward and backward of one step; add gradients to the parameters of ``stages``.

    ``stages`` are this rank's (see :func:`make_stages`). ``loss`` returns each micro-batch's
    *term* of the step's loss: it must divide by the tokens (or by m) itself, or gradients are m
    times too large. All ranks pass the same schedule and ``micro_batches``, which may differ in
    size.

    Stages may be sharded further. Under tensor and sequence parallelism every stage is called with
    all positions of the micro-batch, and ranks send the rows that a stage has outside its regions
    (``stage.own_rows``): x_bSD, or x_bScD of S/t rows. Under context parallelism a micro-batch is
    what ``cp.shard`` returns, (tokens, targets, positions) of this rank.

    ``on_stage_done(stage)`` is called once for each stage of this rank as soon as its gradients
    are complete, while other stages still compute, so that data parallelism can start to sum them.
    Stages with a tied embedding are complete at the end of the step. With ``sum_tied=False`` the
    caller must sum the two gradients of a tied embedding on two ranks.

    Raises ValueError when schedule, stages, axis and micro-batches do not fit, and ScheduleError
    (a ValueError) when the schedule is not legal; a schedule is checked once.
    """
    order = messages(schedule)
    _check_sizes(schedule, stages, mesh.pp, micro_batches)
    some = next(iter(stages.values()))
    weight = next(some.parameters())

    def like(batch: Batch) -> Tensor:  # gives shape and dtype of a message; needs no memory
        rows = len(some.own_rows(positions_of(batch)))
        return weight.new_empty(()).expand(len(batch[0]), rows, some.config.hidden)

    tied_sum: AbstractContextManager[list[int]] = nullcontext([])
    if some.config.tied:
        tied_sum = summed_gradient(schedule, stages, mesh.pp, sum_tied)
    with tied_sum as done_last:

        def stage_done(stage: int) -> None:
            if stage not in done_last:
                on_stage_done(stage)

        exchange = P2PExchange(order, mesh.pp, [like(batch) for batch in micro_batches])
        engine = Engine(schedule, stages, mesh, micro_batches, loss, exchange, stage_done)
        engine.run()
    for stage in done_last:
        on_stage_done(stage)
    total = torch.as_tensor(engine.total, dtype=torch.float64, device=weight.device)
    return Outcome(total, engine.peak_in_flight)


def positions_of(batch: Batch) -> Tensor:
    """Return the positions (S,) of a micro-batch's tokens: those given, or 0..S-1.

    A stage cannot count them itself: its input may have fewer rows than its attention sees.
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
    """Do one optimizer step; return the mean loss over all tokens on every rank (as control).

    ``optimizer`` updates :func:`parameters` of ``stages``.
    """
    tokens = sum(int((batch[1] != IGNORE_INDEX).sum()) for batch in micro_batches)
    if tokens == 0:
        raise ValueError(f"every target is {IGNORE_INDEX}: there is no loss to average")
    optimizer.zero_grad()

    def term(y: Tensor, targets: Tensor) -> Tensor:
        return stages[schedule.stages - 1].cross_entropy(y, targets)[0] / tokens

    outcome = run(schedule, stages, mesh, micro_batches, term)
    optimizer.step()
    return comm.all_reduce(outcome.loss, mesh.pp, control=True)


def _check_sizes(
    schedule: Schedule, stages: Mapping[int, Decoder], pp: Axis, batches: Sequence[Batch]
) -> None:
    name, mine = schedule.name, schedule.stages_of(pp.rank)
    if schedule.ranks != pp.size:
        raise ValueError(
            f"the schedule {name!r} is for {schedule.ranks} ranks, axis {pp.name} has {pp.size}; "
            "make both equal"
        )
    if schedule.microbatches != len(batches):
        raise ValueError(
            f"the schedule {name!r} is for {schedule.microbatches} micro-batches, got "
            f"{len(batches)}; split the batch into as many as the schedule has"
        )
    if sorted(stages) != mine:
        raise ValueError(
            f"rank {pp.rank} of axis {pp.name} holds stages {mine} in the schedule {name!r}, got "
            f"{sorted(stages)}; make_stages() returns the right ones"
        )
