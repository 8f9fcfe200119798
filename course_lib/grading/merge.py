"""Put a learner's answers into a copy of the pristine notebook, for the official run.

Only answer cells are taken, by their metadata and in the order of the document, because
JupyterLab gives new ids to a cell that was copied or split. Where a tool has removed the metadata
of an exercise, its answer cells are found by their ids, else by the check call after them. All
other cells (given cells, checks and their expected lines) come from the course, so edits of them
have no effect. The learner's file is never written.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from course_lib.grading.catalog import IMPORT, course, exercise_lines

NUMBER = re.compile(r"(\d\d(?:[a-z](?![a-z]))?)(?!\d)")  # 03, 08b
ANSWER_ID = re.compile(r"(\d\d[a-z]?-\w+)-answer(?:-\d+)?")  # 03-2-answer, 03-2-answer-2
CHECK = re.compile(r"^check\(\s*[\"'](\d\d[a-z]?-\w+)[\"'].*", re.MULTILINE)
MAGIC = re.compile(r"\s*%%(\w+)[^\n]*\n?")  # in the first line of a cell
NO_EFFECT = {"time", "capture"}  # magics around a cell that change none of its names
Notebook = Any  # nbformat's NotebookNode, which is a dict with attributes


@dataclass(frozen=True)
class Merged:
    """A notebook to run, with the points of its exercises, in order, by id.

    ``problems`` has the reason why an answer was not taken, by exercise.
    """

    lesson: str
    notebook: Notebook = field(repr=False)
    points: Mapping[str, int]
    problems: Mapping[str, str]

    def exercise_of_cell(self, number: int) -> str | None:
        """Return the exercise of code cell ``number``, from 0 as nbval counts."""
        cells = [cell for cell in self.notebook.cells if cell.cell_type == "code"]
        return course(cells[number]).get("ex") if 0 <= number < len(cells) else None


def read(path: Path) -> Notebook:
    """Return the notebook in ``path``; a blank file is an empty notebook.

    Raises ValueError if the file is not a notebook.
    """
    import nbformat

    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: this is not a notebook") from None
    if not text.strip():
        return nbformat.v4.new_notebook()
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or "nbformat" not in data:
            raise ValueError("no nbformat")
        return nbformat.convert(nbformat.from_dict(_joined(data)), 4)
    except Exception as error:  # nbformat raises errors of many types
        raise ValueError(f"{path}: this is not a notebook ({type(error).__name__})") from None


def _joined(data: dict[str, Any]) -> dict[str, Any]:
    """Join the sources that a stored notebook has as lists of lines."""
    for cell in data.get("cells", []):
        if isinstance(cell.get("source"), list):
            cell["source"] = "".join(cell["source"])
    return data


def pristine(root: Path, notebook: Notebook, path: Path) -> Path:
    """Return the exercise file of the course from which ``notebook`` was made.

    It is found by the notebook's metadata, else by its exercise ids, else by the file's name.
    Raises ValueError with the names of the lessons.
    """
    known = {_lesson(file): file for file in _exercise_files(root)}
    for lesson in _guesses(notebook, path):
        if lesson in known:
            return known[lesson]
    guess = next(_guesses(notebook, path), None)
    says = f"lesson {guess} has no exercises" if guess else "this is not an exercise of the course"
    raise ValueError(f"{path}: {says}; {_expected(root)}")


def _exercise_files(root: Path) -> list[Path]:
    return sorted((root / "exercises").glob("[0-9][0-9]*_*.ipynb"))


def _lesson(file: Path) -> str:
    return file.name.partition("_")[0]


def _expected(root: Path) -> str:
    names = ", ".join(file.stem for file in _exercise_files(root)) or "the folder is empty"
    return f"expected a copy of a file in exercises/: {names}"


def _guesses(notebook: Notebook, path: Path) -> Iterator[str]:
    named = course(notebook).get("lesson")
    if isinstance(named, str):
        yield named
    ids = [_exercise_of(cell).partition("-")[0] for cell in notebook.get("cells", [])]
    yield from (lesson for lesson, _ in Counter(filter(None, ids)).most_common())
    if match := NUMBER.match(path.name):
        yield match[1]


def _exercise_of(cell: Notebook) -> str:
    """Return the exercise of a cell by its metadata, else by its id, else by its check call."""
    if ex := course(cell).get("ex"):
        return str(ex)
    return _answered(cell) or _checked(cell)


def _answered(cell: Notebook) -> str:
    """Return the exercise whose answer cell has this id, "" if there is none."""
    found = ANSWER_ID.fullmatch(str(cell.get("id", "")))
    return found[1] if found else ""


def _checked(cell: Notebook) -> str:
    """Return the exercise that a code cell checks, "" if there is none."""
    found = CHECK.search(str(cell.get("source", ""))) if cell.get("cell_type") == "code" else None
    return found[1] if found else ""


def _identify(learner: Notebook, origin: Notebook) -> None:
    """Mark the answer cells of exercises without any, as their metadata would do."""
    cells = [cell for cell in learner.get("cells", []) if cell.get("cell_type") == "code"]
    for by in (_by_id, _by_check):
        marked = {course(cell).get("ex") for cell in _cells(learner, "answer")}
        for cell, ex in list(by(cells, origin)):
            if ex not in marked and not course(cell):
                cell["metadata"] = {"course": {"ex": ex, "role": "answer"}}


def _by_id(cells: list[Notebook], origin: Notebook) -> Iterator[tuple[Notebook, str]]:
    return ((cell, _answered(cell)) for cell in cells if _answered(cell))


def _by_check(cells: list[Notebook], origin: Notebook) -> Iterator[tuple[Notebook, str]]:
    """Yield the cells between two checks, without the cells of the course, and their exercise."""
    given = {cell.source.strip() for cell in _cells(origin, "given")} | {""}
    before: list[Notebook] = []
    for cell in cells:
        if CHECK.sub("", str(cell.get("source", ""))).replace(IMPORT, "").strip() not in given:
            before.append(cell)
        if ex := _checked(cell):
            yield from ((one, ex) for one in before)
            before = []


def merge(
    root: Path,
    path: Path,
    *,
    seed: int,
    only: Collection[str] | None = None,
) -> Merged:
    """Return the pristine notebook with the answers of ``path``.

    With ``only``, the cells of all other exercises are left out. Raises ValueError if the file is
    not an exercise of this course, or if ``only`` has no exercise of its lesson.
    """
    try:
        learner = read(path)
    except ValueError as error:
        raise ValueError(f"{error}; {_expected(root)}") from None
    origin = pristine(root, learner, path)
    notebook = read(origin)
    _identify(learner, notebook)
    lesson = _lesson(origin)
    points = {line.id: line.points for line in exercise_lines(notebook.cells, origin)}
    if only is not None:
        if unknown := [ex for ex in only if ex not in points]:
            names = ", ".join(points)
            raise ValueError(
                f"expected an exercise of lesson {lesson}: {names}, got {unknown[0]!r}"
            )
        points = {ex: points[ex] for ex in points if ex in only}
        kept = {None, *points}
        notebook.cells = [cell for cell in notebook.cells if course(cell).get("ex") in kept]
    problems = {}
    for ex in points:
        if problem := _take_answer(notebook, learner, ex):
            problems[ex] = problem
    lines = _expected_lines(root / "solutions" / origin.name)
    _expect(notebook, lines, seed)
    return Merged(lesson, notebook, points, problems)


def _cells(notebook: Notebook, role: str, ex: str | None = None) -> list[Notebook]:
    """Return the code cells with a role, of one exercise if given."""
    return [
        cell
        for cell in notebook.get("cells", [])
        if cell.get("cell_type") == "code"
        and course(cell).get("role") == role
        and ex in (None, course(cell).get("ex"))
    ]


def _take_answer(notebook: Notebook, learner: Notebook, ex: str) -> str:
    """Put the answer of ``ex`` into ``notebook``; return why this is impossible, or ""."""
    sources = [str(cell.get("source", "")) for cell in _cells(learner, "answer", ex)]
    if not sources:
        return f"the file has no answer cell of {ex}: write your answer into the given answer cell"
    places = _cells(notebook, "answer", ex)
    if len(places) != len(sources):  # split, copied or deleted: join all in the first place
        sources = list(map(_without_magic, sources))
        if rest := next(filter(None, map(MAGIC.match, sources)), None):
            return f"the answer has several cells, and one begins with %%{rest[1]}: remove the line"
        sources = ["\n\n".join(sources)] + [""] * (len(places) - 1)
    if problem := _syntax_error("\n\n".join(sources)):
        return problem
    for place, source in zip(places, sources, strict=True):
        place.source = source
    return ""


def _without_magic(source: str) -> str:
    """Return ``source`` without a first line such as %%time, which works in a whole cell only."""
    found = MAGIC.match(source)
    return source[found.end() :] if found and found[1] in NO_EFFECT else source


def _syntax_error(source: str) -> str:
    from IPython.core.inputtransformer2 import TransformerManager

    try:
        ast.parse(TransformerManager().transform_cell(source))
    except SyntaxError as error:
        return f"the answer has a syntax error in line {error.lineno}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:  # a null byte or very deep nesting
        return f"the answer cannot be read as Python: {error}"
    return ""


def _expected_lines(solution: Path) -> dict[str, str]:
    """Return the line of full marks of each exercise, from the committed solution."""
    lines: dict[str, str] = {}
    if solution.exists():
        for cell in _cells(read(solution), "check"):
            for output in cell.get("outputs", []):
                if text := output.get("data", {}).get("text/plain"):
                    lines[course(cell)["ex"]] = "".join(text)
    return lines


def _expect(notebook: Notebook, lines: Mapping[str, str], seed: int) -> None:
    """Give every check its expected line and its seed; outputs of other cells are not compared."""
    import nbformat

    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    for number, cell in enumerate(_cells(notebook, "check"), 1):
        ex = course(cell)["ex"]
        total = course(cell)["points"]
        line = lines.get(ex, f"{ex}: {total} of {total} passed.")
        data = {"text/plain": line}
        cell.source = _seeded(cell.source, seed)
        cell.execution_count = number
        cell.outputs = [nbformat.v4.new_output("execute_result", data=data, execution_count=number)]


def _seeded(source: str, seed: int) -> str:
    """Return the source of a check cell with ``seed=...`` in its call."""
    tree = ast.parse(source)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr) or not isinstance(last.value, ast.Call):
        return source
    last.value.keywords.append(ast.keyword("seed", ast.Constant(seed)))
    return ast.unparse(tree)
