"""The page of formulas: the text of each formula gives the library's number, for several sizes."""

from __future__ import annotations

import pytest

from course_lib.interview.formula_rows import EXAMPLE, SECTIONS, SYMBOLS
from course_lib.interview.formulas_page import PAGE, evaluate, page

ROWS = [row for rows in SECTIONS.values() for row in rows]
OTHER = {"t": 4}  # 16 ranks would copy the 8 key and value heads; every other symbol is doubled
CASES = [
    pytest.param(row, {**EXAMPLE, name: OTHER.get(name, 2 * EXAMPLE[name])}, id=f"{at}-{name}")
    for at, row in enumerate(ROWS)
    for name in sorted(row.symbols)
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.quantity)
def test_a_formula_gives_the_number_of_the_example(row):
    assert evaluate(row.formula) == pytest.approx(row.computed(), rel=1e-9)


@pytest.mark.parametrize(("row", "sizes"), CASES)
def test_a_formula_gives_the_number_of_other_sizes(row, sizes):
    assert evaluate(row.formula, sizes) == pytest.approx(row.computed(sizes), rel=1e-9)


def test_a_wrong_formula_would_be_found():
    rows = {row.quantity: row for row in ROWS}
    bubble = rows["GPipe and 1F1B, of the total time"]
    assert evaluate("(p-1)/(M + p)") != pytest.approx(bubble.computed(), rel=1e-9)
    doubled = {**EXAMPLE, "n": 16}
    assert rows["all-reduce"].computed(doubled) != pytest.approx(rows["all-reduce"].computed())


def test_all_symbols_are_defined_and_used_once():
    used = set().union(*(row.symbols for row in ROWS))
    assert used == set(EXAMPLE)
    assert len(EXAMPLE) == len(SYMBOLS)


@pytest.mark.parametrize("text", ["__import__('os')", "P ** 2", "max(P, Q)", "P.real", "y", "'P'"])
def test_only_arithmetic_is_evaluated(text):
    with pytest.raises(ValueError, match="expected numbers, symbols"):
        evaluate(text)


def test_the_page_is_what_is_committed():
    assert PAGE.read_text(encoding="utf-8") == page()


def test_the_page_fits_on_a_page_and_has_every_row():
    lines = page().splitlines()
    assert len(lines) <= 110
    for row in ROWS:
        assert sum(f"| {row.quantity} | `{row.formula}` |" in line for line in lines) == 1
