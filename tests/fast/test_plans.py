"""The plans in docs: their minutes add up, are the lessons' own, and what they name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from course_lib.cli.app import app
from course_lib.grading import registry
from course_lib.grading.syllabus import NAMES
from course_lib.interview import quiz
from course_lib.interview.agenda import make_plan
from course_lib.interview.concepts import concepts
from course_lib.interview.concepts.__main__ import anchor

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
WEEK = {"en": "interview.md", "zh": "interview.zh.md"}
PLANS = ("workshops.md", "self-study.md", *WEEK.values())
EXIT_QUESTIONS = re.compile("exit questions", re.IGNORECASE)  # a lesson that is not read in full
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
        total = re.match(r"(?:Total: |合计：)(\d+) ", line)
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
            if link is None or EXIT_QUESTIONS.search(row):
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
    verbs |= {group.name for group in app.registered_groups}
    for verb in re.findall(r"`course (\w+)", text):
        assert verb in verbs
    for topic in re.findall(r"--topic (\w+)", text):
        assert topic in quiz.topics()


def test_the_four_weeks_have_every_lesson():
    text = (DOCS / "self-study.md").read_text()
    for notebook in (ROOT / "notebooks").glob("[0-9][0-9]*_*.py"):
        assert f"../notebooks/{notebook.stem}.ipynb" in text, notebook.stem


def days(language: str) -> list[tuple[str, list[str], int]]:
    """Text, rows and stated total of each day of the seven."""
    texts = re.split(r"^## ", (DOCS / WEEK[language]).read_text(), flags=re.MULTILINE)
    own = [text for text in texts if re.match("Day|第", text)]
    found = zip(own, tables(WEEK[language]), strict=True)
    return [(text, rows, total) for text, (rows, total) in found]


def minutes(rows: list[str], words: str) -> list[int]:
    """The minutes of the rows with ``words``."""
    return [int(re.findall(r"\d+", row)[0]) for row in rows if re.search(words, row, re.IGNORECASE)]


@pytest.mark.parametrize("language", WEEK)
def test_seven_days_of_at_most_ninety_minutes(language):
    found = days(language)
    assert [re.findall(r"\d", text)[0] for text, _, _ in found] == list("1234567")
    assert all(60 <= total <= 90 for _, _, total in found)


@pytest.mark.parametrize("language", WEEK)
def test_every_lesson_is_in_one_of_the_seven_days(language):
    rows = [row for _, rows, _ in days(language) for row in rows]
    numbers = [number for number in NAMES if number.isdigit()]
    found = {number: [row for row in rows if f"[{number}]" in row] for number in numbers}
    assert {number: len(own) for number, own in found.items()} == dict.fromkeys(numbers, 1)
    full = [number for number, (row,) in found.items() if not EXIT_QUESTIONS.search(row)]
    assert len(full) == CORE + 1
    assert INTERVIEW in full
    assert all(10 <= each <= 15 for each in minutes(rows, EXIT_QUESTIONS.pattern))


@pytest.mark.parametrize("language", WEEK)
def test_every_concept_question_is_in_one_of_the_seven_days(language):
    page = WEEK[language].replace("interview", "questions").replace(".", r"\.")
    asked = []
    for text, rows, _ in days(language):
        own = re.findall(rf"^- \[(.+)\]\({page}#(.+)\)$", text, re.MULTILINE)
        assert (
            2 * len(own)
            <= sum(minutes(rows, r"\| (concept questions|概念题) \|"))
            <= 2 * len(own) + 5
        )
        asked += own
    every = [(one.title, anchor(one.title)) for one in concepts(language)]
    assert sorted(asked) == sorted(every)


@pytest.mark.parametrize("language", WEEK)
def test_the_seven_days_practice_all_kinds_of_questions(language):
    found = [rows for _, rows, _ in days(language)]
    assert sum(bool(minutes(rows, r"\[katas\]")) for rows in found) >= 2
    assert len(minutes(found[0], "`course quiz --diagnose")) == 1
    assert minutes(found[-1], "`course interview") == [make_plan(0).minutes]


def test_the_seven_days_are_the_same_in_both_languages():
    named = re.compile(r"\.\./notebooks/\w+|`course [^`]+`|16b-\d")
    rows = {
        language: [
            (re.findall(r"\d+", row)[0], sorted(named.findall(row.replace(" --language zh", ""))))
            for _, own, _ in days(language)
            for row in own
        ]
        for language in WEEK
    }
    assert rows["en"] == rows["zh"]
