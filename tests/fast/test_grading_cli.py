"""The verbs of a learner and of a teacher: list, start, check, hint, solution, grade."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import pytest

from course_lib import cli, grading
from course_lib.cli import place
from course_lib.grading import check as check_answer
from course_lib.grading import run, syllabus
from course_lib.grading.catalog import HINTS
from course_lib.grading.check import _note
from course_lib.grading.merge import Merged
from course_lib.grading.progress import Progress
from course_lib.grading.run import Grade, Score

ROOT = Path(__file__).parents[2]


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A course that holds lesson 00 alone."""
    for folder in ("notebooks", "exercises", "solutions"):
        (tmp_path / folder).mkdir()
        for file in (ROOT / folder).glob("00_*.ipynb"):
            shutil.copyfile(file, tmp_path / folder / file.name)
    shutil.copyfile(ROOT / "exercises" / HINTS, tmp_path / "exercises" / HINTS)
    monkeypatch.setattr(place, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def graded(monkeypatch):
    """Stands in for the run: a file is right if its name says so."""
    asked = []

    def grade(path, root, *, seed=None, only=None, say=None, done=None):
        asked.append((Path(path).name, seed, only))
        if "bad" in str(path):
            raise ValueError(f"{path}: this is no notebook")
        first = Score(4, 4) if "right" in str(path) else Score(1, 4, "=1+1 went <wrong>\x07")
        busy = Score(1, 4, "not judged", 3)
        scores = {"00-1": first, "00-2": busy if "busy" in str(path) else Score(4, 4)}
        for ex, score in scores.items() if done else ():
            done(ex, score)
        return Grade(str(path), "00", scores)

    monkeypatch.setattr(run, "grade", grade)
    return asked


def course(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(list(arguments))
    return code, *capsys.readouterr()


def test_the_list_has_every_lesson_and_says_which_are_here(root, capsys):
    code, out, _ = course(capsys, "list")
    assert code == 0
    rows = {line.split()[0]: line for line in out.splitlines() if line[:1].isdigit()}
    assert list(rows) == list(syllabus.NAMES)
    assert re.fullmatch(r"00 +Start here +\d+ +\d+ +0 of 2 +0 of \d+ +-", rows.pop("00"))
    for number, row in rows.items():
        assert row.endswith("not here yet" + " " * 11)
        assert ("*" in row) == (number in syllabus.ELECTIVE or number[-1] == "b")
    assert max(map(len, out.splitlines())) <= 80


def test_the_list_shows_points_and_labs(root, capsys):
    lesson = root / "notebooks" / "00_start_here.ipynb"
    lesson.write_text(lesson.read_text().replace("import torch", 'Lab(\\"00\\", SEED)', 1))
    assert " to do" in course(capsys, "list")[1]
    progress = Progress(root)
    progress.attempt("00-1", 3, 4)
    progress.attempt("00-2", 4, 4)
    progress.lab("00").attempt(2, 5)
    progress.save()
    points = {each.id: each.points for each in syllabus.exercises_of(root, "00")}
    earned = f"{3 + points['00-2']} of {sum(points.values())}"
    out = course(capsys, "list")[1]
    assert re.search(rf"1 of 2 +{earned} +2 of 5$", out, re.MULTILINE)
    assert ("You passed 00-2 before the checks became stricter" in out) == (points["00-2"] > 4)
    progress.lab("00").attempt(5, 5)
    progress.save()
    out = course(capsys, "list")[1]
    assert re.search(rf"^00 .* {earned} +done$", out, re.MULTILINE)
    assert re.search(rf"^ +all .* 1 of 2 +{earned} +1 of 1$", out, re.MULTILINE)
    first, *others = json.loads(course(capsys, "list", "--json")[1])["lessons"]
    assert first["lab"] == {"attempts": 2, "best": 5, "total": 5, "hints": 0}
    assert first["points"] == {"earned": 3 + points["00-2"], "total": sum(points.values())}
    assert (first["here"], first["elective"]) == (True, False)
    assert not any(lesson["here"] for lesson in others)


@pytest.mark.parametrize("notebook", sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")), ids=str)
def test_the_list_calls_a_lesson_as_it_calls_itself(notebook):
    title = json.loads(notebook.read_text())["cells"][0]["source"]
    heading = "".join(title).splitlines()[0].removeprefix("# ").lower()
    number = syllabus.number_of(notebook)
    assert heading.startswith(f"{number} "), heading
    assert syllabus.NAMES[number].split()[0].lower() in heading


def test_start_and_fresh(root, capsys):
    mine = root / "work" / "exercises" / "00_start_here.ipynb"
    assert course(capsys, "start", "0")[0] == 0
    assert mine.read_bytes() == (root / "exercises" / mine.name).read_bytes()
    mine.write_text("my work")
    assert "kept   work/exercises" in course(capsys, "start", "00")[1]
    assert mine.read_text() == "my work"
    for _ in range(2):
        assert "fresh  work/exercises" in course(capsys, "start", "00", "--fresh")[1]
    assert mine.with_name("00_start_here.before-1.ipynb").read_text() == "my work"
    assert mine.with_name("00_start_here.before-2.ipynb").exists()


def test_a_lesson_starts_without_outputs(root, capsys):
    """The outputs of the course would answer a prediction before the learner does."""
    assert course(capsys, "start", "00")[0] == 0
    shipped = json.loads((ROOT / "notebooks" / "00_start_here.ipynb").read_text())
    (root / "notebooks" / "00_start_here.ipynb").write_text(json.dumps(shipped))
    assert course(capsys, "start", "00", "--fresh")[0] == 0
    own = json.loads((root / "work" / "notebooks" / "00_start_here.ipynb").read_text())
    assert [cell["source"] for cell in own["cells"]] == [
        cell["source"] for cell in shipped["cells"]
    ]
    assert any(cell.get("outputs") for cell in shipped["cells"])
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in own["cells"])


def test_hints_and_progress_in_a_notebook(root, capsys, monkeypatch):
    monkeypatch.setattr(sys.modules["course_lib.grading.check"], "ROOT", root)
    grading.hint("00-2")
    grading.hint("00-2")
    shown = capsys.readouterr().out
    assert shown.count("hint 1 of 3: ") == 2
    assert shown.count("hint 2 of 3: ") == 1
    assert Progress(root).of("00-2").hints == 2
    grading.progress()
    assert capsys.readouterr().out == course(capsys, "list")[1]
    with pytest.raises(ValueError, match="lesson 00 has no exercise '00-9'; it has 00-1, 00-2"):
        grading.hint("00-9")


def test_a_lesson_without_exercises_beside_one_that_has_some(root, capsys):
    """08b is neither 08 nor its exercises, in whatever verb."""
    eight, arena = (root / "notebooks" / f"{name}.ipynb" for name in ("08_pipes", "08b_arena"))
    shutil.copyfile(root / "notebooks" / "00_start_here.ipynb", eight)
    shutil.copyfile(eight, root / "exercises" / eight.name)
    notebook = {"cells": [], "metadata": {"course": {"lesson": "08b"}}, "nbformat": 4}
    arena.write_text(json.dumps(notebook | {"nbformat_minor": 5}))
    assert re.search(
        r"^08b The schedule arena \*( +-){5}$", course(capsys, "list")[1], re.MULTILINE
    )
    for typed in ("08b", "8b"):
        assert course(capsys, "start", typed, "--fresh")[1].split()[1:] == [
            "work/notebooks/08b_arena.ipynb"
        ]
    assert "08b" not in course(capsys, "start", "8")[1]
    none = "lesson 08b has no exercises: all of it is in its notebook (course start 08b)"
    assert none in course(capsys, "check", "08b")[2]
    assert "lesson 08b has no exercise '1'; it has none" in course(capsys, "hint", "08b", "1")[2]
    own = root / "work" / "notebooks" / arena.name
    assert "lesson 08b has no exercises" in course(capsys, "grade", str(own))[2]
    notebook["metadata"] = {}
    own.write_text(json.dumps(notebook | {"nbformat_minor": 5}))
    assert "lesson 08b has no exercises" in course(capsys, "grade", str(own))[2], "by its name"


def test_hints_come_rung_by_rung(root, capsys):
    counts = [course(capsys, "hint", "00", "2")[1].count("hint ") for _ in range(4)]
    assert counts == [1, 2, 3, 3]
    assert Progress(root).of("00-2").hints == 3
    assert "hint 2 of 3: " in course(capsys, "hint", "00", "2")[1]


def test_hints_need_no_solutions_and_say_when_they_are_missing(root, capsys):
    shutil.rmtree(root / "solutions")
    assert course(capsys, "hint", "00", "1")[0] == 0
    (root / "exercises" / HINTS).write_text('{"00-2-hint-1": "Count."}')
    assert "hint 1 of 1: Count." in course(capsys, "hint", "00", "2")[1]
    for remove in (False, True):
        if remove:
            (root / "exercises" / HINTS).unlink()
        code, out, err = course(capsys, "hint", "00", "1")
        assert (code, out) == (2, "")
        assert "expected hints to 00-1, found none; git restores the file" in err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda text: re.sub(r'"points": (\d+)', r'"point": \1', text, count=1),
            "points in the check cell of 00-1",
        ),
        (lambda text: text[:-9], "expected a notebook"),
        (lambda text: "[]", "expected a notebook"),
    ],
)
def test_a_broken_notebook_of_the_course_is_one_sentence(root, capsys, change, words):
    file = root / "exercises" / "00_start_here.ipynb"
    file.write_text(change(file.read_text()))
    for verb in (["list"], ["hint", "00", "1"]):
        code, out, err = course(capsys, *verb)
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert words in err
        assert "make notebooks" in err


def test_a_solution_opens_after_an_attempt(root, capsys, graded):
    code, out, err = course(capsys, "solution", "00", "00-1")
    assert (code, out) == (2, "")
    assert "there was no attempt at 00-1 yet" in err
    assert "def coordinates" in course(capsys, "solution", "00", "1", "--yes")[1]
    course(capsys, "start", "00")
    assert course(capsys, "check", "00", "1")[0] == 1
    code, out, _ = course(capsys, "solution", "00", "1")
    assert code == 0
    assert "divmod" in out or "stride" in out or "make_layout" in out
    assert graded == [("00_start_here.ipynb", None, "00-1")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("start 09", "there is no lesson '09'; the lessons are 00"),
        ("check 00", "lesson 00 is not begun: course start 00 copies it"),
        ("check 00 7", "lesson 00 has no exercise '7'; it has 00-1, 00-2"),
        ("hint 00 9", "it has 00-1, 00-2"),
        ("grade right.ipynb --json --csv", "give one of --json, --csv and --junit"),
        ("grade bad.ipynb", "this is no notebook"),
        ("grade", "Missing argument"),
    ],
)
def test_bad_input_is_one_sentence(root, capsys, graded, arguments, words):
    code, _, err = course(capsys, *arguments.split())
    assert code == 2
    assert words in err
    assert len(err.splitlines()) == 1


def test_grade_as_json(root, capsys, graded):
    right = {"passed": 4, "total": 4, "message": "", "not_judged": 0}
    code, out, err = course(capsys, "grade", "right.ipynb", "--json", "--seed", "7")
    assert err.splitlines() == ["right.ipynb: 00-1  4 of 4", "right.ipynb: 00-2  4 of 4"]
    one = json.loads(out)
    exercises = {"00-1": right, "00-2": right}
    assert code == 0
    sums = {"passed": 8, "total": 8, "not_judged": 0}
    assert one == {"file": "right.ipynb", "exercises": exercises} | sums
    code, out, err = course(capsys, "grade", "right.ipynb", "bad.ipynb", "half.ipynb", "--json")
    files = json.loads(out)["files"]
    assert (code, files[0]) == (2, one)
    assert (files[1]["passed"], files[1]["total"]) == (5, 8)
    *files, error = err.splitlines()
    assert files == [
        "right.ipynb (1 of 3): 00-1  4 of 4",
        "right.ipynb (1 of 3): 00-2  4 of 4",
        "right.ipynb (1 of 3): 8 of 8 points",
        "bad.ipynb (2 of 3): not graded",
        "half.ipynb (3 of 3): 00-1  1 of 4",
        "half.ipynb (3 of 3): 00-2  4 of 4",
        "half.ipynb (3 of 3): 5 of 8 points",
    ]
    assert error == "bad.ipynb: this is no notebook."
    assert course(capsys, "grade", "half.ipynb")[0] == 1
    assert graded[0] == ("right.ipynb", 7, None)


def test_grade_as_csv_and_junit(root, capsys, graded):
    code, out, _ = course(capsys, "grade", "right.ipynb", "half.ipynb", "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 1
    assert [row["passed"] for row in rows] == ["4", "4", "1", "4"]
    assert rows[2]["message"].startswith("'=1+1")  # no formula for a spreadsheet
    suite = ElementTree.fromstring(course(capsys, "grade", "half.ipynb", "--junit")[1])[0]
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    assert suite.find("testcase/failure").get("message") == "1 of 4. =1+1 went <wrong>?"


@pytest.mark.parametrize(
    "arguments",
    [
        "right.ipynb half.ipynb --csv class.csv",
        "--csv class.csv right.ipynb half.ipynb",
        "--csv right.ipynb half.ipynb class.csv",
    ],
)
def test_a_class_is_written_as_csv(root, capsys, graded, arguments):
    _, printed, _ = course(capsys, "grade", "right.ipynb", "half.ipynb", "--csv")
    (root / "class.csv").write_text("an older table")
    code, out, _ = course(capsys, "grade", *arguments.split())
    assert code == 1
    assert out == "wrote class.csv: 2 of 2 files graded\n"
    assert (root / "class.csv").read_bytes() == printed.encode()
    code, out, err = course(capsys, "grade", "right.ipynb", "bad.ipynb", "--csv", "class.csv")
    assert code == 2
    assert out == "wrote class.csv: 1 of 2 files graded\n"
    assert "bad.ipynb: this is no notebook" in err
    assert (root / "class.csv").read_text().count("right.ipynb") == 2
    assert course(capsys, "grade", "bad.ipynb", "--csv", "class.csv")[0] == 2
    assert (root / "class.csv").read_text().count("right.ipynb") == 2, "no table, nothing written"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--csv class.csv", "got 0 notebooks and 1 names that end in .csv"),
        ("right.ipynb a.csv --csv b.csv", "got 1 notebooks and 2 names that end in .csv"),
        ("right.ipynb --csv no/class.csv", "no/class.csv: cannot be written"),
        ("right.ipynb --csv folder.csv", "folder.csv: cannot be written"),
    ],
)
def test_a_table_that_cannot_be_written_is_said_before_the_run(
    root, capsys, graded, arguments, words
):
    (root / "folder.csv").mkdir()
    code, out, err = course(capsys, "grade", *arguments.split())
    assert (code, out) == (2, "")
    assert words in err
    assert not graded


def test_a_case_that_was_not_judged_is_no_failure(root, capsys, graded):
    code, out, err = course(capsys, "grade", "right-busy.ipynb")
    assert code == 3
    assert "  00-2  1 of 4, 3 not judged\n" in out
    assert "  sum   5 of 8, 3 not judged\n" in out
    assert "right-busy.ipynb: 00-2  1 of 4, 3 not judged" in err
    assert course(capsys, "grade", "busy.ipynb")[0] == 1, "the other exercise failed"
    one = json.loads(course(capsys, "grade", "right-busy.ipynb", "--json")[1])
    assert (one["not_judged"], one["exercises"]["00-2"]["not_judged"]) == (3, 3)
    rows = csv.DictReader(io.StringIO(course(capsys, "grade", "right-busy.ipynb", "--csv")[1]))
    assert [row["not_judged"] for row in rows] == ["0", "3"]
    suite = ElementTree.fromstring(course(capsys, "grade", "right-busy.ipynb", "--junit")[1])[0]
    assert (suite.get("failures"), suite.get("skipped")) == ("0", "1")
    assert suite.find("testcase/skipped").get("message") == "1 of 4. not judged"
    course(capsys, "grade", "work/right-busy.ipynb")
    assert list(Progress(root).entries) == ["00-1"], "it is no attempt"


VERDICT = {"ex": "00-1", "passed": 4, "total": 4, "not_judged": 0, "message": "", "axes": {}}


@pytest.mark.parametrize(
    "forged",
    [
        {"passed": 999},
        {"passed": -1},
        {"passed": "4"},
        {"passed": 4.0},
        {"passed": True, "total": True},
        {"total": 5},
        {"ex": "00-2"},
        {"message": {"text": 3}},
        {"message": None},
        {"not_judged": 1},
        {"passed": 3, "not_judged": [1]},
        {"passed": {}},
    ],
)
def test_a_forged_verdict_gives_no_points(forged):
    assert run._score("00-1", 4, [run.Cell(0, VERDICT)]) == Score(4, 4)
    score = run._score("00-1", 4, [run.Cell(0, VERDICT | forged)])
    assert score == Score(0, 4, "the answer cell failed: its check gave no verdict")
    for other in ([VERDICT], "4 of 4", 4, None):
        assert run._score("00-1", 4, [run.Cell(0, other)]) == score


CELL = "merged.ipynb::ipynb::Cell "


@pytest.mark.parametrize(
    ("log", "running"),
    [
        ("", "starting a kernel"),
        (f"{CELL}0 PASSED [ 20%]\n", "starting a kernel"),
        (f"{CELL}3 ", "exercise 00-2, 2 of 2"),
        (f"{CELL}1 PASSED\n{'x' * 10_000}\n{CELL}2 ", "exercise 00-1, 1 of 2"),
        (f"{CELL}4 PASSED\n== summary ==\nFAILED {CELL}2", "exercise 00-2, 2 of 2"),
        (f"{CELL}1 PASSED\n{CELL}5", "starting a kernel"),  # printed by an answer
        (f"{CELL}{'9' * 3000}", "starting a kernel"),
    ],
)
def test_what_is_running_is_read_from_the_log(tmp_path, log, running):
    cells = [{"cell_type": "code", "metadata": {"course": {"role": "given"}}}]
    for ex in ("00-1", "00-2"):
        for role in ("answer", "check"):
            course = {"ex": ex, "role": role}
            cells.append({"cell_type": "code", "metadata": {"course": course}})
    merged = Merged("00", nbformat.from_dict({"cells": cells}), {"00-1": 4, "00-2": 4}, {})
    (tmp_path / "pytest.log").write_text(log)
    assert run._running(merged, tmp_path / "pytest.log") == running


def test_only_work_changes_progress(root, capsys, graded):
    course(capsys, "grade", "half.ipynb")
    assert not (root / "work").exists()
    course(capsys, "grade", "work/half.ipynb")
    course(capsys, "grade", "work/right.ipynb")
    entry = Progress(root).of("00-1")
    assert (entry.attempts, entry.best, entry.done) == (2, 4, True)
    assert re.search(r"^00 .* 2 of 2 +(\d+) of \1 ", course(capsys, "list")[1], re.MULTILINE)
    course(capsys, "grade", "work/half.ipynb")
    assert Progress(root).of("00-1").done, "what is done stays done"


def test_a_check_in_work_is_an_attempt(root, monkeypatch):
    verdict = check_answer("00-1", lambda *_: None, seed=1)
    _note(verdict, root)
    assert not (root / "work").exists()
    (root / "work" / "exercises").mkdir(parents=True)
    monkeypatch.chdir(root / "work" / "exercises")
    _note(verdict, root)
    assert Progress(root).of("00-1").attempts == 1


@pytest.mark.parametrize("text", ["", "[]", '{"exercises": {"00-1": 3}}', '{"exercises": 3}'])
def test_progress_that_cannot_be_read_is_put_aside(root, text):
    file = root / "work" / ".course" / "progress.json"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    progress = Progress(root)
    assert progress.entries == {}
    assert file.with_suffix(".unreadable.json").read_text() == text
