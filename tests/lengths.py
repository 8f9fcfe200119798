"""What is longer than we aim at. It fails nothing: split by idea, never to please a count.

Lines of code are counted without docstrings, comments and blank lines; words of a lesson without
code, formulas and addresses. ``make length`` runs this.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from support.lesson_words import AIM, WORDS, words
from support.opened import TECHNIQUES, opened

from course_lib.grading.source import read_lesson
from course_lib.view.code import lines_with_code

COURSE = Path(__file__).parents[1]
LIBRARY = COURSE / "course_lib"
ABOVE_LAUNCH = (
    "schedule ledger layout formulas trace mesh comm model data recompute dp zero tp sp cp ep pp "
    "compose checkpoint inference"
).split()
FILE, FUNCTION, TOTAL, OPENED = 200, 25, 5_500, 5


def functions(text: str, lines: set[int]) -> list[tuple[str, int, int]]:
    """(name, first line, lines of code) of every function, nested ones in their parent too."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            found.append((node.name, node.lineno, len(lines & set(inside))))
    return found


def exported(room: str) -> int:
    """How many names a room exports: its imports or ``__all__``, or what a file defines."""
    file = LIBRARY / f"{room}.py"
    text = (file if file.exists() else LIBRARY / room / "__init__.py").read_text()
    found = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return len(ast.literal_eval(node.value))
        own = (f"course_lib.{room}.", "course_lib.formulas.")
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(own):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            found.add(node.name)
    return len(found)


def main() -> None:
    """Print the tables."""
    rooms: Counter[str] = Counter()
    files: Counter[str] = Counter()
    long_files, long_functions = [], []
    graders = COURSE / "exercises" / "graders"
    for path in sorted([*LIBRARY.rglob("*.py"), *graders.rglob("*.py")]):
        text = path.read_text()
        lines = lines_with_code(text)
        name = path.relative_to(LIBRARY if LIBRARY in path.parents else COURSE)
        room = name.parts[0].removesuffix(".py")
        rooms[room] += len(lines)
        files[room] += 1
        if len(lines) > FILE:
            long_files.append((len(lines), f"{name}"))
        long_functions += [
            (count, f"{name}:{line} {function}")
            for function, line, count in functions(text, lines)
            if count > FUNCTION
        ]
    library = sum(rooms[room] for room in ABOVE_LAUNCH)
    names = {room: exported(room) for room in ABOVE_LAUNCH}
    print(
        f"the library, above launch/: {library:,} lines of code (aim: {TOTAL:,}), "
        f"{sum(files[room] for room in ABOVE_LAUNCH)} files, {sum(names.values())} exported names"
    )
    for room in ABOVE_LAUNCH:
        print(f"  {rooms[room]:>5}  {room:11} {files[room]:>3} files {names[room]:>3} names")
    print(f"launch and the tools below: {sum(rooms.values()) - library:,}")
    for room, count in sorted(rooms.items()):
        if room not in (*ABOVE_LAUNCH, "__init__"):
            print(f"  {count:>5}  {room:11} {files[room]:>3} files")
    print(f"files opened in one forward and backward (aim: {OPENED})")
    for technique in TECHNIQUES:
        found = opened(technique)
        print(f"  {len(found):>5}  {technique:18} {' '.join(found)}")
    for title, found_long in (
        (f"files over {FILE} lines of code", long_files),
        (f"functions over {FUNCTION}", long_functions),
    ):
        print(f"{title}: {len(found_long) or 'none'}")
        for count, where in sorted(found_long, reverse=True):
            print(f"  {count:>4}  {where}")
    print(f"words of explanation (aim: {AIM:,}, limit: {WORDS:,})")
    for path in sorted((COURSE / "notebooks").glob("[0-9][0-9]*_*.py")):
        print(f"  {words(read_lesson(path)):>4}  {path.stem}")


if __name__ == "__main__":
    main()
