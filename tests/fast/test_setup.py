"""The files that set the course up say the same thing, and say it to every machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from course_lib.doctor import PYTHON, TORCH

ROOT = Path(__file__).parents[2]
CONDA_NAMES = {"torch": "pytorch", "playwright": "playwright-python"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TARGETS = ("setup", "tour", "test", "test-long", "lab", "lint", "fmt", "length", "clean")


def split(requirement: str) -> tuple[str, frozenset[str]]:
    """``torch>=2.11`` as the name and the set of its bounds."""
    name, bounds = re.fullmatch(r"([A-Za-z0-9_.-]+)\s*(.*)", requirement).groups()
    return name, frozenset(part.strip() for part in bounds.split(",") if part)


def test_environment_names_the_packages_and_ranges_of_pyproject():
    wanted = [
        "python" + PROJECT["project"]["requires-python"],
        *PROJECT["build-system"]["requires"],
        *PROJECT["project"]["dependencies"],
        *PROJECT["project"]["optional-dependencies"]["dev"],
    ]
    expected = {CONDA_NAMES.get(name, name): bounds for name, bounds in map(split, wanted)}
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert all(isinstance(line, str) for line in environment["dependencies"]), "no pip section"
    found = dict(map(split, environment["dependencies"]))
    assert found.pop("pip") == frozenset()
    assert found == expected
    assert [name for name in environment["channels"] if name != "nodefaults"] == ["conda-forge"]


def test_constraints_pin_every_package_once_within_the_ranges():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in pins), "exact pins only"
    names = [line.split("==")[0].lower() for line in pins]
    assert len(set(names)) == len(names)
    versions = dict(line.lower().split("==") for line in pins)
    assert versions["torch"] == "2.13.0"
    extras = PROJECT["project"]["optional-dependencies"]["dev"]
    for requirement in PROJECT["project"]["dependencies"] + extras:
        name, bounds = split(requirement)
        assert name in versions, f"{name} is not pinned"
        for bound in bounds:
            sign, limit = re.fullmatch(r"(>=|<)([\d.]+)", bound).groups()
            assert (numbers(versions[name]) >= numbers(limit)) == (sign == ">="), requirement


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def test_ci_tests_the_pinned_torch(need):
    """Elsewhere another torch of the range may be installed; then this says so."""
    need(metadata.version("torch").split("+")[0] == "2.13.0", "torch 2.13.0, the pinned one")


def test_doctor_knows_the_ranges_of_pyproject():
    assert PROJECT["project"]["requires-python"] == f">={PYTHON[0]}.{PYTHON[1]}"
    bounds = dict(map(split, PROJECT["project"]["dependencies"]))["torch"]
    assert bounds == {f">={TORCH[0]}.{TORCH[1]}"}
    assert f"when it is {TORCH[0]}.{TORCH[1]} or newer" in (ROOT / "docs/colab.md").read_text()


@pytest.mark.parametrize("target", TARGETS)
def test_make_target_exists_and_ends_in_what_the_readme_says(target, need):
    need(shutil.which("make"), "make")
    lines = dry_run(target)
    runs = {
        "tour": ".venv/bin/course tour",
        "test": '-m pytest -m "not long and not alone" -n 2 --dist loadfile --no-loadscope-reorder '
        "tests/test_architecture.py tests/fast tests/notebooks tests/browser tests/ranks",
        "lab": ".venv/bin/course lab",
        "lint": ".venv/bin/mypy",
    }
    assert runs.get(target, "") in lines
    assert "apt" not in lines.split()


def test_setup_installs_the_pinned_torch_first(need):
    need(shutil.which("make"), "make")
    installs = [line for line in dry_run("setup").splitlines() if "pip install" in line]
    assert [line.split("pip install ")[1] for line in installs] == [
        "-c constraints.txt torch",
        "-c constraints.txt -e '.[dev]'",
    ]


def dry_run(target: str) -> str:
    """What make would do on a fresh clone."""
    command = ["make", "--dry-run", "-C", str(ROOT), "-W", "pyproject.toml", target]
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_ci_runs_lints_tour_and_tests():
    text = (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "set -euo pipefail" in text
    assert [line for line in text.splitlines() if line.startswith("make ")] == [
        "make setup",
        "make lint",
        "make length",
        "make tour",
        "make test",
    ]


def test_devcontainer_sets_up_with_make():
    folder = ROOT / ".devcontainer"
    config = json.loads((folder / "devcontainer.json").read_text())
    assert "make setup" in config["postCreateCommand"]
    assert (folder / config["build"]["dockerfile"]).is_file()


def test_readme_names_what_exists():
    text = (ROOT / "README.md").read_text()
    for command in ("make tour", "make test", "make lab", "pip install -e .", "course tour"):
        assert command in text, command
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / target).exists(), f"the README points at {target}"
    for name in re.findall(r"^([\w./-]+/)\s{2,}\S", text, re.MULTILINE):
        assert (ROOT / name).is_dir(), f"the tree in the README names {name}"
