"""The terms of the course in prose: words that readers misread, each with the word to write.

It reads README, CONTRIBUTING, docs and all markdown cells of lessons. Code, links and the quoted
names of causes in a lab are left out: they follow the code.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from course_lib.grading.source import read_lesson

ROOT = Path(__file__).parents[2]
LESSONS = sorted((ROOT / "notebooks").glob("[0-9][0-9]*_*.py"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / folder / "README.md" for folder in ("notebooks", "exercises", "solutions")),
    *sorted((ROOT / "docs").glob("*.md")),
]
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
    "all_to_all, exchange": r"swap(?:s|ped|ping)?|swap_rows",
    "P2P transfer; stage boundary": r"hops?",
    "P2P exchange": r"mail(?:s|box)?",
    "saved activations": r"(?:what|that) backward keeps|keeps? for backward|kept for backward",
    "RoPE cache": r"(?:RoPE|rotary) tables?|tables of RoPE",
    "identity, no_op": r"as_it_is|nobody_waits",
    "is expected": r"(?:is|are) wanted|wanted (?:is|are)",
    "print, show": r"stands? behind its number",
    "American spelling": r"neighbours?|neighbouring|grey|colours?|favours?|synchronis\w+|"
    r"minimis\w+|optimis(?:ed?|ing|ation)|initialis\w+|behaviour|licence",
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


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_uses_the_terms(path):
    cells = [cell.source for cell in read_lesson(path).cells if cell.kind == "markdown"]
    assert [found for text in cells for found in findings(text)] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_uses_the_terms(path):
    assert findings(path.read_text()) == []


@pytest.mark.parametrize(
    "sentence",
    [
        "Compare with the serial twin.",
        "It sends 2 MB a rank and 4 all-reduces a\nlayer.",
        "The pipeline turns round, and rank 0 **does** nobody's work.",
        "A row travels to its expert.",
    ],
)
def test_a_term_is_found(sentence):
    assert findings(sentence)


def test_code_links_and_causes_are_left_alone():
    text = "`swap(x)` and `nobody` in ```\ntwin\n``` [a page](twin.md); *healthy* and **no twin**; "
    assert findings(text + "how many bytes a rank sends") == []
