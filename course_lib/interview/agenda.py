"""The questions of a mock interview, drawn by a seed, and the follow-up of each mistake."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

from course_lib.interview import design, quiz
from course_lib.interview.cases import CASES, find
from course_lib.interview.concepts import Concept, concepts
from course_lib.interview.design import Described
from course_lib.interview.questions import Question, texts
from course_lib.interview.sheet import Item
from course_lib.interview.written import languages, written
from course_lib.planner.configuration import suggestion

PARTS = {"numbers": (2, 5.0), "concepts": (2, 7.5), "design": (1, 20.0)}  # questions; minutes each
FOLLOW_UPS = {  # the follow-up of a numeric mistake, by the id of the mistake
    "units": "gib-as-gb gb-as-gib bits bytes-as-bits prefix-large prefix-small bits-for-bytes",
    "factor": "factor-2 half",
    "states": "elements no-master weights-only no-gradients no-optimizer all-states bf16 fp32",
    "zero": "no-zero zero-1 zero-2 zero-3 dp-divides stage-too-low stage-too-high layout-too-large "
    "one-gather",
    "degrees": "no-pp no-tp no-cp no-dp no-ep world-divides one-replica largest-layout one-gpu",
    "activations": "input-only one-sequence no-sp no-recompute hidden-for-vocab",
    "in-flight": "gpipe last-rank one-less no-rank",
    "ring": "one-pass two-passes all-ranks no-own-share one-step payload-once",
    "counting": "one-layer one-micro-batch forward-only one-region ends-count one-expert "
    "dispatch-only no-micro-batch one-request with-backward no-forward",
    "heads": "all-heads one-of-kv divided-copies",
    "bubble": "bubble-of-ideal bubble-of-total all-stages naive busy-share no-chunks divided-share "
    "more-stages no-bubble no-split",
    "flops": "no-multiply-add full-scores two-matrices recomputation-counts no-mfu wall-clock",
    "ranks": "slowest-first one-more coordinate-of-dp neighbors group-size world",
    "serving": "no-weights compute-bound",
}


@dataclass(frozen=True)
class Plan:
    """The questions of an interview, in their order; the same for the same seed."""

    seed: int
    language: str
    minutes: float
    asked: tuple[Question | Concept | Described, ...]

    def items(self) -> list[Item]:
        """Return an empty line of the score sheet for each question."""
        found = [_item(one, self.language) for one in self.asked]
        weight = self.minutes / sum(item.planned for item in found)
        return [replace(item, planned=round(weight * item.planned, 1)) for item in found]

    def as_dict(self) -> dict[str, Any]:
        """Return the questions with their answers, for an interviewer."""
        rows = [
            {**row.head(), **_content(one)}
            for row, one in zip(self.items(), self.asked, strict=True)
        ]
        return {
            "seed": self.seed,
            "language": self.language,
            "minutes": self.minutes,
            "questions": rows,
        }


def make_plan(
    seed: int,
    *,
    language: str = "en",
    minutes: float | None = None,
    part: str | None = None,
    case: str | None = None,
) -> Plan:
    """Draw the questions of ``seed``; of one ``part`` alone, or with the named design ``case``.

    ``minutes`` are divided among the questions; by default they are 45 for all three parts.
    Raises ValueError for an unknown language, part or case.
    """
    written("interview", language)
    if part is not None and part not in PARTS:
        raise ValueError(f"no part is called {part!r}; {suggestion(part, PARTS)}")
    if case is not None and part not in (None, "design"):
        raise ValueError(f"case {case} belongs to the part design; leave out part {part}")
    by_part = {name: Random(f"interview {name} {seed}") for name in PARTS}
    number, concept = PARTS["numbers"][0], PARTS["concepts"][0]
    spoken = numeric_language(language)
    topics = by_part["numbers"].sample(quiz.topics(), number)
    chosen: dict[str, list[Any]] = {
        "numbers": [quiz.question(topic, seed, spoken) for topic in topics],
        "concepts": _apart(by_part["concepts"], concepts(language), concept),
        "design": [
            design.case((find(case) if case else by_part["design"].choice(CASES)).id, language)
        ],
    }
    parts = [name for name in PARTS if part in (None, name)]
    asked = tuple(one for name in parts for one in chosen[name])
    planned = sum(count * each for count, each in map(PARTS.__getitem__, parts))
    return Plan(seed, language, planned if minutes is None else minutes, asked)


def numeric_language(language: str) -> str:
    """Return the language of numeric questions: English where ``language`` has none."""
    return language if language in languages("quiz") else "en"


def _apart(rng: Random, known: tuple[Concept, ...], count: int) -> list[Concept]:
    """Return ``count`` questions, of different topics if possible."""
    mixed = rng.sample(known, len(known))
    first = {one.topic: one for one in reversed(mixed)}
    mixed.sort(key=lambda one: first[one.topic] is not one)
    return mixed[:count]


def group_of(mistake: str | None) -> str:
    """Return the id of the follow-up to a numeric mistake."""
    groups = (group for group, names in FOLLOW_UPS.items() if mistake in names.split())
    return next(groups, "unrecognized")


def _item(one: Question | Concept | Described, language: str) -> Item:
    """Return the empty line of the score sheet for a question, with the usual minutes."""
    if isinstance(one, Question):
        part, id, lesson = "numbers", one.id, one.lesson
        title = texts(numeric_language(language))["topics"][one.topic]
    elif isinstance(one, Concept):
        part, id, lesson, title = "concepts", one.id, one.lesson, one.title
    else:
        part, id, lesson, title = "design", one.case.id, one.case.lesson, one.title
    return Item(part, id, title, lesson, PARTS[part][1])


def _content(one: Question | Concept | Described) -> dict[str, Any]:
    """Return text and answer of a question."""
    if isinstance(one, Question):
        return {"text": one.text, "answer": one.answer, "steps": list(one.steps)}
    if isinstance(one, Concept):
        return {"text": one.title, "answer": one.short, "rubric": list(one.whiteboard)}
    return {"text": one.text, "answer": one.case.good, "limits": dict(one.case.limits)}
