"""Detect deadlocks while ranks wait, and raise the same error on every rank.

Rank 0 calls on tp, then on dp; rank 1 on dp, then on tp. Each waits for the other and neither will
come. The rule that keeps this from happening: *calls on groups that overlap are started in one
order on all ranks*. nccl has no way to see that it was broken (github.com/NVIDIA/nccl/issues/195
and 1174), and on GPUs a call binds the order as soon as it is started. Checked mode therefore takes
a call as made once every rank of its axis has started it, and so reports an order that gloo, which
carries started calls side by side, might have let pass.

How it is found: a rank that has waited for PATIENCE seconds says in the store of the process group
at which call it stands, which ranks that call needs, and how many calls it has made on each group.
Making the groups of an axis is such a call, which needs every rank of the world.
Whoever waits follows these positions from rank to rank. A rank that has returned will make no more
calls, and a rank is stuck when it waits for a call that a stuck rank has not made (a wait-for graph
in which a rank needs *all* it waits for: Chandy, Misra and Haas 1983, doi:10.1145/357360.357365).

A legal program is never reported, even from old positions. Suppose a rank on a cycle has moved on.
Then the rank that it waited for has made the call that its position lacks, so it moved on before.
The same holds around the whole cycle, so the first rank moved before itself, which is impossible.
(A chain that ends at a rank that has returned is never old: that rank makes no call.) One thread of
a rank may communicate, as everywhere in comm. A rank that computes is not judged: the deadline's
report says where it was.
"""

from __future__ import annotations

import pickle
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from course_lib.mesh import Axis

PATIENCE = 0.1  # seconds of waiting before a rank says so, and between its looks at the others
GOODBYE = 2.0  # seconds that a rank which has returned tries to say so
MAKING = "making groups"  # the channel of all ranks on which axes are made
ADVICE = (
    "Calls on groups that overlap must be started in one order on every rank. Choose which of "
    "these comes first, and reorder the lines of the ranks that begin with another one."
)
NEVER = (
    "Every rank of an axis must make the same calls. Look for an if, a loop or a return that "
    "differs between these ranks, or for an axis that was confused with another."
)
SAME_GROUPS = (
    "Every rank must make all groups in one order, those of others too: call make_mesh, sub_axis "
    "and across_axis with the same arguments and in the same order on every rank."
)
_LIBRARY = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent))  # as frames name them


class DeadlockError(RuntimeError):
    """Ranks wait for one another for ever, or for one that has returned. All are told the same."""


class Position(NamedTuple):
    """Where a rank waits, or (with no ``needs``) that it has returned.

    ``needs`` maps a rank to (channel, calls that it must have made there); ``made`` counts the
    calls of this rank by channel.
    """

    what: str
    where: str
    needs: Mapping[int, tuple[str, int]]
    made: Mapping[str, int]


Positions = Mapping[int, Position | None]  # None: the rank has said nothing yet


def channel(axis: Axis, op: str = "", source: int | None = None, to: int | None = None) -> str:
    """What calls are counted on: a group, or one end of the messages from a rank to another.

    A group has the same name on all ranks, if they made their groups in one order.
    """
    return f"{axis.group.group_name} {op} {source}>{to}" if op else str(axis.group.group_name)


class Watch:
    """What one rank knows of the calls of all, in one run."""

    def __init__(self, run: int) -> None:
        self.rank, self.made = dist.get_rank(), Counter[str]()
        store = dist.distributed_c10d._get_default_store()
        self.store = dist.PrefixStore(f"positions/{run}", store)

    def count(self, name: str) -> int:
        """Which call on this channel it is, from 1: one more is made."""
        self.made[name] += 1
        return self.made[name]

    def until(self, over: Callable[[float], Any], position: Callable[[], Position]) -> None:
        """Block until ``over(seconds)``, which waits that long, is true; DeadlockError if never."""
        if over(PATIENCE):
            return
        self.say(position())
        while not over(PATIENCE):
            self._look()

    def returned(self) -> None:
        """Say that this rank makes no more calls. Nothing is raised, nothing waited for long.

        Where the program made its group itself (init=False) the store may be gone with it.
        """

        def say() -> None:
            with suppress(Exception):
                self.say(Position("", "", {}, dict(self.made)))

        thread = threading.Thread(target=say, daemon=True)
        thread.start()
        thread.join(GOODBYE)

    def say(self, position: Position) -> None:
        """Put the position where the others look."""
        self.store.set(str(self.rank), pickle.dumps(position))  # type: ignore[arg-type]

    def _read(self, rank: int) -> Position | None:
        known = self.store.check([str(rank)])
        return pickle.loads(self.store.get(str(rank))) if known else None

    def _look(self) -> None:
        if self.store.check(["verdict"]):
            raise DeadlockError(self.store.get("verdict").decode())
        positions = follow(self.rank, self._read)
        if self.rank not in stuck(positions):
            return
        if self.store.add("judges", 1) == 1:  # one verdict, the same for all
            self.store.set("verdict", verdict(self.rank, positions))
        raise DeadlockError(self.store.get("verdict").decode())


def call_site(cells: dict[str, str]) -> str:
    """The learner's line that led here: the nearest frame outside this library and torch.

    ``cells`` names the files that are cells of the notebook.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name in cells:
            return f"{cells[name]} line {frame.f_lineno}"
        if not name.startswith(_LIBRARY):
            place = "a cell" if "ipykernel_" in name else Path(name).name
            return f"{place} line {frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"


def follow(rank: int, read: Callable[[int], Position | None]) -> Positions:
    """The positions of ``rank`` and of all for whom it waits, directly or not, each read once."""
    positions: dict[int, Position | None] = {}
    ahead = [rank]
    while ahead:
        one = ahead.pop()
        if one not in positions:
            position = positions[one] = read(one)
            ahead += position.needs if position else ()
    return positions


def awaited(position: Position, positions: Positions) -> list[int]:
    """The ranks that have not made their part of the call at which ``position`` waits.

    Only those of which a position is known: any other may be on its way.
    """
    late = []
    for rank, (name, count) in position.needs.items():
        other = positions[rank]
        if other is not None and other.made.get(name, 0) < count:
            late.append(rank)
    return late


def stuck(positions: Positions) -> set[int]:
    """The ranks that go on no more: those returned, and those that wait for a stuck one."""
    found = {rank: position for rank, position in positions.items() if position is not None}
    while free := [
        rank
        for rank, position in found.items()
        if position.needs and not found.keys() & awaited(position, positions)
    ]:
        for rank in free:
            del found[rank]
    return set(found)


def verdict(rank: int, positions: Positions) -> str:
    """Who waits for whom, where, and what to do: the ring that ``rank`` is in or waits for."""
    never = stuck(positions)
    chain = [rank]
    while True:
        last = _known(chain[-1], positions)
        if not last.needs:
            return _one_returned(chain[-2], chain[-1], positions)
        if MAKING in {name for name, _ in last.needs.values()}:
            return _not_made(chain[-1], never, positions)
        follower = min(never.intersection(awaited(last, positions)))
        if follower in chain:
            ring = chain[chain.index(follower) :]
            first = ring.index(min(ring))
            return _ring(ring[first:] + ring[:first], positions)
        chain.append(follower)


def _not_made(maker: int, never: set[int], positions: Positions) -> str:
    """Who makes the groups that ``maker`` makes, and where each rank is that never comes to it."""
    one = _known(maker, positions)
    late = {rank for rank in one.needs if positions[rank] is None} | {*awaited(one, positions)}
    lines = [
        f"  rank {rank} "
        + (_absence(rank, never, positions) if rank in late else f"makes {_at(rank, positions)}")
        for rank in sorted(positions)
    ]
    return "\n".join([f"not every rank makes {one.what}:", *lines, SAME_GROUPS])


def _absence(rank: int, never: set[int], positions: Positions) -> str:
    position = positions[rank]
    if position is None or rank not in never:
        return "has not come to it yet"
    if not position.needs:
        return "never does: it has returned"
    waits = _listed(sorted(awaited(position, positions)))
    return f"does not: it waits for rank {waits} in {_at(rank, positions)}"


def _ring(ring: list[int], positions: Positions) -> str:
    lines = [f"ranks {_listed(sorted(ring))} wait for each other for ever:"]
    lines += [
        f"  rank {rank} waits for rank {other} in {_at(rank, positions)}"
        for rank, other in zip(ring, ring[1:] + ring[:1], strict=True)
    ]
    return "\n".join([*lines, ADVICE])


def _one_returned(waiting: int, gone: int, positions: Positions) -> str:
    name, count = _known(waiting, positions).needs[gone]
    made = _known(gone, positions).made.get(name, 0)
    return "\n".join(
        [
            f"rank {gone} has returned and never makes a call for which rank {waiting} waits:",
            f"  rank {waiting} waits for rank {gone} in {_at(waiting, positions)}",
            f"  rank {gone} made {made} of the {count} calls there that rank {waiting} counts on",
            NEVER,
        ]
    )


def _known(rank: int, positions: Positions) -> Position:
    position = positions[rank]
    assert position is not None, "a stuck rank has said where it is"
    return position


def _at(rank: int, positions: Positions) -> str:
    position = _known(rank, positions)
    return f"{position.what}, {position.where}"


def _listed(ranks: list[int]) -> str:
    *most, last = map(str, ranks)
    return f"{', '.join(most)} and {last}" if most else last
