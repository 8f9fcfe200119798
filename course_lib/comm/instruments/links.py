"""Emulated links: how long a transfer takes by the alpha-beta model, and when it may start.

A transfer takes ``steps * alpha + bytes / beta`` seconds on the slowest link class between the
ranks. It starts when the last rank has joined the call, and one axis carries one transfer at a
time (messages: one at a time from each peer). Different axes do not slow each other down. The time
passes while the caller computes; only the wait sleeps for what is left of it.

With ``shared`` links they do: a rank has one link inside its node and one out of it, and carries
on each one transfer at a time, of whatever axis, in the order in which all had joined. It is the
simplest model of ranks that have a network card each, and harsher than cards are: these interleave
packets, so that a small message between the parts of a large one takes twice its own time and does
not wait for all of the large one (what waits whole is work in one CUDA stream, or behind kernels
that hold the multiprocessors). A rank knows its own links only: a call is not slowed by the busy
link of another member. Ranks that share *one* card per node are ``between`` with its beta divided
by their number, as if all of them always sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from math import ceil, log2
from typing import Any

from course_lib.comm.transfer import Call, Channel, Handle, channel_of
from course_lib.ledger import wire
from course_lib.mesh import Axis, Instrument, Links

# Messages one after another in the usual algorithm (ring; a tree for broadcast). A message costs
# its receiver: the delay of a transfer does not block a sender that has handed the message over.
STEPS: dict[str, Callable[[int], int]] = {
    "all_reduce": lambda n: 2 * (n - 1),
    "reduce_scatter": lambda n: n - 1,
    "all_gather": lambda n: n - 1,
    "all_to_all": lambda n: n - 1,
    "broadcast": lambda n: ceil(log2(n)),
    "send": lambda n: 0,
    "recv": lambda n: 1,
}


class EmulatedLinks(Instrument):
    """The links of one rank: when each is free again, and which transfers wait for it."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self.free_at: dict[Channel, float] = {}
        self.lines: dict[Channel, list[_Transfer]] = {}
        self.lock = threading.Lock()

    def around(self, axis: Axis, call: Call, issue: Callable[[Call], Handle]) -> Handle:
        """Give the transfer the time of its link."""
        return _Transfer(self, axis, call, issue(call))

    def seconds(self, axis: Axis, call: Call) -> float:
        """Seconds that the link takes for ``call``."""
        link = self.links.link(_ends(axis, call))
        return STEPS[call.op](axis.size) * link.alpha + carried(axis, call) / link.beta

    def carrier(self, axis: Axis, call: Call) -> Channel:
        """What a transfer occupies: its channel, or this rank's shared link of its class."""
        if not self.links.shared:
            return channel_of(axis, call)
        crosses = self.links.crosses(_ends(axis, call))
        return "between nodes" if crosses else "inside the node", "link", None

    def occupy(self, axis: Axis, call: Call, issued: float, arrived: float) -> tuple[float, float]:
        """(start, end) of a transfer that was issued and that torch has finished at these times.

        The transfer occupies its carrier until the end. Call it once for each, under the lock.
        """
        carrier, seconds = self.carrier(axis, call), self.seconds(axis, call)
        free = self.free_at.get(carrier, 0.0)
        end = max(arrived, free) + seconds if seconds else arrived
        self.free_at[carrier] = max(free, end)
        return min(max(issued, free), end), end


def carried(axis: Axis, call: Call) -> float:
    """Bytes on this rank's link, in its busier direction. A message counts where it ends."""
    if call.counts is not None:
        row_bytes = call.tensor.shape[1:].numel() * call.tensor.element_size()
        return max(sum(rows) - rows[axis.rank] for rows in call.counts) * row_bytes
    if call.peer is not None:
        return call.tensor.nbytes if call.op == "recv" else 0
    return float(wire(call.op, call.tensor.nbytes, axis.size))


def _ends(axis: Axis, call: Call) -> tuple[int, ...]:
    """Return the global ranks between which the bytes of ``call`` are sent."""
    return axis.ranks if call.peer is None else (axis.ranks[axis.rank], axis.ranks[call.peer])


class _Transfer(Handle):
    """A call that ends when its emulated link has carried it."""

    def __init__(self, links: EmulatedLinks, axis: Axis, call: Call, inner: Handle) -> None:
        self._links, self._inner = links, inner
        self._arrived: float | None = None  # when torch was done
        self._over: tuple[float, float] | None = None  # start and end of the transfer
        self._known = threading.Event()  # set with ``_over``
        self._error: Exception | None = None
        self._watcher: threading.Thread | None = None
        self._line = links.lines.setdefault(channel_of(axis, call), [])
        self._line.append(self)
        if call.peer is None:
            inner.work.get_future().add_done_callback(lambda _: self._arrive())
        else:  # on gloo a message has no future: a thread waits for it
            self._watcher = threading.Thread(target=self._await, daemon=True)
            self._watcher.start()

    def wait(self) -> Any:
        """Wait for torch, then for the emulated link."""
        if self._inner.call is not None:
            if self._watcher is not None:
                self._watcher.join()
            elif self._error is None:
                self._await()
            if self._error is not None:
                raise self._error
            self._known.wait()
            assert self._over is not None, "every arrival is noted"
            start, end = self._over
            self._inner.axis.trace.sleep(end - time.perf_counter())
            self._inner.finish(start, end)
        return self._inner.wait()

    def _await(self) -> None:
        """Wait for torch, once: a second wait for a message of gloo would never return."""
        try:
            self._inner.work.wait()
        except Exception as error:
            self._error = error
        self._arrive()

    def _arrive(self) -> None:
        """Note that torch is done, once. Torch's threads call this, and so does the caller's.

        An emulated link carries its transfers in the order in which they were issued, though
        torch's threads may finish two neighbors in either order: the early one waits in line.
        """
        now = time.perf_counter()
        with self._links.lock:
            if self._arrived is not None:
                return
            self._arrived = now
            while self._line and (first := self._line[0])._arrived is not None:
                del self._line[0]
                inner, call = first._inner, first._inner.call
                assert call is not None, "a call finishes after it was carried"
                first._over = self._links.occupy(inner.axis, call, inner.issued, first._arrived)
                first._known.set()
