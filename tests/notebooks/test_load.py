"""Marks on a machine that is busy with other gradings, and what a check shows meanwhile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from course_lib.grading.run import grade

ROOT = Path(__file__).parents[2]
SOLUTIONS = [path for number in ("04", "05") for path in ROOT.glob(f"solutions/{number}_*.ipynb")]
SLOW = """\
from course_lib.grading.live import shown_if_slow
import time
with shown_if_slow("case 3 of 5: two <ranks>", 0.9):
    time.sleep({seconds})
"""


@pytest.mark.alone
def test_four_gradings_at_once_have_full_marks():
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda path: grade(path, ROOT), SOLUTIONS * 2))
    lost = [vars(score) for each in results for score in each.scores.values() if score.message]
    assert lost == []
    assert len(results) == 4
    assert all(each.ok for each in results)


def shown(notebook, seconds: float) -> list[str]:
    """The texts that a cell shows one after another; the last one stays."""
    client = notebook.client
    texts = []
    plain = client.process_message

    def process(message, *rest):
        if message["msg_type"] in ("display_data", "update_display_data"):
            texts.append(message["content"]["data"]["text/plain"])
        return plain(message, *rest)

    client.process_message = process
    try:
        assert notebook.cell(SLOW.format(seconds=seconds)).error == ""
    finally:
        client.process_message = plain
    return texts


def test_a_slow_check_shows_its_case_where_a_reader_waits(notebook):
    assert shown(notebook, 1.0) == [], "nobody could answer a question: this is no reader"
    notebook.client.kc.allow_stdin = True
    assert shown(notebook, 1.0) == ["case 3 of 5: two <ranks>", ""]
    assert shown(notebook, 0.0) == []
