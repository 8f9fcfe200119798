"""Which part may import which, and what no committed file may hold.

Rooms in order; a file may import rooms above its own and, within a line, those to its left. The
techniques never import one another: they meet in compose, checkpoint and inference only.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "course_lib"
ORDER = """
    aliases
    schedule ledger layout formulas
    trace mesh
    comm
    model data recompute
    dp zero tp sp cp ep
    pp
    checkpoint compose inference
    launch
    view
    planner
    grading
    interview
    bench tour doctor
    cli
"""
LINES = [line.split() for line in ORDER.split("\n") if line.strip()]
ROOMS = [room for line in LINES for room in line]
TECHNIQUES = set(LINES[5])
NEVER_TORCH = {"aliases", "schedule", "ledger", "layout", "formulas", "planner"}
LATE_TORCH = {"cli", "doctor", "interview"}
NO_TORCH = NEVER_TORCH | LATE_TORCH  # at import time
CHECKS = LIBRARY / "interview" / "checks"
# Of grading, what the command line imports before it knows that it must grade: json is enough.
LIGHT = {
    f"grading/{name}.py"
    for name in "answers catalog desk merge plugin progress report run syllabus".split()
}
HEAVY = {"torch", "numpy", "matplotlib", "nbformat", "IPython", "jupytext"}
DISTRIBUTED = {"mesh", "comm", "checkpoint", "launch", "bench"}
# Calls and waits are counted in torch itself, and claims about its signatures are read from it.
COUNTED = {LIBRARY / "grading" / "wire.py", LIBRARY / "interview" / "checks" / "signatures.py"}
GRADERS = ROOT / "exercises" / "graders"
MATPLOTLIB = {"view"}
OTHER_FILES = {"__init__"}


def files_of(room: str) -> list[Path]:
    """The file or the folder of a room."""
    file, folder = LIBRARY / f"{room}.py", LIBRARY / room
    return [file] if file.exists() else sorted(folder.rglob("*.py"))


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(path: Path, nodes: Iterator[ast.AST] | None = None) -> set[str]:
    """Dotted names of all modules that a file imports, inside functions too."""
    found = set()
    for node in nodes or ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = path.relative_to(ROOT).with_suffix("").parts[: -node.level]
                base = ".".join([*package, base]).rstrip(".")
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


def rooms_imported(path: Path) -> set[str]:
    names = (name.split(".") for name in imports(path))
    return {parts[1] for parts in names if parts[0] == "course_lib" and len(parts) > 1}


def import_time_nodes(path: Path) -> Iterator[ast.AST]:
    """What runs when the file is imported: not function bodies, not ``if TYPE_CHECKING``."""
    waiting: list[ast.AST] = [tree(path)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        waiting += ast.iter_child_nodes(node)


def test_every_file_is_in_a_room_and_every_room_has_files():
    found = {path.stem for path in LIBRARY.glob("*.py")} - OTHER_FILES
    found |= {path.parent.name for path in LIBRARY.glob("*/*.py")}
    assert found == set(ROOMS), f"no place in the order, or no files: {found ^ set(ROOMS)}"


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_up(room):
    place = ROOMS.index(room)
    allowed = set(ROOMS[:place]) | {room, "__version__"}
    if room in TECHNIQUES:
        allowed -= TECHNIQUES - {room}
    for path in files_of(room):
        bad = (rooms_imported(path) & set(ROOMS)) - allowed
        assert not bad, f"{path.relative_to(ROOT)} imports {sorted(bad)}, which stand below it"


@pytest.mark.parametrize("room", sorted(set(ROOMS) - DISTRIBUTED))
def test_torch_distributed_stays_where_it_is(room):
    for path in (p for p in files_of(room) if p not in COUNTED):
        by_import = {name for name in imports(path) if name.startswith("torch.distributed")}
        dotted = {
            node.lineno
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Attribute)
            and node.attr == "distributed"
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
        }
        assert not by_import | dotted, f"{path.relative_to(ROOT)} touches torch.distributed"


@pytest.mark.parametrize("room", sorted(set(ROOMS) - MATPLOTLIB))
def test_matplotlib_stays_in_view(room):
    for path in files_of(room):
        heads = {name.split(".")[0] for name in imports(path)}
        assert "matplotlib" not in heads, f"{path.relative_to(ROOT)} imports matplotlib"


@pytest.mark.parametrize("room", sorted(NO_TORCH))
def test_no_torch_at_import(room):
    """These answer at once; LATE_TORCH import torch when they need it, the others never."""
    for path in files_of(room):
        if CHECKS in path.parents:  # imported one by one, when a claim is checked
            continue
        names = imports(path, import_time_nodes(path) if room in LATE_TORCH else None)
        heavy = {name for name in names if name.split(".")[0] in {"torch", "numpy", "matplotlib"}}
        assert not heavy, f"{path.relative_to(ROOT)} imports {sorted(heavy)}"
        ours = {name.split(".")[1] for name in names if name.startswith("course_lib.")}
        assert (ours & set(ROOMS)) - {room} <= NEVER_TORCH


def test_the_rooms_without_torch_import_none_through_others():
    files = [path for room in sorted(NEVER_TORCH) for path in files_of(room)]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    script = (
        f"import importlib, sys\nfor name in {names}:\n    importlib.import_module(name)\n"
        "heavy = {'torch', 'numpy', 'matplotlib'} & sys.modules.keys()\n"
        "assert not heavy, sorted(heavy)"
    )
    run = [sys.executable, "-c", script]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", sorted(LIGHT))
def test_listing_and_starting_a_grade_import_no_grader(name):
    """`course list` answers at once, and `course grade` begins with the learner's notebook."""
    path = LIBRARY / name
    names = imports(path, import_time_nodes(path))
    assert not {name.split(".")[0] for name in names} & HEAVY
    modules = {f"{name.removeprefix('course_lib.').replace('.', '/')}.py" for name in names}
    ours = {module for module in modules if (LIBRARY / module).exists()}
    assert ours <= LIGHT | {"grading/verdict.py"}


RUNNER = {"draw", "runner", "runner_placed", "answers", "wire", "graders.runner"}


@pytest.mark.parametrize(
    "path", sorted(GRADERS.rglob("*.py")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_a_grader_imports_the_library_and_the_runner_side_no_judge(path):
    names = imports(path)
    assert {name.split(".")[0] for name in names} <= {
        "__future__", "collections", "copy", "dataclasses", "decimal", "fractions", "functools",
        "itertools", "math", "numbers", "operator", "random", "typing", "torch", "numpy",
        "course_lib", *(["json"] if path.stem == "by_hand" else []),
    }  # fmt: skip
    assert rooms_imported(path) <= set(ROOMS[: ROOMS.index("bench")])
    if path.parent.name == "runner":
        ours = {name for name in names if name.startswith("course_lib.grading")}
        allowed = {f"course_lib.grading.{name}" for name in RUNNER}
        bad = {name for name in ours if not any(name.startswith(each) for each in allowed)}
        assert not bad - {"course_lib.grading"}, f"a rank would import {sorted(bad)}"


def test_no_catch_all_file():
    bad = [path.name for path in LIBRARY.rglob("*.py") if path.stem in {"utils", "helpers", "misc"}]
    assert not bad


ABOVE_LAUNCH = ROOMS[: ROOMS.index("launch")]
HIDDEN = re.compile(r"type: ignore\[[^\]]*(attr-defined|method-assign)")
NODES = [n for room in ABOVE_LAUNCH for path in files_of(room) for n in ast.walk(tree(path))]


def is_own(target: ast.AST, name: str = "self") -> bool:
    """Whether it is ``self.name``, a field that a class declares."""
    return (
        isinstance(target, ast.Attribute)
        and isinstance(target.value, ast.Name)
        and target.value.id == name
    )


def targets(node: ast.AST) -> list[ast.expr]:
    """What an assignment writes to."""
    if isinstance(node, ast.AnnAssign):
        return [node.target]
    written = node.targets if isinstance(node, ast.Assign) else []
    return [one for each in written for one in getattr(each, "elts", [each])]


FIELDS = {one.attr for node in NODES for one in targets(node) if is_own(one)} | {
    one.id
    for node in NODES
    if isinstance(node, ast.ClassDef)
    for field in node.body
    for one in targets(field)
    if isinstance(one, ast.Name)
}
METHODS = {
    method.name
    for node in NODES
    if isinstance(node, ast.ClassDef)
    for method in node.body
    if isinstance(method, ast.FunctionDef)
} - (FIELDS - {"forward"})


@pytest.mark.parametrize("room", sorted(ABOVE_LAUNCH))
def test_no_method_is_replaced_and_no_attribute_is_undeclared(room):
    """What varies is a declared field or an argument: a reader finds it where it is used."""
    for path in files_of(room):
        hidden = HIDDEN.search(path.read_text())
        assert not hidden, f"{path.relative_to(ROOT)} holds {hidden[0]}"
        replaced = {
            one.attr
            for node in ast.walk(tree(path))
            for one in targets(node)
            if isinstance(one, ast.Attribute) and one.attr in METHODS and not is_own(one, "ctx")
        }
        assert not replaced, f"{path.relative_to(ROOT)} replaces {sorted(replaced)}"


def test_one_module_knows_where_a_parameter_keeps_its_shard_spec():
    """The two functions in comm/sharding.py are the only way to it; old notes are gone."""
    own = {"comm/sharding.py": 1, "aliases.py": 1}  # of the second: the name in old answers
    for path in LIBRARY.rglob("*.py"):
        text, name = path.read_text(), str(path.relative_to(LIBRARY))
        found = text.count('"shard_spec"') + text.count("tp_" + "dim")
        assert found == own.get(name, 0), name


def committed() -> list[Path]:
    """Text files that git has or would take; of an unpacked archive all that are not built."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0 and listed.stdout:
        paths = [ROOT / name for name in listed.stdout.splitlines()]
    else:
        paths = [path for path in ROOT.rglob("*") if ".venv" not in path.parts]
    binary = {".png", ".gz", ".pyc"}
    return [path for path in paths if path.is_file() and path.suffix not in binary]


HOME = re.compile(r"(?<![\w.~-])/(?:home|Users|root|work)/\w[^\s'\"`]*")


def test_no_absolute_paths_of_a_machine():
    places = [str(ROOT) + "/", str(Path.home()) + "/"]
    for path in committed():
        text = path.read_text(encoding="utf-8", errors="replace")
        for place in places:
            assert place not in text, f"{path.relative_to(ROOT)} holds {place}"
        found = HOME.search(text)
        assert not found, f"{path.relative_to(ROOT)} holds {found[0]}"


NOTEBOOKS = [path for path in committed() if path.suffix == ".ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: str(path.relative_to(ROOT)))
def test_notebooks_are_fit_to_be_committed(path):
    assert path.stat().st_size < 1_000_000
    notebook = json.loads(path.read_text())
    assert "widgets" not in notebook["metadata"], "GitHub refuses notebooks with stored widgets"
    for number, cell in enumerate(notebook["cells"], 1):
        for output in cell.get("outputs", []):
            where = f"cell {number}"
            assert output["output_type"] != "error", f"{where} ended in an error"
            text = json.dumps(output.get("text", "")) + json.dumps(
                output.get("data", {}).get("text/plain", "")
            )
            assert not re.search(r"\bpid\W{0,3}\d+|/tmp/|/dev/shm/| at 0x[0-9a-f]{6,}", text), where
