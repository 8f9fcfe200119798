"""Pictures: what they hold, that they can be read, in grey too, and that they are fast enough."""

import itertools
import json
import sys
from fractions import Fraction
from io import BytesIO

import pytest
from matplotlib import colors, image
from matplotlib.text import Text

from course_lib.ledger import Ledger, Record
from course_lib.mesh import Conditions, Link, Links
from course_lib.schedule import Span
from course_lib.trace import Sleep, StateBytes, Trace
from course_lib.view import (
    Picture,
    fit_plot,
    ledger_plot,
    live_plot,
    memory_plot,
    perfetto,
    terminal_timeline,
    timeline,
    traffic_plot,
)
from course_lib.view.bars import size_text
from course_lib.view.lanes import chunks, depths
from course_lib.view.roofline import rate_text, roofline
from course_lib.view.style import MEMORY, OPERATIONS, contrast, look_of, luminance
from course_lib.view.summary import covered, summarize

F, B = 0.02, 0.04


def pipeline(ranks: int = 4, mbs: int = 8, messages: bool = False) -> list[Span]:
    """A 1F1B run with ideal times: (mbs + ranks - 1) x (F + B) seconds."""
    todo = {}
    for rank in range(ranks):
        warm = min(ranks - 1 - rank, mbs)
        steady = [(op, mb + warm * (op == "F")) for mb in range(mbs) for op in "FB"]
        todo[rank] = [("F", mb) for mb in range(warm)]
        todo[rank] += [(op, mb) for op, mb in steady if mb < mbs]
    ends: dict[tuple[str, int, int], float] = {}
    free, spans = [0.0] * ranks, []
    while any(todo.values()):
        for rank, actions in todo.items():
            while actions:
                op, mb = actions[0]
                needed = (op, rank - 1 if op == "F" else rank + 1, mb)
                if not 0 <= needed[1] < ranks:
                    ready = 0.0 if op == "F" else ends["F", rank, mb]
                elif needed in ends:
                    ready = ends[needed]
                else:
                    break
                start = max(free[rank], ready)
                if messages and start > free[rank]:
                    what = {"axis": "pp", "payload": 4096, "mb": mb}
                    spans.append(Span(rank, "recv", free[rank], start, **what))
                free[rank] = ends[op, rank, mb] = start + (F if op == "F" else B)
                spans.append(Span(rank, op, start, free[rank], stage=rank, mb=mb))
                actions.pop(0)
    return spans


def overlapped(ranks: int = 4) -> list[Span]:
    """Backward in three blocks of 20 ms; each bucket takes 30 ms from the end of its block on."""
    spans = []
    for rank in range(ranks):
        spans.append(Span(rank, "F", 0.0, 0.03, mb=0))
        for block in range(3):
            end = 0.03 + 0.02 * (block + 1)
            spans.append(Span(rank, "B", end - 0.02, end, mb=0, label=f"block {2 - block}"))
            what = {"axis": "dp", "payload": 1 << 20, "label": f"bucket {block}"}
            spans.append(Span(rank, "all_reduce", end, end + 0.03, **what))
        spans.append(Span(rank, "optimizer", 0.12, 0.13))
    return spans


def texts(picture: Picture, gid: str) -> list[str]:
    return [text.get_text() for text in picture.findobj(Text) if text.get_gid() == gid]


def png(picture: Picture):
    return image.imread(BytesIO(picture._repr_png_()))


# --- looks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("looks", [OPERATIONS, MEMORY], ids=["operations", "memory"])
def test_no_two_hatches_are_the_same(looks):
    hatches = ["".join(sorted(set(look.hatch))) for look in looks.values()]
    assert len(set(hatches)) == len(hatches), "hatches must differ in kind, not only in density"


def test_unknown_operations_get_looks_of_their_own():
    looks = look_of(["F", *(f"op {number}" for number in range(10)), "B", "all_reduce"])
    assert len({look.hatch for look in looks.values()}) == 13
    known = {look.hatch for look in OPERATIONS.values()}
    assert all(look.hatch not in known for op, look in looks.items() if op.startswith("op"))


@pytest.mark.parametrize(
    ("one", "other", "least"),
    [
        ("F", "B", 3.0),
        ("F", "I", 1.5),
        ("F", "W", 2.0),
        ("I", "W", 1.5),
        ("B", "optimizer", 1.5),
        ("parameters", "gradients", 1.5),
        ("gradients", "optimizer", 1.5),
        ("optimizer", "activations", 1.5),
    ],
)
def test_neighbours_differ_in_grey(one, other, least):
    looks = {**OPERATIONS, **MEMORY}
    assert contrast(looks[one].color, looks[other].color) >= least


def test_numbers_can_be_read_on_every_color():
    for look in [*OPERATIONS.values(), *MEMORY.values()]:
        assert contrast(look.color, look.ink) >= 4.5


def test_luminance_is_that_of_the_standard():
    assert luminance("#FFFFFF") == pytest.approx(1.0)
    assert luminance("#FF0000") == pytest.approx(0.2126)
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21.0)


# --- numbers under the picture ---------------------------------------------------------------


def test_summary_of_1f1b_has_the_bubble_of_the_formula():
    summary = summarize(pipeline(ranks=4, mbs=8))
    assert summary.makespan == pytest.approx((8 + 4 - 1) * (F + B))
    assert summary.idle == pytest.approx((4 - 1) / (8 + 4 - 1))
    assert (summary.ranks, summary.comm, summary.exposed) == (4, 0.0, 0.0)


def test_summary_tells_hidden_from_exposed_communication():
    summary = summarize(overlapped())
    # In flight from 50 to 120 ms; backward runs until 90.
    assert summary.comm == pytest.approx(0.07)
    assert summary.exposed == pytest.approx(0.03)
    assert summary.idle == pytest.approx(0.03 / 0.13)


def test_covered_is_the_length_of_the_union():
    assert covered([(0, 2), (1, 3), (5, 6), (5, 5.5)]) == 4
    assert covered([]) == 0


def test_depths_put_what_overlaps_below():
    def spans(*times):
        return [Span(0, "x", start, end) for start, end in times]

    assert depths(spans((0, 1), (1, 2), (2, 3))) == [0, 0, 0]
    assert depths(spans((0, 3), (1, 2), (1.5, 4), (2, 3), (3, 5))) == [0, 1, 2, 1, 0]
    assert depths([]) == []


def test_chunks_number_the_stages_of_a_rank():
    spans = [Span(rank, "F", 0, 1, stage=stage) for rank, stage in ((0, 4), (0, 0), (1, 1))]
    assert chunks(spans) == {(0, 0): 0, (0, 4): 1, (1, 1): 0}


# --- timeline -------------------------------------------------------------------------------


def test_timeline_is_a_figure_without_pyplot():
    picture = timeline(pipeline())
    assert isinstance(picture, Picture)
    assert picture.get_size_inches()[0] == 9.0
    height, width, _ = png(picture).shape
    assert (width, height < width) == (990, True)
    numbers = getattr(sys.modules.get("matplotlib.pyplot"), "get_fignums", list)()
    assert numbers == []


def test_savefig_writes_a_picture(tmp_path):
    path = tmp_path / "run.png"
    timeline(overlapped()).savefig(path, dpi=100)
    assert image.imread(path).shape[1] == 900
    assert path.stat().st_size < 200_000


def test_every_box_of_a_readable_run_has_its_name():
    assert sorted(texts(timeline(pipeline()), "box")) == sorted(
        f"{op}{mb}" for op in "FB" for mb in range(8) for _ in range(4)
    )
    names = texts(timeline(overlapped()), "box")
    assert names.count("block 2") == names.count("bucket 2") == 4
    assert texts(timeline(overlapped(2)), "lane") == ["rank 0", "dp", "rank 1", "dp"]


def test_names_that_do_not_fit_get_shorter_all_alike():
    names = texts(timeline(pipeline(mbs=11)), "box")
    assert "B10" in names
    assert {"0", "9", "10"} <= set(names), "F in short boxes is a number alone, also below 10"
    assert not any(name.startswith("F") for name in names)


def test_the_sentence_stands_under_the_picture():
    conditions = Conditions({"F": F, "B": B}, Links(Link(1e-3, 1e9), Link(1e-3, 1e9)))
    picture = timeline(pipeline(messages=True), conditions=conditions, note="Lesson 8.")
    assert picture.caption.startswith("660 ms in total, of which ranks idle 27.3%; communication ")
    assert (
        "times measured on real ranks; compute padded by sleep to F 20 ms, B 40 ms"
        in picture.caption
    )
    assert "emulated links of 1 ms + bytes / 1 GB/s" in picture.caption
    assert picture.caption.endswith("Lesson 8.")
    assert " ".join(texts(picture, "caption")[0].split()) == picture.caption


def test_a_simulated_run_is_called_so():
    assert "simulated, not measured" in timeline(pipeline(), kind="simulated").caption
    with pytest.raises(ValueError, match="measured, simulated"):
        timeline(pipeline(), kind="dreamt")


@pytest.mark.parametrize(("took", "warned"), [(0.0215, False), (0.025, True)])
def test_a_busy_machine_is_admitted(took, warned):
    trace = Trace(0)
    trace.spans, trace.sleeps = pipeline(), [Sleep(0.02, took)]
    for drawn in (timeline([trace]).caption, terminal_timeline([trace])):
        assert ("The machine was too busy: paced work took 25% too long" in drawn) == warned


def test_overlay_draws_the_simulated_run_above():
    late = [Span(s.rank, s.op, s.start * 1.1, s.end * 1.1, s.stage, s.mb) for s in pipeline()]
    picture = timeline(late, overlay=pipeline())
    assert texts(picture, "lane") == [name for r in range(4) for name in ("simulated", f"rank {r}")]
    assert len(texts(picture, "box")) == 2 * 4 * 16
    assert "726 ms in total" in picture.caption
    assert "outlines simulated: 660 ms, 27.3% idle" in picture.caption
    legend = [text.get_text() for text in picture.legends[0].get_texts()]
    assert legend == ["F forward", "B backward", "idle", "simulated"]


def test_a_second_stage_of_a_rank_is_paler_and_primed():
    spans = [
        Span(0, "F", 0.01 * (2 * mb + chunk), 0.01 * (2 * mb + chunk + 1), stage=2 * chunk, mb=mb)
        for mb in range(3)
        for chunk in range(2)
    ]
    picture = timeline(spans)
    assert texts(picture, "box") == ["F0", "F1", "F2", "F0′", "F1′", "F2′"]
    assert "second stage" in picture.caption
    faces = {
        colors.to_hex(boxes.get_facecolor()[0])
        for boxes in picture.axes[0].collections
        if len(boxes.get_facecolor())
    }
    assert len(faces) == 2


def test_operations_in_flight_at_once_stand_below_each_other():
    picture = timeline(overlapped(1))
    where = {
        text.get_text(): text.get_position()[1]
        for text in picture.findobj(Text)
        if text.get_gid() == "box"
    }
    assert where["bucket 0"] < where["bucket 1"]
    assert where["bucket 0"] == where["bucket 2"]


def test_messages_alone_need_no_line_for_compute():
    spans = [Span(rank, "recv", 0.0, 0.01, axis="world", label="turn 1") for rank in range(2)]
    for source, lanes in ((spans, ["rank 0", "rank 1"]), ([*spans, Span(1, "F", 0.0, 0.01)], None)):
        picture = timeline(source)
        assert texts(picture, "lane") == (lanes or ["rank 0", "world", "rank 1", "world"])
        assert ("idle 50.0%" in picture.caption) == (lanes is None)
    assert timeline(spans).caption.startswith(
        "10 ms in total; communication with its waiting time 10 ms per rank;"
    )
    assert terminal_timeline(spans).startswith("rank 0  turn_1~~~")


def crowded() -> Picture:
    """Every operation that there is, on two axes."""
    spans = [
        Span(rank, op, 0.01 * at, 0.01 * at + 0.0098, axis="tp" if at % 2 else "dp", payload=1)
        for rank in range(2)
        for at, op in enumerate(["all_reduce", "reduce_scatter", "send", "recv", "exchange"])
    ]
    return timeline([*spans, *pipeline(2, 3), Span(0, "loss", 0.19, 0.21)], title="All of them")


def drawn_texts(picture: Picture) -> list[Text]:
    """All texts but the labels of ticks outside the axes, which are there and never drawn."""
    hidden = set()
    for ax in picture.axes:
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in axis.get_major_ticks():
                if not low <= tick.get_loc() <= high:
                    hidden |= {tick.label1, tick.label2}
    every = (text for text in picture.findobj(Text) if text.get_text().strip())
    return [text for text in every if text.get_visible() and text not in hidden]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: timeline(pipeline(messages=True), overlay=pipeline()),
        lambda: timeline(pipeline(8, 24)),
        lambda: timeline(overlapped(16)),
        crowded,
        lambda: ledger_plot([ledger(0)], formula={"dp": 7e5, "tp": 2e5}),
        lambda: memory_plot({"serial": StateBytes(4, 4, 8), "a long name": StateBytes(1, 1, 2)}),
        lambda: live_plot({"a": [(0.0, 0), (0.1, 900), (0.2, 0)], "b": [(5.0, 100), (5.3, 0)]}),
        lambda: fit_plot({"ring": RING, "tree": RING}, {"ring": LINE}),
        lambda: traffic_plot({"tp": [[99_999_000] * 16] * 16}, []),
        lambda: traffic_plot({"tp": [[9_999_000] * 2] * 2, "dp": [[1e9, 500.0]] * 2}, []),
    ],
    ids=[
        "overlay",
        "8 ranks",
        "16 ranks",
        "crowded",
        "ledger",
        "memory",
        "live",
        "fit",
        "traffic of 16 ranks",
        "traffic of 2 ranks",
    ],
)
def test_no_text_lies_on_another_or_outside(draw):
    picture = draw()
    picture.set_dpi(100)
    picture.draw_without_rendering()
    boxes = {}
    for text in drawn_texts(picture):
        boxes[text] = text.get_window_extent().padded(-1.0)
    inches = picture.bbox.padded(2.0)
    for text, box in boxes.items():
        assert inches.contains(box.x0, box.y0), text
        assert inches.contains(box.x1, box.y1), text
    for one, other in itertools.combinations(boxes, 2):
        assert not boxes[one].overlaps(boxes[other]), f"{one} lies on {other}"


def test_in_grey_forward_backward_and_idle_differ():
    """Mean grey of boxes as printed: far enough apart to be told without color."""
    picture = timeline(pipeline())
    pixels = png(picture)[..., :3] @ [0.299, 0.587, 0.114]
    ax, height = picture.axes[0], len(pixels)

    def grey(ms: float) -> float:
        x, y = ax.transData.transform((ms, ax.get_ylim()[0] * 0.03))
        scale = 110 / picture.dpi
        row, column = height - round(y * scale), round(x * scale)
        return float(pixels[row : row + 5, column - 6 : column + 6].mean())

    forward, idle, backward = grey(10), grey(120), grey(220)
    assert idle - forward > 0.05
    assert forward - backward > 0.25


def test_nothing_to_draw_says_so():
    for draw in (timeline, terminal_timeline):
        with pytest.raises(ValueError, match="expected at least one span, got none"):
            draw([])
        with pytest.raises(ValueError, match="expected at least one span, got none"):
            draw([Trace(0)])


def test_a_span_that_ends_before_it_starts_is_named():
    with pytest.raises(ValueError, match="'F' of rank 2, which starts at 2.0 s and ends at 1.0 s"):
        timeline([Span(2, "F", 2.0, 1.0)])


def test_spans_of_no_duration_are_drawn():
    png(timeline([Span(0, "F", 1.0, 1.0)]))
    assert "rank 0" in terminal_timeline([Span(0, "F", 1.0, 1.0)])


def test_ten_thousand_spans_make_few_artists():
    """Time grows with artists: boxes are in collections, and only texts that fit are made."""
    spans = [
        Span(rank, "FB"[at % 2], at * 1e-3, (at + 1) * 1e-3, mb=at)
        for rank in range(16)
        for at in range(640)
    ]
    picture = timeline(spans)
    assert len(picture.axes[0].collections) <= 8
    assert texts(picture, "box") == []
    assert picture.get_figheight() < 9
    assert png(picture).shape[1] == 990


# --- ledger and memory ----------------------------------------------------------------------


def ledger(rank: int) -> Ledger:
    book = Ledger(rank)
    for axis, op, payload, n, control in (
        ("dp", "all_reduce", 400_000, 4, False),
        ("dp", "all_gather", 50_000, 4, False),
        ("tp", "all_reduce", 200_000, 2, False),
        ("tp", "all_reduce", 8, 2, True),
    ):
        book.add(Record(axis, op, op, payload, n, control))
    return book


def test_ledger_plot_stacks_operations_and_leaves_control_out():
    picture = ledger_plot([ledger(rank) for rank in range(4)])
    assert texts(picture, "lane") == ["dp", "tp"]
    assert texts(picture, "box") == ["2.4 MB", "600 kB"]  # one operation alone has its total
    assert texts(picture, "total") == ["3 MB", "800 kB"]
    assert picture.caption == (
        "Wire bytes (formula) of the calls of 4 ranks: 3,000,000 on dp, 800,000 on tp; 32 of "
        "control traffic left out."
    )


def test_ledger_plot_marks_the_formula_and_says_how_far_off():
    books = [ledger(0)]
    same = ledger_plot(books, formula={"dp": Fraction(750_000), "tp": 200_000})
    assert "expected from shapes (black line) are the same" in same.caption
    assert texts(same, "total") == ["750 kB\nformula 750 kB", "200 kB\nformula 200 kB"]
    off = ledger_plot(books, formula={"dp": 750_000, "pp": 1_000})
    assert "differ by up to 1,000" in off.caption
    assert texts(off, "lane") == ["dp", "tp", "pp"]


def test_ledger_plot_of_nothing_says_so():
    with pytest.raises(ValueError, match="no rank sent anything"):
        ledger_plot([Ledger(0)])


KERNEL = {
    "tp": [[0, 607_000, 0, 0], [607_000, 0, 0, 0], [0, 0, 0, 617_000], [0, 0, 617_000, 0]],
    "dp": [[0, 96, 231_000, 0], [0, 0, 0, 231_000], [4_300, 0, 0, 0], [0, 1, 0, 0]],
    "world": [[0, 10, 0, 0], [0] * 4, [0] * 4, [0] * 4],
    "cp": [[0] * 4] * 4,
}


def test_traffic_plot_has_a_matrix_for_each_axis_with_numbers_in_its_cells():
    picture = traffic_plot(KERNEL, [])
    assert texts(picture, "title") == ["tp carries 84% of all bytes (counted by the kernel)"]
    assert texts(picture, "lane") == ["tp: 2.45 MB", "dp: 466 kB"]
    assert sorted(texts(picture, "box")) == sorted(
        ["607"] * 2 + ["617"] * 2 + ["231"] * 2 + ["0.096", "4.3", "0.001"]
    )
    assert "Numbers in kB." in picture.caption
    assert "144 bytes per message" in picture.caption
    assert "Not drawn: world (10 B)." in picture.caption
    chosen = traffic_plot(KERNEL, [], axes=["world", "cp"], title="Control")
    assert texts(chosen, "lane") == ["world: 10 B", "cp: 0 B"]
    assert texts(chosen, "title") == ["Control (counted by the kernel)"]


def test_traffic_plot_says_formula_where_the_kernel_has_no_count():
    books = [ledger(rank) for rank in range(4)]
    for rank, book in enumerate(books):
        book.groups = {"dp": (0, 1, 2, 3), "tp": (rank - rank % 2, rank - rank % 2 + 1)}
    picture = traffic_plot(None, books)
    assert texts(picture, "title") == ["dp carries 79% of all bytes (formula)"]
    assert texts(picture, "box") == ["750"] * 4 + ["200"] * 4
    assert "bytes of the formula: a ring sends to the next rank" in picture.caption
    assert "144" not in picture.caption


def test_traffic_plot_darkens_with_size_and_keeps_its_numbers_readable():
    ax = traffic_plot(KERNEL, []).axes[0]
    faces = {
        (round(box.get_y()), round(box.get_x())): colors.to_hex(box.get_facecolor())
        for box in ax.patches
    }
    assert luminance(faces[2, 3]) < luminance(faces[0, 1]) < luminance(faces[0, 2]) == 1
    for text in ax.texts:
        x, y = text.get_position()
        assert contrast(colors.to_hex(text.get_color()), faces[int(y), int(x)]) > 4.5


@pytest.mark.parametrize("axes", [["ep"], ["tp", "ep"], []])
def test_traffic_plot_of_nothing_or_of_no_axis_says_so(axes):
    with pytest.raises(ValueError, match="no traffic to draw"):
        traffic_plot(KERNEL if axes else {}, [], axes=axes or None)


def test_memory_plot_stacks_what_a_rank_keeps():
    rows = {"serial": StateBytes(1000, 1000, 2000), "ZeRO-3": StateBytes(250, 250, 500)}
    picture = memory_plot(rows, activations={"serial": 4000})
    assert texts(picture, "total") == ["8,000 B", "1,000 B"]
    assert texts(picture, "box")[:4] == ["1,000 B", "1,000 B", "2,000 B", "4,000 B"]
    assert picture.caption.startswith(
        "Most memory: serial with 8,000 B; least memory: ZeRO-3 with 1,000 B (12%)."
    )
    legend = [text.get_text() for text in picture.legends[0].get_texts()]
    assert legend == ["parameters", "gradients", "optimizer", "activations"]


def test_memory_plot_refuses_rows_that_are_not_there():
    with pytest.raises(ValueError, match="at least one row"):
        memory_plot({})
    with pytest.raises(ValueError, match=r"activations for \['dp'\]"):
        memory_plot({"serial": StateBytes(1)}, activations={"dp": 1})


def test_live_plot_marks_each_peak():
    lines = {"serial": [(3.0, 0), (3.1, 20_000), (3.2, 0)], "recompute": [(9.0, 0), (9.2, 11_000)]}
    picture = live_plot(lines)
    assert texts(picture, "peak") == ["20 kB", "11 kB"]
    assert "serial 20 kB, recompute 11 kB" in picture.caption
    assert picture.axes[0].get_xlim() == pytest.approx((0, 200))
    stretched = live_plot(lines, stretched=True)
    assert stretched.axes[0].get_xlim() == pytest.approx((0, 100))
    assert stretched.axes[0].get_xlabel() == "share of the step (%)"
    ends = [line.get_xdata()[-1] for line in stretched.axes[0].lines[::2]]
    assert ends == pytest.approx([100, 100])
    assert texts(stretched, "peak") == ["20 kB", "11 kB"]


def test_live_plot_refuses_what_it_cannot_show():
    with pytest.raises(ValueError, match=r"no points for \['a'\]"):
        live_plot({"a": []})
    with pytest.raises(ValueError, match="at most 4 lines, got 5"):
        live_plot({str(number): [(0.0, 1)] for number in range(5)})


# --- time against bytes ---------------------------------------------------------------------

RING = {1_000: 0.0011, 100_000: 0.0021, 10_000_000: 0.05}


def LINE(size: float) -> float:
    return 0.001 + size / 1e8


def test_fit_plot_has_points_and_lines_and_says_which_point_is_farthest():
    picture = fit_plot({"ring": RING, "tree": {1_000: 0.002}}, {"ring": LINE}, note="On 2 cores.")
    points, line, alone = picture.axes[0].lines
    assert list(points.get_xdata()) == list(RING)
    assert list(points.get_ydata()) == list(RING.values())
    assert [line.get_xdata()[at] for at in (0, -1)] == pytest.approx([1_000, 10_000_000])
    assert line.get_ydata()[-1] == pytest.approx(LINE(10_000_000))
    assert list(alone.get_xdata()) == [1_000]
    assert "farthest from its line is ring at 10 MB, 0.5 times the model. On 2" in picture.caption
    legend = [text.get_text() for text in picture.legends[0].get_texts()]
    assert legend == ["ring", "tree"]


def test_fit_plot_refuses_what_it_cannot_show():
    with pytest.raises(ValueError, match=r"no points for \['ring'\]"):
        fit_plot({"ring": {}}, {})
    with pytest.raises(ValueError, match=r"lines for \['tree'\]"):
        fit_plot({"ring": RING}, {"tree": LINE})
    with pytest.raises(ValueError, match="at most 4 names, got 5"):
        fit_plot({str(number): RING for number in range(5)}, {})


def test_sizes_beyond_the_largest_unit_have_no_exponent():
    assert [size_text(size) for size in (9_999, 2.4e6, 999.6e6, 1.1289e12)] == [
        "9,999 B",
        "2.4 MB",
        "1,000 MB",
        "1,129 GB",
    ]


ROOFS = {"fast": (1e12, 1e11), "slow": (1e12, 1e9)}


def test_roofline_bends_where_peak_and_bandwidth_meet():
    picture = roofline({"products": {1.0: 9e10, 100.0: 8e11}}, ROOFS, title="T", note="Here.")
    fast, slow, products = picture.axes[0].lines
    for line, bend in ((fast, 10), (slow, 1_000)):
        assert [line.get_xdata()[1], line.get_ydata()[1]] == [bend, 1e12]
        assert line.get_ydata()[0] == pytest.approx(1e12 / bend * line.get_xdata()[0])
        assert line.get_ydata()[2] == 1e12
    assert dict(zip(*products.get_data(), strict=True)) == {1.0: 9e10, 100.0: 8e11}
    assert "Fast bends at 10; slow bends at 1,000 FLOPs per byte" in picture.caption
    assert picture.caption.endswith("Here.")
    legend = [text.get_text() for text in picture.legends[0].get_texts()]
    assert legend == ["fast", "slow", "products"]
    assert [rate_text(rate) for rate in (2e9, 4e14)] == ["2 GFLOP/s", "400 TFLOP/s"]


def test_roofline_refuses_what_it_cannot_show():
    with pytest.raises(ValueError, match="at least one roof"):
        roofline({}, {})
    with pytest.raises(ValueError, match="at most 4 names, got 9"):
        roofline({}, {str(number): (1.0, 1.0) for number in range(9)})


# --- Perfetto and the terminal --------------------------------------------------------------


def load(path) -> tuple[list[dict], dict[int, str], dict[tuple[int, int], str]]:
    """Complete events, process names by pid and thread names by (pid, tid)."""
    events = json.loads(path.read_text())["traceEvents"]
    names = [event for event in events if event["ph"] == "M"]
    processes = {e["pid"]: e["args"]["name"] for e in names if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in names if e["name"] == "thread_name"}
    return [event for event in events if event["ph"] == "X"], processes, threads


def test_perfetto_has_a_process_for_each_rank_and_microseconds(tmp_path):
    spans = [Span(s.rank, s.op, s.start + 77, s.end + 77, s.stage, s.mb) for s in pipeline()]
    path = perfetto(spans, tmp_path / "new" / "run.json")
    events, processes, threads = load(path)
    assert processes == {rank: f"rank {rank}" for rank in range(4)}
    assert set(threads.values()) == {"compute"}
    assert len(events) == len(spans)
    first = min(events, key=lambda event: event["ts"])
    assert (first["ts"], first["pid"], first["name"], first["cat"]) == (0, 0, "F0", "compute")
    assert first["args"] == {"stage": 0, "mb": 0}
    assert first["dur"] == pytest.approx(20_000)
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(660_000)


def test_perfetto_puts_axes_and_what_overlaps_on_threads_of_their_own(tmp_path):
    events, _, threads = load(perfetto(overlapped(2), tmp_path / "run.json"))
    assert [threads[0, tid] for tid in (1, 2, 3)] == ["compute", "comm dp", "comm dp (2)"]
    bucket = next(event for event in events if event["name"] == "all_reduce")
    assert bucket["args"] == {"axis": "dp", "label": "bucket 0", "payload": 1 << 20}
    by_thread = itertools.groupby(
        sorted(events, key=lambda e: (e["pid"], e["tid"], e["ts"])), lambda e: (e["pid"], e["tid"])
    )
    for _, lane in by_thread:
        for one, following in itertools.pairwise(lane):
            assert one["ts"] + one["dur"] <= following["ts"] + 1e-2


def test_perfetto_of_nothing_writes_no_file(tmp_path):
    with pytest.raises(ValueError, match="expected at least one span"):
        perfetto([], tmp_path / "run.json")
    assert list(tmp_path.iterdir()) == []


def test_terminal_timeline_is_ascii_and_to_scale():
    drawn = terminal_timeline(pipeline(2, 2), width=68, kind="simulated").splitlines()
    # 180 ms on 60 columns: 20 ms are 6 or 7 of them, 40 ms are 13 or 14.
    idle, wait = "." * 14, "." * 7
    assert drawn[0] == f"rank 0  F0-----F1----{idle}B0==========={wait}B1==========="
    assert all(line.isascii() for line in drawn)
    assert len(drawn) == 4
    assert drawn[2].endswith("180 ms")
    assert drawn[3].startswith("180 ms in total, of which ranks idle 33.3%")


def test_terminal_timeline_shows_what_is_in_flight():
    drawn = terminal_timeline(overlapped(1), width=100).splitlines()
    assert drawn[1].strip().startswith("dp")
    assert "bucket_0" in drawn[1]
    assert "bucket_1" in drawn[2]
    with pytest.raises(ValueError, match="width=5"):
        terminal_timeline(overlapped(), width=5)
