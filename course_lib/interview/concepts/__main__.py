"""Write docs/questions.md and docs/questions.zh.md: all concept questions, a page per language."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from course_lib.interview.concepts import Concept, concepts, read, topics
from course_lib.interview.written import LANGUAGES

DOCS = Path(__file__).parents[3] / "docs"
LESSONS = {path.stem[: path.stem.index("_")]: path for path in DOCS.parent.glob("notebooks/*.py")}


def target(language: str) -> Path:
    """Return the file of the page in ``language``."""
    return DOCS / ("questions.md" if language == "en" else f"questions.{language}.md")


def page(language: str = "en") -> str:
    """Return the page in ``language``: an introduction, the contents, and each question."""
    words = read(language, "page")
    parts = [f"# {words['title']}", words["introduction"].strip(), f"## {words['contents']}"]
    by_topic = {
        title: [one for one in concepts(language) if one.topic == topic]
        for topic, title in topics(language).items()
    }
    lines = []
    for title, questions in by_topic.items():
        lines.append(f"- [{title}](#{anchor(title)})")
        lines += [f"  - [{one.title}](#{anchor(one.title)})" for one in questions]
    parts.append("\n".join(lines))
    for title, questions in by_topic.items():
        parts.append(f"## {title}")
        for one in questions:
            parts += _entry(one, words["labels"])
    return "\n\n".join(parts) + "\n"


def anchor(title: str) -> str:
    """Return the name that a page gives to the heading ``title``, as GitHub and MyST do."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


def _entry(one: Concept, labels: dict[str, str]) -> Iterator[str]:
    """Yield the paragraphs of a question."""
    lesson = LESSONS[one.lesson]
    link = f"[{one.lesson}](../notebooks/{lesson.stem}.ipynb)"
    yield f"### {one.title}"
    yield f"**{labels['short']}**{labels['lesson'].format(link)}"
    yield one.short
    yield f"**{labels['whiteboard']}**"
    yield f"```text\n{one.drawing}\n```"
    yield "\n".join(f"{number}. {step}" for number, step in enumerate(one.whiteboard, 1))
    yield f"**{labels['wrong']}**{labels['quote'].format(one.wrong)}"
    yield one.why_wrong
    yield f"**{labels['follow_ups']}**"
    yield "\n".join(f"- *{each.ask}* {each.answer}" for each in one.follow_ups)


if __name__ == "__main__":
    for language in LANGUAGES:
        target(language).write_text(page(language), encoding="utf-8")
