"""The engine: one step of one rank, whatever the schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from course_lib import comm
from course_lib.mesh import Axis, Mesh
from course_lib.model import IGNORE_INDEX, Decoder
from course_lib.pp.mail import Mail, input_of
from course_lib.schedule import Action, Schedule, Span, from_zero, validate
from course_lib.trace import Trace

# tokens (b, S), targets (b, S) and, where they are not 0..S-1, the positions (S,) of both
Batch = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]  # logits (b, S, V), targets (b, S) -> share of the loss


@dataclass
class Engine:
    """One step of one rank.

    ``kept`` holds (input, graph of the output) of every micro-batch in flight. The output itself
    is not kept: backward does not read it, and its memory is free when it has been sent (what
    Megatron calls deallocating the output tensor).
    """

    schedule: Schedule
    stages: Mapping[int, Decoder]
    mesh: Mesh
    micro_batches: Sequence[Batch]
    loss: Loss
    mail: Mail
    kept: dict[tuple[int, int], tuple[Tensor, GradientEdge | None]] = field(default_factory=dict)
    total: float | Tensor = 0.0
    peak_in_flight: int = 0

    def run(self) -> None:
        """Do this rank's row."""
        row = self.schedule.rows[self.mesh.pp.rank]
        inputs = [*(input_of(action, self.schedule.stages) for action in row), None]
        self.mail.post(inputs[0])
        for action, needed, needed_next in zip(row, inputs, inputs[1:], strict=False):
            self._do(action, needed, needed_next)
        self.mail.close()

    def _do(self, action: Action, needed: Action | None, needed_next: Action | None) -> None:
        given = None if needed is None else self.mail.take(needed)
        self.mail.post(needed_next)  # if it may come now, it travels while this rank computes
        with self.mesh.compute(action.op, stage=action.stage, mb=action.mb):
            work = self._forward if action.op == "F" else self._backward
            result = work(action.stage, action.mb, given)
        self.mail.post(needed_next, action, result)

    def _forward(self, stage: int, mb: int, x: Tensor | None) -> Tensor | None:
        tokens, targets = self.micro_batches[mb][:2]
        x = tokens if x is None else x.detach().requires_grad_()
        y = self.stages[stage](x, positions_of(self.micro_batches[mb]))
        last = stage + 1 == self.schedule.stages
        if last:
            y = self.loss(y, targets)
            self.total = self.total + y.detach()
        self.kept[stage, mb] = (x, get_gradient_edge(y) if y.requires_grad else None)
        self.peak_in_flight = max(self.peak_in_flight, len(self.kept))
        return None if last else y.detach()

    def _backward(self, stage: int, mb: int, gradient: Tensor | None) -> Tensor | None:
        x, output = self.kept.pop((stage, mb))
        if output is not None:  # None: all of the first stage is frozen
            torch.autograd.backward(output, gradient)
        return x.grad


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
) -> Outcome:
    """Forward and backward of one step; gradients are added to the parameters of ``stages``.

    ``stages`` are this rank's (see :func:`cut`). ``loss`` gives each micro-batch's *share* of
    the step's loss: it must divide by the tokens (or by m) itself, or gradients are m times too
    large. Every rank is given the same schedule and ``micro_batches``; these may differ in size.

    Stages may be cut further. Under tensor and sequence parallelism every stage is called with all
    positions of the micro-batch, and what travels are the rows that it holds outside its regions
    (``stage.own_rows``): x_bSD, or x_bScD of S/t rows. Under context parallelism a micro-batch is
    what ``cp.shard`` gives, (tokens, targets, positions) of this rank.

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

    tied = _tied_apart(schedule, stages, mesh.pp)
    before = None if tied is None else tied.grad
    if tied is not None:
        tied.grad = None  # only what this step adds is summed
    engine = Engine(schedule, stages, mesh, micro_batches, loss, Mail(schedule, mesh.pp, like))
    engine.run()
    if tied is not None:
        _sum_tied_gradient(tied, schedule, mesh.pp, before)
    total = torch.as_tensor(engine.total, dtype=torch.float64, device=weight.device)
    return Outcome(total, engine.peak_in_flight)


def positions_of(batch: Batch) -> Tensor:
    """The positions (S,) of a micro-batch's tokens: its own, or 0..S-1.

    A stage cannot count them, for its input may have fewer rows than its attention sees.
    """
    tokens = batch[0]
    return batch[2] if len(batch) == 3 else torch.arange(tokens.shape[1], device=tokens.device)


def _tied_apart(schedule: Schedule, stages: Mapping[int, Decoder], pp: Axis) -> Tensor | None:
    """The tied embedding, if this rank holds one of its two copies and another rank the other."""
    first, last = schedule.placement[0], schedule.placement[-1]
    if first == last or pp.rank not in (first, last):
        return None
    stage = stages[0 if pp.rank == first else schedule.stages - 1]
    end = stage.head if stage.embedding is None else stage.embedding.token
    if end is None or not stage.config.tied:
        return None
    return end.weight if end.weight.requires_grad else None


def _sum_tied_gradient(tied: Tensor, schedule: Schedule, pp: Axis, before: Tensor | None) -> None:
    """First and last stage each hold the tied embedding: both get the sum of their gradients.

    An all-reduce of two ranks: each sends its gradient to the other. Without it the copies
    drift apart from the first step on.
    """
    other = sum({schedule.placement[0], schedule.placement[-1]} - {pp.rank})
    assert tied.grad is not None
    tied.grad += comm.exchange(tied.grad, pp, to=other, source=other)
    if before is not None:
        tied.grad += before


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


def stage_traces(traces: Iterable[Trace]) -> list[Trace]:
    """The traces without messages, as a picture of a schedule wants them; sleeps stay."""
    found = []
    for trace in traces:
        only = copy(trace)
        only.spans = [span for span in trace.spans if span.stage is not None]
        found.append(only)
    return found


def measured_rows(traces: Iterable[Trace]) -> list[list[Span]]:
    """The stages' actions of each rank as measured, in seconds from the first start of all.

    Rows as those of a Simulation, so that ``bubble`` and ``makespan`` take them. The traces
    should hold one step: clear them after a first one that warms up.
    """
    spans = from_zero(span for trace in stage_traces(traces) for span in trace.spans)
    ranks = sorted({span.rank for span in spans})
    return [[span for span in spans if span.rank == rank] for rank in ranks]


def _check(
    schedule: Schedule, stages: Mapping[int, Decoder], pp: Axis, batches: Sequence[Batch]
) -> None:
    validate(schedule)
    split = next((a for row in schedule.rows for a in row if a.op in ("I", "W")), None)
    if split is not None:
        raise ValueError(
            f"{split} is half a backward: this engine runs F and B; write B for I and W together"
        )
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
