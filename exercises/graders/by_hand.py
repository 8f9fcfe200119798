"""Exercises worked by hand. by_hand.json has their right entries and the classic mistakes."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

from course_lib.grading.exercise import Wrong
from course_lib.grading.worked import Worked


def by_hand(ex: str) -> Worked:
    """Return the exercise with that id. A text such as "29/17" in its tables is a fraction.

    A mistake is a pair: the wrong entries by key, and the message for each of them.
    """
    table = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))[ex]
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
    fraction = isinstance(value, str) and re.fullmatch(r"-?\d+/\d+", value)
    return Fraction(value) if fraction else value
