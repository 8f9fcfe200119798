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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from course_lib.grading.catalog import course
from course_lib.grading.merge import Merged, merge
from course_lib.grading.plugin import timeout_of

CELL_TIMEOUT = 120.0  # seconds; no cell takes 20 on an idle machine. A check has limits of its own
STARTING = 300.0  # seconds for the start of pytest and the kernel, on a busy machine
LOOK = 0.5  # seconds between two reads of the log
LOG = "pytest.log"
LOG_END = 2**12  # bytes of the log that are searched for it
LONGEST_MESSAGE = 1000  # characters
NO_KERNEL = "not judged, because the kernel ended before this exercise: grade the file again"


@dataclass(frozen=True)
class Score:
    """The score of one exercise."""

    passed: int
    total: int
    message: str = ""
    not_judged: int = 0  # cases that the machine was too busy to judge: they have not failed

    @property
    def failed(self) -> bool:
        """Whether a case failed."""
        return self.passed + self.not_judged < self.total


Say = Callable[[str], object]  # receives a line of progress
Done = Callable[[str, Score], object]  # receives an exercise and its score


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

    @property
    def not_judged(self) -> int:
        """Number of cases that the machine was too busy to judge, over all exercises."""
        return sum(score.not_judged for score in self.scores.values())

    @property
    def failed(self) -> bool:
        """Whether a case of any exercise failed, or there is none."""
        return not self.scores or any(score.failed for score in self.scores.values())

    def as_dict(self) -> dict[str, Any]:
        """Return the grade as ``course grade --json`` prints it."""
        exercises = {ex: vars(score) for ex, score in self.scores.items()}
        return {
            "file": self.file,
            "exercises": exercises,
            "passed": self.passed,
            "total": self.total,
            "not_judged": self.not_judged,
        }


def grade(
    path: Path,
    root: Path,
    *,
    seed: int | None = None,
    only: str | None = None,
    cell_timeout: float = CELL_TIMEOUT,
    say: Say = lambda text: None,
    done: Done = lambda ex, score: None,
) -> Grade:
    """Grade the notebook in ``path`` against the course in ``root``; ``path`` is only read.

    After an answer that hangs or kills its kernel, the exercises that were not reached are run
    again without it. ``say`` is called with each exercise as it runs, ``done`` with its score.
    Raises ValueError if the file is not an exercise of the course.
    """
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    whole = merge(root, path, seed=seed, only=None if only is None else [only])
    scores: dict[str, Score] = {}

    def note(found: Mapping[str, Score]) -> None:
        for ex in [ex for ex in found if ex not in scores]:
            scores[ex] = found[ex]
            done(ex, found[ex])

    def look(merged: Merged, cells: list[Cell]) -> None:
        note(_scores(merged, cells))

    note({ex: Score(0, whole.points[ex], why) for ex, why in whole.problems.items()})
    runs = [[ex for ex in whole.points if ex not in scores]]
    while runs:
        if not (batch := runs.pop(0)):
            continue
        merged = merge(root, path, seed=seed, only=batch)
        cells = run_nbval(merged, cell_timeout, say, partial(look, merged))
        look(merged, cells)
        left = [ex for ex in batch if ex not in scores]
        stopped = next((cell for cell in cells if cell.stopped), None)
        culprit = merged.exercise_of_cell(stopped.number) if stopped else None
        if stopped and culprit in left and (len(batch) == 1 or stopped.stopped == "timeout"):
            note({culprit: Score(0, merged.points[culprit], _why(merged, stopped, cell_timeout))})
            runs.append([ex for ex in left if ex != culprit])
        elif culprit in left:  # its kernel died, perhaps because of an answer before
            runs += [[culprit], [ex for ex in left if ex != culprit]]
        elif len(batch) == 1:
            note({ex: Score(0, merged.points[ex], NO_KERNEL, merged.points[ex]) for ex in left})
        else:  # it died in a cell of the course
            runs += [[ex] for ex in left]
    return Grade(str(path), whole.lesson, {ex: scores[ex] for ex in whole.points})


@dataclass(frozen=True)
class Cell:
    """The end of a code cell under nbval."""

    number: int
    verdict: Any = None  # as the kernel sent it
    stopped: str = ""  # "timeout" or "died", in this cell or before
    error: str = ""


Look = Callable[[list[Cell]], object]  # receives the cells that have ended


def run_nbval(merged: Merged, cell_timeout: float, say: Say, look: Look) -> list[Cell]:
    """Run the notebook with ``pytest --nbval`` in a temporary folder; return its code cells.

    ``look`` is called with the finished cells while others run. If the run ends early, the last
    cell is the one in which it stopped.
    """
    import nbformat

    count = sum(cell.cell_type == "code" for cell in merged.notebook.cells)
    with (
        tempfile.TemporaryDirectory(prefix="course-grade-") as name,
        tempfile.TemporaryDirectory(prefix="course-cells-") as other,
    ):
        folder, ended = Path(name), Path(other, "cells.jsonl")
        ended.touch()
        (folder / "pytest.ini").write_text("[pytest]\n")
        nbformat.write(merged.notebook, folder / "merged.ipynb")
        limit = STARTING + sum(_timeout(merged, n, cell_timeout) + 10 for n in range(count))

        def looks() -> None:
            say(_running(merged, folder / LOG))
            look(_cells(ended))

        in_time = _pytest(folder, ended, cell_timeout, limit, looks)
        cells = _cells(ended)
    if len(cells) < count:
        cells.append(Cell(len(cells), stopped="died" if in_time else "timeout"))
    return cells


def _timeout(merged: Merged, number: int, cell_timeout: float) -> float:
    """Return the seconds after which nbval stops a code cell."""
    cells = [cell for cell in merged.notebook.cells if cell.cell_type == "code"]
    return timeout_of(cells[number], cell_timeout)


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


def _pytest(
    folder: Path, ended: Path, cell_timeout: float, limit: float, look: Callable[[], object]
) -> bool:
    """Run pytest with only nbval and our plugin; kill it and its kernel after ``limit`` seconds.

    Return whether it ended before. The plugin writes the cells into the file ``ended``.
    """
    command = [sys.executable, "-m", "pytest", "-p", "nbval.plugin"]
    command += ["-p", "course_lib.grading.plugin", "-p", "no:cacheprovider", "-v"]
    command += ["--nbval", "--nbval-current-env", f"--nbval-cell-timeout={cell_timeout:g}"]
    command += [f"--nbval-kernel-startup-timeout={STARTING:g}", f"--course-cells={ended}"]
    command += ["--tb=no", "-c", "pytest.ini", "merged.ipynb"]
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
            in_time = process.poll() is not None
            if not in_time:
                _end(process)
            return in_time
        except BaseException:
            _end(process)
            raise


def _end(process: subprocess.Popen) -> None:
    """Kill the run; its kernel ends when its parent has ended."""
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


def _cells(ended: Path) -> list[Cell]:
    """Return the cells that have ended, from the lines that the plugin has written."""
    lines = ended.read_text(encoding="utf-8").split("\n")[:-1]  # the last one is not complete
    return [Cell(**json.loads(line)) for line in lines]


def _why(merged: Merged, stopped: Cell, cell_timeout: float) -> str:
    """Return why the run stopped in this cell."""
    if stopped.stopped == "died":
        return "the answer ended the kernel: check for exit(), os._exit and very large tensors"
    seconds = _timeout(merged, stopped.number, cell_timeout)
    says = f"not done after {seconds:g} s: check that every loop ends"
    waited = stopped.error and not stopped.error.startswith("KeyboardInterrupt")
    return f"{says} {stopped.error}" if waited else says


def _scores(merged: Merged, cells: list[Cell]) -> dict[str, Score]:
    """Return the scores of the exercises of which all cells have ended."""
    ended = {cell.number: cell for cell in cells if not cell.stopped}
    numbers: dict[str, list[int]] = {ex: [] for ex in merged.points}
    codes = (cell for cell in merged.notebook.cells if cell.cell_type == "code")
    for number, ex in enumerate(course(cell).get("ex") for cell in codes):
        if ex in numbers:
            numbers[ex].append(number)
    return {
        ex: _score(ex, merged.points[ex], [ended[number] for number in mine])
        for ex, mine in numbers.items()
        if mine and ended.keys() >= set(mine)
    }


def _score(ex: str, total: int, mine: list[Cell]) -> Score:
    """Return the score that the check of an exercise gave, unless the verdict is not its own."""
    found = {} if mine[-1].error or not isinstance(mine[-1].verdict, dict) else mine[-1].verdict
    passed, not_judged, message = map(found.get, ("passed", "not_judged", "message"))
    if (
        (found.get("ex"), found.get("total")) == (ex, total)
        and type(passed) is type(not_judged) is int
        and isinstance(message, str)
        and min(passed, not_judged) >= 0
        and passed + not_judged <= total
    ):
        return Score(passed, total, message[:LONGEST_MESSAGE], not_judged)
    error = next((cell.error for cell in mine if cell.error), "its check gave no verdict")
    return Score(0, total, f"the answer cell failed: {error}")
