"""ZeRO equals one process in all three stages, and its bytes equal their formulas."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from unittest import mock

import pytest
import torch
import zero_twin as twin
from equality import assert_bitwise, assert_equal
from hypothesis import given
from hypothesis import strategies as st
from zero_twin import BF16, F64, GPT, STAGES, STEPS, accumulated, check, serial, train

from course_lib import comm, dp, recompute, zero
from course_lib.mesh import make_mesh
from course_lib.model import (
    ModelConfig,
    accumulation_dtype,
    block_parameter_count,
    build_model,
    loss_sum,
    parameter_count,
)

WORLDS = (1, 2, 3, 4, 8)
LAST = 2  # the number of the last unit of two blocks, the root being 0


@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("config", [F64, GPT], ids=["llama", "gpt-tied"])
def test_equals_serial(worlds, n, stage, config):
    results = worlds(n).run(train, stage, config)
    check(results, serial(config))
    once = {"gathered_once": (0, LAST)} if stage == 3 else {}
    elements = twin.elements(stage, twin.build(config))
    formula = zero.wire_bytes(stage, elements, n, dtype=torch.float64, **once)
    for *_, sent in results:
        assert sent == [formula] * STEPS


@pytest.mark.parametrize("stage", STAGES)
def test_in_float32(worlds, stage):
    config = replace(F64, dtype=torch.float32)
    results = worlds(2).run(lambda: train(stage, config, steps=1))
    losses, first, _ = serial(config, steps=1)
    for got_losses, got_first, _, _ in results:
        assert got_losses == pytest.approx(losses, rel=1e-6)
        assert_equal(got_first, first, 5e-6, "gradients")


@pytest.mark.parametrize("config", [F64, BF16], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_equals_the_shards_accumulated_bit_for_bit(worlds, n, stage, config):
    """In bfloat16 too: gradients are summed, and weights updated, in float32 masters."""

    def rank():
        mesh = make_mesh()
        model = twin.build(config)
        z, first = twin.make(stage, model, mesh.dp), None
        for step in range(STEPS):
            mine = twin.rows(step, mesh.dp.rank, mesh.dp.size)
            dp.train_step(model.loss_sum, [mine], z, z)
            first = first or twin.gradients(z, model)
        return first, twin.masters(z, model), twin.trained(z, model), mesh.ledger.wire_bytes()

    first, masters = accumulated(config, n)
    for got_first, got_masters, final, _ in worlds(n).run(rank):
        assert next(iter(got_first.values())).dtype == accumulation_dtype(config.dtype)
        assert_bitwise(got_first, first, "gradients")
        assert_bitwise(got_masters, masters, "masters after 5 AdamW steps")
        assert_bitwise(final, {k: m.to(config.dtype) for k, m in got_masters.items()}, "weights")


# --- accumulation, uneven tokens, clipping, frozen, tied, unused ------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("micro", [2, 6])
def test_accumulation(worlds, stage, micro):
    """Stage 1 sends once a step; 2 scatters every micro-batch; 3 gathers for each as well."""
    results = worlds(4).run(lambda: train(stage, F64, micro=micro))
    check(results, serial(F64))
    parameter_bytes = 8 * parameter_count(F64)
    block = 8 * block_parameter_count(F64)
    root = parameter_bytes - 2 * block
    moved = {
        1: 2 * parameter_bytes,
        2: (micro + 1) * parameter_bytes,
        3: micro * (2 * root + 3 * block + 2 * block),  # root and last block gathered once
    }
    for *_, sent in results:
        assert sent == [Fraction(3, 4) * moved[stage]] * STEPS


@pytest.mark.parametrize("stage", STAGES)
def test_uneven_token_counts(worlds, stage):
    results = worlds(4).run(lambda: train(stage, F64, shortest=2))
    check(results, serial(F64, shortest=2))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("n", [1, 3])
def test_clipping_by_the_global_norm(worlds, stage, n):
    """Three ranks: the sizes do not divide, and the padding must not enter the norm."""
    results = worlds(n).run(lambda: train(stage, F64, max_norm=0.1))
    _, _, final = serial(F64, max_norm=0.1)
    for result in results:
        assert_equal(result[2], final, 1e-8, "weights")


@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_is_that_of_the_serial_gradients(worlds, stage):
    def rank():
        mesh = make_mesh()
        model = twin.build(GPT)
        z = twin.make(stage, model, mesh.dp)
        tokens = twin.rows(0)[1].numel()
        (model.loss_sum(*twin.rows(0, mesh.dp.rank, mesh.dp.size))[0] / tokens).backward()
        z.finish()
        mesh.ledger.clear()
        norms = float(z.clip(1e9)), float(z.clip(0.5)), float(z.clip(1e9))
        control = [record for record in mesh.ledger.records if record.control]
        return norms, mesh.ledger.wire_bytes(), [record.payload for record in control]

    first = serial(GPT)[1]
    norm = float(torch.stack([g.square().sum() for g in first.values()]).sum().sqrt())
    for (large, before, after), sent, control in worlds(3).run(rank):
        assert large == pytest.approx(norm, rel=1e-12)
        assert before == pytest.approx(norm, rel=1e-12)
        assert after == pytest.approx(0.5, rel=1e-5)
        assert (sent, control) == (0, [8, 8, 8])


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_parameters_stay(worlds, stage):
    """Stages 1 and 2 send nothing of them; stage 3 gathers them and reduces nothing."""
    frozen = ("embedding.", "blocks.0.attn", "blocks.1.ffn_norm")
    results = worlds(3).run(lambda: train(stage, F64, frozen=frozen))
    check(results, serial(F64, frozen=frozen))
    model = twin.build(F64, frozen)
    cold = [[p for p in one.parameters() if not p.requires_grad] for one in [model, *model.blocks]]
    sizes = [sum(p.numel() for p in parameters) for parameters in cold]
    only = {"gathered_once": (0, LAST), "frozen": [sizes[0] - sum(sizes[1:]), *sizes[1:]]}
    elements = twin.elements(stage, model)
    formula = zero.wire_bytes(
        stage, elements, 3, dtype=torch.float64, **(only if stage == 3 else {})
    )
    assert results[0][3][0] == formula


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize(
    ("frozen", "without"),
    [
        (("embedding.", "blocks.0."), (1,)),
        (("embedding.", "blocks."), (1, LAST)),
        (("embedding.", "blocks.0.", "blocks.1.attn"), (1,)),
        (("head", "norm", "blocks.0."), ()),
    ],
)
def test_a_unit_without_backward_is_gathered_once(worlds, frozen, without, prefetch):
    """Frozen, and nothing trained before it: nobody will want it in backward."""

    def make(stage, model, axis):
        return twin.make(stage, model, axis, prefetch=prefetch)

    results = worlds(2).run(lambda: train(3, F64, frozen=frozen, make=make, steps=2))
    model = twin.build(F64, frozen)
    cold = [sum(p.numel() for p in b.parameters() if not p.requires_grad) for b in model.blocks]
    whole = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    formula = zero.wire_bytes(
        3,
        twin.elements(3, model),
        2,
        dtype=torch.float64,
        gathered_once={0, LAST, *without},
        frozen=[whole - sum(cold), *cold],
    )
    want = serial(F64, frozen=frozen, steps=2)
    for result in results:
        assert_equal(result[1], want[1], 1e-12, "gradients")
        assert result[3] == [formula] * 2


class Odd(torch.nn.Module):
    """Two dtypes, a bias that nobody uses, a layer used twice, a weight that two units share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = torch.nn.ModuleList([torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)])
        self.inner[1].weight = self.inner[0].weight
        self.twice = torch.nn.Linear(5, 5)
        self.last = torch.nn.Linear(5, 3)
        self.scale = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.unused = torch.nn.Parameter(torch.ones(2))

    def forward(self, x):
        for layer in [self.twice, *self.inner, self.twice]:
            x = torch.tanh(layer(x))
        return self.last(x).double() * self.scale


def odd_step(model, rank, size):
    """A rank's part of the loss; the reference's step includes gradient clipping."""
    x = torch.linspace(-1, 1, 60).view(12, 5).chunk(size)[rank]
    return model(x).square().sum() / 36


@pytest.mark.parametrize("stage", STAGES)
def test_dtypes_shared_weights_and_parameters_that_nobody_uses(worlds, stage):
    """What no rank uses has a gradient of zeros, so that weight decay moves it: see dp."""

    def rank():
        mesh = make_mesh()
        model = Odd()
        if stage == 3:
            units = [*model.inner, model.twice]
            z = zero.Zero3(model, units, mesh.dp, twin.adam, reshard_after_forward=True)
        else:
            z = (zero.Zero1, zero.Zero2)[stage - 1](model.parameters(), mesh.dp, twin.adam, 40)
        norms = []
        for _ in range(STEPS):
            z.zero_grad()
            odd_step(model, mesh.dp.rank, mesh.dp.size).backward()
            z.finish()
            norms.append(float(z.clip(0.1)))
            z.step()
        return norms, twin.trained(z, model)

    model = Odd()
    model.unused.grad = torch.zeros(2)
    optimizer, norms = twin.adam(model.parameters()), []
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        odd_step(model, 0, 1).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
    for got_norms, got in worlds(3).run(rank):
        assert got_norms == pytest.approx(norms, rel=1e-5)
        assert_equal(got, twin.weights(model), 1e-4, "weights")
    assert float((model.unused.detach() - 1).abs().max()) > 1e-4


@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_that_use_other_parameters_still_agree(worlds, stage):
    """Backward fills the buckets in another order on each rank; they leave in one order."""

    def rank():
        mesh = make_mesh()
        torch.manual_seed(0)
        layers = torch.nn.ModuleList([torch.nn.Linear(3, 3) for _ in range(3)])
        kind = (zero.Zero1, zero.Zero2)[stage - 1]
        z = kind(layers.parameters(), mesh.dp, twin.adam, 1)  # a bucket for each parameter
        x = torch.ones(1, 3)
        for layer in [layers[0], layers[1]] if mesh.dp.rank else [layers[2], layers[0]]:
            x = layer(x) * 2
        x.sum().backward()
        z.finish()
        z.close()
        return twin.gradients(z, layers)

    torch.manual_seed(0)
    layers = torch.nn.ModuleList([torch.nn.Linear(3, 3) for _ in range(3)])
    for order in ([layers[0], layers[1]], [layers[2], layers[0]]):
        x = torch.ones(1, 3)
        for layer in order:
            x = layer(x) * 2
        x.sum().backward()
    want = {name: p.grad for name, p in layers.named_parameters()}
    for got in worlds(2).run(rank):
        assert_equal(got, want, 1e-6, "gradients")


# --- stage 3: what stays gathered, what comes early, recomputation, reading ------------------


@pytest.mark.parametrize("prefetch", [True, False])
def test_backward_of_the_root_prefetches_the_last_unit(worlds, prefetch):
    """The root owns the head, so its backward comes first; the last unit was freed before it."""

    def rank():
        mesh, model, events = make_mesh(), twin.build(F64), []
        z = twin.make(3, model, mesh.dp, prefetch=prefetch, reshard_after_forward=True)
        model.head.weight.register_hook(lambda _: events.append("gradient of the head"))
        start = comm.start_all_gather_flat

        def noted(full, shard, axis, name):
            events.append(name)
            return start(full, shard, axis, name)

        with mock.patch.object(comm, "start_all_gather_flat", noted):
            total, _ = model.loss_sum(*twin.rows(0, mesh.dp.rank, mesh.dp.size))
            events.clear()
            total.backward()
            z.finish()
        return events

    head, last = "gradient of the head", "blocks.1"
    order = [last, head] if prefetch else [head, last]
    assert list(worlds(2).run(rank)) == [["root", *order, "blocks.0"]] * 2


def test_a_unit_that_no_rank_runs_is_not_prefetched_in_backward(worlds):
    def rank():
        mesh, events = make_mesh(), []
        first, skipped, last = layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        model = torch.nn.ModuleDict({"layers": layers})
        zero.Zero3(model, [first, skipped, last], mesh.dp, twin.adam, reshard_after_forward=True)
        last.weight.register_hook(lambda _: events.append("gradient of the last"))
        start = comm.start_all_gather_flat

        def noted(full, shard, axis, name):
            events.append(name)
            return start(full, shard, axis, name)

        with mock.patch.object(comm, "start_all_gather_flat", noted):
            y = last(first(torch.ones(2, 4)))
            events.clear()
            y.sum().backward()
        return events

    expected = ["layers.2", "layers.0", "gradient of the last"]
    assert list(worlds(2).run(rank)) == [expected] * 2


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("reshard", [True, None, False, "middle and last"])
def test_what_is_resharded_after_forward(worlds, reshard, prefetch):
    once = {True: (), None: (0, LAST), False: (0, 1, LAST), "middle and last": (0,)}[reshard]

    def make(stage, model, axis):
        units = list(model.blocks)
        chosen = units if reshard == "middle and last" else reshard
        return zero.Zero3(
            model, units, axis, twin.adam, reshard_after_forward=chosen, prefetch=prefetch
        )

    results = worlds(3).run(lambda: train(3, F64, micro=2, make=make, steps=2))
    losses, first, final = serial(F64, steps=2)
    elements = twin.elements(3, twin.build(F64))
    formula = zero.wire_bytes(
        3, elements, 3, dtype=torch.float64, micro_batches=2, gathered_once=once
    )
    for result in results:
        assert result[0] == pytest.approx(losses, rel=1e-11)
        assert_equal(result[1], first, 1e-12, "gradients")
        assert_equal(result[2], final, 1e-8, "weights")
        assert result[3] == [formula] * 2
    whole = Fraction(2, 3) * sum(zero.padded(one, 3) for one in elements) * 8
    if reshard is True:
        assert formula == 2 * 3 * whole
    if reshard is False:
        assert formula == 2 * 2 * whole


class Around(torch.nn.Module):
    """Runs each block, its hooks included, inside a checkpoint."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        positions, run = torch.arange(x.shape[1]), torch.utils.checkpoint.checkpoint
        x = self.model.embedding(x, positions)
        for block in self.model.blocks:
            x = run(block, x, positions, use_reentrant=False)
        return self.model.head(self.model.norm(x))


@pytest.mark.parametrize("how", ["ours, full", "torch, block and hooks"])
def test_recomputation_gathers_nothing_more(worlds, how):
    def rank():
        mesh = make_mesh()
        model = twin.build(F64)
        if how == "ours, full":
            recompute.full(model)
            around = model
        else:
            around = Around(model)
        z = zero.Zero3(around, list(model.blocks), mesh.dp, twin.adam)
        tokens, targets = twin.rows(0, mesh.dp.rank, mesh.dp.size)
        logits = around(tokens).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")
        (loss / twin.rows(0)[1].numel()).backward()
        z.finish()
        return mesh.ledger.wire_bytes(), twin.gradients(z, model)

    elements = twin.elements(3, twin.build(F64))
    formula = zero.wire_bytes(3, elements, 2, dtype=torch.float64, gathered_once=(0, LAST))
    for sent, got in worlds(2).run(rank):
        assert_equal(got, serial(F64)[1], 1e-12, "gradients")
        assert sent == formula


def test_reading_evaluating_and_what_is_freed(worlds):
    def rank():
        mesh = make_mesh()
        model = twin.build(F64)
        whole = twin.weights(model)
        z = twin.make(3, model, mesh.dp)
        outside = model.blocks[0].attn.q.weight.detach()
        said = [outside.shape, bool(outside.isnan().all())]
        said.append(sum(buffer.untyped_storage().nbytes() for buffer in z.buffers))
        with torch.no_grad():
            logits = model(twin.rows(0)[0])
        said.append(sum(buffer.untyped_storage().nbytes() for buffer in z.buffers))
        with z.gathered():
            inside = twin.weights(model)
        said.append(sum(buffer.untyped_storage().nbytes() for buffer in z.buffers))
        return said, logits, inside, whole

    expected = twin.build(F64)(twin.rows(0)[0])
    for said, logits, inside, whole in worlds(2).run(rank):
        assert said == [torch.Size([16, 16]), True, 0, 0, 0]
        assert torch.equal(logits, expected)
        assert_bitwise(inside, whole, "weights")


def test_a_forward_without_backward_does_not_keep_the_weights_of_before(worlds):
    """Units that are not resharded stay gathered after it; the step must free them."""

    def rank():
        mesh = make_mesh()
        model = twin.build(F64)
        z = twin.make(3, model, mesh.dp)
        tokens, targets = twin.rows(0)
        (model.loss_sum(tokens, targets)[0] / targets.numel() / mesh.dp.size).backward()
        z.finish()
        model.loss_sum(tokens, targets)  # somebody looks at the loss, gradients on
        z.step()
        loss = float(model.loss_sum(tokens, targets)[0].detach())
        with torch.no_grad():  # the weights as they are: this forward frees what it gathers
            return loss, float(model.loss_sum(tokens, targets)[0])

    model = twin.build(F64)
    adam = twin.adam(model.parameters())
    tokens, targets = twin.rows(0)
    (model.loss_sum(tokens, targets)[0] / targets.numel()).backward()
    adam.step()
    want = float(model.loss_sum(tokens, targets)[0].detach())
    for loss, again in worlds(2).run(rank):
        assert loss == pytest.approx(want, abs=1e-9)
        assert again == pytest.approx(want, abs=1e-9)


class InADict(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.unit, self.last = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return {"y": [self.last(self.unit(self.first(x)).tanh())]}


def test_outputs_in_containers(worlds):
    """The root's backward is known by the gradient of any tensor in what the model returns."""

    def rank():
        mesh = make_mesh()
        model = InADict()
        z = zero.Zero3(model, [model.unit], mesh.dp, twin.adam)
        model(torch.eye(4)[2 * mesh.dp.rank :][:2])["y"][0].square().sum().backward()
        z.finish()
        return twin.gradients(z, model)

    model = InADict()
    model(torch.eye(4))["y"][0].square().sum().backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    for got in worlds(2).run(rank):
        assert_equal(got, want, 1e-6, "gradients")


class ByKeyword(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(input=x))
        return x


def test_inputs_by_keyword(worlds):
    """Then nothing says that a unit's backward is over: it is freed and reduced at the end."""

    def rank():
        mesh = make_mesh()
        model = ByKeyword()
        z = zero.Zero3(model, list(model.layers), mesh.dp, twin.adam)
        model(torch.eye(4)[2 * mesh.dp.rank :][:2]).square().sum().backward()
        z.finish()
        return twin.gradients(z, model), [buffer.untyped_storage().nbytes() for buffer in z.buffers]

    model = ByKeyword()
    model(torch.eye(4)).square().sum().backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    for got, left in worlds(2).run(rank):
        assert_equal(got, want, 1e-6, "gradients")
        assert left == [0, 0, 0]


@given(
    stage=st.sampled_from(STAGES),
    n=st.sampled_from([2, 3]),
    micro=st.sampled_from([1, 2, 4]),
    bucket_bytes=st.integers(1, 40_000),
    shape=st.fixed_dictionaries(
        {
            "layers": st.integers(1, 3),
            "heads": st.sampled_from([2, 4]),
            "ffn": st.integers(3, 20),
            "tied": st.booleans(),
            "family": st.sampled_from(["llama", "gpt"]),
        }
    ),
)
def test_any_shape(worlds, stage, n, micro, bucket_bytes, shape):
    config = ModelConfig(**shape, hidden=16, kv_heads=2, max_seq_len=twin.SEQ, dtype=torch.float64)

    def make(stage, model, axis):
        if stage == 3:
            return twin.make(3, model, axis)
        kind = (zero.Zero1, zero.Zero2)[stage - 1]
        return kind(model.parameters(), axis, twin.adam, bucket_bytes)

    results = worlds(n).run(lambda: train(stage, config, micro=micro, steps=2, make=make))
    _, first, final = serial(config, steps=2)
    for result in results:
        assert_equal(result[1], first, 1e-12, "gradients")
        assert_equal(result[2], final, 1e-8, "weights")
    if stage == 3:
        elements = [parameter_count(config) - shape["layers"] * block_parameter_count(config)]
        elements += shape["layers"] * [block_parameter_count(config)]
        options = {"micro_batches": micro, "gathered_once": (0, shape["layers"])}
        formula = zero.wire_bytes(3, elements, n, dtype=torch.float64, **options)
        assert results[0][3] == [formula] * 2


# --- values that are written, steps that break off ---------------------------------------------


def loaded(z, model, state, syncs=True):
    """``load_state_dict`` as it must be done under each stage."""
    with z.gathered() if isinstance(z, zero.Zero3) else nullcontext():
        model.load_state_dict(state)
        if syncs:
            z.sync_shards()


@pytest.mark.parametrize("config", [F64, BF16], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("stage", STAGES)
def test_values_that_were_loaded_are_trained_on(worlds, stage, config):
    """As if the model had had them from the start: the masters take them too."""

    def rank(loads):
        mesh, other = make_mesh(), build_model(config, seed=9)
        state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
        model = twin.build(config) if loads else other
        z = twin.make(stage, model, mesh.dp)
        if loads:
            loaded(z, model, state)
        mine = twin.rows(0, mesh.dp.rank, mesh.dp.size)
        dp.train_step(model.loss_sum, [mine], z, z)
        return twin.masters(z, model), twin.trained(z, model)

    for got, want in zip(*(worlds(3).run(rank, loads) for loads in (True, False)), strict=True):
        assert_bitwise(got[0], want[0], "masters")
        assert_bitwise(got[1], want[1], "weights")


@pytest.mark.parametrize(
    ("stage", "config"), [(1, BF16), (2, BF16), (3, BF16), (3, F64)], ids=["1", "2", "3", "3-f64"]
)
def test_values_that_a_step_would_undo_are_refused(worlds, stage, config):
    def rank():
        mesh, model = make_mesh(), twin.build(config)
        z = twin.make(stage, model, mesh.dp)
        try:
            loaded(z, model, twin.build(config).state_dict(), syncs=False)
            model.loss_sum(*twin.rows(0))[0].backward()
            z.finish()
            z.step()
        except RuntimeError as error:
            return str(error)

    assert all("call sync_shards() after writing" in said for said in worlds(2).run(rank))


def test_syncing_without_memory_is_refused():
    z = twin.make(3, twin.build(F64), make_mesh().dp)
    with pytest.raises(RuntimeError, match=r"of root have no memory now: .*z.gathered\(\)"):
        z.sync_shards()


class Trips(torch.autograd.Function):
    """The identity, which raises in the pass that it is told."""

    @staticmethod
    def forward(ctx, x, where):
        ctx.where = where
        if where == "forward":
            raise ArithmeticError(where)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        if ctx.where == "backward":
            raise ArithmeticError(ctx.where)
        return dy, None


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_after_one_that_broke_off(worlds, stage, where):
    """In the middle of the model, in the second micro-batch; the next steps are as ever."""

    def rank(resets):
        mesh, model = make_mesh(), twin.build(F64)
        z = twin.make(stage, model, mesh.dp)
        mine = twin.rows(0, mesh.dp.rank, mesh.dp.size)
        with z.accumulate():
            model.loss_sum(*mine)[0].backward()
        attention, forward = model.blocks[0].attn, model.blocks[0].attn.forward
        attention.forward = lambda x, *more: forward(Trips.apply(x, where), *more)
        try:
            model.loss_sum(*mine)[0].backward()
        except (ArithmeticError, RuntimeError):
            attention.forward = forward
        if resets:
            z.reset()
        else:
            z.zero_grad()
        buffers = z.buffers if stage == 3 else []
        left = sum(buffer.untyped_storage().nbytes() for buffer in buffers)
        dp.train_step(model.loss_sum, [mine], z, z)
        return twin.gradients(z, model), left

    for got, left in worlds(2).run(rank, True):
        assert_equal(got, serial(F64, steps=1)[1], 1e-12, "gradients")
        assert left == 0
    if where == "backward" and stage != 2:  # which refuses what it takes for a second backward
        with pytest.raises(AssertionError):
            assert_equal(worlds(2).run(rank, False)[0][0], serial(F64, steps=1)[1], 1e-12, "")


# --- beside torch's own ----------------------------------------------------------------------


def torch_steps(model, mesh, optimizer):
    """Five steps of an ordinary loop; the first gradients, as the model has them."""
    first = {}
    for step in range(STEPS):
        tokens, targets = twin.rows(step, mesh.dp.rank, mesh.dp.size)
        optimizer.zero_grad()
        total, count = loss_sum(model(tokens), targets)
        (total / count).backward()
        first = first or {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    return first


def test_equals_torch_zero_redundancy_optimizer(worlds):
    def rank():
        from torch.distributed.optim import ZeroRedundancyOptimizer
        from torch.nn.parallel import DistributedDataParallel

        mesh = make_mesh()
        model = twin.build(GPT)
        parallel = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(parallel.parameters(), torch.optim.AdamW, lr=1e-2)
        torch_steps(parallel, mesh, optimizer)
        return twin.weights(model), [train(stage, GPT)[2] for stage in (1, 2)]

    for theirs, ours in worlds(4).run(rank):
        for stage, got in enumerate(ours, 1):
            assert_equal(got, theirs, 1e-8, f"weights of stage {stage}")


@pytest.mark.parametrize("config", [F64, BF16], ids=["float64", "bfloat16"])
def test_equals_torch_fsdp2(worlds, config):
    """In bfloat16 theirs gathers a bfloat16 copy of float32 weights, as ours does."""

    def rank():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = make_mesh()
        model = twin.build(config).to(accumulation_dtype(config.dtype))
        devices = init_device_mesh("cpu", (mesh.dp.size,))
        policy = MixedPrecisionPolicy(config.dtype, accumulation_dtype(config.dtype))
        for module in [*model.blocks, model]:
            fully_shard(module, mesh=devices, mp_policy=policy)
        first = torch_steps(model, mesh, twin.adam(model.parameters()))
        theirs = [
            {name: tensor.full_tensor().detach() for name, tensor in tensors}
            for tensors in (first.items(), model.named_parameters())
        ]
        return theirs, train(3, config)[1:3]

    for theirs, ours in worlds(2).run(rank):
        assert_equal(ours[0], theirs[0], 1e-12 if config is F64 else 1e-6, "gradients")
        if config is F64:  # Adam makes a whole step of a gradient that is bfloat16's noise
            assert_equal(ours[1], theirs[1], 1e-8, "weights")


# --- errors ----------------------------------------------------------------------------------


def test_bad_input_is_named():
    axis, model = make_mesh().dp, twin.build(F64)
    cold = [torch.nn.Parameter(torch.ones(1), requires_grad=False)]
    for kind in (zero.Zero1, zero.Zero2):
        with pytest.raises(ValueError, match="no parameter requires a gradient"):
            kind(cold, axis, twin.adam)
        with pytest.raises(ValueError, match="bucket of 0 bytes"):
            kind(model.parameters(), axis, twin.adam, 0)
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        zero.Zero3(torch.nn.ParameterList(cold), [], axis, twin.adam)
    with pytest.raises(ValueError, match="inside the model, got Linear, which is not"):
        zero.Zero3(model, [torch.nn.Linear(1, 1)], axis, twin.adam)
    with pytest.raises(ValueError, match="units to be modules inside the model, got Decoder"):
        zero.Zero3(model, [model], axis, twin.adam)
    with pytest.raises(ValueError, match="name units, .* got .'Attention'.: choose"):
        zero.Zero3(
            model,
            list(model.blocks),
            axis,
            twin.adam,
            reshard_after_forward=[model.blocks[0].attn],
        )
    z = zero.Zero1(model.parameters(), axis, twin.adam)
    with pytest.raises(ValueError, match=r"no gradients in any shard: .* after .* finish\(\)"):
        z.clip(1.0)
    z.finish()
    with pytest.raises(ValueError, match="max_norm=0"):
        z.clip(0)
    with pytest.raises(ValueError, match="stage=4: ZeRO has stages 1, 2 and 3"):
        zero.wire_bytes(4, [1], 2)


def test_a_second_backward_after_its_buckets_left_is_refused(worlds):
    def rank():
        mesh = make_mesh()
        model = twin.build(F64)
        z = twin.make(2, model, mesh.dp)
        try:
            for _ in range(2):
                model.loss_sum(*twin.rows(0))[0].backward()
        except RuntimeError as error:
            return str(error)
        finally:
            z.finish()

    assert all("z.accumulate()" in said for said in worlds(2).run(rank))


@pytest.mark.parametrize("stage", STAGES)
def test_close_takes_the_hooks_off(worlds, stage):
    def rank():
        mesh = make_mesh()
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        if stage == 3:
            z = zero.Zero3(model, [model[1]], mesh.dp, twin.adam)
            with z.gathered():
                pass
        else:
            z = twin.make(stage, model, mesh.dp)
        z.close()
        mesh.ledger.clear()
        model(torch.ones(1, 3)).sum().backward()
        return mesh.ledger.calls(), model[0].weight.grad is None

    assert list(worlds(2).run(rank)) == [(0, False)] * 2
