"""A real Jupyter kernel for a test: type a cell, read what a reader would see."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import nbformat
import pytest
from nbclient import NotebookClient

from course_lib.grading.kernels import AsyncLocalKernelManager

HEAD = """\
import os, signal, sys, time
import torch, torch.distributed as dist
from course_lib.launch import World, run
from course_lib.mesh import make_mesh
"""


@dataclass
class Cell:
    """What a cell has shown: its number, its printed text, its value, its error."""

    number: int
    text: str
    value: str
    error: str  # the traceback as shown in the notebook, without colors
    error_name: str
    seconds: float


class Notebook:
    """A notebook whose kernel is this Python."""

    def __init__(self, **start) -> None:
        self.client = NotebookClient(
            nbformat.v4.new_notebook(),
            kernel_name="python3",
            kernel_manager_class=AsyncLocalKernelManager,
            allow_errors=True,
            timeout=120,
        )
        self.setup = self.client.setup_kernel(**start)
        self.setup.__enter__()
        self.pid: int = self.client.km.provisioner.pid
        self.cell(HEAD)

    def cell(self, source: str, *, interrupt_after: str = "") -> Cell:
        """Run a cell; interrupt the kernel once the cell has printed ``interrupt_after``."""
        cell = nbformat.v4.new_code_cell(source)
        self.client.nb.cells.append(cell)
        if interrupt_after:
            threading.Thread(target=self._interrupt, args=(cell, interrupt_after)).start()
        start = time.monotonic()
        self.client.execute_cell(cell, len(self.client.nb.cells) - 1)
        return _read(cell, time.monotonic() - start)

    def _interrupt(self, cell, after: str) -> None:
        end = time.monotonic() + 30
        while after not in _printed(cell) and time.monotonic() < end:
            time.sleep(0.02)
        os.killpg(self.pid, signal.SIGINT)  # as Jupyter does: the kernel's whole group

    def assert_usable(self) -> None:
        """The cell after a fault works."""
        after = self.cell("run(lambda: dist.get_rank() ** 2, n=4)")
        assert after.error == ""
        assert after.value == "[0, 1, 4, 9]"

    def close(self) -> None:
        """Shut the kernel down."""
        self.setup.__exit__(None, None, None)


def _printed(cell) -> str:
    return "".join(out["text"] for out in cell.outputs if out["output_type"] == "stream")


def _read(cell, seconds: float) -> Cell:
    errors = [out for out in cell.outputs if out["output_type"] == "error"]
    values = [out for out in cell.outputs if out["output_type"] == "execute_result"]
    text = "\n".join(line for error in errors for line in error["traceback"])
    return Cell(
        number=cell.execution_count,
        text=_printed(cell),
        value=values[0]["data"]["text/plain"] if values else "",
        error=re.sub(r"\x1b\[[0-9;]*m", "", text),
        error_name=errors[0]["ename"] if errors else "",
        seconds=seconds,
    )


@pytest.fixture(scope="module")
def open_notebook() -> Iterator[Callable[..., Notebook]]:
    """Open notebooks that are closed after the module."""
    opened: list[Notebook] = []

    def open_one(**start) -> Notebook:
        opened.append(Notebook(**start))
        return opened[-1]

    yield open_one
    for notebook in opened:
        notebook.close()


@pytest.fixture(scope="module")
def notebook(open_notebook: Callable[..., Notebook]) -> Notebook:
    """One notebook for all tests of a module."""
    return open_notebook()
