"""How many words a lesson explains with."""

from __future__ import annotations

import re

from course_lib.grading.source import Lesson

WORDS, AIM = 1_800, 1_500  # of explanation in a lesson; above the first a test fails
NO_WORDS = re.compile(
    r"```.*?```|^\|.*?$|\$\$.*?\$\$|<[^>]+>|\]\([^)]*\)", re.DOTALL | re.MULTILINE
)
WORD = re.compile(r"[^\W_][\w'.,-]*")


def words_in(text: str) -> int:
    """Words of prose: no code, no table, no formula on a line of its own, no tag, no address."""
    return len(WORD.findall(NO_WORDS.sub(" ", text)))


def words(lesson: Lesson) -> int:
    """Words of explanation; the text of exercises is apart."""
    own = (cell for cell in lesson.cells if cell.kind == "markdown" and not (cell.ex or cell.role))
    return sum(words_in(cell.source) for cell in own)
