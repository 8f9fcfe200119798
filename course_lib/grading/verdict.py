"""The verdict on one answer: what passed on which axis, and the one sentence that helps most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

AXES = ("outputs", "gradients", "weights", "wire", "peak")  # in the order in which they are told
TITLES = {
    "outputs": "outputs",
    "gradients": "gradients",
    "weights": "weights after steps",
    "wire": "wire ledger",
    "peak": "peak live bytes",
}
MIME = "application/vnd.course.verdict+json"
GOOD, BAD = "#009E73", "#D55E00"  # green and vermillion that every eye tells apart
LONGEST = 600  # characters of a message: a report that scrolls away helps nobody


@dataclass(frozen=True)
class CaseResult:
    """How one case ended. ``message`` says what is wrong; it is empty where the case passed.

    A message may have several lines; those that are indented are code.
    ``judged`` is False where the case was not looked at because another one failed.
    """

    axis: str
    title: str
    message: str = ""
    judged: bool = True

    @property
    def passed(self) -> bool:
        """Whether the case counts for the learner."""
        return not self.message


@dataclass(frozen=True)
class Verdict:
    """What is shown for an answer: no form of it holds a time or a seed."""

    ex: str
    results: Sequence[CaseResult] = field(default=(), repr=False)

    @property
    def passed(self) -> int:
        """Number of cases passed."""
        return sum(result.passed for result in self.results)

    @property
    def total(self) -> int:
        """Number of cases."""
        return len(self.results)

    @property
    def ok(self) -> bool:
        """Whether all cases passed."""
        return self.passed == self.total > 0

    @property
    def axes(self) -> dict[str, tuple[int, int]]:
        """(passed, total) of each axis that the exercise looks at."""
        return {
            axis: (sum(result.passed for result in mine), len(mine))
            for axis in AXES
            if (mine := [result for result in self.results if result.axis == axis])
        }

    @property
    def message(self) -> str:
        """What is wrong, of the first axis that fails; empty where all passed.

        What was not judged for the sake of another case has nothing to tell while that one has.
        """
        return _shortened(self._told)

    @property
    def _told(self) -> str:
        bad = [each for axis in AXES for each in self.results
               if each.axis == axis and not each.passed]  # fmt: skip
        told = next((each for each in bad if each.judged), bad[0] if bad else None)
        return told.message if told else ""

    @property
    def line(self) -> str:
        """The one stable line, which the official run compares."""
        return " ".join([f"{self.ex}: {self.passed} of {self.total} passed.", self.message]).strip()

    def as_dict(self) -> dict[str, Any]:
        """The verdict as data, without time and seed."""
        return {
            "ex": self.ex,
            "passed": self.passed,
            "total": self.total,
            "message": self.message,
            "axes": {axis: list(counts) for axis, counts in self.axes.items()},
        }

    def __repr__(self) -> str:
        return self.line

    def _repr_html_(self) -> str:
        """Ink and ground are those of the theme; only the marks and the bar have a colour."""
        bar = f"border-left:4px solid {GOOD if self.ok else BAD};padding-left:12px"
        head = f"<b>{escape(self.ex)}: {self.passed} of {self.total} passed</b>"
        said = "".join(map(_said, self._told.splitlines()))
        rows = "".join(map(_row, self.results))
        return f"<div style='{bar}'>{head}{said}<table style='margin:8px 0'>{rows}</table></div>"

    def _repr_mimebundle_(self, **_: object) -> Mapping[str, Any]:
        return {"text/plain": self.line, "text/html": self._repr_html_(), MIME: self.as_dict()}


def failed(
    ex: str, message: str, cases: Sequence[tuple[str, str]] = (("outputs", "runs"),)
) -> Verdict:
    """A verdict in which every case, given as (axis, title), fails for one reason."""
    return Verdict(ex, [CaseResult(axis, title, message) for axis, title in cases])


def _said(line: str) -> str:
    """One line of a message; an indented one is code."""
    text = escape(_shortened(line))
    code = "font-family:monospace;margin:2px 0;padding-left:2em"
    return f"<div style='{code if line.startswith(' ') else 'margin:6px 0'}'>{text}</div>"


def _row(result: CaseResult) -> str:
    mark, colour, word = (
        ("&#10003;", GOOD, "passed") if result.passed else ("&#10007;", BAD, "failed")
    )
    if not result.judged:
        mark, colour, word = "&ndash;", "inherit", "not judged yet"
    state = f"<b style='color:{colour}'>{mark}</b> {word}"
    cells = (state, TITLES.get(result.axis, result.axis), escape(result.title))
    return "<tr>" + "".join(f"<td style='text-align:left'>{cell}</td>" for cell in cells) + "</tr>"


def _shortened(message: str) -> str:
    """The message on one line, the middle left out where it is long."""
    text = " ".join(message.split())
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST - 200]} ... {text[-195:]}"
