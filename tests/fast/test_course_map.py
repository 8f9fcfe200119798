"""The sheet: every figure follows from shapes, and the page says what the table says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from course_lib.cli import main
from course_lib.model import parameter_count
from course_lib.view import course_map as sheet
from course_lib.view.course_map import table
from course_lib.view.course_map.rows import MODEL, SEQ_LEN, SEQUENCES

P = 6_738_415_616  # of Llama 2 7B, as published weights count
GB = 10**9
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rows():
    return {row.name: row for row in sheet.rows()}


def test_the_example_is_llama_2_7b():
    assert parameter_count(MODEL) == P
    assert sheet.compute_seconds() == pytest.approx(6 * P * 32 * 4096 / (8 * 0.4 * 989e12))


def test_state_is_that_of_the_zero_paper(rows):
    eighth = P / 8
    wanted = {"DP": 16 * P, "ZeRO-1": 4 * P + 12 * eighth, "ZeRO-2": 2 * P + 14 * eighth}
    for name, state in (wanted | {"ZeRO-3": 16 * eighth, "CP, ring": 16 * P}).items():
        assert rows[name].state == state


def test_sent_follows_from_the_textbook(rows):
    share = 7 / 8
    assert rows["DP"].sent == 2 * share * 4 * P
    micro_batches = SEQUENCES // 8
    # whole batches of gradients in float32, weights in bfloat16; padding is below a part in 10**6
    assert rows["ZeRO-1"].sent == pytest.approx(share * (4 + 2) * P, rel=1e-6)
    assert rows["ZeRO-2"].sent == pytest.approx(share * (4 * micro_batches + 2) * P, rel=1e-6)
    x_bytes = SEQUENCES * SEQ_LEN * MODEL.hidden * 2
    tensor = (4 * MODEL.layers + 2) * 2 * share * x_bytes
    loss = 3 * 2 * share * SEQUENCES * SEQ_LEN * 4
    assert rows["TP"].sent == tensor + loss
    norms = 2 * share * (2 * MODEL.layers + 1) * MODEL.hidden * 2
    assert rows["TP + SP"].sent == tensor + loss + norms
    assert rows["PP, 1F1B"].sent == 2 * 7 * x_bytes / 8
    assert rows["PP, ZB-V"].sent == 2 * rows["PP, 1F1B"].sent


def test_bubbles(rows):
    assert rows["PP, 1F1B"].idle == pytest.approx(7 / (32 + 7))
    assert 0 < rows["PP, ZB-V"].idle < rows["PP, 1F1B"].idle / 3
    assert {row.idle for row in rows.values() if not row.name.startswith("PP")} == {0.0}


def test_what_each_technique_is_for_shows(rows):
    assert min(rows.values(), key=lambda row: row.activations).name == "CP, ring"
    assert min(rows.values(), key=lambda row: row.sent).name == "PP, 1F1B"
    assert rows["TP + SP"].activations < rows["TP"].activations < rows["DP"].activations
    assert rows["TP"].state < 0.13 * rows["DP"].state


def test_the_page_has_every_row_inside_its_edges(rows):
    page = sheet.course_map()
    page.canvas.draw()
    ax = page.axes[0]
    words = [text.get_text() for text in ax.texts]
    for row in rows.values():
        assert row.name in words
        assert f"{float(row.state) / GB:.1f}" in words
    edge = page.bbox
    for text in ax.texts:
        box = text.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= edge.x1, f"{text.get_text()!r} runs off the page"
    boxes = [text.get_window_extent() for text in ax.texts]
    for at, one in enumerate(boxes):
        for other, text in zip(boxes[at + 1 :], ax.texts[at + 1 :], strict=True):
            assert not one.shrunk(0.95, 0.6).overlaps(other.shrunk(0.95, 0.6)), text.get_text()


def test_course_map(capsys, tmp_path):
    assert (
        main(["map", "--pdf", str(tmp_path / "map.pdf"), "--png", str(tmp_path / "map.png")]) == 0
    )
    out = capsys.readouterr().out
    assert "ZeRO-3" in out
    assert "In which order" in out
    assert (tmp_path / "map.pdf").read_bytes().startswith(b"%PDF")
    assert main(["map", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in data} >= {"DP", "EP, 8 experts"}
    assert data[0]["state"] == 16 * P


def test_the_printed_table_is_of_today_s_formulas(capsys, rows):
    """`python -m course_lib.view.course_map.table` writes it anew."""
    assert json.loads(table.FILE.read_text()) == table.table()
    assert main(["map"]) == 0
    printed = {
        line[:14].strip(): line[14:].split() for line in capsys.readouterr().out.splitlines()
    }
    for row in rows.values():
        gigabytes = [f"{float(n) / GB:.1f}" for n in (row.state, row.activations, row.sent)]
        seconds = [f"{row.seconds(link):.2f}" for link in (sheet.NODE, sheet.NETWORK)]
        assert printed[row.name] == [*gigabytes, *seconds, *[f"{row.idle:.0%}"] * bool(row.idle)]


def test_a_file_that_cannot_be_written(capsys, tmp_path):
    assert main(["map", "--pdf", str(tmp_path / "no" / "map.pdf")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_the_sheet_in_docs_is_of_today_s_formulas():
    """`course map --png docs/course-map.png --pdf docs/course-map.pdf` makes both anew."""
    with Image.open(ROOT / "docs" / "course-map.png") as image:
        assert image.text["Description"] == sheet.course_map().caption
