"""The official grade: nbval over the merged notebook, in a fresh process and a fresh kernel."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from course_lib.grading.merge import Merged, merge
from course_lib.grading.plugin import ERROR, STOPPED, VERDICT

CELL_TIMEOUT = 30.0  # seconds; no cell of the course takes 20
STARTING = 120.0  # seconds for the start of pytest and the kernel
LOOK = 0.5  # seconds between two reads of the log
LOG = "pytest.log"
LOG_END = 2**12  # bytes of the log that are searched for it
Say = Callable[[str], object]  # receives a line of progress


@dataclass(frozen=True)
class Score:
    """The score of one exercise."""

    passed: int
    total: int
    message: str = ""


@dataclass(frozen=True)
class Grade:
    """The scores of one file, by exercise."""

    file: str
    lesson: str
    scores: dict[str, Score]

    @property
    def passed(self) -> int:
        """Number of passed cases, over all exercises."""
        return sum(score.passed for score in self.scores.values())

    @property
    def total(self) -> int:
        """Number of cases, over all exercises."""
        return sum(score.total for score in self.scores.values())

    @property
    def ok(self) -> bool:
        """Whether all cases passed."""
        return self.passed == self.total > 0

    def as_dict(self) -> dict[str, Any]:
        """Return the grade as ``course grade --json`` prints it."""
        exercises = {ex: vars(score) for ex, score in self.scores.items()}
        return {
            "file": self.file,
            "exercises": exercises,
            "passed": self.passed,
            "total": self.total,
        }


def grade(
    path: Path,
    root: Path,
    *,
    seed: int | None = None,
    only: str | None = None,
    cell_timeout: float = CELL_TIMEOUT,
    say: Say = lambda text: None,
) -> Grade:
    """Grade the notebook in ``path`` against the course in ``root``; ``path`` is only read.

    An answer that hangs or kills its kernel is left out and the notebook is run again, so
    that the other exercises get their marks. ``say`` is called with each exercise as it runs.
    Raises ValueError if the file is not an exercise of the course.
    """
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    stopped: dict[str, str] = {}
    while True:
        merged = merge(root, path, seed=seed, without=stopped, only=only)
        cells = run_nbval(merged, cell_timeout, say)
        culprit = _culprit(merged, cells, cell_timeout)
        if culprit is None or culprit[0] in stopped:
            break
        stopped |= {culprit[0]: culprit[1]}
    scores = _scores(merged, cells)
    for ex, message in {**merged.problems, **stopped}.items():
        scores[ex] = Score(0, merged.points[ex], message)
    return Grade(str(path), merged.lesson, scores)


@dataclass(frozen=True)
class Cell:
    """The end of a code cell under nbval."""

    number: int
    verdict: dict[str, Any] | None = None
    stopped: str = ""  # "timeout" or "died", in this cell or before
    error: str = ""


def run_nbval(merged: Merged, cell_timeout: float, say: Say) -> list[Cell]:
    """Run the notebook with ``pytest --nbval`` in a temporary folder; return its code cells."""
    import nbformat

    with tempfile.TemporaryDirectory(prefix="course-grade-") as name:
        folder = Path(name)
        (folder / "pytest.ini").write_text("[pytest]\n")
        nbformat.write(merged.notebook, folder / "merged.ipynb")
        code_cells = sum(cell.cell_type == "code" for cell in merged.notebook.cells)
        limit = STARTING + code_cells * (cell_timeout + 10)
        _pytest(folder, cell_timeout, limit, lambda: say(_running(merged, folder / LOG)))
        report = folder / "report.xml"
        return _cells(report) if report.exists() else []


def _running(merged: Merged, log: Path) -> str:
    """Return the exercise whose cell pytest began last. Answers may have printed into the log."""
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_END))
        cells = re.findall(rb"(?m)^merged\.ipynb::\S*::Cell (\d{1,4})", file.read())
    ex = None
    with contextlib.suppress(IndexError):
        ex = merged.exercise_of_cell(int(cells[-1]))
    if ex is None:
        return "starting a kernel"
    return f"exercise {ex}, {list(merged.points).index(ex) + 1} of {len(merged.points)}"


def _pytest(folder: Path, cell_timeout: float, limit: float, look: Callable[[], object]) -> None:
    """Run pytest with only nbval and our plugin; kill it and its kernel after ``limit`` seconds."""
    command = [sys.executable, "-m", "pytest", "-p", "nbval.plugin"]
    command += ["-p", "course_lib.grading.plugin", "-p", "no:cacheprovider", "-v"]
    command += ["--nbval", "--nbval-current-env", f"--nbval-cell-timeout={cell_timeout:g}"]
    command += ["--tb=no", "-c", "pytest.ini", "--junitxml=report.xml", "merged.ipynb"]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(__file__).parents[2]), environ.get("PYTHONPATH")])
    )
    with (
        open(folder / LOG, "w") as log,
        subprocess.Popen(
            command,
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        ) as process,
    ):
        end = time.monotonic() + limit
        try:
            while process.poll() is None and time.monotonic() < end:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK)
                look()
            if process.poll() is None:
                _end(process)
        except BaseException:
            _end(process)
            raise


def _end(process: subprocess.Popen) -> None:
    """Kill the run; its kernel ends when its parent has ended."""
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


def _cells(report: Path) -> list[Cell]:
    cells = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        number = int(case.get("name", "Cell 0").split()[-1])
        found = {each.get("name"): each.get("value", "") for each in case.iter("property")}
        verdict = json.loads(found[VERDICT]) if VERDICT in found else None
        cells.append(Cell(number, verdict, found.get(STOPPED, ""), found.get(ERROR, "")))
    return cells


def _culprit(merged: Merged, cells: list[Cell], cell_timeout: float) -> tuple[str, str] | None:
    """Return the exercise in which the run stopped, and why; None if all cells were run."""
    first = next((cell for cell in cells if cell.stopped), None)
    ex = merged.exercise_of_cell(first.number) if first else None
    if first is None or ex is None:
        return None
    if first.stopped == "died":
        return ex, "the answer ended the kernel: check for os._exit and for very large tensors"
    says = f"not done after {cell_timeout:g} s: check that every loop ends"
    waited = first.error and not first.error.startswith("KeyboardInterrupt")
    return ex, f"{says} {first.error}" if waited else says


def _scores(merged: Merged, cells: list[Cell]) -> dict[str, Score]:
    scores = {}
    for ex, total in merged.points.items():
        mine = [cell for cell in cells if merged.exercise_of_cell(cell.number) == ex]
        check = mine[-1] if mine else Cell(-1, stopped="died")
        found = check.verdict or {}
        own = found.get("ex") == ex and found.get("total") == total and not check.error
        if own and not check.stopped:
            scores[ex] = Score(found["passed"], found["total"], found["message"])
        elif check.stopped or not cells:
            scores[ex] = Score(0, total, "not reached: the run had stopped before this exercise")
        else:
            error = next((cell.error for cell in mine if cell.error), "its check gave no verdict")
            scores[ex] = Score(0, total, f"the answer cell failed: {error}")
    return scores
