"""The numbers of the concept questions, a module per topic.

Each function returns the values of the names in braces of one question: integers, texts, and
amounts with a unit, computed by the planner, the formulas, the schedules and the layout.
"""

from __future__ import annotations

from fractions import Fraction

from course_lib.interview.questions import Amount


def about(value: float | Fraction, unit: str = "byte", digits: int = 3) -> Amount:
    """Return ``value``, in a base unit, rounded as a speaker says it: 53.2 GB."""
    return Amount(float(f"{float(value):.{digits}g}"), unit)
