"""A learner's schedule, as rows of cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from course_lib.grading.answers import NotRight, shown
from course_lib.schedule import Schedule, ScheduleError, from_rows, validate


def schedule_of(value: Any) -> Schedule:
    """The legal schedule that ``value`` writes, a list of rows; raises NotRight with the reason."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise NotRight(f"a list of rows, one for each rank, is wanted, not {shown(value)}")
    rows = [row.split() if isinstance(row, str) else row for row in value]
    for row in rows:
        if not isinstance(row, Sequence) or not all(isinstance(cell, str) for cell in row):
            raise NotRight(f"a row is a list of cells such as '0F3', not {shown(row)}")
    try:
        schedule = from_rows(rows)
        validate(schedule)
    except ScheduleError as error:
        raise NotRight(f"these rows cannot be run: {error}") from None
    return schedule
