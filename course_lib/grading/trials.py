"""Exercises that run on real ranks: what is drawn, what is expected, and what is looked at.

An exercise declares its inputs, its expected results and its classic mistakes. The engine makes
the launches: on an axis that is the world, on one that is neither the world nor made of
neighbors, on three ranks and on one. In every launch each answer is called twice, with other
values and, in most, other shapes. Results, inputs, traffic and waits are looked at in every call.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from course_lib.grading.answers import (
    BLOCKED,
    BUSY,
    CHECK,
    START,
    TOTAL,
    NotRight,
    TooBusy,
    bounded_output,
    shown,
)
from course_lib.grading.compare import agrees, difference
from course_lib.grading.draw import Draw
from course_lib.grading.exercise import Answer, Exercise
from course_lib.grading.live import shown_if_slow
from course_lib.grading.ranked import LATER, RESULTS, _starved, _torch_as_it_comes, said
from course_lib.grading.runner import Act, Inputs, Observed, Placement, graded
from course_lib.grading.turns import turn
from course_lib.grading.verdict import CaseResult
from course_lib.grading.wire import WireCall
from course_lib.launch import Limits, RankDeadline, RankError, run, warm_up
from course_lib.layout import DEFAULT_ORDER

CALLS = 2  # per launch, with other values and shapes
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


@dataclass(frozen=True)
class OnRanks(Exercise):
    """An exercise whose answer runs on ranks.

    ``draw(trial, draw)`` returns the inputs of each rank of a group by name, or a pair of these
    and of what the reference needs. ``act`` calls the answers in a rank (see
    :mod:`course_lib.grading.runner`). ``expected(given)`` returns the right results by name.
    ``axes`` are the axes of the verdict that these results belong to; a result is a gradient if
    its name begins with "gradient", and a weight if it begins with "weight".

    ``calls(given, rank)`` are the expected network operations of a rank, in order; ``calls_why``
    is a sentence that explains them. Results count only if no operation but those in ``only`` was
    used, if it is given. ``in_place`` are the inputs that the text asks to change.
    ``terms`` is the length of the sums in a result, which bounds rounding. ``hang`` explains the
    classic mistake that leaves ranks waiting. ``explain(given, ranks, name)`` returns a sentence
    about the wrong result ``name`` that no mistake explains, or "". Results on two ranks and more
    are judged first; everything else counts only if all of these are right. ``later`` are the axes
    whose results an answer without any effect would pass.
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
    only: tuple[str, ...] = field(default=(), kw_only=True)
    in_place: tuple[str, ...] = field(default=(), kw_only=True)
    terms: int = field(default=16, kw_only=True)
    hang: str = field(default="", kw_only=True)
    explain: Callable[[Given, list[Observed], str], str] | None = field(
        default=None, repr=False, kw_only=True
    )

    @cached_property
    def _main(self) -> tuple[Trial, ...]:
        """The trials that are judged first: on several ranks, or all where each has one rank."""
        return tuple(trial for trial in self.trials if trial.n > 1) or self.trials

    @cached_property
    def _cases(self) -> list[_Case]:
        cases = [
            _Case(axis, f"{axis}, {trial.title}", (trial,), self._result_look(axis),
                  first=trial in self._main and axis not in self.later)
            for trial in self.trials for axis in self.axes
        ]  # fmt: skip
        if self.calls:
            cases.append(_Case("wire", "operations and bytes", self._main, self._operations))
        if self._main[0].n > 1:
            cases.append(_Case("wire", "every call is waited for", self._main, self._waited))
        for look in self.looks:
            trials = self.trials if look.one_rank else self._main
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
            end = time.monotonic() + CHECK
            try:
                for case in sorted(self._cases, key=lambda case: not case.first):
                    if not case.first and any(found[each.title] for each in self._firsts):
                        found[case.title] = LATER
                        continue
                    found[case.title] = self._look(case, seen, answers, rng, deadline, end)
            except NotRight as error:  # another launch would fail in the same way
                return self._broken(found, str(error))
            except TooBusy as error:
                return self._not_judged(found, str(error))
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

    def _not_judged(self, found: Mapping[str, str], reason: str) -> list[CaseResult]:
        """Return the cases when the machine was too busy: those that were judged stay judged."""
        seen = {title: text for title, text in found.items() if text != LATER}
        return [
            CaseResult(case.axis, case.title, seen[case.title])
            if case.title in seen
            else CaseResult(case.axis, case.title, reason, judged=False, busy=True)
            for case in self._cases
        ]

    def _look(
        self,
        case: _Case,
        seen: dict[int, list[Seen]],
        answers: Sequence[Answer],
        rng: random.Random,
        deadline: float,
        end: float,
    ) -> str:
        text = f"case {self._cases.index(case) + 1} of {self.total}: {case.title}"
        for trial in case.trials:
            number = self.trials.index(trial)
            if number not in seen:
                left = end - time.monotonic()
                with shown_if_slow(text, CHECK - left):
                    seed = rng.randrange(2**31)
                    seen[number] = self._launch(trial, seed, answers, deadline, left)
            for each in seen[number]:
                if message := case.look(each.given, each.ranks):
                    return message + each.place
        return ""

    def _launch(
        self, trial: Trial, seed: int, answers: Sequence[Answer], deadline: float, left: float
    ) -> list[Seen]:
        """Run a trial; if the machine was too busy, run it once more, alone and with more time.

        ``left`` are the seconds that the check has left for new launches, ``deadline`` is the CPU
        time of a rank. Raises NotRight with what went wrong, TooBusy after the second try.
        """
        groups = range(len(trial.groups))
        drawn = [[self.given(trial, seed, call, group) for group in groups]
                 for call in range(CALLS)]  # fmt: skip
        inputs = [_by_global_rank(trial, given) for given in drawn]
        for alone in (False, True) if left > 0 else ():
            limits = Limits(deadline, BLOCKED, TOTAL * (1 + alone), START)
            try:
                with turn(alone=alone), bounded_output():
                    made = run(
                        graded, self.act, self.refused, trial.placement, trial.strided, inputs,
                        *answers, n=trial.world, limits=limits,
                    )  # fmt: skip
            except RankError as error:
                if _starved(error):
                    continue
                raise NotRight(self._explained(error, trial)) from None
            except TypeError as error:  # the answer cannot be sent to the ranks
                raise NotRight(str(error)) from None
            return [
                Seen(drawn[call][group], [made[rank][call] for rank in ranks], group, call)
                for call in range(CALLS)
                for group, ranks in enumerate(trial.groups)
            ]
        raise TooBusy(BUSY)

    def given(self, trial: Trial, seed: int, call: int = 0, group: int = 0) -> Given:
        """Return the inputs of one call on one group, drawn from ``seed``.

        Both calls have the same sizes in a trial that is ``strided``, and others elsewhere.
        """
        sizes, values = seed + (0 if trial.strided else call), seed + 97 * call + 7 * group
        drawn = self.draw(trial, Draw(sizes, values, trial.dtype, call, 1 + trial.strided))
        ranks, whole = drawn if isinstance(drawn, tuple) else (drawn, None)
        return Given(trial, ranks, whole, self.expected, trial.groups[group])

    def _explained(self, error: RankError, trial: Trial) -> str:
        if isinstance(error.exception, NotImplementedError):
            return f"{self.names[0]} is not written yet ({error.exception})"
        apart = isinstance(error, RankDeadline) and len(_places(error)) > 1
        hint = f". {self.hang}" if self.hang and apart else ""
        if self.hang and "(SIGABRT)" in error.report.splitlines()[0]:
            hint = f". A possible reason: {self.hang}"
        where = f"on {trial.world} rank{'s' * (trial.world > 1)} " if self._main[0].n > 1 else ""
        return f"{where}{said(error)}{hint}"

    def _result_look(self, axis: str) -> Callable[[Given, list[Observed]], str]:
        def look(given: Given, ranks: list[Observed]) -> str:
            if unfit := next((rank.unfit for rank in ranks if rank.unfit), ""):
                return unfit
            if changed := self._unchanged(given, ranks) or self._others(ranks):
                return changed
            for name, wanted in given.expected.items():
                if axis_of(name) == axis:
                    got = [rank.values.get(name) for rank in ranks]
                    if message := described(name, got, wanted, self.terms):
                        if given.n == 1:  # there is no other rank
                            message = re.sub(r" (on|from) rank 0\b,?", "", message)
                        return self._mistake(given, ranks, name, message)
            return ""

        return look

    def _mistake(self, given: Given, ranks: list[Observed], name: str, message: str) -> str:
        """Return the message of the classic mistake with these results, or ``message``."""
        if cause := self._waited(given, ranks) or outside(given, ranks):
            return f"{cause} ({message})"
        for mistake in self.mistakes if given.trial in self._main else ():
            if name in mistake.results and all(
                self._same(given, ranks, each, compute, mistake.unset)
                for each, compute in mistake.results.items()
            ):
                return f"{mistake.message} ({message})"
        if self.explain and given.n > 1 and (why := self.explain(given, ranks, name)):
            return f"{why} ({message})"
        return message

    def _same(
        self,
        given: Given,
        ranks: list[Observed],
        name: str,
        compute: Callable[[Given], Any],
        unset: bool,
    ) -> bool:
        try:
            wanted = given.by_rank(compute(given))
            got: list[Any] = [rank.values.get(name) for rank in ranks]
            if unset:
                got = [torch.where(w.isnan(), w, g) for g, w in zip(got, wanted, strict=True)]
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

    def _others(self, ranks: list[Observed]) -> str:
        for rank, observed in enumerate(ranks):
            others = sorted({call.op for call in observed.calls} - set(self.only))
            if self.only and others:
                return (
                    f"rank {rank} called {', '.join(others)}: expected {' and '.join(self.only)} "
                    "only"
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


def _places(error: RankDeadline) -> set[str]:
    """Return the different places at which the ranks were, without their source lines."""
    return {text.split("was at: ")[-1].split(",")[0] for text in error.standing.values()}


def _by_global_rank(trial: Trial, groups: Sequence[Given]) -> list[Inputs]:
    inputs: dict[int, Inputs] = {}
    for ranks, given in zip(trial.groups, groups, strict=True):
        inputs |= dict(zip(ranks, given.ranks, strict=True))
    return [inputs[rank] for rank in range(trial.world)]


def _listed(calls: Sequence[WireCall]) -> str:
    """Return the calls in words; equal ones in a row are counted."""
    runs = [(call, len(list(same))) for call, same in groupby(calls, key=_one)]
    many = [call + f" ({count} times)" * (count > 1) for call, count in runs[:4]]
    return ", ".join(many + ["..."] * (len(runs) > 4)) or "no network operation"


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
