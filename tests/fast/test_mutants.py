"""The driver of ``make mutants``: what it changes, and whether its list of equivalents is stale."""

from __future__ import annotations

import ast
from pathlib import Path

import mutants
import pytest

ROOT = Path(__file__).parents[2]
SOURCE = '''\
def f(x: int | None, many: list, axis) -> "int | None":
    """A sentence with 1 + 1."""
    if not many and x < 3:
        raise ValueError(f"expected {1 + 1}")
    axis.send(x, many=-x)
    total = x or None
    total += axis.size * 2 if x else 1
    return total
'''
EXPECTED = """
    if not many and x < 3:  ->  if not many or x < 3:
    if not many and x < 3:  ->  if not many:
    if not many and x < 3:  ->  if x < 3:
    if not many and x < 3:  ->  if (many) and x < 3:
    if not many and x < 3:  ->  if not many and x <= 3:
    if not many and x < 3:  ->  if not many and x < 4:
    if not many and x < 3:  ->  if not many and x < 2:
    raise ValueError(f"expected {1 + 1}")  ->  pass
    axis.send(x, many=-x)  ->  pass
    axis.send(x, many=-x)  ->  axis.send(x)
    axis.send(x, many=-x)  ->  axis.send(x, many=x)
    total = x or None  ->  total = x and None
    total = x or None  ->  total = x
    total = x or None  ->  total = None
    total += axis.size * 2 if x else 1  ->  pass
    total += axis.size * 2 if x else 1  ->  total += axis.size * 2
    total += axis.size * 2 if x else 1  ->  total += 1
    total += axis.size * 2 if x else 1  ->  total += axis.size + 2 if x else 1
    total += axis.size * 2 if x else 1  ->  total += axis.size if x else 1
    total += axis.size * 2 if x else 1  ->  total += axis.size * 3 if x else 1
    total += axis.size * 2 if x else 1  ->  total += axis.size * 1 if x else 1
    total += axis.size * 2 if x else 1  ->  total += axis.size * 2 if x else 2
    total += axis.size * 2 if x else 1  ->  total += axis.size * 2 if x else 0
"""


def same(text: str) -> str:
    """Without the parentheses that keep a change in its place."""
    return ast.unparse(ast.parse(text))


def test_every_kind_of_change_is_made_and_messages_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    path = tmp_path / "f.py"
    path.write_text(SOURCE)
    made = list(mutants.mutants_of(path))
    got = {(m.before, same(m.source)) for m in made}
    wanted = set()
    for line in EXPECTED.strip().splitlines():
        before, after = line.strip().split("  ->  ")
        assert before in SOURCE
        wanted.add((before, same(SOURCE.replace(before, after))))
    assert got == wanted
    assert len(made) == len(wanted)
    assert {mutant.line for mutant in made} == {3, 4, 5, 6, 7}


def test_equivalent_mutants_exist_and_have_a_reason():
    known = mutants.EQUIVALENT.read_text().splitlines()
    keys = {
        mutant.key
        for path in {line.partition(": ")[0] for line in known}
        for mutant in mutants.mutants_of(ROOT / path)
    }
    for line in known:
        key, _, reason = line.partition("  # ")
        assert key in keys, "the line has changed: look at the mutant again"
        assert reason


@pytest.mark.parametrize("package", mutants.NEAREST)
def test_the_nearest_tests_exist(package):
    for name in mutants.NEAREST[package].split():
        assert (ROOT / "tests" / f"{name}.py").exists()
