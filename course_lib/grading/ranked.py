"""Exercises that run on real ranks: each trial is one launch, each case a look at what it gave."""

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
from course_lib.grading.answers import NotRight, guarded
from course_lib.grading.exercise import Answer, Exercise
from course_lib.grading.refuse import refusing
from course_lib.grading.verdict import AXES, CaseResult
from course_lib.grading.waits import waits
from course_lib.grading.wire import WireCall, WireCalls
from course_lib.launch import RankDeadline, RankError, run, warm_up
from course_lib.mesh import Mesh, make_mesh
from course_lib.trace import PeakLiveBytes

RESULTS = ("outputs", "gradients", "weights")  # what an answer is for; the other axes say how
PATIENCE = 15.0  # seconds of a second try, where the machine was too busy for the first
DEAF = (
    ". Every rank waits for a message: either nobody has sent one, or what isend returned was "
    "dropped before its wait(), and the message with it"
)
LATER = "this counts only once the results are right on two ranks or more"


@dataclass(frozen=True)
class Trial:
    """One launch: ``n`` ranks; ``size`` is what the exercise makes of it (elements, layers).

    ``hang`` is the mistake to name where some ranks of this trial wait for ever for one that is
    done; where all wait, the machine may just be slow. Where calls met that do not fit together it
    is told as what may be the reason.
    """

    n: int
    size: int
    hang: str = ""


@dataclass(frozen=True)
class Observed:
    """What one rank gave: its result, its calls, its peak of live bytes, its inputs afterwards.

    ``waits`` is how often it waited for one of its calls.
    """

    value: Any
    calls: list[WireCall]
    peak: int
    inputs: tuple[Any, ...]
    waits: int = 0


@dataclass(frozen=True)
class Seen:
    """All that a case may look at: the trial, its seed, and what each rank gave."""

    trial: Trial
    seed: int
    ranks: Sequence[Observed]

    @property
    def values(self) -> list[Any]:
        """The results by rank."""
        return [rank.value for rank in self.ranks]


def unwaited(seen: Seen) -> str:
    """For exercises made of messages alone: which rank left one that it had begun to itself.

    A wait too many for one message can hide one too few for another; no right answer is refused.
    """
    for rank, observed in enumerate(seen.ranks):
        messages = sum(call.op in ("send", "recv") for call in observed.calls)
        if observed.waits < messages:
            return (
                f"rank {rank} began {messages} messages and waited for {observed.waits} of them: "
                "until wait() returns the network still reads what isend was given, and has not "
                "filled what irecv was given"
            )
    return ""


@dataclass(frozen=True)
class RankCase:
    """One thing that counts: ``look`` says what is wrong in trial number ``trial``, or "".

    ``later`` is for a case of the results that an answer which does nothing would pass.
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
    calls the answers there. ``refused`` are library functions ("course_lib.comm:name") that are
    the answer themselves. Outputs, gradients and weights on two ranks or more are looked at first:
    only when all of them are right do wire, peak and one-rank cases count.
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
        """Whether this case must pass before the others count."""
        return case.axis in RESULTS and self.trials[case.trial].n > 1 and not case.later

    def results(
        self, answers: Sequence[Answer], rng: random.Random, deadline: float
    ) -> list[CaseResult]:
        with _torch_as_it_comes():  # whatever the notebook has set
            return self._results(answers, rng, deadline)

    def _results(
        self, answers: Sequence[Answer], rng: random.Random, deadline: float
    ) -> list[CaseResult]:
        warm_up()  # the first check in a kernel is not to pay for imports with its deadline
        end = time.monotonic() + deadline
        seen: dict[int, Seen] = {}
        found: dict[RankCase, str] = {}
        for case in sorted(self.looks, key=lambda case: not self.first(case)):
            if not self.first(case) and any(found[each] for each in found if self.first(each)):
                found[case] = LATER
                continue
            try:
                if case.trial not in seen:
                    left = max(end - time.monotonic(), 1.0)
                    seed = rng.randrange(2**31)
                    seen[case.trial] = self._launch(case.trial, seed, answers, left, deadline)
                found[case] = case.look(seen[case.trial])
            except NotRight as error:  # the run broke: another would break in the same way
                return self._broken(found, case, str(error))
        return [
            CaseResult(case.axis, case.title, found[case], judged=found[case] != LATER)
            for case in self.looks
        ]

    def _broken(self, found: dict[RankCase, str], case: RankCase, reason: str) -> list[CaseResult]:
        """What was seen before the run broke counts only if it is a result; the rest waits."""
        seen = {each: text for each, text in found.items() if self.first(each)} | {case: reason}
        return [
            CaseResult(each.axis, each.title, seen.get(each, reason), judged=each in seen)
            for each in self.looks
        ]

    def _launch(
        self, number: int, seed: int, answers: Sequence[Answer], left: float, deadline: float
    ) -> Seen:
        trial = self.trials[number]
        try:
            with guarded(left + 5):  # prints are bounded; the launch holds the deadline itself
                ranks = run(graded_rank, self.id, number, seed, *answers, n=trial.n, timeout=left)
        except RankError as error:
            if _starved(error) and left < PATIENCE:
                return self._launch(number, seed, answers, PATIENCE, PATIENCE)
            if isinstance(error.exception, NotImplementedError):
                raise NotRight(f"{self.names[0]} is not written yet ({error.exception})") from None
            left_alone = isinstance(error, RankDeadline) and "had returned" in error.report
            hint = f". {trial.hang}" if trial.hang and left_alone else ""
            if trial.hang and "(SIGABRT)" in error.report.splitlines()[0]:
                hint = f". The reason may be this. {trial.hang}"
            raise NotRight(f"on {trial.n} ranks {said(error, deadline)}{hint}") from None
        except TypeError as error:  # an answer that cannot travel
            raise NotRight(str(error)) from None
        return Seen(trial, seed, ranks)


def graded_rank(exercise_id: str, number: int, seed: int, *answers: Answer) -> Observed:
    """Runs in a rank: the answers on this rank's inputs, with all that is measured."""
    exercise = registry.find(exercise_id)
    assert isinstance(exercise, Ranked)
    mesh = make_mesh()
    inputs = exercise.inputs(exercise.trials[number], mesh.rank, seed)
    with (
        refusing(exercise.refused),
        PeakLiveBytes() as peak,
        WireCalls() as wire,
        waits() as waited,
    ):
        value = exercise.act(answers, inputs, mesh)
    return Observed(value, wire.calls, peak.peak, inputs, waited.count)


def _starved(error: RankError) -> bool:
    """Whether no rank came as far as to say where it stands: the machine was too busy for them."""
    places = error.standing.values() if isinstance(error, RankDeadline) else []
    return bool(places) and all("unknown (no answer)" in place for place in places)


@contextmanager
def _torch_as_it_comes() -> Iterator[None]:
    """torch's own defaults inside, and what the learner had set afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.enable_grad(), torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


def said(error: RankError, deadline: float) -> str:
    """The report of a launch as the sentence of a verdict.

    Cells are not numbered in it: the official run does not number them as the notebook does.
    """
    return re.sub(r"\bcell \d+ line", "line", _said(error, deadline))


def _said(error: RankError, deadline: float) -> str:
    if isinstance(error, RankDeadline):
        places = "; ".join(error.standing.values())
        waits = [line for line in error.standing.values() if re.search(r"was at: \S*send", line)]
        if len(waits) == len(error.standing):
            return (
                "every rank waits in send: a send returns only when the other side receives, so "
                "they wait for ever; post both at once, or let half of the ranks receive first "
                f"({places})"
            )
        heard = [line for line in error.standing.values() if re.search(r"was at: \S*recv", line)]
        why = DEAF if len(heard) == len(error.standing) else ""
        return f"the answer had not returned after {deadline:g} s: {places}{why}"
    lines = error.report.splitlines()
    own = [line.strip() for line in lines[1:] if re.match(r"  (cell|line)", line)]
    if "(SIGABRT)" in lines[0]:  # what the backend does then, and a rank's own words do not say it
        own.append("calls met that do not fit together: compare calls, peers and shapes by rank")
    return ", ".join([lines[0], *own[-1:]])
