"""The form of every lesson: what it must have, and what it must not exceed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lesson_words import WORDS, words, words_in

from course_lib.grading.source import Lesson, read_lesson
from course_lib.grading.syllabus import MINUTES
from course_lib.interview.claims import table

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "notebooks").glob("[0-9][0-9]*_*.py"))
LARGEST = 1_000_000  # bytes of a notebook
LONGEST = 60  # minutes to read and run
UNTIMED = "*Untimed.*"  # an arena: rules and a table, no lesson in this form
START = "00"  # teaches no technique: no lab, no cheat-sheet
GAME = "15"  # votes on common claims instead of predictions, a lab and exercises
INTERVIEW = "16"  # rehearses the others: no technique, no lab, no exercises
PAGES = ("interview", "formulas", "questions", "claims", "glossary")  # to which it leads
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
        missing |= _timed(text)
        missing |= _game(text, code) if lesson.number == GAME else _voted(text, code)
        if lesson.number == INTERVIEW:
            missing |= _interview(lesson, text)
        elif lesson.number != GAME:
            missing |= _practiced(text)
        if lesson.number not in (START, GAME, INTERVIEW):
            missing |= _technical(lesson.number, text, code)
    return [what for what, lacks in missing.items() if lacks]


def _timed(text: str) -> dict[str, bool]:
    read, _ = minutes(text)
    return {
        "no banner with minutes to read": not read,
        f"more than {LONGEST} minutes to read and run": bool(read) and int(read) > LONGEST,
        "not five exit questions": section(text, "Exit questions").count(ANSWER) != 5,
        "no source with a link": "](https://" not in section(text, "Sources"),
    }


def _voted(text: str, code: str) -> dict[str, bool]:
    return {
        "fewer than two claims to vote on": len(re.findall(r"^vote_\d = None", code, re.M)) < 2,
        "a claim is not settled": len(re.findall(r"^\*\*Claim \d", text, re.M))
        != len(re.findall(r"^vote_\d = None", code, re.M)),
        "no typed prediction": not re.search(r"^predicted_\w+ = None", code, re.M),
    }


def _practiced(text: str) -> dict[str, bool]:
    return {
        "no banner with minutes to read and to build": not all(minutes(text)),
        "no way to the exercises": "](../exercises/" not in section(text, "Your turn"),
        "nothing of the same in PyTorch": not section(text, "The same in PyTorch"),
    }


def _interview(lesson: Lesson, text: str) -> dict[str, bool]:
    exercises = any(cell.ex for cell in lesson.cells)
    missing = {f"no way to docs/{page}.md": f"](../docs/{page}.md)" not in text for page in PAGES}
    return missing | {"minutes to build, or exercises": bool(minutes(text)[1]) or exercises}


def _game(text: str, code: str) -> dict[str, bool]:
    """A claim is settled by ``hear``, which runs its check; code is settled by runs on ranks."""
    ids = [name for names in table().lesson.values() for name in names]
    claims = [" ".join(table().claim(name).claim.split()) for name in ids]
    told = re.findall(
        r'^(\d+)\. (?:About [^:"]*: |Beside it: )?"(.*?)"(?=$| )',
        re.sub(r"\n {2,}", " ", text),
        re.M,
    )
    votes = [f"vote_{n}" for n in range(1, len(claims) + 1)]
    heard, first = [], 0
    for subject, own in table().lesson.items():
        heard.append(f'trial.hear("{subject}", {", ".join(votes[first : first + len(own)])})')
        first += len(own)
    return {
        "a claim is not quoted in full": not set(claims) <= {quoted for _, quoted in told},
        "the claims are not in the order of the table": [n for n, _ in told]
        != [str(n) for n in range(1, len(claims) + 1)]
        or [quoted for _, quoted in told] != claims,
        "not one vote for each claim": re.findall(r"^(vote_\d+) = None$", code, re.M) != votes,
        "a claim is not settled": re.findall(r"^trial\.hear\(.*\)$", code, re.M) != heard,
        "no run on ranks that settles code": set(re.findall(r"^ *report\(.+?, (\w+)", code, re.M))
        != {"one_line", "two_messages", "own_group_only", "fsdp_modules"},
        "no contradiction decided": "trial.contradiction(" not in code,
        "no score of the votes": "trial.tally(*VOTES)" not in code,
        "no score of the predictions": "print(score())" not in code,
        "no cheat-sheet": not section(text, "Cheat-sheet"),
    }


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
def test_what_the_interview_lesson_lacks_is_said(tmp_path, old, new, words):
    path = next(path for path in SOURCES if path.name.startswith(f"{INTERVIEW}_"))
    assert any(words in one for one in changed(path, tmp_path, old, new))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("*45 minutes to read and run.*", "", "no banner with minutes to read"),
        ("4.86 TB", "5 TB", "a claim is not quoted in full"),
        ("# 2. About plain", "# 2. Plain", "not in the order of the table"),
        ("vote_7 = None", "", "not one vote for each claim"),
        ('trial.hear("memory", vote_1,', 'trial.hear("memory", vote_2,', "a claim is not settled"),
        ("    report(name, one_line", "    (name, one_line", "no run on ranks"),
        ("print(score())", "", "no score of the predictions"),
        ("trial.tally(*VOTES)", "", "no score of the votes"),
        ("trial.contradiction(", "print(", "no contradiction decided"),
        ("# **5.**", "# **5.**\n# " + ANSWER, "not five exit questions"),
    ],
)
def test_what_the_game_lacks_is_said(tmp_path, old, new, words):
    path = next(path for path in SOURCES if path.name.startswith(GAME))
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
