"""Measure the forward and backward of single modules, and pad them by sleep."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from torch import nn

from course_lib.trace.spans import Sleep, Trace


class MeasuredBlocks:
    """Adds a span F and a span B to the trace for every forward and backward of ``blocks``.

    ``pace`` gives F and B a fixed length in seconds. The padding comes *before* the arithmetic: it
    is the pace minus the median time of that block's arithmetic so far. The gradient is therefore
    available only when the padded backward ends, and overlap in the trace is real. A forward that
    was faster than the median is padded again at its end, where no other rank waits for it. Use it
    in a ``with`` statement; the hooks are removed at its end.
    """

    def __init__(
        self, blocks: Iterable[nn.Module], trace: Trace, pace: Mapping[str, float] | None = None
    ) -> None:
        self.blocks = list(blocks)
        self._trace, self._pace = trace, dict(pace or {})
        self._begun: dict[tuple[str, int], tuple[float, float]] = {}
        self._took: dict[tuple[str, int], list[float]] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> MeasuredBlocks:
        for index, block in enumerate(self.blocks):
            self._hooks += [
                block.register_forward_pre_hook(lambda *_, i=index: self._begin("F", i)),
                block.register_forward_hook(lambda *_, i=index: self._end("F", i)),
                block.register_full_backward_pre_hook(lambda *_, i=index: self._begin("B", i)),
                block.register_full_backward_hook(lambda *_, i=index: self._end("B", i)),
            ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _begin(self, op: str, index: int) -> None:
        start = time.perf_counter()
        usual = median(self._took.get((op, index), [0.0]))
        self._trace.sleep(self._pace.get(op, 0.0) - usual)
        self._begun[op, index] = (start, time.perf_counter())

    def _end(self, op: str, index: int) -> None:
        start, worked_from = self._begun.pop((op, index))
        self._took.setdefault((op, index), []).append(time.perf_counter() - worked_from)
        pace = self._pace.get(op, 0.0)
        if op == "F":
            self._trace.sleep(start + pace - time.perf_counter())
        end = time.perf_counter()
        self._trace.add(op, start, end, label=f"block {index}")
        if pace and end - start > pace:  # longer than its pace: this counts as overshoot
            self._trace.sleeps.append(Sleep(pace, end - start))
