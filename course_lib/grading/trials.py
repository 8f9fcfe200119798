"""Exercises that run on real ranks: what is drawn, what is expected, and what is looked at.

An exercise declares its inputs, its expected results and its classic mistakes. The engine makes
the launches: on an axis that is the world, on one that is neither the world nor made of
neighbors, on three ranks and on one. In every launch each answer is called twice, with other
values and, in most, other shapes; in one launch a third time, with the tensors of the second
call and other values in them. Results, inputs, traffic and waits are looked at in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from course_lib.grading.answers import shown
from course_lib.grading.compare import agrees, difference
from course_lib.grading.runner import Observed, Placement
from course_lib.grading.wire import WireCall
from course_lib.layout import DEFAULT_ORDER

RESULTS = ("outputs", "gradients", "weights")  # the axes of results; the others are costs


COUNTS = {1: "one rank", 2: "two ranks", 3: "three ranks", 4: "four ranks", 6: "six ranks"}


@dataclass(frozen=True)
class Trial:
    """One launch. The axis of the exercise has ``n`` ranks.

    ``beside`` axes of that size lie next to each other: with n=2 and beside=2 the groups are 0, 2
    and 1, 3. ``strided`` gives inputs with gaps between their elements. ``size`` is a number of
    the exercise, such as layers. ``order`` and ``sizes`` replace the mesh, for exercises about
    several axes; ``axis`` is then the axis that the exercise gets.
    """

    n: int
    size: int = 0
    beside: int = 1
    dtype: torch.dtype = torch.float32
    strided: bool = False
    order: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    axis: str = "tp"
    name: str = ""

    @property
    def world(self) -> int:
        """The number of ranks to launch."""
        return self.n * self.beside

    @property
    def placement(self) -> Placement:
        """The mesh of the trial."""
        if self.order:
            return Placement(self.order, self.sizes, self.axis)
        if self.beside == 1:
            return Placement(DEFAULT_ORDER, {}, "world")
        return Placement("dp-tp", {"dp": self.beside, "tp": self.n}, "tp")

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The global ranks of each group of the axis."""
        if self.order:
            return [tuple(range(self.world))]
        return [tuple(range(first, self.world, self.beside)) for first in range(self.beside)]

    @property
    def title(self) -> str:
        """The trial in the words of a case."""
        if self.name:
            return self.name
        if self.beside == 1:
            return COUNTS[self.n]
        first, second, *_ = self.groups
        return f"groups {', '.join(map(str, first))} and {', '.join(map(str, second))}"


TRIALS = (
    Trial(2),
    Trial(2, beside=2, dtype=torch.float64, strided=True),
    Trial(3),
    Trial(1),
)


@dataclass
class Given:
    """One call on one group of the axis: the inputs by rank, and what is expected of it.

    ``given["x"]`` are the inputs named x, by rank in the group. ``whole`` is what the exercise's
    ``draw`` made them from, for its reference. ``group`` are the global ranks.
    """

    trial: Trial
    ranks: list[dict[str, Any]]
    whole: Any = None
    wanted: Callable[[Given], Mapping[str, Any]] = field(default=lambda given: {}, repr=False)
    group: tuple[int, ...] = ()

    @property
    def n(self) -> int:
        """The number of ranks of the group."""
        return len(self.ranks)

    def __getitem__(self, name: str) -> list[Any]:
        return [rank[name] for rank in self.ranks]

    @cached_property
    def expected(self) -> dict[str, list[Any]]:
        """The right results by name, then by rank."""
        return {name: self.by_rank(value) for name, value in self.wanted(self).items()}

    def by_rank(self, value: Any) -> list[Any]:
        """Return a list as it is, and anything else once per rank."""
        return value if isinstance(value, list) else [value] * self.n


@dataclass(frozen=True)
class Mistake:
    """A classic mistake. ``results`` gives, by name, what it computes: a function of a
    :class:`Given` that returns a list by rank, or one value for all ranks. If ``unset``, NaN in
    these stands for memory that the mistake leaves unset, which may have any value."""

    message: str
    results: Mapping[str, Callable[[Given], Any]]
    unset: bool = False


@dataclass(frozen=True)
class Look:
    """One more case: ``look`` returns what is wrong in one call on one group, or ""."""

    axis: str
    title: str
    look: Callable[[Given, list[Observed]], str]
    one_rank: bool = False  # whether it is also taken on one rank


Expected = Sequence[tuple[Any, ...]]  # (operation, bytes) or (operation, bytes, peer)


def axis_of(name: str) -> str:
    """Return the axis of the verdict that a result belongs to."""
    starts = {"gradient": "gradients", "weight": "weights"}
    axis = next((axis for start, axis in starts.items() if name.startswith(start)), "outputs")
    assert axis in RESULTS
    return axis


def described(name: str, got: list[Any], wanted: list[Any], terms: int) -> str:
    """Describe what is wrong with a result by rank; return "" if all are right."""
    for rank, (value, right) in enumerate(zip(got, wanted, strict=True)):
        if not isinstance(right, Tensor):
            if not equal(value, right, terms):
                return f"expected {name} {shown(right)} on rank {rank}, got {shown(value)}"
        elif value is None and name.startswith("gradient of "):
            leaf = name.removeprefix("gradient of ")
            return f"no gradient reached {leaf} on rank {rank}: autograd found no path to it"
        elif value is None:
            return f"expected {name} on rank {rank} to be a tensor, got None"
    absent = torch.zeros(())  # a rank without this result
    pairs = [(value, right) if isinstance(right, Tensor) else (absent, absent)
             for value, right in zip(got, wanted, strict=True)]  # fmt: skip
    return difference(name, [a for a, _ in pairs], [b for _, b in pairs], terms)


def equal(got: Any, wanted: Any, terms: int) -> bool:
    """Return whether two values are equal: tensors up to rounding, containers item by item."""
    if isinstance(wanted, Tensor):
        return agrees(got, wanted, terms)
    if isinstance(wanted, Mapping):
        keys = isinstance(got, Mapping) and set(got) == set(wanted)
        return keys and all(equal(got[key], wanted[key], terms) for key in wanted)
    if isinstance(wanted, list | tuple):
        many = isinstance(got, list | tuple) and len(got) == len(wanted)
        return many and all(equal(a, b, terms) for a, b in zip(got, wanted, strict=True))
    if isinstance(wanted, float) and not isinstance(got, str | bool | None):
        try:
            return abs(float(got) - wanted) <= 1e-6 * max(abs(wanted), 1e-6)
        except (TypeError, ValueError):
            return False
    try:
        return bool(got == wanted)
    except Exception:
        return False


def listed(calls: Sequence[WireCall]) -> str:
    """Return the calls in words; equal ones in a row are counted."""
    runs = [(call, len(list(same))) for call, same in groupby(calls, key=one)]
    many = [call + f" ({count} times)" * (count > 1) for call, count in runs[:4]]
    return ", ".join(many + ["..."] * (len(runs) > 4)) or "no network operation"


def one(call: WireCall) -> str:
    if call.op == "barrier":
        return "barrier"
    if call.peer is None:
        return f"{call.op} of {call.payload:,} bytes"
    return (
        f"{call.op} {'to' if call.op == 'send' else 'from'} {call.peer} of {call.payload:,} bytes"
    )


def outside(given: Given, ranks: list[Observed]) -> str:
    """Return which rank used a group larger than the axis, or ""."""
    for rank, observed in enumerate(ranks):
        for call in observed.calls:
            if given.trial.beside > 1 and len(call.ranks) > given.n:
                return (
                    f"rank {rank} sent to ranks {list(call.ranks)}: expected its calls to use the "
                    f"group of the axis, which has {given.n} ranks; pass group=axis.group, or the "
                    "group that the answer is given"
                )
    return ""


def at_most(limit: Callable[[Given, int], int], why: str) -> Callable[..., str]:
    """Return a look at the payload of a rank's calls, which may be ``limit(given, rank)`` bytes."""

    def look(given: Given, ranks: list[Observed]) -> str:
        for rank, observed in enumerate(ranks):
            sent, most = sum(call.payload for call in observed.calls), limit(given, rank)
            if sent > most:
                return (
                    f"expected rank {rank} to hand at most {most:,} bytes to the network, got "
                    f"{sent:,} ({listed(observed.calls)}): {why}"
                )
        return outside(given, ranks)

    return look


def on_axis(trials: Sequence[Trial], **changed: Any) -> tuple[Trial, ...]:
    """Return the trials with other fields: ``on_axis(TRIALS, size=3)``."""
    return tuple(replace(trial, **changed) for trial in trials)


def ranks_of(given: Given) -> Iterator[int]:
    """Yield the ranks of the group."""
    return iter(range(given.n))
