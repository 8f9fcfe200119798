"""Exercises that run on real ranks: each trial is one launch, each case examines its results."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from course_lib.grading import registry
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
from course_lib.grading.exercise import Answer, Exercise
from course_lib.grading.live import shown_if_slow
from course_lib.grading.refuse import refusing
from course_lib.grading.turns import turn
from course_lib.grading.verdict import AXES, CaseResult
from course_lib.grading.waits import waits
from course_lib.grading.wire import WireCall, WireCalls
from course_lib.launch import Limits, RankDeadline, RankError, begun, run, warm_up
from course_lib.mesh import Mesh, make_mesh
from course_lib.trace import PeakLiveBytes

RESULTS = ("outputs", "gradients", "weights")  # the results; the other axes are costs
DEAF = (
    ". Every rank waits for a message: either no rank has sent one, or the handle that isend "
    "returned was dropped before its wait(), and its message was lost"
)
PASSED = {
    "cpu": " after {:g} s of computing",
    "blocked": ", because every rank that still runs waits for another rank",
    "total": " after {:g} s",
}
LATER = "this counts only after the results are right on two or more ranks"


@dataclass(frozen=True)
class Trial:
    """One launch of ``n`` ranks; ``size`` is a number of the exercise, such as elements or layers.

    ``hang`` explains the mistake if some ranks of this trial wait forever for a rank that has
    returned. After mismatched calls, it is given as a possible reason.
    """

    n: int
    size: int
    hang: str = ""


@dataclass(frozen=True)
class Observed:
    """The observations of one rank: result, calls, peak of live bytes, inputs after the call.

    ``waits`` is the number of waits for its calls.
    """

    value: Any
    calls: list[WireCall]
    peak: int
    inputs: tuple[Any, ...]
    waits: int = 0


@dataclass(frozen=True)
class Seen:
    """The input of a case: the trial, its seed, and the observations of each rank."""

    trial: Trial
    seed: int
    ranks: Sequence[Observed]

    @property
    def values(self) -> list[Any]:
        """The results by rank."""
        return [rank.value for rank in self.ranks]


def unwaited(seen: Seen) -> str:
    """Return which rank did not wait for a message that it started, or "".

    For exercises with messages only. An extra wait for one message can hide a missing wait for
    another; no right answer is rejected.
    """
    for rank, observed in enumerate(seen.ranks):
        messages = sum(call.op in ("send", "recv") for call in observed.calls)
        if observed.waits < messages:
            return (
                f"rank {rank} started {messages} messages and waited for {observed.waits} of "
                "them: until wait() returns, the network still reads the tensor of isend, and the "
                "tensor of irecv is not complete"
            )
    return ""


@dataclass(frozen=True)
class RankCase:
    """One case: ``look`` returns what is wrong in trial number ``trial``, or "".

    ``later`` marks a case of the results that an answer without any effect would pass.
    """

    axis: str
    title: str
    trial: int
    look: Callable[[Seen], str]
    later: bool = False

    def __post_init__(self) -> None:
        assert self.axis in AXES, self.axis


@dataclass(frozen=True)
class Ranked(Exercise):
    """An exercise whose answer runs on ranks.

    ``inputs(trial, rank, seed)`` makes the arguments of one rank; ``act(answers, inputs, mesh)``
    calls the answers there. ``refused`` are library functions ("course_lib.comm:name") that would
    be the answer. Outputs, gradients and weights on two or more ranks are judged first: wire, peak
    and one-rank cases count only if all of these are right.
    """

    trials: tuple[Trial, ...] = field(repr=False)
    inputs: Callable[[Trial, int, int], tuple[Any, ...]] = field(repr=False)
    act: Callable[[Sequence[Answer], tuple[Any, ...], Mesh], Any] = field(repr=False)
    looks: tuple[RankCase, ...] = field(repr=False)
    refused: tuple[str, ...] = ()

    @property
    def cases(self) -> tuple[tuple[str, str], ...]:
        return tuple((case.axis, case.title) for case in self.looks)

    def first(self, case: RankCase) -> bool:
        """Return whether this case must pass before the others count."""
        return case.axis in RESULTS and self.trials[case.trial].n > 1 and not case.later

    def results(
        self, answers: Sequence[Answer], rng: random.Random, deadline: float
    ) -> list[CaseResult]:
        with _torch_as_it_comes():  # without the settings of the notebook
            return self._results(answers, rng, deadline)

    def _results(
        self, answers: Sequence[Answer], rng: random.Random, deadline: float
    ) -> list[CaseResult]:
        warm_up()  # imports must not count as time of the first check
        end = time.monotonic() + CHECK
        seen: dict[int, Seen] = {}
        found: dict[RankCase, str] = {}
        for case in sorted(self.looks, key=lambda case: not self.first(case)):
            if not self.first(case) and any(found[each] for each in found if self.first(each)):
                found[case] = LATER
                continue
            try:
                if case.trial not in seen:
                    left = end - time.monotonic()
                    seed = rng.randrange(2**31)
                    seen[case.trial] = self._launch(case.trial, seed, answers, left, deadline)
                found[case] = case.look(seen[case.trial])
            except NotRight as error:  # the run failed, and another would fail in the same way
                return self._broken(found, case, str(error))
            except TooBusy as error:
                return self._not_judged(found, str(error))
        return [
            CaseResult(case.axis, case.title, found[case], judged=found[case] != LATER)
            for case in self.looks
        ]

    def _broken(self, found: dict[RankCase, str], case: RankCase, reason: str) -> list[CaseResult]:
        """Return the cases after a failed run: only results from before the failure are judged."""
        seen = {each: text for each, text in found.items() if self.first(each)} | {case: reason}
        return [
            CaseResult(each.axis, each.title, seen.get(each, reason), judged=each in seen)
            for each in self.looks
        ]

    def _not_judged(self, found: dict[RankCase, str], reason: str) -> list[CaseResult]:
        """Return the cases when the machine was too busy: those that were judged stay judged."""
        seen = {each: text for each, text in found.items() if text != LATER}
        return [
            CaseResult(each.axis, each.title, seen[each])
            if each in seen
            else CaseResult(each.axis, each.title, reason, judged=False, busy=True)
            for each in self.looks
        ]

    def _launch(
        self, number: int, seed: int, answers: Sequence[Answer], left: float, deadline: float
    ) -> Seen:
        """Run a trial; if the machine was too busy, run it once more, alone and with more time.

        ``left`` are the seconds that the check has left for new launches, ``deadline`` is the CPU
        time of a rank. Raises NotRight with what went wrong, TooBusy after the second try.
        """
        trial = self.trials[number]
        case = next(k for k, look in enumerate(self.looks, 1) if look.trial == number)
        text = f"case {case} of {len(self.looks)}: {self.looks[case - 1].title}"
        for alone in (False, True) if left > 0 else ():
            limits = Limits(deadline, BLOCKED, AGAIN if alone else TOTAL, START)
            try:
                with turn(alone=alone), shown_if_slow(text, CHECK - left), bounded_output():
                    ranks = run(
                        graded_rank, self.id, number, seed, *answers, n=trial.n, limits=limits
                    )
                return Seen(trial, seed, ranks)
            except RankError as error:
                if not _starved(error):
                    raise NotRight(self._reason(error, trial)) from None
            except TypeError as error:  # the answer cannot be sent to the ranks
                raise NotRight(str(error)) from None
        raise TooBusy(BUSY)

    def _reason(self, error: RankError, trial: Trial) -> str:
        """Return what went wrong in a launch, as the message of a verdict."""
        if isinstance(error.exception, NotImplementedError):
            return f"{self.names[0]} is not written yet ({error.exception})"
        left_alone = isinstance(error, RankDeadline) and "had returned" in error.report
        hint = f". {trial.hang}" if trial.hang and left_alone else ""
        if trial.hang and "(SIGABRT)" in error.report.splitlines()[0]:
            hint = f". A possible reason: {trial.hang}"
        return f"on {trial.n} ranks {said(error)}{hint}"


def graded_rank(exercise_id: str, number: int, seed: int, *answers: Answer) -> Observed:
    """Run the answers on the inputs of this rank and measure them. Called in a rank."""
    exercise = registry.find(exercise_id)
    assert isinstance(exercise, Ranked)
    mesh = make_mesh()
    inputs = exercise.inputs(exercise.trials[number], mesh.rank, seed)
    begun()
    with (
        refusing(exercise.refused),
        PeakLiveBytes() as peak,
        WireCalls() as wire,
        waits() as waited,
    ):
        value = exercise.act(answers, inputs, mesh)
    return Observed(value, wire.calls, peak.peak, inputs, waited.count)


def _starved(error: RankError) -> bool:
    """Return whether the machine was too busy to start the ranks, or to let them compute."""
    if not isinstance(error, RankDeadline):
        return False
    return error.limit == "start" or (error.limit == "total" and error.starved)


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


def said(error: RankError) -> str:
    """Return the report of a launch as the sentence of a verdict.

    It has no cell numbers, because the official run numbers cells differently.
    """
    return re.sub(r"\bcell \d+ line", "line", _said(error))


def _said(error: RankError) -> str:
    if isinstance(error, RankDeadline):
        places = "; ".join(error.standing.values())
        waits = [line for line in error.standing.values() if re.search(r"was at: \S*send\b", line)]
        if len(waits) == len(error.standing):
            return (
                "every rank waits in send: a send returns only when the other side receives, so "
                "they wait forever; start both at once, or let half of the ranks receive first "
                f"({places})"
            )
        heard = [line for line in error.standing.values() if re.search(r"was at: \S*recv", line)]
        why = DEAF if len(heard) == len(error.standing) else ""
        passed = PASSED[error.limit].format(error.seconds)
        return f"the answer had not returned{passed}: {places}{why}"
    lines = error.report.splitlines()
    own = [line.strip() for line in lines[1:] if re.match(r"  (cell|line)", line)]
    if "(SIGABRT)" in lines[0]:  # the backend aborts after mismatched calls, without a message
        own.append("the calls of the ranks do not match: compare calls, peers and shapes by rank")
    return ", ".join([lines[0], *own[-1:]])
