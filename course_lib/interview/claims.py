"""The table of common claims (claims.toml), and the page that is made from it.

``python -m course_lib.interview.claims`` writes docs/claims.md, and claims_stated.json for readers
without PyTorch. A check is a function of
:mod:`course_lib.interview.checks`; it returns the value that the claim states, the value that is
computed, and for a conditional claim also the value where the condition does not hold.
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import Any

from course_lib.interview.checks import Numbers

TABLE = Path(__file__).with_name("claims.toml")
STATED = Path(__file__).with_name("claims_stated.json")
PAGE = Path(__file__).parents[2] / "docs" / "claims.md"
BY = ("formula", "run", "simulation", "source")
VERDICTS = ("right", "wrong", "conditional", "illustrative")
VOTES = {"right": "true", "wrong": "false", "conditional": "only"}  # by verdict
KINDS = {"statement": "", "code": "### Code\n", "mnemonic": "### Mnemonics\n"}  # headings
NONE = "none"
YES = ("no", "yes")
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
[Lesson 15](../notebooks/15_true_or_false.ipynb) is a game with 25 of the claims.
This page is written by `python -m course_lib.interview.claims`.
"""


@dataclass(frozen=True)
class Claim:
    """A claim of a note, ``id`` as "001-07". ``by`` says how it was checked: one of ``BY``.

    ``tolerance`` is relative to the claimed value, and absolute where that is 0. ``unit`` is what
    the values count. ``check`` is "module.function" below ``checks``, or "none". ``corrected`` has
    the values of the check as names in braces, see ``statement``. ``kind`` is one of ``KINDS``.
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
    kind: str = "statement"

    def run(self) -> Numbers | None:
        """Return the values of the check; None without a check."""
        return None if self.check == NONE else values_of(self.check)

    def statement(self) -> str:
        """Return ``corrected`` with the values of the check."""
        return _filled(self.corrected, self.run() or ())

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
    decides, {computed} in ``decision``.
    """

    id: str
    claims: tuple[str, ...]
    decision: str
    check: str
    unit: str

    def run(self) -> Numbers:
        """Return the values of the sides, and the value that decides."""
        return values_of(self.check)

    def statement(self) -> str:
        """Return ``decision`` with the value that decides."""
        return self.decision.format(computed=self.run()[-1])


@dataclass(frozen=True)
class Table:
    """All claims and contradictions, in the order of the file."""

    claims: tuple[Claim, ...]
    contradictions: tuple[Contradiction, ...]
    lesson: Mapping[str, tuple[str, ...]]  # ids of the claims that lesson 15 quotes, by subject

    def claim(self, name: str) -> Claim:
        """Return the claim with the id ``name``."""
        return next(claim for claim in self.claims if claim.id == name)


@cache
def values_of(name: str) -> Numbers:
    """Run the check ``name``, given as "module.function", once; return its values."""
    return find(name)()


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
        claims=tuple(map(_claim, read["claim"])),
        contradictions=tuple(
            Contradiction(**{**entry, "claims": tuple(entry["claims"])})
            for entry in read["contradiction"]
        ),
        lesson={subject: tuple(ids) for subject, ids in read["lesson"].items()},
    )


@cache
def stated() -> Mapping[str, str]:
    """Return the statement of each claim, by id, without running a check."""
    found: dict[str, str] = json.loads(STATED.read_text(encoding="utf-8"))
    return found


def statements() -> dict[str, str]:
    """Run all checks and return the statement of each claim, by id."""
    return {claim.id: claim.statement() for claim in table().claims}


def _claim(entry: dict[str, Any]) -> Claim:
    kind = "code" if entry["claim"].startswith("`") else "statement"
    return Claim(**{"kind": kind, "note": entry["id"][:3], **entry})


def _filled(text: str, values: Numbers) -> str:
    return text.format(**dict(zip(("claimed", "computed", "otherwise"), values, strict=False)))


def page() -> str:
    """Return docs/claims.md."""
    claims = table().claims
    counts = Counter(claim.verdict for claim in claims)
    total = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
    parts = [INTRODUCTION, f"{len(claims)} claims: {total}.\n"]
    for note, group in groupby(claims, key=lambda claim: claim.note):
        found = list(group)
        parts.append(f"## {TITLES[note]}\n")
        for kind, heading in KINDS.items():
            own = [_entry(claim) for claim in found if claim.kind == kind]
            parts += [heading, *own] if own and heading else own
    parts.append("## Contradictions\n")
    for one in table().contradictions:
        *sides, decides = map(number, one.run())
        says = ", ".join(f"{side} ({id})" for id, side in zip(one.claims, sides, strict=True))
        parts.append(
            f"**{one.id}** {_upper(one.unit)}: claimed {says}; computed {decides}. "
            f"{one.statement()}\n"
        )
    return "\n".join(parts)


def values_in_words(claim: Claim) -> str:
    """Return the values of the check, with what they count; "" without a check."""
    values = claim.run()
    if values is None:
        return ""
    truth = claim.unit == "yes"
    unit = "Holds" if truth else _upper(claim.unit)
    shown = [YES[bool(value)] if truth else number(value) for value in values]
    claimed, computed, *otherwise = shown
    more = f", otherwise {otherwise[0]}" if otherwise else ""
    return f"{unit}: claimed {claimed}, computed {computed}{more}. "


def _entry(claim: Claim) -> str:
    """Return the paragraphs of a claim."""
    how = f"*{claim.verdict}*, by {claim.by}. {values_in_words(claim)}"
    source = f" Source: {claim.source}." if claim.source else ""
    return f"**{claim.id}** “{claim.claim}”\n\n{how}{claim.statement()}{source}\n"


def _upper(text: str) -> str:
    """Return ``text`` with a capital first letter."""
    return text[:1].upper() + text[1:]


def number(value: float) -> str:
    """Return ``value`` with four digits."""
    return f"{value:,.0f}" if value == int(value) and abs(value) >= 1e4 else f"{value:.4g}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    shown = json.dumps(statements(), indent=1, ensure_ascii=False)
    STATED.write_text(f"{shown}\n", encoding="utf-8")
