"""What every test shares: kept worlds, one thread, few hypothesis examples, and `need`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("course", max_examples=15, deadline=None, derandomize=True)
settings.load_profile("course")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Ranks have one thread each; a reference computed with another number differs bitwise."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def need() -> Callable[[object, str], None]:
    """``need(condition, reason)`` skips here and fails in CI, where everything is installed."""

    def check(condition: object, reason: str) -> None:
        if condition:
            return
        if os.environ.get("CI") == "true":
            pytest.fail(f"missing in CI: {reason}")
        pytest.skip(reason)

    return check


@pytest.fixture(scope="session")
def worlds() -> Iterator[Callable[[int], Any]]:
    """``worlds(4)`` is a World of 4 ranks that all tests of the session share."""
    from course_lib.launch import World

    kept: dict[int, Any] = {}

    def world(n: int) -> Any:
        if n not in kept:
            kept[n] = World(n)
        return kept[n]

    yield world
    for world_ in kept.values():
        world_.close()


@pytest.fixture(autouse=True, scope="session")
def no_matplotlib_window() -> None:
    """Figures are files here: a test never opens a window."""
    if "matplotlib" not in sys.modules:
        os.environ.setdefault("MPLBACKEND", "Agg")
