"""Break-it labs: faulty runs and a correct one, drawn from a seed; the learner names the faults.

    lab = Lab("04", SEED, {
        "correct": (None, None),
        "late": ("all_gather", "all"),
        "shifted": ("reduce_scatter", range(4)),  # one of these ranks, drawn
    })
    for lab_run in lab:
        print(lab_run.letter, run(step, lab_run, n=4))
    lab.grade({"A": ("late", "all_gather", "all"), "B": ("correct", None, None), ...})

A cause has the same symptoms for every seed; its letter and its rank change with the seed. The
repr of a lab or of a run does not show the faults; only ``reveal()`` prints them.
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
    """A graded diagnosis: per run, a mark for each field, or one sentence about the entry."""

    fields: tuple[str, ...]
    rows: Mapping[str, Sequence[str]]
    remark: str = ""

    @property
    def right(self) -> int:
        """Number of runs with a right answer in every field."""
        return sum(set(row) == {RIGHT} for row in self.rows.values())

    @property
    def total(self) -> int:
        """Number of runs."""
        return len(self.rows)

    @property
    def begun(self) -> bool:
        """Whether the diagnosis has at least one valid answer."""
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
        key = f"{lesson} {seed}"
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
        """Return a mark per field; never raises. In work/ the result is saved as progress."""
        if not isinstance(diagnosis, Mapping):
            example = f'{{"A": ({", ".join(self.fields)}), ...}}'
            remark = f"expected a dict such as {example}, got {_short(diagnosis)}"
            return Result(self.fields, self._nothing(), remark)
        rows = self._nothing()
        rows |= {one.letter: self._row(one, diagnosis.get(one.letter)) for one in self}
        unknown = [letter for letter in diagnosis if letter not in rows]
        letters = ", ".join(rows)
        remark = f"expected the runs {letters}, got {_short(unknown[0])}" if unknown else ""
        result = Result(self.fields, rows, remark)
        if result.begun:
            _note(self.lesson, result, Path(__file__).resolve().parents[2])
        return result

    def reveal(self) -> None:
        """Print the fault of every run."""
        print("\n".join([_line("", self.fields), *(_line(one.letter, one.truth) for one in self)]))

    def _nothing(self) -> dict[str, Sequence[str]]:
        return {lab_run.letter: [UNSAID] * len(self.fields) for lab_run in self}

    def _row(self, lab_run: LabRun, said: object) -> Sequence[str]:
        if said is None:
            return [UNSAID] * len(self.fields)
        if isinstance(said, str) or not isinstance(said, Sequence) or len(said) != len(self.fields):
            return [f"expected ({', '.join(self.fields)}) in this order, got {_short(said)}"]
        if isinstance(said[0], str) and said[0] == FORMERLY and CORRECT in self._known[0]:
            said = [CORRECT, *said[1:]]
        for field, known, answer in zip(self.fields, self._known, said, strict=True):
            if wrong := _cannot_be(field, known, answer):
                return [wrong]
        # With a cause, None is an answer too: no collective, no rank.
        unsaid = [answer is None and (n == 0 or said[0] is None) for n, answer in enumerate(said)]
        return [
            UNSAID if nothing else RIGHT if answer == truth else WRONG
            for nothing, answer, truth in zip(unsaid, said, lab_run.truth, strict=True)
        ]


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


def _note(lesson: str, result: Result, root: Path) -> None:
    """Save the result as progress, if the notebook is in the learner's folder."""
    with contextlib.suppress(OSError):
        if in_work(Path.cwd() / "notebook", root):
            progress = Progress(root)
            progress.lab(lesson).attempt(result.right, result.total)
            progress.save()
