"""The verdict on one answer: passed cases by axis, and one message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

AXES = ("outputs", "gradients", "weights", "wire", "peak")  # in the order of their messages
TITLES = {
    "outputs": "outputs",
    "gradients": "gradients",
    "weights": "weights after steps",
    "wire": "wire ledger",
    "peak": "peak live bytes",
}
MIME = "application/vnd.course.verdict+json"
GOOD, BAD = "#009E73", "#D55E00"  # green and vermillion, which color-blind readers distinguish
LONGEST = 600  # characters per message


@dataclass(frozen=True)
class CaseResult:
    """The result of one case. ``message`` says what is wrong; it is empty if the case passed.

    A message may have several lines; indented lines are code. ``judged`` is False if the case was
    not judged because another case failed. ``busy`` cases were not judged because the machine was
    too busy: they have not failed.
    """

    axis: str
    title: str
    message: str = ""
    judged: bool = True
    busy: bool = False

    @property
    def passed(self) -> bool:
        """Whether the case passed."""
        return not self.message


@dataclass(frozen=True)
class Verdict:
    """The verdict that is shown for an answer; it contains no time and no seed."""

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
    def not_judged(self) -> int:
        """Number of cases that the machine was too busy to judge."""
        return sum(result.busy for result in self.results)

    @property
    def axes(self) -> dict[str, tuple[int, int]]:
        """(passed, total) of each axis of the exercise."""
        return {
            axis: (sum(result.passed for result in mine), len(mine))
            for axis in AXES
            if (mine := [result for result in self.results if result.axis == axis])
        }

    @property
    def message(self) -> str:
        """The message of the first axis that fails; empty if all cases passed.

        A case that was not judged gives its message only if no judged case failed.
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
        """The stable line that the official run compares."""
        return " ".join([f"{self.ex}: {self.passed} of {self.total} passed.", self.message]).strip()

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as data, without time and seed."""
        return {
            "ex": self.ex,
            "passed": self.passed,
            "total": self.total,
            "not_judged": self.not_judged,
            "message": self.message,
            "axes": {axis: list(counts) for axis, counts in self.axes.items()},
        }

    def __repr__(self) -> str:
        return self.line

    def _repr_html_(self) -> str:
        """Return HTML with the colors of the theme; only the marks and the bar have their own."""
        bar = f"border-left:4px solid {GOOD if self.ok else BAD};padding-left:12px"
        head = f"<b>{escape(self.ex)}: {self.passed} of {self.total} passed</b>"
        said = "".join(map(_said, self._told.splitlines()))
        rows = "".join(map(_row, self.results))
        return f"<div style='{bar}'>{head}{said}<table style='margin:8px 0'>{rows}</table></div>"

    def _repr_mimebundle_(self, **_: object) -> Mapping[str, Any]:
        return {"text/plain": self.line, "text/html": self._repr_html_(), MIME: self.as_dict()}


def too_busy(ex: str, message: str, cases: Sequence[tuple[str, str]]) -> Verdict:
    """Return a verdict in which no case was judged, because the machine was too busy."""
    return Verdict(ex, [CaseResult(*case, message, judged=False, busy=True) for case in cases])


def failed(
    ex: str, message: str, cases: Sequence[tuple[str, str]] = (("outputs", "runs"),)
) -> Verdict:
    """Return a verdict in which every case, given as (axis, title), fails for one reason."""
    return Verdict(ex, [CaseResult(axis, title, message) for axis, title in cases])


def _said(line: str) -> str:
    """Return one line of a message as HTML; an indented line is code."""
    text = escape(_shortened(line))
    code = "font-family:monospace;margin:2px 0;padding-left:2em"
    return f"<div style='{code if line.startswith(' ') else 'margin:6px 0'}'>{text}</div>"


def _row(result: CaseResult) -> str:
    mark, color, word = (
        ("&#10003;", GOOD, "passed") if result.passed else ("&#10007;", BAD, "failed")
    )
    if not result.judged:
        word = "not judged" if result.busy else "not judged yet"
        mark, color = "&ndash;", "inherit"
    state = f"<b style='color:{color}'>{mark}</b> {word}"
    cells = (state, TITLES.get(result.axis, result.axis), escape(result.title))
    return "<tr>" + "".join(f"<td style='text-align:left'>{cell}</td>" for cell in cells) + "</tr>"


def _shortened(message: str) -> str:
    """Return the message on one line; the middle of a long message is left out."""
    text = " ".join(message.split())
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST - 200]} ... {text[-195:]}"
