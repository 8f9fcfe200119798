"""The planner is held to published values: each row to its bar, and the page to today's table."""

from statistics import median

import pytest

from course_lib.planner import published
from course_lib.planner.hardware import hardware
from course_lib.planner.published import RUNS, Result, compute, rows


@pytest.fixture(scope="module")
def results() -> list[Result]:
    return published.results()


def test_every_row_is_within_its_bar(results):
    outside = [f"{one.row.run}: {one.row.published} {one.ours}" for one in results if not one.held]
    missed = {one.row.run for one in results if one.held is False}
    assert missed == KNOWN_MISSES, outside


KNOWN_MISSES: set[str] = set()


def test_the_median_error_of_runs_that_were_not_used_is_at_most_8_percent(results):
    runs = [one for one in results if one.row.title == RUNS and one.held is not None]
    assert median(abs(one.error) for one in runs if not one.row.calibration) <= 0.08


def test_at_most_half_of_the_rows_of_a_generation_are_used():
    for key in {row.efficiency_key for row in rows() if row.efficiency_key}:
        used = [row.calibration for row in rows() if row.efficiency_key == key]
        assert 1 <= sum(used) <= len(used) / 2, key


def test_the_efficiencies_are_those_that_the_calibration_rows_give():
    for (name, key), fitted in published.fitted().items():
        assert hardware(name).efficiency[key] == pytest.approx(fitted, abs=0.001)


def test_every_row_says_where_it_is_from_and_why_it_is_not_held():
    for row in rows():
        assert row.source
        assert (row.bar is None) == bool(row.why), row.run


def test_slower_rows_of_torchtitan_are_slower_here():
    """Their GPU's peak is not known, so only the order counts."""
    found = {row.run: compute(row) for row in rows() if "torchtitan" in row.source}
    assert len(found) == len([row for row in rows() if "torchtitan" in row.source])


def test_the_page_has_todays_table(results):
    page = published.PAGE.read_text(encoding="utf-8")
    inside = page.split(published.BEGIN)[1].split(published.END)[0]
    assert inside.strip() == published.table(results).strip()
