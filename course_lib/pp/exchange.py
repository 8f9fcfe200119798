"""The messages between the ranks of a pipeline: their order, and when their memory is freed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile

from torch import Tensor

from course_lib import comm
from course_lib.mesh import Axis
from course_lib.schedule import Action, Costs, Schedule, simulate, validate


def output_of(action: Action) -> Action | None:
    """Return the action that names the result of ``action``. I is named B: both return dx.

    None for W, whose result no other stage reads.
    """
    op = {"F": "F", "B": "B", "I": "B"}.get(action.op)
    return None if op is None else Action(op, action.stage, action.mb)


def input_of(action: Action, stages: int) -> Action | None:
    """Return the name of the result that ``action`` reads; None for W, first F, last B."""
    output = output_of(action)
    if output is None:
        return None
    stage = action.stage + (-1 if output.op == "F" else 1)
    return Action(output.op, stage, action.mb) if 0 <= stage < stages else None


@dataclass(frozen=True)
class Message:
    """The result of ``action`` (see :func:`output_of`), sent from rank ``source`` to rank ``to``.

    ``made`` and ``read`` are the numbers of the actions that compute and read it, counted over all
    actions of the step.
    """

    action: Action
    source: int
    to: int
    made: int
    read: int


@lru_cache(maxsize=32)  # validated and simulated once per schedule, not in every step
def messages(schedule: Schedule) -> tuple[Message, ...]:
    """Return all messages of a step in the order in which they would be sent if B took two F.

    Every rank posts its sends and receives in this one order, so the earliest message that is not
    delivered never waits for a later one. No legal schedule can deadlock, even where a send blocks
    all later messages of its rank until it is received, as on nccl (one stream per group of ranks).

    Raises ScheduleError (a ValueError) when the schedule is not legal.
    """
    validate(schedule)
    rows = simulate(schedule, Costs.make()).rows
    by_end = sorted(
        (span.end, rank, action)
        for rank, row in enumerate(rows)
        for action, span in zip(schedule.rows[rank], row, strict=True)
    )
    number = {action: index for index, (_, _, action) in enumerate(by_end)}
    made = {output_of(action): index for action, index in number.items()}
    rank_of, found = schedule.placement, []
    for reader, read in number.items():
        action = input_of(reader, schedule.stages)
        if action is not None and rank_of[action.stage] != rank_of[reader.stage]:
            source, to = rank_of[action.stage], rank_of[reader.stage]
            found.append(Message(action, source, to, made[action], read))
    return tuple(sorted(found, key=lambda message: message.made))


class P2PExchange:
    """Passes results to the stages that read them: to other ranks as messages, else directly.

    ``order`` is :func:`messages` of the schedule. A message is identified by its place among those
    between the same two ranks (nccl ignores tags), so nothing is ever posted out of order.
    ``like`` has a tensor with the shape and dtype of each micro-batch's activations.
    """

    def __init__(self, order: Sequence[Message], axis: Axis, like: Sequence[Tensor]) -> None:
        self.axis, self.like = axis, like
        self.own = [message for message in order if axis.rank in (message.source, message.to)]
        self.index: dict[Action | None, int] = {m.action: i for i, m in enumerate(self.own)}
        self.posted = 0  # how many of ``own`` were posted
        self.receives: dict[Action, comm.Handle] = {}
        self.sends: dict[Message, comm.Handle] = {}
        self.local: dict[Action, Tensor] = {}  # results for other stages of this rank

    def post(
        self, needed: Action | None, name: Action | None = None, result: Tensor | None = None
    ) -> None:
        """Post one batch: send ``result``, called ``name``, and receive the input ``needed`` next.

        Earlier receives in the common order are posted too. The batch ends before the first message
        that this rank has not computed yet.
        """
        if name is not None and result is not None and name not in self.index:
            self.local[name] = result
        end = max(self.index.get(action, -1) for action in (name, needed)) + 1
        batch = list(
            takewhile(
                lambda message: message.to == self.axis.rank or message.action == name,
                self.own[self.posted : end],
            )
        )
        self.posted += len(batch)
        sends = [message for message in batch if message.to != self.axis.rank]
        receives = [message for message in batch if message.to == self.axis.rank]
        exchange = comm.start_exchange(
            self.axis,
            [(self._checked(message, result), message.to) for message in sends],
            [(self.like[message.action.mb], message.source) for message in receives],
        )
        self.sends.update(zip(sends, exchange.sends, strict=True))
        for message, handle in zip(receives, exchange.receives, strict=True):
            self.receives[message.action] = handle

    def _checked(self, message: Message, result: Tensor | None) -> Tensor:
        """Return ``result``; ValueError for a wrong size, which the receiver cannot see."""
        like = self.like[message.action.mb]
        if result is None or result.shape != like.shape or result.dtype != like.dtype:
            made = "nothing" if result is None else f"{tuple(result.shape)} of {result.dtype}"
            raise ValueError(
                f"rank {self.axis.rank} of axis {self.axis.name}: {message.action} made {made}, "
                f"rank {message.to} expects {tuple(like.shape)} of {like.dtype}; a stage takes "
                "and returns x_bSD with the rows that its own_rows selects"
            )
        return result

    def take(self, needed: Action) -> Tensor:
        """Wait for the result named ``needed`` and return it."""
        if needed in self.local:
            return self.local.pop(needed)
        value = self.receives.pop(needed).wait()
        received = self.own[self.index[needed]]
        # The source had read these messages before it computed this result, so waiting for them
        # takes no time now. It frees their memory, which would otherwise grow during the step.
        for sent in list(self.sends):
            if sent.to == received.source and sent.read < received.made:
                self.sends.pop(sent).wait()
        return value

    def wait(self) -> None:
        """Wait for all sends, at the end of the step."""
        for handle in self.sends.values():
            handle.wait()
