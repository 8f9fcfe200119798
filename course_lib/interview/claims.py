"""The table of common claims (claims.toml), and the page that is made from it.

``python -m course_lib.interview.claims`` writes docs/claims.md. A check is a function of
:mod:`course_lib.interview.checks`; it returns the value that the claim states, the value that is
computed, and for a conditional claim also the value where the condition does not hold.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import groupby
from math import isfinite
from pathlib import Path

from course_lib.interview.checks import Numbers

TABLE = Path(__file__).with_name("claims.toml")
PAGE = Path(__file__).parents[2] / "docs" / "claims.md"
BY = ("formula", "run", "simulation", "source")
VERDICTS = ("right", "wrong", "conditional", "illustrative")
NONE = "none"
TITLES = {
    "000": "How DP, TP and PP work together",
    "001": "How to divide machines among DP, TP and PP",
    "002": "What data and model parallelism send",
    "003": "How communication on several axes is isolated",
    "004": "Strategies from DP to five axes",
}
INTRODUCTION = """# Common claims, checked

Study notes, blog posts and interview guides repeat these claims about parallel training. Most
claims have a check: a function in `course_lib/interview/checks` that computes a value. A test runs
all checks and compares each verdict with the result.

| verdict | meaning |
|---|---|
| right | the computed value agrees with the claim |
| wrong | the computed value differs from the claim |
| conditional | the value agrees only under the condition that the statement names |
| illustrative | an example or an opinion that no computation can decide |

Each entry shows the value that the claim states and the value that the check computes. A
conditional claim has a third value, computed where the condition does not hold. Estimates of time
come from the planner ([its accuracy](planner.md)), for the hardware that the statement names.
This page is written by `python -m course_lib.interview.claims`.
"""


@dataclass(frozen=True)
class Claim:
    """A claim of a note, ``id`` as "001-07". ``by`` says how it was checked: one of ``BY``.

    ``tolerance`` is relative to the claimed value, and absolute where that is 0. ``unit`` is what
    the values count. ``check`` is "module.function" below ``checks``, or "none".
    """

    id: str
    note: str
    claim: str
    by: str
    verdict: str
    corrected: str
    check: str
    unit: str = ""
    tolerance: float = 1e-6
    source: str = ""

    def run(self) -> Numbers | None:
        """Return the values of the check; None without a check."""
        return None if self.check == NONE else find(self.check)()

    def agrees(self, claimed: float, computed: float) -> bool:
        """Return whether the two values are equal within the tolerance."""
        return abs(computed - claimed) <= self.tolerance * (abs(claimed) or 1.0)

    def holds(self, values: Numbers) -> bool:
        """Return whether the verdict follows from ``values``."""
        claimed, computed, *otherwise = values
        if not all(isfinite(value) for value in values):
            return False
        if self.verdict == "illustrative":
            return True
        if self.verdict == "conditional":
            under = self.agrees(claimed, computed)
            return under and len(otherwise) == 1 and not self.agrees(claimed, otherwise[0])
        return not otherwise and self.agrees(claimed, computed) == (self.verdict == "right")


@dataclass(frozen=True)
class Contradiction:
    """Claims, by id, that cannot all be right; ``decision`` says which one is, ``check`` why.

    The check returns the values of the sides, in the order of ``claims``, and last the value that
    decides.
    """

    id: str
    claims: tuple[str, ...]
    decision: str
    check: str
    unit: str

    def run(self) -> Numbers:
        """Return the values of the sides, and the value that decides."""
        return find(self.check)()


@dataclass(frozen=True)
class Table:
    """All claims and contradictions, in the order of the file."""

    claims: tuple[Claim, ...]
    contradictions: tuple[Contradiction, ...]


def find(name: str) -> Callable[[], Numbers]:
    """Return the check ``name``, as "module.function"."""
    module, _, function = name.partition(".")
    check: Callable[[], Numbers] = getattr(
        import_module(f"course_lib.interview.checks.{module}"), function
    )
    return check


@cache
def table() -> Table:
    """Return the table of claims.toml."""
    read = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return Table(
        claims=tuple(Claim(note=entry["id"][:3], **entry) for entry in read["claim"]),
        contradictions=tuple(
            Contradiction(**{**entry, "claims": tuple(entry["claims"])})
            for entry in read["contradiction"]
        ),
    )


def page() -> str:
    """Return docs/claims.md."""
    claims = table().claims
    counts = Counter(claim.verdict for claim in claims)
    total = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
    parts = [INTRODUCTION, f"{len(claims)} claims: {total}.\n"]
    for note, group in groupby(claims, key=lambda claim: claim.note):
        parts += [f"## {TITLES[note]}\n", *map(_entry, group)]
    parts.append("## Contradictions\n")
    for one in table().contradictions:
        *sides, decides = map(_number, one.run())
        says = ", ".join(f"{side} ({id})" for id, side in zip(one.claims, sides, strict=True))
        parts.append(
            f"**{one.id}** {_upper(one.unit)}: claimed {says}; computed {decides}. {one.decision}\n"
        )
    return "\n".join(parts)


def _entry(claim: Claim) -> str:
    """Return the paragraphs of a claim."""
    show: Callable[[float], str] = _number
    how = f"*{claim.verdict}*, by {claim.by}. "
    if values := claim.run():
        unit = _upper(claim.unit)
        if claim.unit == "yes":
            show, unit = _yes_or_no, "Holds"
        claimed, computed, *otherwise = map(show, values)
        how += f"{unit}: claimed {claimed}, computed {computed}"
        how += f", otherwise {otherwise[0]}. " if otherwise else ". "
    source = f" Source: {claim.source}." if claim.source else ""
    return f"**{claim.id}** “{claim.claim}”\n\n{how}{claim.corrected}{source}\n"


def _upper(text: str) -> str:
    """Return ``text`` with a capital first letter."""
    return text[:1].upper() + text[1:]


def _yes_or_no(value: float) -> str:
    return "yes" if value else "no"


def _number(value: float) -> str:
    """Return ``value`` with four digits."""
    return f"{value:,.0f}" if value == int(value) and abs(value) >= 1e4 else f"{value:.4g}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
