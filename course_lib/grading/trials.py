"""Exercises that run on real ranks: what is drawn, what is expected, and what is looked at.

An exercise declares its inputs, its expected results and its classic mistakes. The engine makes
the launches: on an axis that is the world, on one that is neither the world nor made of
neighbors, on three ranks and on one. In every launch each answer is called twice, with other
values and, in most, other shapes. Results, inputs, traffic and waits are looked at in every call.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from course_lib.grading.answers import NotRight, guarded, shown
from course_lib.grading.compare import agrees, difference
from course_lib.grading.draw import Draw
from course_lib.grading.exercise import Answer, Exercise
from course_lib.grading.ranked import LATER, RESULTS, _starved, _torch_as_it_comes, said
from course_lib.grading.runner import Act, Inputs, Observed, Placement, graded
from course_lib.grading.verdict import CaseResult
from course_lib.grading.wire import WireCall
from course_lib.launch import RankDeadline, RankError, run, warm_up
from course_lib.layout import DEFAULT_ORDER

CALLS = 2  # per launch, with other values and shapes
PATIENCE = 15.0  # seconds for a second try, if the machine was too busy for the first
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
    ``draw`` made them from, for its reference.
    """

    trial: Trial
    ranks: list[dict[str, Any]]
    whole: Any = None
    wanted: Callable[[Given], Mapping[str, Any]] = field(default=lambda given: {}, repr=False)

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
    :class:`Given` that returns a list by rank, or one value for all ranks."""

    message: str
    results: Mapping[str, Callable[[Given], Any]]


@dataclass(frozen=True)
class Look:
    """One more case: ``look`` returns what is wrong in one call on one group, or ""."""

    axis: str
    title: str
    look: Callable[[Given, list[Observed]], str]
    one_rank: bool = False  # whether it is also taken on one rank


Expected = Sequence[tuple[Any, ...]]  # (operation, bytes) or (operation, bytes, peer)


@dataclass(frozen=True)
class OnRanks(Exercise):
    """An exercise whose answer runs on ranks.

    ``draw(trial, draw)`` returns the inputs of each rank of a group by name, or a pair of these
    and of what the reference needs. ``act`` calls the answers in a rank (see
    :mod:`course_lib.grading.runner`). ``expected(given)`` returns the right results by name.
    ``axes`` are the axes of the verdict that these results belong to; a result is a gradient if
    its name begins with "gradient", and a weight if it begins with "weight".

    ``calls(given, rank)`` are the expected network operations of a rank, in order; ``calls_why``
    is a sentence that explains them. ``in_place`` are the inputs that the text asks to change.
    ``terms`` is the length of the sums in a result, which bounds rounding. ``hang`` explains the
    classic mistake that leaves ranks waiting. Results on two ranks and more are judged first;
    everything else counts only if all of these are right. ``later`` are the axes whose results an
    answer without any effect would pass.
    """

    act: Act = field(repr=False, kw_only=True)
    draw: Callable[[Trial, Draw], Any] = field(repr=False, kw_only=True)
    expected: Callable[[Given], Mapping[str, Any]] = field(repr=False, kw_only=True)
    axes: tuple[str, ...] = field(default=("outputs",), kw_only=True)
    later: tuple[str, ...] = field(default=(), kw_only=True)
    trials: tuple[Trial, ...] = field(default=TRIALS, repr=False, kw_only=True)
    mistakes: tuple[Mistake, ...] = field(default=(), repr=False, kw_only=True)
    calls: Callable[[Given, int], Expected] | None = field(default=None, repr=False, kw_only=True)
    calls_why: str = field(default="", repr=False, kw_only=True)
    looks: tuple[Look, ...] = field(default=(), repr=False, kw_only=True)
    refused: tuple[str, ...] = field(default=(), kw_only=True)
    in_place: tuple[str, ...] = field(default=(), kw_only=True)
    terms: int = field(default=16, kw_only=True)
    hang: str = field(default="", kw_only=True)

    @cached_property
    def _cases(self) -> list[_Case]:
        several = [trial for trial in self.trials if trial.n > 1]
        cases = [
            _Case(axis, f"{axis}, {trial.title}", (trial,), self._result_look(axis),
                  first=trial.n > 1 and axis not in self.later)
            for trial in self.trials for axis in self.axes
        ]  # fmt: skip
        if self.calls:
            cases.append(_Case("wire", "operations and bytes", tuple(several), self._operations))
        cases.append(_Case("wire", "every call is waited for", tuple(several), self._waited))
        for look in self.looks:
            trials = self.trials if look.one_rank else tuple(several)
            cases.append(_Case(look.axis, look.title, trials, look.look))
        return cases

    @property
    def cases(self) -> tuple[tuple[str, str], ...]:
        return tuple((case.axis, case.title) for case in self._cases)

    def results(
        self, answers: Sequence[Answer], rng: random.Random, deadline: float
    ) -> list[CaseResult]:
        with _torch_as_it_comes():  # without the settings of the notebook
            warm_up()  # imports must not count against the deadline of the first check
            seen: dict[int, list[Seen]] = {}
            found: dict[str, str] = {}
            try:
                for case in sorted(self._cases, key=lambda case: not case.first):
                    if not case.first and any(found[each.title] for each in self._firsts):
                        found[case.title] = LATER
                        continue
                    found[case.title] = ""  # the launches of a case may fail
                    try:
                        found[case.title] = self._look(case, seen, answers, rng, deadline)
                    except NotRight:
                        del found[case.title]
                        raise
            except NotRight as error:  # another launch would fail in the same way
                return self._broken(found, str(error))
        return [
            CaseResult(case.axis, case.title, found[case.title],
                       judged=found[case.title] != LATER)
            for case in self._cases
        ]  # fmt: skip

    @property
    def _firsts(self) -> list[_Case]:
        return [case for case in self._cases if case.first]

    def _broken(self, found: Mapping[str, str], reason: str) -> list[CaseResult]:
        """Return the cases after a failed launch: only results from before it are judged."""
        judged = {case.title for case in self._firsts if case.title in found}
        first = next(case.title for case in self._cases if case.title not in found)
        return [
            CaseResult(case.axis, case.title, found[case.title] if case.title in judged else reason,
                       judged=case.title in judged or case.title == first)
            for case in self._cases
        ]  # fmt: skip

    def _look(
        self,
        case: _Case,
        seen: dict[int, list[Seen]],
        answers: Sequence[Answer],
        rng: random.Random,
        deadline: float,
    ) -> str:
        for trial in case.trials:
            number = self.trials.index(trial)
            if number not in seen:
                seen[number] = self._launch(trial, rng.randrange(2**31), answers, deadline)
            for each in seen[number]:
                if message := case.look(each.given, each.ranks):
                    return message + each.place
        return ""

    def _launch(
        self, trial: Trial, seed: int, answers: Sequence[Answer], deadline: float
    ) -> list[Seen]:
        groups = range(len(trial.groups))
        drawn = [[self.given(trial, seed, call, group) for group in groups]
                 for call in range(CALLS)]  # fmt: skip
        inputs = [_by_global_rank(trial, given) for given in drawn]
        start = time.monotonic()
        try:
            with guarded(deadline + 5):  # limits the output; the launch enforces the deadline
                made = run(
                    graded, self.act, self.refused, trial.placement, trial.strided, inputs,
                    *answers, n=trial.world, timeout=deadline,
                )  # fmt: skip
        except RankError as error:
            if _starved(error) and time.monotonic() - start < PATIENCE:
                return self._launch(trial, seed, answers, PATIENCE)
            raise NotRight(self._explained(error, trial, deadline)) from None
        except TypeError as error:  # the answer cannot be sent to the ranks
            raise NotRight(str(error)) from None
        return [
            Seen(drawn[call][group], [made[rank][call] for rank in ranks], group, call)
            for call in range(CALLS)
            for group, ranks in enumerate(trial.groups)
        ]

    def given(self, trial: Trial, seed: int, call: int = 0, group: int = 0) -> Given:
        """Return the inputs of one call on one group, drawn from ``seed``.

        Both calls have the same sizes in a trial that is ``strided``, and others elsewhere.
        """
        sizes, values = seed + (0 if trial.strided else call), seed + 97 * call + 7 * group
        drawn = self.draw(trial, Draw(sizes, values, trial.dtype, call))
        ranks, whole = drawn if isinstance(drawn, tuple) else (drawn, None)
        return Given(trial, ranks, whole, self.expected)

    def _explained(self, error: RankError, trial: Trial, deadline: float) -> str:
        if isinstance(error.exception, NotImplementedError):
            return f"{self.names[0]} is not written yet ({error.exception})"
        left_alone = isinstance(error, RankDeadline) and "had returned" in error.report
        hint = f". {self.hang}" if self.hang and left_alone else ""
        if self.hang and "(SIGABRT)" in error.report.splitlines()[0]:
            hint = f". A possible reason: {self.hang}"
        return f"on {trial.world} rank{'s' * (trial.world > 1)} {said(error, deadline)}{hint}"

    def _result_look(self, axis: str) -> Callable[[Given, list[Observed]], str]:
        def look(given: Given, ranks: list[Observed]) -> str:
            if unfit := next((rank.unfit for rank in ranks if rank.unfit), ""):
                return unfit
            if changed := self._unchanged(given, ranks):
                return changed
            for name, wanted in given.expected.items():
                if axis_of(name) == axis:
                    got = [rank.values.get(name) for rank in ranks]
                    if message := described(name, got, wanted, self.terms):
                        return self._mistake(given, ranks, name, message)
            return ""

        return look

    def _mistake(self, given: Given, ranks: list[Observed], name: str, message: str) -> str:
        """Return the message of the classic mistake with these results, or ``message``."""
        if cause := self._waited(given, ranks) or outside(given, ranks):
            return f"{cause} ({message})"
        for mistake in self.mistakes if given.n > 1 else ():
            if name in mistake.results and all(
                self._same(given, ranks, each, compute) for each, compute in mistake.results.items()
            ):
                return f"{mistake.message} ({message})"
        return message

    def _same(
        self, given: Given, ranks: list[Observed], name: str, compute: Callable[[Given], Any]
    ) -> bool:
        try:
            wanted = given.by_rank(compute(given))
            got = [rank.values.get(name) for rank in ranks]
            return not described(name, got, wanted, self.terms)
        except Exception:  # the mistake cannot be made in this trial
            return False

    def _unchanged(self, given: Given, ranks: list[Observed]) -> str:
        for rank, observed in enumerate(ranks):
            for name in observed.changed:
                if name not in self.in_place:
                    return (
                        f"expected the input {name} to be unchanged on rank {rank}, but the "
                        "answer wrote into it: write into a copy"
                    )
        return ""

    def _operations(self, given: Given, ranks: list[Observed]) -> str:
        assert self.calls is not None
        for rank, observed in enumerate(ranks):
            wanted = [WireCall(*call) for call in self.calls(given, rank)]
            if observed.calls != wanted:
                why = f". {self.calls_why}" if self.calls_why else ""
                return (
                    f"expected {_listed(wanted)} from rank {rank}, got "
                    f"{_listed(observed.calls)}{why}"
                )
        return outside(given, ranks)

    def _waited(self, given: Given, ranks: list[Observed]) -> str:
        for rank, observed in enumerate(ranks):
            for call in observed.calls:
                if not call.waited:
                    return (
                        f"rank {rank} started {_one(call)} and never waited for it: call wait() "
                        "on its handle before the result is used and before the answer returns"
                    )
                if call.early:
                    return (
                        f"rank {rank} used a tensor of {_one(call)} in {call.early} before wait() "
                        "had returned: until then the network may still read or write it"
                    )
        return ""


@dataclass(frozen=True)
class _Case:
    axis: str
    title: str
    trials: tuple[Trial, ...]
    look: Callable[[Given, list[Observed]], str]
    first: bool = False


@dataclass(frozen=True)
class Seen:
    """One call on one group of the axis: what was given, and what each rank did."""

    given: Given
    ranks: list[Observed]
    group: int
    call: int

    @property
    def place(self) -> str:
        """Where the first error was found, if it was not in the first call of the world."""
        trial = self.given.trial
        parts = []
        if trial.beside > 1:
            parts.append(f"the axis has the ranks {list(trial.groups[self.group])}")
        if self.call:
            parts.append("in the second call of this launch")
        return f" ({'; '.join(parts)})" if parts else ""


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
    if not isinstance(wanted[0], Tensor):
        return ""
    return difference(name, got, wanted, terms)


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


def _by_global_rank(trial: Trial, groups: Sequence[Given]) -> list[Inputs]:
    inputs: dict[int, Inputs] = {}
    for ranks, given in zip(trial.groups, groups, strict=True):
        inputs |= dict(zip(ranks, given.ranks, strict=True))
    return [inputs[rank] for rank in range(trial.world)]


def _listed(calls: Sequence[WireCall]) -> str:
    many = [_one(call) for call in calls[:4]] + ["..."] * (len(calls) > 4)
    return ", ".join(many) or "no network operation"


def _one(call: WireCall) -> str:
    if call.peer is None:
        return f"{call.op} of {call.payload:,} bytes"
    return (
        f"{call.op} {'to' if call.op == 'send' else 'from'} {call.peer} of {call.payload:,} bytes"
    )


def outside(given: Given, ranks: list[Observed]) -> str:
    """Return which rank used a group that is larger than that of the axis, or ""."""
    for rank, observed in enumerate(ranks):
        for call in observed.calls:
            if given.trial.beside > 1 and len(call.ranks) > given.n:
                return (
                    f"rank {rank} sent to ranks {list(call.ranks)}: expected its calls to use the "
                    f"group of the axis, which has {given.n} ranks; pass group=axis.group"
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
                    f"{sent:,} ({_listed(observed.calls)}): {why}"
                )
        return outside(given, ranks)

    return look


def on_axis(trials: Sequence[Trial], **changed: Any) -> tuple[Trial, ...]:
    """Return the trials with other fields: ``on_axis(TRIALS, size=3)``."""
    return tuple(replace(trial, **changed) for trial in trials)


def ranks_of(given: Given) -> Iterator[int]:
    """Yield the ranks of the group."""
    return iter(range(given.n))
