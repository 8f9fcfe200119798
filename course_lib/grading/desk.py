"""What a learner does at the desk: start a lesson, take a hint, look at a solution."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from course_lib.grading.catalog import ExerciseLine, course, read_cells, read_hints
from course_lib.grading.progress import Progress
from course_lib.grading.syllabus import exercises_of, lesson_files, number_of

FOLDERS = ("notebooks", "exercises")


def lesson_number(root: Path, text: str) -> str:
    """``text`` as the number of a lesson ("3" is "03"). Raises ValueError that names all."""
    number = text.zfill(2 + text[-1:].isalpha())
    known = [number_of(file) for file in lesson_files(root, "notebooks")]
    if number not in known:
        raise ValueError(f"there is no lesson {text!r}; the lessons are {', '.join(known)}")
    return number


def exercise_id(root: Path, number: str, text: str) -> ExerciseLine:
    """The exercise of a lesson by "03-2" or by "2". Raises ValueError that names all."""
    known = exercises_of(root, number)
    for exercise in known:
        if text in (exercise.id, exercise.id.removeprefix(f"{number}-")):
            return exercise
    names = ", ".join(exercise.id for exercise in known) or "none"
    raise ValueError(f"lesson {number} has no exercise {text!r}; it has {names}")


def start(root: Path, number: str, fresh: bool = False) -> list[tuple[Path, str]]:
    """Copy a lesson into work/; return each file with what was done: "new", "kept" or "fresh".

    An existing file stays. With ``fresh`` it is renamed, and a new copy takes its place. The copy
    has no outputs, because they would answer the lesson's questions before the learner does.
    """
    done = []
    for folder in reversed(FOLDERS):  # the lesson last: JupyterLab opens the newest file
        for source in lesson_files(root, folder, number):
            target = root / "work" / folder / source.name
            target.parent.mkdir(parents=True, exist_ok=True)
            there = target.exists()
            if there and fresh:
                target.rename(_free(target))
            if fresh or not there:
                target.write_text(
                    without_outputs(source.read_text(encoding="utf-8")), encoding="utf-8"
                )
            done.append((target, "kept" if there and not fresh else "fresh" if there else "new"))
    return done[::-1]


def without_outputs(notebook: str) -> str:
    """Return the JSON of a notebook without the outputs of its cells."""
    data = json.loads(notebook)
    for cell in data["cells"]:
        if cell["cell_type"] == "code":
            cell.update(outputs=[], execution_count=None)
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def _free(target: Path) -> Path:
    """A name beside ``target`` that nothing has."""
    number = 1
    while (name := target.with_name(f"{target.stem}.before-{number}.ipynb")).exists():
        number += 1
    return name


def own_file(root: Path, number: str) -> Path:
    """The learner's exercise file of a lesson. Raises ValueError that says how to get it."""
    for source in lesson_files(root, "exercises", number):
        if (path := root / "work" / "exercises" / source.name).exists():
            return path
        raise ValueError(f"lesson {number} is not begun: course start {number} copies it to work/")
    raise ValueError(
        f"lesson {number} has no exercises: all of it is in its notebook (course start {number})"
    )


def hint(root: Path, exercise: ExerciseLine) -> str:
    """Return the hints up to the next one, a line for each, and note the next one as taken."""
    hints = read_hints(root, exercise.id)
    progress = Progress(root)
    entry = progress.of(exercise.id)
    entry.hints = min(entry.hints + 1, len(hints))
    progress.save()
    shown = enumerate(hints[: entry.hints], 1)
    return "\n".join(f"hint {rung} of {len(hints)}: {text}" for rung, text in shown)


def solution(root: Path, exercise: ExerciseLine, yes: bool = False) -> str:
    """The solution, after one attempt or with ``yes``. Raises ValueError when it is too early."""
    if not yes and not Progress(root).of(exercise.id).attempts:
        number = exercise.id.partition("-")[0]
        raise ValueError(
            f"there was no attempt at {exercise.id} yet: course check {number} {exercise.id} "
            "counts as one, and --yes shows the solution without"
        )
    return "\n\n".join(_solution_cells(root, exercise)) or "The solution is not written down yet."


def _solution_cells(root: Path, exercise: ExerciseLine) -> Iterator[str]:
    for file in lesson_files(root, "solutions", exercise.id.partition("-")[0]):
        for cell in read_cells(file):
            if course(cell) == {"ex": exercise.id, "role": "answer"}:
                if cell["cell_type"] == "code":
                    yield cell["source"]
                else:
                    yield "\n".join(f"# {line}" for line in cell["source"].splitlines())
