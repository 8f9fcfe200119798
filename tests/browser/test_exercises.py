"""An exercise in JupyterLab: type a wrong and a right answer, press Check, be graded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from course_lib.grading import registry
from course_lib.grading.verdict import MIME

BACKWARDS = """\
def coordinates(rank, sizes, order):
    where = {}
    for axis in reversed(order.split("-")):
        rank, where[axis] = divmod(rank, sizes[axis])
    return where"""
RIGHT = BACKWARDS.replace('reversed(order.split("-"))', 'order.split("-")')

RING = """\
def ring_all_reduce(x, axis):
    pieces = [piece.clone() for piece in x.tensor_split(axis.size)]
    for turn in range(2 * (axis.size - 1)):
        out, into = (axis.rank - turn) % axis.size, (axis.rank - turn - 1) % axis.size
        got = comm.exchange(pieces[out], axis, axis.next, axis.previous, like=pieces[into])
        pieces[into] = pieces[into] + got if turn < axis.size - 1 else got
    return torch.cat(pieces)"""
HALF_A_RING = RING.replace("range(2 * (axis.size - 1))", "range(axis.size - 1)")
ONE_HALF = "the second half, n-1 turns that copy the sums, is missing"
SENDS_FIRST = """\
def ring_all_reduce(x, axis):
    for turn in range(axis.size - 1):
        comm.send(x, axis, axis.next)
        x = x + comm.recv(x, axis, axis.previous)
    return x"""


def answer(learner, ex: str, source: str) -> dict:
    """Run what is given, type the answer, run it, press the check; the verdict that is shown."""
    for cell in learner.cells():
        if cell["course"].get("role") == "given" and cell["course"].get("ex") in (None, ex):
            learner.press_run(cell["index"])
    written, check = learner.find(ex, "answer"), learner.find(ex, "check")
    learner.type(written, source)
    learner.press_run(written)
    outputs = learner.press_run(check)["outputs"]  # a slow check has shown its case before
    (output,) = (each for each in outputs if MIME in each.get("data", {}))
    verdict = output["data"][MIME]
    shown = learner.at(check).locator(".jp-OutputArea-output").last
    text = " ".join(shown.inner_text().split())
    assert text.startswith(f"{ex}: {verdict['passed']} of {verdict['total']} passed")
    assert verdict["message"] in text
    assert shown.locator("tr").count() == verdict["total"]
    assert shown.locator("tr", has_text="passed").count() == verdict["passed"]
    return verdict


def shoot(learner, name: str, ex: str, *themes: str) -> None:
    """The verdict in these themes of JupyterLab."""
    shown = learner.at(learner.find(ex, "check")).locator(".jp-OutputArea-output").last
    for theme in themes or ("Light",):
        learner.theme(f"JupyterLab {theme}")
        learner.screenshot(f"{name}_{theme.lower()}", shown)


def grade(path: Path, ex: str) -> dict:
    """What `course grade` gives this exercise of the saved file."""
    command = [sys.executable, "-m", "course_lib.cli", "grade", str(path), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.stdout, result.stderr
    return json.loads(result.stdout)["exercises"][ex]


def marks(total: int) -> dict:
    """What the official grade says of a right answer."""
    return {"passed": total, "total": total, "message": "", "not_judged": 0}


def test_a_wrong_and_a_right_answer(learner, begin):
    path = begin("00")
    learner.open("work/exercises/00_start_here.ipynb")
    verdict = answer(learner, "00-1", BACKWARDS)
    assert verdict["passed"] == 0
    assert verdict["message"].startswith("The order is read backwards")
    shoot(learner, "00_wrong", "00-1", "Dark", "Light")
    learner.save()
    assert grade(path, "00-1")["passed"] == 0
    verdict = answer(learner, "00-1", RIGHT)
    total = registry.find("00-1").total
    assert verdict["passed"] == verdict["total"] == total
    shoot(learner, "00_right", "00-1", "Dark", "Light")
    learner.save()
    assert grade(path, "00-1") == marks(total)
    learner.close()


def test_a_ring_on_real_ranks(learner, begin):
    """The mechanism of lesson 02: half of it, a version that waits for ever, and all of it."""
    (ring,) = (each for each in registry.exercises("02") if each.title.startswith("a ring all-red"))
    path = begin("02")
    learner.open(f"work/exercises/{path.name}")
    verdict = answer(learner, ring.id, HALF_A_RING)
    assert verdict["passed"] == 0
    assert ONE_HALF in verdict["message"]
    shoot(learner, "02_wrong", ring.id)
    learner.save()
    graded = grade(path, ring.id)
    assert (graded["passed"], graded["total"]) == (0, ring.total)
    assert ONE_HALF in graded["message"]

    verdict = answer(learner, ring.id, SENDS_FIRST)
    assert verdict["passed"] == 0
    assert "every rank waits in send" in verdict["message"]
    rows = learner.at(learner.find(ring.id, "check")).locator("tr", has_text="not judged yet")
    assert rows.count() == ring.total - 1
    shoot(learner, "02_hangs", ring.id)

    verdict = answer(learner, ring.id, RING)
    assert verdict["passed"] == verdict["total"] == ring.total
    shoot(learner, "02_right", ring.id)
    learner.save()
    assert grade(path, ring.id) == marks(ring.total)
    learner.close()
