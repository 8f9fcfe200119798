"""The pictures of lesson 12: ranks by node with their groups, and curves with points."""

from __future__ import annotations

import pytest

from course_lib.layout import make_layout
from course_lib.view.curves import curves
from course_lib.view.rank_grid import rank_grid


def texts(picture, gid):
    return [text.get_text() for ax in picture.axes for text in ax.texts if text.get_gid() == gid]


def test_a_rank_shows_its_group():
    picture = rank_grid(make_layout(16, "tp-dp-pp", tp=2, dp=2, pp=4), "dp", per_node=8)
    groups = {}
    for box in texts(picture, "box"):
        rank, letter = box.split("\n")
        groups.setdefault(letter, []).append(int(rank))
    assert sorted(groups.values()) == make_layout(16, "tp-dp-pp", tp=2, dp=2, pp=4).groups("dp")
    assert "8 groups of 2 ranks, of which 0 cross nodes of 8" in picture.caption
    assert texts(picture, "lane") == ["node 0", "node 1"]


def test_groups_that_cross_are_counted():
    layout = make_layout(16, "tp-dp-pp", tp=2, dp=2, pp=4)
    assert "4 groups of 4 ranks, of which 4 cross" in rank_grid(layout, "pp").caption
    assert "4 groups of 4 ranks, of which 0 cross" in rank_grid(layout, "tp", "dp").caption


def test_too_many_ranks_are_refused():
    with pytest.raises(ValueError, match="at most 64 ranks, got 128"):
        rank_grid(make_layout(128, tp=2), "tp")


def test_the_farthest_point_is_told():
    lines = {"a": {1: 1.0, 2: 2.0}, "b": {1: 1.0, 2: 1.5}}
    picture = curves(lines, {"a": {2: 1.9}, "b": {2: 1.0}}, across="ranks", up="speed-up")
    assert "farthest from its line is b at 2, 0.67 of the formula" in picture.caption


def test_points_without_a_curve_are_refused():
    with pytest.raises(ValueError, match="points for"):
        curves({"a": {1: 1.0}}, {"b": {1: 1.0}}, across="ranks", up="speed-up")
