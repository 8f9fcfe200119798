"""Break-it labs: faulty runs and a correct one, drawn from a seed; the learner names the faults.

    lab = Lab("04", SEED, {
        "correct": (None, None),
        "late": ("all_gather", "all"),
        "shifted": ("reduce_scatter", range(4)),  # one of these ranks, drawn
    })
    for lab_run in lab:
        print(lab_run.letter, run(step, lab_run, n=4))
    lab.grade({"A": ("late", "all_gather", "all"), "B": ("correct", None, None), ...})

A cause has the same symptoms for every seed; its letter and its rank change with the seed. For a
notebook in work/, the runs also depend on the learner's own seed in work/.course/labs.json. The
repr of a lab or of a run does not show the faults; only ``reveal()`` prints them.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import ascii_uppercase
from typing import Any, TypeVar

from course_lib.grading.progress import Progress, in_work

Option = TypeVar("Option")
Answer = str | int | None
Truth = tuple[Answer, ...]
FIELDS = ("cause", "collective", "rank")
UNSAID, RIGHT, WRONG = "-", "right", "look again"
WIDTH = 16
CORRECT, FORMERLY = "correct", "healthy"  # a saved diagnosis may have the second name


@dataclass(frozen=True, repr=False)
class LabRun:
    """One run of a lab: its letter and its fault, which the folded cell reproduces."""

    letter: str
    truth: Truth
    seed: str

    @property
    def cause(self) -> str:
        """The name of the fault; "correct" in a run without a fault, by convention."""
        return str(self.truth[0])

    @property
    def where(self) -> Answer:
        """The field between cause and rank: the collective, or another field of the lab."""
        return self.truth[1]

    @property
    def rank(self) -> Answer:
        """The faulty rank: a number, "all", or None."""
        return self.truth[-1]

    def has(self, cause: str, rank: int | None = None) -> bool:
        """Return whether the run has this fault; with ``rank``, whether that rank has it."""
        return self.cause == cause and (rank is None or self.rank in ("all", rank))

    def pick(self, options: Sequence[Option]) -> Option:
        """Draw an option, such as a layer: the same one on every rank and in every call."""
        return random.Random(f"{self.seed} {self.letter}").choice(options)

    def __repr__(self) -> str:
        return f"run {self.letter}"


@dataclass(frozen=True)
class Result:
    """A graded diagnosis: for each run a mark, or one sentence about the entry.

    A run is marked as a whole: marks per field would let a learner find the fields one by one.
    """

    marks: Mapping[str, str]
    remark: str = ""
    attempts: int = 0  # this one included

    @property
    def right(self) -> int:
        """Number of runs with a right answer in every field."""
        return list(self.marks.values()).count(RIGHT)

    @property
    def total(self) -> int:
        """Number of runs."""
        return len(self.marks)

    @property
    def begun(self) -> bool:
        """Whether at least one run has a valid diagnosis."""
        return bool({RIGHT, WRONG} & set(self.marks.values()))

    def __repr__(self) -> str:
        lines = [f"{self.right} of {self.total} right"]
        if self.begun:
            lines[0] += f" in attempt {self.attempts}"
        if set(self.marks.values()) != {UNSAID}:
            lines += [_line(letter, [mark]) for letter, mark in self.marks.items()]
        elif not self.remark:
            lines[0] += ": nothing is diagnosed yet"
        return "\n".join([*lines, *filter(None, [self.remark])])


class Lab:
    """The runs of a lesson's lab, in the order of their letters.

    ``faults`` maps each cause to the other fields of its diagnosis; from a range or a list, the
    seed draws one value. ``fields`` names all fields: cause first, rank last. The lab has one run
    per cause, or ``runs`` runs with different causes.
    """

    def __init__(
        self,
        lesson: str,
        seed: object,
        faults: Mapping[str, Sequence[Any]],
        fields: Sequence[str] = FIELDS,
        runs: int | None = None,
    ) -> None:
        self.lesson, self.fields = lesson, tuple(fields)
        for cause, rest in faults.items():
            if isinstance(rest, str) or len(rest) + 1 != len(self.fields):
                raise ValueError(
                    f"expected a tuple of {self.fields[1:]} for the cause {cause!r}, got {rest!r}"
                )
        self._attempts = 0
        key = f"{lesson} {seed}{_own_seed(lesson, _root())}"
        drawn = random.Random(key)
        causes = drawn.sample(list(faults), k=len(faults) if runs is None else runs)
        self._known = _known(faults)
        self._runs = [
            LabRun(letter, (cause, *(_drawn(answer, drawn) for answer in faults[cause])), key)
            for letter, cause in zip(ascii_uppercase, causes, strict=False)
        ]

    def __iter__(self) -> Iterator[LabRun]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    def __repr__(self) -> str:
        letters = ", ".join(lab_run.letter for lab_run in self)
        return f"lab of lesson {self.lesson}: runs {letters}"

    def grade(self, diagnosis: Mapping[str, Sequence[Answer]]) -> Result:
        """Return a mark per run; never raises. In work/ the result is saved as progress."""
        marks = {one.letter: UNSAID for one in self}
        if not isinstance(diagnosis, Mapping):
            example = f'{{"A": ({", ".join(self.fields)}), ...}}'
            return Result(marks, f"expected a dict such as {example}, got {_short(diagnosis)}")
        remark = next(
            (
                f"expected the runs {', '.join(marks)}, got {_short(letter)}"
                for letter in diagnosis
                if letter not in marks
            ),
            "",
        )
        marks |= {one.letter: self._mark(one, diagnosis.get(one.letter)) for one in self}
        result = Result(marks, remark)
        if result.begun:
            self._attempts += 1
            saved = _note(self.lesson, result, _root())
            result = replace(result, attempts=saved or self._attempts)
        return result

    def reveal(self) -> None:
        """Print the fault of every run."""
        print("\n".join([_line("", self.fields), *(_line(one.letter, one.truth) for one in self)]))

    def _mark(self, lab_run: LabRun, said: object) -> str:
        if said is None:
            return UNSAID
        if isinstance(said, str) or not isinstance(said, Sequence) or len(said) != len(self.fields):
            return f"expected ({', '.join(self.fields)}) in this order, got {_short(said)}"
        if isinstance(said[0], str) and said[0] == FORMERLY and CORRECT in self._known[0]:
            said = [CORRECT, *said[1:]]
        for field, known, answer in zip(self.fields, self._known, said, strict=True):
            if wrong := _cannot_be(field, known, answer):
                return wrong
        if said[0] is None:  # only with a cause is None an answer in the other fields
            return UNSAID
        return RIGHT if tuple(said) == lab_run.truth else WRONG


def _drawn(answer: Any, drawn: random.Random) -> Answer:
    return drawn.choice(answer) if isinstance(answer, range | list) else answer


def _known(faults: Mapping[str, Sequence[Any]]) -> list[list[Answer]]:
    """Return all possible answers of each field."""
    columns: list[list[Answer]] = [list(faults), *([] for _ in next(iter(faults.values())))]
    for rest in faults.values():
        for column, answer in zip(columns[1:], rest, strict=True):
            some = answer if isinstance(answer, range | list) else [answer]
            column += [one for one in some if one not in column]
    return columns


def _cannot_be(field: str, known: Sequence[Answer], answer: Any) -> str:
    """Return why no run can have this answer, "" if one can; a rank may be any number."""
    if answer is None:
        return ""
    if field == "rank":
        good = answer == "all" if isinstance(answer, str) else type(answer) is int
        return "" if good else f'expected a rank: a number, "all" or None, got {_short(answer)}'
    if isinstance(answer, str) and answer in known:
        return ""
    names = ", ".join("None" if one is None else f'"{one}"' for one in known)
    return f"expected a {field} of this lab ({names}), got {_short(answer)}"


def _short(answer: object) -> str:
    text = " ".join(repr(answer).split())
    return text if len(text) <= 40 else f"{text[:37]}..."


def _line(letter: str, cells: Sequence[object]) -> str:
    return (f"{letter:3}" + "".join(f"{cell!s:{WIDTH}}" for cell in cells)).rstrip()


def _root() -> Path:
    return Path(__file__).resolve().parents[2]


def _note(lesson: str, result: Result, root: Path) -> int:
    """Save the result as progress and return the number of attempts; 0 outside work/."""
    with contextlib.suppress(OSError):
        if in_work(Path.cwd() / "notebook", root):
            progress = Progress(root)
            progress.lab(lesson).attempt(result.right, result.total)
            progress.save()
            return progress.lab(lesson).attempts
    return 0


def _own_seed(lesson: str, root: Path) -> str:
    """Return the learner's own part of a lab's key; "" outside work/.

    The seed is drawn once. A lab that had attempts before is listed as ``committed``: its runs stay
    the same, and so does the diagnosis that the learner has saved.
    """
    path = root / "work" / ".course" / "labs.json"
    with contextlib.suppress(OSError):
        if in_work(Path.cwd() / "notebook", root):
            seed, committed = _read_seed(path) or _draw_seed(path, root)
            return "" if lesson in committed else f" {seed}"
    return ""


def _read_seed(path: Path) -> tuple[int, list[str]] | None:
    """Return the seed and the labs without it; None if there is no file that can be read."""
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return int(found["seed"]), list(map(str, found["committed"]))
    except (ValueError, KeyError, TypeError):
        path.replace(path.with_suffix(".unreadable.json"))
        return None


def _draw_seed(path: Path, root: Path) -> tuple[int, list[str]]:
    """Draw and save the seed; if another notebook has just saved one, return that."""
    labs = Progress(root).labs
    committed = [lesson for lesson, entry in labs.items() if entry.attempts]
    drawn = random.SystemRandom().randrange(10**9)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8") as file:
        json.dump({"seed": drawn, "committed": committed}, file)
        file.flush()
        with contextlib.suppress(FileExistsError):
            os.link(file.name, path)  # atomic: no other notebook reads a half-written file
    return _read_seed(path) or (drawn, committed)
