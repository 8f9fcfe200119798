"""Every pair of techniques and more at once equal one process, and bytes by axis are exact."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations, count

import pytest
import torch
from composed import (
    F64,
    MOE,
    STEPS,
    TIED,
    adam,
    build,
    check,
    check_bytes,
    check_way,
    joined,
    rows,
    serial,
    trained,
    twin_of,
    weights_of,
)
from equality import assert_bitwise, assert_equal

from course_lib import checkpoint, comm, compose, cp, ep, recompute, sp
from course_lib.compose import LossScale, Plan
from course_lib.launch import run
from course_lib.mesh import make_mesh

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # what is discouraged

PIPELINE = {"micro_batches": 4}  # what a pipeline wants, and others can have
# What each asks of the mesh and of the plan.
TECHNIQUES = {
    "overlap": ({"dp": 2}, {"zero": 0, "overlap": True, **PIPELINE}),
    "zero-1": ({"dp": 2}, {"zero": 1}),
    "zero-2": ({"dp": 2}, {"zero": 2, **PIPELINE}),
    "zero-3": ({"dp": 2}, {"zero": 3, **PIPELINE}),
    "tp": ({"tp": 2}, {}),
    "sp": ({"tp": 2}, {"region": sp.REGION}),
    "sp-again": ({"tp": 2}, {"region": sp.GATHER_AGAIN}),
    "ring": ({"cp": 2}, {"core": compose.RING}),
    "gather": ({"cp": 2}, {"core": compose.GATHER}),
    "ulysses": ({"cp": 2}, {"core": compose.ULYSSES, "layout": cp.CONTIGUOUS}),
    "1f1b": ({"pp": 2}, {"schedule": "1f1b", **PIPELINE}),
    "zb-h1": ({"pp": 2}, {"schedule": "zb-h1", **PIPELINE}),
    "experts": ({"dp": 2, "ep": 2}, {"experts": MOE}),
    "selective": ({}, {"recompute": recompute.selective}),
    "full": ({}, {"recompute": recompute.full}),
}


def together(*names):
    """(sizes, plan changes) of several techniques; None where they contradict each other."""
    sizes, changes = {}, {}
    for name in names:
        for known, new in zip((sizes, changes), TECHNIQUES[name], strict=True):
            if any(known.get(key, value) != value for key, value in new.items()):
                return None
            known.update(new)
    return sizes, changes


def ways(count):
    chosen = {names: together(*names) for names in combinations(TECHNIQUES, count)}
    return [
        pytest.param(sizes, Plan(**changes), id="-".join(names))
        for names, (sizes, changes) in ((n, w) for n, w in chosen.items() if w is not None)
        if not compose.refusals(F64, sizes, Plan(**changes))
    ]


def ranks_of(sizes):
    count = 1
    for axis, size in sizes.items():
        count *= size if axis != "ep" else 1
    return count


@pytest.mark.parametrize(("sizes", "plan"), ways(2))
def test_pair(worlds, sizes, plan):
    config = TIED if plan.zero == 0 and plan.experts is None else F64
    check_way(worlds(max(ranks_of(sizes), 1)), {"dp": 1, **sizes}, plan, config)


# --- three axes and more -------------------------------------------------------------------------

KV = replace(F64, kv_heads=2)  # on tp=4 two ranks share a head
THREE = {
    "tp-dp-pp": ({"tp": 2, "dp": 2, "pp": 2}, Plan(region=sp.REGION, **PIPELINE), TIED),
    "zero-1": ({"tp": 2, "dp": 2, "pp": 2}, Plan(region=sp.REGION, zero=1, **PIPELINE), TIED),
    "overlap": (
        {"tp": 2, "dp": 2, "pp": 2},
        Plan(
            region=sp.GATHER_AGAIN, schedule="interleaved", overlap=True, max_norm=0.5, **PIPELINE
        ),
        TIED,
    ),
    "zb-v": (
        {"cp": 2, "dp": 2, "pp": 2},
        Plan(schedule="zb-v", zero=1, recompute=recompute.full, **PIPELINE),
        TIED,
    ),
    "dualpipe-v": (
        {"tp": 2, "cp": 2, "pp": 2},
        Plan(region=sp.REGION, schedule="dualpipe-v", recompute=recompute.selective, **PIPELINE),
        TIED,
    ),
    "zero-3": (
        {"tp": 2, "cp": 2, "dp": 2},
        Plan(region=sp.GATHER_AGAIN, zero=3, micro_batches=2),
        TIED,
    ),
    "shared heads": ({"tp": 4, "dp": 2}, Plan(region=sp.REGION, zero=2, max_norm=0.5), KV),
    "shared heads cp": ({"tp": 4, "cp": 2}, Plan(zero=1, core=compose.GATHER), KV),
    "experts": (
        {"cp": 2, "dp": 2, "pp": 2, "ep": 4},
        Plan(zero=1, experts=MOE, max_norm=0.5, **PIPELINE),
        F64,
    ),
    "experts tp": (
        {"tp": 2, "dp": 2, "pp": 2, "ep": 2},
        Plan(
            region=sp.REGION,
            experts=replace(MOE, shared=True),
            recompute=recompute.full,
            schedule="zb-h1",
            **PIPELINE,
        ),
        replace(TIED, tied=False),
    ),
    "experts that tp does not divide": (
        {"tp": 2, "dp": 2, "pp": 2, "ep": 2},
        Plan(region=sp.REGION, zero=1, experts=replace(MOE, shared=True), **PIPELINE),
        replace(TIED, tied=False, ffn=25),
    ),
}


GRID = {"core": compose.grid(2), "layout": cp.nested(cp.ZIGZAG, 2)}
THREE |= {  # heads shared out in runs of two, and a ring through the runs
    "grid zero-1": ({"cp": 4, "dp": 2}, Plan(zero=1, max_norm=0.5, **GRID), TIED),
    "grid sp": (
        {"tp": 2, "cp": 4},
        Plan(region=sp.REGION, recompute=recompute.selective, **GRID),
        replace(F64, kv_heads=2),  # one a rank: each travels in two copies
    ),
    "grid pp": ({"cp": 4, "pp": 2}, Plan(schedule="zb-h1", **GRID, **PIPELINE), TIED),
    "grid experts": ({"cp": 4, "dp": 2, "ep": 4}, Plan(experts=MOE, **GRID), F64),
}


@pytest.mark.parametrize("name", THREE)
def test_three_axes(worlds, name):
    check_way(worlds(8), *THREE[name])


FOUR = {"tp": 2, "cp": 2, "dp": 2, "pp": 2}


@pytest.mark.parametrize(
    ("sizes", "plan", "config"),
    [
        (FOUR, Plan(region=sp.REGION, zero=1, max_norm=0.5, **PIPELINE), TIED),
        ({**FOUR, "ep": 2}, Plan(region=sp.REGION, experts=MOE, schedule="zb-v", **PIPELINE), F64),
    ],
    ids=["4D", "5D"],
)
def test_sixteen_ranks(sizes, plan, config):
    check_way(Fresh(16), sizes, plan, config)


class Fresh:
    """Ranks for one run."""

    def __init__(self, n):
        self.n = n

    def run(self, *call):
        return run(*call, n=self.n, timeout=120)


# --- the classic mistakes, made on purpose -------------------------------------------------------


def counts_replicas(trainer):
    def norm(held):
        squared = own_part(held).double() ** 2
        return comm.all_reduce(squared, trainer.mesh.world, control=True).sqrt()

    trainer.gradients.norm = norm


def own_part(held):
    return torch.nn.utils.get_total_norm(one.gradient for one in held)


def own_norm(trainer):
    trainer.gradients.norm = own_part


def counts_both_ends(trainer):
    """The tied embedding twice."""
    trainer.gradients.counted = lambda held: [
        one._replace(axes=(*one.axes, trainer.mesh.pp)) for one in held
    ]


def no_sum_of_rows(trainer):
    trainer.gradients.sum_rows = lambda held: None


def no_sum_of_heads(trainer):
    trainer.gradients.sum_heads = lambda held: None


def no_sum_of_ends(trainer):
    trainer.gradients.sum_tied = lambda held: None


def own_tokens(trainer):
    """The mean of the replicas' means."""
    trainer._tokens_of_all = lambda targets: (targets != -100).sum() * trainer.mesh.dp.size


def experts_averaged(trainer):
    """Expert gradients divided by dp, as those of a mean over replicas would be."""
    for part in trainer.gradients.parts:
        if part.axis.name == "edp":
            scale_after(part, 1 / trainer.mesh.dp.size)


def scale_after(part, factor):
    finish = part.sync.finish

    def scaled():
        finish()
        for one in part.held:
            one.gradient.mul_(factor)

    part.sync.finish = scaled


def early_sum(trainer):
    """Gradients are summed after the first micro-batch, and again after the last."""

    @contextmanager
    def accumulate():
        yield
        for part in trainer.gradients.parts:
            part.sync.finish()

    trainer.gradients.accumulate = accumulate


def sum_at_first_micro_batch(trainer):
    """Each gradient leaves with the first micro-batch; what the others add is never summed."""
    for part in trainer.gradients.parts:
        part.sync.finish = lambda: None
        for parameter in part.parameters:
            calls = count()

            def leave(parameter, calls=calls, axis=part.axis):
                if next(calls) % trainer.plan.micro_batches == 0:
                    parameter.grad = comm.all_reduce(parameter.grad, axis)

            parameter.register_post_accumulate_grad_hook(leave)


def balance_on_last_stage(trainer):
    if trainer.mesh.pp.rank + 1 < trainer.mesh.pp.size:
        trainer.balance.coefficient = 0.0


def balance_of_own_rows(trainer):
    for module in (m for stage in trainer.stages.values() for m in stage.modules()):
        if isinstance(module, ep.MoE):
            module.rows = None


MISTAKES = {
    counts_replicas: ({"tp": 2, "dp": 2}, Plan(max_norm=0.5), F64),
    own_norm: ({"dp": 2, "pp": 2}, Plan(max_norm=0.5, **PIPELINE), F64),
    counts_both_ends: ({"dp": 2, "pp": 2}, Plan(max_norm=0.5, **PIPELINE), TIED),
    no_sum_of_rows: ({"tp": 2, "dp": 2}, Plan(region=sp.REGION, zero=1), F64),
    no_sum_of_heads: ({"tp": 4, "dp": 1}, Plan(), KV),
    no_sum_of_ends: ({"dp": 2, "pp": 2}, Plan(zero=1, **PIPELINE), TIED),
    own_tokens: ({"dp": 2, "cp": 2}, Plan(), F64),
    experts_averaged: ({"dp": 4, "ep": 2}, Plan(experts=MOE), F64),
    early_sum: ({"tp": 2, "dp": 2}, Plan(micro_batches=2), F64),
    sum_at_first_micro_batch: ({"dp": 2, "pp": 2}, Plan(**PIPELINE), F64),
    balance_on_last_stage: ({"dp": 2, "pp": 2, "ep": 2}, Plan(experts=MOE, **PIPELINE), F64),
    balance_of_own_rows: ({"tp": 2, "dp": 2}, Plan(region=sp.REGION, experts=MOE), F64),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_caught(worlds, mistake):
    sizes, plan, config = MISTAKES[mistake]
    results = worlds(4).run(trained, sizes, plan, config, mistake, 2)
    with pytest.raises(AssertionError):
        check(results, twin_of(sizes, plan, config, steps=2))


# --- what else a trainer does --------------------------------------------------------------------


def dp_sums_and_messages(sizes, plan, config):
    """Where in the order of calls the sums over dp and the messages of the pipeline stand."""
    mesh = make_mesh(**sizes)
    trainer = compose.parallelize(build(config), mesh, plan, adam)
    trainer.step(*rows(0, mesh.dp.rank, mesh.dp.size))
    axes = [record.axis for record in mesh.ledger.select()]
    return [[i for i, axis in enumerate(axes) if axis == name] for name in ("dp", "pp")]


def test_a_stage_is_summed_while_others_go_on(worlds):
    sizes, plan = {"dp": 2, "pp": 2}, Plan(schedule="interleaved", overlap=True, **PIPELINE)
    for sums, messages in worlds(4).run(dp_sums_and_messages, sizes, plan, F64):
        assert sums[0] < messages[-1]
    late = worlds(4).run(dp_sums_and_messages, sizes, replace(plan, overlap=False), F64)
    for sums, messages in late:
        assert sums[0] > messages[-1]


def test_bytes_where_gradients_are_wider_than_weights(worlds):
    """bfloat16 under ZeRO: what is summed after the scatter has four bytes."""
    config = replace(TIED, dtype=torch.bfloat16, kv_heads=1)
    for sizes, plan in (
        ({"tp": 2, "dp": 2, "pp": 2}, Plan(region=sp.REGION, zero=1, **PIPELINE)),
        ({"tp": 2, "cp": 2, "dp": 2}, Plan(zero=2, micro_batches=2)),
    ):
        check_bytes(worlds(8).run(trained, sizes, plan, config, None, 2), sizes, plan, config)


def masks(sizes, plan, config):
    mesh = make_mesh(**sizes)
    trainer = compose.parallelize(build(config), mesh, plan, adam)
    drawn = []
    for _ in range(2):
        with trainer._masks():
            drawn.append(float(torch.rand(())))
        trainer.steps += 1
    return (mesh.dp.rank, mesh.cp.rank, mesh.pp.rank), drawn


def test_ranks_that_hold_the_same_drop_the_same(worlds):
    config = replace(F64, dropout=0.1)
    for sizes in ({"tp": 2, "dp": 2, "pp": 2}, {"tp": 2, "cp": 2, "dp": 2}):
        by_place = {}
        for place, drawn in worlds(8).run(masks, sizes, Plan(**PIPELINE), config):
            assert by_place.setdefault(place, drawn) == drawn, "ranks of tp differ"
        numbers = [number for drawn in by_place.values() for number in drawn]
        assert len(set(numbers)) == len(numbers), "two places, or two steps, are alike"


def test_dropout_leaves_replicas_equal(worlds):
    config, plan = replace(TIED, dropout=0.2), Plan(region=sp.REGION, micro_batches=2)
    results = worlds(8).run(trained, {"tp": 2, "dp": 2, "pp": 2}, plan, config, None, 2)
    joined([got.weights for got in results], serial(TIED).weights, "weights")  # bit for bit


def scaled(sizes, plan, config, steps):
    mesh = make_mesh(**sizes)
    trainer = compose.parallelize(build(config), mesh, plan, adam)
    found = []
    for number in range(steps):
        before = [p.detach().clone() for s in trainer.stages.values() for p in s.parameters()]
        scale = trainer.scale.value
        step = trainer.step(*rows(number, mesh.dp.rank, mesh.dp.size))
        after = [p for s in trainer.stages.values() for p in s.parameters()]
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        found.append((scale, step.updated, same, float(step.loss)))
    return found


def test_overflow_is_left_out_on_all_ranks_and_halves_the_scale(worlds):
    plan = Plan(micro_batches=2, zero=1, loss_scale=LossScale(2.0**1023))
    results = worlds(4).run(scaled, {"tp": 2, "pp": 2}, plan, F64, 12)
    assert all([row[:2] for row in got] == [row[:2] for row in results[0]] for got in results)
    scales, updated = zip(*(row[:2] for row in results[0]), strict=True)
    assert set(updated) == {False, True}
    halved = [scale if done else scale / 2 for scale, done in zip(scales, updated, strict=True)]
    assert list(scales) == [2.0**1023, *halved[:-1]]
    for got in results:
        assert [same for _, _, same, _ in got] == [not done for done in updated]


def test_scale_grows_after_good_steps_and_changes_nothing(worlds):
    plan = Plan(loss_scale=LossScale(2.0**10, growth_interval=2), max_norm=0.5)
    results = worlds(4).run(scaled, {"tp": 2, "dp": 2}, plan, F64, STEPS)
    assert [scale for scale, *_ in results[0]] == [2.0**k for k in (10, 10, 11, 11, 12)]
    check(worlds(4).run(trained, {"tp": 2, "dp": 2}, plan, F64), serial(F64, max_norm=0.5))


def norm_after_a_step_that_broke_off(sizes, plan, config):
    """A mistake in the second micro-batch, on all ranks; then a step as if nothing had been."""
    mesh = make_mesh(**sizes)
    trainer = compose.parallelize(build(config), mesh, plan, adam)
    model, calls = trainer.stages[0], []
    right = model.cross_entropy

    def wrong_once(*given):
        calls.append(given)
        if len(calls) == 2:
            raise ArithmeticError
        return right(*given)

    model.cross_entropy = wrong_once
    with pytest.raises(ArithmeticError):
        trainer.step(*rows(1, mesh.dp.rank, mesh.dp.size))
    return float(trainer.step(*rows(0, mesh.dp.rank, mesh.dp.size)).norm)


@pytest.mark.parametrize("zero", range(4))
def test_a_step_that_broke_off_leaves_nothing(worlds, zero):
    plan = Plan(zero=zero, micro_batches=3)
    for norm in worlds(2).run(norm_after_a_step_that_broke_off, {"dp": 2}, plan, F64):
        assert norm == pytest.approx(serial(F64).norms[0], rel=1e-12)


def after_a_step_of_a_pipeline_that_broke_off(sizes, plan, config):
    """A mistake on both stages, before either sends: (what the next step says, the norm of one by
    another trainer)."""
    trainer = compose.parallelize(build(config), make_mesh(**sizes), plan, adam)

    def wrong():
        raise ArithmeticError("wrong")

    trainer.gradients.accumulate = wrong
    with pytest.raises(ArithmeticError):
        trainer.step(*rows(0))
    del trainer.gradients.accumulate
    with pytest.raises(RuntimeError) as caught:
        trainer.step(*rows(0))
    new = compose.parallelize(build(config), make_mesh(**sizes), plan, adam)
    return str(caught.value), float(new.step(*rows(0)).norm)


def test_a_pipeline_that_broke_off_is_refused_a_next_step(worlds):
    call = after_a_step_of_a_pipeline_that_broke_off, {"pp": 2}, Plan(**PIPELINE), F64
    for said, norm in worlds(2).run(*call):
        assert said.startswith("a step of this trainer broke off (ArithmeticError: wrong)")
        assert said.endswith("make a new mesh and a new trainer, and load a checkpoint")
        assert norm == pytest.approx(serial(F64).norms[0], rel=1e-12)


# --- checkpoints ---------------------------------------------------------------------------------

MESHES = [
    ({"tp": 2, "dp": 2, "pp": 2}, Plan(region=sp.REGION, zero=1, **PIPELINE)),
    ({"tp": 4, "cp": 2}, Plan(zero=3)),
    ({"cp": 2, "dp": 2, "pp": 2}, Plan(schedule="zb-v", **PIPELINE)),
]


def part_of_training(sizes, plan, config, numbers, path, found):
    """Load what is at ``found``, train some steps, save: (pieces after loading, after training)."""
    mesh = make_mesh(**sizes)
    trainer = compose.parallelize(build(config), mesh, plan, adam)
    if found:
        trainer.load(found)
    loaded = weights_of(trainer)
    for number in numbers:
        trainer.step(*rows(number, mesh.dp.rank, mesh.dp.size))
    trainer.save(path)
    return loaded, weights_of(trainer)


def test_a_checkpoint_goes_from_mesh_to_mesh(worlds, tmp_path):
    """Two steps on one mesh, two on the next, one on the third, which is one process's five."""
    twin, found, before = serial(TIED), "", None
    for (sizes, plan), numbers in zip(MESHES, ([0, 1], [2, 3], [4]), strict=True):
        path = str(tmp_path / f"after-{numbers[-1]}")
        results = worlds(8).run(part_of_training, sizes, plan, TIED, numbers, path, found)
        loaded, after = (
            joined([got[i] for got in results], twin.weights, "weights") for i in (0, 1)
        )
        if before is not None:
            assert_bitwise(loaded, before, f"loaded on {sizes}")
        found, before = path, after
    assert_equal(before, twin.weights, 1e-8, "weights after three meshes")
    alone = worlds(1).run(part_of_training, {"dp": 1}, Plan(), TIED, [], str(tmp_path / "1"), found)
    assert_bitwise(joined([alone[0][0]], twin.weights, "weights"), before, "loaded on one process")


def stopped_after(sizes, plan, config, path, numbers, found=""):
    """Load what is at ``found``, train, save: (scale and whether it updated by step, weights)."""
    mesh = make_mesh(**sizes)
    trainer = compose.parallelize(build(config), mesh, plan, adam)
    if found:
        trainer.load(found)
    scales = []
    for number in numbers:
        scale = trainer.scale.value
        scales.append((scale, trainer.step(*rows(number, mesh.dp.rank, mesh.dp.size)).updated))
    trainer.save(path)
    return scales, weights_of(trainer)


def test_a_training_that_stopped_goes_on_with_its_loss_scale(worlds, tmp_path):
    """The scale was halved in step 1 and is due to be doubled after the first step on the other
    mesh: steps, scale and the count of good steps are all in the checkpoint."""
    plan = Plan(zero=1, micro_batches=4, loss_scale=LossScale(2.0**1020, growth_interval=2))
    first, second = {"tp": 2, "pp": 2}, {"cp": 2, "dp": 2}
    path, twin = str(tmp_path / "half"), serial(F64).weights
    alone = worlds(4).run(stopped_after, first, plan, F64, str(tmp_path / "whole"), range(6))
    begun = worlds(4).run(stopped_after, first, plan, F64, path, range(3))
    ended = worlds(4).run(
        stopped_after, second, plan, F64, str(tmp_path / "end"), range(3, 6), path
    )
    updates = [True, False, True, True, False, True]
    assert [done for _, done in alone[0][0]] == updates
    for one, half, rest in zip(alone, begun, ended, strict=True):
        assert half[0] + rest[0] == one[0]
    whole, resumed = (joined([got[1] for got in all_], twin, "weights") for all_ in (alone, ended))
    assert_equal(resumed, whole, 1e-8, "weights of the training that stopped")


@pytest.mark.parametrize("sizes", [{"tp": 2, "dp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_on_the_same_mesh_it_goes_on_bit_for_bit(worlds, tmp_path, sizes):
    """Dropout's masks too: they follow from the number of the step."""
    config = replace(F64, dropout=0.2)
    plan = Plan(zero=1, loss_scale=LossScale(8.0, growth_interval=1), max_norm=0.5, **PIPELINE)
    half, end = str(tmp_path / "half"), str(tmp_path / "end")
    alone = worlds(4).run(stopped_after, sizes, plan, config, str(tmp_path / "whole"), range(4))
    worlds(4).run(stopped_after, sizes, plan, config, half, range(2))
    ended = worlds(4).run(stopped_after, sizes, plan, config, end, range(2, 4), half)
    for one, rest in zip(alone, ended, strict=True):
        assert one[0][2:] == rest[0]
        values = [{name: piece.values for name, piece in of[1].items()} for of in (rest, one)]
        assert_bitwise(*values, "weights")


def of_another_hand(path, plan):
    """A checkpoint that no trainer saved, loaded after a step: what is said, and what is left."""
    mesh = make_mesh()
    trainer = compose.parallelize(build(F64), mesh, plan, adam)
    checkpoint.save(path, trainer.stages, trainer.optimizers, mesh)
    trainer.step(*rows(0, mesh.dp.rank, mesh.dp.size))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.load(path)
    return [str(one.message) for one in caught], trainer.steps, trainer.scale.value


def test_a_checkpoint_without_steps_leaves_them_and_says_so(worlds, tmp_path):
    for number, (plan, missing) in enumerate(
        [
            (Plan(loss_scale=LossScale(8.0, 1)), "steps and loss scale and good steps"),
            (Plan(loss_scale=LossScale(16.0, None)), "steps"),
        ]
    ):
        first, second = worlds(2).run(of_another_hand, str(tmp_path / str(number)), plan)
        assert f"does not say {missing}: they stay" in first[0][0]
        assert second[0] == []
        assert first[1:] == second[1:] == (1, 16.0)


def test_what_a_trainer_saved_is_a_checkpoint_like_any_other(worlds, tmp_path):
    """Of no trainer: weights and optimizer state alone are read, and the numbers given back."""

    def both(path):
        mesh = make_mesh()
        plan = Plan(loss_scale=LossScale(8.0, growth_interval=1))
        trainer = compose.parallelize(build(F64), mesh, plan, adam)
        trainer.step(*rows(0, mesh.dp.rank, mesh.dp.size))
        trainer.save(path)
        model = build(F64)
        optimizer = adam(list(model.parameters()))
        said = checkpoint.load(path, model, optimizer, mesh), checkpoint.load(path, model, (), mesh)
        pairs = zip(model.parameters(), trainer.stages[0].parameters(), strict=True)
        return said, all(torch.equal(mine, theirs) for mine, theirs in pairs)

    numbers = {"steps": 1.0, "loss scale": 16.0, "good steps": 1.0}
    assert worlds(2).run(both, str(tmp_path / "one")) == [((numbers, numbers), True)] * 2
