"""Show library code in a lesson, and count its lines."""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize
from collections.abc import Callable
from typing import Any

Shown = type | Callable[..., Any]  # a class, a function or a method
SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


def show_source(*objects: Shown) -> None:
    """Print the source of each object without its indentation, with blank lines in between."""
    print("\n".join(map(_source, objects)), end="")


def code_lines(*objects: Shown) -> int:
    """Return the lines of code of all objects, without docstrings, comments and blank lines."""
    return sum(len(lines_with_code(_source(one))) for one in objects)


def lines_with_code(text: str) -> set[int]:
    """Return the numbers, from 1, of the lines with code in a Python source."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        value = getattr(node, "value", None)
        is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
        if isinstance(node, ast.Expr) and is_text:  # a docstring, or another string as a statement
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def _source(one: Shown) -> str:
    return textwrap.dedent(inspect.getsource(one))
