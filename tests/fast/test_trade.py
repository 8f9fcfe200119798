"""The picture of memory against bubble."""

from __future__ import annotations

import pytest

from course_lib.view.trade import trade_plot

POINTS = {"zb-v": (4.0, 0.06), "dualpipe-v": (4.5, 0.06), "1f1b": (4.0, 0.27)}


def places(picture):
    return {text.get_text(): text.xyann for ax in picture.axes for text in ax.texts}


def test_the_sentence_names_the_least_bubble_with_the_least_memory():
    caption = trade_plot(POINTS, {}, {"bound": 0.05}, note="Simulated alone.").caption
    assert "Smallest bubble: zb-v, 6.0% of total time with 4 micro-batches" in caption
    assert caption.endswith("Simulated alone.")


def test_names_of_neighbours_do_not_stand_on_one_another():
    found = places(trade_plot(POINTS, {"a line": [(2, 0.3), (4, 0.1)]}, {}))
    assert found["zb-v"][0] < 0 < found["dualpipe-v"][0]
    assert found["zb-v"][1] < 0 < found["dualpipe-v"][1]
    assert found["1f1b"][0] > 0


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="at least one point, got none"):
        trade_plot({}, {}, {})
    with pytest.raises(ValueError, match="at most 4 lines and bounds, got 9"):
        trade_plot(POINTS, {str(n): [(1, 0.1)] for n in range(9)}, {})
