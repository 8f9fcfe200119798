"""Judge a plan: is it possible, does it fit, what does a step take, and does it run as predicted?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from course_lib.grading.arena.judge import checked
from course_lib.grading.plans.levels import CLOSE, Level, level
from course_lib.planner import Configuration
from course_lib.planner.flops import layer_flops
from course_lib.planner.result import Estimate

if TYPE_CHECKING:
    from course_lib.grading.plans.ranks import Ran


@dataclass(frozen=True)
class Attempt:
    """What came of a plan. ``reasons`` is empty if it is possible; ``died`` says why a run ended."""

    level: Level
    name: str
    choices: dict[str, Any]
    reasons: tuple[str, ...] = ()
    estimate: Estimate | None = None
    ran: Ran | None = None
    died: str = ""

    @property
    def bytes_as_predicted(self) -> bool:
        """Whether each axis carried what the planner says; routed tokens are only near it."""
        if self.estimate is None or self.ran is None:
            return False
        world, said = self.level.ranks, self.estimate.communication
        near = {"ep": 0.25}
        sent = {axis: float(count) / world for axis, count in self.ran.sent.items()}
        return sent.keys() == said.keys() and all(
            abs(sent[axis] - said[axis].wire_bytes) <= near.get(axis, 1e-9) * sent[axis]
            for axis in sent
        )

    @property
    def ok(self) -> bool:
        """Whether the plan fits, and ran with the gradients of one process."""
        return bool(self.ran and self.ran.same and self.estimate and self.estimate.fits)

    @property
    def stars(self) -> int:
        """The stars by ``Level.stars``; 0 if the plan is not valid."""
        return self.level.stars(self.estimate.step_seconds) if self.ok and self.estimate else 0
