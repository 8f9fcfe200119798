"""What the formulas of all axes together read of a plan and of the axes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from course_lib.schedule import Schedule


@dataclass(frozen=True)
class AxisSizes:
    """The size of each axis; ``ep`` is inside dp and cp."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def data(self) -> int:
        """Return the number of ranks that sum the gradients of the same parameters."""
        return self.cp * self.dp

    @property
    def per_stage(self) -> int:
        """Return the number of ranks that hold a pipeline stage together."""
        return self.tp * self.data


class Core(Protocol):
    """What the formulas read of a :class:`course_lib.compose.Core`."""

    @property
    def run(self) -> int:
        """In USP the ranks that divide heads, else 1."""

    @property
    def wire_bytes(self) -> Callable[..., Any]:
        """The formula of the attention, such as ``cp.ring_wire_bytes``."""


class Experts(Protocol):
    """What the formulas read of :class:`course_lib.compose.Experts`."""

    @property
    def number(self) -> int:
        """Experts per layer, E."""

    @property
    def top_k(self) -> int:
        """Experts per token."""

    @property
    def shared(self) -> int:
        """Experts that every token visits."""


class Plan(Protocol):
    """What the formulas read of a :class:`course_lib.compose.Plan`."""

    @property
    def zero(self) -> int:
        """Stage of ZeRO, 0 to 3."""

    @property
    def core(self) -> Core:
        """The attention over cp."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step."""

    @property
    def experts(self) -> Experts | None:
        """The experts in place of each MLP."""

    @property
    def by_rows(self) -> bool:
        """Whether tp has sequence parallelism around it."""

    @property
    def gathers_again(self) -> bool:
        """Whether sequence parallelism gathers once more in backward."""

    @property
    def block_forwards(self) -> int:
        """Forward passes of a block per step."""

    @property
    def core_forwards(self) -> int:
        """Forward passes of an attention core per step."""

    def schedule_for(self, ranks: int) -> Schedule:
        """Return the schedule of ``ranks`` pipeline ranks."""
