"""Read a learner's schedule, a list of rows of cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from course_lib.grading.answers import NotRight, shown
from course_lib.schedule import Schedule, ScheduleError, from_rows, validate


def schedule_of(value: Any) -> Schedule:
    """Return the schedule in ``value``, a list of rows; raises NotRight if it is not legal."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise NotRight(f"expected a list of rows, one per rank, got {shown(value)}")
    rows = [row.split() if isinstance(row, str) else row for row in value]
    for row in rows:
        if not isinstance(row, Sequence) or not all(isinstance(cell, str) for cell in row):
            raise NotRight(f"expected a row to be a list of cells such as '0F3', got {shown(row)}")
    try:
        schedule = from_rows(rows)
        validate(schedule)
    except ScheduleError as error:
        raise NotRight(f"these rows cannot be run: {error}") from None
    return schedule
