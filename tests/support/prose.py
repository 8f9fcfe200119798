"""The terms of the course: words that readers misread, each with the word to write.

``python tests/support/prose.py`` reads README, CONTRIBUTING, docs, hints, all markdown cells of
lessons, and the docstrings, comments and messages of the code; it prints a line for each and exits
with 1 if it finds any. Code, links and the quoted names of causes in a lab are left out. It
catches relapses; it does not make good prose.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from course_lib.grading.source import read_lesson

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "*/README.md", "docs/*.md")
CODE_FILES = ("course_lib/**/*.py", "exercises/graders/**/*.py", "tests/support/*.py")
COUNTED = (
    r"[kMGT]?B|bytes|calls|FLOPs?|operations|elements|numbers|positions|parameters|messages|"
    r"all-reduces|all-to-alls|activations|chunks|stages|sequences|tokens|samples|heads|ms|once|"
    r"twice|times"
)
PER = (
    r"rank|layer|step|token|second|ms|microsecond|GPU|replica|node|parameter|element|number|message|"
    r"request|row|micro-batch|hop|feature|sample|day"
)
VERB = r"has|have|holds?|needs?|sends?|stores?|computes?|reads?|takes?|gets?|must|is|can|may"
TERMS = {  # what to write: patterns of what not to write
    "single-process reference": r"twins?",
    "no rank": r"nobody(?:'s)?",
    "all ranks (of people: all readers)": r"everybody(?:'s)?|everyone(?:'s)?",
    "per rank, per layer, ...": rf"(?:{COUNTED}) an? (?:{PER})(?! (?:{VERB})\b)",
    "is sent": r"travel(?:s|led|ed|ling)?",
    "faulty run, correct run": r"patients?|illness(?:es)?|ill|healthy",
    "sync (copy back); wait": r"adopt(?:s|ed|ing)?|lands?|landed",
    "KV replication group": r"sharers?",
    "deferred weight gradient": r"put(?:s|ting)? off",
    "split backward (I, W)": r"in (?:two )?halves",
    "delays all W": r"hoard(?:s|ed|ing)?",
    "V-shaped placement": r"turn(?:s|ed|ing)? round",
    "all_to_all, exchange": r"swap(?:s|ping)?|swap_rows",
    "P2P transfer; stage boundary": r"hops?",
    "P2P exchange": r"mail(?:s|box)?",
    "saved activations": r"(?:what|that) backward keeps|keeps? for backward|kept for backward",
    "RoPE cache": r"(?:RoPE|rotary) tables?|tables of RoPE",
    "identity, no_op": r"as_it_is|nobody_waits",
    "is expected": r"(?:is|are) wanted|wanted (?:is|are)",
    "print, show": r"stands? behind its number",
    "American spelling": r"neighbours?|neighbouring|grey|colours?|favours?|synchronis\w+|"
    r"minimis\w+|optimis(?:ed?|ing|ation)|initialis\w+|behaviour|licence|coloured|centre|"
    r"modell(?:ed|ing)|labell(?:ed|ing)|travell(?:ed|ing)|analyse|normalis\w+|serialis\w+",
    "drawback": r"speaks? against",
    "use it when": r"take it when",
    "subject, verb, object": r"(?-i:Missing|Sent|Wanted|Kept|Measured|Shown) (?:is|are)",
}
CODE = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)\n]*\)|https?://\S+", re.DOTALL)
EMPHASIS = re.compile(r"(\*\*?)(?:\w+ ){0,2}\w+\1")  # the names of causes and of slider settings


def findings(text: str) -> list[str]:
    """Each forbidden term in ``text``, with its replacement."""
    prose = " ".join(EMPHASIS.sub(" ", CODE.sub(" ", text)).split())
    return [
        f"{found[0]!r} in '...{prose[max(found.start() - 40, 0) : found.end() + 20]}...': {better}"
        for better, pattern in TERMS.items()
        for found in re.finditer(rf"\b(?:{pattern})\b", prose, re.IGNORECASE)
    ]


def texts(root: Path) -> Iterator[tuple[str, str]]:
    """Yield every text that is read, with its place."""
    for path in sorted({path for pattern in PAGES for path in root.glob(pattern)}):
        yield str(path.relative_to(root)), path.read_text(encoding="utf-8")
    hints = root / "exercises" / "hints.json"
    yield from json.loads(hints.read_text(encoding="utf-8")).items()
    for path in sorted(root.glob("notebooks/[0-9][0-9]*_*.py")):
        for cell in read_lesson(path).cells:
            if cell.kind == "markdown":
                yield f"{path.relative_to(root)}:{cell.line}", cell.source
    for path in sorted({path for pattern in CODE_FILES for path in root.glob(pattern)}):
        if path != Path(__file__):
            for line, text in spoken(path.read_text(encoding="utf-8")):
                yield f"{path.relative_to(root)}:{line}", text


def spoken(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of docstrings, messages (strings of several words), comments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("# "):
            yield number, line.strip("# ")


def complaints(root: Path) -> list[str]:
    """Return a line for each forbidden term: its place, the term, what to write."""
    return [f"{place}: {found}" for place, text in texts(root) for found in findings(text)]


if __name__ == "__main__":
    said = complaints(ROOT)
    print("\n".join(said) or "prose: no forbidden term")
    sys.exit(bool(said))
