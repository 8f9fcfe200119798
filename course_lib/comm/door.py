"""The one door to the network: every call is checked, written down, timed and slowed here.

A collective says *what* is asked for (:class:`~course_lib.comm.call.Call`) and how torch is told;
:func:`issue` does the rest once for all of them: checked mode, the ledger, the trace, emulated
links (whose delay passes while the caller computes; only :meth:`Handle.wait` sleeps for the rest).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from course_lib.comm.call import Call
from course_lib.comm.checked import CheckedMessage, checks_messages, compare_calls
from course_lib.comm.links import channel_of, occupy
from course_lib.ledger import Record
from course_lib.mesh import Axis
from course_lib.mesh.watch import call_site


def issue(axis: Axis, call: Call, start: Callable[[], Any], result: Callable[[], Any]) -> Handle:
    """Check ``call``, ``start()`` it and write it down; ``result()`` is read after the wait.

    ``start`` returns torch's work, anything with a ``wait()`` that raises what went wrong. Where
    priorities hold the axis back, all this is done later.
    """
    where = call_site(axis.context.cells) if axis.context.conditions.checked else ""
    priorities = axis.context.priorities
    if priorities is not None and call.peer is None and priorities.holds(axis):
        return priorities.hold(axis, lambda: _issue_now(axis, call, start, result, where))
    return _issue_now(axis, call, start, result, where)


def _issue_now(
    axis: Axis, call: Call, start: Callable[[], Any], result: Callable[[], Any], where: str
) -> Handle:
    if call.peer is not None and checks_messages(axis):
        work: Any = CheckedMessage(axis, call, start)
    else:
        if call.peer is None and axis.context.conditions.checked:
            compare_calls(axis, call, where)
        work = start()
    peer = None if call.peer is None else axis.ranks[call.peer]
    axis.ledger.add(
        Record(
            axis=axis.name,
            op=call.op,
            backend_op=call.backend_op,
            payload=call.payload,
            wire=call.wire(axis),
            n=axis.size,
            control=call.control,
            peer=peer,
            itemsize=call.tensor.element_size(),
        )
    )
    return Handle(_Flight(axis, call, work, result))


class Handle:
    """A call in flight: keep it until :meth:`wait`, its tensors are in use."""

    def __init__(self, flight: _Flight) -> None:
        self._flight: _Flight | None = flight
        self._value: Any = None

    def wait(self) -> Any:
        """Block until the call is over, and return its result; again and again if asked.

        What went wrong in the backend is raised, again and again too.
        """
        if self._flight is not None:
            flight, self._value = self._flight, self._flight.land()
            self._flight = None  # its tensors are free now
            flight.leave_gap()
        return self._value


class Done(Handle):
    """The answer of an axis of one rank: nothing travels, nothing is written down."""

    def __init__(self, value: Any) -> None:
        self._flight, self._value = None, value


class Together(Handle):
    """Several calls as one, which give ``value`` when all are over."""

    def __init__(self, handles: list[Handle], value: Any) -> None:
        self._flight, self._value, self._handles = None, value, handles

    def wait(self) -> Any:
        """Block until all are over."""
        for handle in self._handles:
            handle.wait()
        return self._value


class _Flight:
    """What a handle waits for, and when it really was over."""

    def __init__(self, axis: Axis, call: Call, work: Any, result: Callable[[], Any]) -> None:
        self._axis, self._call, self._work, self._result = axis, call, work, result
        self._issued = time.perf_counter()
        self._arrived: float | None = None  # when torch was done
        self._over: tuple[float, float] | None = None  # start and end of the transfer
        self._known = threading.Event()  # set with ``_over``
        self._error: Exception | None = None
        self._watcher: threading.Thread | None = None
        self._watch()

    def _watch(self) -> None:
        """Have the true end of the transfer stamped, which may come long before the wait."""
        self._line = [self]
        if self._axis.context.device.type != "cpu":
            return
        if self._axis.context.conditions.links is not None:
            lines = self._axis.context.channel_lines
            self._line = lines.setdefault(channel_of(self._axis, self._call), [])
            self._line.append(self)
        if self._call.peer is None:
            self._work.get_future().add_done_callback(lambda _: self._stamp())
        elif self._axis.context.conditions.links is not None:
            # On gloo a message has no future: a thread waits for it. Without emulated links it
            # would be a dear way to a finer picture, and the end of a message is that of its wait.
            self._watcher = threading.Thread(target=self._await, daemon=True)
            self._watcher.start()

    def _await(self) -> None:
        """Wait for torch, once: a second wait for a message of gloo would never return."""
        try:
            self._work.wait()
        except Exception as error:
            self._error = error
        self._stamp()

    def _stamp(self) -> None:
        """Note the end, once. Torch's threads come here, and so does the caller's.

        An emulated link carries its transfers in the order in which they were issued, though
        torch's threads may finish two neighbours in either order: who is early stands in line.
        """
        now = time.perf_counter()
        with self._axis.context.channel_lock:
            if self._arrived is not None:
                return
            self._arrived = now
            while self._line and (first := self._line[0])._arrived is not None:
                del self._line[0]
                first._over = occupy(first._axis, first._call, first._issued, first._arrived)
                first._known.set()

    def land(self) -> Any:
        """Wait for torch and for the emulated link, write the span down, give the result."""
        if isinstance(self._work, CheckedMessage):
            self._work.watched()
        if self._watcher is not None:
            self._watcher.join()
        elif self._error is None:
            self._await()
        if self._error is not None:
            raise self._error
        self._known.wait()
        assert self._over is not None, "every wait stamps"
        start, end = self._over
        trace, call = self._axis.trace, self._call
        trace.sleep(end - time.perf_counter())
        label = "control" if call.control else call.label
        trace.add(call.op, start, end, axis=self._axis.name, payload=call.payload, label=label)
        return self._result()

    def leave_gap(self) -> None:
        """The program goes on to compute: where there are priorities a held call may leave."""
        priorities = self._axis.context.priorities
        if priorities is not None and self._call.op != "send":
            priorities.gap(self._axis)
