"""The picture of a schedule and the sliders over it, without a browser."""

from __future__ import annotations

import html
import itertools
import sys
from io import BytesIO

import numpy as np
import pytest
from matplotlib import image
from matplotlib.text import Text

from course_lib.schedule import Costs, from_rows, make, simulate
from course_lib.view import schedule_picture
from course_lib.view.schedules import in_flight
from course_lib.view.sliders import schedule_sliders


def picture_of(name: str = "1f1b", p: int = 4, m: int = 8, chunks: int = 1, **costs):
    return schedule_picture(simulate(make(name, p, m, chunks), Costs.make(**costs)))


def texts(picture, gid: str) -> list[str]:
    return [text.get_text() for text in picture.findobj(Text) if text.get_gid() == gid]


def grey(picture) -> tuple[np.ndarray, float, float]:
    """The pixels in grey, and x of the axes' left and right end."""
    pixels = image.imread(BytesIO(picture._repr_png_()))[..., :3] @ [0.299, 0.587, 0.114]
    box = picture.axes[0].get_position()
    return pixels, box.x0 * pixels.shape[1], box.x1 * pixels.shape[1]


# --- picture ----------------------------------------------------------------------------------


def test_boxes_bear_micro_batches_and_ranks_their_peaks():
    picture = picture_of()
    assert sorted(texts(picture, "box")) == sorted(
        f"{op}{mb}" for op in "FB" for mb in range(8) for _ in range(4)
    )
    assert texts(picture, "lane") == [f"rank {rank}" for rank in range(4)]
    assert texts(picture, "peak") == ["peak 4", "peak 3", "peak 2", "peak 1"]
    assert texts(picture_of("gpipe"), "peak") == ["peak 8"] * 4


def test_the_sentence_has_the_numbers():
    assert picture_of().caption == (
        "Makespan 33, of which the busiest rank works 24: the bubble is 27.3% of total time, 37.5% "
        "of ideal time; at most 4 in flight, on rank 0. Simulated, not measured."
    )
    looped = schedule_picture(simulate(make("gpipe", 2, 2, 2), Costs()), title="Mine", note="So.")
    assert looped.caption.endswith(
        "Paler boxes, with ′ where it fits, are a rank's second stage. So."
    )
    assert texts(looped, "title") == ["Mine"]
    assert texts(picture_of(comm=0.5), "title") == [
        "1f1b, 4 ranks, 8 micro-batches; F 1, B 2, transfer 0.5"
    ]


def test_steps_in_flight():
    row = simulate(make("1f1b", 2, 2), Costs.make(1, 2)).rows[0]
    assert in_flight(row) == [(0, 1), (1, 2), (6, 1), (9, 0)]
    halves = simulate(from_rows([["0F0", "0I0", "0F1", "0W0", "0I1", "0W1"]]), Costs()).rows[0]
    assert in_flight(halves) == [(0, 1), (2, 2), (4, 1), (6, 0)]
    last = simulate(make("1f1b", 2, 2), Costs.make(1, 2)).rows[1]
    assert in_flight(last) == [(1, 1), (7, 0)], "B0 ends as F1 starts: no step down, none up"


def test_the_bubble_shows_in_grey():
    """Dotted idle time of the last rank, at both ends, beside plain F: seen without reading."""
    pixels, left, right = grey(picture_of())
    picture = picture_of()
    ax = picture.axes[0]
    top = ax.transData.transform((0, ax.get_ylim()[0] * 0.815))[1] / picture.dpi * 110
    row = len(pixels) - round(top)
    unit = (right - left) / 33

    def part(start: float, end: float) -> np.ndarray:
        return pixels[row - 12 : row + 12, round(left + start * unit) : round(left + end * unit)]

    idle, backward = part(0.3, 2.7), part(4.3, 5.7)
    assert idle.mean() - backward.mean() > 0.25
    assert idle.std() > 0.03, "dots, which plain F has not"
    assert part(27.3, 32.7).mean() == pytest.approx(idle.mean(), abs=0.03)


def test_in_flight_areas_are_to_one_scale():
    """The area under rank 0 of GPipe is as high as m, that of 1F1B's last rank 1 / p of p."""

    def heights(picture) -> list[float]:
        area = next(
            c for c in picture.axes[0].collections if len(c.get_paths()) == 4 and not c.get_hatch()
            and c.get_facecolor()[0][0] == pytest.approx(c.get_facecolor()[0][2])
        )  # fmt: skip
        return [float(np.ptp(path.vertices[:, 1])) for path in area.get_paths()]

    assert heights(picture_of()) == pytest.approx([0.22, 0.165, 0.11, 0.055])
    assert heights(picture_of("gpipe")) == pytest.approx([0.22] * 4)


@pytest.mark.parametrize(
    "draw",
    [
        picture_of,
        lambda: picture_of("gpipe", 4, 4, chunks=2),
        lambda: picture_of("naive", 1, 1),
        lambda: picture_of("1f1b", 16, 40),
        lambda: picture_of("gpipe", 96, 4),
        lambda: picture_of("gpipe", 3, 100, f=12345.678, b=0.001, comm=999),
    ],
    ids=["usual", "chunks", "one", "16 ranks", "96 ranks", "odd costs"],
)
def test_no_text_lies_on_another_or_outside(draw):
    picture = draw()
    picture.set_dpi(100)
    picture.draw_without_rendering()
    ours = ("box", "lane", "peak", "title", "caption")
    found = [t for t in picture.findobj(Text) if t.get_gid() in ours and t.get_text()]
    boxes = {text: text.get_window_extent().padded(-1.0) for text in found}
    page = picture.bbox.padded(2.0)
    for text, box in boxes.items():
        assert page.contains(box.x0, box.y0), text
        assert page.contains(box.x1, box.y1), text
    for one, other in itertools.combinations(boxes, 2):
        assert not boxes[one].overlaps(boxes[other]), f"{one} lies on {other}"


def test_a_large_schedule_makes_few_artists():
    picture = picture_of("1f1b", 24, 80)
    assert len(picture.axes[0].collections) <= 6
    assert texts(picture, "box") == []
    assert picture.get_figheight() < 9


# --- sliders ----------------------------------------------------------------------------------


def shown(sliders) -> bool:
    return sliders.image.layout.display != "none"


def test_every_control_draws_anew():
    sliders = schedule_sliders()
    assert sliders.image.format == "png"
    last = sliders.image.value
    assert "Makespan 33" in sliders.message.value
    assert last == picture_of(f=1, b=2)._repr_png_()
    for name, value in [
        ("m", 5), ("p", 3), ("f", 2.0), ("b", 3.0), ("comm", 0.5), ("schedule", "gpipe"),
        ("chunks", 2),
    ]:  # fmt: skip
        sliders.controls[name].value = value
        assert sliders.image.value != last, name
        assert bytes(sliders.image.value).startswith(b"\x89PNG")
        assert shown(sliders)
        assert html.escape(sliders.sentence) in sliders.message.value, "for those who cannot see it"
        last = sliders.image.value
    assert last == picture_of("gpipe", 3, 5, 2, f=2, b=3, comm=0.5)._repr_png_()


def test_what_is_impossible_is_told_in_place_of_the_picture():
    sliders = schedule_sliders()
    sliders.controls["chunks"].value = 2
    assert "1f1b has one chunk per rank, got chunks=2" in sliders.message.value
    assert not shown(sliders)
    sliders.controls["schedule"].value = "naive"
    assert "Not possible" not in sliders.message.value
    assert shown(sliders)
    for name, chunks in (("zb-v", 2), ("1f1b", 1), ("interleaved", 2)):  # the usual ones
        sliders.controls["schedule"].value = name
        assert sliders.controls["chunks"].value == chunks
        assert shown(sliders)
    sliders.controls["f"].value = sliders.controls["b"].value = 0
    assert "there is no work to schedule" in sliders.message.value
    assert not shown(sliders)
    sliders.controls["f"].value = 1
    assert shown(sliders)


def test_b_or_its_halves():
    sliders = schedule_sliders(b=3.0)
    b, i, w, split = (sliders.controls[name] for name in ("b", "i", "w", "split"))
    before = sliders.image.value
    seen = [control.layout.display for control in (b, i, w)]
    assert seen == ["", "none", "none"]
    split.value = True
    assert [control.layout.display for control in (b, i, w)] == ["none", "", ""]
    assert (i.value, w.value) == (1.5, 1.5)
    assert sliders.image.value == before, "the same whole backward"
    w.value = 0.5
    assert sliders.image.value == picture_of(f=1, i=1.5, w=0.5)._repr_png_()
    split.value = False
    assert b.value == 2.0


def test_the_stored_output_is_the_same_in_every_kernel():
    one, other = schedule_sliders(), schedule_sliders("gpipe", 2, 3)
    assert repr(one) == repr(other)
    bundle = one._repr_mimebundle_()
    assert bundle["text/plain"] == repr(one)
    assert set(bundle) == {"text/plain", "application/vnd.jupyter.widget-view+json"}
    numbers = getattr(sys.modules.get("matplotlib.pyplot"), "get_fignums", list)()
    assert numbers == []


def test_first_values_that_cannot_be():
    for wrong, reason in [
        ({"name": "zb"}, "no schedule is called 'zb'"),
        ({"ranks": 0}, "ranks=0"),
        ({"chunks": 2}, "one chunk per rank"),
        ({"b": -1.0}, "b=-1"),
    ]:
        with pytest.raises(ValueError, match=reason):
            schedule_sliders(**wrong)
    wide = schedule_sliders("gpipe", 20, 100, f=9.0, b=11.0)
    assert (wide.controls["p"].value, wide.controls["m"].value) == (20, 100)
    assert (wide.controls["f"].value, wide.controls["b"].value) == (9.0, 11.0)
