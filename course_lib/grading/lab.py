"""Break-it labs: runs of which each has one fault, drawn from a seed; the learner names it.

    lab = Lab("04", SEED, {
        "healthy": (None, None),
        "late": ("all_gather", "all"),
        "shifted": ("reduce_scatter", range(4)),  # one of these ranks, drawn
    })
    for patient in lab:
        print(patient.letter, run(step, patient, n=4))
    lab.grade({"A": ("late", "all_gather", "all"), "B": ("healthy", None, None), ...})

A cause always shows alike, its rank and the letter that has it change with the seed. What a lab
or a patient prints of itself does not tell; only ``reveal()`` does.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, repr=False)
class Patient:
    """One run: its letter, and what it has, which a folded cell reads to do it."""

    letter: str
    truth: Truth
    seed: str

    @property
    def cause(self) -> str:
        """The name of the fault; "healthy" is one by convention."""
        return str(self.truth[0])

    @property
    def where(self) -> Answer:
        """What stands between cause and rank: the collective, or what the lab asks for there."""
        return self.truth[1]

    @property
    def rank(self) -> Answer:
        """The culprit: a rank, "all", or None."""
        return self.truth[-1]

    def has(self, cause: str, rank: int | None = None) -> bool:
        """Whether this is the fault; with ``rank``, whether it is that rank's."""
        return self.cause == cause and (rank is None or self.rank in ("all", rank))

    def pick(self, options: Sequence[Option]) -> Option:
        """What else the seed decides, such as a layer: on every rank, and every time, the same."""
        return random.Random(f"{self.seed} {self.letter}").choice(options)

    def __repr__(self) -> str:
        return f"patient {self.letter}"


@dataclass(frozen=True)
class Result:
    """A graded diagnosis: a mark for each field of each patient, or one sentence in their place."""

    fields: tuple[str, ...]
    rows: Mapping[str, Sequence[str]]
    remark: str = ""

    @property
    def right(self) -> int:
        """Patients of whom everything was said, and is right."""
        return sum(set(row) == {RIGHT} for row in self.rows.values())

    @property
    def total(self) -> int:
        """Number of patients."""
        return len(self.rows)

    @property
    def begun(self) -> bool:
        """Whether anything was said that could be judged."""
        return any({RIGHT, WRONG} & set(row) for row in self.rows.values())

    def __repr__(self) -> str:
        lines = [f"{self.right} of {self.total} right"]
        said = any(set(row) != {UNSAID} for row in self.rows.values())
        if said:
            lines.append(_line("", self.fields))
            lines += [_line(letter, row) for letter, row in self.rows.items()]
        elif not self.remark:
            lines[0] += ": nothing is diagnosed yet"
        return "\n".join([*lines, *filter(None, [self.remark])])


class Lab:
    """The patients of a lesson's lab, in the order of their letters.

    ``faults`` gives for each cause the other fields of its diagnosis; where one is a range or a
    list, the seed picks from it. ``fields`` names all of them: cause first, rank last. There is a
    patient for every cause, or as many as ``patients`` says, each with a cause of its own.
    """

    def __init__(
        self,
        lesson: str,
        seed: object,
        faults: Mapping[str, Sequence[Any]],
        fields: Sequence[str] = FIELDS,
        patients: int | None = None,
    ) -> None:
        self.lesson, self.fields = lesson, tuple(fields)
        for cause, rest in faults.items():
            if isinstance(rest, str) or len(rest) + 1 != len(self.fields):
                raise ValueError(f"{cause!r} needs an answer for each of {self.fields[1:]}")
        key = f"{lesson} {seed}"
        drawn = random.Random(key)
        causes = drawn.sample(list(faults), k=len(faults) if patients is None else patients)
        self._known = _known(faults)
        self._patients = [
            Patient(letter, (cause, *(_drawn(answer, drawn) for answer in faults[cause])), key)
            for letter, cause in zip(ascii_uppercase, causes, strict=False)
        ]

    def __iter__(self) -> Iterator[Patient]:
        return iter(self._patients)

    def __len__(self) -> int:
        return len(self._patients)

    def __repr__(self) -> str:
        letters = ", ".join(patient.letter for patient in self)
        return f"lab of lesson {self.lesson}: patients {letters}"

    def grade(self, diagnosis: Mapping[str, Sequence[Answer]]) -> Result:
        """What is right, field by field; never raises. In work/ it is noted as progress."""
        if not isinstance(diagnosis, Mapping):
            example = f'{{"A": ({", ".join(self.fields)}), ...}}'
            return Result(self.fields, self._nothing(), f"a diagnosis is a table such as {example}")
        rows = self._nothing()
        rows |= {one.letter: self._row(one, diagnosis.get(one.letter)) for one in self}
        unknown = [letter for letter in diagnosis if letter not in rows]
        letters = ", ".join(rows)
        remark = f"there is no patient {unknown[0]!r}; they are {letters}" if unknown else ""
        result = Result(self.fields, rows, remark)
        if result.begun:
            _note(self.lesson, result, Path(__file__).resolve().parents[2])
        return result

    def reveal(self) -> None:
        """Print what every patient has."""
        print("\n".join([_line("", self.fields), *(_line(one.letter, one.truth) for one in self)]))

    def _nothing(self) -> dict[str, Sequence[str]]:
        return {patient.letter: [UNSAID] * len(self.fields) for patient in self}

    def _row(self, patient: Patient, said: object) -> Sequence[str]:
        if said is None:
            return [UNSAID] * len(self.fields)
        if isinstance(said, str) or not isinstance(said, Sequence) or len(said) != len(self.fields):
            return [f"say it as ({', '.join(self.fields)}), in this order"]
        for field, known, answer in zip(self.fields, self._known, said, strict=True):
            if wrong := _cannot_be(field, known, answer):
                return [wrong]
        # None is an answer too (no collective, no rank), but only beside a cause
        unsaid = [answer is None and (n == 0 or said[0] is None) for n, answer in enumerate(said)]
        return [
            UNSAID if nothing else RIGHT if answer == truth else WRONG
            for nothing, answer, truth in zip(unsaid, said, patient.truth, strict=True)
        ]


def _drawn(answer: Any, drawn: random.Random) -> Answer:
    return drawn.choice(answer) if isinstance(answer, range | list) else answer


def _known(faults: Mapping[str, Sequence[Any]]) -> list[list[Answer]]:
    """For each field all answers that some patient could have."""
    columns: list[list[Answer]] = [list(faults), *([] for _ in next(iter(faults.values())))]
    for rest in faults.values():
        for column, answer in zip(columns[1:], rest, strict=True):
            some = answer if isinstance(answer, range | list) else [answer]
            column += [one for one in some if one not in column]
    return columns


def _cannot_be(field: str, known: Sequence[Answer], answer: Any) -> str:
    """Why no patient can have this answer; a rank may be any number."""
    if answer is None:
        return ""
    if field == "rank":
        good = answer == "all" if isinstance(answer, str) else type(answer) is int
        return "" if good else f'{_short(answer)} is no rank: a number, "all" or None'
    if isinstance(answer, str) and answer in known:
        return ""
    names = ", ".join("None" if one is None else f'"{one}"' for one in known)
    return f"{_short(answer)} is no {field} of this lab; choose from {names}"


def _short(answer: object) -> str:
    text = " ".join(repr(answer).split())
    return text if len(text) <= 40 else f"{text[:37]}..."


def _line(letter: str, cells: Sequence[object]) -> str:
    return (f"{letter:3}" + "".join(f"{cell!s:{WIDTH}}" for cell in cells)).rstrip()


def _note(lesson: str, result: Result, root: Path) -> None:
    """In the learner's own folder it is progress."""
    with contextlib.suppress(OSError):
        if in_work(Path.cwd() / "notebook", root):
            progress = Progress(root)
            progress.lab(lesson).attempt(result.right, result.total)
            progress.save()
