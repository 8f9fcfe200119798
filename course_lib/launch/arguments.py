"""Check the arguments of ``run`` and ``World``: one sentence per error."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from numbers import Real

import torch

from course_lib.launch.rank import inside_rank
from course_lib.launch.server import MAX_RANKS
from course_lib.mesh import Conditions, Links, Pace


def check_world(n: int, timeout: float, device: str | None, init: bool) -> None:
    """Raise TypeError or ValueError for an invalid argument, RuntimeError inside a rank."""
    if inside_rank():
        raise RuntimeError(
            "this is a rank already: run and World start ranks from the notebook or script, "
            "not from a function that runs on them"
        )
    if not isinstance(init, bool):
        raise TypeError(f"expected init to be True or False, got init={init!r}")
    if isinstance(n, bool) or not hasattr(n, "__index__"):
        raise TypeError(f"expected a whole number of ranks, such as n=4, got n={n!r}")
    if not 1 <= n <= MAX_RANKS:
        raise ValueError(f"expected 1 to {MAX_RANKS} ranks, got n={n}")
    check_timeout(timeout)
    if device not in (None, "cpu", "cuda"):
        raise ValueError(
            f'expected device to be None or "cpu" (gloo), or "cuda" (nccl), got device={device!r}'
        )


def check_cards(n: int) -> None:
    """Raise ValueError if this machine has fewer GPUs than ranks."""
    if (cards := torch.cuda.device_count()) < n:
        raise ValueError(
            f'device="cuda" with n={n} needs {n} GPUs, one per rank, but this machine has {cards}: '
            "leave device out to run the same ranks on the CPU"
        )


def conditions(pace: Pace, links: Links | None, checked: bool) -> Conditions:
    """Return the conditions of a run; raises TypeError or ValueError for an invalid argument."""
    if not isinstance(pace, Mapping):
        what = 'seconds by operation, such as pace={"F": 0.02, "B": 0.04}'
        raise TypeError(f"expected {what}, got pace={pace!r}")
    if links is not None and not isinstance(links, Links):
        raise TypeError(
            f"expected links to be a course_lib.mesh.Links or None, got links={links!r}"
        )
    if not isinstance(checked, bool):
        raise TypeError(f"expected checked to be True or False, got checked={checked!r}")
    return Conditions(dict(pace), links, checked)


def check_call(fn: Callable, timeout: float) -> None:
    """Raise TypeError or ValueError if ``fn`` is not a function or ``timeout`` is invalid."""
    if not callable(fn):
        hint = "give the function itself and its arguments after it, as in run(fn, x)"
        raise TypeError(f"expected a function as the first argument, got {fn!r:.60}; {hint}")
    check_timeout(timeout)


def check_directory() -> None:
    """Raise RuntimeError if the current directory, in which the ranks start, does not exist."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise RuntimeError(
            "the current directory has been removed, but the ranks start in it: change to a "
            "directory that exists with os.chdir"
        ) from None


def check_timeout(timeout: float) -> None:
    """Raise TypeError or ValueError unless it is a number of seconds."""
    if isinstance(timeout, bool) or not isinstance(timeout, Real):
        raise TypeError(
            f"expected a number of seconds, such as timeout=60, got timeout={timeout!r}"
        )
    if not timeout > 0 or math.isinf(timeout):
        raise ValueError(f"expected a finite timeout above 0 seconds, got timeout={timeout}")
