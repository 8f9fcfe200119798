"""Messages of a step: which there are, in what order they are posted, when memory is free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile

from torch import Tensor

from course_lib import comm
from course_lib.mesh import Axis
from course_lib.schedule import Action, Costs, Schedule, simulate


def handed_on(action: Action) -> Action | None:
    """The name of what ``action`` makes for others: I and B make the same, W nothing."""
    name = {"F": "F", "B": "B", "I": "B"}.get(action.op)
    return None if name is None else Action(name, action.stage, action.mb)


def input_of(action: Action, stages: int) -> Action | None:
    """The name of what ``action`` takes in; None for W, and at the ends of the pipeline."""
    handed = handed_on(action)
    if handed is None:
        return None
    stage = action.stage + (-1 if handed.op == "F" else 1)
    return Action(handed.op, stage, action.mb) if 0 <= stage < stages else None


@dataclass(frozen=True)
class Message:
    """The result of ``action`` (see :func:`handed_on`) on its way from ``source`` to rank ``to``.

    ``made`` and ``read`` number the actions that make and read it among all actions of the step.
    """

    action: Action
    source: int
    to: int
    made: int
    read: int


@lru_cache(maxsize=32)  # asked for by every step
def messages(schedule: Schedule) -> tuple[Message, ...]:
    """All messages of a step in the order in which they would be sent if B took two F.

    Every rank posts its halves in this one order. So the earliest message that is not through
    waits for no later one, and no legal schedule can deadlock, even where a send blocks all later
    messages of its rank until it is received, as on nccl (one stream for a group of ranks).
    """
    rows = simulate(schedule, Costs.make()).rows
    timed = sorted(
        (span.end, rank, action)
        for rank, row in enumerate(rows)
        for action, span in zip(schedule.rows[rank], row, strict=True)
    )
    number = {action: at for at, (_, _, action) in enumerate(timed)}
    made = {handed_on(action): at for action, at in number.items()}
    home, found = schedule.placement, []
    for reader, read in number.items():
        action = input_of(reader, schedule.stages)
        if action is not None and home[action.stage] != home[reader.stage]:
            source, to = home[action.stage], home[reader.stage]
            found.append(Message(action, source, to, made[action], read))
    return tuple(sorted(found, key=lambda message: message.made))


class Mail:
    """What one rank's actions hand on: to other ranks as messages, to its own stages directly.

    A message is known by its place among those of the same two ranks (nccl ignores tags), so that
    nothing is ever posted out of the order of :func:`messages`.
    """

    def __init__(self, schedule: Schedule, axis: Axis, like: Callable[[int], Tensor]) -> None:
        self.axis, self.like = axis, like
        self.mine = [m for m in messages(schedule) if axis.rank in (m.source, m.to)]
        self.place: dict[Action | None, int] = {m.action: at for at, m in enumerate(self.mine)}
        self.posted = 0  # how many of ``mine`` are on their way
        self.arriving: dict[Action, comm.Handle] = {}
        self.leaving: dict[Message, comm.Handle] = {}
        self.here: dict[Action, Tensor] = {}

    def post(
        self, wanted: Action | None, done: Action | None = None, result: Tensor | None = None
    ) -> None:
        """One batch: send the ``result`` that ``done`` names, receive what is ``wanted`` next.

        What comes before these in the common order is received too. It stops before a message
        that this rank has yet to make.
        """
        if done is not None and result is not None and done not in self.place:
            self.here[done] = result
        last = max(self.place.get(action, -1) for action in (done, wanted))
        batch = list(
            takewhile(
                lambda message: message.to == self.axis.rank or message.action == done,
                self.mine[self.posted : last + 1],
            )
        )
        self.posted += len(batch)
        sends = [message for message in batch if message.to != self.axis.rank]
        receives = [message for message in batch if message.to == self.axis.rank]
        exchange = comm.start_exchange(
            self.axis,
            [(self._checked(message, result), message.to) for message in sends],
            [(self.like(message.action.mb), message.source) for message in receives],
        )
        self.leaving.update(zip(sends, exchange.sends, strict=True))
        for message, handle in zip(receives, exchange.receives, strict=True):
            self.arriving[message.action] = handle

    def _checked(self, message: Message, result: Tensor | None) -> Tensor:
        """A message shorter than the buffer that waits for it would leave noise in the rest."""
        like = self.like(message.action.mb)
        if result is None or result.shape != like.shape or result.dtype != like.dtype:
            made = "nothing" if result is None else f"{tuple(result.shape)} of {result.dtype}"
            raise ValueError(
                f"rank {self.axis.rank} of axis {self.axis.name}: {message.action} made {made}, "
                f"rank {message.to} waits for {tuple(like.shape)} of {like.dtype}; a stage takes "
                "and gives x_bSD, of the rows that its own_rows says"
            )
        return result

    def take(self, wanted: Action) -> Tensor:
        """The result of ``wanted``, as soon as it is here."""
        if wanted in self.here:
            return self.here.pop(wanted)
        value = self.arriving.pop(wanted).wait()
        arrived = self.mine[self.place[wanted]]
        # Before its sender made it, it had read these: waiting for them costs nothing now, and
        # frees their memory. Otherwise what was sent would pile up to the end of the step.
        for sent in [m for m in self.leaving if m.to == arrived.source and m.read < arrived.made]:
            self.leaving.pop(sent).wait()
        return value

    def close(self) -> None:
        """Wait until everything that was sent has left."""
        for sent in self.leaving.values():
            sent.wait()
