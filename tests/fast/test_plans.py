"""The plans in docs: their minutes add up, are the lessons' own, and what they name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from course_lib.grading import registry

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PLANS = ("workshops.md", "self-study.md", "interview.md")
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
            if link is None:
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
    for exercise in re.findall(r"\b\d\d-\d\b", text):
        registry.find(exercise)


def test_the_four_weeks_have_every_lesson():
    text = (DOCS / "self-study.md").read_text()
    for notebook in (ROOT / "notebooks").glob("[0-9][0-9]*_*.py"):
        assert f"../notebooks/{notebook.stem}.ipynb" in text, notebook.stem


@pytest.mark.parametrize("week", ["interview.md"])
def test_seven_days_of_ninety_minutes(week):
    assert [total for _, total in tables(week)] == [90] * 7
