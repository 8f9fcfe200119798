"""Exercises that run on real ranks: the launches, the cases, and what is looked at in each."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from course_lib.grading.answers import (
    AGAIN,
    BLOCKED,
    BUSY,
    CHECK,
    START,
    TOTAL,
    NotRight,
    TooBusy,
    bounded_output,
)
from course_lib.grading.draw import Draw
from course_lib.grading.exercise import Answer, Exercise
from course_lib.grading.failures import places, said, starved
from course_lib.grading.live import shown_if_slow
from course_lib.grading.runner import Act, Inputs, Observed, graded
from course_lib.grading.trials import (
    TRIALS,
    Expected,
    Given,
    Look,
    Mistake,
    Trial,
    axis_of,
    described,
    listed,
    one,
    outside,
)
from course_lib.grading.turns import turn
from course_lib.grading.verdict import CaseResult
from course_lib.grading.wire import WireCall
from course_lib.launch import Limits, RankDeadline, RankError, run, warm_up

CALLS = 2  # per launch, with other values and shapes
TIMES = ("", "in the second call of this launch",
         "in a third call, which gets the tensors of the second with other values")  # fmt: skip
LATER = "this counts only after the results are right on two or more ranks"


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
        groups, calls = range(len(trial.groups)), range(CALLS + (trial == self._main[0]))
        drawn = [[self.given(trial, seed, call, group) for group in groups] for call in calls]
        inputs = [_by_global_rank(trial, given) for given in drawn]
        for alone in (False, True) if left > 0 else ():
            limits = Limits(deadline, BLOCKED, AGAIN if alone else TOTAL, START)
            try:
                with turn(alone=alone), bounded_output():
                    made = run(
                        graded, self.act, self.refused, trial.placement, trial.strided, inputs,
                        *answers, n=trial.world, limits=limits,
                    )  # fmt: skip
            except RankError as error:
                if starved(error):
                    continue
                raise NotRight(self._explained(error, trial)) from None
            except TypeError as error:  # the answer cannot be sent to the ranks
                raise NotRight(str(error)) from None
            return [
                Seen(drawn[call][group], [made[rank][call] for rank in ranks], group, call)
                for call in calls
                for group, ranks in enumerate(trial.groups)
            ]
        raise TooBusy(BUSY)

    def given(self, trial: Trial, seed: int, call: int = 0, group: int = 0) -> Given:
        """Return the inputs of one call on one group, drawn from ``seed``.

        Calls 0 and 1 have the same sizes in a trial that is ``strided``, and others elsewhere;
        call 2 has the sizes of call 1.
        """
        kind = min(call, 1)
        sizes, values = seed + (0 if trial.strided else kind), seed + 97 * call + 7 * group
        drawn = self.draw(trial, Draw(sizes, values, trial.dtype, kind, 1 + trial.strided))
        ranks, whole = drawn if isinstance(drawn, tuple) else (drawn, None)
        return Given(trial, ranks, whole, self.expected, trial.groups[group])

    def _explained(self, error: RankError, trial: Trial) -> str:
        if isinstance(error.exception, NotImplementedError):
            return f"{self.names[0]} is not written yet ({error.exception})"
        apart = isinstance(error, RankDeadline) and len(places(error)) > 1
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
                    f"expected {listed(wanted)} from rank {rank}, got {listed(observed.calls)}{why}"
                )
        return outside(given, ranks)

    def _waited(self, given: Given, ranks: list[Observed]) -> str:
        for rank, observed in enumerate(ranks):
            for call in observed.calls:
                if not call.waited:
                    return (
                        f"rank {rank} started {one(call)} and never waited for it: call wait() "
                        "on its handle before the result is used and before the answer returns"
                    )
                if call.early:
                    return (
                        f"rank {rank} used a tensor of {one(call)} in {call.early} before wait() "
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
            parts.append(TIMES[self.call])
        return f" ({'; '.join(parts)})" if parts else ""


def _by_global_rank(trial: Trial, groups: Sequence[Given]) -> list[Inputs]:
    inputs: dict[int, Inputs] = {}
    for ranks, given in zip(trial.groups, groups, strict=True):
        inputs |= dict(zip(ranks, given.ranks, strict=True))
    return [inputs[rank] for rank in range(trial.world)]


@contextmanager
def _torch_as_it_comes() -> Iterator[None]:
    """Use torch's defaults in the body, and restore the learner's settings afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.enable_grad(), torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)
