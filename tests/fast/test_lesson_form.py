"""The form of every lesson: what it must have, and what it must not exceed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lesson_words import WORDS, words, words_in

from course_lib.grading.source import Lesson, read_lesson
from course_lib.grading.syllabus import MINUTES

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "notebooks").glob("[0-9][0-9]*_*.py"))
LARGEST = 1_000_000  # bytes of a notebook
LONGEST = 60  # minutes to read and run
UNTIMED = "*Untimed.*"  # an arena: rules and a table, no lesson in this form
START = "00"  # teaches no technique: no lab, no cheat-sheet
# These lessons rehearse the others: no technique and no exercises of their own. Pages they lead to.
REHEARSALS = {"16": ("interview", "formulas", "questions", "claims", "glossary")}
ANSWER = "<details><summary>Answer</summary>"


def texts(lesson: Lesson, kind: str) -> list[str]:
    """The cells of the lesson itself."""
    return [
        cell.source for cell in lesson.cells if cell.kind == kind and not (cell.ex or cell.role)
    ]


def section(text: str, heading: str) -> str:
    """What stands below that heading or bold beginning of a line; "" where there is none."""
    begin = rf"^(?:## |\*\*){heading}.*?$"
    found = re.search(rf"{begin}(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return found[1] if found else ""


def minutes(text: str) -> tuple[str, str]:
    """The banner's minutes to read and to build; "" for those that it does not say."""
    read, build = (MINUTES.search(text) or re.match("()()", "")).groups()
    return read, build or ""


def shortcomings(lesson: Lesson) -> list[str]:
    """What the lesson lacks, or has too much of; [] where it is in form."""
    text, code = "\n".join(texts(lesson, "markdown")), "\n".join(texts(lesson, "code"))
    missing = {}
    if (count := words(lesson)) > WORDS:
        missing[f"{count} words of explanation, of at most {WORDS}"] = True
    if UNTIMED not in text:
        missing |= _timed(text, code)
        if lesson.number in REHEARSALS:
            missing |= _rehearsing(lesson, text)
        else:
            missing |= _practiced(text)
        if lesson.number not in (START, *REHEARSALS):
            missing |= _technical(lesson.number, text, code)
    return [what for what, lacks in missing.items() if lacks]


def _timed(text: str, code: str) -> dict[str, bool]:
    read, _ = minutes(text)
    return {
        "no banner with minutes to read": not read,
        f"more than {LONGEST} minutes to read and run": bool(read) and int(read) > LONGEST,
        "fewer than two claims to vote on": len(re.findall(r"^vote_\d = None", code, re.M)) < 2,
        "a claim is not settled": len(re.findall(r"^\*\*Claim \d", text, re.M))
        != len(re.findall(r"^vote_\d = None", code, re.M)),
        "no typed prediction": not re.search(r"^predicted_\w+ = None", code, re.M),
        "not five exit questions": section(text, "Exit questions").count(ANSWER) != 5,
        "no source with a link": "](https://" not in section(text, "Sources"),
    }


def _practiced(text: str) -> dict[str, bool]:
    return {
        "no banner with minutes to read and to build": not all(minutes(text)),
        "no way to the exercises": "](../exercises/" not in section(text, "Your turn"),
        "nothing of the same in PyTorch": not section(text, "The same in PyTorch"),
    }


def _rehearsing(lesson: Lesson, text: str) -> dict[str, bool]:
    missing = {
        "minutes to build, or exercises": bool(minutes(text)[1]) or any(c.ex for c in lesson.cells),
    }
    for page in REHEARSALS[lesson.number]:
        missing[f"no way to docs/{page}.md"] = f"](../docs/{page}.md)" not in text
    return missing


def _technical(number: str, text: str, code: str) -> dict[str, bool]:
    lab = re.search(rf'^(\w+) = Lab\(\s*"{number}",\s*SEED,', code, re.M)
    return {
        "no break-it lab": not section(text, "Break it"),
        "its lab is not the library's": not lab,
        "its lab is not graded": not lab or f"{lab[1]}.grade(diagnosis)" not in code,
        "not a word on when not to use it": not section(text, "When not to"),
        "no table that grows": not section(text, "The table that grows"),
        "no cheat-sheet": not section(text, "Cheat-sheet"),
    }


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_a_lesson_is_in_form(path):
    assert shortcomings(read_lesson(path)) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_its_notebooks_are_small(path):
    for kind in ("notebooks", "exercises", "solutions"):
        notebook = ROOT / kind / f"{path.stem}.ipynb"
        assert not notebook.exists() or notebook.stat().st_size < LARGEST


def changed(path: Path, tmp_path: Path, old: str, new: str) -> list[str]:
    text = path.read_text()
    assert old in text
    copy = tmp_path / path.name
    copy.write_text(text.replace(old, new))
    return shortcomings(read_lesson(copy))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (" to read and run, ", " to read; ", "no banner with minutes to read and to build"),
        ("*40 minutes", "*75 minutes", "more than 60 minutes to read and run"),
        (
            "# ## Four copies, one sum\n",
            "# ## Four copies, one sum\n# " + 1000 * "too long ",
            "of at most 1800",
        ),
        ("vote_2 = None", "", "fewer than two claims to vote on"),
        ("# **Claim 2", "# Claim 2", "a claim is not settled"),
        ("# **5.**", "# **5.**\n# " + ANSWER, "not five exit questions"),
        ("https://", "", "no source with a link"),
        ("# ## When not to", "# ## When", "not a word on when not to use it"),
        ('Lab("03"', 'Lab("04"', "its lab is not the library's"),
        ("lab.grade(diagnosis)", "", "its lab is not graded"),
        ("# **Cheat-sheet", "# **Formulas", "no cheat-sheet"),
    ],
)
def test_what_a_lesson_lacks_is_said(tmp_path, old, new, words):
    path = next(path for path in SOURCES if path.name.startswith("03"))
    assert any(words in one for one in changed(path, tmp_path, old, new))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (" to read and run.*", " to read.*", "no banner with minutes to read"),
        (" to read and run.*", " to read and run, 10 to build.*", "minutes to build, or exercises"),
        ("# **5.**", "# **5.**\n# " + ANSWER, "not five exit questions"),
        ("](../docs/formulas.md)", "](formulas)", "no way to docs/formulas.md"),
        ("# **Claim 2", "# Claim 2", "a claim is not settled"),
    ],
)
def test_what_a_rehearsal_lacks_is_said(tmp_path, old, new, words):
    path = next(path for path in SOURCES if path.name.startswith("16_"))
    assert any(words in one for one in changed(path, tmp_path, old, new))


def test_code_pictures_and_addresses_are_no_explanation():
    assert words_in("One two.\n```\nthree\n```\n$$four$$ [five](https://six) <b>seven</b>") == 4


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        ("03", "shapes"),  # ranks that do not agree on a shape
        ("03", "seeds"),  # a seed that is skewed by rank
        ("03", "skipped"),  # a hang
        ("04", "double"),  # a norm that is counted twice
        ("06", "norms"),  # gradients of norms that nobody sums
        ("07", "tied"),  # tied weights that drift apart
        ("10", "group"),  # the wrong group
        ("11", "order"),  # calls in opposite order
    ],
)
def test_the_faults_of_practice_are_in_the_labs(number, cause):
    for path in (path for path in SOURCES if path.name.startswith(f"{number}_")):
        assert re.search(rf'^ +"{cause}": \(', path.read_text(), re.MULTILINE)
