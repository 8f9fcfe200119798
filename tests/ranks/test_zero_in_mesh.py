"""ZeRO over dp beside tensor and sequence parallelism over tp: gradients, norm, clipped weights."""

from __future__ import annotations

from functools import cache
from unittest import mock

import pytest
import tensor_parallel
import torch
import zero_twin
from tensor_parallel import (
    AGAIN,
    RINGS,
    SP,
    TP,
    Trained,
    check,
    disturbed,
    held_alike,
    joined,
    sizes,
    tokens_of,
)

from course_lib import comm, dp, sp, tp, zero
from course_lib.launch import RankError
from course_lib.mesh import make_mesh
from course_lib.tp import formulas

SEQUENCES, MAX_NORM, STEPS = 4, 0.1, 5
GPT = {"family": "gpt", "tied": True}  # biases, and what is used at both ends
WAYS = {"tp": TP, "sp": SP, "again": AGAIN, "rings": RINGS}


def make(stage, model, axis):
    """Small buckets, so that runs begin and end inside parameters."""
    if stage == 3:
        return zero.Zero3(model, list(model.blocks), axis, zero_twin.adam)
    kind = (zero.Zero1, zero.Zero2)[stage - 1]
    return kind(model.parameters(), axis, zero_twin.adam, 40_000)


def sum_over_tp(held, axis, way):
    tp.sum_shared_gradients(held)
    if way.by_rows:
        sp.sum_gradients(held, axis)


def whole_gradients(z, model, axis):
    """By name: the runs joined over dp, and what is cut joined over tp."""
    names = {p: name for name, p in model.named_parameters()}
    over_dp = zero_twin.gradients(z, model)
    return joined(model, axis, lambda p: over_dp[names[p]])


def train(stage, config, way, t, *, steps=STEPS, sums=sum_over_tp, over_dp=True):
    """What one rank does: ZeRO, then the sums over tp, then the norm of everything."""
    mesh = make_mesh(tp=t)
    model = way.cut(disturbed(config), mesh.tp)
    z = make(stage, model, mesh.dp)
    result = Trained([], {}, {}, [])
    for step in range(steps):
        z.zero_grad()
        mesh.ledger.clear()
        tokens, targets = tokens_of(step, config, SEQUENCES, mesh)
        count = dp.global_tokens([targets], mesh.dp)
        loss = model.loss_sum(tokens, targets)[0] / count
        loss.backward()
        z.finish()
        held = z.held_gradients()
        sums(held, mesh.tp, way)
        result.sent.append(mesh.ledger.wire_bytes("tp") + mesh.ledger.wire_bytes("tp_kv"))
        result.gradients = result.gradients or whole_gradients(z, model, mesh.tp)
        over = [mesh.dp] if over_dp else []
        result.norms.append(float(comm.clip_grad_norm(held, [mesh.tp, *over], MAX_NORM)))
        z.step()
        result.losses.append(float(comm.all_reduce(loss.detach(), mesh.dp, control=True)))
    if stage == 3:
        for unit in z.units:
            unit.gather()
    result.weights = joined(model, mesh.tp, lambda p: p)
    result.alike = held_alike(model, mesh.tp)
    result.copies = max(1, t // config.kv_heads)
    return result


@cache
def serial(config, steps=STEPS):
    return tensor_parallel.serial(config, steps=steps, sequences=SEQUENCES, max_norm=MAX_NORM)


def by_replica(results, t):
    """The ranks of one tp group each, as check wants them."""
    results = list(results)
    return [results[first : first + t] for first in range(0, len(results), t)]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("way", ["tp", "sp"])
@pytest.mark.parametrize("changes", [{}, GPT], ids=["llama", "gpt"])
def test_equals_serial(worlds, stage, way, changes):
    config = sizes(2, **changes)
    for replica in by_replica(worlds(4).run(train, stage, config, WAYS[way], 2), 2):
        check(replica, serial(config))


@pytest.mark.parametrize(("t", "n"), [(3, 3), (1, 2), (2, 2), (4, 8)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_equals_serial_on_other_meshes(worlds, stage, t, n):
    """One axis alone, three ranks, and four of which two share a head of keys and values."""
    config = sizes(4 if t == 4 else t)
    results = worlds(n).run(lambda: train(stage, config, SP, t, steps=2))
    for replica in by_replica(results, t):
        check(replica, serial(config, 2))


@pytest.mark.parametrize("way", ["again", "rings"])
def test_stage_3_under_the_other_forms_of_sequence_parallelism(worlds, way):
    config = sizes(2, **GPT)
    results = worlds(4).run(lambda: train(3, config, WAYS[way], 2, steps=2))
    for replica in by_replica(results, 2):
        check(replica, serial(config, 2))


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("way", ["tp", "sp"])
def test_bytes_over_tp(worlds, t, way):
    """Each rank sums its runs: the ranks of dp together send what one sends without ZeRO."""
    config, way = sizes(t), WAYS[way]
    results = worlds(2 * t).run(lambda: train(2, config, way, t, steps=1))
    shards_of = {"shards": 2}
    if way.by_rows:
        formula = sp.wire_bytes(config, 2, tensor_parallel.SEQ, t, **shards_of)
        formula += formulas.loss_bytes(config, 2 * tensor_parallel.SEQ, t)
        formula += formulas.shared_head_bytes(config, t, **shards_of)
    else:
        formula = formulas.wire_bytes(config, 2, tensor_parallel.SEQ, t, **shards_of)
    assert sum(rank.sent[0] for rank in results) == 2 * t * formula


def test_held_gradients_are_runs_that_the_step_uses(worlds):
    """In order, without padding, and views: what is written to them is what the optimizer sees."""

    def rank():
        mesh = make_mesh()
        model = torch.nn.ModuleList([torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)])
        z = zero.Zero1(model.parameters(), mesh.dp, lambda p: torch.optim.SGD(p, lr=1.0))
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        model[1](model[0](torch.ones(1, 3))).sum().backward()
        z.finish()
        held = z.held_gradients()
        names = {p: name for name, p in model.named_parameters()}
        for one in held:
            one.gradient.fill_(2.0)
        z.step()
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        return [(names[one.parameter], len(one.gradient)) for one in held], (
            before - after
        ).tolist()

    first, second = worlds(2).run(rank)
    # 1.bias, 1.weight (1 + 2), 0.bias (2), 0.weight (6): eleven elements, six to a rank
    assert first[0] == [("1.bias", 1), ("1.weight", 2), ("0.bias", 2), ("0.weight", 1)]
    assert second[0] == [("0.weight", 5)]
    assert first[1] == second[1] == pytest.approx([2.0] * 11)


# --- the classic bugs, each of which must be caught ----------------------------------------------


def norms_not_summed(held, axis, way):
    tp.sum_shared_gradients(held)


def shared_heads_not_summed(held, axis, way):
    sp.sum_gradients(held, axis)


def nothing_counted_for_copies(*arguments, **options):
    with mock.patch.object(comm.held, "copies", return_value=1):
        return train(*arguments, **options)


@pytest.mark.parametrize(
    ("run", "options", "said"),
    [
        (train, {"sums": norms_not_summed}, "gradients of rank"),
        (train, {"sums": shared_heads_not_summed}, r"gradients of rank.*attn\.[kv]|times too"),
        (nothing_counted_for_copies, {}, "weights of rank|norm of rank"),
    ],
    ids=["norms not summed", "heads not summed", "replicas in the norm"],
)
@pytest.mark.parametrize("stage", [1, 3])
def test_classic_bugs_are_caught(worlds, stage, run, options, said):
    config = sizes(4)
    results = worlds(8).run(lambda: run(stage, config, SP, 4, steps=1, **options))
    replica, _ = by_replica(results, 4)
    with pytest.raises(AssertionError, match=said):
        check(replica, serial(config, 1), after_steps=1e-6)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_norm_of_own_shards_is_refused(worlds, stage):
    """The sum over dp is missing: ranks would scale by different factors."""
    said = "sharded over axis dp, and the norm was asked for over axes: tp"
    with pytest.raises(RankError, match=said):
        worlds(4).run(lambda: train(stage, sizes(2), SP, 2, steps=1, over_dp=False))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_cannot_be_right_is_refused(worlds, stage):
    """Parameters have no gradients under ZeRO, and dp's norm is that of a part of the model."""

    def rank():
        mesh = make_mesh(tp=2)
        model = TP.cut(disturbed(sizes()), mesh.tp)
        z = make(stage, model, mesh.dp)
        model.loss_sum(*tokens_of(0, sizes()))[0].backward()
        z.finish()
        said = []
        for call in (lambda: comm.held_gradients(model.parameters()), lambda: z.clip(1.0)):
            try:
                call()
            except ValueError as error:
                said.append(str(error))
        return said

    for plain, clip in worlds(2).run(rank):
        assert "have no gradient" in plain
        assert "under ZeRO ask z.held_gradients()" in plain
        assert "sharded over axis tp, and the norm was asked for over axes: dp" in clip
        assert "call comm.clip_grad_norm(held, axes, max_norm) with this axis too" in clip


def test_on_one_rank_of_tp_nothing_is_cut(worlds):
    def rank():
        model = TP.cut(disturbed(sizes(1)), make_mesh().tp)
        z = make(1, model, make_mesh().dp)
        model.loss_sum(*tokens_of(0, sizes(1)))[0].backward()
        z.finish()
        return float(z.clip(1.0))

    assert all(norm > 0 for norm in worlds(2).run(rank))
