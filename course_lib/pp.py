"""Pipeline parallelism: one engine that runs any schedule on ranks.

A rank holds some stages of the model (slices of its blocks) and does its row of the schedule. A
forward sends its activations x_bSD (b sequences of the micro-batch) to the next stage's rank, a
backward sends the gradient of its input to the previous one. Between two actions the engine posts
one batch: send this result, receive what is needed next. Sends are never waited for on the way,
so that a rank is held up by what it needs and by nothing else.

Bytes, all ranks of the axis together, per step: ``2 B S D`` elements for each hop (pair of
neighbouring stages on different ranks), activations forward and gradients back; with a tied
embedding also one all-reduce of its gradient between first and last stage (:func:`wire_bytes`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from course_lib import comm
from course_lib.mesh import Axis, Mesh
from course_lib.model import Decoder
from course_lib.schedule import Action, Schedule, validate

Batch = tuple[Tensor, Tensor]  # tokens (b, S) and targets (b, S)
Loss = Callable[[Tensor, Tensor], Tensor]  # logits (b, S, V), targets (b, S) -> its share of loss


# --- cutting the model ----------------------------------------------------------------------


def partition(layers: int, stages: int) -> list[int]:
    """How many layers each stage gets: as even as can be, the first ones one more."""
    if not 1 <= stages <= layers:
        raise ValueError(
            f"{layers} layers cannot be cut into {stages} stages of at least one layer each; "
            "take fewer ranks or chunks, or more layers"
        )
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def cut(
    model: Decoder, schedule: Schedule, rank: int, layers: Sequence[int] | None = None
) -> dict[int, Decoder]:
    """The stages that ``rank`` holds, by number; ``layers`` says how many blocks each stage has.

    The slices share the weights of ``model``. Raises ValueError when ``layers`` does not add up.
    """
    total = len(model.blocks)
    layers = partition(total, schedule.stages) if layers is None else layers
    if len(layers) != schedule.stages or sum(layers) != total or min(layers) < 1:
        raise ValueError(
            f"layers={list(layers)}: {schedule.stages} stages of at least one layer are wanted, "
            f"{total} layers in all"
        )
    ends = [sum(layers[: stage + 1]) for stage in range(schedule.stages)]
    return {
        stage: model.stage(ends[stage] - layers[stage], ends[stage])
        for stage in schedule.stages_of(rank)
    }


def hops(schedule: Schedule) -> int:
    """Pairs of neighbouring stages on different ranks: pv-1 looped, 2(p-1) in a V."""
    pairs = zip(schedule.placement, schedule.placement[1:], strict=False)
    return sum(here != there for here, there in pairs)


def wire_bytes(schedule: Schedule, activation_bytes: int, tied_bytes: int = 0) -> int:
    """Bytes that all ranks of the axis together send in a step.

    ``activation_bytes`` is B S D times the element size, of all micro-batches together;
    ``tied_bytes`` the size of the tied embedding, 0 if it is not tied.
    """
    ends_apart = schedule.placement[0] != schedule.placement[-1]
    return 2 * hops(schedule) * activation_bytes + 2 * tied_bytes * ends_apart


# --- messages -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Message:
    """The result of ``action`` on its way from rank ``source`` to rank ``to``."""

    action: Action
    source: int
    to: int


def message_of(action: Action, schedule: Schedule) -> Message | None:
    """What other rank ``action``'s result goes to; None if it stays, or goes nowhere."""
    reader = {"F": action.stage + 1, "B": action.stage - 1, "I": action.stage - 1}.get(action.op)
    if reader is None or not 0 <= reader < schedule.stages:
        return None
    source, to = schedule.placement[action.stage], schedule.placement[reader]
    return None if source == to else Message(action, source, to)


def needed_for(action: Action, schedule: Schedule) -> Action | None:
    """Whose result ``action`` takes as its input; None for the ends of the pipeline."""
    if action.op == "F":
        return Action("F", action.stage - 1, action.mb) if action.stage else None
    if action.op == "B" and action.stage + 1 < schedule.stages:
        return Action("B", action.stage + 1, action.mb)
    return None


class Mailbox:
    """Receives what other ranks send, each sender's messages in the order of its row.

    A message is known by nothing but its place among those of the same pair of ranks (nccl
    ignores tags). So they are received in the order in which they are sent, and one that comes
    before it is needed waits here.
    """

    def __init__(self, schedule: Schedule, axis: Axis, like: Callable[[int], Tensor]) -> None:
        self.schedule, self.axis, self.like = schedule, axis, like
        self.order: dict[int, list[Action]] = defaultdict(list)
        for row in schedule.rows:
            for action in row:
                message = message_of(action, schedule)
                if message is not None and message.to == axis.rank:
                    self.order[message.source].append(action)
        self.posted: dict[Action, comm.Exchange] = {}
        self.sending: list[comm.Exchange] = []

    def post(self, result: Tensor | None, of: Action | None, ahead: Sequence[Action]) -> None:
        """One batch: send ``result`` of ``of`` if it goes elsewhere, and ask for the inputs of
        the actions ``ahead``."""
        message = None if of is None else message_of(of, self.schedule)
        if message is not None and result is not None:
            self.sending.append(comm.start_exchange(self.axis, [(result, message.to)], []))
        for action in ahead:
            wanted = needed_for(action, self.schedule)
            if wanted is not None:
                self._ask(wanted)

    def _ask(self, wanted: Action) -> None:
        source = self.schedule.placement[wanted.stage]
        queue = self.order[source]
        while wanted not in self.posted and wanted in queue:
            first = queue.pop(0)
            receive = (self.like(first.mb), source)
            self.posted[first] = comm.start_exchange(self.axis, [], [receive])

    def take(self, wanted: Action) -> Tensor:
        """Wait for the result of ``wanted``."""
        return self.posted.pop(wanted).wait()[0]

    def close(self) -> None:
        """Wait until everything that was sent has left."""
        for sent in self.sending:
            sent.wait()


# --- the engine -----------------------------------------------------------------------------


@dataclass
class Engine:
    """One step of one rank. ``kept`` holds (input, output) of every micro-batch in flight."""

    schedule: Schedule
    stages: Mapping[int, Decoder]
    mesh: Mesh
    micro_batches: Sequence[Batch]
    loss: Loss
    mailbox: Mailbox
    kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    local: dict[Action, Tensor] = field(default_factory=dict)
    total: Tensor | float = 0.0
    peak_in_flight: int = 0

    def run(self) -> None:
        """Do this rank's row."""
        row = self.schedule.rows[self.mesh.pp.rank]
        self.mailbox.post(None, None, row[:1])
        for place, action in enumerate(row):
            given = self._input(action)
            # Ask for the next input before computing: it travels meanwhile.
            self.mailbox.post(None, None, row[place + 1 : place + 2])
            with self.mesh.compute(action.op, stage=action.stage, mb=action.mb):
                result = self._do(action, given)
            if message_of(action, self.schedule) is None and result is not None:
                self.local[action] = result
            self.mailbox.post(result, action, ())
        self.mailbox.close()

    def _input(self, action: Action) -> Tensor | None:
        wanted = needed_for(action, self.schedule)
        if wanted is None:
            return self.micro_batches[action.mb][0] if action.op == "F" else None
        return self.local.pop(wanted) if wanted in self.local else self.mailbox.take(wanted)

    def _do(self, action: Action, given: Tensor | None) -> Tensor | None:
        if action.op == "F":
            assert given is not None
            return self._forward(action, given)
        return self._backward(action, given)

    def _forward(self, action: Action, x: Tensor) -> Tensor | None:
        if action.stage > 0:
            x = x.detach().requires_grad_()
        y = self.stages[action.stage](x)
        last = action.stage + 1 == self.schedule.stages
        if last:
            y = self.loss(y, self.micro_batches[action.mb][1])
            self.total = self.total + y.detach()
        self.kept[action.stage, action.mb] = (x, y)
        self.peak_in_flight = max(self.peak_in_flight, len(self.kept))
        return None if last else y.detach()

    def _backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        x, y = self.kept.pop((action.stage, action.mb))
        y.backward(gradient)
        return x.grad if action.stage > 0 else None


@dataclass(frozen=True)
class Outcome:
    """``loss`` of this rank's part (0 but on the last stage), and what it kept at most."""

    loss: Tensor
    peak_in_flight: int


def run(
    schedule: Schedule,
    stages: Mapping[int, Decoder],
    mesh: Mesh,
    micro_batches: Sequence[Batch],
    loss: Loss,
) -> Outcome:
    """Forward and backward of one step; gradients are left in the parameters of ``stages``.

    ``stages`` are this rank's (see :func:`cut`). ``loss`` gives each micro-batch's *share* of
    the step's loss: it must divide by the tokens (or by m) itself, or gradients are m times too
    large. Every rank is given the same ``micro_batches``; they may differ in size.

    Raises ValueError when schedule, stages, axis and micro-batches do not fit, and ScheduleError
    (a ValueError) when the schedule is not legal.
    """
    _check(schedule, stages, mesh.pp, micro_batches)
    config = next(iter(stages.values())).config
    weight = next(next(iter(stages.values())).parameters())

    def like(mb: int) -> Tensor:
        return weight.new_empty((*micro_batches[mb][0].shape, config.hidden))

    engine = Engine(schedule, stages, mesh, micro_batches, loss, Mailbox(schedule, mesh.pp, like))
    engine.run()
    _sum_tied_gradient(schedule, stages, mesh.pp)
    total = torch.as_tensor(engine.total, device=weight.device)
    return Outcome(total, engine.peak_in_flight)


def _sum_tied_gradient(schedule: Schedule, stages: Mapping[int, Decoder], pp: Axis) -> None:
    """First and last stage each hold the tied embedding: both get the sum of their gradients.

    An all-reduce of two ranks: each sends its gradient to the other. Without it the copies
    drift apart from the first step on.
    """
    first, last = schedule.placement[0], schedule.placement[-1]
    if first == last or pp.rank not in (first, last):
        return
    stage = stages[0 if pp.rank == first else schedule.stages - 1]
    if not stage.config.tied:
        return
    weight = tied_weight(stage)
    assert weight.grad is not None
    other = last if pp.rank == first else first
    weight.grad += comm.exchange(weight.grad, pp, to=other, source=other)


def tied_weight(stage: Decoder) -> nn.Parameter:
    """The embedding's matrix where ``stage`` is the first, the head's where it is the last."""
    if stage.embedding is not None:
        return stage.embedding.token.weight
    assert stage.head is not None, "a stage in the middle holds no embedding"
    return stage.head.weight


def _check(
    schedule: Schedule, stages: Mapping[int, Decoder], pp: Axis, batches: Sequence[Batch]
) -> None:
    validate(schedule)
    if schedule.ranks != pp.size:
        raise ValueError(
            f"the schedule {schedule.name!r} is for {schedule.ranks} ranks, axis {pp.name} has "
            f"{pp.size}"
        )
    if schedule.microbatches != len(batches):
        raise ValueError(
            f"the schedule {schedule.name!r} is for {schedule.microbatches} micro-batches, got "
            f"{len(batches)}"
        )
    if sorted(stages) != schedule.stages_of(pp.rank):
        raise ValueError(
            f"rank {pp.rank} of axis {pp.name} holds stages {schedule.stages_of(pp.rank)} in the "
            f"schedule {schedule.name!r}, got {sorted(stages)}; cut() makes the right ones"
        )
    split = next((a for row in schedule.rows for a in row if a.op in ("I", "W")), None)
    if split is not None:
        raise ValueError(
            f"{split} is half a backward: this engine runs F and B; write B for I and W together"
        )
