"""Count how often a program waits for torch's work, to judge code that sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

ASKING = ("wait", "is_completed", "get_future")


@dataclass(slots=True)
class Waits:
    """How often a call that was begun was waited for, or asked whether it is over."""

    count: int = 0


@contextmanager
def waits() -> Iterator[Waits]:
    """Counts inside, in raw torch too: what begins a call shows in its dispatch, a wait nowhere.

    Calls that block count as well, for they wait for their own work.
    """
    counted = Waits()
    methods = {name: getattr(dist.Work, name) for name in ASKING}
    for name, method in methods.items():
        setattr(dist.Work, name, _counting(method, counted))
    try:
        yield counted
    finally:
        for name, method in methods.items():
            setattr(dist.Work, name, method)


def _counting(method: Callable[..., Any], counted: Waits) -> Callable[..., Any]:
    def counts(work: Any, *args: Any, **kwargs: Any) -> Any:
        counted.count += 1
        return method(work, *args, **kwargs)

    return counts
