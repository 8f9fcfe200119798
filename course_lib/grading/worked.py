"""Exercises worked out by hand: the learner types a table of values, and no code is run."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from course_lib.grading.answers import NotRight, shown
from course_lib.grading.exercise import Exercise, Wrong, alike, each, plain
from course_lib.grading.verdict import CaseResult


@dataclass(frozen=True)
class Worked(Exercise):
    """A table from keys to values. Each key of ``wanted`` makes one case with that title.

    A value is a number, a text (its case, spaces and punctuation do not count) or a list of these;
    None means that it is not filled in. In the innermost lists of the keys in ``unordered``, such
    as groups of ranks, the order does not count and a set is right too. The numbers are in the
    exercise's text, so nothing is drawn: the table is the answer. The verdict never shows a right
    value. If a wrong entry equals the entry of a ``Wrong`` table with a message, the message is
    shown.
    """

    wanted: Mapping[str, Any] = field(repr=False)
    unordered: frozenset[str] = frozenset()
    mistakes: tuple[Wrong, ...] = field(default=(), repr=False, kw_only=True)

    def __post_init__(self) -> None:
        assert all(value is not None for value in self.wanted.values()), self.id
        assert self.unordered <= set(self.wanted), self.id

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
        wanted, unordered = self.wanted[key], key in self.unordered
        if value is None:
            return f"{key!r} is not filled in yet"
        if same(value, wanted, unordered):
            return ""
        for wrong in (*self.mistakes, *self.wrong):
            entry: Any = each(wrong.answer)[0]
            known = wrong.message and isinstance(entry, Mapping) and key in entry
            mistaken = known and not same(entry[key], wanted, unordered)
            if mistaken and same(value, entry[key], unordered):
                return f"{key!r}: {wrong.message}"
        if fault := _wrong_kind(value, wanted, unordered):
            return f"{key!r}: {fault}"
        return f"{key!r}: {shown(value)} is not right{_hint_at(value, wanted, unordered)}"


def _listed(value: Any) -> Any:
    """Return the numbers of an array or tensor as Python's own, and a tuple as a list."""
    return plain(value.tolist() if hasattr(type(value), "tolist") else value)


def _words(text: str) -> list[str]:
    """Return the words of a text, without the punctuation around them."""
    words = (word.strip(string.punctuation) for word in text.replace(",", " ").split())
    return [word for word in words if word]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_innermost(wanted: Sequence[Any]) -> bool:
    return not any(map(_is_list, wanted))


def same(value: Any, wanted: Any, unordered: bool = False) -> bool:
    """Return whether two entries are equal: numbers up to rounding, texts word by word, lists in
    order.

    An array or tensor counts as the list of its numbers, a word in capitals as the same word. With
    ``unordered``, innermost lists may be sets or have another order.
    """
    value = _listed(value)
    if isinstance(wanted, str):
        return isinstance(value, str) and _words(value.casefold()) == _words(wanted.casefold())
    if _is_list(wanted):
        if unordered and _is_innermost(wanted):
            value, wanted = _sorted(value), _sorted(wanted)
        return (
            _is_list(value)
            and len(value) == len(wanted)
            and all(same(*pair, unordered) for pair in zip(value, wanted, strict=True))
        )
    if isinstance(wanted, bool) or not isinstance(wanted, Real):
        return bool(type(value) is type(wanted) and value == wanted)
    number = isinstance(value, Real) and not isinstance(value, bool)
    return number and alike(value, float(wanted))


def _sorted(value: Any) -> Any:
    """Return the elements of a list or set in order; other values unchanged."""
    try:
        return sorted(value) if isinstance(value, Set) or _is_list(value) else value
    except TypeError:  # a set of numbers and texts, which is never right
        return list(value)


def _wrong_kind(value: Any, wanted: Any, unordered: bool) -> str:
    """Return a sentence if ``value`` is a text for a number or the like, "" otherwise."""
    value = _listed(value)
    if _is_list(wanted) and _is_list(value):
        faults = (_wrong_kind(*pair, unordered) for pair in zip(value, wanted, strict=False))
        return next(filter(None, faults), "")
    if _is_list(wanted) and isinstance(value, Set) and not (unordered and _is_innermost(wanted)):
        return f"expected a list, because the order counts, not the set {shown(value)}"
    if isinstance(wanted, Real) and isinstance(value, str):
        return f"expected a number, not the text {shown(value)}"
    if isinstance(wanted, str) and isinstance(value, Real):
        return f"expected a text, not the number {shown(value)}"
    return ""


def _hint_at(value: Any, wanted: Any, unordered: bool) -> str:
    """Return a hint without the right value: the form, or the first place that differs."""
    value = _listed(value)
    if isinstance(wanted, str) and isinstance(value, str):
        value, wanted = _words(value), _words(wanted)
    if isinstance(wanted, Real) and isinstance(value, Real) and _rounded(value, wanted):
        return ": it looks rounded; type it as a fraction, such as 3/7"
    if not _is_list(wanted):
        return ""
    if any_order := unordered and _is_innermost(wanted):
        value = _sorted(value)
    if not _is_list(value):
        return f"; expected {len(wanted)} values"
    if len(value) != len(wanted):
        values = "1 value" if len(value) == 1 else f"{len(value)} values"
        return f": expected {len(wanted)} values, got {values}"
    if any_order:
        extra = [one for one in value if one not in wanted]
        return f": look at {shown(extra[0])}" if extra else ""
    pairs = enumerate(zip(value, wanted, strict=True), 1)
    place = next(n for n, pair in pairs if not same(*pair, unordered))
    return f": look at {shown(value[place - 1])}, number {place}"


def _rounded(value: Real, wanted: Real) -> bool:
    """Return whether ``value`` is a fraction rounded to two to five digits."""
    return float(wanted) % 1 != 0 and any(
        math.isclose(value, round(float(wanted), digits), rel_tol=1e-9) for digits in range(2, 6)
    )
