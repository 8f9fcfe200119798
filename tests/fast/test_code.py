"""Library code in a lesson: what is shown, and which lines count."""

from __future__ import annotations

import pytest

from course_lib import dp
from course_lib.view import code_lines, show_source
from course_lib.view.code import lines_with_code

TEXT = '''\
"""A module."""

import os  # a remark


def f(
    x,
):
    """Two
    lines."""
    # why

    text = """two
lines"""
    "a string that stands alone"
    return x, text, os
'''


def documented(x: int) -> int:
    """Three lines, of which this is none.

    Nor is this.
    """
    # nor this
    double = 2 * x

    return double


class Holder:
    """A class."""

    def one(self) -> int:
        """Its method."""
        return 1


def test_which_lines_hold_code():
    assert sorted(lines_with_code(TEXT)) == [3, 6, 7, 8, 13, 14, 16]


@pytest.mark.parametrize(
    ("objects", "lines"),
    [((), 0), ((documented,), 3), ((Holder,), 3), ((Holder.one, documented), 5)],
)
def test_lines_of_functions_methods_and_classes_add_up(objects, lines):
    assert code_lines(*objects) == lines


def test_the_source_is_shown_at_the_left_margin_with_a_blank_line_between(capsys):
    show_source(Holder.one, dp.Naive.finish)
    printed = capsys.readouterr().out
    assert printed.startswith(
        'def one(self) -> int:\n    """Its method."""\n    return 1\n\ndef fin'
    )
    assert printed.endswith("self.axis)\n")
