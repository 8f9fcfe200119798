"""Checks of what ``run`` and ``World`` are given: one sentence each."""

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
    """Raise TypeError or ValueError if no such ranks can be had, RuntimeError inside a rank."""
    if inside_rank():
        raise RuntimeError(
            "this is a rank already: run and World start ranks from the notebook or script, "
            "not from a function that runs on them"
        )
    if not isinstance(init, bool):
        raise TypeError(f"init={init!r}: must be True or False")
    if isinstance(n, bool) or not hasattr(n, "__index__"):
        raise TypeError(f"n={n!r}: the number of ranks must be a whole number, such as n=4")
    if not 1 <= n <= MAX_RANKS:
        raise ValueError(f"n={n}: the number of ranks must be from 1 to {MAX_RANKS}")
    check_timeout(timeout)
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f'device={device!r}: must be None or "cpu" (gloo), or "cuda" (nccl)')


def check_cards(n: int) -> None:
    """Raise ValueError if this machine has fewer GPUs than ranks."""
    if (cards := torch.cuda.device_count()) < n:
        raise ValueError(
            f'device="cuda" with n={n} needs {n} GPUs, one per rank, and this machine has {cards}: '
            "leave device out to run the same ranks on the CPU"
        )


def conditions(pace: Pace, links: Links | None, checked: bool) -> Conditions:
    """The conditions of a run; raises TypeError or ValueError if they are none."""
    if not isinstance(pace, Mapping):
        what = 'must give seconds by operation, such as pace={"F": 0.02, "B": 0.04}'
        raise TypeError(f"pace={pace!r}: {what}")
    if links is not None and not isinstance(links, Links):
        raise TypeError(f"links={links!r}: must be a course_lib.mesh.Links, or None")
    if not isinstance(checked, bool):
        raise TypeError(f"checked={checked!r}: must be True or False")
    return Conditions(dict(pace), links, checked)


def check_call(fn: Callable, timeout: float) -> None:
    """Raise TypeError or ValueError if this is no call to make."""
    if not callable(fn):
        hint = ": give the function itself and its arguments after it, as in run(fn, x)"
        raise TypeError(f"the first argument must be a function, not {fn!r:.60}{hint}")
    check_timeout(timeout)


def check_directory() -> None:
    """Raise RuntimeError if the current directory, in which the ranks would start, is gone."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise RuntimeError(
            "the current directory has been removed, and the ranks would start in it: change to "
            "one that exists with os.chdir"
        ) from None


def check_timeout(timeout: float) -> None:
    """Raise TypeError or ValueError unless it is a number of seconds."""
    if isinstance(timeout, bool) or not isinstance(timeout, Real):
        raise TypeError(f"timeout={timeout!r}: must be a number of seconds, such as timeout=60")
    if not timeout > 0 or math.isinf(timeout):
        raise ValueError(f"timeout={timeout}: must be more than 0 seconds, and finite")
