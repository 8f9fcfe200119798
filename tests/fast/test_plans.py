"""The plans in docs: their minutes add up, are the lessons' own, and what they name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from course_lib.cli.app import app
from course_lib.grading import registry
from course_lib.grading.syllabus import NAMES
from course_lib.interview import quiz
from course_lib.interview.concepts import concepts
from course_lib.interview.concepts.__main__ import anchor

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PLANS = ("workshops.md", "self-study.md", "interview.md")
EXIT_QUESTIONS = "exit questions of ["  # a lesson of which only these and its cheat-sheet are read
CORE = 6  # lessons that the seven days read in full, beside the lesson on the interview itself
INTERVIEW = "16"
BANNER = re.compile(r"\*(\d+) minutes to read and run(?:, (\d+) to build)?")


def banner(notebook: str) -> tuple[int, int | None]:
    source = (ROOT / "notebooks" / notebook).with_suffix(".py").read_text()
    found = BANNER.search(source)
    assert found, f"{notebook} says no minutes"
    return int(found[1]), int(found[2]) if found[2] else None


def tables(page: str) -> list[tuple[list[str], int]]:
    """Rows and stated total of each table of a page."""
    found: list[tuple[list[str], int]] = []
    rows: list[str] = []
    for line in (DOCS / page).read_text().splitlines():
        if line.startswith("|") and not re.match(r"\|(-|:|\s)+\|", line):
            rows.append(line)
        total = re.match(r"Total: (\d+) minutes", line)
        if total:
            found.append((rows[1:], int(total[1])))
            rows = []
    return found


@pytest.mark.parametrize("page", PLANS)
def test_minutes_add_up(page):
    found = tables(page)
    assert len(found) >= 3
    for rows, total in found:
        minutes = [int(cell) for row in rows for cell in re.findall(r"\|\s*(\d+)\s*(?=\|)", row)]
        assert sum(minutes) == total, rows[0]


@pytest.mark.parametrize("page", PLANS)
def test_lessons_take_as_long_as_their_banners_say(page):
    seen = 0
    for rows, _ in tables(page):
        for row in rows:
            link = re.search(r"\(\.\./notebooks/(\d\d_\w+)\.ipynb\)", row)
            numbers = [int(cell) for cell in re.findall(r"\|\s*(\d+)\s*(?=\|)", row)]
            if link is None or EXIT_QUESTIONS in row:
                continue
            read, build = banner(link[1])
            assert numbers[0] == read, row
            if len(numbers) == 2:
                assert numbers[1] == build, row
            seen += 1
    assert seen >= 6


@pytest.mark.parametrize("page", PLANS)
def test_what_is_named_is_there(page):
    text = (DOCS / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (DOCS / target).exists(), target
    for exercise in re.findall(r"\b\d\d[a-z]?-\d\b", text):
        registry.find(exercise)
    verbs = {command.name or command.callback.__name__ for command in app.registered_commands}
    for verb in re.findall(r"`course (\w+)", text):
        assert verb in verbs
    for topic in re.findall(r"--topic (\w+)", text):
        assert topic in quiz.topics()


def test_the_four_weeks_have_every_lesson():
    text = (DOCS / "self-study.md").read_text()
    for notebook in (ROOT / "notebooks").glob("[0-9][0-9]*_*.py"):
        assert f"../notebooks/{notebook.stem}.ipynb" in text, notebook.stem


def days() -> list[tuple[str, list[str], int]]:
    """Text, rows and stated total of each day of the seven."""
    page = (DOCS / "interview.md").read_text().partition("## With time left")[0]
    texts = page.split("\n## Day ")[1:]
    return [
        (text, rows, total)
        for text, (rows, total) in zip(texts, tables("interview.md"), strict=True)
    ]


def minutes(rows: list[str], words: str) -> list[int]:
    """The minutes of the rows with ``words``."""
    return [int(re.findall(r"\d+", row)[0]) for row in rows if words in row]


def test_seven_days_of_at_most_ninety_minutes():
    assert [text[0] for text, _, _ in days()] == list("1234567")
    assert all(60 <= total <= 90 for _, _, total in days())


def test_every_lesson_is_in_one_of_the_seven_days():
    rows = [row for _, rows, _ in days() for row in rows]
    found = {
        number: [row for row in rows if f"[{number}]" in row]
        for number in NAMES
        if number.isdigit()
    }
    assert {number: len(own) for number, own in found.items()} == dict.fromkeys(found, 1)
    full = [number for number, (row,) in found.items() if EXIT_QUESTIONS not in row]
    assert len(full) == CORE + 1
    assert INTERVIEW in full
    assert all(10 <= each <= 15 for each in minutes(rows, EXIT_QUESTIONS))


def test_every_concept_question_is_in_one_of_the_seven_days():
    asked = []
    for text, rows, _ in days():
        own = re.findall(r"^- \[(.+)\]\(questions\.md#(.+)\)$", text, re.MULTILINE)
        assert 2 * len(own) <= sum(minutes(rows, "| concept questions |")) <= 2 * len(own) + 5
        asked += own
    assert sorted(asked) == sorted((one.title, anchor(one.title)) for one in concepts())


def test_the_seven_days_practice_all_kinds_of_questions():
    found = days()
    assert sum(bool(minutes(rows, "[katas]")) for _, rows, _ in found) >= 2
    assert len(minutes(found[0][1], "`course quiz --diagnose`")) == 1
    assert len(minutes(found[-1][1], "`course interview`")) == 1
