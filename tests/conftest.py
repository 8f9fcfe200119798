"""What every test shares: kept worlds, one thread, few hypothesis examples, and `need`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("course", max_examples=15, deadline=None, derandomize=True)
# make test-long: other examples in every run. A failure prints the line that repeats it.
settings.register_profile("random", max_examples=60, deadline=None, print_blob=True)
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
def kept_worlds() -> Iterator[dict[int, Any]]:
    """The worlds that tests share, by their number of ranks."""
    kept: dict[int, Any] = {}
    yield kept
    for world in kept.values():
        world.close()


@pytest.fixture(scope="session")
def worlds(kept_worlds: dict[int, Any]) -> Callable[[int], Any]:
    """``worlds(4)`` is a World of 4 ranks that all tests of the session share."""
    from course_lib.launch import World

    def world(n: int) -> Any:
        if n not in kept_worlds:
            kept_worlds[n] = World(n)
        return kept_worlds[n]

    return world


@pytest.fixture(autouse=True, scope="module")
def large_worlds_end_with_their_file(kept_worlds: dict[int, Any]) -> Iterator[None]:
    """A rank is 100 MB and each worker has its own: 8 and 16 ranks start anew where wanted."""
    yield
    for n, world in kept_worlds.items():
        if n > 4:
            world.close()


@pytest.fixture(autouse=True, scope="session")
def no_matplotlib_window() -> None:
    """Figures are files here: a test never opens a window."""
    if "matplotlib" not in sys.modules:
        os.environ.setdefault("MPLBACKEND", "Agg")
