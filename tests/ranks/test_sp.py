"""Sequence parallelism equals one process in each of its ways, in values, bytes and memory."""

from __future__ import annotations

import time
from functools import partial
from unittest import mock

import pytest
import torch
from equality import assert_bitwise, assert_equal, projection
from hypothesis import given
from hypothesis import strategies as st
from ledgers import unmatched_sends
from tensor_parallel import (
    AGAIN,
    BATCH,
    BY_ROWS,
    SEQ,
    SP,
    TP,
    WORLDS,
    Way,
    along,
    check,
    check_copies,
    disturbed,
    draw,
    joined,
    parallel,
    reduce_gradients,
    serial,
    sizes,
    tokens_of,
    whole,
)
from torch import nn

from course_lib import comm, sp, tp
from course_lib.comm.operators import Region
from course_lib.mesh import Axis, make_mesh
from course_lib.model import ModelConfig, build_model
from course_lib.model.layers import each_linear
from course_lib.tp import formulas, overlap
from course_lib.trace.memory import PeakLiveBytes, SavedActivations

each_way = pytest.mark.parametrize("way", BY_ROWS.values(), ids=BY_ROWS.keys())
EVERY_WAY = {"tp": TP, **BY_ROWS}
every_way = pytest.mark.parametrize("way", EVERY_WAY.values(), ids=EVERY_WAY.keys())
GPT = {"family": "gpt", "tied": True}


# --- the whole model -----------------------------------------------------------------------------


@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize("changes", [{}, GPT], ids=["llama", "gpt"])
@each_way
def test_equals_serial(worlds, n, changes, way):
    config = sizes(n, **changes)
    results = worlds(n).run(parallel, config, way)
    check(list(results), serial(config))
    for got in results:
        assert got.sent == [way.wire_bytes(config, BATCH, n)] * len(got.sent)
        assert got.parameters == formulas.parameters_per_rank(config, n)
    assert unmatched_sends(results.ledgers) == {}


@each_way
def test_float32(worlds, way):
    config = sizes(2, dtype=torch.float32)
    check(list(worlds(2).run(parallel, config, way)), serial(config), 5e-6, after_steps=1e-2)


shapes = st.fixed_dictionaries(
    {
        "layers": st.integers(1, 2),
        "heads": st.sampled_from([4, 12]),
        "kv_heads": st.sampled_from([1, 2, 4]),
        "ffn": st.integers(1, 6).map(lambda parts: 4 * parts),
        "vocab": st.integers(256, 263),
        "family": st.sampled_from(["llama", "gpt"]),
        "tied": st.booleans(),
    }
)


@given(
    shape=shapes,
    n=st.sampled_from([2, 4]),
    sequences=st.integers(1, 3),
    way=st.sampled_from(list(BY_ROWS.values())),
)
def test_any_shape(worlds, shape, n, sequences, way):
    config = sizes(hidden=24, **shape)
    run = partial(parallel, steps=1, sequences=sequences)
    results = list(worlds(n).run(run, config, way))
    check(results, serial(config, steps=1, sequences=sequences), after_steps=1e-2)
    for got in results:
        assert got.sent == [way.wire_bytes(config, sequences, n)]


def test_the_two_variants_formulas_in_units_of_bsh():
    """4 + 4 a layer is tensor parallelism's bytes; 6 + 4 is 1.25 times as many."""
    n, config = 4, ModelConfig(layers=10, max_seq_len=SEQ)
    unit = BATCH * SEQ * config.hidden * 4 * (n - 1) / n
    norms = 2 * (n - 1) / n * sp.replicated_parameters(config) * 4
    keep, again = (sp.wire_bytes(config, BATCH, SEQ, n, again=a) - norms for a in (False, True))
    assert keep == unit * (8 * 10 + 4)
    assert again == unit * (10 * 10 + 5)
    whole_model = formulas.wire_bytes(config, BATCH, SEQ, n)
    assert keep == whole_model - formulas.loss_bytes(config, BATCH * SEQ, n)
    twice = sp.wire_bytes(config, BATCH, SEQ, n, forwards=2) - norms
    assert twice == unit * (12 * 10 + 4)


# --- memory --------------------------------------------------------------------------------------


def kept_of_a_block(config, way):
    axis = make_mesh(tp=make_mesh().world.size).tp
    torch.manual_seed(0)
    block = way.cut(build_model(config), axis).blocks[0]
    x = along(draw(BATCH, SEQ, config.hidden).to(config.dtype), axis, way).requires_grad_()
    with SavedActivations(block) as saved:
        y = block(x * 1, torch.arange(SEQ))
        kept = saved.now
        y.float().sum().backward()
    return kept, saved.now


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": torch.bfloat16},
        {"family": "gpt", "dropout": 0.1, "dtype": torch.float32},
        {"family": "gpt", "dtype": torch.bfloat16},
    ],
    ids=["llama", "llama-bf16", "gpt-dropout", "gpt-bf16"],
)
@pytest.mark.parametrize("n", [1, 2, 4])
@every_way
def test_a_block_keeps_what_the_formula_says(worlds, n, changes, way):
    config = sizes(n, **changes)
    for kept, after in worlds(n).run(kept_of_a_block, config, way):
        assert kept == way.saved_per_block(config, BATCH, n)
        assert after == 0


def test_a_layer_of_korthikanti():
    """Their 34 sbh bytes of a GPT layer, of which 10 stay whole under tensor parallelism; ours."""
    s, b, h, n = 32, 2, 128, 4
    config = ModelConfig(
        family="gpt", hidden=h, heads=8, kv_heads=8, ffn=4 * h, max_seq_len=s, dropout=0.1,
        dtype=torch.bfloat16,
    )  # fmt: skip
    sbh, rows = s * b * h, 4 * s * b
    statistics, log_sum_exp = 2 * rows, 8 * rows
    assert formulas.saved_per_block(config, b, s, 1) == 36 * sbh + statistics + log_sum_exp
    assert formulas.saved_per_block(config, b, s, n) == (
        12 * sbh + 24 * sbh // n + statistics + log_sum_exp // n
    )
    assert sp.saved_per_block(config, b, s, n) == (
        4 * sbh + 30 * sbh // n + (statistics + log_sum_exp) // n
    )
    assert sp.saved_per_block(config, b, s, n, again=True) == (
        34 * sbh // n + (statistics + log_sum_exp) // n
    )


def alive_after_backward(config, way):
    """Bytes that the activations of a step leave behind while the loss is still held."""
    axis = make_mesh(tp=2).tp
    model = way.cut(build_model(config), axis)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tokens, targets = tokens_of(0, config)
    with PeakLiveBytes() as live:
        loss, _ = model.loss_sum(tokens, targets)
        loss.backward()
        for _ in range(100):  # a thread of gloo may hold the last messages for a moment
            if live.now > 2_000:
                time.sleep(0.02)
        return live.now, live.peak


@every_way
def test_backward_lets_go_of_all_activations_though_the_loss_is_held(worlds, way):
    """A training loop holds its loss until the next one is there: nothing may hang on it."""
    for now, peak in worlds(2).run(alive_after_backward, sizes(), way):
        assert now < 2_000 < 200_000 < peak


# --- graphs that are used in other ways ----------------------------------------------------------


@every_way
def test_backward_twice_through_one_graph(worlds, way):
    """With retain_graph the gradients double, and so do the bytes of backward."""

    def rank(config):
        axis = make_mesh(tp=2).tp
        model = way.cut(disturbed(config), axis)
        loss, _ = model.loss_sum(*tokens_of(0, config))
        sent = [axis.ledger.wire_bytes("tp")]
        once = {}
        for retain in (True, False):
            loss.backward(retain_graph=retain)
            sent.append(axis.ledger.wire_bytes("tp"))
            once = once or {name: p.grad.clone() for name, p in model.named_parameters()}
        twice = {name: p.grad / 2 for name, p in model.named_parameters()}
        return once, twice, sent

    for once, twice, (forward, first, second) in worlds(2).run(rank, sizes(**GPT)):
        assert_bitwise(twice, once, "half of the doubled gradients")
        assert second - first == first - forward > 0


@every_way
def test_micro_batches_in_flight_at_once(worlds, way):
    """As a pipeline does: forward, forward, backward of the second, backward of the first."""

    def rank(config, together):
        axis = make_mesh(tp=2).tp
        model = way.cut(disturbed(config), axis)
        losses = []
        for step in range(2):
            losses.append(model.loss_sum(*tokens_of(step, config))[0])
            if not together:
                losses.pop().backward()
        for loss in reversed(losses):
            loss.backward()
        reduce_gradients(model, axis, way)
        return joined(model, axis, lambda p: p.grad)

    config = sizes()
    pairs = zip(*(worlds(2).run(rank, config, together) for together in (True, False)), strict=True)
    for at_once, one_by_one in pairs:
        assert_equal(at_once, one_by_one, 1e-14, "gradients")


@every_way
@pytest.mark.parametrize("frozen", [("embedding.", "blocks.0.attn.q", "norm"), ("blocks.0",)])
def test_frozen_weights(worlds, way, frozen):
    config = sizes(4)
    run = partial(parallel, frozen=frozen, steps=2)
    results = list(worlds(4).run(run, config, way))
    check(results, serial(config, frozen=frozen, steps=2))


@every_way
def test_without_gradients(worlds, way):
    """Logits in evaluation: as with a graph, nothing kept, the bytes of one forward."""

    def rank(config):
        axis = make_mesh(tp=2).tp
        model = way.cut(disturbed(config), axis)
        tokens, _ = tokens_of(0, config)
        with_graph = model(tokens).detach()
        sent = axis.ledger.wire_bytes("tp")
        with torch.no_grad(), SavedActivations(model) as saved:
            without = model(tokens)
        same = torch.equal(with_graph, without)
        return same, without.requires_grad, saved.peak, axis.ledger.wire_bytes("tp") - 2 * sent

    assert list(worlds(2).run(rank, sizes())) == [(True, False, 0, 0)] * 2


def test_gather_again_gathers_once_for_all_readers(worlds):
    """q, k and v read one gathered x in backward; where nothing inside is trained, none is made."""

    def rank(config, frozen):
        axis = make_mesh(tp=2).tp
        block = AGAIN.cut(disturbed(config, frozen), axis).blocks[0]
        x = draw(BATCH, SEQ // 2, config.hidden).requires_grad_()
        y = block(x, torch.arange(SEQ))
        axis.ledger.clear()
        y.sum().backward()
        return axis.ledger.calls("tp", "all_gather"), axis.ledger.calls("tp", "reduce_scatter")

    assert list(worlds(2).run(rank, sizes(), ())) == [(4, 2)] * 2
    assert list(worlds(2).run(rank, sizes(), ("blocks.0.attn.",))) == [(3, 2)] * 2


# --- rings between products ----------------------------------------------------------------------


class Pair(nn.Module):
    """A column and a row linear with something between them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(10, 24).double(), nn.Linear(24, 10).double()
        self.columns = each_linear

    def forward(self, x):
        (h,) = self.columns(x, [self.first])
        return self.second(torch.tanh(h))


@pytest.mark.parametrize("n", WORLDS)
def test_ring_products_alone(worlds, n):
    """Any two linears around anything: what one process computes, by messages alone."""

    def rank():
        axis, pair = make_mesh(tp=n).tp, Pair()
        cut = tp.plan.Cut(axis, sp.REGION, axis)
        pair.first = tp.ColumnLinear(pair.first, axis)
        pair.second = overlap.ring_row(pair.second, cut)
        overlap.ring_enters(pair, cut)  # sets columns
        x, dy = (along(draw(2, SEQ, 10, seed=i), axis, SP) for i in (0, 1))
        pair(x.requires_grad_()).backward(dy)
        ops = {call.op for call in axis.ledger.select("tp")}
        sp.sum_gradients(comm.held_gradients(pair.parameters()), axis)
        return joined(pair, axis, lambda p: p.grad) | {"dx": whole(x.grad, axis, SP)}, ops

    x, pair = draw(2, SEQ, 10).requires_grad_(), Pair()
    pair(x).backward(draw(2, SEQ, 10, seed=1))
    want = {name: p.grad for name, p in pair.named_parameters()} | {"dx": x.grad}
    for got, ops in worlds(n).run(rank):
        assert_equal(got, want, 1e-12, "rings")
        assert ops == ({"send", "recv"} if n > 1 else set())


def test_a_part_is_made_while_the_sum_travels():
    """Between the posting of a turn and its wait there is exactly one part to be made."""
    said: list[str] = []

    class Part:
        def __matmul__(self, weight):
            said.append("product")
            return torch.zeros(1)

    class Rows:
        def chunk(self, size, dim):
            return [Part()] * size

    class Travelling:
        def __init__(self, *_):
            said.append("post")

        def wait(self):
            said.append("wait")
            return [torch.zeros(1)]

    with mock.patch.object(overlap.comm, "start_exchange", Travelling):
        overlap.ring_scatter([Rows()], [torch.zeros(1)], Axis("tp", 1, 4, (0, 1, 2, 3)))
    assert said == ["product", *["post", "product", "wait"] * 3]


# --- dropout -------------------------------------------------------------------------------------


def dropped(config, way):
    """Where this rank's rows were dropped after attention, and the replicas' own stream after."""
    axis = make_mesh(tp=2).tp
    block = way.cut(build_model(config), axis).blocks[0]
    torch.manual_seed(4)
    masks = [block.dropout(torch.ones(BATCH, SEQ // 2, config.hidden)) == 0 for _ in range(2)]
    return masks, float(torch.rand(()))


def check_masks(results):
    """Other rows, other masks; and the common stream stays common."""
    (mine, _), (theirs, _) = results
    for one, other in zip(mine, theirs, strict=True):
        assert not torch.equal(one, other), "the ranks dropped the same places of their rows"
    assert len({after for _, after in results}) == 1


def test_dropout_on_rows_drops_other_elements_on_other_ranks(worlds):
    config = sizes(dropout=0.3)
    check_masks(list(worlds(2).run(dropped, config, SP)))
    one_seed = Way(sp.REGION, lambda plan: {**plan, "blocks.*.dropout": lambda module, cut: module})
    with pytest.raises(AssertionError, match="dropped the same places"):
        check_masks(list(worlds(2).run(dropped, config, one_seed)))


@pytest.mark.parametrize("training", [True, False])
def test_every_dropout_is_replaced_in_the_mode_that_it_was_in(worlds, training):
    def rank():
        axis = make_mesh(tp=2).tp
        model = build_model(sizes(dropout=0.3)).train(training)
        SP.cut(model, axis)
        names = [type(model.embedding.dropout).__name__, type(model.blocks[0].dropout).__name__]
        return names, {module.training for module in model.modules()}

    for names, modes in worlds(2).run(rank):
        assert names == ["RankDropout"] * 2
        assert modes == {training}


@each_way
def test_training_with_dropout_keeps_replicas_equal(worlds, way):
    results = list(worlds(2).run(parallel, sizes(dropout=0.2, **GPT), way))
    check_copies(results)
    assert results[0].losses == pytest.approx(serial(sizes(**GPT)).losses, abs=0.5)


# --- the classic bugs, each of which must be caught ----------------------------------------------


def split_where_it_must_be_summed(x, axis):
    """gather's backward keeps this rank's rows of its own gradient, not of the sum."""
    return comm.gather_from(x, axis, 1)


def norms_not_summed(model, axis, way):
    tp.sum_shared_gradients(comm.held_gradients(model.parameters()))


def all_summed(model, axis, way):
    """What is cut is summed too: the ranks' different parts are added up."""
    comm.sum_gradients(comm.held_gradients(model.parameters()), axis)


def norms_averaged(model, axis, way):
    sp.sum_gradients(comm.held_gradients(model.parameters()), axis)
    for parameter in model.parameters():
        if not comm.is_sharded(parameter, axis):
            parameter.grad /= axis.size


SPLIT = Way(Region(split_where_it_must_be_summed, sp.leave, sp.own_rows))
BUGS = {
    "backward splits": (SPLIT, reduce_gradients),
    "norms not summed": (SP, norms_not_summed),
    "norms averaged": (SP, norms_averaged),
    "all summed": (SP, all_summed),
}


def train_with(config, way, reduce):
    return parallel(config, way, steps=2, reduce=reduce)


@pytest.mark.parametrize("name", BUGS)
def test_classic_bugs_are_caught(worlds, name):
    way, reduce = BUGS[name]
    config = sizes(2, **GPT)
    with pytest.raises(AssertionError, match="times too large|is off by|losses"):
        check(list(worlds(2).run(train_with, config, way, reduce)), serial(config, steps=2))


def test_by_how_much_norms_are_wrong_and_that_the_ranks_drift_apart(worlds):
    config = sizes(2)
    summed, forgotten = (
        list(worlds(2).run(train_with, config, SP, reduce))
        for reduce in (reduce_gradients, norms_not_summed)
    )
    norms = [name for name in forgotten[0].gradients if "norm" in name]
    parts = [{name: got.gradients[name] for name in norms} for got in forgotten]
    whole_ones = {name: summed[0].gradients[name] for name in norms}
    total = {name: parts[0][name] + parts[1][name] for name in norms}
    assert_equal(total, whole_ones, 1e-12, "the parts' sum")
    assert sum(projection(part, whole_ones) for part in parts) == pytest.approx(1)
    assert max(projection(part, whole_ones) for part in parts) < 0.9
    with pytest.raises(AssertionError, match="after training: blocks.0.attn_norm.weight differs"):
        check_copies(forgotten)
