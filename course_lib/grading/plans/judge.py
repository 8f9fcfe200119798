"""Judge a plan: whether it is possible, fits and runs as predicted, and how long a step takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from course_lib.grading import attempts
from course_lib.grading.arena.judge import checked
from course_lib.grading.plans.levels import CLOSE, UNEVEN, Level, level
from course_lib.planner import Configuration
from course_lib.planner.result import Estimate

if TYPE_CHECKING:
    from course_lib.grading.plans.ranks import Ran
    from course_lib.view import Picture

# Relative difference of bytes: routing is uneven, and so are the shards of ZeRO that tp sums.
SPREAD = {"ep": 1 - 1 / UNEVEN, "tp": 0.01}


@dataclass(frozen=True)
class Attempt:
    """The result of a plan. ``reasons`` is empty if it is possible and fits."""

    level: Level
    name: str
    choices: Mapping[str, Any]
    reasons: tuple[str, ...] = ()
    estimate: Estimate | None = None
    ran: Ran | None = None
    died: str = field(default="", repr=False)  # why the ranks ended early

    @property
    def bytes_off(self) -> dict[str, tuple[float, float]]:
        """(counted, predicted) bytes of the busiest rank, for each axis on which the two differ."""
        if self.estimate is None or self.ran is None:
            return {}
        said = {axis: one.wire_bytes for axis, one in self.estimate.communication.items()}
        sent = {axis: float(count) for axis, count in self.ran.sent.items()}
        found = {}
        for axis in sent.keys() | said.keys():
            both = sent.get(axis, 0.0), said.get(axis, 0.0)
            allowed = SPREAD.get(axis, 1e-9)
            if abs(both[0] - both[1]) > allowed * max(both):
                found[axis] = both
        return found

    @property
    def ok(self) -> bool:
        """Whether the plan fits, and ran with the gradients of one process."""
        return not self.reasons and self.ran is not None and self.ran.same

    @property
    def stars(self) -> int:
        """The stars by ``Level.stars``; 0 if the plan is not valid."""
        return self.level.stars(self.estimate.step_seconds) if self.ok and self.estimate else 0

    def picture(self) -> Picture:
        """Return the timeline of the measured step; ValueError if the plan did not run."""
        from course_lib.view import timeline

        if self.ran is None:
            raise ValueError("this plan did not run: there is nothing to draw")
        said = ", ".join(f"{name}={value}" for name, value in self.choices.items())
        return timeline(self.ran.traces, title=f"Level {self.level.number}: {said}")

    def __str__(self) -> str:
        """Return the prediction, then the reasons or the measurements, and the stars."""
        lines = [f"Level {self.level.number}, {self.level.title}"]
        if self.estimate is not None:
            lines += self._predicted(self.estimate)
        if self.reasons:
            return "\n".join([*lines, "no star:", *(f"  {reason}" for reason in self.reasons)])
        if self.died:
            return "\n".join([*lines, f"no star: {self.died}"])
        if self.ran is not None:
            lines += self._measured(self.ran)
        return "\n".join([*lines, self._verdict()])

    def _predicted(self, found: Estimate) -> list[str]:
        parts = sorted(found.parts.items(), key=lambda part: -part[1])
        spent = ", ".join(f"{name} {part:.3f}" for name, part in parts if part > 5e-4)
        held = sorted(asdict(found.memory).items(), key=lambda part: -part[1])
        stored = ", ".join(f"{name} {size / 1e6:.3f}" for name, size in held)
        lines = [
            f"  memory  {found.memory.total / 1e6:8.3f} MB of {self.level.limit_bytes / 1e6:g} MB: "
            f"{stored}",
            f"  step    {found.step_seconds:8.3f} s simulated: {spent}",
        ]
        if self.level.model.experts is not None:
            uneven = f"activations count {UNEVEN} times, because routing is uneven"
            lines.insert(1, f"{'':10}{uneven}")
        return lines

    def _measured(self, ran: Ran) -> list[str]:
        same = "equal one process" if ran.same else "are WRONG"
        off = self.bytes_off
        carried = (
            "are as predicted"
            if not off
            else "differ from the prediction: "
            + "; ".join(
                f"{axis} {sent:,.0f} counted, {said:,.0f} predicted"
                for axis, (sent, said) in sorted(off.items())
            )
        )
        return [
            f"run on {self.level.ranks} ranks:",
            f"  loss and gradients {same} (off by {ran.off:.0e})",
            f"  bytes on each axis {carried}",
            f"  memory  {ran.most_bytes / 1e6:8.3f} MB measured on the rank that needs most",
            f"  step    {ran.seconds:8.3f} s measured",
        ]

    def _verdict(self) -> str:
        which = self.level
        if not self.ok or self.estimate is None:
            if self.ran is None:
                return "no star yet: the plan fits; leave out on_ranks=False to run it"
            return "no star: the gradients are wrong"
        took, bars = self.estimate.step_seconds, which.bars
        names = ("the middle plan", "par", "the best plan of the search")
        said = "*" * self.stars
        for name, bar in zip(names, bars, strict=True):
            if took > bar + CLOSE:
                return f"{said}  the next star needs a step of {bar:.3f} s ({name})"
        return f"{said}  no plan of the search has a shorter step"


def play(
    number: int,
    name: str = "you",
    *,
    on_ranks: bool = True,
    board: Path | None = None,
    **choices: Any,
) -> Attempt:
    """Judge a plan in a level; ``name`` is the learner's on the board.

    ``choices`` are arguments of :func:`course_lib.planner.configure`: tp, cp, pp, ep, zero,
    schedule, chunks, micro_batch, recompute. dp is the number of ranks over tp x cp x pp.
    ``on_ranks=False`` only predicts. A plan that ran correctly is saved to ``board``, by default
    the learner's board for a notebook in work/; other notebooks save nothing. Raises ValueError
    for a wrong level or name, and TypeError for an argument that is not a choice.
    """
    which, name = level(number), checked(name)
    try:
        plan = which.plan(**choices)
    except ValueError as error:
        return Attempt(which, name, choices, (str(error),))
    if refused := which.refusals(plan):
        return Attempt(which, name, choices, tuple(refused))
    found = which.predict(plan)
    attempt = Attempt(which, name, choices, found.reasons, found)
    if on_ranks and found.fits:
        attempt = run_on_ranks(attempt, plan)
    if attempt.ok:
        entry = {"level": number, "name": name, "choices": dict(choices)}
        attempts.add(entry, attempts.own("plans") if board is None else board)
    return attempt


def run_on_ranks(attempt: Attempt, plan: Configuration) -> Attempt:
    """Run ``plan`` on ranks; return ``attempt`` with the measurements, or why a rank failed."""
    from course_lib.grading.plans import ranks  # torch, last
    from course_lib.launch.faults import RankError

    try:
        ran = ranks.run_plan(attempt.level, plan)
    except RankError as error:
        if not isinstance(error.exception, ranks.OutOfMemory):
            raise
        return replace(attempt, died=f"rank {error.rank} is out of memory: {error.exception}")
    return replace(attempt, ran=ran)
