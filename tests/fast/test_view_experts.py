"""The picture of experts: whose tokens each computes, what travels, what finds no room."""

from __future__ import annotations

from matplotlib.text import Text

from course_lib.ep import Load
from course_lib.view.experts import LOOKS, load_plot

# Two ranks with two experts each; expert 0 has no room for one pair of rank 1.
LOAD = Load(chosen=((3, 1, 2, 0), (2, 1, 1, 2)), kept=((3, 1, 2, 0), (1, 1, 1, 2)))


def texts(picture, gid):
    return [text.get_text() for text in picture.findobj(Text) if text.get_gid() == gid]


def test_load_plot_has_a_lane_for_each_expert_and_a_total_for_each_rank():
    picture = load_plot(LOAD)
    assert texts(picture, "lane") == [f"expert {number}" for number in range(4)]
    assert texts(picture, "total") == ["rank 0: 6", "rank 1: 5"]


def test_load_plot_says_who_is_waited_for_what_travels_and_what_was_dropped():
    caption = load_plot(LOAD, note="Of one layer.").caption
    assert "Rank 0 is the busiest, with 1.09 times the mean of all ranks" in caption
    assert "36% of the computed pairs are sent to another rank" in caption  # 4 of 11
    assert "8.3% were dropped" in caption  # 1 of 12
    assert caption.endswith("Of one layer.")


def test_load_plot_names_only_what_is_there():
    alone = Load(chosen=((2, 1),), kept=((2, 1),))
    for load, names in ((LOAD, list(LOOKS)), (alone, ["tokens of the same rank"])):
        legend = load_plot(load).legends[0]
        assert [text.get_text() for text in legend.get_texts()] == names


def test_load_plot_of_nothing_draws_empty_lanes():
    empty = Load(chosen=((0, 0), (0, 0)), kept=((0, 0), (0, 0)))
    assert texts(load_plot(empty), "total") == ["rank 0: 0", "rank 1: 0"]
