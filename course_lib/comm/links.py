"""Emulated links: how long a transfer takes by the alpha-beta model, and when it may start.

A transfer takes ``steps * alpha + bytes / beta`` seconds on the slowest link class between the
ranks. It starts when the last rank has joined the call, and one axis carries one transfer at a
time (messages: one at a time from each peer). Different axes do not slow each other down.

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

from collections.abc import Callable
from math import ceil, log2

from course_lib.comm.call import Call
from course_lib.mesh import Axis

# Messages one after another in the usual algorithm (ring; a tree for broadcast). A message costs
# its receiver: the delay of a hop blocks nobody who has handed the message over.
STEPS: dict[str, Callable[[int], int]] = {
    "all_reduce": lambda n: 2 * (n - 1),
    "reduce_scatter": lambda n: n - 1,
    "all_gather": lambda n: n - 1,
    "all_to_all": lambda n: n - 1,
    "broadcast": lambda n: ceil(log2(n)),
    "send": lambda n: 0,
    "recv": lambda n: 1,
}


def link_seconds(axis: Axis, call: Call) -> float:
    """Seconds that the emulated link takes for ``call``; 0 without links, and on GPUs."""
    links = axis.context.conditions.links
    if links is None or axis.context.device.type != "cpu":
        return 0.0
    link = links.link(_ends(axis, call))
    return STEPS[call.op](axis.size) * link.alpha + float(call.carried(axis)) / link.beta


def channel_of(axis: Axis, call: Call) -> tuple[str, str, int | None]:
    """What carries one transfer at a time: an axis; for messages, a peer and a direction."""
    return axis.name, call.op if call.peer is not None else "", call.peer


def _ends(axis: Axis, call: Call) -> tuple[int, ...]:
    """The global ranks between which the bytes of ``call`` travel."""
    return axis.ranks if call.peer is None else (axis.ranks[axis.rank], axis.ranks[call.peer])


def carrier_of(axis: Axis, call: Call) -> tuple[str, str, int | None]:
    """What a transfer occupies: its channel, or this rank's shared link of its class."""
    links = axis.context.conditions.links
    if links is None or not links.shared:
        return channel_of(axis, call)
    return "between nodes" if links.crosses(_ends(axis, call)) else "inside the node", "link", None


def occupy(axis: Axis, call: Call, issued: float, arrived: float) -> tuple[float, float]:
    """(start, end) of a transfer that was issued and that torch has finished at these times.

    Holds what carries it until the end. Call it once for each, under the context's lock.
    """
    carrier = carrier_of(axis, call)
    free = axis.context.channel_free_at.get(carrier, 0.0)
    seconds = link_seconds(axis, call)
    end = max(arrived, free) + seconds if seconds else arrived
    axis.context.channel_free_at[carrier] = max(free, end)
    return min(max(issued, free), end), end
