"""Exercises worked out by hand: the learner types a table of values, and no code is run."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from typing import Any

from course_lib.grading.answers import NotRight, shown
from course_lib.grading.exercise import Exercise, Wrong, each
from course_lib.grading.verdict import CaseResult


@dataclass(frozen=True)
class Worked(Exercise):
    """A table from keys to values. Each key of ``wanted`` is one case with that title.

    A value is a number, a text (its spaces do not count) or a list of these; None means that it is
    not filled in. The numbers are in the exercise's text, so nothing is drawn: the table is the
    answer. The verdict never shows a right value. If a wrong entry equals the entry of a ``Wrong``
    table with a message, the message is shown.
    """

    wanted: Mapping[str, Any] = field(repr=False)
    mistakes: tuple[Wrong, ...] = field(default=(), repr=False, kw_only=True)

    def __post_init__(self) -> None:
        assert all(value is not None for value in self.wanted.values()), self.id

    @property
    def cases(self) -> tuple[tuple[str, str], ...]:
        return tuple(("outputs", key) for key in self.wanted)

    def usable(self, name: str, answer: Any) -> None:
        """Raise NotRight if the answer is not a table with these keys."""
        keys = ", ".join(map(repr, self.wanted))
        if not isinstance(answer, Mapping):
            raise NotRight(
                f"expected {name} to be a dict with the keys {keys}, got {shown(answer)}"
            )
        if missing := [key for key in self.wanted if key not in answer]:
            raise NotRight(f"expected the keys {keys} in {name}, but {missing[0]!r} is missing")

    def results(
        self, answers: Sequence[Any], rng: random.Random, deadline: float
    ) -> list[CaseResult]:
        """Judge every entry in order."""
        table = answers[0]
        return [CaseResult("outputs", key, self._said(key, table[key])) for key in self.wanted]

    def _said(self, key: str, value: Any) -> str:
        if value is None:
            return f"{key!r} is not filled in yet"
        if same(value, self.wanted[key]):
            return ""
        for wrong in (*self.mistakes, *self.wrong):
            entry: Any = each(wrong.answer)[0]
            known = wrong.message and isinstance(entry, Mapping) and key in entry
            if known and same(value, entry[key]) and not same(entry[key], self.wanted[key]):
                return f"{key!r}: {wrong.message}"
        return f"{key!r}: {shown(value)} is not right{_hint_at(value, self.wanted[key])}"


def _listed(value: Any) -> Any:
    """Return the numbers of an array or tensor, and a Decimal, as Python's own; other values
    unchanged."""
    if isinstance(value, Decimal):
        return float(value)
    return value.tolist() if hasattr(type(value), "tolist") else value


def _words(text: str) -> list[str]:
    """Return the words of a text in lower case, without spaces and commas."""
    return text.replace(",", " ").lower().split()


def same(value: Any, wanted: Any) -> bool:
    """Return whether two entries are equal: numbers up to rounding, texts up to case, spaces and
    commas, lists in order. An array or tensor counts as the list of its numbers."""
    value = _listed(value)
    if isinstance(wanted, str):
        return isinstance(value, str) and _words(value) == _words(wanted)
    if isinstance(wanted, Sequence):
        return (
            isinstance(value, Sequence)
            and not isinstance(value, str)
            and len(value) == len(wanted)
            and all(map(same, value, wanted))
        )
    if isinstance(wanted, bool) or not isinstance(wanted, Real):
        return bool(type(value) is type(wanted) and value == wanted)
    number = isinstance(value, Real) and not isinstance(value, bool)
    return number and math.isclose(value, wanted, rel_tol=1e-6, abs_tol=1e-9)


def _hint_at(value: Any, wanted: Any) -> str:
    """Return a hint without the right value: the form, or the first place that differs."""
    value = _listed(value)
    if isinstance(wanted, str) and isinstance(value, str):
        value, wanted = _words(value), _words(wanted)
    if isinstance(wanted, Real) and isinstance(value, str):
        return ": expected a number, got a text; leave out the quotes"
    if isinstance(wanted, Real) and isinstance(value, Real) and _rounded(value, wanted):
        return ": it looks rounded; type it as a fraction, such as 3/7"
    if not isinstance(wanted, Sequence) or isinstance(wanted, str):
        return ""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return f"; expected {len(wanted)} values"
    if len(value) != len(wanted):
        values = "1 value" if len(value) == 1 else f"{len(value)} values"
        return f": expected {len(wanted)} values, got {values}"
    place = next(n for n, pair in enumerate(zip(value, wanted, strict=True)) if not same(*pair))
    return f": look at {shown(value[place])}, number {place + 1}"


def _rounded(value: Real, wanted: Real) -> bool:
    """Return whether ``value`` is a fraction rounded to two to five digits."""
    return float(wanted) % 1 != 0 and any(
        math.isclose(value, round(float(wanted), digits), rel_tol=1e-9) for digits in range(2, 6)
    )
