"""The files that set the course up say the same thing, and say it to every machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml

import course_lib
from course_lib.doctor import PYTHON, TORCH

ROOT = Path(__file__).parents[2]
CONDA_NAMES = {"torch": "pytorch", "playwright": "playwright-python"}
PIP_ONLY = {"fsrs"}  # of environment.yml
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TARGETS = ("setup", "tour", "test", "test-long", "mutants", "lab", "lint", "fmt", "length", "clean")


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
    text = (ROOT / "environment.yml").read_text()
    by_pip = dict(map(split, re.findall(r'^#.* pip install .*?"(.+?)" -e \.$', text, re.MULTILINE)))
    assert by_pip == {name: expected.pop(name) for name in PIP_ONLY}
    environment = yaml.safe_load(text)
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


def test_the_version_is_in_one_place():
    assert "version" not in PROJECT["project"]
    assert PROJECT["project"]["dynamic"] == ["version"]
    attribute = PROJECT["tool"]["setuptools"]["dynamic"]["version"]
    assert attribute == {"attr": "course_lib.__version__"}
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == course_lib.__version__
    changes = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert next(change for change in changes if change != "Unreleased") == course_lib.__version__


def test_version_is_printed_without_torch():
    script = (
        "import sys; from course_lib.cli import main; code = main(['--version']);"
        "sys.exit(code or ('torch' in sys.modules))"
    )
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (0, f"course {course_lib.__version__}\n")


def test_hypothesis_is_a_package_for_developers_only():
    """pytest stays: the official grade runs nbval."""
    runtime = {split(requirement)[0] for requirement in PROJECT["project"]["dependencies"]}
    assert "pytest" in runtime
    assert "hypothesis" not in runtime
    assert "hypothesis" in dict(map(split, PROJECT["project"]["optional-dependencies"]["dev"]))
    for path in (ROOT / "course_lib").rglob("*.py"):
        assert "hypothesis" not in path.read_text(), path


def test_the_package_is_typed():
    assert (ROOT / "course_lib" / "py.typed").is_file()
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["course_lib"]


def test_pre_commit_has_the_pinned_ruff_and_checks_the_notebooks():
    remote, local = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert f"ruff=={remote['rev'].removeprefix('v')}" in (ROOT / "constraints.txt").read_text()
    assert [hook["id"] for hook in remote["hooks"]] == ["ruff-check", "ruff-format"]
    assert "course_lib.grading.build --check" in local["hooks"][0]["entry"]


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
        "test": '-m pytest -m "not long and not alone" -n 2 --dist loadfile '
        "--no-loadscope-reorder tests/test_architecture.py tests/fast tests/notebooks "
        "tests/browser tests/ranks",
        "test-long": '-m pytest -m "long or hypothesis" --hypothesis-profile=random tests/',
        "mutants": ".venv/bin/python tests/mutants/mutants.py --count 50 --seed 0",
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
        "make site",
    ]


def test_github_runs_what_ci_runs():
    """The workflow adds what a bare runner lacks, and nothing that .ci/run does not check."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert job["timeout-minutes"] <= 90
    commands = [step["run"].strip() for step in job["steps"] if "run" in step]
    assert commands[-1] == ".ci/run"
    assert "https://download.pytorch.org/whl/cpu" in commands[0]
    options = {step["uses"].split("@")[0]: step["with"] for step in job["steps"] if "with" in step}
    assert options["actions/setup-python"]["python-version"] == f"{PYTHON[0]}.{PYTHON[1]}"
    assert options["actions/setup-python"]["cache"] == "pip"
    assert options["actions/upload-artifact"]["path"] == "out/"


@pytest.mark.parametrize("name", ["bug", "unclear_lesson", "wrong_mark"])
def test_issue_forms_ask_for_something(name):
    form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text())
    assert {"name", "description", "body"} <= form.keys()
    assert any(field.get("validations", {}).get("required") for field in form["body"])


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


def test_readme_tree_is_complete(need):
    """It lists exactly the rooms of course_lib, and every other file and folder of the root."""
    command = ["git", "ls-files"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    need(listed.returncode == 0 and listed.stdout, "a git checkout")
    files = [Path(name).parts for name in listed.stdout.splitlines()]
    rooms = {parts[1].removesuffix(".py") for parts in files if parts[0] == "course_lib"}
    text = (ROOT / "README.md").read_text()
    tree = re.search(r"^## The tree\n+```\n(.*?)```", text, re.MULTILINE | re.DOTALL)[1]
    assert names_in(tree, indent="  ") == rooms - {"__init__", "py.typed"}
    assert names_in(tree, indent="") == {parts[0] for parts in files} - {"README.md"}


def names_in(tree: str, indent: str) -> set[str]:
    """The entries of one level: ``dp, zero/   data parallelism`` holds dp and zero."""
    entries = re.findall(rf"^{indent}(\S.*?)  ", tree, re.MULTILINE)
    return {name.rstrip("/") for entry in entries for name in re.split(r",?\s+", entry)}
