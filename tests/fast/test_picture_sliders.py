"""Sliders over a picture that a lesson draws itself."""

from __future__ import annotations

import pytest

from course_lib.trace import StateBytes
from course_lib.view import memory_plot
from course_lib.view.moved import picture_sliders


def draw(ranks, times):
    if ranks == 3:
        raise ValueError("3 ranks <do not> fit")
    return memory_plot({f"{ranks} ranks": StateBytes(1000 * times // ranks)})


def test_a_move_draws_anew_and_what_does_not_fit_is_said():
    sliders = picture_sliders(draw, ranks=(1, 2, 3), times=(4, 8))
    first = bytes(sliders.image.value)
    assert first.startswith(b"\x89PNG")
    assert "1 ranks with 4,000 B" in sliders.message.value
    sliders.controls["ranks"].value = 2
    assert "2 ranks with 2,000 B" in sliders.message.value
    assert bytes(sliders.image.value) != first
    sliders.controls["ranks"].value = 3
    assert "3 ranks &lt;do not&gt; fit" in sliders.message.value
    assert sliders.image.layout.display == "none"
    sliders.controls["ranks"].value = 1
    assert sliders.image.layout.display == ""
    assert repr(sliders) == "PictureSliders(ranks, times)"


def test_no_values_are_refused():
    with pytest.raises(ValueError, match="at least one value for times, got none"):
        picture_sliders(draw, ranks=(1,), times=())
