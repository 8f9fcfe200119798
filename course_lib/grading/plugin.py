"""The pytest plugin for nbval: outputs to ignore, verdicts, and kernels that die.

It is registered as an entry point, so plain ``pytest --nbval`` uses it too. Without notebooks it
does nothing, and it imports no large package.
"""

from __future__ import annotations

import json
import time
from queue import Empty
from typing import Any

import pytest

from course_lib.grading.catalog import course
from course_lib.grading.verdict import MIME

NOT_COMPARED = ("stdout", "stderr", "text/html", MIME)
PLAIN = pytest.StashKey[float]()  # nbval's own timeout
LOOK = 0.5  # seconds between two checks that the kernel is alive
MOST_PRINTED = 10_000  # characters stored per printed message, to limit memory


def timeout_of(cell: Any, plain: float) -> float:
    """Return the timeout of a cell in seconds: a check must reach its own limits before."""
    from course_lib.grading.answers import LONGEST

    return max(plain, LONGEST + 20) if course(cell).get("role") == "check" else plain


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the official run."""
    parser.addoption("--course-cells", metavar="FILE", help="add a line of JSON per finished cell")


def pytest_configure(config: pytest.Config) -> None:
    """Let nbval start kernels that need no TCP port."""
    if config.getoption("nbval", False):
        import nbval.kernel

        from course_lib.grading.kernels import LocalKernelManager

        nbval.kernel.KernelManager = LocalKernelManager


def _is_cell(item: pytest.Item) -> bool:
    return hasattr(item.parent, "skip_compare") and hasattr(item, "test_outputs")


def pytest_itemcollected(item: Any) -> None:
    """Exclude printed text, HTML and verdict data from the comparison."""
    if _is_cell(item) and MIME not in item.parent.skip_compare:
        item.parent.skip_compare = (*item.parent.skip_compare, *NOT_COMPARED)


@pytest.hookimpl(trylast=True)
def pytest_runtest_setup(item: Any) -> None:
    """Give checks their timeout, and let nbval notice at once that its kernel died."""
    if _is_cell(item):
        option = item.config.option
        plain = item.config.stash.setdefault(PLAIN, option.nbval_cell_timeout)
        option.nbval_cell_timeout = timeout_of(item.cell, plain)
    kernel = getattr(item.parent, "kernel", None)
    if _is_cell(item) and kernel is not None and "get_message" not in vars(kernel):
        kernel.get_message = _watching(kernel)


def _watching(kernel: Any) -> Any:
    plain = kernel.get_message

    def get_message(stream: str, timeout: float | None = None) -> Any:
        end = time.monotonic() + (float("inf") if timeout is None else timeout)
        while True:
            alive = kernel.is_alive()  # checked first, so that its last message is still read
            left = end - time.monotonic()
            try:
                message = _cut(plain(stream, timeout=max(0.0, min(LOOK, left))))
                kernel.ends = getattr(kernel, "ends", False) or _asks_to_end(message)
                return message
            except Empty:
                if not alive:
                    raise RuntimeError("the kernel died in this cell") from None
                if left <= LOOK:
                    raise

    return get_message


def _cut(message: Any) -> Any:
    """Cut printed text, which is not compared."""
    if message.get("msg_type") == "stream":
        message["content"]["text"] = message["content"]["text"][:MOST_PRINTED]
    return message


def _asks_to_end(message: Any) -> bool:
    """Return whether the cell called IPython's ``exit()``: its kernel ends a little later."""
    payload = message["content"].get("payload", ())
    return any(each.get("source") == "ask_exit" for each in payload)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: Any, call: Any) -> None:
    """Write the verdict, or why there is none, into the file of the option."""
    path = item.config.getoption("course_cells")
    if call.when != "call" or path is None or not _is_cell(item):
        return
    ended = {"number": item.cell_num, "verdict": None, "stopped": "", "error": ""}
    for output in item.test_outputs or []:
        if output.get("output_type") == "execute_result" and MIME in output.get("data", {}):
            ended["verdict"] = output["data"][MIME]
        if output.get("output_type") == "error":
            ended["error"] = f"{output.get('ename')}: {output.get('evalue')}"[:1000]
    kernel = item.parent.kernel
    if item.parent.timed_out:  # then nbval itself may have ended the kernel
        ended["stopped"] = "timeout"
    elif kernel is None or getattr(kernel, "ends", False) or not kernel.is_alive():
        ended["stopped"] = "died"
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{json.dumps(ended)}\n")
