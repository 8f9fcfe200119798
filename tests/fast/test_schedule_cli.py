"""``course schedule``: data, drawing, picture, rows of one's own, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from course_lib import cli
from course_lib.schedule import Costs, drawing, make, score, simulate, write_csv


def run(capfd, *arguments: str) -> str:
    """Stdout of a verb that succeeds."""
    assert cli.main(["schedule", *map(str, arguments)]) == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    return printed.out


def data(capfd, *arguments: str) -> dict:
    return json.loads(run(capfd, *arguments, "--json"))


@pytest.fixture
def own(tmp_path):
    """Writes a file of rows and returns its path."""

    def write(text: str, name: str = "mine.csv"):
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


LINE = "schedule 1f1b --stages 4 --microbatches 8 --f 1 --b 2 --comm 0 --json".split()


def test_json_has_these_keys_and_numbers(capfd):
    assert cli.main(LINE) == 0
    result = json.loads(capfd.readouterr().out)
    assert list(result) == ["name", "rows", "makespan", "span", "bubble", "peak_in_flight"]
    assert (result["name"], result["makespan"], result["span"]) == ("1f1b", 33.0, 33.0)
    assert result["bubble"] == {
        "of_total": pytest.approx(9 / 33),
        "of_ideal": pytest.approx(9 / 24),
    }
    assert result["peak_in_flight"] == [4, 3, 2, 1]
    assert [len(row) for row in result["rows"]] == [16] * 4
    assert result["rows"][0][0] == {"op": "F", "stage": 0, "mb": 0, "start": 0.0, "end": 1.0}
    assert result["rows"][3][1] == {"op": "B", "stage": 3, "mb": 0, "start": 4.0, "end": 6.0}


def test_neither_data_nor_drawing_needs_torch():
    """Both answer at once, as a shell sees them: the data alone on stdout."""
    script = (
        "import sys; from course_lib.cli import main;"
        f"code = main({LINE!r}) or main(['schedule', 'gpipe']);"
        "heavy = {'torch', 'numpy', 'matplotlib'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout.splitlines()[0])["makespan"] == 33


def test_defaults(capfd):
    result = data(capfd, "gpipe")
    assert len(result["rows"]) == 4
    assert {cell["mb"] for cell in result["rows"][0]} == set(range(8))
    assert result["makespan"] == (8 + 3) * (1 + 2)
    assert data(capfd, "gpipe", "--f", 2)["makespan"] == (8 + 3) * (2 + 4)
    assert data(capfd, "GPipe")["name"] == "gpipe"


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "dualpipe-v"])
def test_costs_are_those_of_the_library(capfd, name):
    result = data(capfd, name, "--stages", 3, "--microbatches", 5, "--f", 1.5, "--i", 1, "--w", 0.5,
                  "--comm", 0.25)  # fmt: skip
    costs = Costs(1.5, 1, 0.5, 0.25)
    expected = simulate(make(name, 3, 5, costs=costs), costs)
    assert result == json.loads(json.dumps(expected.as_dict()))
    if name in ("zb-h1", "dualpipe-v"):
        return  # they have halves, which may be unequal
    same = data(capfd, name, "--stages", 3, "--microbatches", 5, "--f", 1.5, "--b", 1.5,
                "--comm", 0.25)  # fmt: skip
    assert same == result


def test_stages_are_ranks_and_chunks_are_stages_of_a_rank(capfd):
    result = data(capfd, "gpipe", "--stages", 2, "--chunks", 3, "--microbatches", 1)
    assert len(result["rows"]) == len(result["peak_in_flight"]) == 2
    assert [cell["stage"] for cell in result["rows"][1]] == [1, 3, 5, 5, 3, 1]
    assert result["peak_in_flight"] == [3, 3]


@pytest.mark.parametrize("name", ["interleaved", "zb-v", "dualpipe-v"])
def test_two_chunks_are_implied_and_accepted(capfd, name):
    result = data(capfd, name)
    assert result == data(capfd, name, "--chunks", 2)
    assert {cell["stage"] for row in result["rows"] for cell in row} == set(range(8))
    makespan = {"interleaved": 57, "zb-v": 51, "dualpipe-v": 51}[name]
    assert result["makespan"] == makespan


def test_zero_bubble_is_made_for_the_costs_given(capfd):
    line = ("zb-v", "--f", 10, "--i", 15, "--w", 5)
    costs = Costs(10, 15, 5)
    assert data(capfd, *line)["makespan"] == 535
    assert simulate(make("zb-v", 4, 8), costs).makespan > 535


def test_unequal_stages_and_ranks(capfd):
    slow = data(capfd, "zb-v", "--speed", "1,1,0.5,1")
    assert data(capfd, "zb-v", "--stage-cost", "1,1,2,1,1,2,1,1") == slow
    last = [cell for cell in slow["rows"][2] if cell["op"] == "F"][-1]
    assert last["end"] - last["start"] == 2
    halves = data(capfd, "1f1b", "--stage-cost", "1,1,1,1:1:3")
    assert [cell["end"] - cell["start"] for cell in halves["rows"][3][:2]] == [1, 4]
    assert "Stages cost 1, 1, 1, 1:1:3 times that." in " ".join(
        run(capfd, "1f1b", "--stage-cost", "1,1,1,1:1:3").split()
    )


def test_a_search_within_a_limit_and_a_check_of_one(capfd):
    found = data(capfd, "searched", "--limit", 3)
    assert (found["name"], found["makespan"], found["peak_in_flight"]) == ("searched", 32, [3] * 4)
    assert data(capfd, "searched", "--chunks", 2)["makespan"] == 51
    assert data(capfd, "gpipe", "--limit", 8)["peak_in_flight"] == [8] * 4
    assert "rank 0, cell 3: 0F3 makes 4 in flight, 3 are" in refused(capfd, "1f1b", "--limit", 3)


def test_score(capfd, own):
    path = own(write_csv(make("1f1b", 4, 8)))
    points = data(capfd, "--file", path, "--score")["score"]
    assert points == json.loads(json.dumps(score(make("1f1b", 4, 8), Costs())))
    assert points["efficiency"] == pytest.approx(27 / 33)
    text = run(capfd, "--file", path, "--score")
    assert re.search(r"mine +33 +33 +27.3% +4\n1f1b +33 +33 +27.3% +4\nzb-h1 +27 +27", text)
    assert "score" not in data(capfd, "--file", path)


def test_drawing_fits_eighty_columns_and_is_plain(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = run(capfd, "1f1b")
    assert text == drawing(simulate(make("1f1b", 4, 8), Costs.make())) + "\n"
    lines = text.splitlines()
    assert max(map(len, lines)) == 80
    assert text.isascii()
    assert "\x1b" not in text
    # Idle columns: three on each side of the last rank, which is the triangle.
    assert lines[4].startswith("rank 3 ......F0B0==F1B1==")
    assert lines[4].endswith("B7==............ peak 1")
    said = " ".join(text.split())
    assert "Makespan 33" in said
    assert "27.3% of total time, 37.5% of ideal time" in said


def test_picture(capfd, tmp_path):
    path = tmp_path / "new" / "picture.png"
    assert run(capfd, "gpipe", "--png", path).endswith(f"The picture is in {path}.\n")
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    path.unlink()
    assert data(capfd, "gpipe", "--png", path)["makespan"] == 33
    assert path.exists()


def test_rows_of_ones_own(capfd, own):
    path = own(write_csv(make("1f1b", 3, 4)))
    result = data(capfd, "--file", path)
    assert result == {**data(capfd, "1f1b", "--stages", 3, "--microbatches", 4), "name": "mine"}
    assert "mine, 3 ranks, 4 micro-batches" in run(capfd, "--file", path, "--stages", 3)
    spread = own("\ufeff0F0,,0B0\r\n ,1F0 , 1I0,1W0\r\n\r\n,,\r\n")
    result = data(capfd, "--file", spread, "--i", 2, "--w", 3)
    assert [[cell["op"] for cell in row] for row in result["rows"]] == [["F", "B"], ["F", "I", "W"]]
    assert result["makespan"] == 1 + 1 + 2 + 5


REFUSED = {
    "deadlock": (
        "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1",
        r"mine.csv: deadlock: no rank can continue; rank 0 is at cell 1, 0B0, and waits for 1B0 of "
        r"rank 1, which has it in cell 2; rank 1 is at cell 1, 1F1, and waits for 0F1 of rank 0",
    ),
    "missing": ("0F0,0B0\n1F0", r"rank 1: micro-batch 0 on stage 1 has no backward \(1B0 is"),
    "order": ("0F0,0B0\n1B0,1F0", r"mine.csv: rank 1, cell 0: 1B0 comes before 1F0 \(cell 1\)"),
    "double": ("0F0,0F0,0B0", r"rank 0, cell 1: 0F0 is done a second time"),
    "home": ("0F0,0B0\n0F1,0B1", r"rank 1, cell 0: 0F1 is on stage 0, which rank 0 holds"),
    "cell": ("0F0,backward", r"rank 0, cell 1: 'backward' is no action: write stage"),
    "nothing": ("", r"there is no action in any row"),
    "no text": (b"\x89PNG\r\n\x1a\n\xff\xfe", r"this is no text file"),
    "zeros": (b"\x00\x00", r"mine.csv"),
}


def refused(capfd, *arguments: str) -> str:
    """The one sentence on stderr of a verb that ends with 2."""
    assert cli.main(["schedule", *map(str, arguments)]) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"[^\n]{10,400}\.\n", printed.err), printed.err
    assert ". " not in printed.err
    assert "Traceback" not in printed.err
    return printed.err


@pytest.mark.parametrize(("text", "reason"), REFUSED.values(), ids=REFUSED)
def test_an_illegal_schedule_is_refused_with_reason_and_place(capfd, own, text, reason):
    path = own(text)
    assert re.search(reason, refused(capfd, "--file", path, "--json"))


def test_sizes_that_are_not_those_of_the_file(capfd, own):
    path = own(write_csv(make("gpipe", 2, 3, 2)))
    data(capfd, "--file", path, "--stages", 2, "--microbatches", 3, "--chunks", 2)
    for option, wrong in (("--stages", 3), ("--microbatches", 4), ("--chunks", 1)):
        assert f"{option} {wrong}: mine.csv has" in refused(capfd, "--file", path, option, wrong)


def test_files_that_cannot_be_used(capfd, tmp_path):
    assert "cannot be read" in refused(capfd, "--file", tmp_path / "none.csv")
    assert "cannot be read" in refused(capfd, "--file", tmp_path)
    assert "cannot be written" in refused(capfd, "gpipe", "--png", tmp_path)
    (tmp_path / "plain").write_text("")
    assert "cannot be written" in refused(capfd, "gpipe", "--png", tmp_path / "plain" / "a.png")


BAD = [
    "",
    "zb-h9",
    "gpipe --file rows.csv",
    "gpipe --microbatches 0",
    "gpipe --microbatches -3",
    "gpipe --stages 0",
    "gpipe --chunks 0",
    "gpipe --stages 2.5",
    "gpipe --f -1",
    "gpipe --b -0.5",
    "gpipe --i 1",
    "gpipe --w 1",
    "gpipe --b 3 --i 1 --w 1",
    "gpipe --b 1 --i 2",
    "gpipe --f nan",
    "gpipe --comm inf",
    "gpipe --f one",
    "gpipe --f 0 --b 0",
    "gpipe --comm -1",
    "gpipe --f 1e-320",
    "zb-h1 --f 1e-320",
    "gpipe --stage-cost 0,0,0,0",
    "zb-h1 --stage-cost 0,0,0,0",
    "zb-h1 --f 0 --i 1 --w 1 --stage-cost 1:0:0,1:0:0,1:0:0,1:0:0",
    "gpipe --microbatches 20000 --score",
    "gpipe --stages 1000000 --microbatches 1000000",
    "zb-v --stages 64 --microbatches 1000",
    "searched --stages 64 --microbatches 200",
    "1f1b --chunks 2",
    "zb-h1 --chunks 2",
    "zb-v --chunks 1",
    "dualpipe-v --chunks 3",
    "zb-v --speed 1,1",
    "zb-v --speed 1,1,0,1",
    "zb-v --speed 1,1,fast,1",
    "zb-h1 --stage-cost 1,1",
    "zb-h1 --stage-cost 1,1,1,1:2",
    "zb-h1 --stage-cost 1,1,1,-1",
    "zb-h1 --stage-cost ,",
    "searched --limit 0",
    "searched --chunks 2 --limit 1",
    "1f1b now",
    "1f1b --frobnicate",
]


@pytest.mark.parametrize("line", BAD)
def test_what_is_impossible_is_a_sentence(capfd, line):
    refused(capfd, *line.split())
    refused(capfd, *line.split(), "--json")
