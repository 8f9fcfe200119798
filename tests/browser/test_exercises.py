"""An exercise in JupyterLab: type a wrong and a right answer, press Check, be graded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from course_lib.grading.verdict import MIME

BACKWARDS = """\
def coordinates(rank, sizes, order):
    where = {}
    for axis in reversed(order.split("-")):
        rank, where[axis] = divmod(rank, sizes[axis])
    return where"""
RIGHT = BACKWARDS.replace('reversed(order.split("-"))', 'order.split("-")')


def answer(learner, ex: str, source: str) -> dict:
    """Type the answer, run it, press the check; the verdict, which must be what is shown."""
    written, check = learner.find(ex, "answer"), learner.find(ex, "check")
    learner.type(written, source)
    learner.press_run(written)
    (output,) = learner.press_run(check)["outputs"]
    verdict = output["data"][MIME]
    shown = learner.at(check).locator(".jp-OutputArea-output")
    text = " ".join(shown.inner_text().split())
    assert text.startswith(f"{ex}: {verdict['passed']} of {verdict['total']} passed")
    assert verdict["message"] in text
    assert shown.locator("tr").count() == verdict["total"]
    assert shown.locator("tr", has_text="passed").count() == verdict["passed"]
    return verdict


def shoot(learner, name: str, ex: str) -> None:
    """The verdict in both themes."""
    shown = learner.at(learner.find(ex, "check")).locator(".jp-OutputArea-output")
    learner.screenshot(f"{name}_light", shown)
    learner.theme("JupyterLab Dark")
    learner.screenshot(f"{name}_dark", shown)
    learner.theme("JupyterLab Light")


def grade(path: Path, ex: str) -> dict:
    """What `course grade` gives this exercise of the saved file."""
    command = [sys.executable, "-m", "course_lib.cli", "grade", str(path), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.stdout, result.stderr
    return json.loads(result.stdout)["exercises"][ex]


def test_a_wrong_and_a_right_answer(learner, begin):
    path = begin("00")
    learner.open("work/exercises/00_start_here.ipynb")
    verdict = answer(learner, "00-1", BACKWARDS)
    assert verdict["passed"] == 0
    assert verdict["message"].startswith("The order is read backwards")
    shoot(learner, "00_wrong", "00-1")
    learner.save()
    assert grade(path, "00-1")["passed"] == 0
    verdict = answer(learner, "00-1", RIGHT)
    assert verdict["passed"] == verdict["total"] == 4
    shoot(learner, "00_right", "00-1")
    learner.save()
    assert grade(path, "00-1") == {"passed": 4, "total": 4, "message": ""}
    learner.close()
