"""Recomputation changes no bit of a gradient, and keeps what its formula says."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from equality import assert_bitwise
from hypothesis import given
from hypothesis import strategies as st
from tensor_parallel import (
    AGAIN,
    BATCH,
    RECOMPUTE,
    RINGS,
    SEQ,
    SP,
    TP,
    check,
    check_copies,
    disturbed,
    parallel,
    serial,
    sizes,
    tokens_of,
)

from course_lib import recompute
from course_lib.mesh import make_mesh
from course_lib.model import ModelConfig, build_model
from course_lib.recompute import ID_BYTES, saved_by_block, saved_by_stage
from course_lib.trace.memory import PeakLiveBytes, SavedActivations

both = pytest.mark.parametrize("how", RECOMPUTE)
WAYS = {"tp": TP, "sp": SP, "sp-again": AGAIN, "sp-rings": RINGS}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
CONFIGS = [
    {},
    {"dtype": torch.float32},
    {"dtype": torch.bfloat16, "dropout": 0.2},
    {"family": "gpt", "dropout": 0.2},
]
each_config = pytest.mark.parametrize("changes", CONFIGS, ids=["llama", "f32", "bf16", "gpt"])


# --- one process ---------------------------------------------------------------------------------


def trained_once(config, how=None):
    """Gradients of one batch, the loss, and the next number of the random stream."""
    model = disturbed(config)
    if how:
        RECOMPUTE[how](model)
    torch.manual_seed(5)
    loss, _ = model.loss_sum(*tokens_of(0, config))
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, loss, torch.rand(())


@both
@each_config
def test_not_one_bit_differs(how, changes):
    """Dropout drops the same elements, and the stream goes on as if nothing had been repeated."""
    config = sizes(**changes)
    gradients, loss, after = trained_once(config)
    again, loss_again, after_again = trained_once(config, how)
    assert_bitwise(again, gradients, "gradients")
    assert torch.equal(loss, loss_again)
    assert torch.equal(after, after_again)


def other_masks(fn, *tensors):
    """The classic: the second forward draws new masks."""

    class Wrong(recompute._Recomputed):
        @staticmethod
        def forward(ctx, fn, *tensors):
            output = recompute._Recomputed.forward(ctx, fn, *tensors)
            ctx.random = recompute._random_state(tensors[0].device)
            return output

    return Wrong.apply(fn, *tensors)


def test_other_masks_in_the_second_forward_are_caught():
    config = sizes(dropout=0.2)
    gradients, *_ = trained_once(config)
    model = disturbed(config)
    for block in model.blocks:
        block.run = other_masks
    torch.manual_seed(5)
    model.loss_sum(*tokens_of(0, config))[0].backward()
    with pytest.raises(AssertionError, match="differs"):
        assert_bitwise({n: p.grad for n, p in model.named_parameters()}, gradients, "gradients")


def blocks_only(config, how=None, core=None):
    """(bytes kept after the forward of three blocks, the most during backward)."""
    model = build_model(config)
    for block in model.blocks:
        block.attn.core = core or block.attn.core
    if how:
        RECOMPUTE[how](model)
    x = torch.zeros(BATCH, SEQ, config.hidden, dtype=config.dtype).requires_grad_() * 1
    positions_S = torch.arange(SEQ)
    with SavedActivations(model) as saved:
        for block in model.blocks:
            x = block(x, positions_S)
        kept = saved.now
        x.float().sum().backward()
        assert saved.now == 0
    return kept, saved.peak


@each_config
def test_what_is_kept_is_its_formula(changes):
    config = sizes(layers=3, **changes)
    block = saved_by_block(config, BATCH, SEQ)
    wide = max(4, config.dtype.itemsize)
    x_bytes = BATCH * SEQ * config.hidden * config.dtype.itemsize
    assert blocks_only(config) == (3 * block.total, 3 * block.total)
    full, peak = blocks_only(config, "full")
    assert full == 3 * x_bytes + SEQ * 8, "inputs, and the positions of all blocks"
    # one block at a time is there whole; its first norm keeps the input too, or a copy in float32
    alike = config.family == "gpt" or config.dtype != torch.bfloat16
    assert peak == full + block.total - (x_bytes if alike else 0)
    log_sum_exp = BATCH * SEQ * config.heads * wide
    assert blocks_only(config, "selective")[0] == 3 * (block.total - log_sum_exp)


shapes = st.fixed_dictionaries(
    {
        "family": st.sampled_from(["llama", "gpt"]),
        "tied": st.booleans(),
        "layers": st.integers(1, 4),
        "kv_heads": st.sampled_from([1, 2, 4]),
        "hidden": st.sampled_from([8, 16, 40]),
        "ffn": st.integers(1, 30),
        "vocab": st.integers(256, 270),
        "dropout": st.sampled_from([0.0, 0.1]),
        "dtype": st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    }
)


@given(shape=shapes, sequences=st.integers(1, 3), seq_len=st.integers(1, 12))
def test_what_a_whole_model_and_its_slices_keep_is_their_formula(shape, sequences, seq_len):
    config = ModelConfig(heads=4, max_seq_len=12, **shape)
    tokens = torch.zeros(sequences, seq_len, dtype=torch.int64)
    model, cut = build_model(config), config.layers // 2

    def kept(first, end):
        x = tokens
        if first:
            x = torch.zeros(*tokens.shape, config.hidden, dtype=config.dtype).requires_grad_()
        stage = model.stage(first, end)
        with SavedActivations(model) as saved:
            y = stage(x)
            if end == config.layers:
                y = stage.cross_entropy(y, tokens)[0]
            y.float().sum().backward()
        return saved.peak

    ids = ID_BYTES * tokens.numel()  # one storage: here the targets are the tokens themselves
    assert kept(0, config.layers) == saved_by_stage(config, sequences, seq_len) + ids
    if cut:
        for ends in ((0, cut), (cut, config.layers)):
            assert kept(*ends) == saved_by_stage(config, sequences, seq_len, *ends) + ids


def plain_attention(q_BSHK, k_BSGK, v_BSGK):
    """Attention that keeps its scores and probabilities: what selective recomputation is for."""
    shared = q_BSHK.shape[2] // k_BSGK.shape[2]
    k_BSHK, v_BSHK = (x.repeat_interleave(shared, 2) for x in (k_BSGK, v_BSGK))
    z_BHSS = torch.einsum("bshk,bthk->bhst", q_BSHK, k_BSHK) / q_BSHK.shape[-1] ** 0.5
    future_SS = torch.ones(z_BHSS.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum(
        "bhst,bthk->bshk", z_BHSS.masked_fill(future_SS, -torch.inf).softmax(-1), v_BSHK
    )


def test_selective_drops_what_grows_with_the_square_of_the_sequence():
    config = sizes(kv_heads=24, layers=3)
    scores = BATCH * config.heads * SEQ * SEQ * config.dtype.itemsize
    without, kept = (blocks_only(config, how, plain_attention)[0] for how in (None, "selective"))
    assert without - kept >= 3 * scores
    assert kept == blocks_only(config, "selective")[0], "q, k and v, whatever the core keeps"


@both
def test_without_gradients_nothing_is_kept(how):
    config = sizes()
    model = disturbed(config)
    want = model(tokens_of(0, config)[0])
    RECOMPUTE[how](model)
    with torch.no_grad(), SavedActivations(model) as saved:
        got = model(tokens_of(0, config)[0])
    assert torch.equal(got, want)
    assert saved.peak == 0


@both
def test_parameters_learn_where_the_input_does_not(how):
    """Behind a frozen embedding the first block has nothing to go back to, but weights to train."""
    frozen = ("embedding.", "norm")
    gradients = []
    for wrap in (None, how):
        model = disturbed(sizes(), frozen)
        if wrap:
            RECOMPUTE[wrap](model)
        model.loss_sum(*tokens_of(0, sizes()))[0].backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert "blocks.0.attn.q.weight" in gradients[1]
    assert_bitwise(gradients[1], gradients[0], "gradients")


def test_any_function_of_tensors():
    """Several inputs, some of which want no gradient; backward twice; no second derivative."""
    x, w = torch.ones(3, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)
    shift = torch.arange(3.0)
    y = recompute.recomputed(lambda x, shift, w: (x * w + shift).square(), x, shift, w)
    for _ in range(2):
        y.sum().backward(retain_graph=True)
    assert x.grad.tolist() == [2 * 2 * 2 * (2 + s) for s in range(3)]
    assert w.grad.tolist() == [2 * 2 * 1 * (2 + s) for s in range(3)]
    assert shift.grad is None
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_equals_torchs_own_checkpoint():
    config = sizes(dropout=0.2)
    ours, *_ = trained_once(config, "full")
    model = disturbed(config)
    for block in model.blocks:
        block.run = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    torch.manual_seed(5)
    model.loss_sum(*tokens_of(0, config))[0].backward()
    assert_bitwise(ours, {n: p.grad for n, p in model.named_parameters()}, "beside torch's")


def test_the_peak_of_a_step_falls():
    peaks = {}
    for how in (None, "full"):
        model = disturbed(sizes(layers=6, family="gpt"))
        if how:
            RECOMPUTE[how](model)
        with PeakLiveBytes() as live:
            model.loss_sum(*tokens_of(0, sizes()))[0].backward()
        peaks[how] = live.peak
    assert peaks["full"] < 0.6 * peaks[None]


# --- under tensor and sequence parallelism -------------------------------------------------------


@both
@every_way
@pytest.mark.parametrize("n", [2, 4])
def test_equals_serial_when_cut(worlds, n, way, how):
    """And the forward that is repeated sends once more what it sent: formula with two forwards."""
    config = sizes(n, family="gpt", tied=True)
    run = partial(parallel, recomputed=how, steps=2)
    results = list(worlds(n).run(run, config, way))
    check(results, serial(config, steps=2))
    forwards = 2 if how == "full" else 1
    for got in results:
        assert got.sent == [way.wire_bytes(config, BATCH, n, forwards)] * 2


@both
@every_way
def test_not_one_bit_differs_when_cut_and_dropped(worlds, way, how):
    """Masks that differ from rank to rank are repeated too."""
    config = sizes(2, dropout=0.2)
    without, again = (
        list(worlds(2).run(partial(parallel, recomputed=wrap, steps=2), config, way))
        for wrap in (None, how)
    )
    check_copies(again)
    for got, want in zip(again, without, strict=True):
        assert got.losses == want.losses
        assert_bitwise(got.gradients, want.gradients, "gradients")


def kept_on_rank(config, way):
    mesh = make_mesh(tp=make_mesh().world.size)
    model = way.cut(build_model(config), mesh.tp)
    recompute.full(model)
    rows = SEQ // mesh.tp.size if way.by_rows else SEQ
    x = torch.zeros(BATCH, rows, config.hidden, dtype=config.dtype).requires_grad_() * 1
    positions_S = torch.arange(SEQ)
    with SavedActivations(model) as saved:
        for block in model.blocks:
            x = block(x, positions_S)
    return saved.now


@every_way
def test_what_is_kept_when_cut(worlds, way):
    """The input of each block: whole under tensor parallelism, a share on rows."""
    config = sizes(4)
    x_bytes = BATCH * SEQ * config.hidden * config.dtype.itemsize
    share = 4 if way.by_rows else 1
    expected = config.layers * x_bytes // share + SEQ * 8
    assert list(worlds(4).run(kept_on_rank, config, way)) == [expected] * 4
