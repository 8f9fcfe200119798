"""The whole course on one sheet: which technique, when, and at what cost.

========  ==========================================================================
rows      one example, a row a technique, from the library's formulas
page      the sheet: A4, landscape
table     the rows as data, for `course map` in a terminal
========  ==========================================================================
"""

from course_lib.view.course_map.page import ORDER, course_map, example
from course_lib.view.course_map.rows import NETWORK, NODE, RANKS, Row, compute_seconds, rows
