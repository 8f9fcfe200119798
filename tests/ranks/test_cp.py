"""Context parallelism equals one process, each way of it, in values, bytes, memory and work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, partial
from unittest import mock

import pytest
import torch
from equality import assert_bitwise, assert_equal, projection, worst_error
from hypothesis import given
from hypothesis import strategies as st
from ledgers import unmatched_sends
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib import comm, cp, dp, recompute
from course_lib.cp import blockwise, layout, ring
from course_lib.data import batch
from course_lib.launch import RankError
from course_lib.mesh import Axis, Link, Links, make_mesh
from course_lib.model import ModelConfig, build_model, causal_attention, loss_sum
from course_lib.recompute import saved_by_stage
from course_lib.trace.memory import PeakLiveBytes, SavedActivations

WORLDS = (1, 2, 3, 4, 8)
LAYOUTS = [cp.CONTIGUOUS, cp.ZIGZAG]
NAMES = ("out", "dq", "dk", "dv")
SEQ = 48


@dataclass(frozen=True)
class Way:
    """One way of context parallelism, with its layout and formulas."""

    attention: object
    layout: cp.SequenceLayout
    wire: object
    saved: object
    heads: int | None = None  # of USP: neighbours that split the heads

    def on(self, axis):
        """The attention, with the axes that it makes of ``axis``."""
        if self.heads is None:
            return self.attention
        heads, ring_axis = cp.split_axis(axis, self.heads)
        return partial(self.attention, heads_axis=heads, ring_axis=ring_axis)

    def core(self, axis):
        return partial(self.on(axis), axis=axis, layout=self.layout)


def gather_way(layout, save_gathered):
    return Way(
        partial(cp.gather_attention, save_gathered=save_gathered),
        layout,
        partial(cp.gather_wire_bytes, save_gathered=save_gathered),
        partial(cp.gather_saved_bytes, save_gathered=save_gathered),
    )


def usp_way(layout, heads):
    def wire(config, batch_size, seq_len, n, **forwards):
        both = cp.ulysses_ring_wire_bytes(
            config, batch_size, seq_len, heads, n // heads, **forwards
        )
        return sum(both)

    def saved(config, batch_size, seq_len, n):
        return cp.ulysses_ring_saved_bytes(config, batch_size, seq_len, heads, n // heads)

    return Way(cp.ulysses_ring_attention, cp.nested(layout, heads), wire, saved, heads)


RING = Way(cp.ring_attention, cp.ZIGZAG, cp.ring_wire_bytes, cp.ring_saved_bytes)
ULYSSES = Way(cp.ulysses_attention, cp.CONTIGUOUS, cp.ulysses_wire_bytes, cp.ulysses_saved_bytes)
WAYS = {
    "ring-zigzag": RING,
    "ring-contiguous": replace(RING, layout=cp.CONTIGUOUS),
    "gather-zigzag": gather_way(cp.ZIGZAG, save_gathered=True),
    "gather-contiguous": gather_way(cp.CONTIGUOUS, save_gathered=True),
    "gather-again": gather_way(cp.ZIGZAG, save_gathered=False),
    "ulysses": ULYSSES,
    "usp-zigzag": usp_way(cp.ZIGZAG, 2),
    "usp-contiguous": usp_way(cp.CONTIGUOUS, 2),
}


def by_way(*names):
    ways = {name: WAYS[name] for name in names or WAYS}
    return pytest.mark.parametrize("way", ways.values(), ids=ways.keys())


by_way_and_size = pytest.mark.parametrize(
    ("way", "n"),
    [
        pytest.param(way, n, id=f"{name}-{n}")
        for name, way in WAYS.items()
        for n in WORLDS
        if n % (way.heads or 1) == 0
    ],
)


def sizes(n, kv_heads=2, dtype=torch.float64, **changes):
    """One layer's sizes, with heads that n ranks can share."""
    heads = 6 if n == 3 else 8
    given = {"layers": 1, "hidden": heads * 4, "heads": heads, "kv_heads": kv_heads}
    return ModelConfig(**(given | changes), dtype=dtype)


# --- layouts ---------------------------------------------------------------------------------


def axis_of(rank, n):
    return Axis("cp", rank, n, tuple(range(n)))


@given(n=st.integers(1, 9), rows=st.integers(1, 4), layout_=st.sampled_from(LAYOUTS))
def test_every_position_is_in_one_shard_and_every_pair_is_computed_once(n, rows, layout_):
    seq_len = rows * n * layout_.per_rank
    shards = [cp.positions(seq_len, axis_of(rank, n), layout_) for rank in range(n)]
    assert sorted(torch.cat(shards).tolist()) == list(range(seq_len))
    computed = torch.zeros(seq_len, seq_len, dtype=torch.int64)
    for mine, queries in enumerate(shards):
        assert queries.tolist() == sorted(queries.tolist())
        for theirs, keys in enumerate(shards):
            part = layout.visible(layout_, n, mine, theirs, len(queries))
            for piece in blockwise._strips(part, strip=3):
                block = torch.ones(len(queries[piece.queries]), len(keys[piece.keys])).long()
                block = block.tril() if piece.causal else block
                assert int(block.sum()) == piece.pairs
                computed[queries[piece.queries][:, None], keys[piece.keys]] += block
    assert torch.equal(computed, torch.ones_like(computed).tril())
    work = cp.pairs(layout_, seq_len, n)
    assert sum(work) == seq_len * (seq_len + 1) // 2
    if layout_ is cp.ZIGZAG:
        assert len(set(work)) == 1


def test_imbalance_is_its_closed_form():
    for n in WORLDS:
        seq_len = 16 * n
        contiguous = 2 - Fraction(16 + 1, seq_len + 1)
        assert cp.imbalance(cp.CONTIGUOUS, seq_len, n) == contiguous
        assert cp.imbalance(cp.ZIGZAG, seq_len, n) == 1
    assert float(cp.imbalance(cp.CONTIGUOUS, 8192, 8)) == pytest.approx(1.875, abs=1e-3)


def test_shard_cuts_tokens_targets_and_positions_alike():
    tokens = torch.arange(24).view(2, 12)
    mine, targets, positions = cp.shard(tokens, tokens + 1, axis_of(1, 3), cp.ZIGZAG)
    assert positions.tolist() == [2, 3, 8, 9]
    assert mine.tolist() == [[2, 3, 8, 9], [14, 15, 20, 21]]
    assert torch.equal(targets, mine + 1)


# --- kernels ---------------------------------------------------------------------------------


def draw(config, batch_size, seq_len, seed=0):
    """q, k, v and the gradient of the output, of whole sequences."""
    generator = torch.Generator().manual_seed(seed)
    heads = (config.heads, config.kv_heads, config.kv_heads, config.heads)
    shapes = [(batch_size, seq_len, number, config.head_dim) for number in heads]
    return [torch.randn(s, generator=generator).to(config.dtype) for s in shapes]


def forward_backward(core, tensors):
    """(out, dq, dk, dv) of ``core`` at q, k, v with the output's gradient."""
    *qkv, dout = tensors
    qkv = [x.clone().requires_grad_() for x in qkv]
    out = core(*qkv)
    return dict(zip(NAMES, [out.detach(), *torch.autograd.grad(out, qkv, dout)], strict=True))


@cache
def serial_attention(config, batch_size=2, seq_len=SEQ):
    return forward_backward(causal_attention, draw(config, batch_size, seq_len))


@pytest.mark.parametrize("strip", [None, 5])
@pytest.mark.parametrize("kernel", [blockwise.PLAIN, blockwise.FLASH_CPU], ids=["plain", "flash"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 5e-6), (torch.bfloat16, 2e-2)]
)
def test_kernels_equal_serial_attention(kernel, dtype, tolerance, strip):
    kernel = kernel._replace(strip=strip)
    tensors = draw(sizes(1, dtype=dtype), 2, SEQ)
    core = partial(cp.ring_attention, axis=axis_of(0, 1), kernel=kernel)
    got = forward_backward(core, tensors)
    want = forward_backward(causal_attention, [x.double() for x in tensors])
    got = {name: tensor.double() for name, tensor in got.items()}
    error, name = worst_error(got, want)
    assert error < tolerance, name
    assert projection(got, want) == pytest.approx(1, abs=tolerance)


def test_scores_that_would_overflow_merge():
    q, k, v, _ = draw(sizes(1), 1, SEQ)
    q = q * 1e3  # exp overflows from 709 on
    out = cp.ring_attention(q, k, v, axis_of(0, 1), kernel=blockwise.PLAIN._replace(strip=5))
    assert_equal({"out": out}, {"out": causal_attention(q, k, v)}, 1e-9, "large scores")


class Arguments(TorchDispatchMode):
    """The arguments by name of the last call of an operator."""

    def __init__(self, name):
        super().__init__()
        self.name, self.values = name, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == f"aten::{self.name}":
            names = [argument.name for argument in func._schema.arguments]
            self.values = dict(zip(names, args, strict=False))
        return func(*args, **(kwargs or {}))


def test_the_kernel_follows_device_and_dtype():
    """On tensors without memory, so that shapes on a GPU are tried where there is none."""

    def on(device, dtype, head_dim=64):
        return torch.empty(1, 2, 3, head_dim, device=device, dtype=dtype)

    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert blockwise.kernel_for(on("cpu", torch.float64)) is blockwise.FLASH_CPU
        assert blockwise.kernel_for(on("cuda", torch.bfloat16)) is blockwise.FLASH_CUDA
        assert blockwise.kernel_for(on("cuda", torch.bfloat16, 12)) is blockwise.PLAIN
        assert blockwise.kernel_for(on("cuda", torch.float32)) is blockwise.PLAIN
        q, k, v = (on("cuda", torch.bfloat16).expand(1, 2, h, 64) for h in (3, 3, 3))
        out, lse = blockwise.FLASH_CUDA.forward(q, k, v, False)
        assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
        gradients = blockwise.FLASH_CUDA.backward(out, q, k, v, out, lse, False)
        assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
        k, v = (on("cuda", torch.bfloat16).expand(1, 2, 3, 64).repeat(1, 4, 1, 1) for _ in "kv")
        with Arguments("_scaled_dot_product_flash_attention_backward") as given:
            gradients = blockwise.FLASH_CUDA.backward(out, q, k, v, out, lse, False)
        assert (given.values["max_q"], given.values["max_k"]) == (2, 8), "queries, then keys"
        assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


# --- attention on ranks ------------------------------------------------------------------------


def attend_on_rank(way, config, batch_size=2, seq_len=SEQ, seed=0):
    """This rank's positions and (out, dq, dk, dv), and what it sent."""
    mesh = make_mesh(cp=make_mesh().world.size)
    mine = cp.positions(seq_len, mesh.cp, way.layout)
    tensors = [x[:, mine] for x in draw(config, batch_size, seq_len, seed)]
    return mine, forward_backward(way.core(mesh.cp), tensors), mesh.ledger.wire_bytes()


def attention_errors(results, want, tolerance, what=""):
    for rank, (mine, got, *_) in enumerate(results):
        reference = {name: tensor[:, mine] for name, tensor in want.items()}
        assert_equal(got, reference, tolerance, f"{what} attention of rank {rank}")


def check_attention(results, way, config, tolerance, batch_size=2, seq_len=SEQ, seed=0):
    """Values of every rank against one process, bytes against the formula."""
    want = forward_backward(causal_attention, draw(config, batch_size, seq_len, seed))
    attention_errors(results, want, tolerance)
    for *_, sent in results:
        assert sent == way.wire(config, batch_size, seq_len, len(results))
    assert unmatched_sends(results.ledgers) == {}


@by_way_and_size
def test_attention_equals_serial(worlds, n, way):
    config = sizes(n)
    results = worlds(n).run(attend_on_rank, way, config)
    check_attention(results, way, config, 1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 2e-2)])
@by_way()
def test_attention_equals_serial_in_lower_precision(worlds, way, dtype, tolerance):
    config = sizes(4, dtype=dtype)
    check_attention(worlds(4).run(attend_on_rank, way, config), way, config, tolerance)


@by_way("ring-zigzag", "gather-again", "ulysses")
def test_attention_under_checks_and_on_a_slow_link(worlds, way):
    slow = Link(alpha=1e-3, beta=1e9)
    for conditions in ({"checked": True}, {"links": Links(slow, slow)}):
        results = worlds(4).run(attend_on_rank, way, sizes(4), **conditions)
        check_attention(results, way, sizes(4), 1e-12)


shapes = st.fixed_dictionaries(
    {
        "groups": st.sampled_from([(4, 1), (4, 2), (4, 4), (8, 2), (12, 3)]),
        "head_dim": st.sampled_from([2, 6, 8]),
        "rows": st.integers(1, 7),
        "batch": st.integers(1, 3),
    }
)


@given(shape=shapes, name=st.sampled_from(list(WAYS)), n=st.sampled_from([2, 4]))
def test_attention_of_any_shape(worlds, shape, name, n):
    (heads, kv_heads), seq_len = shape["groups"], shape["rows"] * 2 * n
    config = sizes(n, kv_heads, hidden=heads * shape["head_dim"], heads=heads)
    results = worlds(n).run(attend_on_rank, WAYS[name], config, shape["batch"], seq_len)
    check_attention(results, WAYS[name], config, 1e-12, shape["batch"], seq_len)


@pytest.mark.parametrize(("n", "kv_heads"), [(2, 2), (2, 8), (4, 4), (8, 8), (3, 3)])
def test_ulysses_is_bitwise_serial(worlds, n, kv_heads):
    config = sizes(n, kv_heads)
    want = serial_attention(config)
    for mine, got, _ in worlds(n).run(attend_on_rank, ULYSSES, config):
        assert_bitwise(got, {name: x[:, mine] for name, x in want.items()}, "Ulysses")


@pytest.mark.parametrize(("n", "kv_heads"), [(4, 2), (8, 1), (3, 2)])
def test_ulysses_with_copied_heads_is_bitwise_serial_but_for_their_sum(worlds, n, kv_heads):
    config = sizes(n, kv_heads)
    want = serial_attention(config)
    for mine, got, _ in worlds(n).run(attend_on_rank, ULYSSES, config):
        for name in ("out", "dq"):
            assert torch.equal(got[name], want[name][:, mine]), name


@pytest.mark.parametrize("heads", [1, 3, 4, 8])
@pytest.mark.parametrize("layout_", LAYOUTS, ids=lambda each: each.name)
def test_usp_with_groups_of_any_size(worlds, heads, layout_):
    """Runs of one rank are a ring, one run of all is Ulysses; three head ranks halve no chunk."""
    n = 3 if heads == 3 else 8
    way, config = usp_way(layout_, heads), sizes(n)
    results = worlds(n).run(attend_on_rank, way, config)
    check_attention(results, way, config, 1e-12)
    assert sorted(torch.cat([mine for mine, *_ in results]).tolist()) == list(range(SEQ))


def test_usp_sends_less_over_the_slow_links_than_a_ring():
    """Grouped query, 2 nodes of 4 ranks: neighbours exchange heads, K and V turn in a ring of 2."""
    config = sizes(8)
    inside, between = cp.ulysses_ring_wire_bytes(config, 2, SEQ, 4, 2)
    assert between < cp.ring_wire_bytes(config, 2, SEQ, 8)
    assert inside > 0
    assert cp.ulysses_ring_wire_bytes(config, 2, SEQ, 1, 8) == (
        0,
        cp.ring_wire_bytes(config, 2, SEQ, 8),
    )
    assert cp.ulysses_ring_wire_bytes(config, 2, SEQ, 8, 1) == (
        cp.ulysses_wire_bytes(config, 2, SEQ, 8),
        0,
    )


def test_the_layout_of_usp_splits_the_shards_of_the_ring_again():
    layout_ = cp.nested(cp.ZIGZAG, 2)
    assert [layout_.chunks(rank, 4) for rank in range(4)] == [(0, 1), (6, 7), (2, 3), (4, 5)]
    for ring_layout in LAYOUTS:
        for heads, ring_size in ((2, 2), (3, 2), (2, 4), (4, 1)):
            n = heads * ring_size
            for rank in range(n):
                run, place = divmod(rank, heads)
                outer = cp.positions(8 * n, axis_of(run, ring_size), ring_layout)
                inner = cp.positions(len(outer), axis_of(place, heads), cp.CONTIGUOUS)
                mine = cp.positions(8 * n, axis_of(rank, n), cp.nested(ring_layout, heads))
                assert torch.equal(mine, outer[inner])


# --- work, overlap, memory -----------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("layout_", LAYOUTS, ids=lambda each: each.name)
def test_work_counted_in_a_run_is_the_formula(worlds, n, layout_):
    """(q, k) pairs that the kernel was asked for, forward and backward."""

    def rank():
        mesh = make_mesh(cp=n)
        counted = [0, 0]

        def count(which, q, k, causal):
            rows, keys = q.shape[1], k.shape[1]
            counted[which] += rows * (rows + 1) // 2 if causal else rows * keys

        def forward(q, k, v, causal):
            count(0, q, k, causal)
            return blockwise.FLASH_CPU.forward(q, k, v, causal)

        def backward(dout, q, k, v, out, lse, causal):
            count(1, q, k, causal)
            return blockwise.FLASH_CPU.backward(dout, q, k, v, out, lse, causal)

        kernel = blockwise.Kernel(forward, backward, strip=4)
        mine = cp.positions(SEQ, mesh.cp, layout_)
        core = partial(cp.ring_attention, axis=mesh.cp, layout=layout_, kernel=kernel)
        forward_backward(core, [x[:, mine] for x in draw(sizes(n), 1, SEQ)])
        return counted

    counted = list(worlds(n).run(rank))
    assert counted == [[pairs, pairs] for pairs in cp.pairs(layout_, SEQ, n)]
    work = [forward for forward, _ in counted]
    imbalance = Fraction(max(work) * n, sum(work))
    assert imbalance == cp.imbalance(layout_, SEQ, n)
    assert (imbalance == 1) == (layout_ is cp.ZIGZAG or n == 1)


def test_blocks_travel_while_others_are_computed(worlds):
    """Messages asked for, and those waited for, when each block is computed."""

    def rank():
        mesh = make_mesh(cp=4)
        seen = []

        def noting(compute):
            def call(*arguments):
                landed = sum(span.op == "recv" for span in mesh.trace.spans)
                seen.append((mesh.ledger.calls("cp", "recv"), landed))
                return compute(*arguments)

            return call

        kernel = blockwise.Kernel(*(noting(each) for each in blockwise.FLASH_CPU[:2]))
        mine = cp.positions(SEQ, mesh.cp, cp.ZIGZAG)
        core = partial(cp.ring_attention, axis=mesh.cp, kernel=kernel)
        forward_backward(core, [x[:, mine] for x in draw(sizes(4), 1, SEQ)])
        return seen, mesh.ledger.calls("cp", "recv")

    for seen, calls in worlds(4).run(rank):
        assert seen[:4] == [(1, 0), (2, 1), (3, 2), (3, 3)], "forward: K, V one turn ahead"
        # K, V as before, and from the third turn on the gradients of the block before
        back = [(asked - 3, landed - 3) for asked, landed in seen[4:]]
        assert back == [(1, 0), (2, 1), (4, 2), (5, 4)]
        assert calls == 9


def saved_on_rank(way, config, seq_len=SEQ):
    """Bytes that autograd keeps of the attention alone."""
    mesh = make_mesh(cp=make_mesh().world.size)
    mine = cp.positions(seq_len, mesh.cp, way.layout)
    qkv = [x[:, mine].requires_grad_() for x in draw(config, 2, seq_len)[:3]]
    core = way.core(mesh.cp)
    with SavedActivations() as saved:
        out = core(*qkv)
    peak = saved.peak
    out.sum().backward()
    return peak, saved.now


@pytest.mark.parametrize(
    ("n", "dtype"), [(2, torch.float64), (4, torch.float32), (8, torch.bfloat16)]
)
@by_way()
def test_saved_bytes_are_the_formula(worlds, n, dtype, way):
    config = sizes(n, dtype=dtype)
    expected = way.saved(config, 2, SEQ, n)
    assert list(worlds(n).run(saved_on_rank, way, config)) == [(expected, 0)] * n


def test_only_a_kept_gather_holds_more_with_more_ranks(worlds):
    """Peak of live bytes in forward, 8 positions a rank: blocks in hand do not add up in a ring."""

    def rank(way, config, n):
        mesh = make_mesh(cp=n)
        mine = cp.positions(8 * n, mesh.cp, way.layout)
        qkv = [x[:, mine].requires_grad_() for x in draw(config, 1, 8 * n)[:3]]
        core = way.core(mesh.cp)
        with PeakLiveBytes() as live:
            core(*qkv)
        return live.peak

    config = sizes(8)
    block = 2 * 8 * config.kv_heads * config.head_dim * 8
    peaks = {
        (name, n): max(worlds(n).run(rank, WAYS[name], config, n))
        for name in ("ring-zigzag", "gather-zigzag")
        for n in (4, 8)
    }
    assert peaks["ring-zigzag", 8] == peaks["ring-zigzag", 4]
    assert peaks["gather-zigzag", 8] == peaks["gather-zigzag", 4] + 4 * block


# --- whole models ------------------------------------------------------------------------------

STEPS, BATCH = 5, 8
MODEL = {"layers": 2, "hidden": 48, "heads": 8, "kv_heads": 2, "ffn": 24, "max_seq_len": SEQ}
F64 = ModelConfig(**MODEL, dtype=torch.float64)
GPT = ModelConfig(**MODEL | {"kv_heads": 4}, family="gpt", tied=True, dtype=torch.float64)


def grads(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def rows(step, axis=None, shortest=None):
    where = {} if axis is None else {"dp_rank": axis.rank, "dp_size": axis.size}
    return batch(step, seed=7, batch_size=BATCH, seq_len=SEQ, shortest=shortest, **where)


@cache
def serial(config, shortest=None, steps=STEPS):
    """One process: (losses, first gradients, weights after 5 AdamW steps)."""
    model = build_model(config, seed=3)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, first = [], {}
    for step in range(steps):
        adam.zero_grad()
        total, count = model.loss_sum(*rows(step, shortest=shortest))
        (total / count).backward()
        first = first or grads(model)
        adam.step()
        losses.append(float(total.detach() / count))
    return losses, first, weights(model)


def as_it_is(model):
    pass


def train(
    config,
    way,
    cp_size,
    shortest=None,
    step=dp.train_step,
    cut=cp.shard,
    before=as_it_is,
    prepare=as_it_is,
    steps=STEPS,
):
    """What a rank does: (losses, first gradients, weights), and bytes sent per step and axis."""
    mesh = make_mesh(cp=cp_size)
    model = build_model(config, seed=3)
    before(model)
    cp.parallelize(model, way.on(mesh.cp), mesh.cp, way.layout)
    prepare(model)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sync = dp.Bucketed(model.parameters(), mesh.dp_cp)
    losses, first = [], {}
    for number in range(steps):
        mesh.ledger.clear()
        tokens, targets, positions = cut(*rows(number, mesh.dp, shortest), mesh.cp, way.layout)

        def loss_of(tokens, targets, positions=positions):
            return loss_sum(model(tokens, positions), targets)

        losses.append(float(step(loss_of, [(tokens, targets)], sync, adam)))
        first = first or grads(model)
    sums = mesh.ledger.wire_bytes(mesh.dp_cp.name)
    sent = {"cp": mesh.ledger.wire_bytes() - sums, mesh.dp_cp.name: sums}
    return losses, first, weights(model), sent


def check_training(results, twin):
    """Every rank against one process, and the replicas among themselves."""
    losses, first, final = twin
    for rank, (got_losses, got_first, got_final, _) in enumerate(results):
        assert max(abs(a - b) for a, b in zip(got_losses, losses, strict=True)) < 1e-11
        assert_equal(got_first, first, 1e-12, f"gradients of rank {rank}")
        assert_equal(got_final, final, 1e-8, f"weights of rank {rank} after {STEPS} AdamW steps")
        assert_bitwise(got_final, results[0][2], f"replica {rank} against replica 0")


@pytest.mark.parametrize(
    ("name", "n"),
    [
        *((name, n) for name in ("ring-zigzag", "gather-contiguous", "ulysses") for n in WORLDS),
        *(("usp-zigzag", n) for n in (2, 4, 8)),
    ],
)
def test_training_equals_serial(worlds, n, name):
    way = WAYS[name]
    config = replace(F64, heads=6) if n == 3 else F64
    results = worlds(n).run(train, config, way, n)
    check_training(results, serial(config))
    parameter_bytes = sum(p.nbytes for p in results[0][2].values())
    sync_axis = "dp_cp" if n > 1 else "dp"
    for *_, sent in results:
        assert sent["cp"] == way.wire(config, BATCH, SEQ, n)
        assert sent[sync_axis] == dp.wire_bytes(parameter_bytes, n)


@pytest.mark.parametrize("cp_size", [2, 4])
@by_way("ring-zigzag", "gather-again", "ulysses", "usp-contiguous")
def test_training_of_gpt_with_data_parallelism_and_uneven_tokens(worlds, cp_size, way):
    results = worlds(8).run(lambda: train(GPT, way, cp_size, shortest=2))
    check_training(results, serial(GPT, shortest=2))
    for *_, sent in results:
        assert sent["cp"] == way.wire(GPT, BATCH // (8 // cp_size), SEQ, cp_size)


@pytest.mark.parametrize("config", [F64, GPT], ids=["llama", "gpt"])
@by_way()
def test_what_a_model_keeps_is_its_formula(worlds, way, config):
    """A ring and a gather that gathers again: what one process keeps of a shorter sequence."""

    def rank():
        mesh = make_mesh(cp=4)
        model = cp.parallelize(build_model(config), way.on(mesh.cp), mesh.cp, way.layout)
        tokens, targets, positions = cp.shard(*rows(0), mesh.cp, way.layout)
        with SavedActivations(model, tokens, targets) as saved:
            loss_sum(model(tokens, positions), targets)[0].backward()
        return saved.peak

    copied = way.attention in (cp.ulysses_attention, cp.ulysses_ring_attention)
    in_attention = way.saved(config, BATCH, SEQ, 4)
    expected = cp.saved_bytes(config, BATCH, SEQ, 4, in_attention, output_copied=copied)
    assert list(worlds(4).run(rank)) == [expected] * 4
    if way in (RING, WAYS["gather-again"]):
        assert expected == saved_by_stage(config, BATCH, SEQ // 4)


@by_way("ring-zigzag", "gather-zigzag", "gather-again", "ulysses", "usp-zigzag")
@pytest.mark.parametrize("how", ["selective", "full", "full before"])
def test_recomputed_attention_sends_what_two_forwards_do(worlds, way, how):
    """recompute.selective goes around the parallel core; the other way round is refused. Full
    recomputation goes around blocks, before or after."""
    orders = {
        "selective": {"prepare": recompute.selective},
        "full": {"prepare": recompute.full},
        "full before": {"before": recompute.full},
    }
    results = worlds(4).run(partial(train, F64, way, 4, steps=2, **orders[how]))
    check_training(results, serial(F64, steps=2))
    for *_, sent in results:
        assert sent["cp"] == way.wire(F64, BATCH, SEQ, 4, forwards=2)
        assert sent["cp"] > way.wire(F64, BATCH, SEQ, 4)


# --- beside torch's own ---------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 4])
def test_equals_torch_ring_attention(worlds, n):
    def rank():
        from course_lib.bench.cp import torch_ring

        mesh = make_mesh(cp=n)
        mine = cp.positions(SEQ, mesh.cp, cp.ZIGZAG)
        tensors = [x[:, mine] for x in draw(sizes(n), 2, SEQ)]
        ours = forward_backward(RING.core(mesh.cp), tensors)
        return ours, dict(zip(NAMES, torch_ring(mesh.cp, *tensors), strict=True))

    for ours, theirs in worlds(n).run(rank):
        error, name = worst_error(ours, theirs)
        assert error < 5e-6, name
        assert projection(ours, theirs) == pytest.approx(1, abs=5e-6)


# --- the classic bugs, each of which must be caught by the comparisons above ----------------


def error_under(world, patch, way=RING, config=None, **kwargs):
    """Largest error of any rank's (out, dq, dk, dv) while ``patch()`` is in force on the ranks."""
    config = config or sizes(4)

    def rank():
        with patch():
            return attend_on_rank(way, config, **kwargs)

    results = world.run(rank)
    want = forward_backward(
        causal_attention, [x.double() for x in draw(config, 2, kwargs.get("seq_len", SEQ))]
    )
    errors = {}
    for mine, got, _ in results:
        for name, tensor in want.items():
            error, _ = worst_error({name: got[name].double()}, {name: tensor[:, mine]})
            errors[name] = max(errors.get(name, 0.0), error)
    return errors


def merged_without_rescaling():
    def add(out, lse, block_out, block_lse):
        out += block_out
        lse.copy_(torch.logaddexp(lse, block_lse))

    return mock.patch.object(blockwise, "merge", add)


def merged_as_a_mean():
    def mean(out, lse, block_out, block_lse):
        out.lerp_(block_out, torch.where(lse.isinf(), 1.0, 0.5)[..., None].to(out))
        lse.copy_(torch.logaddexp(lse, block_lse))

    return mock.patch.object(blockwise, "merge", mean)


def mask_of_the_wrong_pair():
    right = layout.visible
    return mock.patch.object(
        layout, "visible", lambda which, n, mine, theirs, s: right(which, n, theirs, mine, s)
    )


def early_queries_not_skipped():
    def wrong(layout_, n, mine, theirs, rows):
        return layout.Tile(slice(0, rows), slice(0, rows), causal=mine == theirs)

    return mock.patch.object(layout, "visible", wrong)


def gradients_kept_local():
    class Nothing:
        def __init__(self, axis, sends, receives):
            self.received = [torch.zeros_like(like) for like, _ in receives]

        def wait(self):
            return self.received

    return mock.patch.object(comm, "start_exchange", Nothing)


def heads_copied_in_turn():
    """h0 h1 h0 h1 instead of h0 h0 h1 h1."""
    return mock.patch.object(
        torch.Tensor, "repeat_interleave", lambda x, copies, dim: torch.cat([x] * copies, dim)
    )


@pytest.mark.parametrize(
    ("patch", "wrong", "right"),
    [
        (merged_without_rescaling, "out", ""),
        (merged_as_a_mean, "out", ""),
        (mask_of_the_wrong_pair, "out", ""),
        (early_queries_not_skipped, "out", ""),
        (gradients_kept_local, "dk", "out dq"),
    ],
)
def test_bugs_of_the_ring_are_caught(worlds, patch, wrong, right):
    errors = error_under(worlds(4), patch)
    assert errors[wrong] > 0.1
    assert all(errors[name] < 1e-12 for name in right.split())


def test_swapped_heads_in_ulysses_are_caught(worlds):
    assert error_under(worlds(4), heads_copied_in_turn, ULYSSES)["out"] > 0.1


def test_usp_with_its_axes_swapped_is_caught(worlds):
    """Heads across the runs and rings inside them: sizes agree, rows do not."""
    way = WAYS["usp-zigzag"]

    def rank():
        mesh = make_mesh(cp=4)
        mine = cp.positions(SEQ, mesh.cp, way.layout)
        heads, through = cp.split_axis(mesh.cp, 2)
        swapped = partial(way.attention, heads_axis=through, ring_axis=heads)
        core = partial(swapped, axis=mesh.cp, layout=way.layout)
        return mine, forward_backward(core, [x[:, mine] for x in draw(sizes(4), 2, SEQ)])

    with pytest.raises(AssertionError, match=r"off by|times too large"):
        attention_errors(worlds(4).run(rank), serial_attention(sizes(4)), 1e-12)


def test_a_ring_of_the_wrong_layout_is_caught(worlds):
    """Zig-zag data under masks for contiguous data."""

    def rank():
        mesh = make_mesh(cp=4)
        mine = cp.positions(SEQ, mesh.cp, cp.ZIGZAG)
        core = WAYS["ring-contiguous"].core(mesh.cp)
        return mine, forward_backward(core, [x[:, mine] for x in draw(sizes(4), 2, SEQ)])

    with pytest.raises(AssertionError, match=r"off by|times too large"):
        attention_errors(worlds(4).run(rank), serial_attention(sizes(4)), 1e-12)


def test_gradients_in_bfloat16_lose_more_with_every_turn(worlds):
    """Accumulators of float32 cost bytes, and round once at the end however many turns it took."""
    plain = replace(RING, attention=partial(cp.ring_attention, kernel=blockwise.PLAIN))

    def rank(accumulator, n):
        with mock.patch.object(ring, "accumulation_dtype", accumulator):
            return attend_on_rank(plain, sizes(n, dtype=torch.bfloat16), seq_len=256)

    def error(accumulator, n):
        """Norm of the error of dk and dv over that of the reference, over all ranks."""
        tensors = [x.double() for x in draw(sizes(n, dtype=torch.bfloat16), 2, 256)]
        want = forward_backward(causal_attention, tensors)
        squares = torch.zeros(2, dtype=torch.float64)
        for mine, got, _ in worlds(n).run(rank, accumulator, n):
            for name in ("dk", "dv"):
                reference = want[name][:, mine]
                squares += torch.stack([(got[name] - reference).norm(), reference.norm()]) ** 2
        return float((squares[0] / squares[1]).sqrt())

    def narrow(dtype):
        return dtype

    wide = {n: error(blockwise.accumulation_dtype, n) for n in (2, 8)}
    bf16 = {n: error(narrow, n) for n in (2, 8)}
    assert wide[8] < 1.1 * wide[2]
    assert bf16[8] > 1.5 * bf16[2]
    assert bf16[8] > 2 * wide[8]


def wrong_positions(tokens, targets, axis, layout_):
    tokens, targets, _ = cp.shard(tokens, targets, axis, layout_)
    return tokens, targets, cp.positions(SEQ, axis, cp.CONTIGUOUS)


def unchecked(model):
    """Without the refusal of such positions, so that their effect can be seen."""
    for block in model.blocks:
        block.attn._forward_pre_hooks.clear()


def test_wrong_positions_are_refused_on_every_rank(worlds):
    with pytest.raises(RankError, match=r"expected .* layout, 6\.\.11 36\.\.41, got 12\.\.23"):
        worlds(4).run(partial(train, F64, RING, 4, cut=wrong_positions))


def wrong_targets(tokens, targets, axis, layout_):
    tokens, _, positions = cp.shard(tokens, targets, axis, layout_)
    return tokens, targets[:, cp.positions(SEQ, axis, cp.CONTIGUOUS)], positions


def mean_of_rank_means(loss_of, micro_batches, sync, optimizer):
    """Every rank averages over its own tokens, then the ranks average."""
    optimizer.zero_grad()
    total, count = loss_of(*micro_batches[0])
    (total / count / sync.axis.size).backward()
    sync.finish()
    optimizer.step()
    return comm.all_reduce((total / count).detach(), sync.axis) / sync.axis.size


def never_summed(loss_of, micro_batches, sync, optimizer):
    """Parameters are replicated, so why sum? Because every rank saw other tokens."""
    optimizer.zero_grad()
    total, _ = loss_of(*micro_batches[0])
    (total / dp.global_tokens([micro_batches[0][1]], sync.axis)).backward()
    optimizer.step()
    return comm.all_reduce(total.detach(), sync.axis)


@pytest.mark.parametrize(
    ("bug", "least"),
    [
        ({"cut": wrong_positions, "prepare": unchecked}, 0.01),
        ({"cut": wrong_targets}, 0.1),
        ({"step": mean_of_rank_means, "shortest": 10}, 0.01),
        ({"step": never_summed}, 0.1),
    ],
    ids=["positions", "labels", "mean of means", "never summed"],
)
def test_bugs_around_the_model_are_caught(worlds, bug, least):
    results = worlds(4).run(partial(train, F64, RING, 4, **bug))
    twin = serial(F64, shortest=bug.get("shortest"))
    assert max(worst_error(result[1], twin[1])[0] for result in results) > least
    with pytest.raises(AssertionError):
        check_training(results, twin)


# --- bad input --------------------------------------------------------------------------------


def test_bad_input_is_named():
    tokens = torch.zeros(1, 12, dtype=torch.int64)
    with pytest.raises(
        ValueError, match=r"axis cp: 12 positions .* 8 equal .* zigzag .* pad .* 16"
    ):
        cp.shard(tokens, tokens, axis_of(0, 4), cp.ZIGZAG)
    with pytest.raises(ValueError, match=r"12 positions .* 5 equal .* contiguous .* 15"):
        cp.pairs(cp.CONTIGUOUS, 12, 5)
    q, k, v, _ = draw(sizes(1), 1, 3)
    with pytest.raises(
        ValueError, match=r"rank 1: expected 2 equal chunks .* got 3 positions per rank"
    ):
        cp.ring_attention(q, k, v, axis_of(1, 2))
    with pytest.raises(ValueError, match=r"axis cp of 3 ranks does not divide 8 query heads"):
        cp.ulysses_attention(q, k, v, axis_of(0, 3))


def test_positions_of_another_rank_or_layout_are_refused():
    """Each of these trains, and to a wrong model: RoPE and mask would be of other positions."""
    model = cp.parallelize(build_model(F64), cp.ring_attention, axis_of(1, 4), cp.ZIGZAG)
    tokens, targets, positions = cp.shard(*rows(0), axis_of(1, 4), cp.ZIGZAG)
    wants = r"axis cp, rank 1: expected .* in the zigzag layout, 6\.\.11 36\.\.41, got .*: call "
    for wrong in (None, cp.positions(SEQ, axis_of(1, 4), cp.CONTIGUOUS), positions + 1):
        with pytest.raises(ValueError, match=wants):
            model(tokens, wrong)
    with pytest.raises(ValueError, match=r"call model\(tokens, positions\), both from cp.shard"):
        model.loss_sum(tokens, targets)
    block, x = model.blocks[0], torch.zeros(1, 12, 48, dtype=torch.float64)
    block.attn.core = causal_attention  # there is one rank only
    assert block(x, positions).shape == x.shape
    with pytest.raises(ValueError, match=wants):  # also when the first forward was right
        block(x, positions.flip(0))


def test_one_rank_needs_no_positions():
    model = cp.parallelize(build_model(F64), cp.ring_attention, axis_of(0, 1), cp.ZIGZAG)
    tokens, _ = rows(0)
    for keywords in ({}, {"positions_S": torch.arange(SEQ)}):
        assert model(tokens, **keywords).shape == (BATCH, SEQ, 256)


def test_positions_on_a_gpu_are_looked_at_once(monkeypatch):
    """Comparing waits for the device; here one that is not the CPU by name only."""
    from course_lib.cp.layout import PositionsCheck

    looked = []

    class OnGpu:
        device, shape = torch.device("cuda"), (12,)

    monkeypatch.setattr(torch, "equal", lambda a, b: looked.append(a) or True)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, device: x)
    check = PositionsCheck(axis_of(1, 4), cp.ZIGZAG, SEQ)
    for _ in range(3):
        check(None, (None, OnGpu()))
    assert len(looked) == 1


def test_a_sequence_longer_than_the_model_is_refused():
    """12 positions a rank are few; those of 8 ranks together are more than the model's 48."""
    model = cp.parallelize(build_model(F64), cp.ring_attention, axis_of(1, 8), cp.ZIGZAG)
    tokens = torch.zeros(2, 96, dtype=torch.int64)
    tokens, _, positions = cp.shard(tokens, tokens, axis_of(1, 8), cp.ZIGZAG)
    with pytest.raises(ValueError, match=r"axis cp: 8 ranks hold 96 positions .* max_seq_len=48"):
        model(tokens, positions)


@pytest.mark.parametrize(
    "layout_", [cp.ZIGZAG, cp.nested(cp.ZIGZAG, 2)], ids=lambda each: each.name
)
def test_ulysses_refuses_shards_that_do_not_join_in_order(layout_):
    model = cp.parallelize(build_model(F64), cp.ulysses_attention, axis_of(1, 4), layout_)
    tokens, _, positions = cp.shard(*rows(0), axis_of(1, 4), layout_)
    with pytest.raises(
        ValueError, match=r"axis cp: expected .* in order, got zigzag.* use cp.CONTIGUOUS"
    ):
        model(tokens, positions)


def test_usp_refuses_axes_and_layouts_that_do_not_agree():
    q, k, v, _ = draw(sizes(4), 1, 4)
    usp = partial(cp.ulysses_ring_attention, heads_axis=axis_of(0, 2), ring_axis=axis_of(0, 2))
    for wrong in (cp.ZIGZAG, cp.nested(cp.ZIGZAG, 4)):
        with pytest.raises(ValueError, match=r"axis cp: expected .* cp.nested\(.*, 2\) .* got "):
            usp(q, k, v, axis=axis_of(0, 4), layout=wrong)
    with pytest.raises(ValueError, match=r"expected axis cp to have 2 x 2 ranks, got 8"):
        usp(q, k, v, axis=axis_of(0, 8), layout=cp.nested(cp.ZIGZAG, 2))
    with pytest.raises(
        ValueError, match="expected size to divide the 4 ranks of axis cp, got size=3"
    ):
        cp.split_axis(axis_of(0, 4), 3)


@pytest.mark.parametrize(
    "first",
    [
        recompute.selective,
        lambda model: cp.parallelize(model, cp.ring_attention, axis_of(0, 1), cp.ZIGZAG),
    ],
    ids=["recomputed", "parallelized"],
)
def test_a_core_that_is_there_is_not_taken_away(first):
    model = build_model(F64)
    first(model)
    with pytest.raises(
        ValueError, match=r"parallelize the model once, and call recompute.selective after"
    ):
        cp.parallelize(model, cp.ring_attention, axis_of(0, 1), cp.ZIGZAG)
