"""Every verdict of claims.toml follows from its check, and docs/claims.md is today's page."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections import Counter
from importlib import import_module

import pytest

from course_lib.interview import checks, trial
from course_lib.interview.claims import (
    BY,
    KINDS,
    NONE,
    PAGE,
    VERDICTS,
    Claim,
    page,
    stated,
    statements,
    table,
)  # fmt: skip

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
        assert claim.kind in KINDS
        assert claim.corrected.endswith(".")
        assert claim.by != "source" or claim.source or claim.verdict == "illustrative", claim.id
    assert sum(claim.check == NONE for claim in CLAIMS) <= 5


NUMBER = re.compile(r"(?<![\w.,{-])\d[\d,]*\.?\d*(?![\w}])")
BY_CHANCE = {("000-32", "320"), ("002-43", "12"), ("003-06", "32")}  # a given size, in both places


def typed(text: str, values: tuple[float, ...]) -> set[str]:
    """The numbers of ``text``, of two digits or more, that are rounded ``values``."""
    found = {token.rstrip(",.") for token in NUMBER.findall(text)}
    return {token for token in found if len(token) > 1 and any(shows(token, v) for v in values)}


def shows(token: str, value: float) -> bool:
    digits = len(token.partition(".")[2])
    return f"{value:.{digits}f}" == token.replace(",", "")


def test_what_a_check_computes_is_not_typed_by_hand():
    for claim in CLAIMS:
        values = claim.run() or ()
        if claim.unit != "yes":
            own = {(claim.id, token) for token in typed(claim.corrected, values[1:])}
            assert own <= BY_CHANCE, own
        assert not re.search("[{}]", claim.statement())
    assert not re.search(r"\{(?!computed|otherwise)", "".join(each.corrected for each in CLAIMS))
    for one in table().contradictions:
        assert not typed(one.decision, one.run()[-1:]), one.id
    assert typed("Of 12 or 3,072 or 4.5 or 7.", (3072.2, 4.51, 7)) == {"3,072", "4.5"}


def test_lesson_15_quotes_25_claims_of_all_notes_and_verdicts():
    lesson = table().lesson
    quoted = [BY_ID[name] for names in lesson.values() for name in names]
    assert list(lesson) == ["memory", "traffic", "pipelines", "code", "decisions"]
    assert len({claim.id for claim in quoted}) == len(quoted) == 25
    assert {claim.note for claim in quoted} == {"000", "001", "002", "003", "004"}
    verdicts = Counter(claim.verdict for claim in quoted)
    assert set(verdicts) == {"right", "wrong", "conditional"}  # each is one of the three votes
    assert max(verdicts.values()) <= 12, "one vote for all would win"


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
    assert stated() == statements(), "run python -m course_lib.interview.claims"


def test_votes_are_heard_and_counted(capsys):
    trial.hear("memory", "true", "false", True, None)
    text = capsys.readouterr().out
    heads = re.findall(r"^(\d) +(\w+), by \w+ \(your vote: (.*)\)$", text, re.MULTILINE)
    assert heads == [
        ("1", "right", "true, right"),
        ("2", "wrong", "false, right"),
        ("3", "conditional", "True, wrong"),
        ("4", "wrong", "none"),
    ]
    assert "GB: claimed 90, computed 120." in text
    assert "The paper's total is 120 GB: 15 + 15 + 90." in text
    trial.tally(*["only if ..."] * 24, None)
    rows = dict(re.findall(r"^(\w+) +(\d+ +\d+ +\d+)$", capsys.readouterr().out, re.MULTILINE))
    assert {name: list(map(int, row.split())) for name, row in rows.items()} == {
        "right": [5, 0, 0],
        "wrong": [12, 0, 0],
        "conditional": [8, 7, 1],
        "all": [25, 7, 1],
    }


@pytest.mark.parametrize(
    ("subject", "votes", "words"),
    [
        ("trivia", (), "expected a subject of memory, traffic"),
        ("memory", (None,), "expected 4 votes on memory, got 1"),
        ("pipelines", ("true", "perhaps", None), "vote_12: expected .*, got 'perhaps'"),
    ],
)
def test_what_cannot_be_heard_is_said(subject, votes, words):
    with pytest.raises(ValueError, match=words):
        trial.hear(subject, *votes)


def test_the_check_of_a_claim_is_shown(capsys):
    trial.show(8)
    assert capsys.readouterr().out.startswith("def dp_across_nodes() -> Numbers:")
