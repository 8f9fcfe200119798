"""An exercise: its cases, and the wrong answers that it must reject."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from typing import Any

from course_lib.grading.answers import (
    DEADLINE,
    NotRight,
    TooBusy,
    called,
    described,
    guarded,
    shown,
    shown_call,
)
from course_lib.grading.refuse import refusing
from course_lib.grading.verdict import CaseResult, Verdict, failed, too_busy

Answer = Callable[..., Any]
Answers = Any  # an Answer, a table in an exercise worked by hand, or a tuple of several answers
Instance = dict[str, Any]  # the arguments of one call, by name, in order
DRAWS = 50
ROOM = 160  # characters of a result in a message
RELATIVE, ABSOLUTE = 1e-6, 1e-9  # rounding of a float; a mistake is much larger


def each(answers: Answers) -> tuple[Answer, ...]:
    """Return the answers as a tuple, as ``check`` takes them."""
    return answers if isinstance(answers, tuple) else (answers,)


@dataclass(frozen=True)
class Wrong:
    """A wrong answer, and words that its verdict must contain.

    If ``message`` is given, a learner with the same results as ``answer`` sees it: it explains a
    classic mistake. ``words`` default to ``message``; only the attack uses them.
    """

    answer: Answers
    message: str = ""
    words: str = ""

    @property
    def wanted(self) -> str:
        """Words that the verdict on this answer must contain."""
        return self.words or self.message


@dataclass(frozen=True)
class Exercise:
    """The base of all exercises. ``names`` are the names of the answers, in ``check``'s order."""

    id: str
    title: str
    names: tuple[str, ...]
    wrong: tuple[Wrong, ...] = field(default=(), repr=False, kw_only=True)
    right: tuple[Answers, ...] = field(default=(), repr=False, kw_only=True)
    stub: Answers = field(default=None, repr=False, kw_only=True)

    @property
    def cases(self) -> tuple[tuple[str, str], ...]:
        """(axis, title) of every case."""
        raise NotImplementedError

    @property
    def total(self) -> int:
        """Number of cases."""
        return len(self.cases)

    def judge(self, answers: Sequence[Any], seed: int, deadline: float = DEADLINE) -> Verdict:
        """Return the verdict on ``answers``, with parameters drawn from ``seed``. Never raises.

        ``deadline`` is in seconds of CPU time, per rank where the answer runs on ranks.
        """
        try:
            if len(answers) != len(self.names):
                wanted = ", ".join((f'"{self.id}"', *self.names))
                raise NotRight(f"the check cell was changed: expected check({wanted})")
            for name, answer in zip(self.names, answers, strict=True):
                self.usable(name, answer)
            try:
                return Verdict(self.id, self.results(answers, random.Random(seed), deadline))
            except TooBusy:  # once more, in the hope of a calmer machine
                return Verdict(self.id, self.results(answers, random.Random(seed), deadline))
        except NotRight as error:
            return self.failed(str(error))
        except TooBusy as error:
            return too_busy(self.id, str(error), self.cases)
        except Exception as error:  # values so odd that comparing them fails
            return self.failed(f"the returned value cannot be judged: {described(error)}")

    def usable(self, name: str, answer: Any) -> None:
        """Raise NotRight if ``answer`` has the wrong type; by default, if it is no function."""
        if not callable(answer):
            raise NotRight(f"expected {name} to be a function, got {shown(answer)}")

    def failed(self, message: str) -> Verdict:
        """Return a verdict in which no case passed, for one reason."""
        return failed(self.id, message, self.cases)

    def results(
        self, answers: Sequence[Answer], rng: random.Random, deadline: float
    ) -> list[CaseResult]:
        """Judge every case in order. Raises NotRight if no case can be judged."""
        raise NotImplementedError


@dataclass(frozen=True)
class Case:
    """One case of an exercise without ranks.

    ``draw`` makes the arguments of a few calls from a seeded generator. The case passes if the
    answer is right in all of them. None, a constant and the stub must not pass, so the right
    results must not all be equal: if they are, the arguments are drawn again.
    """

    title: str
    draw: Callable[[random.Random], list[Instance]]


@dataclass(frozen=True)
class Function(Exercise):
    """An exercise that asks for one function without ranks, judged by ``reference``.

    ``normal`` converts a result, after ``plain``, to the form in which it is compared. If this is
    impossible, it raises NotRight with a reason, which is shown after the call in the verdict.
    Floats may differ by ``relative``. Where several results are right, ``fault`` takes the place of
    the comparison: from the arguments and a result it returns what is wrong in a phrase, or "".
    ``refused`` are library functions
    ("course_lib.layout:make_layout") that would be the answer: they raise an error while an answer
    is judged.
    """

    reference: Answer = field(repr=False)
    drawn: tuple[Case, ...] = field(repr=False)
    normal: Callable[[Any], Any] = field(repr=False, default=lambda value: value)
    relative: float = RELATIVE
    refused: tuple[str, ...] = ()
    fault: Callable[[Instance, Any], str] | None = field(repr=False, default=None)
    mistakes: tuple[Wrong, ...] = field(default=(), repr=False, kw_only=True)

    @property
    def cases(self) -> tuple[tuple[str, str], ...]:
        return tuple(("outputs", case.title) for case in self.drawn)

    def results(
        self, answers: Sequence[Answer], rng: random.Random, deadline: float
    ) -> list[CaseResult]:
        drawn = [self.counting(case, rng) for case in self.drawn]
        with guarded(deadline):
            calls = [[self._call(answers[0], args) for args in instances] for instances in drawn]
            calls = [[self._still(call) for call in made] for made in calls]
        mistake = self._mistake([call for case in calls for call in case])
        results = []
        for case, made in zip(self.drawn, calls, strict=True):
            message = next((call.message for call in made if call.message), "")
            results.append(CaseResult("outputs", case.title, message and f"{mistake}{message}"))
        return results

    def counting(self, case: Case, rng: random.Random) -> list[Instance]:
        """Return arguments for ``case`` with which None, every constant and the stub fail."""
        for _ in range(DRAWS):
            instances = case.draw(rng)
            wanted = [self._wanted(args) for args in instances]
            constants: list[Answer] = [lambda *_, value=value: value for value in wanted]
            trivial = [*constants, lambda *_: None, *([each(self.stub)[0]] if self.stub else [])]
            if not any(self._passes(answer, instances) for answer in trivial):
                return instances
        raise AssertionError(f"{self.id}, {case.title}: a constant passes with all drawn arguments")

    def _passes(self, answer: Answer, instances: list[Instance]) -> bool:
        return not any(self._call(answer, args).message for args in instances)

    def _call(self, answer: Answer, args: Instance) -> _Call:
        """Call ``answer`` once and describe what is wrong with its result."""
        given = {name: _copied(value) for name, value in args.items()}
        wanted = self._wanted(args)
        try:
            with refusing(self.refused):
                value = called(self.names[0], answer, given)
        except NotRight as error:
            return _Call(args, None, str(error))
        call = shown_call(self.names[0], args)
        for name, now in given.items():
            if now is not args[name] and _changed(now, args[name]):
                reason = f"{call} changed its argument {name}: copy it before you change it"
                return _Call(args, None, reason)
        got = self._read(value)
        if isinstance(got, _Unfit):
            return _Call(args, got, f"{call}: {got.reason}")
        if self.fault is not None:
            fault = self.fault(args, got)
            return _Call(args, got, fault and f"    {call}:\n    {fault}", value)
        if alike(got, wanted, self.relative):
            return _Call(args, got, value=value)
        return _Call(args, got, self._said(call, got, wanted))

    def _still(self, call: _Call) -> _Call:
        """Return a right call with a message if a later call changed its result."""
        once = hasattr(call.value, "__next__")  # an iterator can be read once only
        if call.message or once or alike(self._read(call.value), call.got, 0.0):
            return call
        said = shown_call(self.names[0], call.args)
        why = f"{said}: a later call changed this result. Make a new object in every call"
        return _Call(call.args, call.got, why)

    def _said(self, call: str, got: Any, wanted: Any) -> str:
        """Show two results; of lists too long to be shown, the first elements that differ."""
        lists = type(got) is type(wanted) is list and len(got) == len(wanted)
        if lists and len(repr(wanted)) > ROOM:
            pairs = enumerate(zip(got, wanted, strict=True))
            place = next(n for n, pair in pairs if not alike(*pair, self.relative))
            call, got, wanted = f"{call}[{place}]", got[place], wanted[place]
        return f"    {call}:\n    expected {shown(wanted)},\n    got {shown(got)}"

    def _wanted(self, args: Instance) -> Any:
        """Return the right result in the form in which it is compared."""
        return self.normal(plain(self.reference(*args.values())))

    def _read(self, value: Any) -> Any:
        """Return ``value`` in the form in which it is compared, or why this is impossible."""
        try:
            return self.normal(plain(value))
        except NotRight as error:
            return _Unfit(str(error))

    def _mistake(self, calls: list[_Call]) -> str:
        """Return the message of the classic mistake with the results of all ``calls``, or ""."""
        for wrong in (*self.mistakes, *self.wrong):
            if wrong.message and all(self._same(each(wrong.answer)[0], call) for call in calls):
                return f"{wrong.message}\n"
        return ""

    def _same(self, answer: Answer, call: _Call) -> bool:
        try:
            return alike(self._read(answer(*call.args.values())), call.got, self.relative)
        except Exception:  # a mistake may raise, such as ZeroDivisionError
            return call.got is None


@dataclass(frozen=True)
class _Unfit:
    """A result that cannot be compared; two with the same reason are the same mistake."""

    reason: str


@dataclass(frozen=True)
class _Call:
    """One call of an answer: its arguments, its result and its fault."""

    args: Instance
    got: Any
    message: str = ""
    value: Any = None  # as the answer returned it


def _copied(value: Any) -> Any:
    """Return a deep copy of a container or tensor, because an answer may change its arguments."""
    tensor = type(value).__module__ == "torch"  # without an import: the command line needs no torch
    own = tensor or isinstance(value, dict | list | set | tuple)
    return copy.deepcopy(value) if own else value


def _changed(now: Any, before: Any) -> bool:
    if _equal(now, before):
        return False
    from course_lib.grading.runner import unchanged  # loads torch, for tensors only

    return not unchanged(now, before)


def plain(value: Any) -> Any:
    """Return a result with Python's own numbers and with lists in place of tuples.

    Numbers and arrays of numpy, Decimal and Fraction become int or float. Tensors and values of
    other types are returned unchanged.
    """
    if isinstance(value, dict):
        return {plain(key) if _is_number(key) else key: plain(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return [plain(one) for one in value]
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    if not _is_number(value) or isinstance(value, int | float):
        return value
    rounded = float(value)
    whole = int(value) if abs(rounded) < 2**63 else None
    return whole if whole == value else rounded


def _is_number(value: Any) -> bool:
    return isinstance(value, Real | Decimal)


def alike(got: Any, wanted: Any, relative: float = RELATIVE) -> bool:
    """Return whether two results are equal, floats up to rounding, inside lists and dicts too."""
    if type(got) is type(wanted) in (list, tuple) and len(got) == len(wanted):
        return all(alike(one, other, relative) for one, other in zip(got, wanted, strict=True))
    if isinstance(got, dict) and isinstance(wanted, dict) and got.keys() == wanted.keys():
        return all(alike(got[key], one, relative) for key, one in wanted.items())
    if isinstance(got, int | float) and isinstance(wanted, float):
        return abs(got) < 2**1000 and math.isclose(got, wanted, rel_tol=relative, abs_tol=ABSOLUTE)
    return _equal(got, wanted)


def _equal(got: Any, wanted: Any) -> bool:
    try:
        return bool(got == wanted)
    except Exception:
        return False
