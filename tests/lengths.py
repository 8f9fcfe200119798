"""What is longer than we aim at. It fails nothing: split by idea, never to please a count.

Code lines only: docstrings, comments and blank lines are free. Of a lesson the words of its text
count, not those of code, formulas and addresses. ``make length`` runs this.
"""

from __future__ import annotations

import ast
from pathlib import Path

from support.lesson_words import AIM, WORDS, words

from course_lib.grading.source import read_lesson
from course_lib.view.code import lines_with_code

LIBRARY = Path(__file__).parents[1] / "course_lib"
ABOVE_LAUNCH = (
    "schedule ledger layout trace mesh comm model data recompute dp zero tp sp cp ep pp "
    "compose checkpoint inference"
).split()
FILE, FUNCTION, TOTAL = 200, 25, 3_500
LESSONS = Path(__file__).parents[1] / "notebooks"


def functions(text: str, lines: set[int]) -> list[tuple[str, int, int]]:
    """(name, first line, lines of code) of every function, nested ones in their parent too."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            found.append((node.name, node.lineno, len(lines & set(inside))))
    return found


def main() -> None:
    """Print the table."""
    total: dict[bool, int] = {True: 0, False: 0}
    long_files, long_functions = [], []
    for path in sorted(LIBRARY.rglob("*.py")):
        text = path.read_text()
        lines = lines_with_code(text)
        name = path.relative_to(LIBRARY)
        room = name.parts[0].removesuffix(".py")
        total[room in ABOVE_LAUNCH] += len(lines)
        if len(lines) > FILE:
            long_files.append((len(lines), f"{name}"))
        long_functions += [
            (count, f"{name}:{line} {function}")
            for function, line, count in functions(text, lines)
            if count > FUNCTION
        ]
    print(f"the library, above launch/: {total[True]:,} lines of code (aim: {TOTAL:,})")
    print(f"launch and the tools below: {total[False]:,}")
    for title, found in (
        (f"files over {FILE} lines of code", long_files),
        (f"functions over {FUNCTION}", long_functions),
    ):
        print(f"{title}: {len(found) or 'none'}")
        for count, where in sorted(found, reverse=True):
            print(f"  {count:>4}  {where}")
    print(f"words of explanation (aim: {AIM:,}, limit: {WORDS:,})")
    for path in sorted(LESSONS.glob("[0-9][0-9]*_*.py")):
        print(f"  {words(read_lesson(path)):>4}  {path.stem}")


if __name__ == "__main__":
    main()
