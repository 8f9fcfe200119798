"""The lessons of the course in order, with those that a folder lacks, and the learner's progress.

Names are short, for a list; titles, minutes and labs are read from the lessons themselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from course_lib.grading.catalog import ExerciseLine, exercise_lines, read_cells
from course_lib.grading.progress import Entry, Progress

NAMES = {
    "00": "Start here",
    "01": "Why parallelism",
    "02": "Collectives",
    "03": "Data parallelism",
    "04": "ZeRO",
    "04b": "FSDP in practice",
    "05": "Tensor parallelism",
    "06": "Sequence parallelism",
    "06b": "Vocabulary, seeds, heads",
    "07": "Pipelines I",
    "08": "Pipelines II",
    "08b": "The schedule arena",
    "09": "Context parallelism",
    "09b": "Gather, Ulysses, USP",
    "10": "Expert parallelism",
    "11": "Groups in anger",
    "12": "Five axes",
    "13": "Inference",
    "13b": "Serving on many ranks",
    "14": "The decision",
    "14b": "The plan arena",
    "15": "True or false",
    "16": "Interview day",
    "16b": "Six katas",
}
ELECTIVE = {"08", "10"}  # and every deep dive, such as 06b
MINUTES = re.compile(r"\*(\d+) minutes to read and run(?:, (\d+) to build)?")
ROW = "{:4}{:24}{:>6}{:>7}{:>12}{:>13}{:>11}"  # 77 columns
LAB = re.compile(r'\bLab\(\s*"(\d\d[a-z]?)"')


@dataclass(frozen=True)
class LessonLine:
    """A lesson and how far the learner is with it.

    ``minutes`` are those to read and run, and to build; None where the lesson says none, as an
    untimed one does. ``points`` are those of all its exercises, and ``each`` by exercise. If the
    lesson is not in the folder, ``here`` is False and only its name is known.
    """

    number: str
    name: str
    here: bool = False
    title: str = ""
    minutes: tuple[int | None, int | None] = (None, None)
    points: int = 0
    each: Mapping[str, int] = field(default_factory=dict)
    exercises: Mapping[str, Entry] = field(default_factory=dict)
    lab: Entry | None = None  # None: the lesson has none

    @property
    def elective(self) -> bool:
        """Whether the core path goes on without it."""
        return self.number in ELECTIVE or not self.number.isdigit()

    @property
    def done(self) -> int:
        """Exercises of which all cases passed once."""
        return sum(entry.done for entry in self.exercises.values())

    @property
    def earned(self) -> int:
        """Points at the best attempt of each exercise; all of them for one that is done."""
        return sum(
            self.each[ex] if entry.done else min(entry.best, self.each[ex])
            for ex, entry in self.exercises.items()
        )

    @property
    def stricter(self) -> list[str]:
        """Exercises that were done before their checks had as many cases as today."""
        return [
            ex for ex, entry in self.exercises.items() if entry.done and entry.total < self.each[ex]
        ]


def lessons(root: Path) -> list[LessonLine]:
    """All lessons of the course, those in the folder ``root`` as they stand there."""
    files = {number_of(file): file for file in lesson_files(root, "notebooks")}
    progress = Progress(root)
    return [
        _line(root, files[number], progress) if number in files
        else LessonLine(number, NAMES[number])
        for number in sorted(NAMES.keys() | files.keys())
    ]  # fmt: skip


def table(found: list[LessonLine]) -> str:
    """Return the lessons as text: minutes, exercises, points, labs, and how far the learner is."""
    rows = [ROW.format("", "", "read", "build", "exercises", "points", "lab"), *map(_row, found)]
    labs = [lesson.lab for lesson in found if lesson.lab is not None]
    here = [lesson for lesson in found if lesson.here]
    sums = (
        _sum(sum(lesson.done for lesson in here), sum(len(lesson.exercises) for lesson in here)),
        _sum(sum(lesson.earned for lesson in here), sum(lesson.points for lesson in here)),
        _sum(sum(lab.done for lab in labs), len(labs)),
    )
    minutes = [str(sum(each.minutes[kind] or 0 for each in here)) for kind in (0, 1)]
    stricter = [ex for lesson in here for ex in lesson.stricter]
    note = f"You passed {', '.join(stricter)} before the checks became stricter: still done."
    return "\n".join(
        [
            *rows,
            ROW.format("", "all", *minutes, *sums),
            "",
            "Minutes to read and run, and to build; * is an elective. course start NN: begin.",
            *([note] if stricter else []),
        ]
    )


def _row(lesson: LessonLine) -> str:
    name = lesson.name + " *" * lesson.elective
    if not lesson.here:
        return ROW.format(lesson.number, name, "", "", "", "not here yet", "")
    read, build = ("-" if each is None else str(each) for each in lesson.minutes)
    lab = lesson.lab
    state = "-" if lab is None else _sum(lab.best, lab.total) if lab.attempts else "to do"
    return ROW.format(
        lesson.number,
        name,
        read,
        build,
        _sum(lesson.done, len(lesson.exercises)),
        _sum(lesson.earned, lesson.points),
        "done" if lab is not None and lab.done else state,
    )


def _sum(some: int, of: int) -> str:
    return f"{some} of {of}" if of else "-"


def lesson_files(root: Path, folder: str, number: str = "*") -> list[Path]:
    """The notebooks of one kind, of one lesson or of all, in order."""
    pattern = "[0-9][0-9]*_*.ipynb" if number == "*" else f"{number}_*.ipynb"
    return sorted((root / folder).glob(pattern), key=number_of)


def number_of(file: Path) -> str:
    """The number of the lesson of a notebook: "03", "08b"."""
    return file.stem.partition("_")[0]


def exercises_of(root: Path, number: str) -> list[ExerciseLine]:
    """Return the exercises of a lesson, in order; [] where it has none."""
    files = lesson_files(root, "exercises", number)
    return exercise_lines(read_cells(files[0]), files[0]) if files else []


def _line(root: Path, file: Path, progress: Progress) -> LessonLine:
    number = number_of(file)
    cells = read_cells(file)
    sources = [cell["source"] for cell in cells]
    title = _title([cell["source"] for cell in cells if cell["cell_type"] == "markdown"])
    title = title.removeprefix(number).strip() or file.stem.partition("_")[2].replace("_", " ")
    exercises = exercises_of(root, number)
    return LessonLine(
        number,
        NAMES.get(number, title.partition(":")[0]),
        here=True,
        title=title,
        minutes=_minutes("\n".join(sources[:2])),
        points=sum(exercise.points for exercise in exercises),
        each={exercise.id: exercise.points for exercise in exercises},
        exercises={exercise.id: progress.of(exercise.id) for exercise in exercises},
        lab=progress.lab(number) if number in _labs(sources) else None,
    )


def _title(texts: list[str]) -> str:
    """The first heading."""
    lines = (line for text in texts for line in text.splitlines())
    return next((line[2:].strip() for line in lines if line.startswith("# ")), "")


def _minutes(text: str) -> tuple[int | None, int | None]:
    found = MINUTES.search(text)
    read_and_run, build = found.groups() if found else (None, None)
    return (int(read_and_run) if read_and_run else None, int(build) if build else None)


def _labs(sources: list[str]) -> set[str]:
    return {number for source in sources for number in LAB.findall(source)}
