"""A template draws the numbers of a question; the texts are data, by the template's id.

The answer and the values of the classic mistakes are computed by the library's formulas, planner
and schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from random import Random
from typing import TYPE_CHECKING, Any

from course_lib.interview.units import ENGLISH, show
from course_lib.interview.written import written

if TYPE_CHECKING:
    from course_lib.interview.marking import Verdict

TOLERANCE = 0.02  # a whiteboard rounds
SAME = 1e-6  # two values nearer than this are one mistake


@dataclass(frozen=True)
class Amount:
    """A value in a base unit of :mod:`course_lib.interview.units`, which is shown with its unit."""

    value: float
    unit: str

    def __str__(self) -> str:
        return show(self.value, self.unit)


@dataclass(frozen=True)
class Draw:
    """The numbers of one question.

    ``given``: what the text names. ``value``: the answer. ``mistakes``: the value of each mistake,
    by the id of its message. ``more``: what only the worked steps name.
    """

    given: Mapping[str, Any]
    value: float | Fraction
    mistakes: Mapping[str, float] | Mapping[str, float | Fraction]
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Template:
    """A kind of question. ``lesson`` explains it; ``unit`` is a key of ``units.UNITS``."""

    id: str
    lesson: str
    unit: str
    draw: Callable[[Random], Draw]
    tolerance: float = TOLERANCE

    @property
    def topic(self) -> str:
        """The first word of the id."""
        return self.id.partition("-")[0]


@dataclass(frozen=True, repr=False)
class Question:
    """A question with its numbers; a notebook shows the text alone.

    ``value`` is the answer in the base unit ``unit``. ``mistakes`` are values of classic mistakes,
    by the id of their message.
    """

    id: str
    topic: str
    lesson: str
    seed: int
    text: str
    value: float
    unit: str
    tolerance: float
    steps: tuple[str, ...]
    mistakes: Mapping[str, float]
    given: Mapping[str, str]
    language: str = "en"

    def __repr__(self) -> str:
        return self.text

    @property
    def answer(self) -> str:
        """The right answer with its unit."""
        return show(self.value, self.unit, texts(self.language)["words"])

    def mark(self, answer: str) -> Verdict:
        """Return the verdict on ``answer``, such as "12 GB"."""
        from course_lib.interview.marking import mark

        return mark(self, answer)

    def as_dict(self) -> dict[str, Any]:
        """Return the question with its answer, for a teacher."""
        return {
            "id": self.id,
            "topic": self.topic,
            "lesson": self.lesson,
            "seed": self.seed,
            "text": self.text,
            "answer": {"value": self.value, "unit": self.unit, "shown": self.answer},
            "tolerance": self.tolerance,
            "steps": list(self.steps),
            "mistakes": {
                name: {"value": value, "shown": show(value, self.unit)}
                for name, value in self.mistakes.items()
            },
        }


def texts(language: str = "en") -> dict[str, Any]:
    """Return all texts of ``language``: questions, mistakes, marks and topics, each by its id."""
    return written("quiz", language)


def make(template: Template, seed: int, language: str = "en") -> Question:
    """Return the question that ``template`` draws from ``seed``; the same for the same seed."""
    drawn = template.draw(Random(f"{template.id} {seed}"))
    written, units = texts(language)["questions"][template.id], texts(language)["words"]
    given = {name: shown(value, units) for name, value in drawn.given.items()}
    value = float(drawn.value)
    words = given | {name: shown(each, units) for name, each in drawn.more.items()}
    words["answer"] = show(value, template.unit, units)
    return Question(
        id=template.id,
        topic=template.topic,
        lesson=template.lesson,
        seed=seed,
        text=written["text"].format_map(words),
        value=value,
        unit=template.unit,
        tolerance=template.tolerance,
        steps=tuple(step.format_map(words) for step in written["steps"]),
        mistakes=_apart(drawn.mistakes, value, template),
        given=given,
        language=language,
    )


def shown(value: Any, words: Mapping[str, str] = ENGLISH) -> str:
    """Return ``value`` as a text shows it: a float with four digits, an amount with its unit."""
    if isinstance(value, Amount):
        return show(value.value, value.unit, words)
    if isinstance(value, float):
        return show(value, "count")
    return f"{value:,}" if isinstance(value, int) else str(value)


def _apart(named: Mapping[str, Any], value: float, template: Template) -> dict[str, float]:
    """Return the mistakes that marking can tell from the answer and from one another."""
    found: dict[str, float] = {}
    everything = {name: float(each) for name, each in named.items()}
    for name, each in [*everything.items(), *_of_unit(value, template.unit).items()]:
        near = abs(each - value) <= 1.05 * template.tolerance * abs(value)
        known = any(abs(each - other) <= SAME * abs(other) for other in found.values())
        if each > 0 and each != value and not near and not known:
            found[name] = each
    return found


def _of_unit(value: float, unit: str) -> dict[str, float]:
    """Return the mistakes of every quantity with this unit."""
    if unit in ("count", "share"):
        return {}
    found = {"factor-2": 2 * value, "half": value / 2}
    if unit in ("byte", "byte/s"):
        power = sum(value >= 1000**n for n in (1, 2, 3, 4))  # the prefix in which it is shown
        found |= {"gib-as-gb": value / 1.024**power, "gb-as-gib": value * 1.024**power}
        found |= {"bits": 8 * value, "bytes-as-bits": value / 8}
    return found | {"prefix-large": 1000 * value, "prefix-small": value / 1000}
