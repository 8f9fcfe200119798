"""The command line as a shell sees it: exit codes, one sentence on stderr, data alone on stdout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from course_lib import cli
from course_lib.cli import machine, place
from course_lib.layout import rank_groups

GROUPS_16 = "groups --world 16 --tp 2 --dp 2 --pp 4 --order tp-dp-pp".split()


def course(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "course_lib.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.fixture
def fake_module(monkeypatch):
    """Puts a stand-in for a slow module where the verb will import it."""

    def install(name: str, **attributes):
        module = types.ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)

    return install


def test_help_lists_the_verbs_and_imports_no_torch():
    script = (
        "import sys; from course_lib.cli import main; main(['--help']);"
        "heavy = {'torch', 'numpy', 'matplotlib', 'jupyterlab', 'IPython'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    for verb in ("doctor", "tour", "lab", "groups", "bench"):
        assert re.search(rf"^  {verb} ", result.stdout, re.MULTILINE)


def test_without_arguments_it_helps():
    result = course()
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == course("--help").stdout


def test_the_installed_program_runs_without_activation():
    program = Path(sys.executable).with_name("course")
    result = subprocess.run(
        [program, *GROUPS_16, "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert json.loads(result.stdout)["world"] == 16


def test_groups_json():
    result = course(*GROUPS_16, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    data = json.loads(result.stdout)
    assert data["order"] == "tp-dp-pp"
    assert data["world"] == 16
    assert data["tp"][:2] == [[0, 1], [2, 3]]
    expected = rank_groups("tp-dp-pp", 16, tp=2, dp=2, pp=4)
    assert {key: data[key] for key in expected} == expected
    assert set(expected) >= {"tp", "dp", "pp", "cp", "mp"}


def test_groups_defaults():
    data = json.loads(course("groups", "--world", "8", "--tp", "2", "--json").stdout)
    assert data["order"] == "tp-cp-dp-pp"
    assert data["dp"] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert data["pp"] == [[rank] for rank in range(8)]
    experts = json.loads(course("groups", "--dp", "4", "--ep", "2", "--json").stdout)
    assert experts["ep"] == [[0, 1], [2, 3]]


def test_groups_drawing_is_plain_where_nobody_looks():
    text = course(*GROUPS_16).stdout
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "[0 4 8 12] [1 5 9 13] [2 6 10 14] [3 7 11 15]" in text


def test_colour_changes_no_character_and_no_color_is_honoured():
    plain = course(*GROUPS_16).stdout
    coloured = course(*GROUPS_16, FORCE_COLOR="1", TERM="xterm-256color").stdout
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain
    silent = course(*GROUPS_16, FORCE_COLOR="1", TERM="xterm-256color", NO_COLOR="1").stdout
    assert not re.search(r"\x1b\[(3|9)[0-9]", silent)


BAD = [
    "frobnicate",
    "--frobnicate",
    "groups --world x",
    "groups --world 0",
    "groups --world",
    "groups --frobnicate 3",
    "groups 16",
    "groups --world 16 --tp 3",
    "groups --world 16 --tp 2 --dp 3",
    "groups --order tp-zz",
    "groups --order tp-dp --pp 2",
    "groups --tp 2048 --dp 2048",
    "groups --per-node 0",
    "groups --dp 4 --ep 3",
    "doctor --frobnicate",
    "doctor now",
    "tour --frobnicate",
    "tour --out",
    "tour --out=",
    "tour --out /dev/null/there",
    "tour now",
    "lab --port x",
    "lab --port 70000",
    "lab --frobnicate",
    "lab no_such_notebook.ipynb",
    "bench",
    "bench frobnicate",
    "bench launch --rounds 0",
    "bench dp --rounds many",
    "bench wire now",
]


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_sentence_and_exit_2(line, capfd):
    assert cli.main(line.split()) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"[^\n]{10,300}\.\n", printed.err), printed.err
    assert ". " not in printed.err
    assert "Traceback" not in printed.err


def test_bad_input_through_a_real_process():
    result = course("groups", "--world", "16", "--tp", "3", "--json")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert "tp=3" in result.stderr


def test_a_value_error_of_the_library_is_bad_input(fake_module, capfd):
    def measure(rounds):
        raise ValueError("rounds 3 is odd. Choose\n an even number")

    fake_module("course_lib.bench.dp", measure=measure)
    assert cli.main(["bench", "dp", "--rounds", "3"]) == 2
    assert capfd.readouterr().err == "rounds 3 is odd; Choose an even number.\n"


def test_a_missing_package_is_the_environment(fake_module, capfd):
    def measure(rounds):
        raise ModuleNotFoundError("No module named 'torch'")

    fake_module("course_lib.bench.dp", measure=measure)
    assert cli.main(["bench", "dp"]) == 3
    error = capfd.readouterr().err
    assert "No module named 'torch'" in error
    assert "course doctor" in error
    assert error.count("\n") == 1


def test_a_defect_keeps_its_traceback(fake_module):
    def measure(rounds):
        raise AssertionError("ours")

    fake_module("course_lib.bench.dp", measure=measure)
    with pytest.raises(AssertionError, match="ours"):
        cli.main(["bench", "dp"])


def test_interrupt_is_one_line_and_130(fake_module, capfd):
    def measure(rounds):
        raise KeyboardInterrupt

    fake_module("course_lib.bench.dp", measure=measure)
    assert cli.main(["bench", "dp"]) == 130
    assert capfd.readouterr().err == "Interrupted.\n"


def test_a_closed_pipe_is_no_error():
    command = f"'{sys.executable}' -m course_lib.cli groups --world 16384 --tp 8 --json | head -c 9"
    result = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, '{"order":', "")


@pytest.mark.parametrize("name", ["launch", "dp", "zero", "cp", "wire"])
def test_bench_passes_rounds_and_prints(name, fake_module, capfd):
    fake_module(
        f"course_lib.bench.{name}",
        measure=lambda rounds: {"rounds": rounds},
        text=lambda result: f"{result['rounds']} rounds",
    )
    assert cli.main(["bench", name, "--rounds", "7", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"rounds": 7}
    assert cli.main(["bench", name, "--rounds", "7"]) == 0
    assert capfd.readouterr().out == "7 rounds\n"


@pytest.mark.parametrize("code", [0, 1, 3])
def test_tour_gets_its_options_and_gives_its_exit_code(code, fake_module, tmp_path):
    seen = {}

    def run_tour(**options):
        seen.update(options)
        return code

    fake_module("course_lib.tour.job", run_tour=run_tour)
    assert cli.main(["tour", "--out", str(tmp_path / "new"), "--json"]) == code
    assert seen == {"out": tmp_path / "new", "as_json": True}
    assert (tmp_path / "new").is_dir()


def test_lab_starts_jupyterlab_with_this_python():
    command = machine.lab_command(port=8899, browser=False, rest=["--ServerApp.token=t"])
    assert command[:3] == [sys.executable, "-m", "jupyterlab"]
    assert f"--notebook-dir={place.ROOT}" in command
    assert command[-1] == "--ServerApp.token=t"
    assert {"--ServerApp.port=8899", "--no-browser"} <= set(command)
    assert not any(
        "port" in word or "browser" in word for word in machine.lab_command(None, True, [])
    )


def test_lab_becomes_jupyterlab(monkeypatch):
    class Replaced(Exception):
        pass

    def execv(program, command):
        raise Replaced(program, command)

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
    with pytest.raises(Replaced) as caught:
        cli.main(["lab", "--no-browser", "--", "--debug"])
    program, command = caught.value.args
    assert program == sys.executable
    assert command[-1] == "--debug"
    assert os.environ["JUPYTER_PREFER_ENV_PATH"] == "1"
