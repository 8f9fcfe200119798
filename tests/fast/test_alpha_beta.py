"""The alpha-beta model: what ring and tree take, where they cross, and the fit."""

from __future__ import annotations

from math import ceil, log2

import pytest

from course_lib.comm.alpha_beta import crossing, fit_link, ring_seconds, tree_seconds
from course_lib.comm.instruments.links import STEPS
from course_lib.ledger import wire
from course_lib.mesh import Link

LINK = Link(alpha=0.01, beta=25e6)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 64])
def test_ring_and_tree_by_their_messages_and_bytes(n):
    ring = STEPS["all_reduce"](n) * LINK.alpha + float(wire("all_reduce", 10**6, n)) / LINK.beta
    assert ring_seconds(10**6, n, LINK) == pytest.approx(ring)
    rounds = 2 * ceil(log2(n))
    assert tree_seconds(10**6, n, LINK) == pytest.approx(rounds * 0.05)


@pytest.mark.parametrize("n", [4, 5, 8, 64, 1000])
def test_at_the_crossing_both_take_equally_long(n):
    size = crossing(n, LINK)
    assert ring_seconds(size, n, LINK) == pytest.approx(tree_seconds(size, n, LINK))
    assert ring_seconds(2 * size, n, LINK) < tree_seconds(2 * size, n, LINK)
    assert ring_seconds(size / 2, n, LINK) > tree_seconds(size / 2, n, LINK)


def test_a_ring_of_two_or_three_is_never_slower():
    assert (crossing(2, LINK), crossing(3, LINK)) == (0, 0)
    for n in (2, 3):
        assert ring_seconds(4, n, LINK) <= tree_seconds(4, n, LINK)


def test_the_fit_finds_the_link_that_made_the_times():
    exact = {4**k: LINK.alpha + 4**k / LINK.beta for k in range(3, 13)}
    found = fit_link(exact)
    assert (found.alpha, found.beta) == pytest.approx((LINK.alpha, LINK.beta))
    noisy = {size: t * (1.2 if k % 2 else 0.8) for k, (size, t) in enumerate(exact.items())}
    found = fit_link(noisy)
    assert (found.alpha, found.beta) == pytest.approx((LINK.alpha, LINK.beta), rel=0.25)


def test_a_fit_that_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="at least two"):
        fit_link({64: 0.1})
    with pytest.raises(ValueError, match="took no longer"):
        fit_link({64: 0.2, 1024: 0.1})
    assert fit_link({64: 0.001, 6400: 0.2}).alpha == 0.0
