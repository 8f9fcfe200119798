"""A checkpoint saved under one mesh loads under another, not one bit changed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import prod

import pytest
import torch
import zero_twin as twin
from hypothesis import given
from hypothesis import strategies as st
from zero_twin import BF16, F64, GPT

from course_lib import checkpoint, dp, tp, zero
from course_lib.mesh import make_mesh
from course_lib.model import build_model

STEPS = 2


class Plain:
    """One process or data parallelism, with the interface of ZeRO."""

    def __init__(self, model, axis):
        self.optimizer = twin.adam([p for p in model.parameters() if p.requires_grad])
        self.sync = dp.Bucketed(model.parameters(), axis)


def wrap(kind, model, axis):
    """(gradient sync, optimizer for the loop, what the checkpoint is given)."""
    if kind == "plain":
        plain = Plain(model, axis)
        return plain.sync, plain.optimizer
    z = twin.make(kind, model, axis)
    return z, z


def contents(model, optimizer, mesh):
    """Every weight in the precision in which it is updated, and its two moments, whole."""
    if not isinstance(optimizer, zero.Sharded):
        found = {name: p.detach().clone() for name, p in model.named_parameters()}
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"{name}:{key}"] = value.clone()
        return found
    z, state = optimizer, optimizer.optimizer.state
    found = twin.trained(z, model) | twin.masters(z, model)
    for key in ("exp_avg", "exp_avg_sq"):
        moments = twin.whole(z, model, lambda shard, key=key: state[shard][key])
        found |= {f"{name}:{key}": value for name, value in moments.items()}
    for flat in z.flats:
        for name, parameter in model.named_parameters():
            if parameter in set(flat.parameters):
                found[f"{name}:step"] = state[flat.shard]["step"].clone()
    return found


def train_and_save(kind, config, path, frozen=()):
    mesh = make_mesh()
    model = twin.build(config, frozen)
    sync, optimizer = wrap(kind, model, mesh.dp)
    for step in range(STEPS):
        dp.train_step(
            model.loss_sum, [twin.rows(step, mesh.dp.rank, mesh.dp.size)], sync, optimizer
        )
    checkpoint.save(path, model, optimizer, mesh)
    return contents(model, optimizer, mesh)


def load_and_go_on(kind, config, path, frozen=(), steps=0):
    """From other weights; what was loaded, and the weights after ``steps`` more."""
    mesh = make_mesh()
    model = build_model(config, seed=99)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and name.startswith(frozen)))
    sync, optimizer = wrap(kind, model, mesh.dp)
    checkpoint.load(path, model, optimizer, mesh)
    loaded = contents(model, optimizer, mesh)
    for step in range(STEPS, STEPS + steps):
        dp.train_step(
            model.loss_sum, [twin.rows(step, mesh.dp.rank, mesh.dp.size)], sync, optimizer
        )
    final = twin.trained(optimizer, model)
    return loaded, final


def same(got, want):
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


KINDS = [(1, "plain"), (4, "plain"), (3, 1), (2, 2), (4, 3), (3, 3)]


@pytest.mark.parametrize("config", [F64, GPT], ids=["llama", "gpt-tied"])
@pytest.mark.parametrize(("n", "kind"), KINDS)
def test_saved_by_one_and_loaded_by_all(worlds, tmp_path, n, kind, config):
    saved = worlds(n).run(train_and_save, kind, config, str(tmp_path))
    for other, theirs in KINDS:
        for loaded, _ in worlds(other).run(load_and_go_on, theirs, config, str(tmp_path)):
            same(loaded, saved[0])


@pytest.mark.parametrize(("n", "kind"), [(1, "plain"), (3, 1), (2, 2), (3, 3)])
def test_training_goes_on_as_if_it_had_not_stopped(worlds, tmp_path, n, kind):
    worlds(4).run(train_and_save, 3, F64, str(tmp_path))
    results = worlds(n).run(load_and_go_on, kind, F64, str(tmp_path), (), twin.STEPS - STEPS)
    for _, final in results:
        twin.assert_equal(final, twin.serial(F64)[2], 1e-8, "weights")


@pytest.mark.parametrize("kind", [1, 2, 3])
def test_master_weights_are_kept_whole(worlds, tmp_path, kind):
    """bfloat16 weights are saved as the float32 that they are updated in, and made anew from it."""
    saved = worlds(4).run(train_and_save, kind, BF16, str(tmp_path))[0]
    assert saved["norm.weight"].dtype == torch.float32
    assert (saved["head.weight"] != saved["head.weight"].bfloat16()).any()
    for other, theirs in [(3, 1), (2, 3)]:
        for loaded, final in worlds(other).run(load_and_go_on, theirs, BF16, str(tmp_path)):
            same(loaded, saved)
            same(final, {name: saved[name].bfloat16() for name in final})


@pytest.mark.parametrize("kind", [2, 3])
def test_frozen_weights_are_saved_and_have_no_state(worlds, tmp_path, kind):
    frozen = ("embedding.", "blocks.0.attn")
    saved = worlds(3).run(train_and_save, kind, F64, str(tmp_path), frozen)[0]
    assert "embedding.token.weight" in saved
    assert "embedding.token.weight:exp_avg" not in saved
    for other, theirs in [(1, "plain"), (2, 3)]:
        for loaded, _ in worlds(other).run(load_and_go_on, theirs, F64, str(tmp_path), frozen):
            same(loaded, saved)


def test_before_the_first_step_there_are_weights_alone(worlds, tmp_path):
    def save():
        mesh = make_mesh()
        model = twin.build(F64)
        z = twin.make(3, model, mesh.dp)
        checkpoint.save(str(tmp_path), model, z, mesh)

    def load():
        mesh = make_mesh()
        model = build_model(F64, seed=99)
        optimizer = twin.adam(model.parameters())
        checkpoint.load(str(tmp_path), model, optimizer, mesh)
        return twin.weights(model), len(optimizer.state)

    worlds(2).run(save)
    ((got, states),) = worlds(1).run(load)
    same(got, twin.weights(twin.build(F64)))
    assert states == 0


# --- tensor parallelism ----------------------------------------------------------------------


def test_tensor_parallel_2_to_4_to_1(worlds, tmp_path):
    """kv heads fewer than tp included: on 4 ranks two of them hold the same head."""

    def through(size, source, target):
        mesh = make_mesh(tp=size)
        model = build_model(F64, seed=5 if source is None else 99)
        if size > 1:
            model = tp.parallelize(model, mesh.tp, tp.REGION, tp.plan_for(model))
        optimizer = twin.adam(model.parameters())
        if source is None:
            for parameter in model.parameters():
                parameter.grad = torch.sin(parameter.detach() * 100)
            optimizer.step()
        else:
            checkpoint.load(source, model, optimizer, mesh)
        if target is not None:
            checkpoint.save(target, model, optimizer, mesh)
        return contents(model, optimizer, mesh)

    paths = [str(tmp_path / str(number)) for number in range(3)]
    (want,) = worlds(1).run(through, 1, None, paths[0])
    worlds(2).run(through, 2, paths[0], paths[1])
    worlds(4).run(through, 4, paths[1], paths[2])
    (got,) = worlds(1).run(through, 1, paths[2], None)
    same(got, want)


# --- boxes and errors ------------------------------------------------------------------------


@given(
    shape=st.lists(st.integers(1, 5), max_size=3),
    cuts=st.lists(st.floats(0, 1), min_size=1, max_size=4),
)
def test_the_boxes_of_runs_fill_the_tensor(shape, cuts):
    size = prod(shape)
    whole = torch.arange(float(size)).view(shape)
    filled = torch.full(shape, -1.0)
    ends = sorted({0, size, *(int(cut * size) for cut in cuts)})
    for first, end in pairwise(ends):
        run, count = whole.reshape(-1)[first:end], 0
        for offsets, values in checkpoint.run_boxes(shape, first, run):
            place = tuple(slice(a, a + b) for a, b in zip(offsets, values.shape, strict=True))
            assert (filled[place] == -1).all(), "every element lies in one box"
            filled[place] = values
            count += 1
        assert count <= max(1, 2 * len(shape) - 1)
    assert torch.equal(filled, whole)


def test_what_does_not_fit_is_named_on_every_rank(worlds, tmp_path):
    def load(config):
        mesh = make_mesh()
        model = build_model(config)
        try:
            checkpoint.load(str(tmp_path), model, twin.adam(model.parameters()), mesh)
        except ValueError as error:
            return str(error)

    worlds(2).run(train_and_save, 2, F64, str(tmp_path))
    for said in worlds(3).run(load, GPT):
        assert "the checkpoint has no " in said
    for said in worlds(3).run(load, replace(F64, ffn=32)):
        assert "[24, 16] in the checkpoint and [32, 16] in this model" in said


def test_state_that_cannot_be_cut_is_refused(tmp_path):
    model = build_model(F64)
    optimizer = twin.adam(model.parameters())
    optimizer.state[model.blocks[0].attn.q.weight]["rows"] = torch.ones(4)
    with pytest.raises(ValueError, match=r"state 'rows' of blocks.0.attn.q.weight is shape \[4\]"):
        checkpoint.save(tmp_path, model, optimizer, make_mesh())
