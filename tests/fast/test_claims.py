"""Every verdict of claims.toml follows from its check, and docs/claims.md is today's page."""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module

import pytest

from course_lib.interview import checks
from course_lib.interview.claims import BY, NONE, PAGE, VERDICTS, Claim, page, table

CLAIMS = table().claims
BY_ID = {claim.id: claim for claim in CLAIMS}


def a_claim(verdict: str, tolerance: float = 0.1) -> Claim:
    return Claim("000-00", "000", "", "run", verdict, "", NONE, tolerance=tolerance)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_the_verdict_follows_from_the_check(claim):
    values = claim.run()
    if values is None:
        assert claim.by == "source" or claim.verdict == "illustrative"
        assert claim.source or claim.verdict == "illustrative"
    else:
        assert claim.holds(values), f"{claim.verdict}: {values}"


@pytest.mark.parametrize("one", table().contradictions, ids=lambda one: one.id)
def test_a_contradiction_is_decided(one):
    *sides, decides = one.run()
    assert len(sides) == len(one.claims) >= 2
    assert {BY_ID[each].id for each in one.claims} == set(one.claims)
    assert len({round(side, 6) for side in sides}) > 1, "the sides agree"
    assert isinstance(decides, int | float)


def test_the_table_is_complete_and_well_formed():
    assert len(CLAIMS) >= 100
    assert len(table().contradictions) >= 5
    assert len(BY_ID) == len(CLAIMS)
    assert [claim.id for claim in CLAIMS] == sorted(BY_ID)
    assert {claim.note for claim in CLAIMS} == {"000", "001", "002", "003", "004"}
    for claim in CLAIMS:
        assert claim.by in BY
        assert claim.verdict in VERDICTS
        assert claim.corrected.endswith(".")
        assert claim.by != "source" or claim.source or claim.verdict == "illustrative", claim.id
    assert sum(claim.check == NONE for claim in CLAIMS) <= 5


def test_every_check_is_of_a_claim():
    used = {claim.check for claim in CLAIMS} | {one.check for one in table().contradictions}
    for _, name, _ in pkgutil.iter_modules(checks.__path__):
        module = import_module(f"{checks.__name__}.{name}")
        for function, value in inspect.getmembers(module, inspect.isfunction):
            own = value.__module__ == module.__name__
            if (
                own
                and inspect.signature(value).return_annotation == "Numbers"
                and function[0] != "_"
            ):
                assert f"{name}.{function}" in used


@pytest.mark.parametrize(
    ("verdict", "values", "holds"),
    [
        ("right", (10, 10.5), True),
        ("right", (10, 12), False),
        ("right", (0, 0.05), True),
        ("right", (10, 10, 12), False),
        ("right", (10, float("nan")), False),
        ("wrong", (10, 12), True),
        ("wrong", (10, 10.5), False),
        ("wrong", (10, float("inf")), False),
        ("conditional", (10, 10.5, 12), True),
        ("conditional", (10, 10.5), False),
        ("conditional", (10, 10.5, 10.5), False),
        ("conditional", (10, 12, 10), False),
        ("illustrative", (10, 3), True),
    ],
)
def test_a_verdict_is_refused_unless_the_values_say_so(verdict, values, holds):
    assert a_claim(verdict).holds(values) == holds


def test_the_page_is_todays():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m course_lib.interview.claims"
