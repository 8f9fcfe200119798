"""The plan arena on real ranks: the same training, bytes and memory as predicted, a real limit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from course_lib.grading import plans
from course_lib.grading.plans import ranks
from course_lib.launch.faults import RankError

PLANS = [
    (1, {"tp": 4}),
    (1, {"zero": 3}),
    (1, {"zero": 2, "recompute": "full"}),
    (1, {"pp": 2, "schedule": "zb-h1", "cp": 2, "zero": 1}),
    (2, {"cp": 2, "zero": 1}),
    (3, {"tp": 2, "cp": 2}),
    (4, {"tp": 2, "pp": 2, "schedule": "interleaved", "chunks": 2, "zero": 1}),
    (5, {"ep": 8, "zero": 2, "recompute": "full"}),
    (6, {"tp": 2, "cp": 2, "pp": 2, "ep": 4, "zero": 1}),
]


@pytest.mark.parametrize(("number", "choices"), PLANS, ids=str)
def test_a_plan_runs_as_predicted(number, choices):
    """Without padding and links, which change times alone."""
    level = plans.level(number)
    plan = level.plan(**choices)
    found = level.predict(plan)
    ran = ranks.trial(level.job, *level.in_library(plan))
    assert ran.same, ran.off
    attempt = plans.Attempt(level, "you", choices, estimate=found, ran=ran)
    assert attempt.bytes_off == {}
    if level.model.experts is None:
        off = ran.most_bytes - found.memory.total
        assert abs(off) <= 0.02 * found.memory.total
        if plan.cp == 1 and plan.chunks == 1:
            assert abs(off) <= 8, "two counters at most"
    else:
        assert ran.most_bytes < 2 * found.memory.total


def test_padding_and_links_take_the_time_that_is_simulated():
    level = plans.level(1)
    attempt = plans.play(1, tp=4)
    assert attempt.ok
    padding = level.pace(level.plan(tp=4))
    compute = 8 * (4 * sum(padding.block) + sum(padding.head))
    assert attempt.estimate.parts["compute"] == pytest.approx(compute, rel=0.01)
    assert attempt.ran.seconds > 0.98 * attempt.estimate.step_seconds, "sleep is never shorter"
    assert len(attempt.picture().axes) >= 1


def test_a_split_backward_is_padded_too():
    """I and W apart: without the padding of W the step would be a tenth shorter than simulated."""
    level = plans.level(1)
    plan = level.plan(pp=2, cp=2, schedule="zb-h1", zero=1)
    ran = ranks.run_plan(level, plan)
    assert ran.seconds > 0.98 * level.predict(plan).step_seconds


def test_a_rank_over_its_limit_is_out_of_memory():
    level = replace(plans.level(1), limit_bytes=4_000_000)
    with pytest.raises(RankError, match="OutOfMemory") as caught:
        ranks.run_plan(level, level.plan(zero=3))
    assert isinstance(caught.value.exception, ranks.OutOfMemory)


def test_a_wrong_gradient_is_seen(monkeypatch):
    """The norm of a gradient that is half as large in the reference, in the last step alone."""
    level, reference = plans.level(2), ranks._reference

    def halved(job):
        losses, norms = reference(job)
        return losses, [*norms[:-1], norms[-1] / 2]

    monkeypatch.setattr(ranks, "_reference", halved)
    ran = ranks.trial(level.job, *level.in_library(level.plan(tp=4)))
    assert ran.off == pytest.approx(1)
    assert not ran.same
