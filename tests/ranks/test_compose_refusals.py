"""Every combination trains equal to one process, or is refused in a sentence that says why."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from composed import BATCH, F64, MOE, SEQ, TIED, adam, build, check_way, rows

from course_lib import compose, cp, recompute, sp, tp
from course_lib.compose import LossScale, Plan, discouraged, parallelize, refusals
from course_lib.layout import make_layout
from course_lib.mesh import make_mesh
from course_lib.schedule import SCHEDULES, make

SIZES = [
    {"tp": 2, "cp": 2, "dp": 2, "pp": 1},
    {"tp": 2, "cp": 1, "dp": 2, "pp": 2},
    {"tp": 1, "cp": 2, "dp": 2, "pp": 2},
    {"tp": 2, "cp": 2, "dp": 1, "pp": 2},
]
CHOICES = {
    "zero": (0, 1, 2, 3),
    "region": (tp.REGION, sp.REGION, sp.GATHER_AGAIN),
    "core": (compose.RING, compose.GATHER, compose.ULYSSES),
    "layout": (cp.ZIGZAG, cp.CONTIGUOUS),
    "schedule": tuple(SCHEDULES),
    "recompute": (None, recompute.selective, recompute.full),
    "experts": (None, MOE),
    "overlap": (False, True),
}


@cache
def combinations():
    """All of them: (sizes, plan, why not). Experts are shared out where ranks can share them."""
    found = []
    for sizes, *values in product(SIZES, *CHOICES.values()):
        plan = Plan(**dict(zip(CHOICES, values, strict=True)), micro_batches=4)
        sizes = {**sizes, "ep": 2} if plan.experts else sizes
        why_not = refusals(model_of(plan), sizes, plan, sequences=4, seq_len=SEQ)
        found.append((sizes, plan, why_not))
    return found


def model_of(plan):
    return F64 if plan.experts else TIED


def test_what_is_refused_is_refused_in_sentences():
    works = [way for way in combinations() if not way[-1]]
    reasons = [reason for *_, why_not in combinations() for reason in why_not]
    assert len(works) > 1000
    assert len(combinations()) - len(works) > 1000
    assert all(len(reason) > 30 and not reason.endswith(".") for reason in reasons)
    starts = ("zero=2 with pp=2", "zero=3 with pp=2", "zero=3 with experts", "overlap with zero=")
    for start in (*starts, "experts with tp=2", "core ulysses with the zigzag layout"):
        assert any(reason.startswith(start) for reason in reasons), start


def sample(count):
    """Some that work, drawn with a seed."""
    works = [(sizes, plan) for sizes, plan, why_not in combinations() if not why_not]
    return random.Random(0).sample(works, count)


def label(way):
    sizes, plan = way
    given = [f"{axis}{size}" for axis, size in sizes.items() if size > 1]
    how = plan.recompute.__name__ if plan.recompute else "kept"
    return "-".join([*given, f"zero{plan.zero}", plan.core.name, plan.schedule, how])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("way", sample(8), ids=label)
def test_what_is_not_refused_equals_serial(worlds, way):
    sizes, plan = way
    check_way(worlds(8), sizes, plan, model_of(plan))


FOUR = {"tp": 2, "cp": 2, "dp": 2, "pp": 2}


@pytest.mark.parametrize(
    ("sizes", "plan", "config", "words"),
    [
        ({"dp": 2, "pp": 2}, Plan(zero=2), F64, "reduce-scatters its gradients once for every"),
        ({"dp": 2, "pp": 2}, Plan(zero=3), F64, "gathers a stage's parameters twice"),
        ({"dp": 2}, Plan(zero=4), F64, "stages 1, 2 and 3"),
        ({"dp": 2}, Plan(zero=1, overlap=True), F64, "overlap is for zero=0"),
        ({"dp": 2}, Plan(zero=3, experts=MOE), F64, "take zero=2"),
        ({"dp": 2, "ep": 2}, Plan(), F64, "nothing to divide"),
        ({"dp": 3, "ep": 3}, Plan(experts=MOE), F64, "4 experts cannot be divided equally"),
        ({"dp": 2, "ep": 4}, Plan(experts=MOE), F64, "ep=4 does not divide dp x cp = 2"),
        ({"tp": 2}, Plan(experts=MOE), F64, "the same tokens; take sp.REGION"),
        ({"tp": 3}, Plan(), F64, "heads=4 is not divisible by tp=3"),
        ({"tp": 4}, Plan(), replace(F64, ffn=30), "ffn=30 is not divisible by tp=4"),
        ({"tp": 6}, Plan(), replace(F64, hidden=48, heads=12), "one must divide the other"),
        ({"cp": 2}, Plan(core=compose.ULYSSES), F64, "take the contiguous layout"),
        (
            {"tp": 4, "cp": 2},
            Plan(core=compose.ULYSSES, layout=cp.CONTIGUOUS),
            F64,
            "has 1 heads, which 2 ranks of cp cannot divide",
        ),
        ({"cp": 4}, Plan(core=compose.grid(2)), F64, "take cp.nested(cp.ZIGZAG, 2)"),
        (
            {"cp": 4},
            Plan(core=compose.grid(2), layout=cp.nested(cp.ZIGZAG, 4)),
            F64,
            "take cp.nested(cp.ZIGZAG, 2)",
        ),
        (
            {"cp": 3},
            Plan(core=compose.grid(2), layout=cp.nested(cp.ZIGZAG, 2)),
            F64,
            "cp=3 is no multiple of 2",
        ),
        (
            {"tp": 4, "cp": 4},
            Plan(core=compose.grid(2), layout=cp.nested(cp.ZIGZAG, 2)),
            F64,
            "has 1 heads, which 2 ranks of cp cannot divide",
        ),
        ({"pp": 8}, Plan(micro_batches=8), F64, "4 layers cannot be cut into the 8 stages"),
        ({"pp": 2}, Plan(schedule="no such"), F64, "no schedule is called 'no such'"),
        ({"pp": 2}, Plan(schedule=make("1f1b", 4, 1)), F64, "is for 4 ranks, and pp=2"),
        ({"pp": 2}, Plan(schedule=make("1f1b", 2, 8)), F64, "8 micro-batches, the plan 1"),
        ({"dp": 2}, Plan(max_norm=0.0), F64, "expected max_norm above 0"),
        ({"dp": 2}, Plan(max_norm=float("nan")), F64, "expected max_norm above 0"),
        ({"dp": 2}, Plan(loss_scale=LossScale(float("inf"))), F64, "a loss scale of inf"),
        ({"dp": 2}, Plan(loss_scale=LossScale(8.0, 0)), F64, "growth_interval=0"),
        ({"dp": 2}, Plan(micro_batches=0), F64, "expected micro_batches of 1 or more, got"),
    ],
)
def test_reasons(sizes, plan, config, words):
    found = refusals(config, sizes, plan)
    assert any(words in reason for reason in found), found


@pytest.mark.parametrize(
    ("sizes", "plan", "sequences", "seq_len", "words"),
    [
        ({"dp": 2}, Plan(micro_batches=4), 2, SEQ, "micro_batches=4 of 2 sequences in a replica"),
        ({"cp": 2}, Plan(), 4, 14, "pad the sequence to a multiple of 4"),
        ({"cp": 2, "tp": 2}, Plan(region=sp.REGION), 4, 10, "equal rows of each rank's"),
        ({"tp": 4}, Plan(region=sp.REGION), 4, 14, "pad the sequence to a multiple of 4"),
        ({"dp": 2}, Plan(), 4, 17, "built for max_seq_len=16"),
    ],
)
def test_batches_that_cannot_be_cut(sizes, plan, sequences, seq_len, words):
    found = refusals(F64, sizes, plan, sequences=sequences, seq_len=seq_len)
    assert any(words in reason for reason in found), found


@pytest.mark.parametrize(
    ("sizes", "plan", "config", "words"),
    [
        (
            {"cp": 4},
            Plan(core=compose.ULYSSES, layout=cp.CONTIGUOUS),
            replace(F64, kv_heads=2),
            "is sent in 2 copies",
        ),
        ({"cp": 2}, Plan(layout=cp.CONTIGUOUS), F64, "zig-zag is even"),
        ({"dp": 2}, Plan(zero=2, micro_batches=4), F64, "a reduce-scatter of everything for each"),
        ({"pp": 4}, Plan(micro_batches=2), F64, "is bubble"),
        (
            {"dp": 2},
            Plan(experts=replace(MOE, capacity_factor=1.0)),
            F64,
            "drops among its own tokens",
        ),
        ({"dp": 2}, Plan(), replace(F64, dropout=0.1), "losses depend on the mesh"),
    ],
)
def test_what_is_discouraged(sizes, plan, config, words):
    assert any(words in reason for reason in discouraged(config, sizes, plan))
    assert not refusals(config, sizes, plan)


def test_nothing_is_said_against_a_good_plan():
    plan = Plan(zero=1, region=sp.REGION, micro_batches=4, max_norm=1.0)
    assert not refusals(F64, FOUR, plan, sequences=BATCH // 2, seq_len=SEQ)
    assert not discouraged(F64, FOUR, plan)
    assert not refusals(replace(F64, ffn=25), FOUR, replace(plan, experts=MOE)), "experts are whole"


def said(sizes, plan, config, model_has=None):
    """What one rank hears: (the refusal, or of a step with a short batch)."""
    mesh = make_mesh(**sizes)
    try:
        trainer = parallelize(build(config, model_has), mesh, plan, adam)
        trainer.step(*(part[:, :14] for part in rows(0, mesh.dp.rank, mesh.dp.size)))
    except ValueError as error:
        return str(error)
    return ""


def test_parallelize_and_step_raise_with_every_reason(worlds):
    both = worlds(4).run(said, {"dp": 2, "pp": 2}, Plan(zero=3, overlap=True), F64)
    assert all("for every micro-batch" in text and "overlap is for" in text for text in both)
    short = worlds(4).run(said, {"dp": 2, "cp": 2}, Plan(), F64)
    assert all("14 positions: cp=2 needs 4 equal chunks" in text for text in short)


def test_experts_of_plan_and_model_must_agree(worlds):
    for plan, there, words in (
        (Plan(experts=MOE), None, "call ep.add_experts first"),
        (Plan(), MOE, "give Plan(experts=Experts(...))"),
        (Plan(experts=replace(MOE, top_k=1)), MOE, "(4, 2, None, False), and (4, 1,"),
    ):
        heard = worlds(4).run(said, {"dp": 4}, plan, F64, there)
        assert all(words in text for text in heard), heard[0]


def test_sizes_are_those_of_a_layout():
    layout = make_layout(16, tp=2, cp=2, pp=2, ep=2)
    assert not refusals(F64, {**layout.sizes, "ep": layout.ep}, Plan(experts=MOE, region=sp.REGION))
