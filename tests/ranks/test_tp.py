"""Tensor parallelism equals one process, and its bytes and parameters equal its formulas."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from unittest import mock

import pytest
import torch
from equality import assert_bitwise, assert_equal
from hypothesis import given
from hypothesis import strategies as st
from ledgers import backend_calls
from tensor_parallel import (
    BATCH,
    BY_ROWS,
    SEQ,
    SP,
    TP,
    WORLDS,
    Way,
    adam,
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
    without_padding,
)
from torch import nn

from course_lib import comm, dp, sp, tp
from course_lib.bench import tp as bench
from course_lib.comm.operators import Region
from course_lib.ledger import summarize
from course_lib.mesh import Axis, make_mesh, sub_axis
from course_lib.model import build_model, loss_sum
from course_lib.tp import RankDropout, formulas, layers
from course_lib.tp.layers import identity

FAMILIES = ("llama", "gpt")
GPT = {"family": "gpt", "tied": True}
WAYS = {"tp": TP, **BY_ROWS}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())


# --- the whole model -----------------------------------------------------------------------------


@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize("changes", [{}, {"tied": True}, GPT], ids=["llama", "llama-tied", "gpt"])
def test_equals_serial(worlds, n, changes):
    config = sizes(n, **changes)
    results = list(worlds(n).run(parallel, config, TP))
    check(results, serial(config))
    for got in results:
        assert got.sent == [formulas.wire_bytes(config, BATCH, SEQ, n)] * len(got.sent)
        assert got.parameters == formulas.parameters_per_rank(config, n)


@pytest.mark.parametrize("way", [TP, SP], ids=["tp", "sp"])
def test_clipping_by_the_global_norm(worlds, way):
    config = sizes(4, **GPT)
    run = partial(parallel, max_norm=0.1)
    check(list(worlds(4).run(run, config, way)), serial(config, max_norm=0.1))


def test_float32(worlds):
    config = sizes(2, dtype=torch.float32)
    check(list(worlds(2).run(parallel, config, TP)), serial(config), 5e-6, after_steps=1e-2)


@every_way
def test_bfloat16_trains_like_one_process(worlds, way):
    config = sizes(4, dtype=torch.bfloat16)
    results = list(worlds(4).run(parallel, config, way))
    check_copies(results)
    exact = serial(sizes(4)).losses
    for got in results:
        assert got.losses == pytest.approx(exact, abs=0.05)
        assert {weight.dtype for weight in got.weights.values()} == {torch.bfloat16}


@pytest.mark.parametrize("way", [TP, SP], ids=["tp", "sp"])
def test_frozen_parameters_stay(worlds, way):
    frozen = ("embedding.", "blocks.0.attn", "norm")
    config = sizes(4)
    run = partial(parallel, frozen=frozen)
    check(list(worlds(4).run(run, config, way)), serial(config, frozen=frozen))


@every_way
def test_checked_mode_has_no_objection(worlds, way):
    """All ranks make the same calls with the same shapes, and messages are what is expected."""
    config = sizes(4)
    run = partial(parallel, steps=1)
    check(list(worlds(4).run(run, config, way, checked=True)), serial(config, steps=1))


shapes = st.fixed_dictionaries(
    {
        "layers": st.integers(1, 2),
        "head_dim": st.sampled_from([2, 6]),
        "heads": st.sampled_from([4, 12]),
        "kv_heads": st.sampled_from([1, 2, 4]),
        "ffn": st.integers(1, 6).map(lambda parts: 4 * parts),
        "vocab": st.integers(256, 263),
        "family": st.sampled_from(FAMILIES),
        "tied": st.booleans(),
    }
)


@given(shape=shapes, n=st.sampled_from([2, 4]), sequences=st.integers(1, 3))
def test_any_shape(worlds, shape, n, sequences):
    head_dim = shape["head_dim"]
    given = {name: size for name, size in shape.items() if name != "head_dim"}
    config = sizes(hidden=head_dim * shape["heads"], **given)
    run = partial(parallel, steps=1, sequences=sequences)
    results = list(worlds(n).run(run, config, TP))
    check(results, serial(config, steps=1, sequences=sequences), after_steps=1e-2)
    for got in results:
        assert got.sent == [formulas.wire_bytes(config, sequences, SEQ, n)]
        assert got.parameters == formulas.parameters_per_rank(config, n)


def test_two_all_reduces_forward_and_two_backward_a_layer(worlds):
    def rank():
        axis = make_mesh(tp=4).tp
        block = tp.parallelize(build_model(sizes(4)), axis).blocks[0]
        x = torch.randn(BATCH, SEQ, 48, dtype=torch.float64, requires_grad=True)
        y = block(x, torch.arange(SEQ))
        forward = backend_calls(axis.ledger)
        axis.ledger.clear()
        y.sum().backward()
        return forward, backend_calls(axis.ledger)

    assert list(worlds(4).run(rank)) == [({"allreduce_": 2}, {"allreduce_": 2})] * 4


# --- data parallelism beside it ------------------------------------------------------------------


def on_two_axes(config, way, t):
    """A training step on rows of the batch, with dp's own buckets; clipped by the norm."""
    mesh = make_mesh(tp=t)
    model = way.cut(disturbed(config), mesh.tp)
    sync = dp.Overlapped(model.parameters(), mesh.dp)
    optimizer, norms = adam(model), []
    for step in range(3):
        optimizer.zero_grad()
        tokens, targets = tokens_of(step, config, 4, mesh)
        count = dp.global_tokens([targets], mesh.dp)
        (model.loss_sum(tokens, targets)[0] / count).backward()
        sync.finish()
        reduce_gradients(model, mesh.tp, way)
        held = comm.held_gradients(model.parameters())
        norms.append(float(comm.clip_grad_norm(held, [mesh.tp], 0.1)))
        optimizer.step()
    sent = mesh.ledger.wire_bytes("dp")
    weights = joined(model, mesh.tp, lambda p: p)
    return weights, norms, sent


@pytest.mark.parametrize("way", [TP, SP], ids=["tp", "sp"])
@pytest.mark.parametrize(("t", "d"), [(2, 2), (4, 2)])
def test_with_data_parallelism_on_the_other_axis(worlds, t, d, way):
    config = sizes(t, **GPT)
    twin = serial(config, steps=3, sequences=4, max_norm=0.1)
    results = list(worlds(t * d).run(on_two_axes, config, way, t))
    held = formulas.parameters_per_rank(config, t) * config.dtype.itemsize
    for weights, norms, sent in results:
        assert_equal(without_padding(weights, twin.weights), twin.weights, 1e-8, "weights")
        assert_bitwise(weights, results[0][0], "replicas")
        assert norms == pytest.approx(twin.norms, rel=1e-11)
        assert sent == 3 * dp.wire_bytes(held, d)


# --- each layer alone ----------------------------------------------------------------------------


def backed(module, x, dy, *more):
    """y, dx and the gradients of the parameters."""
    x = x.detach().clone().requires_grad_()
    y = module(x, *more)
    y.backward(dy)
    return y.detach(), x.grad, {name: p.grad for name, p in module.named_parameters()}


def backed_part(part, block, x, dy):
    """The same of a part of a block, or of all of it; names as the block has them."""
    more = () if part == "ffn" else (torch.arange(SEQ),)
    y, dx, _ = backed(block.get_submodule(part), x, dy, *more)
    return {"y": y, "dx": dx}


def gradients_of_part(part, gradients):
    return {
        name: g
        for name, g in gradients.items()
        if g is not None and name.startswith(part and f"{part}.")
    }


def part_on_rank(config, part, way):
    axis = make_mesh(tp=make_mesh().world.size).tp
    model = way.cut(disturbed(config), axis)
    x, dy = (along(draw(BATCH, SEQ, config.hidden, seed=i), axis, way) for i in (0, 1))
    rows = backed_part(part, model.blocks[0], x, dy)
    reduce_gradients(model.blocks[0].get_submodule(part), axis, way)
    gradients = joined(model.blocks[0], axis, lambda p: p.grad)
    got = {name: whole(tensor, axis, way) for name, tensor in rows.items()}
    return got | gradients_of_part(part, gradients)


@pytest.mark.parametrize("part", ["attn", "ffn", ""])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("way", [TP, SP], ids=["tp", "sp"])
def test_attention_mlp_and_block_alone(worlds, n, family, part, way):
    config = sizes(n, family=family)
    shape, block = (BATCH, SEQ, config.hidden), disturbed(config).blocks[0]
    want = backed_part(part, block, draw(*shape), draw(*shape, seed=1))
    want |= gradients_of_part(part, {name: p.grad for name, p in block.named_parameters()})
    for got in worlds(n).run(part_on_rank, config, part, way):
        assert_equal(got, want, 1e-12, part or "block")


class Pair(nn.Module):
    """A column and a row linear with something between them."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def serial_pair(bias):
    torch.manual_seed(3)
    sides = [nn.Linear(10, 24, bias=bias), nn.Linear(24, 10, bias=bias)]
    return Pair(*sides).double()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n", WORLDS)
def test_a_column_and_a_row_alone(worlds, n, bias):
    """Built from any two linears, for an input of any number of dims."""

    def rank():
        axis = make_mesh(tp=n).tp
        pair = serial_pair(bias)
        pair = Pair(
            tp.ColumnLinear(pair.first, axis, comm.copy_to), tp.RowLinear(pair.second, axis)
        )
        y, dx, _ = backed(pair, draw(3, 10), draw(3, 10, seed=1))
        assert pair.first.weight.shape == (24 // n, 10)
        assert pair.second.weight.shape == (10, 24 // n)
        return {"y": y, "dx": dx, **joined(pair, axis, lambda p: p.grad)}

    y, dx, gradients = backed(serial_pair(bias), draw(3, 10), draw(3, 10, seed=1))
    for got in worlds(n).run(rank):
        assert_equal(got, {"y": y, "dx": dx, **gradients}, 1e-12, "pair")


@pytest.mark.parametrize("vocab", [8, 5, 11])
@pytest.mark.parametrize("n", WORLDS)
def test_embedding_alone(worlds, n, vocab):
    """5 tokens on 8 ranks: some hold padding alone."""
    torch.manual_seed(0)
    serial_one = nn.Embedding(vocab, 6, dtype=torch.float64)
    tokens, dy = torch.arange(30).view(3, 10) % vocab, draw(3, 10, 6)

    def rank():
        axis = make_mesh(tp=n).tp
        embedding = tp.VocabEmbedding(serial_one, axis)
        y = embedding(tokens)
        y.backward(dy)
        return {"y": y.detach(), **joined(embedding, axis, lambda p: p.grad)}

    y = serial_one(tokens)
    y.backward(dy)
    want = {"y": y.detach(), "weight": serial_one.weight.grad}
    for got in worlds(n).run(rank):
        assert_equal(without_padding(got, want), want, 1e-12, "embedding")


@pytest.mark.parametrize("vocab", [8, 5, 11])
@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_head_and_cross_entropy_alone(worlds, n, vocab, scale):
    """Targets that count for nothing, a vocabulary that is padded, logits whose exp overflows."""
    torch.manual_seed(0)
    serial_head = nn.Linear(6, vocab, bias=False, dtype=torch.float64)
    targets = (torch.arange(30) % vocab).masked_fill(torch.arange(30) % 7 == 0, -100).view(3, 10)
    x = scale * draw(3, 10, 6)

    def rank():
        axis = make_mesh(tp=n).tp
        head = tp.VocabHead(serial_head, axis)
        x_in = x.clone().requires_grad_()
        total, count = tp.loss_sum(head(x_in), targets, axis, vocab)
        (3 * total).backward()
        got = {"loss": total.detach(), "dx": x_in.grad, **joined(head, axis, lambda p: p.grad)}
        payloads = [call.payload for call in axis.ledger.records if call.axis == "tp"]
        largest = max(payloads, default=0)
        return got, count, largest

    x_in = x.clone().requires_grad_()
    total, count = loss_sum(serial_head(x_in), targets)
    (3 * total).backward()
    want = {"loss": total.detach(), "dx": x_in.grad, "weight": serial_head.weight.grad}
    for got, counted, _ in worlds(n).run(rank):
        assert_equal(without_padding(got, want), want, 1e-12, "head")
        assert counted == count == 25


def test_logits_are_never_gathered(worlds):
    """Three numbers a token travel, and x; with 259 tokens a gather of logits would be seen."""

    def rank():
        axis = make_mesh(tp=4).tp
        model = tp.parallelize(build_model(sizes(4)), axis)
        model.loss_sum(*tokens_of(0, model.config))[0].backward()
        payloads = [call.payload for call in axis.ledger.select("tp")]
        return {size: payloads.count(size) for size in payloads}

    tokens = BATCH * SEQ
    for counts in worlds(4).run(rank):
        assert counts == {tokens * 8: 3, tokens * 48 * 8: 10}


def test_no_target_counts(worlds):
    def rank():
        axis = make_mesh(tp=2).tp
        logits = torch.randn(2, 3, 4, requires_grad=True)
        total, count = tp.loss_sum(logits, torch.full((2, 3), -100), axis, vocab=8)
        total.backward()
        return float(total), int(count), float(logits.grad.abs().max())

    assert list(worlds(2).run(rank)) == [(0.0, 0, 0.0)] * 2


# --- dropout -------------------------------------------------------------------------------------


def test_dropout_outside_a_region_drops_as_one_process_does(worlds):
    """All ranks seed torch alike, so the masks and all later values equal the reference's."""
    config = sizes(2, dropout=0.2, **GPT)
    run = partial(parallel, seed=11)
    check(list(worlds(2).run(run, config, TP)), serial(config, seed=11))


def masks(p=0.25, times=2):
    axis = make_mesh(tp=make_mesh().world.size).tp
    torch.manual_seed(0)
    dropout = RankDropout(p, axis)
    drawn = [dropout(torch.ones(40, 50)) for _ in range(times)]
    return drawn, torch.rand(())


def test_rank_dropout_drops_other_elements_on_other_ranks(worlds):
    results = list(worlds(4).run(masks))
    every = [mask for drawn, _ in results for mask in drawn]
    for place, mask in enumerate(every):
        assert set(mask.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
        assert float((mask == 0).float().mean()) == pytest.approx(0.25, abs=0.04)
        for other in every[:place]:  # two independent masks agree in 62.5 % of places
            assert float((mask == other).float().mean()) == pytest.approx(0.625, abs=0.04)
    assert len({float(after) for _, after in results}) == 1, "the common stream stays common"


def test_no_two_draws_give_two_ranks_one_mask():
    """With rank added to the draw alone, rank 1 would have the mask of rank 0 at the next draw."""
    masks = []
    for drawn in range(3):
        for rank in range(4):
            with mock.patch.object(torch, "randint", return_value=torch.tensor(drawn)):
                masks.append(RankDropout(0.5, axis_of(rank, 4))(torch.ones(64)))
    assert len({tuple(mask.tolist()) for mask in masks}) == 12


def test_rank_dropout_is_the_identity_in_evaluation():
    dropout = RankDropout(0.5, axis_of(0, 1)).eval()
    assert dropout(torch.ones(3)).tolist() == [1, 1, 1]
    assert RankDropout(0.0, axis_of(0, 1))(torch.ones(3)).tolist() == [1, 1, 1]


# --- norms, heads that are shared, groups --------------------------------------------------------


def test_runs_of_an_axis(worlds):
    """In kept ranks too, again and again: a group that is made twice must meet twice."""

    def rank(size):
        mesh = make_mesh("tp-dp", tp=4)
        runs = sub_axis(mesh.tp, size, "run")
        total = comm.all_reduce(torch.tensor([2.0**mesh.rank]), runs)
        return runs.name, runs.rank, runs.ranks, int(total)

    for size in (2, 1, 2, 4):
        for number, (name, rank_, ranks, total) in enumerate(worlds(8).run(rank, size)):
            first = number // size * size
            assert (name, rank_, ranks) == (
                "run",
                number - first,
                tuple(range(first, first + size)),
            )
            assert total == sum(2**one for one in ranks)


def test_gradients_of_parts_are_summed(worlds):
    """One call for each dtype; written in place, what is frozen is left alone."""

    def rank():
        axis = make_mesh(tp=2).tp
        parameters = [nn.Parameter(torch.ones(2, dtype=d)) for d in (torch.float32, torch.float64)]
        parameters += [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(1))]
        parameters[-1].requires_grad_(False)
        for parameter in parameters[:3]:
            parameter.grad = torch.full_like(parameter, 1.0 + axis.rank)
        places = [p.grad.data_ptr() for p in parameters[:3]]
        comm.sum_gradients(comm.held_gradients(parameters), axis)
        assert places == [p.grad.data_ptr() for p in parameters[:3]]
        calls = axis.ledger.calls("tp", "all_reduce")
        return [None if p.grad is None else p.grad.tolist() for p in parameters], calls

    assert list(worlds(2).run(rank)) == [([[3, 3], [3, 3], [3, 3, 3], None], 2)] * 2


def test_shared_heads_are_summed_in_one_call_over_x(worlds):
    def rank():
        mesh = make_mesh(tp=4)
        config = sizes(4)
        model = tp.parallelize(build_model(config), mesh.tp)
        model.loss_sum(*tokens_of(0, config))[0].backward()
        mesh.ledger.clear()
        tp.sum_shared_gradients(comm.held_gradients(model.parameters()))
        return mesh.ledger.calls("tp_kv", "all_reduce"), mesh.ledger.wire_bytes("tp_kv")

    assert list(worlds(4).run(rank)) == [(1, formulas.shared_head_bytes(sizes(4), 4))] * 4


# --- errors --------------------------------------------------------------------------------------


def axis_of(rank, n):
    """An axis that nothing may be sent on."""
    return Axis("tp", rank, n, tuple(range(n)), all_ranks=[list(range(n))])


@pytest.mark.parametrize(
    ("n", "changes", "said"),
    [
        (5, {}, "heads=24 is not divisible by the 5 ranks of axis tp"),
        (2, {"ffn": 25}, "ffn=25 is not divisible by the 2 ranks of axis tp"),
        (3, {"kv_heads": 8}, "kv_heads=8 on axis tp of 3 ranks: one must divide the other"),
        (6, {"kv_heads": 4}, "kv_heads=4 on axis tp of 6 ranks"),
    ],
)
def test_sizes_that_do_not_divide_are_named(n, changes, said):
    with pytest.raises(ValueError, match=said):
        tp.parallelize(build_model(sizes(2, **changes)), axis_of(0, n))


def test_features_that_do_not_divide_are_named():
    with pytest.raises(
        ValueError, match="axis tp: out_features=7 does not split into 2 equal shards"
    ):
        tp.ColumnLinear(nn.Linear(4, 7), axis_of(0, 2))
    with pytest.raises(ValueError, match="axis tp: in_features=5 .* 2 equal shards"):
        tp.RowLinear(nn.Linear(5, 4), axis_of(0, 2))
    with pytest.raises(
        ValueError, match="expected size to divide the 4 ranks of axis tp, got size=3"
    ):
        sub_axis(axis_of(0, 4), 3, "run")


def test_gradients_that_are_not_there_and_norms_of_parts_are_refused():
    used, unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(3))
    used.grad = torch.ones(1)
    with pytest.raises(ValueError, match=r"1 of 2 trained parameters have no gradient .*\(3,\)"):
        comm.held_gradients([used, unused])
    model = tp.parallelize(build_model(sizes()), axis_of(1, 2))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    said = r"sharded over axis tp, .* over axes: none; call comm.clip_grad_norm\(held, axes"
    with pytest.raises(ValueError, match=said):
        dp.Bucketed(model.parameters(), axis_of(0, 1)).clip(1.0)
    held = comm.held_gradients(model.parameters())
    with pytest.raises(ValueError, match="sharded over axis tp, .* over axes: dp"):
        comm.grad_norm(held, [replace(axis_of(0, 1), name="dp")])


def test_a_model_is_cut_once():
    model = tp.parallelize(build_model(sizes(tied=True)), axis_of(0, 1))
    attention = {key: entry for key, entry in tp.LLAMA.items() if ".attn" in key}
    for plan in (None, attention):
        with pytest.raises(ValueError, match="are sharded over tensor parallel ranks already"):
            tp.parallelize(model, axis_of(0, 1), plan=plan)


def test_a_plan_is_data_and_its_mistakes_are_named():
    one = axis_of(0, 1)
    with pytest.raises(ValueError, match=r"'blocks.\*.attn.query' matches no module.*attn"):
        tp.parallelize(build_model(sizes()), one, plan={"blocks.*.attn.query": tp.LLAMA["head"]})
    with pytest.raises(ValueError, match="shard both or neither"):
        tp.parallelize(build_model(sizes(tied=True)), one, plan={"head": tp.LLAMA["head"]})
    with pytest.raises(ValueError, match="give it the region sp.REGION"):
        tp.parallelize(build_model(sizes()), one, plan=tp.overlapped(tp.LLAMA))


def test_part_of_a_plan_cuts_part_of_the_model(worlds):
    """MLPs alone: the rest stays as it was, on every rank."""

    def rank(config):
        axis = make_mesh(tp=2).tp
        plan = {key: entry for key, entry in tp.LLAMA.items() if ".ffn" in key}
        model = tp.parallelize(disturbed(config), axis, plan=plan)
        model.loss_sum(*tokens_of(0, config))[0].backward()
        return joined(model, axis, lambda p: p.grad), axis.ledger.calls("tp")

    config = sizes()
    model = disturbed(config)
    model.loss_sum(*tokens_of(0, config))[0].backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    for got, calls in worlds(2).run(rank, config):
        assert_equal(got, want, 1e-12, "gradients")
        assert calls - 6 == 2 * config.layers, "6 gathers of the test's own"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stage_of_a_pipeline_has_its_part_of_the_plan(family):
    model = build_model(sizes(layers=3, family=family))
    middle = model.stage(1, 2)
    plan = tp.plan_for(middle)
    assert {key.split(".")[0] for key in plan} == {"blocks"}
    tp.parallelize(middle, axis_of(0, 1))
    assert set(tp.plan_for(model)) > set(tp.plan_for(model.stage(0, 1))) > set(plan)


def test_other_bad_input_is_named():
    with pytest.raises(ValueError, match="expected 0 <= p < 1, got p=1.5"):
        RankDropout(1.5, axis_of(0, 2))
    with pytest.raises(ValueError, match="a head with a bias"):
        tp.VocabHead(nn.Linear(4, 8), axis_of(0, 2))
    with pytest.raises(ValueError, match="expected max_norm above 0, got max_norm=0"):
        comm.clip_grad_norm([], [axis_of(0, 1)], 0)
    with pytest.raises(ValueError, match="a shard of axis tp needs a dimension"):
        comm.take_shard(torch.ones(2), comm.ShardSpec(axis_of(0, 2)))
    sequence = torch.zeros(1, 10, 4)
    with pytest.raises(ValueError, match="axis tp: a sequence of 10 positions .* 4 equal shards"):
        sp.leave(sequence, axis_of(0, 4))


# --- beside torch's own --------------------------------------------------------------------------


THEIR_NAMES = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
}


def torch_plan(by_rows):
    """DTensor's plan for the same cuts."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    outside = Shard(1) if by_rows else Replicate()
    plan = {
        "attn": PrepareModuleInput(
            input_layouts=(outside, None), desired_input_layouts=(Replicate(), None)
        ),
        "ffn": PrepareModuleInput(input_layouts=(outside,), desired_input_layouts=(Replicate(),)),
    }
    plan |= {name: ColwiseParallel() for name in ("attn.q", "attn.k", "attn.v")}
    plan |= {name: ColwiseParallel() for name in ("ffn.gate", "ffn.up")}
    plan |= {name: RowwiseParallel(output_layouts=outside) for name in ("attn.o", "ffn.down")}
    if by_rows:
        plan |= {
            name: SequenceParallel(use_local_output=True) for name in ("attn_norm", "ffn_norm")
        }
    return plan


def beside_dtensor(config, way):
    """A block of ours and one of DTensor's: (y, dx, gradients, collectives) of each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import parallelize_module

    axis = make_mesh(tp=make_mesh().world.size).tp
    ours = way.cut(disturbed(config), axis)
    theirs = disturbed(config).blocks[0]
    parallelize_module(theirs, init_device_mesh("cpu", (axis.size,)), torch_plan(way.by_rows))
    del theirs.dropout  # CommDebugMode loses count where one module is called twice
    theirs.dropout = lambda x: x
    x, dy = (along(draw(BATCH, SEQ, config.hidden, seed=i), axis, way) for i in (0, 1))
    with CommDebugMode() as counted:
        y, dx, _ = backed(theirs, x, dy, torch.arange(SEQ))
    counts = {str(op).split(".")[-1]: times for op, times in counted.comm_counts.items()}
    gradients = {name: p.grad.full_tensor() for name, p in theirs.named_parameters()
                 if hasattr(p.grad, "full_tensor")}  # fmt: skip
    axis.ledger.clear()
    own_y, own_dx, _ = backed(ours.blocks[0], x, dy, torch.arange(SEQ))
    calls = {THEIR_NAMES[line.op]: line.calls for line in summarize([axis.ledger])}
    reduce_gradients(ours.blocks[0], axis, way)
    own_gradients = joined(ours.blocks[0], axis, lambda p: p.grad)
    own = {"y": own_y, "dx": own_dx, **{name: own_gradients[name] for name in gradients}}
    return own, {"y": y, "dx": dx, **gradients}, calls, counts


@pytest.mark.parametrize("way", [TP, SP], ids=["tp", "sp"])
def test_a_block_equals_torchs_own(worlds, way):
    for ours, theirs, calls, counts in worlds(4).run(beside_dtensor, sizes(2), way):
        assert_equal(ours, theirs, 1e-12, "beside DTensor")
        assert calls == counts


# --- the classic bugs, each of which must be caught by the comparison above ----------------------


@dataclass(frozen=True)
class Bug:
    """What is wrong, and what the comparison must say."""

    said: str
    in_force: Callable = nullcontext
    way: Way = TP
    changes: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)


def train_with(bug, config):
    """:func:`parallel` while the bug is in force."""
    with bug.in_force():
        return parallel(config, bug.way, steps=1, **bug.options)


def bias_before_the_sum():
    def forward(self, x):
        return self.leave(nn.functional.linear(x, self.weight, self.bias), self.axis)

    return mock.patch.object(tp.RowLinear, "forward", forward)


def padding_not_masked():
    def forward(self, x):
        return self.region.columns(x, [self.product], self.axis)[0]

    return mock.patch.object(tp.VocabHead, "forward", forward)


def tokens_of_others_not_masked():
    """A token that another rank holds counts here as well, as the first row."""
    own_rows = layers._in_own_rows

    def wrong(tokens, rows, axis):
        local, is_mine = own_rows(tokens, rows, axis)
        return local, torch.ones_like(is_mine)

    return mock.patch.object(layers, "_in_own_rows", wrong)


def replicas_in_the_norm():
    return mock.patch.object(comm.held, "copies", return_value=1)


def own_part_of_the_norm(held, axes):
    return torch.nn.utils.get_total_norm(one.gradient for one in held)


def nothing_summed(model, axis, way):
    """Each of the ranks that share a head keeps the gradient of its own queries."""


def fused_qkv_in_runs(plan):
    """q, k and v as one matrix, cut into runs of rows: rank 0 has queries, the last one values."""

    def attention(module, cut):
        parts = [module.q.weight, module.k.weight, module.v.weight]
        runs = torch.cat([part.detach() for part in parts]).chunk(cut.axis.size)
        with torch.no_grad():
            for place, part in enumerate(parts):
                part.copy_(torch.cat([run.chunk(3)[place] for run in runs]))
        return plan["blocks.*.attn"](module, cut)

    return {**plan, "blocks.*.attn": attention}


def features_dealt_in_turn(plan):
    """Rank r takes features r, r + t, ...: parts of every head."""

    def column(module, cut):
        order = torch.arange(module.out_features).view(-1, cut.axis.size).t().flatten()
        with torch.no_grad():
            module.weight.copy_(module.weight[order].clone())
        return plan["blocks.*.attn.q"](module, cut)

    return {**plan, "blocks.*.attn.q": column}


def dropout_as(entry):
    return lambda plan: {**plan, "embedding.dropout": entry, "blocks.*.dropout": entry}


def another_seed_on_every_rank(module, cut):
    return RankDropout(module.p, cut.axis)


NOT_ENTERED = Way(Region(identity, comm.reduce_from, identity))
NOT_SUMMED = Way(Region(comm.copy_to, identity, identity))
BUGS = {
    "bias before the sum": Bug("losses", bias_before_the_sum),
    "input not entered": Bug("gradients .* times too large", way=NOT_ENTERED),
    "output not summed": Bug("losses", way=NOT_SUMMED),
    "shared heads not summed": Bug(
        "gradients .* times too large|attn.[kv]",
        changes={"kv_heads": 2},
        options={"reduce": nothing_summed},
    ),
    "padding not masked": Bug("losses", padding_not_masked),
    "tokens of others not masked": Bug("losses", tokens_of_others_not_masked),
    "replicas in the norm": Bug("norm of rank", replicas_in_the_norm),
    "own part of the norm": Bug("norm of rank", options={"norm": own_part_of_the_norm}),
    "heads cut as one matrix": Bug("losses", way=Way(tp.REGION, fused_qkv_in_runs)),
    "heads dealt in turn": Bug("losses", way=Way(tp.REGION, features_dealt_in_turn)),
    "other seeds outside": Bug(
        "losses",
        way=Way(tp.REGION, dropout_as(another_seed_on_every_rank)),
        changes={"dropout": 0.2},
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_classic_bugs_are_caught(worlds, name):
    bug = BUGS[name]
    config = sizes(4, **({"family": "gpt", "kv_heads": 24} | bug.changes))
    results = list(worlds(4).run(train_with, bug, config))
    with pytest.raises(AssertionError, match=bug.said):
        check(results, serial(config, steps=1), after_steps=1e-6)


def test_a_bias_before_the_sum_comes_once_for_each_rank(worlds):
    def rank():
        axis = make_mesh(tp=4).tp
        row = tp.RowLinear(serial_pair(bias=True).second, axis)
        with bias_before_the_sum():
            return row(comm.own_shard(draw(3, 24), axis, 1)).detach()

    second = serial_pair(bias=True).second
    for got in worlds(4).run(rank):
        torch.testing.assert_close(got, second(draw(3, 24)).detach() + 3 * second.bias.detach())


def test_other_seeds_outside_make_replicas_drift(worlds):
    """Even where nobody compares with one process: what must be equal on all ranks is not."""
    bug = BUGS["other seeds outside"]
    results = list(worlds(4).run(train_with, bug, sizes(4, dropout=0.2)))
    with pytest.raises(AssertionError, match="ranks 1 and 0 after training"):
        check_copies(results)


# --- the bench beside DTensor ---------------------------------------------------------------------


def test_the_bench_compares_equal_bytes(worlds):
    for sent in worlds(4).run(bench.sent_in_a_step):
        assert sent["tp"] == sent["dtensor tp"] == sent["dtensor again"]
        assert sent["sp"] == sent["dtensor sp"] == sent["sp rings"]
        assert sent["sp again"] > sent["sp"]


def test_the_bench_says_what_it_measured():
    names = ["dtensor tp", "tp", "dtensor sp", "sp"]
    slow = {"link": "9 MB/s", "milliseconds": {"sp": 7.0, "sp rings": 3.5}, "rings_to_plain": 0.5}
    result = {"ranks": 4, "rounds": 1, "noise": 1.0, "slow": slow}
    result |= {"milliseconds": dict.fromkeys(names, 2.0), "bytes": dict.fromkeys(names, 8.0)}
    said = bench.text(result | {"ratio": {"tp": 0.8, "sp": 1.3}})
    assert "0.80" in said
    assert "rings take 0.50 of the time of collectives" in said
    assert "sp takes more than 1.25 times as long" in said
