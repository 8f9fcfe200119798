"""Schedules that are searched for: legal for any placement, within memory, as good as the named."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.schedule import (
    Costs,
    Schedule,
    looped,
    lower_bound,
    make,
    searched,
    simulate,
    v_shape,
    validate,
)
from course_lib.schedule.search import RULES, ListScheduler

cost = st.integers(0, 20)
placements = st.integers(1, 4).flatmap(
    lambda p: st.integers(1, 3).flatmap(
        lambda chunks: st.permutations([rank for rank in range(p) for _ in range(chunks)])
    )
)


@settings(max_examples=60)
@given(
    where=placements, m=st.integers(1, 5), more=st.integers(0, 4), i=cost, w=cost, comm=cost,
    rule=st.sampled_from(RULES),
)  # fmt: skip
def test_every_playing_is_legal_wherever_the_stages_live(where, m, more, i, w, comm, rule):
    limit = max(map(where.count, where)) + more
    costs = Costs(5, i, w, comm)
    ranks = max(where) + 1
    validate(ListScheduler(tuple(where), m, costs, limit, *rule).run(), peak=[limit] * ranks)
    found = searched(where, m, costs, limit)
    validate(found, peak=[limit] * ranks)
    assert found.placement == tuple(where)
    assert simulate(found, costs).makespan >= lower_bound(where, m, costs) - 1e-9


@pytest.mark.parametrize(
    ("name", "limit", "makespan", "span"),
    [("zb-h1", 4, 27, 27), ("zb-h2", 7, 27, 24), ("zb-v", 8, 51, 48), ("interleaved", 11, 51, 49)],
)
def test_no_worse_than_the_named_at_their_memory(name, limit, makespan, span):
    named = make(name, 4, 8)
    found = simulate(searched(named.placement, 8, limit=limit), Costs())
    assert (found.makespan, found.span) == (makespan, span)
    theirs = simulate(named, Costs())
    assert (found.makespan, found.span) <= (theirs.makespan, theirs.span)


@pytest.mark.parametrize(("where", "least"), [(looped(4), 1), (v_shape(4), 2), (looped(4, 2), 2)])
def test_time_is_bought_with_memory(where, least):
    times = [
        simulate(searched(where, 8, limit=limit), Costs()).makespan for limit in range(least, 9)
    ]
    assert times == sorted(times, reverse=True)
    serial = 8 * 3 * len(where)
    assert times[0] <= serial
    assert times[-1] == lower_bound(where, 8, Costs())


def test_what_is_left_out_is_the_memory_of_1f1b():
    assert max(searched(looped(4), 8).peak_in_flight()) == 4
    assert max(searched(v_shape(4), 8).peak_in_flight()) == 8
    assert searched(v_shape(3), 5) == searched(v_shape(3), 5)


def test_every_process_makes_the_same_rows():
    """Ranks make their schedule each for itself: strings hash differently in each of them."""
    script = (
        "from course_lib.schedule import *; c = Costs(10, 19, 7, 1);"
        "print([write_csv(make(n, 4, 7, costs=c)) for n in SCHEDULES]);"
        "print(write_csv(searched(v_shape(3), 6, c, 5)), write_csv(searched(looped(3), 6, c, 4)))"
    )
    made = set()
    for seed in "124":  # a set instead of a list is seen at 4
        process = subprocess.run(
            [sys.executable, "-c", script], env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        made.add(process.stdout)
    assert len(made) == 1


def test_a_slow_rank():
    """Rank 2 takes twice as long: nothing is faster than it, and the searched one is as fast."""
    where = v_shape(4)
    costs = Costs().on_ranks((1, 1, 0.5, 1), where)
    found = simulate(searched(where, 8, costs, 6), costs)
    assert found.makespan == lower_bound(where, 8, costs) == 98
    assert found.work == 96


def test_one_greedy_rule_is_not_enough():
    """Why several are played: no rule alone makes the best of all of these."""
    cases = [(looped(4), 4), (looped(4), 7), (v_shape(4), 6), (v_shape(4), 8)]

    def time(rows: Schedule) -> float:
        return simulate(rows, Costs()).makespan

    best = [time(searched(where, 8, limit=limit)) for where, limit in cases]
    for rule in RULES:
        alone = [
            time(ListScheduler(where, 8, Costs(), limit, *rule).run()) for where, limit in cases
        ]
        assert any(one > other for one, other in zip(alone, best, strict=True))


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"limit": 1}, "expected limit=2 or more, as a rank has 2 stages; got limit=1"),
        ({"limit": 0}, "expected a whole number, 1 or more, got limit=0"),
        ({"microbatches": 0}, "microbatches=0"),
        (
            {"costs": Costs(per_stage=(1, 2))},
            "each of the schedule's 8 stages, got per_stage with 2",
        ),
    ],
)
def test_refused(wrong, reason):
    with pytest.raises(ValueError, match=reason):
        searched(**{"placement": v_shape(4), "microbatches": 8} | wrong)
