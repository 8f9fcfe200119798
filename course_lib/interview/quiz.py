"""``course quiz``: choose questions, ask them in a terminal or a notebook, and keep the score.

In a notebook::

    from course_lib.interview import quiz

    q = quiz.question("memory", seed=3)
    print(q.text)
    print(q.mark("12 GB"))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from textwrap import fill

from course_lib.interview.marking import Verdict, mark
from course_lib.interview.questions import Question, Template, make, texts
from course_lib.interview.templates import TEMPLATES
from course_lib.planner.configuration import suggestion

DIAGNOSIS = 12  # questions
SKIP = ("s", "skip")
ALIASES = {  # what readers type, and the topic that has it
    **dict.fromkeys("zero fsdp adam optimizer activations recomputation states".split(), "memory"),
    **dict.fromkeys("collectives communication bytes dp tp sp cp ep tensor".split(), "volume"),
    **dict.fromkeys("pipeline pipelines pp 1f1b schedule schedules".split(), "bubble"),
    **dict.fromkeys("mfu compute".split(), "flops"),
    **dict.fromkeys("groups ranks mesh".split(), "layouts"),
    **dict.fromkeys("cache inference serving decode".split(), "kv"),
}
COLUMNS = {"en": 80, "zh": 40}  # characters of a line; a Chinese character takes two columns
MOST = 1000  # questions at once
READ_FIRST = 3  # lessons


def topics() -> list[str]:
    """Return the topics, in the order in which a reader meets them."""
    return list(texts()["topics"])


def templates(topic: str | None = None) -> list[Template]:
    """Return the templates of ``topic``, or all; ValueError with the nearest topics if unknown."""
    if topic is None:
        return list(TEMPLATES)
    name = topic.strip().lower()
    if name in ALIASES:
        raise ValueError(f"no topic is called {topic!r}; use {ALIASES[name]}")
    if name not in topics():
        raise ValueError(f"no topic is called {topic!r}; {suggestion(name, topics())}")
    return [template for template in TEMPLATES if template.topic == name]


def question(name: str | None = None, seed: int = 0, language: str = "en") -> Question:
    """Return a question of a topic ("memory") or of a template ("memory-zero-1"), or any.

    The same seed gives the same question. Raises ValueError for an unknown name.
    """
    for template in TEMPLATES:
        if template.id == name:
            return make(template, seed, language)
    return questions(name, seed=seed, count=1, language=language)[0]


def questions(
    topic: str | None = None, *, seed: int = 0, count: int = 5, language: str = "en"
) -> list[Question]:
    """Return ``count`` questions of ``topic``; no template comes twice before all came once."""
    if not 1 <= count <= MOST:
        raise ValueError(f"expected count from 1 to {MOST:,}, got count={count}")
    found = templates(topic)
    rng, chosen = Random(f"quiz {topic} {seed}"), list[Question]()
    while len(chosen) < count:
        again = rng.sample(found, len(found))[: count - len(chosen)]
        chosen += [make(template, seed + len(chosen) // len(found), language) for template in again]
    return chosen


def diagnosis(seed: int = 0, language: str = "en") -> list[Question]:
    """Return 12 questions over all topics: one of each, and a second one of the larger topics."""
    rng = Random(f"diagnosis {seed}")
    mixed = {topic: rng.sample(found := templates(topic), len(found)) for topic in topics()}
    largest = sorted(mixed, key=lambda topic: -len(mixed[topic]))[: DIAGNOSIS - len(mixed)]
    return [
        make(template, seed, language)
        for topic, found in mixed.items()
        for template in found[: 1 + (topic in largest)]
    ]


@dataclass
class Score:
    """The verdicts so far, with their questions; a skipped question has the verdict None."""

    language: str = "en"
    marked: list[tuple[Question, Verdict | None]] = field(default_factory=list)

    @property
    def right(self) -> int:
        """How many answers were right."""
        return sum(_is_right(verdict) for _, verdict in self.marked)

    def read_first(self) -> list[str]:
        """Return at most three lessons with most wrong or skipped answers, early ones first."""
        wrong = Counter(q.lesson for q, verdict in self.marked if not _is_right(verdict))
        return sorted(wrong, key=lambda lesson: (-wrong[lesson], lesson))[:READ_FIRST]

    def __str__(self) -> str:
        written = texts(self.language)
        loop = written["loop"]
        if not self.marked:
            return str(loop["no-answer"])
        lines = [loop["score"].format(right=self.right, marked=len(self.marked))]
        for topic, words in written["topics"].items():
            own = [verdict for q, verdict in self.marked if q.topic == topic]
            if own:
                right = sum(map(_is_right, own))
                line = loop["of-topic"].format(topic=words, right=right, marked=len(own))
                lines.append(f"  {line}")
        lessons = ", ".join(self.read_first())
        lines.append(loop["read-first"].format(lessons=lessons) if lessons else loop["all-right"])
        return "\n".join(lines)


def _is_right(verdict: Verdict | None) -> bool:
    return verdict is not None and verdict.right


def play(
    asked: Sequence[Question],
    score: Score,
    ask: Callable[[str], str] = input,
    say: Callable[[str], None] = print,
) -> None:
    """Ask the questions one after another and add the verdicts to ``score``.

    Ends early where ``ask`` raises EOFError (Ctrl-D). KeyboardInterrupt is the caller's.
    """
    written = texts(score.language)
    loop, width = written["loop"], COLUMNS[score.language]
    for number, one in enumerate(asked, 1):
        topic = written["topics"][one.topic]
        say("\n" + loop["question"].format(number=number, count=len(asked), topic=topic))
        say(fill(one.text, width))
        try:
            verdict = answered(one, ask, say)
        except EOFError:
            say("")
            return
        score.marked.append((one, verdict))
        said = loop["skipped"].format(answer=one.answer) if verdict is None else verdict.message
        say(fill(said, width))
        say(loop["steps"])
        for step in one.steps:
            say(fill(step, width, initial_indent="  ", subsequent_indent="  "))
        say(loop["lesson"].format(lesson=one.lesson))


def answered(
    one: Question, ask: Callable[[str], str], say: Callable[[str], object]
) -> Verdict | None:
    """Return the verdict on the first answer that can be marked; None if the reader skips."""
    prompt = texts(one.language)["loop"]["prompt"]
    while True:
        answer = ask(prompt).strip()
        if answer.lower() in SKIP:
            return None
        verdict = mark(one, answer)
        if verdict.counts:
            return verdict
        say(fill(verdict.message, COLUMNS[one.language]))
