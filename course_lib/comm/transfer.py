"""The path to the network: a call, one record in the ledger, one handle to wait on.

A collective describes what it asks as a :class:`Call`. :func:`issue` hands the call to torch and
writes it into the ledger. The :class:`Handle` waits, writes the span into the trace and returns the
result. Whatever watches or disturbs traffic is an instrument (:mod:`course_lib.comm.instruments`)
that wraps :func:`issue`; an ordinary run has none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from course_lib.ledger import Record
from course_lib.mesh import Axis, Instrument
from course_lib.schedule import Span

Counts = tuple[tuple[int, ...], tuple[int, ...]]
Channel = tuple[str, str, int | None]  # axis, and for a message its direction and peer


@dataclass(slots=True)
class Call:
    """What a rank asks of an axis, and how torch is told.

    ``start(tensor)`` hands the tensor to torch and returns torch's work. ``result()`` is read after
    the wait; without it the result is ``tensor``, which is the caller's input or, for recv, the
    buffer. ``backend_op`` is the ``torch.ops.c10d`` operation that runs. ``how`` is what else all
    ranks must agree on, such as "max" or "dim 1". ``peer`` is a coordinate, for messages. An
    all_to_all_v has ``counts``, the rows sent to and received from each coordinate, and ``sent``,
    the bytes that leave the rank. ``overlaps`` says that the caller computes during the transfer,
    so that its true end is stamped. Instruments note the learner's line in ``where``.
    """

    op: str
    backend_op: str
    tensor: Tensor
    start: Callable[[Tensor], Any]
    result: Callable[[], Any] | None = None
    how: str = ""
    peer: int | None = None
    control: bool = False
    label: str = ""
    counts: Counts | None = None
    sent: int | None = None
    overlaps: bool = False
    where: str = ""


def channel_of(axis: Axis, call: Call) -> Channel:
    """Return what carries one transfer at a time: an axis; for messages, a peer and direction."""
    return axis.name, call.op if call.peer is not None else "", call.peer


def issue(axis: Axis, call: Call, instruments: tuple[Instrument, ...] | None = None) -> Handle:
    """Start ``call`` and record it. The instruments, outermost first, may act before and after."""
    around = axis.context.instruments if instruments is None else instruments
    if around:
        return around[0].around(axis, call, partial(issue, axis, instruments=around[1:]))
    handle = Handle(axis, call, call.start(call.tensor))
    peer = None if call.peer is None else axis.ranks[call.peer]
    axis.ledger.add(
        Record(axis.name, call.op, call.backend_op, call.tensor.nbytes, axis.size, call.control,
               peer, call.sent, call.tensor.element_size())
    )  # fmt: skip
    return handle


class Handle:
    """A call in flight. Keep it until :meth:`wait`, because torch uses its tensors until then."""

    __slots__ = ("_error", "_value", "axis", "began", "call", "ended", "issued", "work")
    _lock: ClassVar = threading.Lock()  # torch's thread and the caller's may stamp the same call

    def __init__(self, axis: Axis, call: Call, work: Any) -> None:
        self.axis, self.work = axis, work
        self.call: Call | None = call
        self.issued = time.perf_counter()
        self.ended = 0.0
        self._error: Exception | None = None
        if call.overlaps and axis.context.device.type == "cpu":
            work.get_future().add_done_callback(self._stamp)

    def wait(self) -> Any:
        """Wait for the call and return its result; a second wait returns it again.

        On gloo it blocks until the call is over. On nccl it makes the current stream wait, so that
        the span has the host's time. An error of the backend is raised, by every wait.
        """
        if self._error is not None:
            raise self._error
        if self.call is not None:
            try:
                self.work.wait()
            except Exception as error:
                self._error = error
                raise
            if not self.ended:
                self._stamp()
            self.finish(self.began, self.ended)
        return self._value

    def _stamp(self, _: Any = None) -> None:
        """Note when the transfer ended, once: torch's thread calls this too.

        It began when its channel was free.
        """
        now, free_at = time.perf_counter(), self.axis.context.free_at
        with self._lock:
            if not self.ended and (call := self.call) is not None:
                channel = channel_of(self.axis, call)
                self.began = max(self.issued, min(now, free_at.get(channel, 0.0)))
                free_at[channel] = self.ended = now

    def finish(self, start: float, end: float) -> None:
        """Write the span, read the result and release the call's tensors."""
        call, self.call, self.work = self.call, None, None
        assert call is not None, "a call finishes once"
        trace, label = self.axis.trace, "control" if call.control else call.label
        trace.spans.append(
            Span(trace.rank, call.op, start, end, None, None, self.axis.name, call.tensor.nbytes,
                 label)
        )  # fmt: skip
        self._value = call.tensor if call.result is None else call.result()


class Completed(Handle):
    """The result on an axis of one rank: nothing is sent and nothing recorded."""

    def __init__(self, value: Any) -> None:
        self.call, self._error, self._value = None, None, value
