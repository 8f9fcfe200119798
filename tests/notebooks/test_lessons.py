"""Every committed lesson: built from its source, and Run All works in a kernel of this Python."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9][0-9]_*.py"))


def texts(notebook: nbformat.NotebookNode) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source.rstrip()) for cell in notebook.cells]


def outputs(notebook: nbformat.NotebookNode) -> str:
    """All text that the cells printed or returned."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            found.append(output.get("text") or output.get("data", {}).get("text/plain", ""))
    return "\n".join(found)


@pytest.fixture(scope="module", params=SOURCES, ids=lambda path: path.stem)
def lesson(request) -> Path:
    return request.param


@pytest.fixture(scope="module")
def executed(lesson) -> nbformat.NotebookNode:
    """The lesson's notebook, run from top to bottom in a fresh kernel."""
    notebook = nbformat.read(lesson.with_suffix(".ipynb"), as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    resources = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(notebook, timeout=60, kernel_name="python3", resources=resources).execute()
    return notebook


def test_notebook_is_built_from_its_source(lesson):
    source = jupytext.read(lesson)
    built = nbformat.read(lesson.with_suffix(".ipynb"), as_version=4)
    assert texts(built) == texts(source), "make notebooks rebuilds it"
    assert built.metadata.course.lesson == lesson.stem[:2]


def test_committed_notebook_is_executed_in_order(lesson):
    built = nbformat.read(lesson.with_suffix(".ipynb"), as_version=4)
    counts = [cell.execution_count for cell in built.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "make execute refreshes it"


def test_run_all(executed):
    bad = [o for c in executed.cells for o in c.get("outputs", []) if o.output_type == "error"]
    assert not bad


def test_lesson_00_says_what_ranks_did(lesson, executed):
    if not lesson.stem.startswith("00"):
        pytest.skip("about lesson 00")
    text = outputs(executed)
    for rank in range(4):
        assert f"[rank {rank}] hello from rank {rank} of 4" in text
        assert f"rank {rank}: {{'before': {rank + 1:.1f}, 'after': 10.0}}" in text
    assert "[0, 10, 20, 30]" in text
    assert re.search(r"^dp +all_reduce +\w+ +4 +16,384 +24,576$", text, re.MULTILINE)
    assert "a rank sent 6144 bytes; formula 6144" in text
    assert "rank 2 raised ValueError: rank 2 has bad data" in text
    assert "rank 0 was at: all_reduce, cell 6 line 8" in text
    pictures = [o for c in executed.cells for o in c.get("outputs", []) if "image/png" in str(o)]
    assert len(pictures) == 1


def test_the_kernel_is_this_python(executed):
    assert executed.metadata.kernelspec.name == "python3"
    version = executed.metadata.language_info.version
    assert version == ".".join(map(str, sys.version_info[:3]))
