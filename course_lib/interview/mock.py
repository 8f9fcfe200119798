"""A mock interview: two numeric questions, two concept questions and a case of system design.

Numeric and design answers are marked by the library, and the recognized mistake chooses the
follow-up. The candidate scores free text against a rubric. The clock informs; no mark depends on
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from time import monotonic
from typing import Any

from course_lib.interview import design, quiz
from course_lib.interview.cases import CASES, find
from course_lib.interview.concepts import Concept, concepts
from course_lib.interview.design import Answer, Described
from course_lib.interview.lines import folded
from course_lib.interview.marking import Verdict
from course_lib.interview.questions import Question, texts
from course_lib.interview.sheet import FollowedUp, Item, Sheet
from course_lib.interview.written import languages, written
from course_lib.planner.configuration import suggestion

MINUTES = 45
# How many questions of each part, and the share of the minutes that one of them takes.
PARTS = {"numbers": (2, 4 / 45), "concepts": (2, 7 / 45), "design": (1, 20 / 45)}
PROPOSALS = 3
SKIP = "s"
YES, NO = ("y", "yes", "是", "对"), ("n", "no", "否", "不")
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
Ask = Callable[[str], str]
Say = Callable[[str], object]


@dataclass(frozen=True)
class Plan:
    """The questions of an interview, in their order; the same for the same seed."""

    seed: int
    language: str
    minutes: float
    asked: tuple[Question | Concept | Described, ...]

    def items(self) -> list[Item]:
        """Return an empty line of the score sheet for each question."""
        return [_item(one, self) for one in self.asked]

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
    minutes: float = MINUTES,
    part: str | None = None,
    case: str | None = None,
) -> Plan:
    """Draw the questions of ``seed``; of one ``part`` alone, or with the named design ``case``.

    Raises ValueError for an unknown language, part or case.
    """
    written("interview", language)
    if part is not None and part not in PARTS:
        raise ValueError(f"no part is called {part!r}; {suggestion(part, PARTS)}")
    if case is not None and part not in (None, "design"):
        raise ValueError(f"case {case} belongs to the part design; leave out part {part}")
    rng = Random(f"interview {seed}")
    number, concept = PARTS["numbers"][0], PARTS["concepts"][0]
    spoken = numeric_language(language)
    topics = rng.sample(quiz.topics(), number)
    chosen: dict[str, list[Any]] = {
        "numbers": [quiz.question(topic, seed, spoken) for topic in topics],
        "concepts": _apart(rng, concepts(language), concept),
        "design": [design.case((find(case) if case else rng.choice(CASES)).id, language)],
    }
    asked = [one for name in PARTS if part in (None, name) for one in chosen[name]]
    return Plan(seed, language, minutes, tuple(asked))


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


def _item(one: Question | Concept | Described, plan: Plan) -> Item:
    """Return the empty line of the score sheet for a question."""
    said = written("interview", plan.language)
    part = "design"
    if isinstance(one, Question):
        part, id, lesson = "numbers", one.id, one.lesson
        topic = texts(numeric_language(plan.language))["topics"][one.topic]
        title = said["sheet"]["numeric"].format(topic=topic)
    elif isinstance(one, Concept):
        part, id, lesson, title = "concepts", one.id, one.lesson, one.title
    else:
        id, lesson, title = one.case.id, one.case.lesson, one.title
    planned = plan.minutes * PARTS[part][1]
    return Item(part, id, title, lesson, round(planned, 1))


def _content(one: Question | Concept | Described) -> dict[str, Any]:
    """Return text and answer of a question."""
    if isinstance(one, Question):
        return {"text": one.text, "answer": one.answer, "steps": list(one.steps)}
    if isinstance(one, Concept):
        return {"text": one.title, "answer": one.short, "rubric": list(one.whiteboard)}
    return {"text": one.text, "answer": one.case.good, "limits": dict(one.case.limits)}


def play(
    plan: Plan,
    sheet: Sheet,
    *,
    ask: Ask = input,
    say: Say = print,
    keep: Callable[[Sheet], object] = lambda _: None,
    clock: Callable[[], float] = monotonic,
) -> None:
    """Ask all questions and write the answers to ``sheet``; ``keep`` is called after each answer.

    EOFError (Ctrl-D) and KeyboardInterrupt are the caller's; the sheet then has what was answered.
    """
    _Interview(plan, sheet, ask, say, keep, clock).run()


@dataclass
class _Interview:
    """An interview that is running."""

    plan: Plan
    sheet: Sheet
    ask: Ask
    say: Say
    keep: Callable[[Sheet], object]
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self.said = written("interview", self.plan.language)
        self.loop: dict[str, str] = self.said["loop"]
        self.rng = Random(f"follow-ups {self.plan.seed}")
        self.numeric_in = numeric_language(self.plan.language)

    def run(self) -> None:
        """Ask all questions."""
        plan = self.plan
        count, minutes = len(plan.asked), f"{plan.minutes:g}"
        self.tell("start", seed=plan.seed, count=count, minutes=minutes)
        numeric = any(isinstance(one, Question) for one in plan.asked)
        if numeric and self.numeric_in != plan.language:
            self.tell("english")
        start = self.clock()
        for number, (one, item) in enumerate(zip(plan.asked, plan.items(), strict=True), 1):
            used = int(self.clock() - start)
            self.say("")
            self.tell(
                "question",
                number=number,
                count=count,
                part=self.said["parts"][item.part],
                planned=f"{item.planned:g} min",
                clock=f"{used // 60}:{used % 60:02}",
                minutes=minutes,
            )
            with self.timed(item):
                if isinstance(one, Question):
                    self.numeric(one, item)
                elif isinstance(one, Concept):
                    self.concept(one, item)
                else:
                    self.design(one, item)
                item.finished = True

    @contextmanager
    def timed(self, item: Item) -> Iterator[None]:
        """Add the item to the sheet, with its seconds however it ends."""
        start = self.clock()
        self.sheet.items.append(item)
        try:
            yield
        finally:
            item.seconds = self.clock() - start
            if item.answered:
                self.keep(self.sheet)

    def tell(self, key: str, **words: Any) -> None:
        """Print a text of the loop."""
        self.say(folded(self.loop[key].format_map(words)))

    def numeric(self, one: Question, item: Item) -> None:
        """Ask a numeric question, and the follow-up of its mistake."""
        item.of = 1
        self.say(folded(one.text))
        spoken = self.numeric_in
        verdict = quiz.answered(one, self.recorded(item), lambda text: self.say(folded(text)))
        quizzed = texts(spoken)["loop"]
        item.points = int(verdict is not None and verdict.right)
        item.mistake = verdict.mistake if verdict else None
        item.skipped = verdict is None
        said = quizzed["skipped"].format(answer=one.answer) if verdict is None else verdict.message
        self.say(folded(said))
        self.say(quizzed["steps"])
        for step in one.steps:
            self.say(folded(f"- {step}"))
        if verdict is not None:
            self.follow_up(item, **self._after(one, verdict))

    def _after(self, one: Question, verdict: Verdict) -> dict[str, str]:
        """Return the follow-up of a verdict: of the mistake, or one that goes further."""
        if verdict.right:
            return dict(self.said["topics"][one.topic])
        return dict(self.said["follow-ups"][group_of(verdict.mistake)])

    def concept(self, one: Concept, item: Item) -> None:
        """Ask a concept question; the candidate scores it by the points of the whiteboard."""
        item.of = len(one.whiteboard)
        self.say(folded(one.title))
        self.tell("notes")
        item.skipped = not self.free(item.answers, item)
        self.tell("short")
        self.say(folded(one.short))
        self.tell("drawing")
        self.say(one.drawing)
        if item.skipped:
            for point in one.whiteboard:
                self.say(folded(f"- {point}"))
            return
        self.tell("rubric")
        for number, point in enumerate(one.whiteboard, 1):
            self.say(folded(f"{number}. {point}"))
            item.points += self.yes(item)
        self.tell("wrong", wrong=one.wrong)
        self.tell("why-wrong", why=one.why_wrong)
        if one.follow_ups:
            chosen = self.rng.choice(one.follow_ups)
            self.follow_up(item, chosen.ask, chosen.answer)

    def design(self, one: Described, item: Item) -> None:
        """Ask for up to three proposals; points are the limits that the last one keeps."""
        item.of = 1 + len(one.case.limits)
        self.say(repr(one))
        self.tell("proposals", most=PROPOSALS)
        before: Answer | None = None
        asked = set[str]()
        while len(item.proposals) < PROPOSALS:
            words = {"number": len(item.proposals) + 1, "most": PROPOSALS}
            text = self.ask(self.loop["proposal"].format_map(words)).strip()
            if text.lower() == SKIP or (not text and before is not None):
                item.skipped = before is None
                break
            try:
                given = design.answer(one.case, text, before, self.plan.language)
            except ValueError as error:
                self.say(folded(f"{error}."))
                continue
            before = given
            item.answers.append(text)
            item.proposals.append(given.as_dict())
            item.mistake = given.mistake
            item.points = sum(margin.holds for margin in given.margins)
            self.keep(self.sheet)
            self.say(repr(given))
            if (named := given.mistake or "") not in asked:
                asked.add(named)
                self.follow_up(item, given.follow_up.ask, given.follow_up.answer)
        if item.skipped:
            self.tell("skipped")
        good = design.answer(one.case, one.case.good, None, self.plan.language)
        first = good.message.split("\n")[0]
        self.tell("reference", proposal=one.case.good, message=first)

    def follow_up(self, item: Item, ask: str, answer: str) -> None:
        """Ask a follow-up; the candidate scores the answer."""
        row = FollowedUp(ask)
        item.follow_ups.append(row)
        self.tell("follow-up", ask=ask)
        self.free(row.answers, item)
        self.tell("model", answer=answer)
        self.tell("made")
        row.points = self.yes(item)

    def free(self, lines: list[str], item: Item) -> bool:
        """Read lines until an empty one; False if the candidate skips."""
        while line := self.ask(self.loop["note"]).strip():
            if line.lower() == SKIP and not lines:
                return False
            lines.append(line)
            self.keep(self.sheet)
        item.spoken = True
        return True

    def yes(self, item: Item) -> int:
        """Return 1 for yes and 0 for no."""
        while (typed := self.ask(self.loop["yes-no"]).strip().lower()) not in (*YES, *NO):
            self.tell("again")
        item.spoken = True
        return int(typed in YES)

    def recorded(self, item: Item) -> Ask:
        """Return ``ask`` that also writes each answer to the item."""

        def ask(prompt: str) -> str:
            typed = self.ask(prompt)
            if typed.strip().lower() not in quiz.SKIP:
                item.answers.append(typed.strip())
                self.keep(self.sheet)
            return typed

        return ask
