"""list, score, start, check, hint, solution and grade: a learner's way through the exercises."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from course_lib.cli.app import AsJson, app
from course_lib.cli.errors import ENVIRONMENT, FAILED
from course_lib.cli.place import course_folder
from course_lib.cli.show import print_json
from course_lib.cli.status import Say, Status

if TYPE_CHECKING:
    from course_lib.grading.run import Done, Grade
    from course_lib.grading.syllabus import LessonLine

Number = Annotated[str, typer.Argument(metavar="NN", help="Number of the lesson, such as 03.")]
ExerciseId = Annotated[str, typer.Argument(metavar="EX", help="Exercise: 03-2, or 2.")]


@app.command("list")
def list_lessons(as_json: AsJson = False) -> int:
    """List the lessons with their minutes and your points."""
    from course_lib.grading import syllabus

    found = syllabus.lessons(course_folder())
    if as_json:
        print_json({"lessons": [_lesson_as_data(lesson) for lesson in found]})
    else:
        print(syllabus.table(found))
    return 0


@app.command()
def score(as_json: AsJson = False) -> int:
    """Compare the predictions and votes in work/ with the true values."""
    from course_lib.interview import calibration

    found = calibration.score(course_folder())
    if as_json:
        print_json(found.as_dict())
    else:
        print(found)
    return 0


def _lesson_as_data(lesson: LessonLine) -> dict[str, Any]:
    read, build = lesson.minutes
    return {
        "lesson": lesson.number,
        "name": lesson.name,
        "title": lesson.title,
        "here": lesson.here,
        "elective": lesson.elective,
        "minutes": {"read": read, "build": build},
        "points": {"earned": lesson.earned, "total": lesson.points},
        "exercises": {ex: vars(entry) for ex, entry in lesson.exercises.items()},
        "lab": None if lesson.lab is None else vars(lesson.lab),
    }


@app.command()
def start(
    number: Number,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Set your files aside, begin anew.")
    ] = False,
) -> int:
    """Copy a lesson and its exercises into work/, your own folder."""
    from course_lib.grading import desk

    root = course_folder()
    for path, what in desk.start(root, desk.lesson_number(root, number), fresh):
        print(f"{what:<6} {path.relative_to(root)}")
    return 0


@app.command()
def check(
    number: Number,
    ex: Annotated[
        str | None, typer.Argument(metavar="EX", help="Only this one: 03-2, or 2.")
    ] = None,
) -> int:
    """Check your answers in work/exercises; says what is wrong first."""
    from course_lib.grading import desk, report, run

    root = course_folder()
    number = desk.lesson_number(root, number)
    only = desk.exercise_id(root, number, ex).id if ex is not None else None
    with Status(f"lesson {number}: reading your answers") as status:
        result = run.grade(desk.own_file(root, number), root, only=only, say=status.say)
    _note_attempts(root, [result])
    print("\n".join(report.score_lines(result)))
    return _code([result])


@app.command()
def hint(number: Number, ex: ExerciseId) -> int:
    """Print the next of three hints to an exercise."""
    from course_lib.grading import desk

    root = course_folder()
    exercise = desk.exercise_id(root, desk.lesson_number(root, number), ex)
    print(desk.hint(root, exercise))
    return 0


@app.command()
def solution(
    number: Number,
    ex: ExerciseId,
    yes: Annotated[bool, typer.Option("--yes", help="Without an attempt.")] = False,
) -> int:
    """The solution of an exercise, once you have tried it."""
    from course_lib.grading import desk

    root = course_folder()
    exercise = desk.exercise_id(root, desk.lesson_number(root, number), ex)
    print(desk.solution(root, exercise, yes))
    return 0


@app.command()
def grade(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Notebooks to grade.")],
    as_json: AsJson = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print a table as CSV, or write it: --csv class.csv.")
    ] = False,
    as_junit: Annotated[bool, typer.Option("--junit", help="Print JUnit XML.")] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Draw the same parameters again.")] = None,
) -> int:
    """Grade notebooks officially: your answers, in a fresh kernel."""
    from course_lib.grading import report

    if as_json + as_csv + as_junit > 1:
        raise ValueError("give one of --json, --csv and --junit")
    files, table = _without_table(files) if as_csv else (files, None)
    root = course_folder()
    grades, bad = _grade_each(files, root, seed)
    _note_attempts(root, grades)
    if as_json and grades:
        print_json(report.as_json(grades, several=len(files) > 1))
    elif table is not None and grades:
        table.write_text(report.as_csv(grades), encoding="utf-8", newline="")
        print(f"wrote {table}: {len(grades)} of {len(files)} files graded")
    elif as_csv or as_junit:
        print((report.as_csv if as_csv else report.as_junit)(grades), end="")
    else:
        print("\n\n".join(map(report.as_text, grades)), end="\n" if grades else "")
    if bad:
        raise ValueError("; ".join(bad))
    return _code(grades)


def _code(grades: list[Grade]) -> int:
    """Return the exit code: 1 if an exercise failed, else 3 if one was not judged, else 0."""
    if any(each.failed for each in grades):
        return FAILED
    return ENVIRONMENT if any(each.not_judged for each in grades) else 0


def _without_table(files: list[Path]) -> tuple[list[Path], Path | None]:
    """Return the notebooks among ``files``, and the file for the table, whose name ends in .csv.

    Raises ValueError, before anything is graded, if the table could not be written.
    """
    notebooks = [file for file in files if file.suffix.lower() != ".csv"]
    tables = [file for file in files if file not in notebooks]
    if len(tables) > 1 or not notebooks:
        raise ValueError(
            f"expected notebooks and at most one file for the table, got {len(notebooks)} "
            f"notebooks and {len(tables)} names that end in .csv"
        )
    for table in tables:
        if table.is_dir() or not table.absolute().parent.is_dir():
            raise ValueError(f"{table}: cannot be written; give a file in a folder that exists")
    return notebooks, next(iter(tables), None)


def _grade_each(files: list[Path], root: Path, seed: int | None) -> tuple[list[Grade], list[str]]:
    """Grade the files one after another; return the grades, and what is wrong with the others."""
    from course_lib.grading import run

    grades: list[Grade] = []
    bad: list[str] = []
    with Status("starting") as status:
        for number, file in enumerate(files, 1):
            where = f"{file.name} ({number} of {len(files)})" if len(files) > 1 else file.name
            say, said = _after(f"{where}: ", status.say), "not graded"
            done = _after_each(where, status.line)
            say("reading the notebook")
            try:
                grades.append(run.grade(file, root, seed=seed, say=say, done=done))
                said = f"{grades[-1].passed} of {grades[-1].total} points"
            except ValueError as error:  # the other files are still graded
                bad.append(str(error))
            if len(files) > 1:
                status.line(f"{where}: {said}")
    return grades, bad


def _after(head: str, say: Say) -> Say:
    """``say`` with ``head`` before what is said."""
    return lambda text: say(head + text)


def _after_each(where: str, line: Say) -> Done:
    """Return a function that prints a line with the score of an exercise."""
    from course_lib.grading.report import score_line

    return lambda ex, score: line(f"{where}: {score_line(ex, score)}")


def _note_attempts(root: Path, grades: list[Grade]) -> None:
    """Grades of the learner's own files in work/ are attempts; those of others are not."""
    from course_lib.grading.progress import Progress, in_work

    own = [each for each in grades if in_work(Path(each.file), root)]
    if own:
        progress = Progress(root)
        for each in own:
            for ex, score in each.scores.items():
                if not score.not_judged:
                    progress.attempt(ex, score.passed, score.total)
        progress.save()
