"""The doctor: what it says when all is well, and when each thing is not."""

from __future__ import annotations

import builtins
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from course_lib import cli, doctor
from course_lib.doctor import Check, Report

NAMES = {check.__name__.removeprefix("check_").replace("_", " ") for check in doctor.CHECKS}


def report(*statuses: str) -> Report:
    return Report([Check(f"check {i}", status, "value") for i, status in enumerate(statuses)])


def test_a_failed_check_is_exit_3_with_its_fix(monkeypatch, capfd):
    broken = Check("python", "fail", "3.9.1 [old]", "install Python 3.11")
    monkeypatch.setattr(doctor, "CHECKS", (lambda: broken,))
    assert cli.main(["doctor"]) == 3
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].split() == ["fail", "python", "3.9.1", "[old]"]
    assert lines[1].strip() == "fix: install Python 3.11"
    assert cli.main(["doctor", "--json"]) == 3
    assert json.loads(capfd.readouterr().out)["ok"] is False


def test_every_line_that_is_not_ok_has_a_fix(monkeypatch):
    """Each check on a machine where it cannot be made."""
    real = builtins.__import__

    def refuse(name, *rest):
        if name.split(".")[0] in {"torch", "psutil", "course_lib", "jupyter_client"}:
            raise ImportError(f"no {name} here")
        return real(name, *rest)

    def nothing(*arguments, **options):
        raise OSError(1, "not permitted")

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setattr(doctor.socket, "create_server", nothing)
    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", nothing)
    monkeypatch.setattr(doctor.metadata, "version", nothing)
    found = {check.name: check for check in doctor.examine().checks}
    assert found.keys() == NAMES
    bad = {name for name, check in found.items() if check.status == "fail"}
    assert bad == NAMES - {"python", "shared memory"}
    assert all(found[name].fix and "\n" not in found[name].value for name in bad)
    assert "no torch here" in found["torch"].value


def test_it_answers_where_nothing_is_installed():
    """As the README says: the bare Python, without site-packages, prints lines and exits with 3."""
    command = [sys.executable, "-S", "-m", "course_lib.doctor"]
    plain = subprocess.run(command, cwd=doctor.ROOT, capture_output=True, text=True, timeout=60)
    assert plain.returncode == 3, plain.stderr
    assert plain.stderr == ""
    assert re.search(r"^fail  torch .*\n      fix: make setup", plain.stdout, re.MULTILINE)
    data = subprocess.run(
        [*command, "--json"], cwd=doctor.ROOT, capture_output=True, text=True, timeout=60
    )
    assert data.returncode == 3
    assert json.loads(data.stdout)["ok"] is False
    assert doctor.main(["--frobnicate"]) == 2


@pytest.mark.parametrize(
    ("platform", "statuses", "docker", "colab", "take"),
    [
        ("linux", ["ok", "warn"], None, False, "local"),
        ("darwin", ["ok"], "docker", False, "local"),
        ("linux", ["ok"], None, True, "colab"),
        ("linux", ["ok", "fail"], "docker", False, "devcontainer"),
        ("linux", ["fail"], None, False, "colab"),
        ("win32", ["ok"], "docker", False, "wsl2"),
    ],
)
def test_which_route_to_take(monkeypatch, platform, statuses, docker, colab, take):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: docker)
    monkeypatch.setattr(doctor, "_on_colab", lambda: colab)
    result = report(*statuses)
    assert result.take == take
    assert result.ok == ("fail" not in statuses)
    assert result.advice


def kernel(folder: Path, program: str) -> None:
    spec = folder / "kernels" / "python3"
    spec.mkdir(parents=True)
    argv = [program, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "other"}))


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("/opt/elsewhere/bin/python3", "fail"),
        ("python", "ok"),
        (sys.executable, "ok"),
        (os.path.join(os.path.dirname(sys.executable), "python3.99"), "ok"),
    ],
)
def test_a_kernel_that_shadows_ours_is_found(monkeypatch, tmp_path, program, status):
    kernel(tmp_path, program)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    check = doctor.check_kernelspec()
    assert check.status == status
    if status == "fail":
        assert program in check.value
        assert check.fix.endswith("-m ipykernel install --sys-prefix --name python3")


def test_links_to_one_program_are_not_one_python(tmp_path):
    """Every venv's python is a link to the same program; its folder tells them apart."""
    link = tmp_path / "python"
    link.symlink_to(os.path.realpath(sys.executable))
    assert not doctor._is_this_python(str(link))


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(doctor, "_requirements", lambda: ["torch>=2", "no-such-package<3"])
    check = doctor.check_packages()
    assert (check.status, check.value) == ("fail", "missing: no-such-package")


@pytest.mark.parametrize(("version", "status"), [("2.10.1", "warn"), ("2.12.0+cu130", "ok")])
def test_an_untested_torch_is_a_warning(monkeypatch, version, status):
    import torch

    monkeypatch.setattr(torch, "__version__", version)
    assert doctor.check_torch().status == status


def test_one_core_is_a_warning(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    check = doctor.check_cores()
    assert check.status == "warn"
    assert check.value.startswith("1 core")


def test_wrong_sums_fail(monkeypatch):
    from course_lib import launch

    monkeypatch.setattr(launch, "run", lambda fn, **options: [3.0, 1.0])
    assert doctor.check_ranks().status == "fail"
