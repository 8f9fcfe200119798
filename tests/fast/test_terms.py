"""The words that readers misread are found, wherever a reader meets them."""

from __future__ import annotations

import pytest
from prose import ROOT, complaints, findings, spoken


def test_no_text_of_the_course_has_a_forbidden_term():
    assert complaints(ROOT) == []


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


def test_docstrings_messages_and_comments_are_read():
    source = (
        'def f():\n    """Return it."""\n    # Nobody waits.\n    raise ValueError("a b", "c")\n'
    )
    assert list(spoken(source)) == [(2, "Return it."), (4, "a b"), (3, "Nobody waits.")]
