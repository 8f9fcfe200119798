"""Run every technique on ranks and compare it with the single-process reference and formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from course_lib.launch import Results, available_ranks, run
from course_lib.ledger import Ledger, wire_bytes_by_axis
from course_lib.tour.technique import JOB, Job, Report, Technique
from course_lib.tour.techniques import TECHNIQUES
from course_lib.tour.traffic import Counted, counted_by_axis, kernel_json, number
from course_lib.trace import Matrix

LOSS_TOLERANCE = 1e-4
Say = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """One line of the tour's table."""

    technique: Technique
    max_loss_difference: float
    counted: dict[str, Fraction]
    formula: dict[str, Fraction]
    state_bytes: int
    state_formula: int
    peak_activation_bytes: int
    peak_activation_formula: int
    losses: list[float]
    ledgers: list[Ledger] = field(repr=False)
    kernel: Mapping[str, Matrix] | None = field(default=None, repr=False)

    @property
    def kernel_by_axis(self) -> dict[str, Counted] | None:
        """The kernel's count of each axis beside what is expected; None where it has none."""
        return counted_by_axis(self.kernel, self.ledgers)

    @property
    def faults(self) -> list[str]:
        """What is wrong with this row, in sentences; empty when all is well."""
        found = []
        if not self.max_loss_difference < LOSS_TOLERANCE:
            found.append(
                f"{self.technique.name}: expected losses within {LOSS_TOLERANCE} of the reference, "
                f"got a difference of {self.max_loss_difference:.3g}"
            )
        for axis in sorted(self.counted.keys() | self.formula.keys()):
            counted = self.counted.get(axis, Fraction(0))
            formula = self.formula.get(axis, Fraction(0))
            if counted != formula:
                found.append(
                    f"{self.technique.name}: {float(counted):,.0f} bytes counted on axis {axis}, "
                    f"{float(formula):,.0f} by the formula"
                )
        for axis, kernel in (self.kernel_by_axis or {}).items():
            if not 0 <= kernel.extra <= kernel.headers:
                found.append(
                    f"{self.technique.name}: the kernel counted {kernel.bytes:,} bytes on axis "
                    f"{axis}; expected {float(kernel.expected):,.0f} by the formula, control "
                    f"traffic included, and up to {float(kernel.headers):,.0f} of gloo's headers"
                )
        for what, measured, expected in self.memory:
            if measured != expected:
                found.append(
                    f"{self.technique.name}: {measured:,} bytes of {what} on the fullest rank, "
                    f"{expected:,} by the formula"
                )
        return found

    @property
    def memory(self) -> list[tuple[str, int, int]]:
        """(what, measured, by the formula) in bytes of the fullest rank."""
        return [
            ("state", self.state_bytes, self.state_formula),
            ("activations", self.peak_activation_bytes, self.peak_activation_formula),
        ]

    def as_json(self) -> dict[str, Any]:
        """The row as tour.json has it: numbers only."""
        return {
            "technique": self.technique.name,
            "mesh": dict(self.technique.mesh),
            "max_loss_difference": self.max_loss_difference,
            "bytes": {
                axis: {"counted": number(self.counted[axis]), "formula": number(formula)}
                for axis, formula in self.formula.items()
            },
            **kernel_json(self.kernel_by_axis),
            "state_bytes": self.state_bytes,
            "state_formula": self.state_formula,
            "peak_activation_bytes": self.peak_activation_bytes,
            "peak_activation_formula": self.peak_activation_formula,
            "losses": self.losses,
            "lesson": self.technique.lesson,
        }


@dataclass(frozen=True)
class Skipped:
    """A technique that wants more ranks than a joined world has."""

    technique: Technique
    available: int

    @property
    def reason(self) -> str:
        """Why, in one sentence."""
        return f"needs {self.technique.ranks} ranks, and this world has {self.available}."

    def as_json(self) -> dict[str, Any]:
        """The entry of tour.json; ``needs`` is a number of ranks."""
        needs, name = self.technique.ranks, self.technique.name
        return {"technique": name, "needs": needs, "reason": self.reason}


def measure(say: Say, techniques: Iterable[Technique] | None = None) -> tuple[list[Row], list]:
    """Train under every technique that this world has ranks for: (rows, skipped)."""
    limit = available_ranks()
    rows: list[Row] = []
    skipped: list[Skipped] = []
    losses: dict[str, list[float]] = {}  # of each reference
    for technique in TECHNIQUES if techniques is None else techniques:
        if limit is not None and technique.ranks > limit:
            skipped.append(Skipped(technique, limit))
            continue
        ranks = technique.ranks
        say(f"{technique.name}: {JOB.steps} steps on {ranks} rank{'s' if ranks > 1 else ''}")
        results = run(technique.train, JOB, n=ranks, timeout=300)
        reference = losses.setdefault(technique.reference, results[0].losses)
        rows.append(make_row(technique, results, reference))
    return rows, skipped


def make_row(technique: Technique, results: Results, reference: list[float], job: Job = JOB) -> Row:
    """Compare the ranks' reports with the losses of its reference and the technique's formulas."""
    reports: list[Report] = list(results)
    differences = [
        abs(mine - expected)
        for report in reports
        for mine, expected in zip(report.losses, reference, strict=True)
    ]
    counted = wire_bytes_by_axis(results.ledgers)
    formula = technique.formula(job)
    axes = sorted(counted.keys() | formula.keys())
    return Row(
        technique=technique,
        max_loss_difference=max(differences),
        counted={axis: counted.get(axis, Fraction(0)) for axis in axes},
        formula={axis: formula.get(axis, Fraction(0)) for axis in axes},
        state_bytes=max(report.state.total for report in reports),
        state_formula=technique.state_formula(job),
        peak_activation_bytes=max(report.peak_activation_bytes for report in reports),
        peak_activation_formula=technique.peak_activation_formula(job),
        losses=reports[0].losses,
        ledgers=results.ledgers,
        kernel=results.kernel_bytes,
    )
