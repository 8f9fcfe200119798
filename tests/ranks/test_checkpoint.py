"""A checkpoint saved under one mesh loads under another, not one bit changed."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from functools import cache, partial
from itertools import count, pairwise
from math import prod
from pathlib import Path
from unittest import mock

import pytest
import torch
import ways
import zero_twin as twin
from equality import assert_equal
from hypothesis import given
from hypothesis import strategies as st
from ways import COEFFICIENT, GPT, LLAMA, LOOPED, MOE, NAMES, SERIAL, WAYS, V, Way

from course_lib import checkpoint, comm, ep, zero
from course_lib.checkpoint import boxes
from course_lib.mesh import make_mesh
from course_lib.model import build_model
from course_lib.schedule import looped

CHAINS = [
    (LLAMA, [Way(tp=2), Way(tp=4), SERIAL]),  # two heads of keys: two ranks of four hold the same
    (GPT, [Way(tp=2), Way(tp=3), Way(tp=4), SERIAL]),  # paddings of 1, 1 and 1 row, cut elsewhere
    (GPT, [LOOPED, V, Way(placement=looped(4), tp=2), Way(placement=looped(3)), SERIAL]),
    (MOE, [Way(dp=4, ep=4), Way(dp=2, ep=2), SERIAL]),
]
HALF, END = 2, 4
TRAINED = [
    (LLAMA, SERIAL),
    *((LLAMA, Way(dp=4, zero=stage)) for stage in (0, 1, 2, 3)),
    (LLAMA, Way(tp=2)),
    (GPT, Way(tp=2, dp=2, zero=1)),
    (GPT, Way(placement=looped(2))),
    (GPT, LOOPED),
    (LLAMA, V),
    (MOE, Way(dp=4, ep=2)),
    (MOE, Way(dp=4, ep=2, zero=1)),
]
ELSEWHERE = {*TRAINED, *((config, way) for config, chain in CHAINS for way in chain)}
CASES = [
    (config, way)
    for config, several in WAYS.items()
    for way in several
    if (config, way) not in ELSEWHERE
]


def named(value):
    return NAMES.get(value) or str(value)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A new folder for each name, which the tests of this file share."""
    root, number = tmp_path_factory.mktemp("saved"), count()
    return lambda name="": str(root / f"{name}{next(number)}")


@pytest.fixture(scope="module")
def truths(files):
    """For each model a checkpoint of drawn values, saved by one process."""
    paths = {config: files("truth") for config in WAYS}
    for config, path in paths.items():
        ways.save_truth(SERIAL, config, path)
    return paths


def assert_loads(worlds, way, config, path, target=None):
    load = partial(ways.load_and_compare, way, config, path, target)
    results = [load()] if way == SERIAL else worlds(way.world).run(load)
    for rank, wrong in enumerate(results):
        assert not wrong, f"{way}, rank {rank}: {wrong[:5]}"


# --- every mesh to every other ---------------------------------------------------------------


@pytest.mark.parametrize(("config", "way"), CASES, ids=named)
def test_from_one_process_and_back(worlds, files, truths, config, way):
    """Weights and state, on every rank what it should hold; then what it saved, on one."""
    there = files()
    assert_loads(worlds, way, config, truths[config], there)
    assert_loads(worlds, SERIAL, config, there)


@st.composite
def pairs(draw):
    config = draw(st.sampled_from(list(WAYS)))
    several = st.sampled_from([way for way in WAYS[config] if way.world <= 4])
    return config, draw(several), draw(several)


@given(pair=pairs())
def test_any_mesh_to_any_other(worlds, files, pair):
    config, source, target = pair
    path = files()
    worlds(source.world).run(ways.save_truth, source, config, path)
    assert_loads(worlds, target, config, path)


@pytest.mark.parametrize(("config", "chain"), CHAINS, ids=["tp", "vocabulary", "pp", "ep"])
def test_handed_on(worlds, files, truths, config, chain):
    path = truths[config]
    for way in chain:
        before, path = path, files()
        assert_loads(worlds, way, config, before, path)


# --- training goes on ------------------------------------------------------------------------


def train_and_save(way, config, half, end):
    """Without a stop; what this rank holds at the end."""
    job = ways.make(way, ways.serial_model(config))
    ways.train(job, 0, HALF)
    checkpoint.save(half, job.model, job.optimizers, job.mesh)
    ways.train(job, HALF, END)
    checkpoint.save(end, job.model, job.optimizers, job.mesh)
    return ways.local(job)


def load_and_train(way, config, half, end):
    job = ways.make(way, ways.serial_model(config, seed=99))
    ways.train(job, 9, 10)  # what was before a load leaves no trace
    checkpoint.load(half, job.model, job.optimizers, job.mesh)
    ways.train(job, HALF, END)
    checkpoint.save(end, job.model, job.optimizers, job.mesh)
    return ways.local(job)


@cache
def never_saved(config):
    """One process and a plain loop."""
    model = ways.serial_model(config)
    optimizer = ways.adam(model.parameters())
    loss = ep.loss_sum(model, COEFFICIENT) if config == MOE else model.loss_sum
    for step in range(END):
        optimizer.zero_grad()
        total, tokens = loss(*ways.rows(step))
        (total / tokens).backward()
        optimizer.step()
    return twin.weights(model)


def weights_in(path, config):
    model = ways.serial_model(config, seed=99)
    checkpoint.load(path, model, (), make_mesh())
    return twin.weights(model)


@pytest.mark.parametrize(("config", "way"), TRAINED, ids=named)
def test_on_the_same_mesh_as_if_it_had_not_stopped(worlds, files, config, way):
    half, end, again = files(), files(), files()
    straight = worlds(way.world).run(train_and_save, way, config, half, end)
    resumed = worlds(way.world).run(load_and_train, way, config, half, again)
    for mine, theirs in zip(resumed, straight, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert_equal(weights_in(again, config), never_saved(config), 1e-8, f"weights of {way}")


OTHERS = [
    (LLAMA, Way(dp=4, zero=3), Way(tp=2, dp=2, zero=2)),
    (LLAMA, Way(tp=2), LOOPED),
    (GPT, LOOPED, Way(dp=4, zero=1)),
    (GPT, Way(tp=2, dp=2, zero=1), V),
    (MOE, Way(dp=4, ep=4), Way(dp=2, ep=2, zero=1)),
    (MOE, Way(dp=4, ep=2, zero=2), SERIAL),
]


@pytest.mark.parametrize(("config", "source", "target"), OTHERS, ids=named)
def test_on_another_mesh_too(worlds, files, config, source, target):
    half, end, again = files(), files(), files()
    worlds(source.world).run(train_and_save, source, config, half, end)
    worlds(target.world).run(load_and_train, target, config, half, again)
    got = weights_in(again, config)
    assert_equal(got, weights_in(end, config), 1e-8, f"weights of {target} after {source}")
    assert_equal(got, never_saved(config), 1e-8, f"weights of {target}")


# --- precision, frozen weights, no state -----------------------------------------------------


def zero_job(stage, config, frozen=(), seed=3):
    mesh = make_mesh()
    model = twin.build(config, frozen) if seed == 3 else build_model(config, seed=seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and name.startswith(frozen)))
    return mesh, model, twin.make(stage, model, mesh.dp)


def contents(z, model):
    """Every weight in the precision in which it is updated, and its two moments, whole."""
    found = twin.trained(z, model) | twin.masters(z, model)
    for key in ("exp_avg", "exp_avg_sq"):
        moments = twin.whole(z, model, lambda shard, key=key: z.optimizer.state[shard][key])
        found |= {f"{name}:{key}": value for name, value in moments.items()}
    return found


def save_after_a_step(stage, config, path, frozen=()):
    mesh, model, z = zero_job(stage, config, frozen)
    (model.loss_sum(*twin.rows(0, mesh.dp.rank, mesh.dp.size))[0] / 100).backward()
    z.finish()
    z.step()
    checkpoint.save(path, model, z, mesh)
    return contents(z, model)


def load_whole(stage, config, path, frozen=()):
    mesh, model, z = zero_job(stage, config, frozen, seed=99)
    checkpoint.load(path, model, z, mesh)
    return contents(z, model), twin.trained(z, model)


def same(got, want):
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_master_weights_are_kept_whole(worlds, files, stage):
    """bfloat16 weights are saved as the float32 that they are updated in, and made anew from it."""
    path = files()
    saved = worlds(4).run(save_after_a_step, stage, twin.BF16, path)[0]
    assert saved["norm.weight"].dtype == torch.float32
    assert (saved["head.weight"] != saved["head.weight"].bfloat16()).any()
    for n, other in [(3, 1), (2, 3)]:
        for loaded, weights in worlds(n).run(load_whole, other, twin.BF16, path):
            same(loaded, saved)
            same(weights, {name: saved[name].bfloat16() for name in weights})


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_weights_are_saved_and_have_no_state(worlds, files, stage):
    frozen, path = ("embedding.", "blocks.0.attn"), files()
    saved = worlds(3).run(save_after_a_step, stage, twin.F64, path, frozen)[0]
    assert "embedding.token.weight" in saved
    assert "embedding.token.weight:exp_avg" not in saved
    for n, other in [(1, 1), (2, 3)]:
        for loaded, _ in worlds(n).run(load_whole, other, twin.F64, path, frozen):
            same(loaded, saved)


def serial_job(config=twin.F64, make=twin.adam, seed=3, step=True):
    """A model and its optimizer after a step on drawn gradients, in this process."""
    model = build_model(config, seed=seed)
    optimizer = make(model.parameters())
    for parameter in model.parameters() if step else ():
        parameter.grad = torch.sin(parameter.detach() * 100)
    optimizer.step()
    return model, optimizer


def save_here(path, model, optimizers=()):
    checkpoint.save(path, model, optimizers, make_mesh())


def load_here(path, model, optimizers=()):
    checkpoint.load(path, model, optimizers, make_mesh())


def test_before_the_first_step_there_are_weights_alone(worlds, files):
    def save(path):
        mesh, model, z = zero_job(3, twin.F64)
        checkpoint.save(path, model, z, mesh)

    path = files()
    worlds(2).run(save, path)
    model, optimizer = serial_job(seed=99)
    assert optimizer.state
    load_here(path, model, optimizer)
    same(twin.weights(model), twin.weights(twin.build(twin.F64)))
    assert not optimizer.state, "what the optimizer knew before is forgotten"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_weights_alone(files):
    path, (model, optimizer) = files(), serial_job()
    save_here(path, model, optimizer)
    other = build_model(twin.F64, seed=99)
    load_here(path, other)
    same(twin.weights(other), twin.weights(model))


def test_a_wider_dtype_holds_all_bits(files):
    path, (model, optimizer) = files(), serial_job(replace(twin.F64, dtype=torch.float32))
    save_here(path, model, optimizer)
    wide, theirs = serial_job(seed=99)
    load_here(path, wide, theirs)
    same(twin.weights(wide), {name: p.double() for name, p in twin.weights(model).items()})
    assert theirs.state[wide.norm.weight]["exp_avg"].dtype == torch.float64


KINDS = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "adagrad": torch.optim.Adagrad,
    "nadam": torch.optim.NAdam,
    "rprop": torch.optim.Rprop,
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_optimizers(worlds, files, kind):
    """Through ZeRO-1 on two ranks and back."""

    def through(source, target):
        mesh, model = make_mesh(), build_model(twin.F64, seed=99)
        z = zero.Zero1(model.parameters(), mesh.dp, KINDS[kind], twin.BUCKET_BYTES)
        checkpoint.load(source, model, z, mesh)
        checkpoint.save(target, model, z, mesh)

    path, there, (model, optimizer) = files(), files(), serial_job(make=KINDS[kind])
    save_here(path, model, optimizer)
    worlds(2).run(through, path, there)
    other, theirs = serial_job(make=KINDS[kind], seed=99)
    load_here(there, other, theirs)
    same(twin.weights(other), twin.weights(model))
    for got, want in zip(other.parameters(), model.parameters(), strict=True):
        same(theirs.state[got], optimizer.state[want])


# --- boxes -----------------------------------------------------------------------------------


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
        run, found = whole.reshape(-1)[first:end], 0
        for offsets, values in boxes.run_boxes(shape, first, run):
            place = tuple(slice(a, a + b) for a, b in zip(offsets, values.shape, strict=True))
            assert (filled[place] == -1).all(), "every element lies in one box"
            filled[place] = values
            found += 1
        assert found <= max(1, 2 * len(shape) - 1)
    assert torch.equal(filled, whole)


# --- mistakes that must not pass -------------------------------------------------------------


def counted_from_0(original, stage):
    modules = original(stage)
    blocks = {f"blocks.{number}": block for number, block in enumerate(stage.blocks)}
    return {k: m for k, m in modules.items() if not k.startswith("blocks.")} | blocks


MISTAKES = {
    "stages count from 0": (
        LOOPED,
        LLAMA,
        boxes,
        "_modules",
        lambda original: partial(counted_from_0, original),
    ),
    "a tied copy is saved too, in other runs": (
        Way(placement=looped(2), dp=3, zero=1),
        GPT,
        checkpoint,
        "tied_copies",
        lambda original: lambda stages: set(),
    ),
    "ranks that share a head count twice": (
        Way(tp=4),
        LLAMA,
        comm,
        "take_shard",
        lambda original: lambda *args: forget(original(*args), "kv_group"),
    ),
    "padding is part of the vocabulary": (
        Way(tp=2),
        GPT,
        comm,
        "take_shard",
        lambda original: lambda *args: forget(original(*args), "unpadded"),
    ),
    "the shard's rank is forgotten": (
        Way(dp=4, zero=1),
        LLAMA,
        zero.FlatParameter,
        "parameter_slices",
        lambda original: lambda flat, values: shifted(original, flat, values),
    ),
}


def forget(parameter, field):
    spec = comm.shard_spec(parameter)
    if spec is not None:
        comm.set_shard_spec(parameter, replace(spec, **{field: None}))
    return parameter


def shifted(original, flat, values):
    with mock.patch.object(flat, "axis", replace(flat.axis, rank=0)):
        return list(original(flat, values))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_caught(worlds, files, mistake):
    """Saved with the mistake and loaded without: an error, or other bits."""
    way, config, *_ = MISTAKES[mistake]

    def save(path):
        _, _, where, what, wrong = MISTAKES[mistake]
        with mock.patch.object(where, what, wrong(getattr(where, what))):
            try:
                ways.save_truth(way, config, path)
            except ValueError:
                return True
        return False

    path = files()
    refused = worlds(way.world).run(save, path)
    if not any(refused):
        with pytest.raises((AssertionError, ValueError), match=r"serial, rank 0|the checkpoint"):
            assert_loads(worlds, SERIAL, config, path)


# --- clear errors ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(files):
    """By name: a checkpoint of one process with AdamW."""
    kinds = {
        "llama": serial_job(),
        "gpt": serial_job(twin.GPT),
        "deep": serial_job(replace(twin.F64, layers=4)),
        "wide": serial_job(replace(twin.F64, ffn=32)),
        "momentum": serial_job(make=KINDS["momentum"]),
        "sgd": serial_job(make=partial(torch.optim.SGD, lr=0.1)),
    }
    paths = {name: files(name) for name in kinds}
    for name, (model, optimizer) in kinds.items():
        save_here(paths[name], model, optimizer)
    return paths


F32 = replace(twin.F64, dtype=torch.float32)
REFUSED = [
    ("gpt", twin.F64, "adam", r"has no blocks.0.attn_norm|has no .*gate.weight"),
    ("llama", twin.GPT, "adam", r"has no embedding.position.weight"),
    ("wide", twin.F64, "adam", r"\[32, 16\] in the checkpoint and \[24, 16\] in this model"),
    ("deep", twin.F64, "adam", r"has blocks.2.\S+, blocks.2.\S+, blocks.2.\S+ and 15 more, of wh"),
    ("llama", replace(twin.F64, layers=4), "adam", r"has no blocks.2.* and 15 more: it was saved"),
    ("llama", F32, "adam", r"is torch.float64 in the checkpoint and torch.float32 here"),
    ("llama", twin.F64, "momentum", r"no \S+:momentum_buffer.* which kept exp_avg, exp_avg_sq, st"),
    ("momentum", twin.F64, "adam", r"has no \S+:exp_avg.* kind, which kept momentum_bu"),
    ("llama", twin.F64, "sgd", r"has \S+:exp_avg, .* which no optimizer here keeps"),
]
OPTIMIZERS = {"adam": twin.adam, "momentum": KINDS["momentum"]}
OPTIMIZERS["sgd"] = partial(torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize(("name", "config", "kind", "said"), REFUSED)
def test_what_does_not_fit_is_named_and_nothing_is_changed(saved, name, config, kind, said):
    model, optimizer = serial_job(config, OPTIMIZERS[kind], seed=99)
    before = twin.weights(model)
    state = {p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    with pytest.raises(ValueError, match=said):
        load_here(saved[name], model, optimizer)
    same(twin.weights(model), before)
    for parameter, theirs in state.items():
        same(optimizer.state[parameter], theirs)


def test_on_every_rank(worlds, saved):
    """One stage of two lacks what the other one has not: both hear of it."""

    def load(path, layers):
        mesh = make_mesh(pp=2)
        model = build_model(replace(twin.F64, layers=layers))
        job = ways.make(Way(placement=looped(2)), model, mesh)
        try:
            checkpoint.load(path, job.model, job.optimizers, mesh)
        except ValueError as error:
            return str(error)

    for said in worlds(2).run(load, saved["llama"], 4):  # rank 0 has all of its blocks
        assert "the checkpoint has no blocks.2." in said
    for said in worlds(2).run(load, saved["deep"], 2):
        assert "the checkpoint has blocks.2." in said


def test_another_number_of_experts(worlds, truths, files):
    def load(path, experts):
        model = ep.add_experts(build_model(MOE), experts, 2, shared=True)
        job = ways.make(Way(dp=2, ep=2), model)
        try:
            checkpoint.load(path, job.model, job.optimizers, job.mesh)
        except ValueError as error:
            return str(error)

    for said in worlds(2).run(load, truths[MOE], 6):
        assert "router.weight has shape [8, 24] in the checkpoint and [6, 24] in this mo" in said


def test_an_sgd_without_state_may_become_an_adam(saved):
    """There is nothing to lose: it starts as before its first step."""
    model, optimizer = serial_job(seed=99)
    load_here(saved["sgd"], model, optimizer)
    assert not optimizer.state


def broken(path, how):
    """A copy of a checkpoint to which something has happened."""
    target = path + how
    shutil.copytree(path, target)
    metadata, data = Path(target, ".metadata"), next(Path(target).glob("*.distcp"))
    if how == "unfinished":
        metadata.unlink()
    elif how == "lost":
        data.unlink()
    else:
        cut = {"cut": data, "damaged": metadata}[how]
        cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    return target


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("unfinished", "is no finished checkpoint: it has no .metadata, which is written last"),
        ("lost", r"cannot be read, says rank 0 \(FileNotFoundError.*a file is missing or broken"),
        ("cut", r"cannot be read, says rank 0 .*a file is missing or broken"),
        ("damaged", r"cannot be read, says rank 0 .*a file is missing or broken"),
    ],
)
def test_a_broken_checkpoint(worlds, saved, how, said):
    def load(path):
        mesh, model, z = zero_job(1, twin.F64)
        try:
            checkpoint.load(path, model, z, mesh)
        except ValueError as error:
            return str(error)

    for heard in worlds(2).run(load, broken(saved["llama"], how)):
        assert re.search(said, heard, re.DOTALL)


def test_no_folder(tmp_path, caplog):
    model, optimizer = serial_job()
    with pytest.raises(ValueError, match="there is no folder .*nowhere"):
        load_here(tmp_path / "nowhere", model, optimizer)
    logged = [record for record in caplog.records if record.name == "root"]
    assert not logged, "the error is enough"


def test_nothing_is_written_over(worlds, saved):
    def save(path):
        mesh, model, z = zero_job(1, twin.F64)
        try:
            checkpoint.save(path, model, z, mesh)
        except ValueError as error:
            return str(error)

    for said in worlds(2).run(save, saved["llama"]):
        assert "holds a checkpoint" in said


def test_a_file_is_no_folder(tmp_path):
    place = tmp_path / "weights"
    place.write_text("mine")
    with pytest.raises(ValueError, match="weights is a file, and a checkpoint is a folder: choose"):
        save_here(place, *serial_job())
    assert place.read_text() == "mine"


def test_a_folder_for_each_rank_is_refused(worlds, files):
    def save(path):
        mesh, model, z = zero_job(1, twin.F64)
        try:
            checkpoint.save(path + str(mesh.rank), model, z, mesh)
        except ValueError as error:
            return str(error)

    path = files()
    for said in worlds(2).run(save, path):
        assert f"rank 1 saves to {path}1 and rank 0 to {path}0: give all ranks the same" in said
    assert not list(Path(path).parent.glob(f"{Path(path).name}?/*"))


def test_state_that_cannot_be_cut_is_refused(tmp_path):
    for value, said in [(torch.ones(4), r"is shape \[4\]"), ("much", "is 'much'")]:
        model, optimizer = serial_job()
        optimizer.state[model.blocks[0].attn.q.weight]["rows"] = value
        with pytest.raises(ValueError, match=f"state 'rows' of blocks.0.attn.q.weight {said}"):
            save_here(tmp_path, model, optimizer)
    adafactor = serial_job(step=False, make=torch.optim.Adafactor)
    save_here(tmp_path / "plain", *serial_job())
    with pytest.raises(ValueError, match="state 'row_var' of"):
        load_here(tmp_path / "plain", *adafactor)


def test_optimizers_of_another_model_are_refused(tmp_path):
    model, _ = serial_job()
    _, strange = serial_job()
    z = zero.Zero1(build_model(twin.F64).parameters(), make_mesh().dp, twin.adam)
    for optimizer in (strange, z):
        with pytest.raises(ValueError, match="weights of an optimizer .* are none of this model's"):
            save_here(tmp_path, model, optimizer)


def test_a_sharded_model_without_its_optimizer_is_refused(tmp_path):
    model = build_model(twin.F64)
    zero.Zero3(model, list(model.blocks), make_mesh().dp, twin.adam)
    save_here(tmp_path / "whole", build_model(twin.F64))
    for verb, path in ((save_here, "sharded"), (load_here, "whole")):
        with pytest.raises(ValueError, match="embedding.token.weight has no memory on this rank"):
            verb(tmp_path / path, model)


def test_a_tied_weight_that_came_apart_is_refused(tmp_path):
    model, _ = serial_job(twin.GPT)
    model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
    with pytest.raises(ValueError, match=r"two weights of this rank are embedding.token.weight in"):
        save_here(tmp_path, model)


def test_weights_of_different_ages_do_not_share_a_shard(tmp_path):
    """One was frozen for a step: in one process each has a count of its own."""
    model, optimizer = serial_job()
    optimizer.state[model.norm.weight]["step"] += 1
    save_here(tmp_path, model, optimizer)
    other = build_model(twin.F64)
    z = zero.Zero1(other.parameters(), make_mesh().dp, twin.adam)
    with pytest.raises(ValueError, match=":step, .* in the checkpoint, but under ZeRO they lie in"):
        load_here(tmp_path, other, z)
