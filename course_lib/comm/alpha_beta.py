"""The alpha-beta model: a message of S bytes takes alpha + S / beta seconds.

alpha is the time of the shortest message in seconds, beta the bandwidth in bytes per second. n is
the size of the group. A rank's link carries one message at a time in each direction; computing is
free. Source: Hockney 1994, doi:10.1016/S0167-8191(06)80021-9.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, log2

import torch

from course_lib.mesh import Link


def ring_seconds(payload: float, n: int, link: Link) -> float:
    """Seconds of a ring all-reduce: 2(n-1) messages one after another, each of S/n bytes."""
    return 2 * (n - 1) * (link.alpha + payload / n / link.beta)


def tree_seconds(payload: float, n: int, link: Link) -> float:
    """Seconds of a tree all-reduce: 2 ceil(log2 n) messages one after another, each of S bytes."""
    return 2 * ceil(log2(n)) * (link.alpha + payload / link.beta)


def crossing(n: int, link: Link) -> float:
    """Bytes of an all-reduce for which ring and tree take equally long; above, the ring wins.

    0 where the ring is never slower: for 2 and 3 ranks it has as few messages as the tree.
    """
    levels = ceil(log2(n))  # messages on the way up the tree, and as many on the way down
    return link.alpha * link.beta * (n - 1 - levels) / (levels - (n - 1) / n)


def fit_link(seconds: Mapping[int, float]) -> Link:
    """The link whose alpha + S / beta comes closest to the measured ``seconds`` by message bytes.

    Least squares of the relative errors: of the absolute ones the largest message alone would
    decide, and alpha would be what is left over. Raises ValueError where time does not grow.
    """
    if len(seconds) < 2:
        raise ValueError(f"expected times of at least two sizes, got {len(seconds)}")
    sizes = torch.tensor(list(seconds), dtype=torch.float64)
    times = torch.tensor(list(seconds.values()), dtype=torch.float64)
    rows = torch.stack([1 / times, sizes / times], dim=1)  # (alpha + S * slope) / t is to be 1
    alpha, slope = torch.linalg.lstsq(rows, torch.ones(len(rows), 1).double()).solution.flatten()
    if slope <= 0:
        raise ValueError("longer messages took no longer: measure larger ones, and more often")
    return Link(max(0.0, alpha.item()), 1 / slope.item())
