"""The command line as a shell sees it: exit codes, one sentence on stderr, data alone on stdout."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from course_lib import cli
from course_lib.cli import machine, place, status
from course_lib.cli.benches import BENCHES
from course_lib.cli.status import Status
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


def test_help_lists_the_verbs():
    listed = course("--help").stdout
    for verb in VERBS:
        assert re.search(rf"^  {verb} ", listed, re.MULTILINE)


VERBS = (
    "doctor tour lab groups schedule plan map list score start check hint solution grade quiz "
    "bench".split()
)
FAST = [
    "--help",
    *(f"{verb} --help" for verb in ("check", "grade", "bench", "tour", "doctor")),
    "list",
    "list --json",
    "score",
    "score --json",
    "start 03",
    "start 03 --fresh",
    "hint 03 1",
    "hint 03 9",
    "solution 03 1 --yes",
    "check 03 9",
    "groups --tp 2 --dp 4",
    "schedule 1f1b",
    "plan llama-3-8b --gpus 8 --hardware h100",
    "plan llama-3-8b --gpus 8 --hardware h100 --tp 2 --explain",
    "plan llama-3-8b --gpus 8 --hardware h100 --serve",
    "map",
    "map --json",
    "quiz --list",
    "quiz --diagnose --seed 1 --json",
]
HEAVY = "torch numpy matplotlib nbformat IPython jupyterlab course_lib.grading.graders".split()
IMPORTED = """
import json, sys
from pathlib import Path
from course_lib.cli import main, place
place.ROOT = Path(sys.argv[1])
code = main(sys.argv[2:])
sys.stdout.flush()
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def lesson_03(tmp_path_factory) -> Path:
    """A course that holds lesson 03 alone."""
    root = tmp_path_factory.mktemp("course")
    for folder in ("notebooks", "exercises", "solutions"):
        (root / folder).mkdir()
        for file in [
            *(place.ROOT / folder).glob("03_*.ipynb"),
            *(place.ROOT / folder).glob("*.json"),
        ]:
            shutil.copyfile(file, root / folder / file.name)
    return root


@pytest.mark.parametrize("line", FAST)
def test_these_commands_import_nothing_that_takes_seconds(line, lesson_03):
    result = subprocess.run(
        [sys.executable, "-c", IMPORTED, str(lesson_03), *line.split()],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    bad_input = line.endswith(" 9")
    assert result.returncode == (2 if bad_input else 0), result.stderr
    assert bool(result.stdout) == (not bad_input)
    modules = set(json.loads(result.stderr.splitlines()[-1]))
    assert "course_lib.cli" in modules
    assert not modules & set(HEAVY)


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
    "quiz --topic memory --count 0",
    "quiz --seed -1",
    "quiz --diagnose --count 3",
    "quiz memory",
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
    def measure(rounds, say):
        raise ValueError("rounds 3 is odd. Choose\n an even number")

    fake_module("course_lib.bench.dp", measure=measure)
    assert cli.main(["bench", "dp", "--rounds", "3"]) == 2
    assert capfd.readouterr().err == "rounds 3 is odd; Choose an even number.\n"


def test_a_missing_package_is_the_environment(fake_module, capfd):
    def measure(rounds, say):
        raise ModuleNotFoundError("No module named 'torch'")

    fake_module("course_lib.bench.dp", measure=measure)
    assert cli.main(["bench", "dp"]) == 3
    error = capfd.readouterr().err
    assert "No module named 'torch'" in error
    assert "course doctor" in error
    assert error.count("\n") == 1


def test_a_defect_keeps_its_traceback(fake_module):
    def measure(rounds, say):
        raise AssertionError("ours")

    fake_module("course_lib.bench.dp", measure=measure)
    with pytest.raises(AssertionError, match="ours"):
        cli.main(["bench", "dp"])


def test_interrupt_is_one_line_and_130(fake_module, capfd):
    def measure(rounds, say):
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


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_takes_rounds_and_says_what_it_does(name):
    measure = importlib.import_module(f"course_lib.bench.{name}").measure
    assert {"rounds", "say"} <= inspect.signature(measure).parameters.keys()


@pytest.mark.parametrize("name", ["launch", "dp", "zero", "cp", "wire"])
def test_bench_passes_rounds_and_prints(name, fake_module, capfd):
    fake_module(
        f"course_lib.bench.{name}",
        measure=lambda rounds, say: say("all of them") and {"rounds": rounds},
        text=lambda result: f"{result['rounds']} rounds",
    )
    assert cli.main(["bench", name, "--rounds", "7", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"rounds": 7}
    assert cli.main(["bench", name, "--rounds", "7"]) == 0
    assert capfd.readouterr().out == "7 rounds\n"


def test_a_command_that_ends_soon_leaves_no_status(capfd):
    with Status("working"):
        pass
    assert capfd.readouterr() == ("", "")


def said(capfd, words: str) -> str:
    """What was printed on stderr until it holds ``words``."""
    err, end = "", time.monotonic() + 30
    while words not in err:
        assert time.monotonic() < end, f"{words!r} is not in {err!r}"
        time.sleep(0.02)
        out, more = capfd.readouterr()
        assert out == ""
        err += more
    return err


def test_the_status_in_a_log_is_lines_on_stderr(capfd, monkeypatch):
    monkeypatch.setattr(status, "INTERVAL", 0.02)
    with Status("starting") as shown:
        first = said(capfd, "starting\n")
        say = pickle.loads(pickle.dumps(shown.say))  # as a rank receives it
        say("round 2 of 20")
        second = said(capfd, "round 2 of 20\n")
        shown.line("ann.ipynb: 3 of 4 points")
        third = said(capfd, "points\n")
    lines = [re.sub(r"^ +\d+ s  ", "", line) for line in (first + second + third).splitlines()]
    assert list(dict.fromkeys(lines))[:2] == ["starting", "round 2 of 20"]
    assert set(lines) == {"starting", "round 2 of 20", "ann.ipynb: 3 of 4 points"}
    assert not shown._thread.is_alive()
    assert not Path(shown._folder.name).exists()


def test_the_status_on_a_terminal_is_one_line_that_disappears(capfd, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(status, "TICK", 0.02)
    with Status("a text that is much longer than the terminal is wide") as shown:
        drawn = said(capfd, "a text that is much")
        shown.line("ann.ipynb: 3 of 4 points")
        drawn += said(capfd, "points\n")
    drawn += capfd.readouterr().err
    first, *lines, last = drawn.split(status.CLEAR)
    assert (first, last) == ("", "")
    for line in lines:
        assert re.fullmatch(r" +\d+ s  a text that is much l|ann.ipynb: 3 of 4 points\n|", line)


def test_the_status_of_a_verb_is_over_when_it_fails(fake_module, capfd, monkeypatch):
    seen = []

    def measure(rounds, say):
        say("round 3")
        seen.append(said(capfd, "round 3\n"))
        raise ValueError("rounds 3 is odd")

    fake_module("course_lib.bench.dp", measure=measure)
    monkeypatch.setattr(status, "INTERVAL", 0.02)
    assert cli.main(["bench", "dp", "--rounds", "3", "--json"]) == 2
    assert re.search(r"^ +\d+ s  round 3$", seen[0], re.MULTILINE)
    assert capfd.readouterr().err.splitlines()[-1] == "rounds 3 is odd."


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


def test_lab_becomes_jupyterlab(tmp_path, monkeypatch):
    class Replaced(Exception):
        pass

    def execv(program, command):
        raise Replaced(program, command)

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
    monkeypatch.setenv("PATH", "/elsewhere")
    monkeypatch.delenv("JUPYTER_CONFIG_PATH", raising=False)
    shutil.copytree(place.ROOT / "notebooks", tmp_path / "notebooks")
    shutil.copytree(place.ROOT / "exercises", tmp_path / "exercises")
    monkeypatch.setattr(place, "ROOT", tmp_path)
    with pytest.raises(Replaced) as caught:
        cli.main(["lab", "--no-browser", "--", "--debug"])
    program, command = caught.value.args
    assert program == sys.executable
    opens = "--LabApp.default_url=/lab/tree/work/{}"
    assert command[-2:] == [opens.format("notebooks/00_start_here.ipynb"), "--debug"]
    assert (tmp_path / "work" / "notebooks" / "00_start_here.ipynb").exists()
    assert os.environ["JUPYTER_PREFER_ENV_PATH"] == "1"
    assert os.environ["PATH"] == f"{Path(sys.executable).parent}{os.pathsep}/elsewhere"
    config = Path(os.environ["JUPYTER_CONFIG_PATH"]) / "labconfig"
    overrides = json.loads((config / "default_setting_overrides.json").read_text())
    assert overrides["@jupyterlab/apputils-extension:notification"] == {"fetchNews": "false"}

    own = tmp_path / "work" / "exercises" / "03_data_parallelism.ipynb"
    own.write_text("{}")
    os.utime(own, (2e9, 2e9))
    with pytest.raises(Replaced) as caught:
        cli.main(["lab"])
    assert caught.value.args[1][-1] == opens.format(f"exercises/{own.name}"), "saved last"
