"""The calibration score: true values as the lessons print them, and notebooks of learners."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from course_lib.interview import calibration
from course_lib.interview.calibration import Guess, Score, equal, score, value_of, vote_of
from course_lib.interview.predictions import MACHINE, truths

ROOT = Path(__file__).parents[2]
LESSONS = {
    path.stem.partition("_")[0]: path for path in (ROOT / "notebooks").glob("[0-9]*_*.ipynb")
}
# What the executed lessons print: a group, or the value beside it, for each prediction.
PRINTED = {
    "00": {
        "value": r"every rank holds ([\d.]+)",
        "bytes": r"a rank sent (\d+) bytes; formula",
        "dp_group": r"rank 5 averages with (\[.*?\])",
        "axis": r"groups that cross: (\w+);",
    },
    "01": {
        "gb_7b": r"^7B +32 .* ([\d.]+) +100 +2$",
        "gpus_405b": r"^405B +126 .* (\d+)$",
        "days_70b": r"^70B +1\.5e\+13.*? ([\d,]+) +509",
        "cache_gb": r"^70B +8,192 .* ([\d.]+)$",
        "speedup": "1.90",  # by formula; the run measures less
    },
    "02": {
        "ring_bytes": r"^ring formula +([\d,]+)",
        "tree_bytes": r"^tree formula +([\d,]+)",
        "ring_ms": r"^ 1,000,000 +(\d+)",
        "tree_ms": r"^ 1,000,000 +\d+ +\d+ +(\d+)",
        "crossing": r"crossing by formula ([\d,]+) bytes",
    },
    "03": {
        "growth": r"128 ranks against 64: ([\d.]+);",
        "calls": r"^naive +(\d+) ",
        "bytes": r"^bucketed +3 +([\d,]+)",
        "bytes_m4": r"any number of micro-batches sends ([\d,]+) bytes",
        "exposed": r"overlap cannot hide ([\d.]+) of it",
        "error": r"mean of the ranks' means +relative error of the gradient ([\d.]+)",
    },
    "04": {
        "gb": r"^ +64 +([\d.]+) ",
        "stage_1": r"^zero 1 .*? ([\d.]+)  +8,070,940",
        "stage_2_m4": r"^4 +1\.00 +1\.00 +([\d.]+)",
        "stage_3": r"^zero 3 .*? ([\d.]+)  +4,035,512",
        "peak": r"^zero 3 +peak .*, ([\d.]+) of DP",
    },
    "05": {
        "calls": r"^(\d) all-reduces per layer",
        "bytes": r"^ +4 +\d\.\d+ +8 \+ 8 +([\d,]+)",
        "saved": r"^ +4 +929,792 +929,792 +([\d.]+)",
        "hidden": r"^TP, one node +\d+ +\d+ +([\d.]+)",
    },
    "06": {
        "bytes": r"^rows, kept +32 +([\d,]+)",
        "saved": r"^rows, kept .* ([\d.]+)$",
        "selective": r"^selective frees ([\d.]+) of",
    },
    "06b": {"loss": r"^sent ([\d,]+) bytes;"},
    "07": {
        "gpipe_ms": r"^gpipe +(\d+) +\d+ +\d+ +0\.",
        "bubble_of_total": r"^gpipe +\d+ +\d+ +\d+ +(0\.\d+)",
        "peak_gpipe": r"^0 +1 +(\d) ",
        "peak_1f1b": r"^0 +1 +8 +(\d) ",
        "bytes": r"^gpipe +formula ([\d,]+) bytes",
        "ratio": r"^4 ranks against 1: ([\d.]+);",
    },
    "08": {
        "interleaved": r"^ +2 +([\d.]+) ",
        "sends": "2.33",  # 7 boundaries instead of 3
        "zb_h1": r"^zb-h1 +([\d.]+)",
        "saved": r"^fraction ([\d.]+);",
        "best": r"stage per rank takes less than (\d+)",
    },
    "09": {
        "busiest": r"^contiguous: busiest over mean ([\d.]+)",
        "forward": r"^a rank sends forward ([\d,]+) bytes",
        "step": r"^forward and backward ([\d,]+):",
        "least": r"^(gather) +49,152",
        "targets": r"on the rank, (\d+) of 64 targets",
    },
    "10": {
        "elsewhere": r"([\d.]+) of the pairs cross",
        "bytes": r"ep = 4 would send ([\d,]+) bytes",
        "busiest": r"^busiest rank over mean: ([\d.]+)",
        "dropped": r"^skew 0, capacity factor 1\.0: ([\d.]+) dropped",
        "factor": r"^averaged, ep = 4 +([\d.]+)",
    },
    "11": {
        "one_group": r"^one group +(\d+) ms",
        "own_groups": r"^own groups +(\d+) ms",
        "shared": r"^own groups, one link +(\d+) ms",
        "new_groups": r"new_group calls of each rank: .*\}, (\d+);",
        "sums": r"^returned \[(\[101\.0, 101\.0\]), ",
    },
    "12": {
        "group": r"^rank 5: .*'dp': (\[5, 7\])",
        "axis": r"^most bytes: \{'3D': '(\w+)'",
        "norm": r"^all ranks, all of it: .*, ([\d.]+) times",
        "tokens": r"^h = 64: 3h = (\d+) tokens",
    },
    "13": {
        "rows": r"share ([\d.]+), your",
        "cache": r"formula ([\d,]+); your",
        "steps": r"^continuous, 4 slots: (\d+) steps",
    },
    "13b": {
        "calls": r"^4 +(\d+) +1,089,984",
        "busy": r"^ +1 +2 +([\d.]+) ",
        "winner": r"^ 8 requests: .*ahead is (\w+)",
        "winner_64": r"^64 requests: .*ahead is (\w+)",
    },
    "14": {
        "gb": r"^tp8 dp8, ZeRO-1 +[\d.]+ +[\d.]+ +([\d.]+)",
        "factor": r"^ZeRO-2 / ZeRO-1: ([\d.]+);",
        "crosses": r"^  (\w+)  4 groups of 4, across nodes",
        "speedup": r"^pp, 8 micro-batches +([\d.]+)",
    },
    "16": {"gb": r"bytes = ([\d.]+) GB"},
}


def printed(number: str) -> str:
    cells = json.loads(LESSONS[number].read_text())["cells"]
    outputs = (out for cell in cells for out in cell.get("outputs", []))
    return "\n".join("".join(out.get("text", "")) for out in outputs)


@pytest.mark.parametrize("number", sorted(PRINTED))
def test_the_true_values_are_those_that_the_lesson_prints(number):
    text = printed(number)
    assert set(PRINTED[number]) == set(truths()[number])
    for name, pattern in PRINTED[number].items():
        found = re.search(pattern, text, re.MULTILINE) if "(" in pattern else None
        assert found or "(" not in pattern, name
        shown, true = found[1] if found else pattern, truths()[number][name]
        if isinstance(true, str | list):
            assert equal(json.loads(shown) if "[" in shown else shown, true), name
        else:
            digits = len(shown.partition(".")[2])
            assert f"{true:.{digits}f}" == shown.replace(",", ""), name


def test_every_prediction_of_the_course_has_a_true_value():
    asked = {
        (path.stem.partition("_")[0], name)
        for path in (ROOT / "notebooks").glob("[0-9]*.py")
        for name in re.findall(r"^predicted_(\w+) = None", path.read_text(), re.MULTILINE)
    }
    assert asked == {(n, name) for n, own in truths().items() for name in own} | set(MACHINE)
    for (number, _), pattern in MACHINE.items():
        assert re.search(pattern, printed(number))


@pytest.mark.parametrize("number", sorted(LESSONS))
def test_every_vote_of_the_course_is_settled(number):
    source = LESSONS[number].with_suffix(".py").read_text()
    votes = re.findall(r"^vote_(\d+) = None", source, re.MULTILINE)
    assert list(calibration.settled(LESSONS[number], number)) == votes


@pytest.fixture
def root(tmp_path) -> Path:
    """A course of three lessons, of which none was begun."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "work" / "notebooks").mkdir(parents=True)
    for number in ("01", "02", "03"):
        shutil.copy(LESSONS[number], tmp_path / "notebooks")
    return tmp_path


def typed(root: Path, number: str, **values: str) -> Path:
    """Begin a lesson and type values into it, as a learner does."""
    notebook = json.loads(LESSONS[number].read_text())
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        for name, text in values.items():
            source = re.sub(rf"^{name} = None", f"{name} = {text}", source, flags=re.MULTILINE)
        cell["source"] = source
    own = root / "work" / "notebooks" / LESSONS[number].name
    own.write_text(json.dumps(notebook))
    return own


def test_nothing_typed_is_nothing_counted(root):
    assert score(root) == Score()
    assert "course start 01" in str(score(root))
    typed(root, "01")
    assert score(root) == Score(blank=5)


def test_predictions_and_votes_are_compared(root):
    typed(
        root,
        "01",
        predicted_gb_7b="7 * 16",
        predicted_gpus_405b="11",
        predicted_days_70b='"150,000"',
        predicted_speedup="4",
        vote_1='"false"',
        vote_2="True",
    )
    found = score(root)
    assert [(guess.name, guess.given) for guess in found.guesses] == [
        ("gb_7b", 112),
        ("gpus_405b", 11),
        ("days_70b", 150000),
        ("speedup", 4),
    ]
    assert (found.within(2), found.within(1.1), found.blank) == (2, 1, 1)
    assert found.votes == [("01", "1", True), ("01", "2", False)]
    assert not found.unread + found.damaged + found.left_out
    text = str(found)
    assert re.search(r"^01  Why parallelism +2 of 4 +1 of 4 +close +1 of 2$", text, re.MULTILINE)
    assert "Within a factor 2: 2 of 4.\nToo low: 1. Too high: 1." in text
    assert "1 predictions" in text
    assert found.as_dict()["within_2"] == 2
    json.dumps(found.as_dict())


def test_alpha_is_read_from_the_learners_own_run(root):
    own = typed(root, "02", predicted_alpha="50", predicted_ring_bytes="1.5e6")
    true = float(re.search(MACHINE["02", "alpha"], own.read_text())[1])
    assert score(root).guesses[-1] == Guess("02", "alpha", 50, true)
    own.write_text(re.sub("alpha = [0-9.]+ micro", "", own.read_text()))
    found = score(root)
    assert [guess.name for guess in found.guesses] == ["ring_bytes"]
    assert "predicted_alpha of lesson 02 depends on the machine" in found.left_out[0]


def test_a_damaged_notebook_is_named_and_the_others_count(root):
    for number, text in {"01": "{", "02": '{"cells": [1]}'}.items():
        (root / "work" / "notebooks" / LESSONS[number].name).write_text(text)
    typed(root, "03", predicted_calls="39", predicted_growth="open('x')", vote_1='"maybe"')
    found = score(root)
    assert len(found.guesses) == 1
    assert [re.match(r"work/notebooks/(\d\d)_", said)[1] for said in found.damaged] == ["01", "02"]
    assert "course start 02 --fresh" in found.damaged[1]
    assert [said.split(":")[0] for said in found.unread] == [
        "vote_1 of lesson 03",
        "predicted_growth of lesson 03",
    ]
    assert all(said in str(found) for said in found.unread + found.damaged)
    assert found.unread[1].endswith("got open('x')")


@pytest.mark.parametrize("text", ['"1,5"', '"1,50,000"', "1,500"])
def test_a_comma_that_separates_no_thousands_is_unread(root, text):
    typed(root, "03", predicted_calls=text)
    found = score(root)
    assert not found.guesses
    assert found.unread[0].startswith("predicted_calls of lesson 03: expected a number")


def test_an_integer_of_400_digits_is_unread(root):
    typed(root, "03", predicted_calls="1" + 400 * "0", predicted_growth="2")
    found = score(root)
    assert (len(found.guesses), len(found.unread)) == (1, 1)
    assert "expected a finite number" in found.unread[0]


@pytest.mark.parametrize(
    "text",
    ["", "[]", '"text"', '{"cells": {"a": 1}}', '{"cells": [{"source": [1]}]}', "[" * 100_000,
     '{"cells": [{"cell_type": "code", "source": "predicted_alpha = 5", "outputs": ["x"]}]}'],
)  # fmt: skip
def test_no_file_crashes_the_score(root, text):
    (root / "work" / "notebooks" / LESSONS["02"].name).write_text(text)
    assert len(score(root).damaged) == 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("16 * 7  # GB", 112),
        ("-2.5e3", -2500),
        ("2 * (4 - 1) / 4", 1.5),
        ("10**3 // 3 % 100", 33),
        ("[5, 7]", [5, 7]),
        ('"dp"', "dp"),
        ("None", None),
    ],
)
def test_literals_and_arithmetic_have_a_value(text, value):
    assert value_of(text) == value


@pytest.mark.parametrize(
    "text",
    ["P * 2", "print(1)", "__import__('os')", "10**10**10", "1/0", "1e999", "(", "'a' * 3",
     "1j", "(-8) ** 0.5", "-" * 5000 + "1", "lambda: 1"],
)  # fmt: skip
def test_nothing_is_executed(text):
    with pytest.raises(ValueError, match="expected a finite number"):
        value_of(text)


@pytest.mark.parametrize(
    ("given", "true", "factor_2", "ten_percent"),
    [
        (19, 10, True, False),
        (5, 10, True, False),
        (4.9, 10, False, False),
        (9.5, 10, True, True),
        (-10, 10, False, False),
        (0, 10, False, False),
        (0, 0, True, True),
        (0.04, 0, True, False),
        (0.2, 0, False, False),
        (0.03, 0.0077, True, False),
    ],
)
def test_a_factor_of_2_and_ten_percent(given, true, factor_2, ten_percent):
    guess = Guess("01", "x", given, true)
    assert (guess.within(2), guess.within(1.1)) == (factor_2, ten_percent)


def test_the_direction_of_the_error():
    def words(*ratios):
        return calibration.direction([Guess("01", "x", ratio, 1) for ratio in ratios])

    assert words(0.1, 0.5, 3) == "2 x too low"
    assert words(0.1, 3, 8) == "3 x too high"
    assert words(0.1, 1.05, 8) == "close"
    assert words() == words(0) == "-"


def test_names_and_groups_may_be_written_in_several_ways():
    assert equal("PP ", "pp")
    assert equal(["pp"], "pp")
    assert equal((7, 5), [5, 7])
    assert equal(101, [101, 101])
    assert equal([[101.0, 101.0], [101.0, 101.0]], [101, 101])
    assert not equal([5, 6], [5, 7])
    assert not equal({"pp": [1]}, "pp")


def test_votes_may_be_written_in_several_ways():
    assert [vote_of(each) for each in (True, "False", "Only if they meet")] == [
        "true", "false", "only",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="only if"):
        vote_of("perhaps")
