"""course plan as a user types it: JSON keys, text, bad input, calibration, comparison, time."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import subprocess
import sys

import pytest

from course_lib import cli
from course_lib.planner import configure, hardware, model, models, published
from course_lib.planner.calibrate import calibrated, delay, rate
from course_lib.planner.compare import compare, read_plan, sensitivity
from course_lib.planner.configuration import Configuration
from course_lib.planner.emit import emit
from course_lib.planner.estimate import estimate
from course_lib.planner.explain import derivation
from course_lib.planner.result import AxisTraffic, Estimate, Memory
from course_lib.planner.text import bandwidth, duration, number, report

PLAN = "plan llama-3-70b --gpus 64 --hardware h100"
CUSTOM = "plan custom --gpus 8 --hardware h100 --family llama --layers 4 --hidden 512 --heads 8"


def course(line: str, capfd) -> str:
    """What a command that works prints on stdout."""
    code = cli.main(shlex.split(line))
    out, err = capfd.readouterr()
    assert (code, err) == (0, ""), err
    return out


def made(name: str = "llama-3-8b", gpus: int = 16, on: str = "h100", **degrees) -> Estimate:
    return estimate(model(name), hardware(on), configure(model(name), gpus, **degrees))


def written(**changes) -> Estimate:
    """An estimate with round numbers."""
    values = {
        "model": model("llama-3-8b"),
        "hardware": hardware("h100"),
        "configuration": Configuration(tp=2, dp=2, global_batch=4, seq=1000),
        "memory": Memory(10e9, 20e9, 30e9, 5e9),
        "communication": {"tp": AxisTraffic(7, 2e9, 1e9, 0.2, 0.1, "node")},
        "bubble_of_total": 0.1,
        "bubble_of_ideal": 1 / 9,
        "step_seconds": 2.0,
        "tflops_per_gpu": 400.0,
        "mfu": 0.4,
        "mfu_full_attention": 0.42,
        "hfu": 0.5,
        "fits": True,
        "headroom_bytes": 3e9,
        "parameters": 8_030_261_248,
        "active_parameters": 8_030_261_248,
        "parts": {"compute": 1.8, "tp": 0.2},
    }
    return Estimate(**{**values, **changes})


# --- one plan -----------------------------------------------------------------------------------


def test_json_has_the_keys_of_the_interface(capfd):
    data = json.loads(course(f"{PLAN} --tp 8 --pp 4 --json", capfd))
    assert set(data["memory"]) == {"weights", "gradients", "optimizer", "activations", "total"}
    assert data["memory"]["total"] == pytest.approx(
        sum(size for name, size in data["memory"].items() if name != "total")
    )
    assert set(data["communication"]) == {"tp", "pp", "dp"}
    for one in data["communication"].values():
        assert set(one) >= {
            "payload_bytes", "wire_bytes", "seconds", "calls", "link", "exposed_seconds"
        }  # fmt: skip
    assert set(data["bubble"]) >= {"of_total", "of_ideal"}
    assert set(data) >= {
        "step_seconds", "tokens_per_gpu_second", "tflops_per_gpu", "mfu", "mfu_full_attention",
        "hfu", "fits", "headroom_bytes", "parameters", "active_parameters",
    }  # fmt: skip
    assert data["parameters"] == data["active_parameters"] == 70_553_706_496
    assert data["fits"] is True
    assert 0 < data["mfu"] < data["mfu_full_attention"] < 1
    assert data["mfu"] == data["hfu"]  # nothing is recomputed
    assert data["tflops_per_gpu"] == pytest.approx(data["mfu"] * 989, rel=1e-3)
    assert sum(data["parts"].values()) == pytest.approx(data["step_seconds"])
    assert data["tokens_per_gpu_second"] == pytest.approx(512 * 8192 / 64 / data["step_seconds"])


def test_json_is_what_python_gives(capfd):
    data = json.loads(course(f"{PLAN} --tp 8 --pp 4 --zero 1 --json", capfd))
    python = made("llama-3-70b", 64, tp=8, pp=4).as_dict()
    assert {name: data[name] for name in python} == json.loads(json.dumps(python))


def test_a_plan_that_does_not_fit_is_a_result(capfd):
    data = json.loads(course(f"{PLAN} --json", capfd))
    assert (data["fits"], data["headroom_bytes"] < 0) == (False, True)
    assert data["reasons"]
    text = course(PLAN, capfd)
    assert "Does not fit." in text
    assert re.search(r"[\d.]+ GB more than", text)


def test_reserve_decides_what_fits(capfd):
    line = f"{PLAN} --tp 8 --pp 4 --json --reserve"
    none, most = (json.loads(course(f"{line} {share}", capfd)) for share in (0, 0.9))
    assert (none["fits"], most["fits"]) == (True, False)
    apart = none["headroom_bytes"] - most["headroom_bytes"]
    assert apart == pytest.approx(0.9 * hardware("h100").capacity_bytes)


@pytest.mark.parametrize(
    "line",
    [
        f"{PLAN} --tp 8 --pp 4",
        f"{PLAN} --tp 8 --pp 4 --recompute full --dtype fp8",
        "plan deepseek-v3 --gpus 2048 --hardware h800 --pp 16 --ep 64 --schedule dualpipe-v",
        "plan llama-3-405b --gpus 16384 --hardware h100 --tp 8 --pp 16 --cp 16 --seq 131072",
        "plan gpt2-xl --gpus 1 --hardware v100-32 --dtype fp16 --plain-attention",
    ],
)
def test_text_has_80_columns_and_every_part(line, capfd):
    text = course(line, capfd)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 55
    for word in ("weights", "optimizer", "total", "Step time", "MFU", "Bubble", "Assumptions"):
        assert word in text
    terms = " ".join(text[text.index("Terms:") : text.index("Assumptions")].split())
    assert "MFU and HFU, FLOP/s over the peak" in terms
    assert ("exposed, communication" in terms) == ("exposed ms" in text)
    assert all(f"{axis}, the ranks" in terms for axis in ("dp_cp", "edp", "tp_kv") if axis in text)
    assert "link" in text or "none on this plan" in text
    assert not re.search(r"\bnan\b|\binf\b|-0\.0 ", text)


def test_report_prints_these_numbers():
    changes = {"node +20%": -0.015, "node -20%": 0.0221, "network +20%": -0.0, "network -20%": 0.0}
    text = " ".join(report(written(), changes).split())
    assert "total 65.00 77 %" in text
    assert "tp node 7 1.00 200 100" in text
    assert "Step time: 2.00 s = compute 90.0 % + tp 10.0 %" in text
    assert "500 tokens/s per GPU, 400 TFLOP/s, MFU 40.0 % (causal attention)" in text
    assert "10.0 % of total, 11.1 % of ideal" in text
    assert (
        "20 % more bandwidth: node -1.5 %, network 0.0 %; 20 % less bandwidth: node +2.2 %" in text
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1234.5, "1,234"), (12.345, "12.3"), (0.01234, "0.0123"), (5, "5.00")],
)
def test_numbers_have_three_digits(value, text):
    assert number(value) == text


@pytest.mark.parametrize(("value", "text"), [(2.5, "2.50 s"), (0.02, "20.0 ms"), (3e-6, "3.00 us")])
def test_durations_have_a_unit(value, text):
    assert duration(value) == text


def test_custom_model(capfd):
    data = json.loads(course(f"{CUSTOM} --vocab 1000 --kv-heads 2 --ffn 1024 --json", capfd))
    layer = 512 * 64 * 2 * (8 + 2) + 3 * 512 * 1024 + 2 * 512
    assert data["parameters"] == 4 * layer + 2 * 1000 * 512 + 512
    experts = f"{CUSTOM} --vocab 1000 --experts 8 --top-k 2 --ep 4 --json"
    assert json.loads(course(experts, capfd))["communication"]["ep"]["calls"] > 0


def test_uneven_stages(capfd):
    line = "plan llama-3-405b --gpus 16384 --hardware h100 --tp 8 --pp 16 --json --stage-layers "
    uneven = json.loads(course(line + "7,8x14,7", capfd))
    assert uneven["memory"]["total"] > 0
    assert cli.main(shlex.split(line + "8x16")) == 2
    assert "126" in capfd.readouterr().err


# --- bad input ----------------------------------------------------------------------------------

BAD = {
    "plan": "llama-3-70b",
    "plan llama": "did you mean",
    "plan zzz --gpus 8 --hardware h100": "choose from",
    "plan llama-3-70b": "--gpus",
    "plan llama-3-70b --gpus 8": "h100",
    "plan llama-3-70b --gpus 8 --hardware h10": "h100",
    f"{PLAN} --tp 3": "3",
    f"{PLAN} --tp 16 --dp 3": "64",
    f"{PLAN} --tp 0": "tp=0",
    f"{PLAN} --tp -8": "tp=-8",
    "plan llama-3-70b --gpus 0 --hardware h100": "gpus=0",
    "plan llama-3-70b --gpus 99999999999 --hardware h100": "gpus=",
    f"{PLAN} --gpus many": "--gpus",
    f"{PLAN} --pp 64 --chunks 2": "80",
    f"{PLAN} --pp 4 --chunks 2 --schedule 1f1b": "chunks",
    f"{PLAN} --chunks 2": "chunks=2",
    f"{PLAN} --ep 2": "experts",
    f"{PLAN} --zero 4": "zero=4",
    f"{PLAN} --global-batch 7": "global_batch=7",
    f"{PLAN} --micro-batch 0": "micro_batch=0",
    f"{PLAN} --seq 1001 --tp 8": "1008",
    f"{PLAN} --schedule zbh1": "zb-h1",
    f"{PLAN} --recompute some": "none, selective or full",
    f"{PLAN} --dtype bf61": "bf16",
    f"{PLAN} --recipe 17": "recipe=17",
    f"{PLAN} --reserve 8": "--reserve",
    f"{PLAN} --generation 1999": "1999",
    f"{PLAN} --layers 4": "--layers",
    f"{PLAN} --batch 4": "--serve",
    f"{PLAN} --search --explain": "--search",
    f"{PLAN} --stage-layers some": "7,8x14,7",
    f"{PLAN} --compare tp=8 p=4": "did you mean",
    f"{PLAN} --compare tp=8 tp": "tp=8,pp=4",
    f"{PLAN} --compare tp=8 tp=x": "'x'",
    f"{PLAN} --compare tp=8 overlap_tp=1": "overlap_tp=on",
    f"{PLAN} --calibrate /dev/null/there": "/dev/null/there",
    "plan llama-3-70b --gpus 8 --hardware a100-80 --dtype fp8": "fp8",
    "plan custom --gpus 8 --hardware h100": "--family",
    f"{CUSTOM}": "--vocab",
    f"{CUSTOM} --vocab 1000 --kv-heads 3": "kv_heads",
    f"{CUSTOM} --vocab -1": "vocab",
    f"{PLAN} --serve --batch 0": "batch",
    f"{PLAN} --serve --cp 2": "cp=2",
    f"{PLAN} --emit megatrn": "megatron",
    f"{PLAN} --top 3": "--search",
    f"{PLAN} --search --top 0": "--top",
    f"{PLAN} --search --tp 3": "3",
    f"{PLAN} --search --dtype bf61": "bf16",
    "plan llama-3-70b --gpus 16777216 --hardware h100 --search": "gpus=16777216",
    "plan llama-3-70b --published": "llama-3-70b",
    f"{PLAN} --pp 2 --stage-layers 7,8x99999999999": "stage_layers",
    f"{PLAN} --emit fsdp2 --explain": "--emit",
    f"{PLAN} --search --micro-batch 0": "micro_batch=0",
    f"{PLAN} --search --micro-batch -1": "micro_batch=-1",
    f"{PLAN} --search --seq 0": "seq=0",
    f"{PLAN} --search --top 99999999": "--top",
    f"{PLAN} --serve --zero 3 --micro-batch 4": "--zero, --micro-batch",
    f"{PLAN} --serve --global-batch 32": "--global-batch",
    f"{PLAN} --pp 2 --stage-layers 80x0": "7,8x14,7",
    f"{PLAN} --pp 2 --stage-layers -1,81": "7,8x14,7",
    f"{PLAN} --compare tp=8,tp=4 tp=8": "twice",
    f"{PLAN} --dtype fp32 --generation 2024": "leave out generation",
    f"{CUSTOM} --vocab 1000 --top-k 2": "--experts",
    "plan llama-3-70b --gpus 64 --hardware v100-32 --emit megatron": "fp16",
    "plan llama-3-70b --gpus 64 --hardware v100-32 --serve": "fp16",
    "plan --published --gpus 8": "--gpus",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_a_sentence_that_says_what_to_change(line, capfd):
    assert cli.main(shlex.split(line)) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"[^\n]{10,700}[.?]\n", printed.err), printed.err
    assert BAD[line] in printed.err
    assert "Traceback" not in printed.err


def test_a_batch_of_a_billion_sequences_takes_no_longer(capfd):
    line = f"{PLAN} --pp 8 --schedule zb-v --global-batch 1073741824"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    course(line, capfd)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 5


def test_all_names_are_listed_where_none_is_given(capfd):
    assert cli.main(["plan"]) == 2
    printed = capfd.readouterr().err
    assert all(name in printed for name in models())


# --- calibration --------------------------------------------------------------------------------


def test_calibration_changes_what_it_names(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(
        'node.bandwidth = "370 GB/s"\nnode.latency = "5 us"\nnetwork.bandwidth = "400 Gb/s"\n'
        "efficiency.bf16 = 0.55\n"
    )
    before, after = hardware("h100"), calibrated(hardware("h100"), file)
    assert (after.node.bandwidth, after.node.latency) == (370e9, pytest.approx(5e-6))
    assert after.node.efficiency == after.network.efficiency == 1  # they were measured
    assert (after.network.bandwidth, after.network.latency) == (50e9, before.network.latency)
    assert after.efficiency_of("bf16") == after.efficiency_of("fp16") == 0.55
    assert after.efficiency_of("fp8") == before.efficiency_of("fp8")
    assert (after.peak, after.capacity_bytes) == (before.peak, before.capacity_bytes)


def test_calibration_by_command(tmp_path, capfd):
    file = tmp_path / "own.toml"
    file.write_text("efficiency.bf16 = 0.25\n")
    line = f"{PLAN} --tp 8 --pp 4 --json"
    plain = json.loads(course(line, capfd))
    slow = json.loads(course(f"{line} --calibrate {file}", capfd))
    faster = hardware("h100").efficiency_of("bf16") / 0.25
    ratio = slow["parts"]["compute"] / plain["parts"]["compute"]
    assert 0.8 * faster < ratio <= faster  # what memory bandwidth limits is as fast as before
    assert slow["memory"] == plain["memory"]


@pytest.mark.parametrize(
    ("text", "value"),
    [("370 GB/s", 370e9), ("400 Gb/s", 50e9), ("1.5TB/s", 1.5e12), ("1 GiB/s", 2**30)],
)
def test_bandwidths_in_bytes_and_in_bits(text, value):
    assert rate("x", text) == value


@pytest.mark.parametrize(("text", "value"), [("5 us", 5e-6), ("0.1 ms", 1e-4), ("700ns", 7e-7)])
def test_latencies(text, value):
    assert delay("x", text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("node.bandwidth = 370", '"370 GB/s"'),
        ('node.bandwidth = "370"', '"370 GB/s"'),
        ('node.bandwidth = "370 GB"', '"370 GB/s"'),
        ('node.bandwidth = "-5 GB/s"', "1 MB/s"),
        ('node.bandwidth = "nan GB/s"', "number"),
        ('node.bandwidth = "fast"', "number"),
        ('node.latency = "5 s/GB"', '"5 us"'),
        ("node.latency = 5", '"5 us"'),
        ('node.bandwith = "370 GB/s"', "bandwidth"),
        ('nodes.bandwidth = "370 GB/s"', "node"),
        ('node = "370 GB/s"', "node.bandwidth"),
        ("efficiency.bf16 = 55", "0.55"),
        ("efficiency.bf16 = 1e-300", "0.01"),
        ("efficiency.bf61 = 0.5", "bf16"),
        ("efficiency = 0.5", "efficiency.bf16"),
        ("node.bandwidth: 5", "TOML"),
    ],
)
def test_a_wrong_calibration_says_what_to_write(text, says, tmp_path, capfd):
    file = tmp_path / "own.toml"
    file.write_text(text)
    assert cli.main([*PLAN.split(), "--calibrate", str(file)]) == 2
    printed = capfd.readouterr().err
    assert printed.count("\n") == 1
    assert says in printed


# --- comparison and bandwidth -------------------------------------------------------------------


def test_plans_are_written_as_text():
    text = "tp=8, pp=4,zero=1,micro-batch=2,schedule=zb-h1,hardware=b200"
    assert read_plan(text) == {
        "tp": 8, "pp": 4, "zero": 1, "micro_batch": 2, "schedule": "zb-h1", "hardware": "b200",
    }  # fmt: skip
    assert read_plan("overlap_tp=on,recipe=16") == {"overlap_tp": True, "recipe": 16}
    assert read_plan("") == {}


def test_comparison_by_command(capfd):
    line = f"{PLAN} --recompute full --compare tp=8,pp=4 tp=8,pp=4,recompute=none"
    data = json.loads(course(f"{line} --json", capfd))
    assert data["winner"] == "B"
    assert "compute" in data["why"]
    activations = data["differences"]["activations"]
    assert activations["a"] < activations["b"]
    assert activations["better"] == "A"
    assert data["differences"]["weights"]["better"] == ""
    text = course(line, capfd)
    assert "B is better" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_plan_that_fits_wins():
    small, large = written(), written(fits=False, headroom_bytes=-2e9, step_seconds=0.1)
    assert compare(small, large).winner == "A"
    assert compare(large, small).winner == "B"
    assert "2.0 GB" in compare(small, large).why
    assert compare(small, small).winner == ""


def test_the_largest_part_is_the_reason():
    slow = written(step_seconds=3.0, parts={"compute": 1.9, "tp": 1.1})
    result = compare(written(), slow)
    assert result.winner == "A"
    assert "for tp" in result.why
    assert "45.0 %" in result.why


def test_bandwidth_changes_what_is_exposed():
    changes = sensitivity(
        model("llama-3-8b"), hardware("h100"), configure(model("llama-3-8b"), 8, tp=8)
    )
    assert changes["node +20%"] < 0 < changes["node -20%"]
    assert changes["network +20%"] == changes["network -20%"] == 0
    exposed = made(gpus=8, tp=8)
    share = exposed.communication["tp"].exposed_seconds / exposed.step_seconds
    assert -changes["node +20%"] == pytest.approx(share / 6, rel=0.2)  # 1 - 1/1.2
    assert "node" in bandwidth(changes)


# --- explanation --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "gpus", "degrees"),
    [
        ("llama-3-70b", 64, {"tp": 8, "pp": 4}),
        ("gpt-3-175b", 1024, {"tp": 8, "pp": 8, "chunks": 3, "recompute": "selective"}),
        ("mixtral-8x7b", 64, {"tp": 2, "ep": 8, "pp": 4}),
        ("deepseek-v3", 256, {"pp": 16, "ep": 16, "zero": 1}),
        ("llama-3-8b", 8, {"zero": 3}),
        ("llama-3-8b", 1, {}),
    ],
)
def test_the_derivation_ends_in_the_estimate(name, gpus, degrees):
    found = made(name, gpus, **degrees)
    lines = derivation(found)
    text = " ".join(" ".join(lines).split())
    start = lines.index("Parameters")
    symbols = set(re.findall(r"\b([A-Za-z]e?)=\d", " ".join(lines[:start])))
    assert {*"LhHGKfVtcpvdesbmBN"} <= symbols
    assert start <= 10
    assert 20 <= len(lines) - start <= 40
    assert max(map(len, lines)) <= 80
    assert f"= {duration(found.step_seconds)}" in text
    assert f"= {100 * found.mfu:.1f} %" in text
    assert f"= {number(found.memory.total / 1e9)} GB of" in text
    for part in ("weights", "gradients", "optimizer"):
        size = number(getattr(found.memory, part) / 1e9)
        assert re.search(rf"{part} .*?= {re.escape(size)} GB", text), part


def test_whiteboard_formulas_are_the_planner(capfd):
    """Where all is counted, the main formulas come close to the estimate."""
    text = " ".join(course(f"{PLAN} --tp 8 --pp 4 --explain", capfd).split())
    found = made("llama-3-70b", 64, tp=8, pp=4)
    main, whole = re.search(r"layers x 281 MB = ([\d.]+) GB; all ([\d.]+) GB", text).groups()
    assert float(main) == pytest.approx(float(whole), rel=0.05)
    assert float(whole) == pytest.approx(found.memory.activations / 1e9, rel=0.01)
    for axis in ("tp", "dp"):
        main, whole = re.search(rf" {axis} .*?= ([\d,.]+) GB; ([\d,.]+) GB in", text).groups()
        main, whole = (float(one.replace(",", "")) for one in (main, whole))
        assert main == pytest.approx(whole, rel=0.03)
    bubble, simulated = re.search(r"= ([\d.]+) % of ideal; simulated ([\d.]+)", text).groups()
    assert float(bubble) == pytest.approx(float(simulated), abs=0.3)


# --- frameworks and published runs --------------------------------------------------------------


@pytest.mark.parametrize("target", ["megatron", "torchtitan", "deepspeed", "fsdp2"])
def test_emit_prints_the_file(target, capfd):
    line = f"{PLAN} --tp 8 --emit {target}"
    one = made("llama-3-70b", 64, tp=8)
    found = emit(target, one.model, one.hardware, one.configuration)
    assert course(line, capfd) == found.text
    data = json.loads(course(f"{line} --json", capfd))
    assert (data["text"], data["notes"]) == (found.text, list(found.notes))


def test_published_runs_by_command(capfd, monkeypatch):
    few = [one for one in published.rows() if one.quantity == "parameters"][:2]
    monkeypatch.setattr(published, "rows", lambda: tuple(few))
    data = json.loads(course("plan --published --json", capfd))
    assert [one["run"] for one in data] == [one.run for one in few]
    assert all(one["held"] for one in data)
    assert few[0].run in course("plan --published", capfd)


# --- time ---------------------------------------------------------------------------------------


@pytest.mark.alone
def test_a_plan_answers_in_half_a_second():
    """CPU time, so that a busy machine does not matter; the best of three."""
    command = [sys.executable, "-m", "course_lib.cli", *PLAN.split(), "--tp", "8", "--pp", "4"]
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True, timeout=60, env={**os.environ})
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(spent) < 0.5, spent
