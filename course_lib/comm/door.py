"""The one door to the network: every call is checked, written down, timed and slowed here.

A collective says *what* is asked for (:class:`Call`) and how torch is told; :func:`issue` does
the rest once for all of them: the ledger, the trace, checked mode, contiguity, emulated links.

Emulated links: a transfer starts when the last rank has joined the call (torch's own completion
tells), takes ``steps * alpha + wire / beta`` seconds, and one axis carries one transfer at a time.
The delay passes while the caller computes; only :meth:`Handle.wait` sleeps for what is left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from course_lib.comm.call import STEPS, Call
from course_lib.comm.checked import announced, checks_messages, compare_calls, compared
from course_lib.ledger import Record
from course_lib.mesh import Axis


class Handle:
    """A call in flight. :meth:`wait` returns the result; waiting again returns it again."""

    def __init__(self, axis: Axis, call: Call, works: Sequence[Any], result: Callable[[], Any]):
        self._axis, self._call, self._works, self._result = axis, call, works, result
        self._issued = time.perf_counter()
        self._over: tuple[float, float] | None = None  # start and end of the transfer
        self._watcher: threading.Thread | None = None
        self._value: Any = None
        self._waited = False
        self._watch()

    def _watch(self) -> None:
        """Have the true end of the transfer stamped, which may come long before wait()."""
        if self._axis.context.device.type != "cpu":
            return
        if self._call.peer is None:
            self._works[-1].get_future().add_done_callback(lambda _: self._stamp())
        elif self._axis.context.conditions.links is not None:
            # Point-to-point work has no future on gloo: a thread waits for it.
            self._watcher = threading.Thread(target=self._wait_and_stamp, daemon=True)
            self._watcher.start()

    def _wait_and_stamp(self) -> None:
        for work in self._works:
            work.wait()
        self._stamp()

    def _stamp(self) -> None:
        self._over = _transfer(self._axis, self._call, self._issued, time.perf_counter())

    def wait(self) -> Any:
        """Block until the transfer is over (and its emulated delay), and return the result."""
        if self._waited:
            return self._value
        if self._watcher is not None:
            self._watcher.join()
        else:
            for work in self._works:
                work.wait()
        if self._over is None:
            self._stamp()
        assert self._over is not None
        start, end = self._over
        self._axis.trace.sleep(end - time.perf_counter())
        self._axis.trace.add(
            self._call.op,
            start,
            end,
            axis=self._axis.name,
            payload=self._call.payload,
            label="control" if self._call.control else "",
        )
        self._value, self._waited = self._result(), True
        self._works, self._result = (), lambda: None
        return self._value


class Done(Handle):
    """The answer of an axis of one rank: nothing travels, nothing is written down."""

    def __init__(self, value: Any):
        self._value, self._waited = value, True


def issue(axis: Axis, call: Call, start: Callable[[], Any], result: Callable[[], Any]) -> Handle:
    """Check and write down ``call``, then ``start()`` it; ``result()`` is read after the wait.

    ``start`` returns one work or several (from a batch); all are waited for.
    """
    if axis.context.conditions.checked and call.peer is None:
        compare_calls(axis, call)
    peer = None if call.peer is None else axis.ranks[call.peer]
    axis.ledger.add(
        Record(
            axis=axis.name,
            op=call.op,
            backend_op=call.backend_op,
            payload=call.payload,
            wire=call.wire(axis.size),
            n=axis.size,
            control=call.control,
            peer=peer,
        )
    )
    if call.peer is not None and checks_messages(axis):
        start = announced(axis, call, start) if call.op == "send" else compared(axis, call, start)
    works = start()
    return Handle(axis, call, works if isinstance(works, list) else [works], result)


# --- emulated links -------------------------------------------------------------------------


def link_seconds(axis: Axis, call: Call) -> float:
    """Seconds that the emulated link takes for ``call``; 0 without links."""
    links = axis.context.conditions.links
    if links is None or axis.context.device.type != "cpu":
        return 0.0
    if call.peer is None:
        link = links.link(axis.ranks)
        carried = float(call.wire(axis.size))
    else:
        link = links.link((axis.ranks[axis.rank], axis.ranks[call.peer]))
        carried = float(call.payload) if call.op == "recv" else 0.0
    return STEPS[call.op](axis.size) * link.alpha + carried / link.beta


def _transfer(axis: Axis, call: Call, issued: float, arrived: float) -> tuple[float, float]:
    """(start, end) of a transfer that torch has finished at ``arrived``.

    One axis carries one transfer at a time (one a peer, for messages), so that it starts when the
    one before is over. A send costs its receiver, not its sender: the delay of a hop blocks
    nobody who has handed the message over.
    """
    seconds = link_seconds(axis, call)
    key = (axis.name, call.op if call.peer is not None else "", call.peer)
    with axis.context.channel_lock:
        free = axis.context.channel_free_at.get(key, 0.0)
        end = max(arrived, free) + seconds if seconds else arrived
        axis.context.channel_free_at[key] = end
    return min(max(issued, free), end), end
