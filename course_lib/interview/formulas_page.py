"""The formulas of the course on one page, each with a number that the library computes.

``python -m course_lib.interview.formulas_page`` writes docs/formulas.md. A test evaluates the text
of every formula for several sizes and compares it with the library.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path

from course_lib.interview.formula_rows import EXAMPLE, SECTIONS, SYMBOLS
from course_lib.interview.units import show

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "formulas.md"
INTRODUCTION = """# Formulas to know

One example runs through the page: a model of 70 billion parameters with the sizes of Llama 3 70B,
on 128 H100 with tp=8, pp=4 and dp=4. The rows of cp and ep are examples on their own, with the
degrees of the table. Weights, gradients and activations have 2 bytes per element.
AdamW stores 12 bytes per parameter: a master weight and two moments in fp32. Ring attention sums
the gradients of keys and values in fp32. The activations are of a GPT layer of this width,
with an MLP of 4 D features, as many key and value heads as query heads, and dropout. A space
between two factors is a multiplication, and `a/b c` is (a/b) c.

The library computes every number in the column "example", and a test compares it with the formula.
This page is written by `python -m course_lib.interview.formulas_page`.
"""
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate(formula: str, values: Mapping[str, float] = EXAMPLE) -> float:
    """Return the value of a formula of numbers, symbols, + - * /, min and multiplying spaces.

    Raises ValueError for anything else.
    """
    spelled = re.sub(r"(?<=[\w)])\s+(?=[\w(])", "*", formula)
    return float(_value(ast.parse(spelled, mode="eval").body, values))


def _value(node: ast.expr, values: Mapping[str, float]) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.Name(id=name) if name in values:
            return Fraction(values[name])
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            return Fraction(OPERATORS[type(op)](_value(left, values), _value(right, values)))
        case ast.Call(func=ast.Name(id="min"), args=args):
            return min(_value(each, values) for each in args)
    raise ValueError(f"expected numbers, symbols, + - * / and min, got {ast.unparse(node)!r}")


def page() -> str:
    """Return docs/formulas.md."""
    return "\n".join([INTRODUCTION, *_symbols(), *_sections()])


def _symbols() -> Iterator[str]:
    """Yield the table of symbols, two in a row."""
    yield from (
        "| symbol | meaning | example | symbol | meaning | example |",
        "|---|---|---:" * 2 + "|",
    )
    cells = [f"| {name} | {meaning} | {_short(value)} " for name, meaning, value in SYMBOLS]
    half = -(-len(cells) // 2)
    for left, right in zip(cells[:half], [*cells[half:], "| | | "], strict=False):
        yield f"{left}{right}|"
    yield ""


def _short(value: float) -> str:
    """Return a size of the example: "8,192", "2e-05" or "70e9"."""
    power = next((each for each in (12, 9) if value >= 10**each), 0)
    if power:
        return f"{value / 10**power:g}e{power}"
    return f"{value:,}" if value == int(value) else f"{value:.4g}"


def _sections() -> Iterator[str]:
    for title, rows in SECTIONS.items():
        yield from (f"## {title}", "", "| quantity | formula | example | lesson |")
        yield "|---|---|---:|---|"
        for row in rows:
            value = show(row.computed(), row.unit)
            yield f"| {row.quantity} | `{row.formula}` | {value} | {_lesson(row.lesson)} |"
        yield ""


def _lesson(number: str) -> str:
    """Return a link to the lesson."""
    path = next((ROOT / "notebooks").glob(f"{number}_*.ipynb"))
    return f"[{number}](../notebooks/{path.name})"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
