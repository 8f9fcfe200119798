"""``make mutants``: change one place of the library at a time, and see whether a test fails.

A mutant that no test notices is a hole in the tests, or it is equivalent: the changed line computes
the same. Known equivalent mutants are in ``equivalent.txt`` beside this file and are not run. Each
mutant is written into a copy of the course, so an interrupted run leaves this one as it is. The
tests run as always, on real ranks, but only the files of :data:`NEAREST`, up to the first failure.

    make mutants N=50                   50 mutants, spread over the packages
    make mutants N=20 IN=cp SEED=3      of one package, another sample
"""

from __future__ import annotations

import argparse
import ast
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent.txt")
COPIED = ("course_lib", "tests", "exercises", "pyproject.toml")
SLOWER = 4  # a mutant whose tests take this many times as long as without it hangs
NEAREST = {  # package -> its test files, those that find most in the least time first
    "schedule": "fast/test_schedule fast/test_schedule_zero_bubble fast/test_schedule_search "
    "fast/test_schedule_cli",
    "comm": "ranks/test_comm ranks/test_p2p fast/test_handle fast/test_flat fast/test_sharding "
    "fast/test_alpha_beta ranks/test_checked ranks/test_links ranks/test_priorities "
    "ranks/test_group_order ranks/test_tp ranks/test_zero_in_mesh",
    "tp": "ranks/test_tp ranks/test_vocabulary ranks/test_sp",
    "cp": "ranks/test_cp",
    "zero": "ranks/test_zero ranks/test_zero_memory ranks/test_zero_in_mesh",
    "pp": "ranks/test_pp ranks/test_pp_zero_bubble ranks/test_paced",
    "formulas": "ranks/test_zero ranks/test_zero_memory ranks/test_tp ranks/test_sp ranks/test_cp "
    "ranks/test_ep ranks/test_pp ranks/test_inference ranks/test_compose",
}
OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
# Messages and types: no test could or should fail when they change.
SKIPPED = (ast.JoinedStr, ast.Assert, ast.AnnAssign, ast.arguments)


@dataclass(frozen=True)
class Mutant:
    """``source`` of ``path`` is what the file becomes; ``before`` and ``after`` show the change."""

    path: str
    line: int
    before: str
    after: str
    source: str

    @property
    def package(self) -> str:
        """The folder of the library that the file belongs to."""
        return Path(self.path).parts[1]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before}  ->  {self.after}"

    @property
    def key(self) -> str:
        """The mutant without its line number, as in ``equivalent.txt``."""
        return f"{self.path}: {self.before}  ->  {self.after}"


def changes(node: ast.AST) -> Iterator[str]:
    """Yield every text that may stand in the place of ``node``."""

    def changed(**fields: object) -> str:
        values = {name: getattr(node, name) for name in node._fields} | fields
        text = ast.unparse(type(node)(**values))
        return f"({text})" if isinstance(node, (ast.BinOp, ast.BoolOp, ast.Compare)) else text

    match node:
        case ast.Compare(ops=[op, *rest]):
            yield changed(ops=[OTHER[type(op)](), *rest])
        case ast.BinOp(op=op) if type(op) in OTHER:
            yield changed(op=OTHER[type(op)]())
            yield ast.unparse(node.left)
        case ast.BoolOp(op=op, values=values):
            yield changed(op=OTHER[type(op)]())
            yield from (ast.unparse(one) for one in (values[0], values[-1]))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield f"({ast.unparse(operand)})"
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield ast.unparse(operand)
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield from (str(value + 1), f"({value - 1})")
        case ast.Call(keywords=keywords):
            for dropped in keywords:
                if dropped.arg not in (None, "strict"):  # of a zip: a guard that never fires
                    yield changed(keywords=[one for one in keywords if one is not dropped])
        case ast.IfExp(body=body, orelse=orelse):
            yield from (f"({ast.unparse(one)})" for one in (body, orelse))
        case ast.Expr(value=ast.Call() | ast.Yield() | ast.YieldFrom()) | ast.AugAssign():
            yield "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "pass"
        case ast.Raise() | ast.Delete() | ast.Continue() | ast.Break():
            yield "pass"


def nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below ``node`` that may change."""
    types = (getattr(node, "returns", None), getattr(node, "annotation", None))
    for child in ast.iter_child_nodes(node):
        if isinstance(child, SKIPPED) or child in types:
            continue
        yield child
        if not isinstance(child, ast.Raise):
            yield from nodes(child)


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield every mutant of the functions in a file."""
    source = path.read_bytes()
    lines = source.splitlines(keepends=True)
    starts = [sum(map(len, lines[:number])) for number in range(len(lines) + 1)]
    tree = ast.parse(source)
    functions = [
        one
        for part in [tree, *(each for each in tree.body if isinstance(each, ast.ClassDef))]
        for one in part.body
        if isinstance(one, ast.FunctionDef)
    ]
    for function in functions:
        for node in (
            each for statement in function.body for each in [statement, *nodes(statement)]
        ):
            if isinstance(node, SKIPPED) or not hasattr(node, "lineno"):
                continue
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            for text in changes(node):
                whole = source[:start] + text.encode() + source[end:]
                before, after = source[start:end].decode(), text
                if "\n" not in before + after:  # one line: show all of it
                    number = node.lineno - 1
                    before = lines[number].decode()
                    after = whole.splitlines()[number].decode()
                yield Mutant(
                    str(path.relative_to(ROOT)),
                    node.lineno,
                    " ".join(before.split()),
                    " ".join(after.split()),
                    whole.decode(),
                )


def sample(count: int, seed: int, packages: list[str], at: str | None) -> list[Mutant]:
    """Draw ``count`` mutants, the same number from every package, without the equivalent ones.

    With ``at`` ("course_lib/sp.py:7", or a file) return all mutants there.
    """
    known = {line.partition("  # ")[0] for line in EQUIVALENT.read_text().splitlines()}
    draw, drawn = random.Random(seed), []
    for number, package in enumerate(packages):
        files = sorted((ROOT / "course_lib" / package).rglob("*.py"))
        every = [mutant for file in files for mutant in mutants_of(file)]
        share = count // len(packages) + (number < count % len(packages))
        chosen = draw.sample(every, min(share, len(every)))
        if at is not None:
            chosen = [one for one in every if at in (one.path, f"{one.path}:{one.line}")]
        drawn += [mutant for mutant in chosen if mutant.key not in known]
    turn = {package: itertools.count() for package in packages}
    return sorted(drawn, key=lambda mutant: next(turn[mutant.package]))  # one package, the next


def run_tests(course: Path, package: str, limit: float) -> str:
    """Return "" if all tests of ``package`` pass in the copy ``course``, else what happened."""
    files = [f"tests/{name}.py" for name in NEAREST[package].split()]
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", *files]
    process = subprocess.Popen(
        command,
        cwd=course,
        env=os.environ | {"PYTHONPATH": str(course), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "time limit"
    if process.returncode == 0:
        return ""
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].partition(" - ")[0] if failed else f"exit code {process.returncode}"


def copy_of_the_course(folder: Path) -> Path:
    """Copy into ``folder`` what the tests read."""
    for name in COPIED:
        source = ROOT / name
        ignored = shutil.ignore_patterns("__pycache__", "*.ipynb")
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy(source, folder / name)
    return folder


def judge(
    package: str, mutant: Mutant | None, free: SimpleQueue[Path], limit: float
) -> tuple[str, float]:
    """Run the tests of ``package`` in a free copy; return the first failure, or "", and seconds."""
    course, began = free.get(), time.monotonic()
    try:
        if mutant is not None:
            (course / mutant.path).write_text(mutant.source)
        return run_tests(course, package, limit), time.monotonic() - began
    finally:
        if mutant is not None:
            shutil.copy(ROOT / mutant.path, course / mutant.path)
        free.put(course)


def main() -> int:
    """Run a sample; return 1 if a mutant survived."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--package", choices=NEAREST, action="append")
    parser.add_argument("--at", help="all mutants of this file, or of file:line, and no sample")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--limit", type=float, help="seconds per mutant, instead of measuring them")
    parser.add_argument("--list", action="store_true", help="print the sample and stop")
    given = parser.parse_args()
    drawn = sample(given.count, given.seed, given.package or list(NEAREST), given.at)
    packages = list(dict.fromkeys(mutant.package for mutant in drawn))
    if given.list:
        print(*drawn, sep="\n")
        return 0
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(given.at_once) as pool:
        free: SimpleQueue[Path] = SimpleQueue()
        for number in range(given.at_once):
            free.put(copy_of_the_course(Path(temporary, str(number), "course")))
        limits = dict.fromkeys(packages, given.limit)
        plain = pool.map(lambda one: judge(one, None, free, 1800), () if given.limit else packages)
        for package, (failed, seconds) in zip(packages, plain, strict=False):
            print(
                f"{package}: its tests take {seconds:.0f} s without a mutant {failed}", flush=True
            )
            if failed:
                return 2
            limits[package] = SLOWER * seconds + 30
        survivors: dict[str, list[Mutant]] = {package: [] for package in packages}
        running = {
            pool.submit(judge, one.package, one, free, limits[one.package]): one for one in drawn
        }
        for done in as_completed(running):
            mutant, (killer, _) = running[done], done.result()
            print(f"{'killed' if killer else 'SURVIVED'}  {mutant}  {killer}", flush=True)
            if not killer:
                survivors[mutant.package].append(mutant)
    print()
    for package, alive in survivors.items():
        total = sum(one.package == package for one in drawn)
        print(f"{package:<10} {total - len(alive):>3} of {total} killed")
    left = [mutant for alive in survivors.values() for mutant in alive]
    print(f"{'all':<10} {len(drawn) - len(left):>3} of {len(drawn)} killed")
    print(*left, sep="\n")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
