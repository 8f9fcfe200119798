"""Mark an answer: right within the tolerance, or a classic mistake by name."""

from __future__ import annotations

from dataclasses import dataclass

from course_lib.interview.questions import Question, texts
from course_lib.interview.units import EXAMPLES, UnitMissing, Unreadable, half_step, read

LEAST = 1e-30  # an answer that is further off is only wrong
RECOGNIZED = 0.01  # how near an answer is to the value of a mistake


@dataclass(frozen=True, repr=False)
class Verdict:
    """What an answer is.

    ``kind``: "right", "mistake", "wrong", or "unit" and "unreadable" for an answer to be given
    again. ``message`` is for the reader. ``mistake`` is the id of a recognized mistake.
    """

    kind: str
    message: str
    mistake: str | None = None
    value: float | None = None

    @property
    def counts(self) -> bool:
        """Whether the answer was marked; False if it must be given again."""
        return self.kind in ("right", "mistake", "wrong")

    @property
    def right(self) -> bool:
        """Whether the answer is right."""
        return self.kind == "right"

    def __repr__(self) -> str:
        return self.message


def mark(question: Question, answer: str) -> Verdict:
    """Return the verdict on ``answer``. An answer that cannot be read is not marked wrong.

    An answer rounded to two digits or more is right, unless a mistake is nearer to it.
    """
    written = texts(question.language)
    marks = written["marks"]
    try:
        value = read(answer, question.unit, written["units"])
    except Unreadable as error:
        kind = "unit" if isinstance(error, UnitMissing) else "unreadable"
        why = written["reading"][error.key].format(got=error.got, example=EXAMPLES[question.unit])
        return Verdict(kind, marks[kind].format(why=why))
    rounding = half_step(answer, written["units"]) if question.tolerance else 0.0
    name = recognized(question, value, rounding)
    off = abs(value - question.value) / abs(question.value)
    nearer = name is None or off <= abs(value - question.mistakes[name]) / question.mistakes[name]
    if near(value, question.value, question.tolerance) or (
        _rounded(value, question.value, rounding) and nearer
    ):
        return Verdict("right", marks["right"].format(answer=question.answer), value=value)
    if name is not None:
        why = written["mistakes"][name]
        message = marks["mistake"].format(why=why, answer=question.answer)
        return Verdict("mistake", message, name, value)
    factor = value / question.value
    told = LEAST < factor < 1 / LEAST
    kind = "wrong" if not told else "too-large" if factor > 1 else "too-small"
    times = f"{max(factor, 1 / factor):.3g}" if told else ""
    message = marks[kind].format(answer=question.answer, times=times)
    return Verdict("wrong", message, value=value)


def recognized(question: Question, value: float, rounding: float = 0.0) -> str | None:
    """Return the id of the mistake whose value is nearest to ``value``, if one is near.

    ``rounding``: what rounding may have changed, as a share of ``value``.
    """
    limit = min(RECOGNIZED, question.tolerance)
    off = {
        name: abs(value - each) / each
        for name, each in question.mistakes.items()
        if near(value, each, limit) or _rounded(value, each, rounding)
    }
    return min(off, key=lambda name: off[name], default=None)


def _rounded(value: float, exact: float, rounding: float) -> bool:
    """Return whether ``exact`` may have been rounded to ``value``."""
    return abs(value - exact) <= rounding * abs(value) * (1 + 1e-9)


def near(value: float, expected: float, tolerance: float) -> bool:
    """Return whether ``value`` is within the relative ``tolerance`` of ``expected``."""
    return abs(value - expected) <= max(tolerance, 1e-9) * abs(expected)
