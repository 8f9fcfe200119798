"""Grades as text, as JSON, as CSV for a spreadsheet, and as JUnit XML for a build server."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from course_lib.grading.run import Grade, Score


def as_json(grades: Sequence[Grade], several: bool) -> dict[str, Any]:
    """Return the grade of one file, or of several files as ``{"files": [...]}``."""
    found = [grade.as_dict() for grade in grades]
    return {"files": found} if several else found[0]


def as_text(grade: Grade) -> str:
    """Return the file name and its scores."""
    return "\n".join([grade.file, *(f"  {line}" for line in score_lines(grade))])


def score_lines(grade: Grade) -> list[str]:
    """Return a line per exercise, with its message below, and the sum."""
    lines = []
    for ex, score in grade.scores.items():
        lines.append(score_line(ex, score))
        if score.message:
            lines.append(f"      {score.message}")
    busy = f", {grade.not_judged} not judged" if grade.not_judged else ""
    return [*lines, f"sum   {grade.passed} of {grade.total}{busy}"]


def score_line(ex: str, score: Score) -> str:
    """Return the exercise and its score on one line."""
    busy = f", {score.not_judged} not judged" if score.not_judged else ""
    return f"{ex}  {score.passed} of {score.total}{busy}"


def as_csv(grades: Sequence[Grade]) -> str:
    """Return a row per file and exercise: file, exercise, passed, total, message, not_judged."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("file", "exercise", "passed", "total", "message", "not_judged"))
    for grade in grades:
        for ex, score in grade.scores.items():
            message = _no_formula(score.message)
            counts = score.passed, score.total, message, score.not_judged
            rows.writerow((_no_formula(grade.file), ex, *counts))
    return text.getvalue()


def _no_formula(text: str) -> str:
    """Quote a text that a spreadsheet would take for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def as_junit(grades: Sequence[Grade]) -> str:
    """Return a test suite per file, with a test case per exercise."""
    root = ElementTree.Element("testsuites")
    for grade in grades:
        failures = sum(score.failed for score in grade.scores.values())
        skipped = sum(not score.failed and score.not_judged > 0 for score in grade.scores.values())
        sizes = {"tests": str(len(grade.scores)), "failures": str(failures), "errors": "0"}
        sizes["skipped"] = str(skipped)
        suite = ElementTree.SubElement(root, "testsuite", {"name": _xml(grade.file)} | sizes)
        for ex, score in grade.scores.items():
            case = ElementTree.SubElement(suite, "testcase", classname=grade.lesson, name=ex)
            if score.passed < score.total:
                kind = "failure" if score.failed else "skipped"
                marks = f"{score.passed} of {score.total}. {score.message}"
                ElementTree.SubElement(case, kind, message=_xml(marks))
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _xml(text: str) -> str:
    """Replace the characters that are not allowed in XML."""
    return "".join(each if each.isprintable() else "?" for each in text)
