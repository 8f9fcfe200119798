"""The main job: its data, its files, its exit codes, alone and under launchers."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from functools import cache

import pytest
import torch
from rich.console import Console

from course_lib.ledger import Ledger, Record
from course_lib.model import ModelConfig
from course_lib.tour import measure, pipelines, report, technique, techniques, timelines
from course_lib.tour.job import main, run_tour
from course_lib.tour.measure import Row, make_row
from course_lib.trace.traffic import read_connections

DP_NAMES = ["dp-naive", "dp-bucketed", "dp-overlapped", "dp-accumulated"]
ZERO_NAMES = ["zero-1", "zero-2", "zero-3"]
TP_NAMES = ["tp", "sp", "sp-again", "sp-recomputed"]
PP_NAMES = ["pp-gpipe", "pp-1f1b", "pp-interleaved", "pp-zb-h1", "pp-zb-v"]
ON_TWO = ["pp-interleaved", "pp-zb-v"]
CP_NAMES = ["cp-ring", "cp-gather", "cp-ulysses", "cp-ulysses-ring"]
EP_NAMES = ["ep-4", "ep-2"]
DECODE_NAMES = ["serial-decode", "inference"]  # their losses are differences of logits
COMPOSED = {"3d": {"tp": 2, "dp": 2, "pp": 2}, "4d": {"tp": 2, "cp": 2, "dp": 2, "pp": 2}}
COMPOSED["5d"] = {**COMPOSED["4d"], "ep": 2}
TWINS = ["serial", "serial-moe", "serial-moe-4", "serial-decode"]
ALONE = ["serial", *DP_NAMES, *ZERO_NAMES, *TP_NAMES, *PP_NAMES, *CP_NAMES]
NAMES = [*ALONE, "serial-moe", *EP_NAMES, "3d", "4d", "serial-moe-4", "5d", *DECODE_NAMES]


@pytest.fixture(scope="module")
def tour(tmp_path_factory):
    """One whole tour, as `course tour --json` in a process of its own."""
    out = tmp_path_factory.mktemp("tour")
    command = [sys.executable, "-m", "course_lib.cli", "tour", "--json", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return done, out


def test_json_is_all_of_stdout_and_equals_the_file(tour):
    done, out = tour
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data == json.loads((out / "tour.json").read_text())
    assert set(data) >= {"rows", "pipelines", "skipped"}
    assert data["skipped"] == []


def test_every_row_equals_serial_and_its_formulas(tour):
    rows = {row["technique"]: row for row in json.loads(tour[0].stdout)["rows"]}
    assert list(rows) == NAMES
    assert rows["serial"]["bytes"] == {}
    for name, row in rows.items():
        assert 0 <= row["max_loss_difference"] < 1e-4
        assert len(row["losses"]) >= 5
        for numbers in row["bytes"].values():
            assert numbers["counted"] == numbers["formula"] > 0
        for measured, formula in (
            ("state_bytes", "state_formula"),
            ("peak_activation_bytes", "peak_activation_formula"),
        ):
            assert isinstance(row[measured], int)
            assert row[measured] == row[formula] > 0
        if name in EP_NAMES:
            assert row["mesh"] == {"dp": 4, "ep": int(name[-1])}
        elif name == "inference":
            assert row["mesh"] == {"tp": 2, "pp": 2}
        elif name in COMPOSED:
            assert row["mesh"] == COMPOSED[name]
        else:
            axis = "dp" if name in ZERO_NAMES else "tp" if name in TP_NAMES else name[:2]
            assert row["mesh"] == ({} if name in TWINS else {axis: 2 if name in ON_TWO else 4})


def test_the_kernel_counts_what_the_formulas_say(tour, need):
    """With gloo's headers to the byte; these are less than 1 % where messages are large."""
    need(read_connections() is not None, "the kernel does not count what TCP sends")
    rows = {row["technique"]: row for row in json.loads(tour[0].stdout)["rows"]}
    ranks = {each.name: each.ranks for each in techniques.TECHNIQUES}
    for name, row in rows.items():
        axes = row["kernel_by_axis"]
        assert set(row["bytes"]) <= set(axes), name
        for axis, numbers in axes.items():
            assert numbers["bytes"] == numbers["expected"] + numbers["headers"], f"{name}, {axis}"
            assert numbers["bytes"] / ranks[name] <= numbers["bytes_max_rank"] < numbers["bytes"]
        for axis, numbers in row["bytes"].items():
            control = axes[axis]["expected"] - numbers["counted"]
            assert 0 <= control < 0.004 * numbers["counted"] + 200, "but the counts of tokens"
        for key in ("bytes", "expected", "headers"):
            assert row[f"kernel_{key}"] == sum(numbers[key] for numbers in axes.values())
        most = [numbers["bytes_max_rank"] for numbers in axes.values()]
        assert max(most, default=0) <= row["kernel_bytes_max_rank"] <= sum(most)
    for name in ("dp-overlapped", "zero-3", "sp", "pp-1f1b", "cp-ring", "ep-4"):
        assert 0 < rows[name]["kernel_headers"] < 0.01 * rows[name]["kernel_bytes"]
    assert {key: rows["serial"][f"kernel_{key}"] for key in ("bytes", "expected")} == {
        "bytes": 0,
        "expected": 0,
    }


def test_the_numbers_are_the_model_s(tour):
    """Bytes, state and activations against what the model's size says, computed here anew."""
    rows = {row["technique"]: row for row in json.loads(tour[0].stdout)["rows"]}
    model = technique.JOB.model()
    parameters = sum(p.numel() for p in model.parameters())
    tensors = len(list(model.parameters()))
    overlapped = rows["dp-overlapped"]
    assert overlapped["bytes"]["dp"]["counted"] == 4 * 2 * 3 / 4 * parameters * 4
    # parameter, gradient and two moments of 4 bytes each, and Adam's step counters
    assert overlapped["state_bytes"] == 4 * 4 * parameters + 4 * tensors
    serial = rows["serial"]["peak_activation_bytes"]
    assert serial * 0.2 < overlapped["peak_activation_bytes"] < serial * 0.3
    halved = rows["dp-accumulated"]["peak_activation_bytes"]
    assert halved < overlapped["peak_activation_bytes"] * 0.6


def test_the_numbers_of_zero(tour):
    """Per parameter of 4 bytes: itself, and a quarter of gradient, moments and, last, itself."""
    rows = {row["technique"]: row for row in json.loads(tour[0].stdout)["rows"]}
    parameters = sum(p.numel() for p in technique.JOB.model().parameters())
    for name, whole, quarters in (("zero-1", 1, 3), ("zero-2", 1, 3), ("zero-3", 0, 4)):
        counters = rows[name]["state_bytes"] - 4 * parameters * (whole + quarters / 4)
        assert 0 < counters <= 8 * 6, "4 bytes for each flat's counter, and for NaN"
    dp = rows["dp-bucketed"]["bytes"]["dp"]["counted"]
    sent = [rows[name]["bytes"]["dp"]["counted"] / dp for name in ZERO_NAMES]
    assert sent[:2] == [1, 1.5], "stage 2 scatters each of two micro-batches"
    assert 1 < sent[2] < 1.5, "root and last block are gathered once, the others twice"


def test_the_numbers_of_tensor_and_sequence_parallelism(tour):
    rows = {row["technique"]: row for row in json.loads(tour[0].stdout)["rows"]}
    config, tokens = technique.CONFIG, technique.JOB.sequences * technique.JOB.seq_len
    x_bytes = tokens * config.hidden * 4
    # 4 all-reduces per layer, 2 outside them, 3 numbers per token; 4 ranks send 3/4 twice
    assert rows["tp"]["bytes"]["tp"]["counted"] == 4 * 1.5 * (18 * x_bytes + 3 * tokens * 4)
    sent = [rows[name]["bytes"]["tp"]["counted"] / rows["tp"]["bytes"]["tp"]["counted"]
            for name in TP_NAMES[1:]]  # fmt: skip
    assert sent == pytest.approx([1, 1.25, 1.45], abs=0.01)
    for name in TP_NAMES:
        state = rows[name]["state_bytes"] / rows["serial"]["state_bytes"]
        assert 0.25 < state < 0.26, "all but the norms is a quarter"
    peaks = [rows[name]["peak_activation_bytes"] for name in ["serial", *TP_NAMES]]
    serial, tp, sp, again, recomputed = peaks
    assert tp < 0.5 * serial
    assert 0.25 * serial < again < 0.8 * sp < 0.6 * tp
    assert recomputed < 0.35 * again


def test_the_numbers_of_the_pipelines(tour):
    rows = {row["technique"]: row for row in json.loads(tour[0].stdout)["rows"]}
    config = technique.CONFIG
    activations = technique.JOB.sequences * technique.JOB.seq_len * config.hidden * 4
    for name, boundaries in dict(zip(PP_NAMES, (3, 3, 3, 3, 2), strict=True)).items():
        sent = 2 * boundaries * activations  # activations there and gradients back
        assert rows[name]["bytes"] == {"pp": {"counted": sent, "formula": sent}}
        state = rows[name]["state_bytes"] / rows["serial"]["state_bytes"]
        assert state < (0.6 if name in ON_TWO else 0.3)
    kept = {name: rows[name]["peak_activation_bytes"] for name in PP_NAMES}
    assert kept["pp-1f1b"] < 0.8 * kept["pp-gpipe"], "the last stage keeps one, not four"
    assert kept["pp-1f1b"] < kept["pp-zb-h1"] < 1.1 * kept["pp-gpipe"]


def test_the_numbers_of_context_parallelism(tour):
    """A quarter of every activation; a gather keeps three more quarters of K and V."""
    rows = {row["technique"]: row for row in json.loads(tour[0].stdout)["rows"]}
    config = technique.CONFIG
    kv_bytes = (
        2 * technique.JOB.sequences * technique.JOB.seq_len * config.kv_heads * config.head_dim * 4
    )
    for name, travels in (("cp-ring", 3), ("cp-gather", 2)):
        # forward, backward and gradients, or forward and gradients: 3/4 of all K and V by 4 ranks
        assert rows[name]["bytes"]["cp"]["counted"] == config.layers * travels * 3 * kv_bytes
        assert rows[name]["bytes"]["dp_cp"] == rows["dp-naive"]["bytes"]["dp"]
    whole_heads = rows["cp-ulysses"]["bytes"]["cp"]["counted"]
    grid = {axis: both["counted"] for axis, both in rows["cp-ulysses-ring"]["bytes"].items()}
    # halves of the heads between two: 4 exchanges of q's size and 4 of K's, of which half leaves;
    # then forward, backward and gradients of half of K and V between two
    assert grid["cp_heads"] == whole_heads * Fraction(1, 2) / Fraction(3, 4)
    assert grid["cp_ring"] == config.layers * 3 * kv_bytes
    peaks = {name: rows[name]["peak_activation_bytes"] for name in (*CP_NAMES, "serial")}
    assert abs(4 * peaks["cp-ring"] - peaks["serial"]) < 100, "but for a few scalars"
    assert peaks["cp-gather"] == peaks["cp-ring"] + config.layers * kv_bytes * 3 // 4


def test_the_numbers_of_expert_parallelism(tour):
    rows = {row["technique"]: row for row in json.loads(tour[0].stdout)["rows"]}
    config, experts = technique.CONFIG, 8
    mlp = 3 * config.hidden * config.ffn
    model = technique.JOB.model()
    rest = sum(p.numel() for p in model.parameters()) - config.layers * mlp
    rest += config.layers * config.hidden * experts  # the routers
    pairs = 2 * technique.JOB.sequences * technique.JOB.seq_len * config.layers
    for name, ranks in zip(EP_NAMES, (4, 2), strict=True):
        counted = {axis: both["counted"] for axis, both in rows[name]["bytes"].items()}
        held = config.layers * experts // ranks * mlp
        assert counted["dp"] == 4 * 2 * 3 / 4 * rest * 8
        assert counted.get("edp", 0) == 4 * 2 * (4 // ranks - 1) / (4 // ranks) * held * 8
        even = 4 * (ranks - 1) / ranks * pairs * config.hidden * 8
        assert counted["ep"] != even, "no batch is that even"
        assert counted["ep"] == pytest.approx(even, rel=0.1)
        tensors = config.layers * (9 + 1 - 3 + 3 * experts // ranks) + 3
        assert rows[name]["state_bytes"] == 4 * 8 * (rest + held) + 4 * tensors
    assert rows["ep-4"]["losses"] != rows["serial"]["losses"], "another model, another reference"


def test_the_numbers_of_composition(tour):
    """What sixteen ranks hold, and which axes carry what."""
    rows = {row["technique"]: row for row in json.loads(tour[0].stdout)["rows"]}
    job, three, four, five = technique.JOB, *(rows[name] for name in COMPOSED)
    sent = {name: {axis: both["counted"] for axis, both in rows[name]["bytes"].items()}
            for name in COMPOSED}  # fmt: skip
    # all four (tp, dp) pairs together: every activation once there and once back, of half the rows
    hop = 2 * job.sequences * job.seq_len * job.config.hidden * 4
    assert sent["3d"]["pp"] == sent["4d"]["pp"] == hop
    assert sent["5d"]["pp"] == 2 * hop, "8 bytes a number"
    assert sent["3d"]["tp"] > sent["3d"]["dp"] > sent["3d"]["pp"]
    # 4 ranks instead of 2 sum what half of tp x pp holds: twice 3/4 of it each instead of 1/2
    assert sent["4d"]["dp_cp"] == 3 * sent["3d"]["dp"]
    assert set(sent["5d"]) == {"tp", "cp", "pp", "dp_cp", "ep", "edp"}
    # weights, gradients and moments of a quarter; in 4d the latter three in quarters
    assert 0.25 < three["state_bytes"] / rows["serial"]["state_bytes"] < 0.3
    assert four["state_bytes"] == pytest.approx(three["state_bytes"] * (1 + 3 / 4) / 4, rel=1e-3)
    assert five["losses"] != four["losses"]


def test_pipelines_are_predicted_simulated_and_measured(tour):
    done, out = tour
    entries = {entry["schedule"]: entry for entry in json.loads(done.stdout)["pipelines"]}
    assert list(entries) == ["gpipe", "1f1b", "zb-h1"]
    for name, entry in entries.items():
        waited = 3 if name == "zb-h1" else 9  # units of 20 ms, of 24 of work
        bubble = entry["bubble"]
        assert bubble["predicted"] == pytest.approx(waited / (24 + waited))
        assert bubble["simulated"] == pytest.approx(waited / (24 + waited))
        # a rank sleeps through its work at least, whatever the machine does
        assert 0.6 * waited / (24 + waited) < bubble["measured"] < 0.9
        assert entry["makespan"]["simulated"] == pytest.approx(0.04 * (24 + waited))
        assert entry["makespan"]["measured"] > 0.97 * 0.04 * (24 + waited)
        assert (out / f"pipeline-{name}.png").stat().st_size > 20_000
    assert entries["gpipe"]["peak_in_flight"] == [8, 8, 8, 8]
    assert entries["1f1b"]["peak_in_flight"] == [4, 3, 2, 1]
    assert entries["zb-h1"]["peak_in_flight"] == [4, 4, 4, 4]


def test_the_numbers_of_inference(tour):
    """Half of the layers and of the KV heads; the reference stores 8 bytes per token."""
    rows = {row["technique"]: row for row in json.loads(tour[0].stdout)["rows"]}
    twin, row = (rows[name] for name in DECODE_NAMES)
    config = technique.JOB.config
    assert row["max_loss_difference"] == max(row["losses"]) < 1e-12
    assert twin["losses"] == [0.0] * technique.JOB.sequences
    prompts, new = [32 - 3 * number for number in range(8)], 8
    assert twin["peak_activation_bytes"] == 8 * sum(prompt + new for prompt in prompts)
    slots, bytes_a_row = 4, 8 * (config.kv_heads // 2) * config.head_dim
    assert row["peak_activation_bytes"] == slots * config.max_seq_len * 2 * 2 * bytes_a_row
    through = sum(prompt + new - 1 for prompt in prompts)
    # both ranks of a stage: 8 bytes a feature, and 8 for each token that is chosen
    assert row["bytes"]["pp"]["counted"] == 2 * (through * config.hidden * 8 + 8 * 8 * new)
    # nine all-reduces of what goes through, and a pair of numbers for each token chosen
    assert row["bytes"]["tp"]["counted"] == 2 * (9 * through * config.hidden * 8 + 16 * 8 * new)


def test_losses_fall(tour):
    for row in json.loads(tour[0].stdout)["rows"]:
        if row["technique"] not in DECODE_NAMES:
            assert row["losses"][-1] < row["losses"][0] - 1


def test_files(tour):
    out = tour[1]
    for name in ("timeline.png", "timeline-no-overlap.png", "traffic.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
        assert (out / name).stat().st_size > 20_000
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    assert {event["name"] for event in events if event["ph"] == "X"} >= {"F", "B", "all_reduce"}


def test_the_table_names_every_technique_and_lesson(tmp_path, capfd, monkeypatch):
    (tmp_path / "mine.txt").write_text("not of the tour")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(measure, "TECHNIQUES", techniques.TECHNIQUES[:2])
    monkeypatch.setattr(pipelines, "NAMES", ("1f1b",))
    assert run_tour(tmp_path) == 0
    printed, progress = capfd.readouterr()
    assert "dp-naive" in printed
    assert "lesson 03" in printed
    assert "predicted" in printed
    assert "4 3 2 1" in printed
    assert "tour.json, pipeline-1f1b.png, timeline.png" in " ".join(printed.split())
    assert "trace.json, traffic.png" in " ".join(printed.split())
    assert "mine.txt" not in printed
    assert "…" not in printed, "at 80 columns nothing may be cut"
    assert "dp-naive: 8 steps on 4 ranks" in progress


def fake_row(**changes) -> Row:
    naive = techniques.TECHNIQUES[1]
    row = Row(naive, 1e-7, {"dp": Fraction(8)}, {"dp": Fraction(8)}, 2, 2, 3, 3, [5.0, 4.0], [])
    return replace(row, **changes)


def calls_of(sizes) -> Ledger:
    """A ledger of one send of that many bytes on each axis."""
    ledger = Ledger(0)
    for axis, size in sizes.items():
        ledger.add(Record(axis, "send", "send", int(size), size, 2, peer=1))
    return ledger


def test_nothing_of_any_row_is_cut_at_80_columns():
    """Numbers as large as the tour's may become, and a mesh of all axes with a long name."""
    axes = ["pp", "tp", "tp_kv", "cp_heads", "dp_cp", "ep", "edp"]
    sizes = dict.fromkeys(axes, Fraction(43_249_900))
    large = {
        "kernel": {axis: [[0, int(size)], [0, 0]] for axis, size in sizes.items()},
        "ledgers": [calls_of(sizes), Ledger(1)],
        "counted": sizes,
        "formula": sizes,
        "state_bytes": 40_450_000,
        "state_formula": 40_450_001,
        "peak_activation_bytes": 43_249_900,
        "peak_activation_formula": 43_249_900,
    }
    five = dict.fromkeys(["dp", "pp", "cp", "tp", "ep"], 16)
    longest = replace(techniques.TECHNIQUES[0], name="5d-interleaved-zero", mesh=five)
    rows = [fake_row(technique=each, **large) for each in [*techniques.TECHNIQUES, longest]]
    page = io.StringIO()
    report.print_table(rows, [], Console(file=page, width=80))
    printed = page.getvalue()
    assert "…" not in printed
    assert printed.count("43,250") == 15 * len(rows)
    assert printed.count("≠40,450") == len(rows), "a formula that is off is shown"
    assert printed.count("=16") == 5
    assert printed.count("0.0%") == 7 * len(rows)
    for head in (
        "kernel",
        "extra",
        "formula",
        "state",
        "activ.",
        "technique",
        "mesh",
        "axis",
        "off by",
    ):
        assert head in printed[:320]


def test_the_table_marks_calls_that_differ_and_says_formula_where_the_kernel_has_no_count():
    page = io.StringIO()
    sizes = {"dp": Fraction(43_249_900)}
    rows = [fake_row(counted={"dp": Fraction(8)}, formula=sizes)]
    report.print_table(rows, [], Console(file=page, width=80))
    assert page.getvalue().split("dp=4")[1].split()[2:4] == ["≠43,250", "formula"]
    assert "The kernel has no count" in page.getvalue()
    keys = ("bytes", "expected", "headers", "bytes_max_rank", "by_axis")
    assert {rows[0].as_json()[f"kernel_{key}"] for key in keys} == {None}


def test_extra_bytes_that_are_no_headers_are_a_fault():
    """One send of 1,000 bytes has 144 bytes of headers, 48 of them from the receiver."""
    row = fake_row(
        ledgers=[calls_of({"dp": Fraction(1000)}), Ledger(1)], kernel={"dp": [[0, 1096], [48, 0]]}
    )
    assert row.faults == []
    assert row.as_json()["kernel_by_axis"]["dp"] == {
        "bytes": 1144, "expected": 1000, "headers": 144, "bytes_max_rank": 1096,
    }  # fmt: skip
    for matrix in ([[0, 1097], [48, 0]], [[0, 999], [0, 0]], [[0, 2096], [48, 0]]):
        (fault,) = replace(row, kernel={"dp": matrix}).faults
        assert f"the kernel counted {sum(map(sum, matrix)):,} bytes on axis dp" in fault
    (fault,) = replace(row, kernel={"dp": [[0, 1096], [48, 0]], "tp": [[0, 5], [0, 0]]}).faults
    assert "5 bytes on axis tp; expected 0" in fault


def test_a_loss_falls_where_something_was_trained():
    page = io.StringIO()
    decoded = replace(techniques.TECHNIQUES[0], reference="decode")
    rows = [fake_row(), fake_row(technique=decoded, losses=[0.0, 0.0])]
    report.print_table(rows, [], Console(file=page, width=80))
    assert page.getvalue().count("The loss fell") == 1
    said = " ".join(page.getvalue().split())  # in 80 columns it may be broken into lines
    assert "from 5.00 to 4.00 in 2 steps in serial and all rows equal to it." in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_loss_difference": 2e-4}, "got a difference of 0.0002"),
        ({"max_loss_difference": float("nan")}, "got a difference of nan"),
        ({"counted": {"dp": Fraction(10)}}, "10 bytes counted on axis dp, 8 by the formula"),
        ({"counted": {"dp": Fraction(8), "tp": Fraction(5)}}, "on axis tp, 0 by the formula"),
        ({"counted": {}}, "0 bytes counted on axis dp"),
        ({"counted": {"dp": Fraction(17, 2)}}, "counted on axis dp, 8 by the formula"),
        ({"state_formula": 1}, "2 bytes of state on the fullest rank, 1 by the formula"),
        ({"peak_activation_formula": 4}, "3 bytes of activations on the fullest rank, 4 by the"),
    ],
)
def test_a_wrong_row_is_named(changes, said):
    assert fake_row().faults == []
    assert said in "\n".join(fake_row(**changes).faults)


@pytest.mark.parametrize("fault", ["loss", "bytes", "state", "activations"])
def test_exit_1_when_a_loss_or_a_byte_is_off(tmp_path, monkeypatch, capfd, fault):
    serial, naive = techniques.TECHNIQUES[:2]
    if fault == "bytes":
        naive = replace(naive, formula=lambda job: {"dp": Fraction(5)})
    elif fault == "state":
        naive = replace(naive, state_formula=lambda job: 3_679_387)
    elif fault == "activations":
        naive = replace(naive, peak_activation_formula=lambda job: 3_021_325)
    else:
        train = naive.train

        def another_model(job):
            report = train(job)
            return replace(report, losses=[loss + 1e-3 for loss in report.losses])

        naive = replace(naive, train=another_model)
    monkeypatch.setattr(measure, "TECHNIQUES", [serial, naive])
    monkeypatch.setattr(timelines, "SYNCS", {})
    monkeypatch.setattr(pipelines, "NAMES", ())
    assert run_tour(tmp_path) == 1
    assert "WRONG: dp-naive" in capfd.readouterr().err


def test_a_rank_that_differs_is_seen():
    """The largest difference is over all ranks, not that of rank 0."""

    class Fake(list):
        ledgers = ()
        kernel_bytes = None

    good = technique.Report([5.0, 4.0], technique.StateBytes(1), 7)
    bad = technique.Report([5.0, 4.5], technique.StateBytes(2), 5)
    row = make_row(techniques.TECHNIQUES[0], Fake([good, good, bad]), [5.0, 4.0])
    assert row.max_loss_difference == 0.5
    assert (row.state_bytes, row.peak_activation_bytes) == (2, 7)


OTHER_JOBS = {
    # tied, fewer key and value heads than ranks, a padded vocabulary, layers that do not divide
    "llama-tied": technique.Job(
        ModelConfig(
            layers=5, hidden=48, heads=4, kv_heads=2, ffn=100, vocab=258, max_seq_len=40, tied=True
        ),
        sequences=8,
        seq_len=24,
        steps=2,
    ),
    "gpt-64": technique.Job(
        ModelConfig(
            family="gpt", hidden=32, heads=8, kv_heads=8, ffn=64, max_seq_len=16,
            dtype=torch.float64,
        ),
        sequences=16,
        seq_len=16,
        steps=2,
    ),
    "gpt-tied": technique.Job(
        ModelConfig(
            family="gpt", layers=6, heads=4, kv_heads=1, ffn=200, vocab=261, max_seq_len=8,
            tied=True,
        ),
        sequences=8,
        seq_len=8,
        steps=2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("job", OTHER_JOBS.values(), ids=OTHER_JOBS.keys())
@pytest.mark.parametrize("row", techniques.TECHNIQUES, ids=lambda row: row.name)
def test_formulas_hold_for_other_models_too(worlds, row, job):
    """Bytes, state and activations, to the byte: else a formula could be that of one shape."""
    results = worlds(row.ranks).run(row.train, job)
    found = make_row(row, results, twin_losses(worlds, row.reference, job), job)
    assert found.faults == []


@cache
def twin_losses(worlds, name, job):
    twin = next(row for row in techniques.TECHNIQUES if row.name == name)
    return worlds(1).run(twin.train, job)[0].losses


def torchrun(out, *options: str, script: tuple = ("-m", "course_lib.tour")) -> list[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", *options]
    return [*launch, *map(str, script), "--json", "--out", str(out)]


def environment() -> dict[str, str]:
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return os.environ | {"GLOO_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": "1"}


def kernel_is_exact(rows) -> bool:
    """Whether no byte of torchrun's store is in the counts, and none is missing."""
    return read_connections() is None or all(
        numbers["bytes"] == numbers["expected"] + numbers["headers"]
        for row in rows
        for numbers in row["kernel_by_axis"].values()
    )


A_FEW = ["serial", "dp-overlapped", "zero-3", "sp", "pp-1f1b", "cp-ring", "serial-moe", "ep-2"]


def script_of(folder, *names: str):
    """A tour of these rows and one pipeline, as a script: all rows are in `course tour` above."""
    script = folder / "tour_of_a_few.py"
    script.write_text(
        f"""\
import sys
from course_lib.tour import job, measure, pipelines
measure.TECHNIQUES = [row for row in measure.TECHNIQUES if row.name in {names}]
pipelines.NAMES = ("1f1b",)
sys.exit(job.main())
"""
    )
    return script


def torchrun_tour(tmp_path, ranks: int, *script) -> dict:
    command = torchrun(tmp_path, "--standalone", f"--nproc-per-node={ranks}", script=script)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment(), check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # rank 0 alone has printed


def check_four_ranks(data, names, out) -> None:
    assert [row["technique"] for row in data["rows"]] == [n for n in names if n not in COMPOSED]
    assert {entry["technique"]: entry["needs"] for entry in data["skipped"]} == {
        name: 8 if name == "3d" else 16 for name in COMPOSED
    }
    assert max(row["max_loss_difference"] for row in data["rows"]) < 1e-4
    assert kernel_is_exact(data["rows"])
    assert (out / "timeline.png").exists()


def test_torchrun_with_four_ranks(tmp_path):
    names = [name for name in NAMES if name in {*A_FEW, *COMPOSED, "serial-moe-4"}]
    data = torchrun_tour(tmp_path, 4, script_of(tmp_path, *names))
    check_four_ranks(data, names, tmp_path)


@pytest.mark.long
def test_torchrun_with_four_ranks_runs_every_row(tmp_path):
    data = torchrun_tour(tmp_path, 4, "-m", "course_lib.tour")
    check_four_ranks(data, NAMES, tmp_path)


def test_torchrun_with_two_ranks_skips_what_wants_four(tmp_path):
    data = torchrun_tour(tmp_path, 2, "-m", "course_lib.tour")
    fit = {*TWINS, *ON_TWO}
    assert [row["technique"] for row in data["rows"]] == [n for n in NAMES if n in fit]
    assert [entry["technique"] for entry in data["skipped"]] == [n for n in NAMES if n not in fit]
    assert data["pipelines"] == []
    assert data["skipped"][0]["needs"] == 4
    assert data["skipped"][0]["reason"] == "needs 4 ranks, and this world has 2."


def test_two_nodes_of_two_ranks_over_loopback(tmp_path):
    """With one technique of each kind: all of them, on four ranks of one node, are above."""
    import socket

    script = script_of(tmp_path, *A_FEW)

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = [
        subprocess.Popen(
            torchrun(
                tmp_path,
                "--nnodes=2",
                "--nproc-per-node=2",
                f"--node-rank={node}",
                "--master-addr=127.0.0.1",
                f"--master-port={port}",
                script=(script,),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        for node in (0, 1)
    ]
    said = [node.communicate(timeout=300) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    data = json.loads(said[0][0])
    assert said[1][0] == "", "rank 0 alone prints"
    assert [row["technique"] for row in data["rows"]] == A_FEW
    assert max(row["max_loss_difference"] for row in data["rows"]) < 1e-4
    assert kernel_is_exact(data["rows"])


@pytest.mark.parametrize("arguments", [["--out"], ["--nonsense"], ["extra"]])
def test_bad_arguments_of_the_module_exit_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
