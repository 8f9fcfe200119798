"""The official grade on files as learners hand them in, whatever has become of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from course_lib.grading import registry
from course_lib.grading.answers import AGAIN, CHECK, LONGEST, START, TOTAL, TURN
from course_lib.grading.merge import merge, pristine, read
from course_lib.grading.plugin import timeout_of
from course_lib.grading.run import Score, grade, run_nbval

COORDINATES = """\
def coordinates(rank, sizes, order):
    found = {}
    for axis in order.split("-"):
        rank, found[axis] = divmod(rank, sizes[axis])
    return found"""
GROUPS = """\
def groups(axis, sizes, order):
    names = order.split("-")
    stride = math.prod(sizes[name] for name in names[: names.index(axis)])
    ranks = range(math.prod(sizes.values()))
    firsts = [rank for rank in ranks if rank // stride % sizes[axis] == 0]
    return [[first + stride * step for step in range(sizes[axis])] for first in firsts]"""
STUBS = {
    "00-1": "def coordinates(rank, sizes, order):\n    raise NotImplementedError('yours')",
    "00-2": "def groups(axis, sizes, order):\n    raise NotImplementedError('yours')",
}
CHECKS = {"00-1": 'check("00-1", coordinates)', "00-2": 'check("00-2", groups)'}
SOLVED = {"00-1": COORDINATES, "00-2": GROUPS}


POINTS = {ex: registry.find(ex).total for ex in ("00-1", "00-2", "02-4")}
FULL = POINTS["00-1"]
assert POINTS["00-2"] == FULL


def cell(ex: str, role: str, source: str):
    course = {"ex": ex, "role": role} | ({"points": POINTS[ex]} if role == "check" else {})
    return new_code_cell(source, metadata={"course": course})


def notebook(answers: dict[str, str], *, lesson: str | None = "00"):
    """An exercise notebook with these answers."""
    cells = [
        new_markdown_cell("# Lesson"),
        new_code_cell("import math"),
    ]
    for ex, source in answers.items():
        cells += [cell(ex, "answer", source)]
        cells += [cell(ex, "check", f"from course_lib.grading import check\n{CHECKS[ex]}")]
    return new_notebook(cells=cells, metadata={"course": {"lesson": lesson}} if lesson else {})


def solution():
    """The solved notebook with the outputs that it was committed with."""
    solved = notebook(SOLVED)
    for number, each in enumerate(solved.cells):
        if each.metadata.get("course", {}).get("role") == "check":
            line = f"{each.metadata.course.ex}: {FULL} of {FULL} passed."
            each.execution_count = number
            each.outputs = [new_output("execute_result", {"text/plain": line})]
    return solved


FORGED = """\
from course_lib.grading.verdict import Verdict
real = Verdict.as_dict
def forged(self):
    changed = {"passed": 999, "message": {"all": "right"}} if self.ex == "00-1" else {}
    return real(self) | changed
Verdict.as_dict = forged"""
LATER = """\
import os, threading
threading.Timer(1.0, os._exit, (3,)).start()"""
RING = """\
def ring_all_reduce(x, axis):
    pieces = [piece.clone() for piece in x.tensor_split(axis.size)]
    for turn in range(2 * (axis.size - 1)):
        out, into = (axis.rank - turn) % axis.size, (axis.rank - turn - 1) % axis.size
        got = comm.exchange(pieces[out], axis, axis.next, axis.previous, like=pieces[into])
        pieces[into] = pieces[into] + got if turn < axis.size - 1 else got
    return torch.cat(pieces)"""


def ring_notebook(answer: str):
    """An exercise that runs on ranks."""
    cells = [
        new_code_cell("import torch\n\nfrom course_lib import comm"),
        cell("02-4", "answer", answer),
        cell(
            "02-4",
            "check",
            "from course_lib.grading import check\n\ncheck('02-4', ring_all_reduce)",
        ),
    ]
    return new_notebook(cells=cells, metadata={"course": {"lesson": "02"}})


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A course of one lesson."""
    root = tmp_path_factory.mktemp("course")
    for folder, content in {"exercises": notebook(STUBS), "solutions": solution()}.items():
        (root / folder).mkdir()
        nbformat.write(content, root / folder / "00_start.ipynb")
    stub = ring_notebook("def ring_all_reduce(x, axis):\n    raise NotImplementedError('yours')")
    nbformat.write(stub, root / "exercises" / "02_ring.ipynb")
    return root


@pytest.fixture
def hand_in(root, tmp_path):
    """Grade a notebook; its file must be what it was."""

    def graded(content, name: str = "00_mine.ipynb", **how):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else nbformat.writes(content))
        before = path.read_bytes()
        result = grade(path, root, seed=11, cell_timeout=how.pop("cell_timeout", 20), **how)
        assert path.read_bytes() == before
        assert [entry.name for entry in tmp_path.iterdir()] == [name]
        return result

    return graded


def counts(result) -> dict[str, int]:
    return {ex: score.passed for ex, score in result.scores.items()}


def test_a_solution_has_full_marks(hand_in):
    result = hand_in(notebook(SOLVED))
    assert result.ok
    exercise = {"passed": FULL, "total": FULL, "message": "", "not_judged": 0}
    assert result.as_dict() == {
        "file": result.file,
        "exercises": {"00-1": exercise, "00-2": exercise},
        "passed": 2 * FULL,
        "total": 2 * FULL,
        "not_judged": 0,
    }


def test_an_untouched_exercise_has_none(hand_in):
    result = hand_in(notebook(STUBS))
    assert (result.passed, result.total, result.ok) == (0, 2 * FULL, False)
    assert "not written yet" in result.scores["00-1"].message


def test_a_blank_file_is_an_untouched_one(hand_in):
    result = hand_in("")
    assert (result.passed, result.total) == (0, 2 * FULL)
    assert "no answer cell of 00-1" in result.scores["00-1"].message


def test_split_copied_and_moved_answers_and_edited_checks(hand_in):
    """JupyterLab keeps the metadata of a cell that is split, copied or moved."""
    lines = COORDINATES.replace("divmod(rank, sizes[axis])", "step(rank, sizes[axis])")
    mine = notebook({"00-2": GROUPS})  # the second exercise first, its check edited
    mine.cells[-1].source = "print('all passed')"
    mine.cells += [
        cell("00-1", "answer", "step = divmod"),
        cell("00-1", "answer", lines),
        cell("00-1", "answer", lines),
        cell("03-1", "answer", "raise SystemError('of another notebook')"),
    ]
    assert counts(hand_in(mine)) == {"00-1": FULL, "00-2": FULL}


def stripped(content, *, ids: bool):
    """The notebook as a tool leaves it that removes metadata, and ids too unless ``ids``."""
    data = json.loads(nbformat.writes(content))
    data |= {"metadata": {}, "nbformat_minor": 5 if ids else 4}
    for each in data["cells"]:
        found = each.pop("metadata").get("course", {})
        each["source"] = "".join(each["source"])
        each |= {"metadata": {}, "id": f"{found['ex']}-{found['role']}" if found else each["id"]}
        if not ids:
            del each["id"]
    return data


def answer_cells(root, tmp_path, data) -> dict[str, list[str]]:
    """Return the answers that a grade would run, by exercise; the file's name says nothing."""
    path = tmp_path / "mine.ipynb"
    path.write_text(json.dumps(data))
    merged = merge(root, path, seed=1)
    assert not merged.problems
    found: dict[str, list[str]] = {}
    for each in merged.notebook.cells:
        if each.metadata.get("course", {}).get("role") == "answer":
            found.setdefault(each.metadata.course.ex, []).append(each.source)
    return found


ANSWERED = {"00-1": [COORDINATES], "00-2": [GROUPS]}


@pytest.mark.parametrize("ids", [True, False])
def test_answers_without_metadata_are_found(root, tmp_path, ids):
    data = stripped(notebook(SOLVED), ids=ids)
    data["cells"][1]["source"] = ""
    assert answer_cells(root, tmp_path, data) == ANSWERED


def test_an_answer_without_metadata_has_full_marks(hand_in):
    assert hand_in(json.dumps(stripped(notebook(SOLVED), ids=True)), name="mine.ipynb").ok
    assert hand_in(json.dumps(stripped(notebook(SOLVED), ids=False)), name="mine.ipynb").ok


def test_cells_between_two_checks_are_one_answer(root, tmp_path):
    data = stripped(notebook(SOLVED), ids=False)
    first, check = data["cells"][2:4]
    data["cells"][2:4] = [first | {"source": "step = divmod"}, first, check]
    data["cells"][1]["source"] = check["source"].replace("00-1", "03-1")  # of another notebook
    wanted = {"00-1": [f"step = divmod\n\n{COORDINATES}"], "00-2": [GROUPS]}
    assert answer_cells(root, tmp_path, data) == wanted


def test_an_answer_and_its_check_may_be_one_cell(root, tmp_path):
    data = stripped(notebook(SOLVED), ids=False)
    data["cells"][1]["source"] = ""
    check = data["cells"].pop(3)
    data["cells"][2]["source"] = f"{COORDINATES}\n\n{check['source']}"
    found = answer_cells(root, tmp_path, data)
    assert found == {"00-1": [data["cells"][2]["source"]], "00-2": [GROUPS]}


def test_metadata_counts_more_than_ids_and_checks(root, tmp_path):
    mine = notebook(SOLVED)
    mine.cells.insert(2, new_code_cell("raise SystemError('a draft')", id="00-1-answer"))
    mine.cells[1].source = "raise SystemError('a cell of my own')"
    assert answer_cells(root, tmp_path, json.loads(nbformat.writes(mine))) == ANSWERED


def test_one_cell_without_metadata_is_found_beside_others(root, tmp_path):
    mine = notebook(SOLVED)
    mine.cells[1].source = ""
    for ids in (True, False):
        mine.cells[2] = new_code_cell(COORDINATES, **({"id": "00-1-answer"} if ids else {}))
        assert answer_cells(root, tmp_path, json.loads(nbformat.writes(mine))) == ANSWERED


@pytest.mark.parametrize("magic", ["%%time", "\n%%time\n", "%%capture out"])
def test_a_part_of_an_answer_may_be_timed(hand_in, magic):
    lines = COORDINATES.replace("divmod(rank, sizes[axis])", "step(rank, sizes[axis])")
    mine = notebook({"00-2": GROUPS})
    mine.cells += [
        cell("00-1", "answer", "step = divmod"),
        cell("00-1", "answer", f"{magic}\n{lines}"),
    ]
    assert counts(hand_in(mine)) == {"00-1": FULL, "00-2": FULL}


def test_another_magic_in_a_part_of_an_answer_is_named(hand_in):
    mine = notebook(SOLVED)
    mine.cells += [cell("00-1", "answer", "%%bash\nls")]
    result = hand_in(mine)
    assert counts(result) == {"00-1": 0, "00-2": FULL}
    message = "the answer has several cells, and one begins with %%bash: remove the line"
    assert result.scores["00-1"].message == message


def test_a_syntax_error_costs_one_exercise(hand_in):
    result = hand_in(notebook({**SOLVED, "00-1": "def coordinates(rank:\n  return"}))
    assert counts(result) == {"00-1": 0, "00-2": FULL}
    assert "syntax error in line 1" in result.scores["00-1"].message


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("import os\nos._exit(3)", "ended the kernel"),
        (COORDINATES.replace("found = {}", "import os; os._exit(3)"), "ended the kernel"),
        ("while True: pass", "not done after 3 s"),
        ("while True: print('x' * 1000)", "not done after 3 s"),
        (
            "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
            "not done after 3 s",
        ),
        ("input('your name? ')", "StdinNotImplementedError"),
        ("coordinates = None", "expected coordinates to be a function, got None"),
        ("1 / 0", "the answer cell failed: ZeroDivisionError"),
        ("exit()", "ended the kernel"),
        (COORDINATES.replace("found = {}", "exit()"), "coordinates called sys.exit"),
        (f"{COORDINATES}\n{FORGED}", "its check gave no verdict"),
    ],
)
def test_an_answer_that_breaks_costs_one_exercise(hand_in, answer, words):
    result = hand_in(notebook({"00-1": answer, "00-2": GROUPS}), cell_timeout=3)
    assert counts(result) == {"00-1": 0, "00-2": FULL}
    assert words in result.scores["00-1"].message


def test_a_kernel_that_ends_later_costs_no_other_exercise(hand_in):
    result = hand_in(notebook({"00-1": f"{LATER}\n{COORDINATES}", "00-2": GROUPS}))
    assert result.scores["00-2"] == Score(FULL, FULL)
    assert result.scores["00-1"].total == FULL


def test_a_kernel_that_does_not_start_takes_no_points(hand_in, monkeypatch):
    monkeypatch.setattr("course_lib.grading.run._pytest", lambda *_: True)
    result = hand_in(notebook(SOLVED))
    assert [score.not_judged for score in result.scores.values()] == [FULL, FULL]
    assert "not judged, because the kernel ended" in result.scores["00-1"].message
    assert not result.failed
    assert not result.ok


def test_scores_are_told_as_exercises_finish(hand_in):
    told = []
    result = hand_in(
        notebook({**SOLVED, "00-1": "1 / 0"}), done=lambda ex, score: told.append((ex, score))
    )
    assert dict(told) == result.scores
    assert [ex for ex, _ in told] == ["00-1", "00-2"]


def test_nbval_waits_longer_than_a_check_takes():
    check = cell("00-1", "check", CHECKS["00-1"])
    assert timeout_of(check, 30) > LONGEST
    assert timeout_of(cell("00-1", "answer", "1"), 30) == 30
    most = CHECK + TURN + START + TOTAL  # the last launch, and then once more with more time
    assert most + TURN + START + AGAIN <= LONGEST


def test_prints_warnings_and_50_MB_change_no_mark(hand_in):
    noisy = (
        "import sys, warnings\nwarnings.warn('careful')\nprint('x' * 50_000_000)\n"
        + COORDINATES.replace("found = {}", "found = {}; print('here', file=sys.stderr)")
        + "\ndisplay('a value')\n7"
    )
    assert counts(hand_in(notebook({**SOLVED, "00-1": noisy}))) == {"00-1": FULL, "00-2": FULL}


@pytest.mark.parametrize(
    ("old", "new", "passed", "words"),
    [
        ("", "", 10, ""),
        ("2 * (axis.size - 1)", "axis.size - 1", 0, "n-1 turns that copy the sums, is missing"),
        ("pieces = [", "comm.recv(x, axis, axis.next)\n    pieces = [", 0, "was at: recv, line 2"),
        ("pieces = [", "return comm.ring_all_reduce(x, axis)\n    pieces = [", 0, "you are asked"),
    ],
    ids=["right", "half", "hangs", "library"],
)
def test_an_answer_on_real_ranks(hand_in, old, new, passed, words):
    result = hand_in(ring_notebook(RING.replace(old, new)), name="02_ring.ipynb")
    score = result.scores["02-4"]
    assert score.total == 10
    assert score.passed == passed
    assert words in score.message


def test_nbformat_4_0_has_no_ids(hand_in):
    data = json.loads(nbformat.writes(notebook(SOLVED)))
    data |= {"nbformat": 4, "nbformat_minor": 0}
    for each in data["cells"]:
        del each["id"]
    assert hand_in(json.dumps(data)).ok


REAL = Path(__file__).parents[2]


@pytest.fixture
def ran(monkeypatch) -> list:
    """Every code cell that a grade in this test has run."""
    cells: list = []

    def recorded(*given):
        found = run_nbval(*given)
        cells.extend(found)
        return found

    monkeypatch.setattr("course_lib.grading.run.run_nbval", recorded)
    return cells


@pytest.mark.parametrize("file", sorted((REAL / "exercises").glob("*.ipynb")), ids=lambda f: f.stem)
def test_the_course_grades_its_own_notebooks(file, ran):
    """And no cell of them fails: this is their Run All too (they are built from one source)."""
    untouched = grade(file, REAL, seed=2)
    solved = grade(REAL / "solutions" / file.name, REAL, seed=2)
    assert (untouched.passed, solved.passed) == (0, solved.total)
    assert untouched.total == solved.total > 0
    code = [each for each in read(file).cells if each.cell_type == "code"]
    assert len(ran) == 2 * len(code)
    assert not [each for each in ran if each.error or each.stopped]
    committed = read(REAL / "solutions" / file.name)
    assert committed.metadata.kernelspec.name == "python3"
    for each in committed.cells:
        if each.metadata.get("course", {}).get("role") == "check":
            ex, line = each.metadata.course.ex, "".join(each.outputs[-1].data["text/plain"])
            total = solved.scores[ex].total
            assert line == f"{ex}: {total} of {total} passed.", "make execute refreshes it"


def test_where_the_pristine_notebook_is_found(root):
    ids = notebook(SOLVED, lesson=None)
    wanted = root / "exercises" / "00_start.ipynb"
    assert pristine(root, notebook(SOLVED), Path("mine.ipynb")) == wanted
    assert pristine(root, ids, Path("mine.ipynb")) == wanted
    assert pristine(root, new_notebook(), Path("00_x.ipynb")) == wanted
    for content, name in ((new_notebook(), "notes.ipynb"), (notebook({}, lesson="09"), "x.ipynb")):
        with pytest.raises(
            ValueError, match="expected a copy of a file in exercises/: 00_start, 02"
        ):
            pristine(root, content, Path(name))


@pytest.mark.parametrize("text", ["no json", "[1, 2]", "{}", '{"nbformat": 4, "cells": 3}'])
def test_what_is_no_notebook_is_said(tmp_path, text):
    path = tmp_path / "00_x.ipynb"
    path.write_text(text)
    with pytest.raises(ValueError, match="this is not a notebook"):
        read(path)


def test_the_merged_copy_is_pristine_but_for_the_answers(root, tmp_path):
    mine = notebook(SOLVED)
    mine.cells[1].source = "raise SystemError('an edited given cell')"
    path = tmp_path / "00_mine.ipynb"
    nbformat.write(mine, path)
    merged = merge(root, path, seed=3)
    sources = [each.source for each in merged.notebook.cells if each.cell_type == "code"]
    assert sources[0] == "import math"
    assert sources[1] == COORDINATES
    assert sources[2].endswith("check('00-1', coordinates, seed=3)")
    nbformat.validate(merged.notebook)


@pytest.mark.parametrize(("noise", "passed"), [("print(id(object()))", 5), ("return {}", 4)])
def test_plain_pytest_nbval_compares_the_line_and_nothing_else(tmp_path, noise, passed):
    solved = solution()
    solved.cells[2].source = COORDINATES.replace("found = {}", f"found = {{}}\n    {noise}")
    nbformat.write(solved, tmp_path / "00_start.ipynb")
    command = [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "-q"]
    command += ["-p", "course_lib.grading.plugin", "-p", "no:cacheprovider", "--color=no"]
    command += ["-c", "/dev/null", f"--rootdir={tmp_path}", str(tmp_path / "00_start.ipynb")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == (passed < 5), result.stdout
    assert f"{passed} passed" in result.stdout
