"""Checks of what ``run`` and ``World`` are given: one sentence each."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from course_lib.launch.server import MAX_RANKS


def check_world(n: int, timeout: float, device: str | None) -> None:
    """Raise TypeError or ValueError if no such ranks can be had."""
    if isinstance(n, bool) or not isinstance(n, int):
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


def check_call(fn: Callable, timeout: float) -> None:
    """Raise TypeError or ValueError if this is no call to make."""
    if not callable(fn):
        hint = ": give the function itself and its arguments after it, as in run(fn, x)"
        raise TypeError(f"the first argument must be a function, not {fn!r:.60}{hint}")
    check_timeout(timeout)


def check_timeout(timeout: float) -> None:
    """Raise TypeError or ValueError unless it is a number of seconds."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout={timeout!r}: must be a number of seconds, such as timeout=60")
    if not timeout > 0 or math.isinf(timeout):
        raise ValueError(f"timeout={timeout}: must be more than 0 seconds, and finite")
