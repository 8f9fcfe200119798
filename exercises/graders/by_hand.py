"""Exercises worked by hand. by_hand.json has their right entries and the classic mistakes."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

from course_lib.grading.exercise import Wrong
from course_lib.grading.graders import FOLDER
from course_lib.grading.worked import Worked


def by_hand(ex: str) -> Worked:
    """Return the exercise with that id. A text such as "29/17" in its tables is a fraction.

    A mistake is a pair: the wrong entries by key, and the message for each of them.
    """
    table = json.loads((FOLDER / "by_hand.json").read_text(encoding="utf-8"))[ex]
    return Worked(
        id=ex,
        title=table["title"],
        names=tuple(table["names"]),
        wanted=_numbers(table["wanted"]),
        unordered=frozenset(table.get("unordered", ())),
        mistakes=tuple(Wrong(_numbers(entries), why) for entries, why in table["mistakes"]),
    )


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_numbers(entry) for entry in value]
    parts = value.split("/") if isinstance(value, str) else []
    fraction = len(parts) == 2 and all(part.isdecimal() for part in parts)
    return Fraction(value) if fraction else value
