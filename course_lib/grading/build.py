"""The notebooks of a lesson, built from its one source, ``notebooks/NN_slug.py``.

``python -m course_lib.grading.build [notebooks exercises solutions]`` writes what differs and keeps
the outputs of cells whose source is the same; ``--execute`` runs lessons and solutions and stores
fresh outputs; ``--check`` writes nothing and fails when a file is not what would be written.
The same source gives the same bytes: cell ids come from headings, exercises and roles.
From the graders the build takes the points of each exercise, into the metadata of its check cell:
nothing else has to import a grader to list them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, DeadKernelError
from nbformat import NotebookNode

from course_lib.grading import registry
from course_lib.grading.exercise import Exercise
from course_lib.grading.kernels import AsyncLocalKernelManager
from course_lib.grading.source import Cell, Lesson, SourceError, read_lesson, solution, stub

KINDS = ("notebooks", "exercises", "solutions")
FAILURES = (CellControlSignal, DeadKernelError, nbformat.ValidationError)
LARGEST = 1_000_000  # bytes of a notebook
CELL_TIMEOUT = 120  # seconds; a cell should take 20 at most, on an idle machine
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
# What another machine would print otherwise: paths, process ids, addresses of objects.
UNFIT = re.compile(
    r"(?<![\w.~-])/(?:tmp|dev/shm|home|Users|root|work)/\w|\bpid\W{0,3}\d+| at 0x[0-9a-f]{6,}"
)
WIDGET = "application/vnd.jupyter.widget-view+json"
EXERCISES = """\
# Exercises of {title}

They belong to [the lesson](../notebooks/{slug}.ipynb), and each stands alone. Write your answer in
the cell that is yours to write, run it, then run the check below it: its line says what is right
and what is not yet. In a terminal `course hint {number} {first}` gives a hint, and `course grade`
with this file's name the official grade."""
SOLUTIONS = """\
# Solutions of {title}

One way to solve [the exercises](../exercises/{slug}.ipynb) of
[the lesson](../notebooks/{slug}.ipynb). A solution that the library holds is taken from there."""


def build(lesson: Lesson) -> dict[str, NotebookNode]:
    """The notebooks of ``lesson`` without outputs: kind -> notebook.

    Kinds are those of KINDS; a lesson without exercises has only the first.
    """
    ours = [cell for cell in lesson.cells if cell.ex is None and cell.role is None]
    sources = [(cell, cell.source) for cell in ours]
    built = {"notebooks": _notebook(lesson, list(_lesson_cells(lesson, sources)))}
    if lesson.exercises:
        theirs = [cell for cell in lesson.cells if cell.ex is not None or cell.role is not None]
        stubs = [(cell, stub(cell) if _is_answer(cell) else cell.source)
                 for cell in theirs if cell.kind == "code" or cell.role != "answer"]  # fmt: skip
        solved = [(cell, solution(cell) if _is_answer(cell) else cell.source) for cell in theirs]
        for kind, head, pairs in (
            ("exercises", EXERCISES, stubs),
            ("solutions", SOLUTIONS, solved),
        ):
            title = head.format(title=lesson.title, slug=lesson.slug, number=lesson.number,
                                first=lesson.exercises[0])  # fmt: skip
            first = nbformat.v4.new_markdown_cell(title, id=f"{lesson.number}-title")
            built[kind] = _notebook(lesson, [first, *_exercise_cells(lesson, pairs)])
    return built


def _is_answer(cell: Cell) -> bool:
    return cell.kind == "code" and cell.role == "answer"


def _notebook(lesson: Lesson, cells: list[NotebookNode]) -> NotebookNode:
    metadata = {"course": {"lesson": lesson.number}, **METADATA}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=metadata)
    notebook.nbformat_minor = 5  # the first with cell ids; a newer nbformat would draw another
    nbformat.validate(notebook)
    return notebook


def _lesson_cells(lesson: Lesson, pairs: Iterable[tuple[Cell, str]]) -> Iterator[NotebookNode]:
    """Ids count within a section: a new cell changes no id outside its own."""
    section, count = "start", Counter[str]()
    for cell, source in pairs:
        heading = re.match(r"#+ (.*)", source) if cell.kind == "markdown" else None
        if heading:
            words = re.findall(r"[a-z0-9]+", heading[1].lower().removeprefix(lesson.number))
            section = "-".join(words)[:40].rstrip("-") or "section"
        count[section] += 1
        yield _cell(cell, source, f"{lesson.number}-{section}-{count[section]}")


def _exercise_cells(lesson: Lesson, pairs: Iterable[tuple[Cell, str]]) -> Iterator[NotebookNode]:
    """Ids name exercise and role: 03-2-answer, and the second of them 03-2-answer-2."""
    count = Counter[str]()
    for cell, source in pairs:
        role = cell.role or "text"
        if cell.kind == "markdown" and cell.role:
            role += "-text"
        name = f"{cell.ex or lesson.number}-{role}"
        count[name] += 1
        yield _cell(cell, source, name if count[name] == 1 else f"{name}-{count[name]}")


def _cell(cell: Cell, source: str, name: str) -> NotebookNode:
    make = nbformat.v4.new_markdown_cell if cell.kind == "markdown" else nbformat.v4.new_code_cell
    metadata = cell.metadata
    if cell.kind == "code" and cell.role == "check":
        metadata = {**metadata, "course": {**metadata["course"], "points": _grader(cell).total}}
    return make(source, id=name, metadata=metadata)


def _grader(check: Cell) -> Exercise:
    """Return the exercise of a check cell. Raises SourceError when no grader knows it."""
    try:
        return registry.find(str(check.ex))
    except ValueError as error:
        raise check.error(str(error)) from None


def keep_outputs(new: NotebookNode, old: NotebookNode) -> None:
    """Give the cells of ``new`` the outputs of the cells of ``old`` with the same source."""
    stored = defaultdict(list)
    for cell in old.cells:
        if cell.cell_type == "code":
            stored[cell.source].append(cell)
    for cell in new.cells:
        same = stored.get(cell.source)
        if cell.cell_type == "code" and same:
            # of several equal cells the one with this id, else the first that is left
            place = next((n for n, other in enumerate(same) if other.get("id") == cell.id), 0)
            other = same.pop(place)
            cell.outputs, cell.execution_count = other.outputs, other.execution_count
    clean(new)


def clean(notebook: NotebookNode) -> None:
    """Take out what differs from run to run: timing, widgets, how printed text was cut."""
    notebook.metadata.pop("widgets", None)
    notebook.metadata["language_info"] = dict(METADATA["language_info"])
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)


def _joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Return the outputs without widgets; adjacent pieces of one stream are joined."""
    kept: list[NotebookNode] = []
    for output in outputs:
        if WIDGET in output.get("data", {}):
            continue  # a widget without its state is an error message in a stored notebook
        last = kept[-1] if kept else None
        if output.output_type == "stream" and last and last.get("name") == output.name:
            last.text += output.text
        else:
            kept.append(output)
    return kept


def execute(notebook: NotebookNode, folder: Path) -> None:
    """Run all cells in a fresh kernel of this Python, in ``folder``, and store clean outputs.

    Raises nbclient's CellExecutionError when a cell fails, ValueError when an output is not fit
    to be committed.
    """
    NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        kernel_name="python3",
        record_timing=False,
        kernel_manager_class=AsyncLocalKernelManager,
        resources={"metadata": {"path": str(folder)}},
    ).execute()
    clean(notebook)
    for number, cell in enumerate(notebook.cells, 1):
        for output in cell.get("outputs", []):
            text = output.get("text", "") + str(output.get("data", {}).get("text/plain", ""))
            if found := UNFIT.search(text):
                raise ValueError(f"cell {number} ({cell.id}) prints {found[0]!r}: print it not")


def text_of(notebook: NotebookNode) -> str:
    """The file of a notebook. Raises ValueError when it is too large to be committed."""
    text = nbformat.writes(notebook, version=nbformat.NO_CONVERT).rstrip("\n") + "\n"
    if len(text.encode()) >= LARGEST:
        raise ValueError(f"{len(text.encode()):,} bytes; a notebook stays below {LARGEST:,}")
    return text


def rebuild(folders: dict[str, Path], *, only: str = "", run: bool = False) -> dict[Path, str]:
    """What every notebook should hold: path -> text.

    ``folders`` gives the folder of each kind, ``only`` the number of a lesson. Outputs are those
    stored; with ``run`` lessons and solutions are executed anew. Raises SourceError, and what
    :func:`execute` raises with the file's name in front.
    """
    sources = sorted(folders["notebooks"].glob(f"{only or '[0-9][0-9]*'}_*.py"))
    if not sources:
        raise ValueError(f"no lesson {only or 'NN'}_*.py in {folders['notebooks']}")
    wanted = {}
    for source in sources:
        lesson = read_lesson(source)
        for kind, notebook in build(lesson).items():
            path = folders[kind] / f"{source.stem}.ipynb"
            try:
                if kind != "exercises":  # a stored verdict would praise who has done nothing
                    _fill(notebook, path, run)
                wanted[path] = text_of(notebook)
            except (ValueError, *FAILURES) as error:
                raise ValueError(f"{path.parent.name}/{path.name}: {error}") from error
    return wanted


def _fill(notebook: NotebookNode, path: Path, run: bool) -> None:
    if run:
        execute(notebook, path.parent)
    elif path.exists():
        keep_outputs(notebook, nbformat.read(path, as_version=4))


def strays(folders: dict[str, Path], wanted: Iterable[Path]) -> list[Path]:
    """Notebooks with a lesson's name that no source builds."""
    found = {path for folder in folders.values() for path in folder.glob("[0-9][0-9]*_*.ipynb")}
    return sorted(found - set(wanted))


def main(arguments: list[str] | None = None) -> int:
    """0 done; 1 something differs (--check) or stands there without a source; 2 bad source."""
    options = _parser().parse_args(arguments)
    folders = dict(zip(KINDS, options.folders or map(Path, KINDS), strict=True))
    try:
        wanted = rebuild(folders, only=options.lesson, run=options.execute)
    except (SourceError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    differing = [path for path, text in wanted.items() if not _holds(path, text)]
    for path in differing:
        if options.check:
            print(f"{path} is not what its source builds: make notebooks")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8")
            print(f"wrote {path}")
    left = [] if options.lesson else strays(folders, wanted)
    for path in left:
        print(f"{path} has no source; delete it")
    return 1 if left or (options.check and differing) else 0


def _holds(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m course_lib.grading.build", description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER",
                        help="of sources and lessons, exercises, solutions")  # fmt: skip
    parser.add_argument("--lesson", default="", metavar="NN", help="only this lesson")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    mode.add_argument("--execute", action="store_true", help="run lessons and solutions")
    return parser


if __name__ == "__main__":
    sys.exit(main())
