"""What both exercises of lesson 00 share: layouts to ask about, and whole numbers."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from course_lib.grading.answers import NotRight, shown
from course_lib.grading.exercise import Case
from course_lib.layout import Layout, make_layout

REFUSED = tuple(
    f"course_lib.layout:{name}"
    for name in ("make_layout", "rank_groups", "Layout.coordinates", "Layout.groups")
)
TP_DP_PP, TP_PP_DP = "tp-dp-pp", "tp-pp-dp"  # the two orders that frameworks use
OTHERS = ("pp-tp-dp", "dp-pp-tp", "pp-dp-tp", "dp-tp-pp")
FOUR = ("tp-cp-dp-pp", "cp-tp-pp-dp", "pp-dp-cp-tp")


def layout_of(sizes: Mapping[str, int], order: str) -> Layout:
    """The library's layout of these sizes."""
    return make_layout(None, order, **dict(sizes))


def reversed_order(order: str) -> str:
    """The axes of ``order``, slowest first."""
    return "-".join(reversed(order.split("-")))


def sizes_of(rng: random.Random, order: str) -> dict[str, int]:
    """Sizes of 2, 3 or 4, not all equal: equal ones hide a mixed-up axis."""
    axes = sorted(order.split("-"))
    while len(set(sizes := [rng.choice((2, 3, 4)) for _ in axes])) == 1:
        pass
    return dict(zip(axes, sizes, strict=True))


def case(title: str, draw: Any, *orders: str) -> Case:
    """A case that draws its calls for one of ``orders``."""
    return Case(title, lambda rng: draw(rng, rng.choice(orders)))


def coordinates_by_strides(rank: int, sizes: Mapping[str, int], order: str) -> dict[str, int]:
    """Another right way than the library's: each axis by the product of the sizes before it."""
    found, stride = {}, 1
    for axis in order.split("-"):
        found[axis] = rank // stride % sizes[axis]
        stride *= sizes[axis]
    return found


def whole(value: Any, what: str) -> int:
    """``value`` as an int. 1.0 is none: it fails later, as an index or in range()."""
    try:
        return _no_bool(value).__index__()  # what may be an index: an int of numpy or torch too
    except (AttributeError, TypeError):
        raise NotRight(f"{what} (this is {shown(value)})") from None


def _no_bool(value: Any) -> Any:
    return None if isinstance(value, bool) else value
