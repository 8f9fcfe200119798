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
from course_lib.interview.agenda import Plan, group_of
from course_lib.interview.concepts import Concept
from course_lib.interview.design import Answer, Described
from course_lib.interview.lines import folded
from course_lib.interview.marking import Verdict
from course_lib.interview.questions import Question, texts
from course_lib.interview.sheet import FollowedUp, Item, Sheet
from course_lib.interview.written import written

PROPOSALS = 3
APART = ("question", "short", "rubric", "wrong", "follow-up", "proposals", "reference", "skipped")
YES, NO = ("y", "yes", "是", "对"), ("n", "no", "否", "不")
Ask = Callable[[str], str]
Say = Callable[[str], object]


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

    def run(self) -> None:
        """Ask all questions."""
        plan = self.plan
        count, minutes = len(plan.asked), f"{plan.minutes:g}"
        self.tell("start", seed=plan.seed, count=count, minutes=minutes)
        start = self.clock()
        for number, (one, item) in enumerate(zip(plan.asked, plan.items(), strict=True), 1):
            used = int(self.clock() - start)
            self.tell(
                "question",
                number=number,
                count=count,
                part=self.said["parts"][item.part],
                planned=f"{item.planned:g}",
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
            self.tell("took", used=f"{item.seconds / 60:.1f}", planned=f"{item.planned:g}")

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
        """Print a text of the loop, some after an empty line."""
        if key in APART:
            self.say("")
        self.say(folded(self.loop[key].format_map(words)))

    def numeric(self, one: Question, item: Item) -> None:
        """Ask a numeric question, and the follow-up of its mistake."""
        item.of = 1
        self.say(folded(one.text))
        verdict = quiz.answered(one, self.recorded(item), lambda text: self.say(folded(text)))
        quizzed = texts(self.plan.language)["loop"]
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
            self.say("")
            words = {"number": len(item.proposals) + 1, "most": PROPOSALS}
            text = self.ask(self.loop["proposal"].format_map(words)).strip()
            if text.lower() in quiz.SKIP or (not text and before is not None):
                item.skipped = before is None
                break
            try:
                given = design.answer(one.case, text, before, self.plan.language)
            except ValueError as error:
                stop = "" if str(error).endswith(("?", "？")) else self.loop["stop"]
                self.say(folded(f"{error}{stop}"))
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
            if line.lower() in quiz.SKIP and not lines:
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
