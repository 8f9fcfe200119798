"""The output of the ranks: read from their files during a run, shown as ``[rank r] line``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

KEEP = 2**20  # bytes stored per rank: the end of its output
LIVE = 2**16  # bytes shown per rank during a run; the end of the rest is shown after the run
ROTATE = 4 * 2**20  # a file longer than this is truncated after it has been read


class RankOutput:
    """The output of one rank during one run."""

    def __init__(self, rank: int, path: Path) -> None:
        self.rank = rank
        self.path = path
        self.offset = 0
        self.begin()

    def begin(self) -> None:
        """Start a run: earlier output does not belong to it."""
        self.kept = bytearray()
        self.waiting = bytearray()  # read but not yet shown
        self.total = self.shown = self.cut = 0

    def read(self) -> None:
        """Read the new output, store its last :data:`KEEP` bytes and truncate a long file."""
        try:
            size = os.stat(self.path).st_size
        except FileNotFoundError:
            return
        if size <= self.offset:
            return
        with open(self.path, "rb") as file:
            self._skip_flood(size)
            file.seek(self.offset)
            data = file.read(size - self.offset)
        self.offset += len(data)
        self.total += len(data)
        self.kept += data
        self.waiting += data
        del self.kept[:-KEEP]
        self.cut += max(0, len(self.waiting) - KEEP)
        del self.waiting[:-KEEP]
        if self.offset > ROTATE:
            os.truncate(self.path, 0)  # the rank appends, so it continues at the new end
            self.offset = 0

    def _skip_flood(self, size: int) -> None:
        skip = max(0, size - self.offset - KEEP)
        self.offset += skip
        self.total += skip
        self.cut += skip + (len(self.waiting) if skip else 0)
        if skip:
            self.waiting.clear()

    def lines(self, *, last: bool) -> list[str]:
        """Return the lines to show now: only complete lines, unless it is the ``last`` call."""
        self.read()
        if not last and (self.shown >= LIVE or self.cut):
            return []
        end = len(self.waiting) if last else self.waiting.rfind(b"\n") + 1
        text = bytes(self.waiting[:end]).decode(errors="replace")
        del self.waiting[:end]
        self.shown += end
        lines = [f"[rank {self.rank}] {line}" for line in text.splitlines()]
        if self.cut:
            said = f"... {self.cut:,} bytes left out, only the last {KEEP:,} are shown ..."
            lines.insert(0, f"[rank {self.rank}] {said}")
            self.cut = 0
        return lines

    def text(self) -> str:
        """Return the last :data:`KEEP` bytes of the run's output, after a note on omitted bytes."""
        text = self.kept.decode(errors="replace")
        if self.total > len(self.kept):
            text = f"... {self.total - len(self.kept):,} bytes left out ...\n{text}"
        return text


def show(outputs: Sequence[RankOutput], *, last: bool = False) -> None:
    """Print the new lines, rank by rank."""
    lines = [line for output in outputs for line in output.lines(last=last)]
    if lines:
        print("\n".join(lines), flush=True)
