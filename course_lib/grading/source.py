"""The source of a lesson, ``notebooks/NN_slug.py``: its cells, their roles, answers and stubs.

The file is in jupytext's percent format. A cell of an exercise has metadata in its head::

    # %% course={"ex": "03-2", "role": "answer"}

Roles: ``answer`` (the learner writes it), ``check`` (imports ``check`` and calls it in its last
line), ``given`` (code of the course; without ``ex`` it is for all exercises of the lesson). A
markdown cell with ``ex`` is the text of the exercise; with the role ``answer`` it is a remark that
appears only in the solutions. An answer cell has the solution between marks::

    def square(x):
        '''x times x.'''
        # BEGIN SOLUTION
        return x * x
        # END SOLUTION

In the exercise, a ``raise`` replaces the marked lines. If there is a line ``# STUB`` between the
marks, the lines after it replace them, without their comment signs. If the solution is a function
of the library, a line names it instead of a copy: ``# solution: course_lib.dp:all_reduce_gradients
as my_own``. Its stub has the signature and the docstring.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_lib.grading.catalog import IMPORT

ROLES = ("answer", "check", "given")
LIBRARY = Path(__file__).resolve().parents[1]
NAME = re.compile(r"(\d\d[a-z]?)_\w+")
EXERCISE = re.compile(r"(\d\d[a-z]?)-\w+")
LAYOUT_KEYS = {"lines_to_next_cell", "lines_to_end_of_cell_marker"}  # jupytext's own keys
HEAD = re.compile(r"# ?%%")
BEGIN, STUB, END = "# BEGIN SOLUTION", "# STUB", "# END SOLUTION"
FROM_LIBRARY = re.compile(r"# solution: course_lib\.(?P<module>[\w.]+):(?P<name>\w+)(?: as (\w+))?")


class SourceError(ValueError):
    """Raised for a lesson that cannot be built; the message begins with file and line."""


@dataclass(frozen=True)
class Cell:
    """One cell. ``metadata`` is from the notebook; it has ``ex`` and ``role``."""

    kind: str  # "markdown" or "code"
    source: str
    metadata: dict[str, Any]
    file: str
    line: int  # of the cell's head in the file

    @property
    def ex(self) -> str | None:
        """The exercise of the cell, such as "03-2"; None for a cell of the lesson."""
        return self.metadata.get("course", {}).get("ex")

    @property
    def role(self) -> str | None:
        """answer, check or given; None for a cell of the lesson or the text of an exercise."""
        return self.metadata.get("course", {}).get("role")

    def error(self, message: str, line: int = 0) -> SourceError:
        """Return an error for ``line`` of the cell (1 is its first line, 0 the head)."""
        return SourceError(f"{self.file}:{self.line + line}: {message}")


@dataclass(frozen=True)
class Lesson:
    """The source of a lesson: all cells, in order."""

    slug: str  # "03_data_parallel"
    cells: tuple[Cell, ...]

    @property
    def number(self) -> str:
        """The number of the lesson, such as "03" or "08b"."""
        return self.slug.partition("_")[0]

    @property
    def title(self) -> str:
        """The first heading of the lesson, without its ``#``."""
        for cell in self.cells:
            if cell.kind == "markdown" and cell.source.startswith("# "):
                return cell.source.splitlines()[0][2:].strip()
        return self.slug

    @property
    def exercises(self) -> tuple[str, ...]:
        """The ids of the exercises, in the order of the file."""
        return tuple(dict.fromkeys(cell.ex for cell in self.cells if cell.ex))


def read_lesson(path: Path) -> Lesson:
    """Read and check ``notebooks/NN_slug.py``. Raises SourceError with file and line."""
    import jupytext

    if not NAME.fullmatch(path.stem):
        raise SourceError(f"{path.name}:1: expected a name NN_slug.py, such as 03_data_parallel.py")
    text = path.read_text(encoding="utf-8")
    try:
        notebook = jupytext.reads(text, fmt="py:percent")
    except Exception as error:  # YAML, schema and format errors have no common class
        words = str(error).strip().splitlines() or [type(error).__name__]
        raise SourceError(f"{path.name}:1: the header cannot be read: {words[0]}") from error
    number = path.stem.partition("_")[0]
    if notebook.metadata.get("course", {}).get("lesson") != number:
        raise SourceError(
            f"{path.name}:1: expected course: lesson: '{number}' in the header, with quotes"
        )
    lines = text.splitlines()
    cells, line = [], _before_first_cell(lines, path)
    for cell in notebook.cells:
        line = _next_head(lines, line)
        metadata = {key: cell.metadata[key] for key in cell.metadata if key not in LAYOUT_KEYS}
        cells.append(Cell(cell.cell_type, cell.source, metadata, path.name, line))
        line += len(cell.source.splitlines())  # a head inside a string does not count
    lesson = Lesson(path.stem, tuple(cells))
    _check(lesson)
    return lesson


def _before_first_cell(lines: list[str], path: Path) -> int:
    """Return the number of lines before the first cell: the YAML header between ``# ---``."""
    header = [number for number, line in enumerate(lines, 1) if line == "# ---"][1]
    for number, line in enumerate(lines[header:], header + 1):
        if HEAD.match(line):
            return number - 1
        if line.strip():
            break
    raise SourceError(f"{path.name}:{number}: expected a line '# %%' at the start of a cell")


def _next_head(lines: list[str], after: int) -> int:
    """Return the number, from 1, of the next line that begins a cell."""
    return next(n for n, line in enumerate(lines[after:], after + 1) if HEAD.match(line))


def _check(lesson: Lesson) -> None:
    for cell in lesson.cells:
        _check_cell(cell, lesson.number)
    for ex in lesson.exercises:
        cells = [cell for cell in lesson.cells if cell.ex == ex and cell.kind == "code"]
        roles = [cell.role for cell in cells]
        first = next(cell for cell in lesson.cells if cell.ex == ex)
        if roles.count("check") != 1 or roles[-1] != "check" or "answer" not in roles:
            raise first.error(
                f"expected one or more answers and, as the last cell, one check in exercise {ex}, "
                f"got {', '.join(map(str, roles)) or 'only text'}"
            )


def _check_cell(cell: Cell, lesson: str) -> None:
    if "incorrectly_encoded_metadata" in cell.metadata:
        raise cell.error(
            'expected a head such as # %% course={"ex": "00-1", "role": "answer"}, with the value '
            "in JSON"
        )
    course = cell.metadata.get("course", {})
    if not isinstance(course, dict) or set(course) - {"ex", "role"}:
        raise cell.error(f"expected the keys ex and role, got course={course!r}")
    if cell.ex is not None:
        match = EXERCISE.fullmatch(str(cell.ex))
        if not match or match[1] != lesson:
            raise cell.error(f'expected an id such as "{lesson}-1" in this lesson, got {cell.ex!r}')
    allowed = (*ROLES, None) if cell.kind == "markdown" else ROLES
    if course and cell.role not in allowed:
        raise cell.error(f"expected one of the roles {', '.join(ROLES)}, got {cell.role!r}")
    if course and cell.ex is None and cell.role != "given":
        raise cell.error(f"role {cell.role} needs an ex: only a given cell may be without one")
    if cell.kind == "code" and cell.role == "answer":
        if stub(cell) == solution(cell):
            raise cell.error(f"expected {BEGIN} and {END}, or a line '# solution: …', in an answer")
    elif cell.kind == "code" and any(_mark(line) for line in cell.source.splitlines()):
        raise cell.error("marks of a solution are allowed only in a cell with the role answer")
    if cell.kind == "code" and cell.role == "check":
        _check_the_check(cell)


def _check_the_check(cell: Cell) -> None:
    """Require that the cell imports check, whose name the learner may have used, and calls it."""
    body = ast.parse(_checked(cell, [cell.source])).body
    if not body or ast.unparse(body[0]) != IMPORT:
        raise cell.error(f"expected {IMPORT} as the first line of this cell")
    match body[-1]:
        case ast.Expr(ast.Call(ast.Name("check"), [ast.Constant(ex), *_])) if ex == cell.ex:
            return
    raise cell.error(f'expected check("{cell.ex}", …) as the last line of this cell')


def _mark(line: str) -> bool:
    text = line.strip()
    return text in (BEGIN, STUB, END) or text.startswith("# solution:")


def solution(cell: Cell) -> str:
    """Return the source of an answer cell for the solutions: solved, without marks."""
    return _checked(cell, [line for solved, _ in _parts(cell) for line in solved])


def stub(cell: Cell) -> str:
    """Return the source of an answer cell for the exercises: the stub."""
    return _checked(cell, [line for _, unsolved in _parts(cell) for line in unsolved])


def _checked(cell: Cell, lines: list[str]) -> str:
    source = "\n".join(lines).strip("\n")
    try:
        ast.parse(source)
    except SyntaxError as error:
        raise cell.error(f"the code built from this cell is not Python: {error.msg}") from None
    return source


def _parts(cell: Cell) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the lines of an answer cell region by region, solved and as a stub."""
    lines = cell.source.splitlines()
    number = 0  # lines that are done
    while number < len(lines):
        line = lines[number]
        if line.strip() == BEGIN:
            ends = [n for n, other in enumerate(lines) if n > number and other.strip() == END]
            if not ends:
                raise cell.error(f"{BEGIN} without {END}", number + 1)
            yield _region(cell, lines[number : ends[0]], number + 1)
            number = ends[0]
        elif line.strip() in (STUB, END):
            raise cell.error(f"{line.strip()} without {BEGIN}", number + 1)
        elif line.strip().startswith("# solution:"):
            taken = library_source(cell, line.strip(), number + 1)
            yield taken.splitlines(), stub_of(cell, taken, number + 1).splitlines()
        else:
            yield [line], [line]
        number += 1


def _region(cell: Cell, lines: list[str], first: int) -> tuple[list[str], list[str]]:
    """Return ``lines``, from BEGIN in line ``first`` until before END, solved and as a stub."""
    begin, *lines = lines
    marks = [n for n, line in enumerate(lines) if line.strip() in (BEGIN, STUB)]
    wrong = [n for n in marks if lines[n].strip() == BEGIN] or marks[1:]
    if wrong:
        raise cell.error(
            f"expected one {BEGIN}, at most one {STUB} and one {END}", first + wrong[0] + 1
        )
    solved = []
    for number, line in enumerate(lines[: marks[0]] if marks else lines, first + 1):
        is_name = line.strip().startswith("# solution:")
        solved += library_source(cell, line.strip(), number).splitlines() if is_name else [line]
    indent = begin[: -len(begin.lstrip())]
    if marks:
        after = enumerate(lines[marks[0] + 1 :], first + marks[0] + 2)
        return solved, [_uncomment(cell, line, number) for number, line in after]
    if not indent:
        raise cell.error(f"outside a function, write the stub too, after {STUB}", first)
    return solved, [indent + _raising(cell)]


def _raising(cell: Cell) -> str:
    return f'raise NotImplementedError("exercise {cell.ex}: yours to write")'


def _uncomment(cell: Cell, line: str, number: int) -> str:
    """``    # return None`` -> ``    return None``."""
    match = re.fullmatch(r"(\s*)#(?: (.*))?|\s*", line)
    if not match:
        raise cell.error(f"expected a comment in every line between {STUB} and {END}", number)
    return (match[1] or "") + match[2] if match[2] else ""


def library_source(cell: Cell, text: str, number: int) -> str:
    """Return the source of the function or class in a line ``# solution: …``, renamed."""
    match = FROM_LIBRARY.fullmatch(text)
    if not match:
        raise cell.error("expected # solution: course_lib.module:name, or … :name as other", number)
    module, name, new_name = match.groups()
    base = LIBRARY.joinpath(*module.split("."))
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    if not path.exists():
        raise cell.error(f"there is no module course_lib.{module}", number)
    source = path.read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            taken = "\n".join(source.splitlines()[first - 1 : node.end_lineno])
            return re.sub(rf"(?<![\w.]){name}\b", new_name, taken) if new_name else taken
    raise cell.error(f"course_lib.{module} defines no function or class {name}", number)


def stub_of(cell: Cell, source: str, number: int) -> str:
    """Return ``source`` with a ``raise`` as the body of every function, after its docstring."""
    lines = source.splitlines()
    for node in reversed(_functions(ast.parse(source))):
        first = node.body[0]
        if ast.get_docstring(node) is not None:
            kept = first.end_lineno or first.lineno
        else:
            heads = [first, *getattr(first, "decorator_list", [])]
            kept = min(head.lineno for head in heads) - 1
            while lines[kept - 1].strip().startswith("#"):  # a comment on removed code
                kept -= 1
        if kept < node.lineno:
            raise cell.error(f"{node.name} is written on one line and has no stub", number)
        lines[kept : node.end_lineno] = [" " * first.col_offset + _raising(cell)]
    return "\n".join(lines)


def _functions(tree: ast.Module) -> list[ast.FunctionDef]:
    """Return the functions of a module and the methods of its classes, in order of lines."""
    found = []
    for node in tree.body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, ast.FunctionDef):
                found.append(inner)
    return found
