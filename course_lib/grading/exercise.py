"""What an exercise is: its cases, its hints, and the wrong answers that it must see through."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from course_lib.grading.answers import (
    DEADLINE,
    NotRight,
    called,
    described,
    guarded,
    shown,
    shown_call,
)
from course_lib.grading.refuse import refusing
from course_lib.grading.verdict import CaseResult, Verdict, failed

Answer = Callable[..., Any]
Answers = Any  # an Answer or, in an exercise worked by hand, a table; a tuple of several names
Instance = dict[str, Any]  # the arguments of one call, by name, in order
DRAWS = 50


def each(answers: Answers) -> tuple[Answer, ...]:
    """The answers as ``check`` takes them, one or several."""
    return answers if isinstance(answers, tuple) else (answers,)


@dataclass(frozen=True)
class Wrong:
    """A wrong answer and words that its message must hold.

    Where ``message`` is given it is told to a learner whose results are those of ``answer``: a
    classic mistake. ``words`` default to it; they are for the attack alone.
    """

    answer: Answers
    message: str = ""
    words: str = ""

    @property
    def wanted(self) -> str:
        """What the verdict on this answer must hold."""
        return self.words or self.message


@dataclass(frozen=True)
class Exercise:
    """What all exercises have. ``names`` are those of the answers, as ``check`` takes them."""

    id: str
    title: str
    names: tuple[str, ...]
    hints: tuple[str, str, str]
    wrong: tuple[Wrong, ...] = field(repr=False)
    right: tuple[Answers, ...] = field(repr=False)
    stub: Answers = field(repr=False)

    @property
    def cases(self) -> tuple[tuple[str, str], ...]:
        """(axis, title) of every case."""
        raise NotImplementedError

    @property
    def total(self) -> int:
        """Number of cases."""
        return len(self.cases)

    def judge(self, answers: Sequence[Any], seed: int, deadline: float = DEADLINE) -> Verdict:
        """The verdict on ``answers``, with parameters drawn from ``seed``. Never raises."""
        try:
            if len(answers) != len(self.names):
                wanted = ", ".join((f'"{self.id}"', *self.names))
                raise NotRight(f"the check cell was changed: it says check({wanted})")
            for name, answer in zip(self.names, answers, strict=True):
                self.usable(name, answer)
            return Verdict(self.id, self.results(answers, random.Random(seed), deadline))
        except NotRight as error:
            return self.failed(str(error))
        except Exception as error:  # values so odd that comparing them fails
            return self.failed(f"what was returned cannot be judged: {described(error)}")

    def usable(self, name: str, answer: Any) -> None:
        """Raises NotRight where ``answer`` is of the wrong kind; by default no function."""
        if not callable(answer):
            raise NotRight(f"{name} is {shown(answer)}; a function is wanted")

    def failed(self, message: str) -> Verdict:
        """The verdict in which nothing passed, for one reason."""
        return failed(self.id, message, self.cases)

    def results(
        self, answers: Sequence[Answer], rng: random.Random, deadline: float
    ) -> list[CaseResult]:
        """Every case in order. Raises NotRight where none can be judged."""
        raise NotImplementedError


@dataclass(frozen=True)
class Case:
    """One thing that counts in an exercise without ranks.

    ``draw`` makes the arguments of a few calls from a seeded generator. The case passes when the
    answer is right in all of them. It must be out of reach of None, of any constant and of the
    stub, so its right results must not all be equal: where they are, it is drawn again.
    """

    title: str
    draw: Callable[[random.Random], list[Instance]]


@dataclass(frozen=True)
class Function(Exercise):
    """An exercise that asks for one function without ranks, judged by ``reference``.

    ``normal`` brings a result to the form in which it is compared and raises NotRight with the
    reason when it is no such result at all, which the verdict tells behind the call. ``refused``
    are library functions ("course_lib.layout:make_layout") that are the answer: they do not run
    while one is judged.
    """

    reference: Answer = field(repr=False)
    drawn: tuple[Case, ...] = field(repr=False)
    normal: Callable[[Any], Any] = field(repr=False, default=lambda value: value)
    refused: tuple[str, ...] = ()

    @property
    def cases(self) -> tuple[tuple[str, str], ...]:
        return tuple(("outputs", case.title) for case in self.drawn)

    def results(
        self, answers: Sequence[Answer], rng: random.Random, deadline: float
    ) -> list[CaseResult]:
        drawn = [self.counting(case, rng) for case in self.drawn]
        with guarded(deadline):
            calls = [[self._call(answers[0], args) for args in instances] for instances in drawn]
        mistake = self._mistake([call for case in calls for call in case])
        results = []
        for case, made in zip(self.drawn, calls, strict=True):
            message = next((call.message for call in made if call.message), "")
            results.append(CaseResult("outputs", case.title, message and f"{mistake}{message}"))
        return results

    def counting(self, case: Case, rng: random.Random) -> list[Instance]:
        """Arguments for ``case`` that None, every constant and the stub get wrong."""
        for _ in range(DRAWS):
            instances = case.draw(rng)
            wanted = [self.normal(self.reference(*args.values())) for args in instances]
            constants: list[Answer] = [lambda *_, value=value: value for value in wanted]
            trivial = [*constants, lambda *_: None, each(self.stub)[0]]
            if not any(self._passes(answer, instances) for answer in trivial):
                return instances
        raise AssertionError(f"{self.id}, {case.title}: a constant passes it, whatever is drawn")

    def _passes(self, answer: Answer, instances: list[Instance]) -> bool:
        return not any(self._call(answer, args).message for args in instances)

    def _call(self, answer: Answer, args: Instance) -> _Call:
        """One call of ``answer`` and what is wrong with its result."""
        given = {name: _copied(value) for name, value in args.items()}
        wanted = self.normal(self.reference(*args.values()))
        try:
            with refusing(self.refused):
                value = called(self.names[0], answer, given)
        except NotRight as error:
            return _Call(args, None, str(error))
        call = shown_call(self.names[0], args)
        for name, copy in given.items():
            if copy is not args[name] and not _equal(copy, args[name]):
                return _Call(args, None, f"{call} changed {name}, which is its caller's: copy it")
        got = self._read(value)
        if isinstance(got, _Unfit):
            return _Call(args, got, f"{call}: {got.reason}")
        if _equal(got, wanted):
            return _Call(args, got)
        said = f"    {call}\n    gave {shown(got)};\n    right is {shown(wanted)}"
        return _Call(args, got, said)

    def _read(self, value: Any) -> Any:
        """``value`` in the form in which it is compared, or why it has none."""
        try:
            return self.normal(value)
        except NotRight as error:
            return _Unfit(str(error))

    def _mistake(self, calls: list[_Call]) -> str:
        """The classic mistake that gives the results of all ``calls``, if there is one."""
        for wrong in self.wrong:
            if wrong.message and all(self._same(each(wrong.answer)[0], call) for call in calls):
                return f"{wrong.message}\n"
        return ""

    def _same(self, answer: Answer, call: _Call) -> bool:
        try:
            return _equal(self._read(answer(*call.args.values())), call.got)
        except Exception:
            return False


@dataclass(frozen=True)
class _Unfit:
    """A result that cannot be compared: two of them are the same mistake for the same reason."""

    reason: str


@dataclass(frozen=True)
class _Call:
    """One call of an answer: its arguments, its result, what is wrong with it."""

    args: Instance
    got: Any
    message: str = ""


def _copied(value: Any) -> Any:
    """A copy of a plain container: an answer may write into what it is given."""
    return type(value)(value) if isinstance(value, dict | list) else value


def _equal(got: Any, wanted: Any) -> bool:
    try:
        return bool(got == wanted)
    except Exception:
        return False
