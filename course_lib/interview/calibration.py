"""The calibration score: a learner's predictions and votes of all lessons beside the true values.

The lessons in work/notebooks are read, never run. ``course list`` shows exercises; this shows how
far predictions were off::

    print(score())
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from math import exp, inf, isfinite, log
from pathlib import Path
from statistics import median
from typing import Any

from course_lib.interview.claims import VOTES, table
from course_lib.interview.predictions import MACHINE, Truth, truths

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"^(predicted_\w+|vote_\d+)\s*=\s*(.+)$", re.MULTILINE)
SETTLED = re.compile(r"^\*\*Claim (\d+): (true|false|only)", re.MULTILINE)
GROUPED = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?")
OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
DAMAGED = (ValueError, OSError, TypeError, AttributeError, KeyError, RecursionError)
SMALL, NEAR = 0.1, 0.05  # below SMALL, an absolute error of NEAR is within a factor 2
HEAD = "{:28}{:>15}{:>13}   {:20}{:>8}"


@dataclass(frozen=True)
class Guess:
    """A number that a learner predicted, beside the true value."""

    lesson: str
    name: str
    given: float
    true: float

    @property
    def ratio(self) -> float:
        """The prediction over the true value; infinite where only one of them is positive."""
        if self.true > 0 and self.given > 0:
            return self.given / self.true
        return 1.0 if self.true == self.given else inf if self.given > self.true else 0.0

    def within(self, factor: float) -> bool:
        """Whether the prediction is within ``factor`` of the true value."""
        near = factor >= 2 and self.true < SMALL and abs(self.given - self.true) <= NEAR
        return near or 1 / factor <= self.ratio <= factor


@dataclass
class Score:
    """All that a learner predicted and voted. ``named`` and ``votes`` say which were right.

    ``blank`` counts the predictions that are still None in lessons that were begun. ``unread`` and
    ``damaged`` have a sentence for each entry or notebook that cannot be read; ``left_out`` names
    the predictions whose true value depends on the machine and is not known.
    """

    guesses: list[Guess] = field(default_factory=list)
    named: list[tuple[str, str, bool]] = field(default_factory=list)  # lesson, name, right
    votes: list[tuple[str, str, bool]] = field(default_factory=list)
    blank: int = 0
    unread: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def within(self, factor: float) -> int:
        """Count the numbers within ``factor`` of the true value."""
        return sum(guess.within(factor) for guess in self.guesses)

    def as_dict(self) -> dict[str, Any]:
        """Return the score as JSON."""
        sums = {"within_2": self.within(2), "within_10_percent": self.within(1.1)}
        return {"numbers": len(self.guesses), **sums, **asdict(self)}

    def __str__(self) -> str:
        return "\n".join([*self._table(), *self._sentences()])

    def _table(self) -> Iterator[str]:
        from course_lib.grading.syllabus import NAMES

        entries = [(guess.lesson, guess.name) for guess in self.guesses]
        entries += [(lesson, name) for lesson, name, _ in self.named + self.votes]
        if not entries:
            yield "No prediction or vote yet. course start 01 copies lesson 01 to work/."
            return
        yield HEAD.format("", "within factor 2", "within 10 %", "median", "votes").rstrip()
        for lesson in sorted({lesson for lesson, _ in entries}):
            yield self._row(f"{lesson:4}{NAMES.get(lesson, '')}", lesson)
        yield self._row("    all", None)

    def _row(self, name: str, lesson: str | None) -> str:
        own = Score(
            [guess for guess in self.guesses if lesson in (None, guess.lesson)],
            votes=[vote for vote in self.votes if lesson in (None, vote[0])],
        )
        count = len(own.guesses)
        cells = (own.within(2), own.within(1.1)) if count else ()
        numbers = [f"{cell} of {count}" for cell in cells] or ["-", "-"]
        return HEAD.format(name, *numbers, direction(own.guesses), _right(own.votes))

    def _sentences(self) -> Iterator[str]:
        if self.guesses:
            off = [guess for guess in self.guesses if not guess.within(2)]
            low = sum(guess.ratio < 1 for guess in off)
            yield f"\nWithin a factor 2: {self.within(2)} of {len(self.guesses)}."
            if off:
                yield f"Too low: {low}. Too high: {len(off) - low}."
        if self.named:
            yield f"Groups, axes and ways named right: {_right(self.named)}."
        if self.blank:
            yield f"Not given in lessons that you began: {self.blank} predictions."
        yield from self.unread + self.damaged + self.left_out


def direction(guesses: list[Guess]) -> str:
    """Return the typical error in words: the median ratio, and whether it is high or low."""
    ratios = [guess.ratio for guess in guesses if 0 < guess.ratio < inf]
    if not ratios:
        return "-"
    middle = exp(median(map(log, ratios)))
    if 1 / 1.1 <= middle <= 1.1:
        return "close"
    return f"{middle:.2g} x too high" if middle > 1 else f"{1 / middle:.2g} x too low"


def _right(entries: list[tuple[str, str, bool]]) -> str:
    return f"{sum(right for *_, right in entries)} of {len(entries)}" if entries else "-"


def value_of(text: str) -> Any:
    """Return the value of a literal or of arithmetic with numbers; nothing is executed.

    Raises ValueError for anything else, and for a number that is not finite.
    """
    try:
        return _evaluated(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError):
        raise ValueError("expected a finite number, or arithmetic with numbers") from None


def _evaluated(node: ast.expr) -> Any:
    if isinstance(node, ast.BinOp | ast.UnaryOp) and type(node.op) in OPERATORS:
        sides = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.operand]
        # As floats: a huge power overflows at once.
        value = OPERATORS[type(node.op)](*(float(_evaluated(side)) for side in sides))
    else:
        value = ast.literal_eval(node)
    if isinstance(value, complex) or (isinstance(value, float) and not isfinite(value)):
        raise ValueError
    return value


def _flat(value: Any) -> list[Any]:
    """The elements of nested lists and tuples; a single value is one element."""
    if isinstance(value, list | tuple | set):
        return [each for one in value for each in _flat(one)]
    return [value if isinstance(value, int | float) else str(value).strip().lower()]


def equal(given: Any, true: str | list[int]) -> bool:
    """Return whether a name or a group was predicted right, in any order of a list's elements."""
    return set(_flat(given)) == set(_flat(true))


def vote_of(value: Any) -> str:
    """Return a vote as "true", "false" or "only". Raises ValueError for another value."""
    text = str(value).strip().lower()
    for vote in VOTES.values():
        if text.startswith(vote):
            return vote
    raise ValueError('expected "true", "false" or "only if ..."')


def _texts(path: Path, kind: str) -> str:
    """The sources of a notebook's cells of one kind; raises ValueError if it is not a notebook."""
    from course_lib.grading.catalog import read_cells

    return "\n".join(cell["source"] for cell in read_cells(path) if cell.get("cell_type") == kind)


def settled(path: Path, number: str) -> dict[str, str]:
    """Return how the lesson in ``path`` settles its claims: "1" -> "true", "false" or "only"."""
    if number == "15":
        found = table()
        ids = [name for names in found.lesson.values() for name in names]
        return {str(n): VOTES[found.claim(name).verdict] for n, name in enumerate(ids, 1)}
    return dict(SETTLED.findall(_texts(path, "markdown")))


def score(root: Path = ROOT) -> Score:
    """Read the learner's lessons in work/notebooks of the course in ``root``; return the score."""
    from course_lib.grading.syllabus import lesson_files, number_of

    found = Score()
    for source in lesson_files(root, "notebooks"):
        own = root / "work" / "notebooks" / source.name
        if own.exists():
            try:
                _read(found, number_of(source), own, settled(source, number_of(source)))
            except DAMAGED:
                found.damaged.append(
                    f"{own.relative_to(root)} is not a notebook and does not count; course start "
                    f"{number_of(source)} --fresh sets it aside."
                )
    return found


def _read(found: Score, number: str, own: Path, votes: dict[str, str]) -> None:
    """Add the predictions and votes of the notebook ``own``; the last value of a name counts."""
    for name, text in dict(LINE.findall(_texts(own, "code"))).items():
        short = name.partition("_")[2]
        known: Truth | str | None = truths().get(number, {}).get(short)
        if name.startswith("vote_"):
            known = votes.get(short)
        elif (number, short) in MACHINE:
            known = _measured(own, MACHINE[number, short])
        try:
            given = value_of(text)
            if given is None:
                found.blank += name.startswith("predicted_")
            elif known is None and (number, short) in MACHINE:
                found.left_out.append(
                    f"{name} of lesson {number} depends on the machine: run the lesson in work/ "
                    "and save it, then it counts."
                )
            elif name.startswith("vote_") and isinstance(known, str):
                found.votes.append((number, short, vote_of(given) == known))
            elif isinstance(known, str | list):
                found.named.append((number, short, equal(given, known)))
            elif known is not None:
                found.guesses.append(Guess(number, short, _number(given), known))
        except ValueError as error:
            typed = text.partition("  #")[0].strip()
            found.unread.append(f"{name} of lesson {number}: {error}, got {typed[:60]}")


def _number(given: Any) -> float:
    """Return a predicted number; a string such as "1,500,000" counts as well."""
    if isinstance(given, str):
        if "," in given and not GROUPED.fullmatch(given.strip()):
            raise ValueError("expected a number whose commas separate thousands")
        given = value_of(given.replace(",", ""))
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise ValueError("expected a number")
    try:
        return float(given)
    except OverflowError:  # an integer of 400 digits
        raise ValueError("expected a finite number") from None


def _measured(own: Path, pattern: str) -> float | None:
    """Return the number that the notebook printed, or None."""
    printed = json.loads(own.read_text(encoding="utf-8"))["cells"]
    outputs = (out for cell in printed for out in cell.get("outputs") or [])
    texts = ("".join(out.get("text") or "") for out in outputs)
    found = next((hit for hit in (re.search(pattern, text) for text in texts) if hit), None)
    return float(found[1]) if found else None
