"""Expert parallelism equals the loop over all experts on one process, and its bytes are counted."""

from __future__ import annotations

from contextlib import nullcontext
from fractions import Fraction
from unittest import mock

import pytest
import torch
from equality import assert_bitwise, assert_equal, projection, worst_error
from hypothesis import given
from hypothesis import strategies as st

from course_lib import comm, dp, ep, tp, zero
from course_lib.comm.collectives import exchange_rows
from course_lib.data import batch
from course_lib.ep import moe as serial_moe
from course_lib.ep import parallel as parallel_moe
from course_lib.ep.moe import NOWHERE
from course_lib.mesh import make_mesh
from course_lib.model import ModelConfig, build_model
from course_lib.trace.memory import SavedActivations, state_bytes

BATCH, SEQ, STEPS = 24, 12, 5
EXPERTS, COEFFICIENT = 24, 0.05
SMALL = {"layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "max_seq_len": SEQ}
F64 = ModelConfig(**SMALL, dtype=torch.float64)
GPT = ModelConfig(**SMALL, family="gpt", tied=True, dtype=torch.float64)
WORLDS = [(1, 1), (2, 2), (3, 3), (4, 4), (8, 8), (4, 2), (8, 2), (8, 4), (4, 1)]  # dp, ep
UNEVEN = [1, 9, 5, 9]  # rows of the batch on each of four ranks


def build(config=F64, experts=EXPERTS, top_k=2, **options):
    return ep.add_experts(build_model(config, seed=3), experts, top_k, seed=4, **options)


def grads(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def everything(step):
    return batch(step, seed=7, batch_size=BATCH, seq_len=SEQ)


def share(step, sizes, rank):
    """The rows of ``rank`` when rank r has sizes[r] of them."""
    first = sum(sizes[:rank])
    return tuple(part[first : first + sizes[rank]] for part in everything(step))


def even(n):
    return [BATCH // n] * n


def serial(config=F64, steps=STEPS, max_norm=None, **options):
    """Return (losses, first gradients, weights) of the single-process reference, all experts."""
    model = build(config, **options)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, first = [], {}
    for step in range(steps):
        adam.zero_grad()
        total, count = ep.loss_sum(model, COEFFICIENT)(*everything(step))
        (total / count).backward()
        first = first or grads(model)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        adam.step()
        losses.append(float(total.detach() / count))
    return losses, first, weights(model)


def loads_of_ranks(sizes, config=F64, **options):
    """What the routers of the untrained model want, by layer: one process, rank after rank."""
    model, found = build(config, **options), []
    for rank in range(len(sizes)):
        model(share(0, sizes, rank)[0])
        found.append([layer.load for layer in ep.moe_layers(model)])
    return [
        ep.Load(tuple(load.chosen[0] for load in loads), tuple(load.kept[0] for load in loads))
        for loads in zip(*found, strict=True)
    ]


def parallel(ep_size, sizes, config=F64, *, steps=STEPS, sync=ep.ExpertSync, micro=1, max_norm=None,
             make=dp.Overlapped, step=dp.train_step, **options):  # fmt: skip
    """What one rank does; as :func:`serial`, and the bytes of each step, and the first loads."""
    mesh = make_mesh(ep=ep_size)
    model = ep.parallelize(build(config, **options), mesh.ep, mesh.dp_cp)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    both = sync(model, make, ep=mesh.ep, edp=mesh.edp, data=mesh.dp_cp)
    loss_sum = ep.loss_sum(model, COEFFICIENT)
    losses, first, sent, loads = [], {}, [], []
    for number in range(steps):
        mine = share(number, sizes, mesh.dp.rank)
        cut = list(zip(*(part.chunk(micro) for part in mine), strict=True))
        mesh.ledger.clear()
        losses.append(float(step(loss_sum, cut, both, adam, max_norm)))
        first = first or grads(model)
        now = [layer.load for layer in ep.moe_layers(model)]
        loads = loads or now
        sent.append(({axis: mesh.ledger.wire_bytes(axis) for axis in ("ep", "dp", "edp")}, now))
    return losses, first, weights(model), sent, loads


def check(results, twin, tolerance=1e-12, after=1e-8):
    """Compare every rank with the reference and the copies with each other; find every expert."""
    losses, first, final = twin
    names = set()
    for rank, (got_losses, got_first, got_final, *_) in enumerate(results):
        assert max(abs(a - b) for a, b in zip(got_losses, losses, strict=True)) < tolerance * 10
        want = {name: first[name] for name in got_first}
        assert_equal(got_first, want, tolerance, f"gradients of rank {rank}")
        for part in ("experts", "router", "attn"):
            mine = {name: grad for name, grad in got_first.items() if part in name}
            assert_equal(mine, {name: first[name] for name in mine}, tolerance, f"{part} gradients")
        want = {name: final[name] for name in got_final}
        assert_equal(got_final, want, after, f"weights of rank {rank}")
        for other in results[:rank]:
            common = {name: other[2][name] for name in got_final.keys() & other[2].keys()}
            assert_bitwise(got_final, common, f"copies on rank {rank}")
        names |= got_final.keys()
    assert names == final.keys(), "the ranks' experts together are all experts"


@pytest.mark.parametrize(("n", "ep_size"), WORLDS)
@pytest.mark.parametrize("config", [F64, GPT], ids=["llama", "gpt-tied"])
def test_equals_serial(worlds, n, ep_size, config):
    results = worlds(n).run(parallel, ep_size, even(n), config)
    check(results, serial(config))


@pytest.mark.parametrize("make", [dp.Naive, dp.Bucketed])
@pytest.mark.parametrize("options", [{"shared": True}, {"top_k": 1}, {"top_k": 3}])
def test_equals_serial_with_ranks_of_unequal_tokens(worlds, make, options):
    results = worlds(4).run(lambda: parallel(2, UNEVEN, make=make, steps=2, **options))
    check(results, serial(steps=2, **options))


def test_micro_batches_sum(worlds):
    """Each micro-batch has its own auxiliary loss, so the reference sums the same losses."""

    def twin():
        model = build()
        tokens, targets = everything(0)
        order = [row for part in range(2) for rank in range(4) for row in
                 range(6 * rank + 3 * part, 6 * rank + 3 * part + 3)]  # fmt: skip
        for half in torch.tensor(order).chunk(2):
            total, _ = ep.loss_sum(model, COEFFICIENT)(tokens[half], targets[half])
            (total / targets.numel()).backward()
        return grads(model)

    want = twin()
    for result in worlds(4).run(lambda: parallel(2, even(4), micro=2, steps=1)):
        assert_equal(result[1], {name: want[name] for name in result[1]}, 1e-12, "gradients")


def test_float32(worlds):
    config = ModelConfig(**SMALL)
    _, first, _ = serial(config, steps=1)
    for result in worlds(4).run(lambda: parallel(2, even(4), config, steps=1)):
        assert_equal(result[1], {name: first[name] for name in result[1]}, 5e-6, "gradients")


@pytest.mark.parametrize("ep_size", [2, 4])
def test_clipping_by_the_global_norm(worlds, ep_size):
    results = worlds(4).run(lambda: parallel(ep_size, UNEVEN, max_norm=0.1, steps=2))
    twin = serial(max_norm=0.1, steps=2)
    for result in results:
        got = {name: twin[2][name] for name in result[2]}
        assert_equal(result[2], got, 1e-8, "weights after clipped steps")


# --- one layer: outputs, gradients of the input, any shape -----------------------------------


def rows_of(sizes, rank, hidden=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), hidden, generator=generator, dtype=torch.float64)
    return x.split(sizes)[rank].clone()


def backward(layer, x, weight, tokens):
    """(y, gradient of x, gradients of parameters) of a loss over y and the auxiliary loss."""
    x = x.requires_grad_()
    y = layer(x)
    ((y * weight).sum() + COEFFICIENT * layer.auxiliary / tokens).backward()
    return {"y": y.detach(), "x": x.grad}, grads(layer)


def serial_layer(sizes, by_rank=False, **options):
    """One process: all tokens at once, or (capacity is each rank's own) rank after rank."""
    layer = build(**options).blocks[0].ffn
    if not by_rank:
        x, weight = (rows_of([sum(sizes)], 0, seed=seed) for seed in (0, 1))
        values, gradients = backward(layer, x, weight, sum(sizes))
        cut = zip(values["y"].split(sizes), values["x"].split(sizes), strict=True)
        return [{"y": y, "x": x} for y, x in cut], gradients
    found = [
        backward(layer, rows_of(sizes, rank), rows_of(sizes, rank, seed=1), sum(sizes))[0]
        for rank in range(len(sizes))
    ]
    return found, grads(layer)


def rank_layer(sizes, ep_size, patch=nullcontext, cp=1, **options):
    """The same on this rank; gradients summed as they must be, and what was sent."""
    mesh = make_mesh(ep=ep_size, cp=cp)
    with patch():
        layer = ep.parallelize(build(**options), mesh.ep, mesh.dp_cp).blocks[0].ffn
        x, weight = rows_of(sizes, mesh.rank), rows_of(sizes, mesh.rank, seed=1)
        values, _ = backward(layer, x, weight, sum(sizes))
    row_bytes = x.shape[1] * x.element_size()
    sent = mesh.ledger.wire_bytes("ep"), ep.wire_bytes(layer.load, mesh.ep.rank, row_bytes)
    comm.sum_gradients(comm.held_gradients(layer.experts.parameters()), mesh.edp)
    comm.sum_gradients(comm.held_gradients([layer.router.weight]), mesh.dp_cp)
    return values, grads(layer), layer.load, sent


def check_layer(results, want):
    values, gradients = want
    for rank, (got, got_gradients, _, (sent, formula)) in enumerate(results):
        if len(values[rank]["y"]):
            assert_equal(got, values[rank], 1e-12, f"output and input gradient of rank {rank}")
        mine = {name: gradients[name] for name in got_gradients}
        assert_equal(got_gradients, mine, 1e-12, f"parameter gradients of rank {rank}")
        assert sent == formula


@given(
    sizes=st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any),
    ep_size=st.sampled_from([1, 2, 4]),
    experts=st.sampled_from([4, 8, 12]),
    top_k=st.integers(1, 4),
    config=st.sampled_from([F64, GPT]),
)
def test_any_shape(worlds, sizes, ep_size, experts, top_k, config):
    """Ranks without any token included."""
    options = {"config": config, "experts": experts, "top_k": top_k}
    results = worlds(4).run(lambda: rank_layer(sizes, ep_size, **options))
    check_layer(results, serial_layer(sizes, **options))


@pytest.mark.parametrize("ep_size", [2, 4])
def test_data_may_be_cut_along_the_sequence_too(worlds, ep_size):
    """dp=2 and cp=2: all four ranks hold different tokens."""
    sizes = [7, 2, 9, 6]
    results = worlds(4).run(lambda: rank_layer(sizes, ep_size, cp=2))
    check_layer(results, serial_layer(sizes))


def test_one_rank_is_the_serial_layer_bit_for_bit(worlds):
    (got, gradients, load, _), = worlds(1).run(lambda: rank_layer([30], 1))  # fmt: skip
    values, want = serial_layer([30])
    assert_bitwise(got, values[0], "output and input gradient")
    assert gradients.keys() == want.keys()
    assert load.dropped == 0


@pytest.mark.parametrize("capacity_factor", [0.3, 1.0])
def test_capacity_is_each_rank_s_own(worlds, capacity_factor):
    """The reference runs each rank's tokens separately, without the loss over all tokens."""
    sizes, options = [5, 16, 0, 11], {"experts": 8, "capacity_factor": capacity_factor}
    with mock.patch.dict(globals(), COEFFICIENT=0.0):
        want = serial_layer(sizes, by_rank=True, **options)
        results = worlds(4).run(lambda: rank_layer(sizes, 2, **options))
    check_layer(results, want)
    assert all(0 < result[2].dropped < 0.8 for result in results)


# --- the auxiliary loss is that of the whole batch -------------------------------------------


def test_auxiliary_losses_add_up_to_that_of_the_whole_batch(worlds):
    def rank():
        mesh = make_mesh(ep=2)
        model = ep.parallelize(build(), mesh.ep, mesh.dp_cp)
        with torch.no_grad():
            model(share(0, UNEVEN, mesh.rank)[0])
            return float(ep.auxiliary_loss(model))

    model = build()
    model(everything(0)[0])
    want = float(ep.auxiliary_loss(model).detach())
    assert sum(worlds(4).run(rank)) == pytest.approx(want, rel=1e-13)
    assert want / (BATCH * SEQ * 2) > 1.01, "an even load would hide which counts are used"


# --- every pair is sent once, and comes home -------------------------------------------------


def marked_pairs(sizes, ep_size, capacity_factor=None):
    """Rows that say who they are, and what each expert of this rank has seen."""
    mesh = make_mesh(ep=ep_size)
    model = build(experts=8, capacity_factor=capacity_factor)
    layer = ep.parallelize(model, mesh.ep, mesh.dp_cp).blocks[0].ffn
    x = rows_of(sizes, mesh.rank)
    x[:, 0] = mesh.rank
    x[:, 1] = torch.arange(len(x))
    seen = []
    for number, expert in layer.experts.items():
        expert.forward = lambda rows, number=number: seen.extend(
            (int(row[0]), int(row[1]), int(number)) for row in rows
        ) or rows.clone()  # fmt: skip
    routes = layer.route(x)
    wanted = [
        (mesh.rank, token, int(expert))
        for experts_T in routes.experts_KT
        for token, expert in enumerate(experts_T)
        if expert != NOWHERE
    ]
    with torch.no_grad():
        y = layer(x)
    served_T = (routes.weights_KT * (routes.experts_KT != NOWHERE)).sum(0)
    return wanted, seen, float((y - served_T[:, None] * x).detach().abs().sum())


@pytest.mark.parametrize("capacity_factor", [None, 0.5])
@pytest.mark.parametrize(("n", "ep_size"), [(1, 1), (2, 2), (4, 2), (4, 4), (8, 4)])
def test_every_pair_is_received_once_by_its_expert_and_returned(
    worlds, n, ep_size, capacity_factor
):
    sizes = [(7 * rank + 3) % 10 for rank in range(n)]
    results = worlds(n).run(lambda: marked_pairs(sizes, ep_size, capacity_factor))
    wanted = sorted(pair for result in results for pair in result[0])
    seen = sorted(pair for result in results for pair in result[1])
    assert len(set(wanted)) == len(wanted)
    assert (len(wanted) == 2 * sum(sizes)) == (capacity_factor is None)
    assert seen == wanted
    for rank, (_, mine, error) in enumerate(results):
        own = 8 // ep_size
        assert {expert // own for *_, expert in mine} <= {rank % ep_size}
        assert {sender // ep_size for sender, *_ in mine} <= {rank // ep_size}
        assert error < 1e-12


# --- bytes, loads, memory --------------------------------------------------------------------


@pytest.mark.parametrize(("n", "ep_size"), [(2, 2), (4, 2), (4, 4), (8, 4)])
def test_bytes_equal_their_formulas(worlds, n, ep_size):
    """Bytes of tokens from counts, in the first step from a reference; of gradients from shapes."""
    sizes = UNEVEN if n == 4 else even(n)
    results = worlds(n).run(lambda: parallel(ep_size, sizes, steps=2, make=dp.Bucketed))
    twin = loads_of_ranks(sizes)
    experts, rest = ep.parameters_per_rank(F64, EXPERTS, ep_size)
    row_bytes = F64.hidden * 8
    for rank, (_, _, final, sent, loads) in enumerate(results):
        block = slice(rank // ep_size * ep_size, (rank // ep_size + 1) * ep_size)
        assert loads == [ep.Load(load.chosen[block], load.kept[block]) for load in twin]
        for counted, now in sent:
            assert counted == {
                "ep": sum(ep.wire_bytes(load, rank % ep_size, row_bytes) for load in now),
                "dp": dp.wire_bytes(8 * rest, n),
                "edp": dp.wire_bytes(8 * experts, n // ep_size),
            }
        assert sum(weight.numel() for weight in final.values()) == experts + rest
    pairs = 2 * SEQ * BATCH * F64.layers
    assert sum(sum(load.by_expert) for load in twin) == pairs
    total = sum(result[3][0][0]["ep"] for result in results)
    assert 0.8 < total / (Fraction(ep_size - 1, ep_size) * 4 * pairs * row_bytes) < 1.2


def test_an_even_load_sends_what_shapes_say(worlds):
    """Token t of each rank wants experts t and t + 1: the closed form, without any counts."""

    def rank(ep_size):
        mesh = make_mesh(ep=ep_size)
        layer = ep.parallelize(build(experts=16), mesh.ep, mesh.dp_cp).blocks[0].ffn
        layer.router.weight.data = torch.eye(16, dtype=torch.float64)
        x = 9 * torch.eye(16, dtype=torch.float64)
        x = (x + 0.5 * x.roll(1, 1)).requires_grad_()
        layer(x).sum().backward()
        return mesh.ledger.wire_bytes("ep"), ep.imbalance(layer.load.by_rank)

    for ep_size in (2, 4):
        formula = ep.even_wire_bytes(tokens=16, top_k=2, row_bytes=16 * 8, n=ep_size)
        assert list(worlds(4).run(rank, ep_size)) == [(formula, 1.0)] * 4


def test_nothing_else_travels(worlds):
    """Four all-to-alls a layer and step; counts stand on the control line."""

    def rank():
        mesh = make_mesh(ep=2)
        model = ep.parallelize(build(), mesh.ep, mesh.dp_cp)
        ep.loss_sum(model, COEFFICIENT)(*share(0, UNEVEN, mesh.rank))[0].backward()
        return [
            (record.axis, record.op, record.control)
            for record in mesh.ledger.records
        ]  # fmt: skip

    counts = [("ep", "all_gather", True), ("dp", "all_reduce", True)]
    there_and_back = [("ep", "all_to_all", False)] * 2
    for calls in worlds(4).run(rank):
        assert calls == (counts + there_and_back) * 2 + there_and_back * 2


def test_memory_equals_its_formulas(worlds):
    """The busiest rank keeps the most; parameters, gradients and Adam's state are E/n of them."""

    def rank(ep_size, family):
        config = ModelConfig(**SMALL, family=family)
        mesh = make_mesh(ep=ep_size)
        model = ep.parallelize(build(config), mesh.ep, mesh.dp_cp)
        layer = model.blocks[0].ffn
        x = rows_of([40] * 4, mesh.rank).float().requires_grad_()
        with SavedActivations(layer) as saved:
            y = layer(x)
        formula = ep.saved_per_layer(config, 40, layer.load, mesh.ep.rank, layer.top_k)
        kept, rows = saved.now, layer.load.by_rank
        assert y.grad_fn is not None
        adam = torch.optim.AdamW(model.parameters())
        ep.loss_sum(model, COEFFICIENT)(*share(0, even(4), mesh.rank))[0].backward()
        adam.step()
        state, tensors = state_bytes(model, adam), len(list(model.parameters()))
        count = 4 * sum(ep.parameters_per_rank(config, EXPERTS, ep_size))
        assert (state.parameters, state.gradients) == (count, count)
        assert state.optimizer == 2 * count + 4 * tensors
        return kept, formula, rows[mesh.ep.rank]

    for ep_size, family in ((4, "llama"), (2, "gpt")):
        results = worlds(4).run(rank, ep_size, family)
        assert all(kept == formula for kept, formula, _ in results)
        assert max(results)[2] == max(rows for *_, rows in results)
        assert min(results)[0] < max(results)[0], "an even load would hide what depends on it"


# --- beside torch's own: it has no expert-parallel layer, so beside one written in its pieces -----


def raw_torch_layer(x, router, gate, up, down, top_k, group):
    """x (T, D); router (E, D); gate, up (e, F, D) and down (e, D, F) of this rank's experts."""
    import torch.distributed as dist
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    n, own = group.size(), len(gate)
    weights, experts = torch.softmax(x @ router.T, -1).topk(top_k)
    weights = weights / weights.sum(-1, keepdim=True)
    order = experts.flatten().argsort(stable=True)  # pairs token by token
    counts = experts.flatten().bincount(minlength=n * own)
    incoming = torch.empty_like(counts)
    dist.all_to_all_single(incoming, counts, group=group)
    sends, receives = (c.view(n, own).sum(1).tolist() for c in (counts, incoming))
    arrived = all_to_all_single_autograd(x[order // top_k], receives, sends, group)
    wanted = torch.arange(own).repeat(n).repeat_interleave(incoming)
    by_expert = wanted.argsort(stable=True)
    ends = incoming.view(n, own).sum(0).cumsum(0).to(torch.int32)
    rows = arrived[by_expert]
    mm = torch.nn.functional.grouped_mm
    inner = torch.nn.functional.silu(mm(rows, gate.transpose(1, 2), offs=ends))
    done = mm(inner * mm(rows, up.transpose(1, 2), offs=ends), down.transpose(1, 2), offs=ends)
    back = torch.empty_like(done).index_copy(0, by_expert, done)
    home = all_to_all_single_autograd(back, sends, receives, group)
    pairs = torch.empty_like(home).index_copy(0, order, home).view(len(x), top_k, -1)
    return (pairs * weights[..., None]).sum(1)


def test_equals_a_layer_of_torch_s_own_pieces(worlds):
    """all_to_all_single_autograd and grouped_mm, which knows float32 and less."""

    def rank():
        mesh = make_mesh(ep=4)
        layer = ep.parallelize(build(ModelConfig(**SMALL)), mesh.ep, mesh.dp_cp).blocks[0].ffn
        sizes = [16, 4, 12, 32]
        x, weight = (rows_of(sizes, mesh.rank, seed=seed).float() for seed in (0, 1))
        stacked = [
            torch.stack([getattr(e, name).weight.detach() for e in layer.experts.values()])
            for name in ("gate", "up", "down")
        ]
        leaves = [t.clone().requires_grad_() for t in (x, layer.router.weight.detach(), *stacked)]
        peer = raw_torch_layer(*leaves, 2, mesh.ep.group)
        (peer * weight).sum().backward()
        values, gradients = backward(layer, x, weight, 1e30)  # no auxiliary loss to speak of
        ours = {"y": values["y"], "x": values["x"], "router": gradients["router.weight"]} | {
            name: torch.stack([gradients[f"experts.{e}.{name}.weight"] for e in layer.experts])
            for name in ("gate", "up", "down")
        }
        names = ("x", "router", "gate", "up", "down")
        theirs = {name: leaf.grad for name, leaf in zip(names, leaves, strict=True)}
        return ours, theirs | {"y": peer.detach()}

    for ours, theirs in worlds(4).run(rank):
        assert_equal(ours, theirs, 5e-6, "our layer beside torch's pieces")


# --- what does not fit -----------------------------------------------------------------------


def test_a_norm_of_gradients_that_are_not_here_is_refused(worlds):
    """Under ZeRO they are in shards: a norm of 0 would clip nothing. Under tp they are parts."""

    def rank():
        mesh = make_mesh(ep=2)
        model = ep.parallelize(build(), mesh.ep, mesh.dp_cp)

        def shards(parameters, axis):
            return zero.Zero2(parameters, axis, torch.optim.AdamW)

        sync = ep.ExpertSync(model, shards, ep=mesh.ep, edp=mesh.edp, data=mesh.dp_cp)
        ep.loss_sum(model, COEFFICIENT)(*share(0, even(4), mesh.rank))[0].backward()
        sync.finish()
        with pytest.raises(ValueError, match=r"have no gradient .*under ZeRO ask"):
            sync.clip(0.1)
        model = build()
        tp.parallelize(model, mesh.dp, plan={"blocks.*.attn.q": tp.plan.column})
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with pytest.raises(ValueError, match="sharded over axis dp, .* over axes: ep"):
            comm.grad_norm(comm.held_gradients(model.parameters()), [mesh.ep])

    worlds(4).run(rank)


def test_what_does_not_fit_is_named(worlds):
    def rank():
        mesh = make_mesh(ep=2)
        said = []
        attempts = [
            lambda: ep.parallelize(build(experts=3), mesh.ep, mesh.dp_cp),
            lambda: ep.parallelize(build(), mesh.dp_cp, mesh.edp),
            lambda: ep.parallelize(build_model(F64), mesh.ep, mesh.dp_cp),
            lambda: ep.parallelize(
                ep.parallelize(build(), mesh.ep, mesh.dp_cp), mesh.ep, mesh.dp_cp
            ),
            lambda: comm.clip_grad_norm([], [mesh.ep], 0),
        ]
        for attempt in attempts:
            try:
                attempt()
            except ValueError as error:
                said.append(str(error))
        return said

    for said in worlds(4).run(rank):
        assert len(said) == 5
        assert "3 experts cannot be shared by the 2 ranks of axis ep" in said[0]
        assert "of axis dp are not all among" in said[1]
        assert "no experts: call add_experts" in said[2]
        assert "divided among ranks already" in said[3]
        assert "max_norm=0" in said[4]


# --- the classic bugs, each of which must be caught by the comparisons above ------------------


class DividedByData(ep.ExpertSync):
    """Averages where the loss was divided already."""

    def finish(self):
        super().finish()
        for parameter in ep.expert_parameters(self.model):
            parameter.grad /= self.axis.size


class SummedOverAllData(ep.ExpertSync):
    """Adds the gradients of different experts, which happen to have one shape."""

    def __init__(self, model, make, *, ep, edp, data):
        super().__init__(model, make, ep=ep, edp=data, data=data)


class ExpertsNotSummed(ep.ExpertSync):
    """Takes what came back through dispatch for all there is."""

    def finish(self):
        self.syncs[0].finish()


class RouterNotSummed(ep.ExpertSync):
    """Replicated, but each rank has seen its own tokens only."""

    def finish(self):
        own = [p.grad for layer in ep.moe_layers(self.model) for p in layer.router.parameters()]
        super().finish()
        for layer, grad in zip(ep.moe_layers(self.model), own, strict=True):
            layer.router.weight.grad = grad


@pytest.mark.parametrize(
    ("sync", "part", "factor"),
    [
        (DividedByData, "experts", 1 / 4),
        (SummedOverAllData, "experts", None),
        (ExpertsNotSummed, "experts", None),
        (RouterNotSummed, "router", None),
    ],
)
def test_wrong_sums_are_caught(worlds, sync, part, factor):
    twin = serial(steps=1)
    results = worlds(4).run(lambda: parallel(2, UNEVEN, steps=1, sync=sync, make=dp.Bucketed))
    with pytest.raises(AssertionError):
        check(results, twin)
    for result in results:
        got = {name: grad for name, grad in result[1].items() if part in name}
        want = {name: twin[1][name] for name in got}
        assert worst_error(got, want)[0] > 0.1
        assert factor is None or projection(got, want) == pytest.approx(factor)
        rest = {name: grad for name, grad in result[1].items() if part not in name}
        assert_equal(rest, {name: twin[1][name] for name in rest}, 1e-12, "all other gradients")


def in_expert_order(rows_PD, pairs_P, weights_KT):
    """Rows as they came back, taken for rows in the order of tokens."""
    return (rows_PD.unflatten(0, weights_KT.shape) * weights_KT[..., None]).sum(0)


def weighted_twice(self, x_TD, routes, load):
    """On dispatch, and again where the rows come home."""
    sends, receives, blocks = parallel_moe.splits(load, self.ep.rank)
    pairs_P = parallel_moe.sorted_by_expert(routes.experts_KT, sum(sends))
    rows_PD = x_TD[pairs_P % len(x_TD)] * routes.weights_KT.flatten()[pairs_P, None]
    done = self.own_experts(comm.all_to_all_v(rows_PD, self.ep, sends, receives), blocks)
    returned_PD = comm.all_to_all_v(done, self.ep, receives, sends)
    return parallel_moe.combine(returned_PD, pairs_P, routes.weights_KT)


right_route = serial_moe.route


def not_renormalised(logits_TE, top_k, capacity=None):
    """The probabilities themselves, where serial has shared out what is left."""
    routes = right_route(logits_TE, top_k, capacity)
    probabilities_TE = logits_TE.softmax(-1)
    return serial_moe.Routes(
        routes.experts_KT,
        probabilities_TE.gather(1, routes.experts_KT.t()).t(),
        routes.chosen_E,
        routes.probability_E,
    )


def ungrouped(self, arrived_AD, blocks):
    """Rows arrive by rank, then by expert, and are taken for rows by expert."""
    parts = arrived_AD.split(
        [sum(blocks[i :: len(self.experts)]) for i in range(len(self.experts))]
    )
    experts = self.experts.values()
    return torch.cat([expert(rows) for expert, rows in zip(experts, parts, strict=True)])


def own_counts(self, chosen_E):
    """Shares of this rank's tokens, not of the batch."""
    return chosen_E


right_forward = ep.MoE.forward


def mean_of_means(self, x):
    """Each rank's mean counts alike, however many tokens it has."""
    y = right_forward(self, x)
    tokens = torch.tensor(float(len(x)))
    everyone = comm.all_reduce(tokens, self.data)
    self.auxiliary = self.auxiliary * float(everyone / (self.data.size * tokens))
    return y


LAYER = parallel_moe.ExpertParallelMoE
BUGS = {  # what is wrong, and by how much of the largest number at least
    "tokens in expert order": (parallel_moe, "combine", in_expert_order, 1.0),
    "not grouped by expert": (LAYER, "own_experts", ungrouped, 1.0),
    "weighted twice": (LAYER, "through_experts", weighted_twice, 0.3),
    "not renormalised": (serial_moe, "route", not_renormalised, 0.5),
    "counts of own tokens": (LAYER, "over_all_tokens", own_counts, 0.03),
    "mean of means": (LAYER, "forward", mean_of_means, 0.03),
}


@pytest.mark.parametrize("bug", BUGS)
def test_wrong_layers_are_caught(worlds, bug):
    sizes, (*place, replacement, much) = [3, 16, 8, 21], BUGS[bug]
    with mock.patch.dict(globals(), COEFFICIENT=5.0):
        want = serial_layer(sizes)
        patch = lambda: mock.patch.object(*place, replacement)  # noqa: E731
        results = worlds(4).run(lambda: rank_layer(sizes, 2, patch=patch))
    with pytest.raises(AssertionError):
        check_layer(results, want)
    in_the_loss_alone = bug in ("counts of own tokens", "mean of means")
    for rank, (got, gradients, *_) in enumerate(results):
        name = "router.weight" if in_the_loss_alone else "y"
        mine, reference = (gradients, want[1]) if in_the_loss_alone else (got, want[0][rank])
        assert worst_error({name: mine[name]}, {name: reference[name]})[0] > much
        if in_the_loss_alone:
            assert_equal({"y": got["y"]}, {"y": want[0][rank]["y"]}, 1e-12, "outputs")


def test_capacity_over_the_tokens_of_all_ranks_is_caught(worlds):
    def too_much_room(self, x_TD):
        with mock.patch.object(self, "capacity_factor", self.capacity_factor * self.ep.size):
            return right_routing(self, x_TD)

    right_routing = ep.MoE.route
    patch = lambda: mock.patch.object(LAYER, "route", too_much_room)  # noqa: E731
    sizes, options = [5, 16, 0, 11], {"experts": 8, "capacity_factor": 0.5}
    with mock.patch.dict(globals(), COEFFICIENT=0.0):
        want = serial_layer(sizes, by_rank=True, **options)
        results = worlds(4).run(lambda: rank_layer(sizes, 2, patch=patch, **options))
    with pytest.raises(AssertionError):
        check_layer(results, want)
    assert worst_error(results[1][0], want[0][1])[0] > 0.1


def test_backward_with_the_counts_of_forward_is_refused(worlds):
    """Gradients of rows that came would be sent by the counts of rows that went."""

    def not_swapped(x, axis, send_counts, receive_counts):
        move = lambda t, a: exchange_rows(t, a, send_counts, receive_counts)  # noqa: E731
        return comm.operators._Pair.apply(x, axis, move, move)

    def rank():
        patch = lambda: mock.patch.object(comm, "all_to_all_v", not_swapped)  # noqa: E731
        try:
            rank_layer([5, 20], 2, patch=patch)
        except ValueError as error:
            return str(error)

    for said in worlds(2).run(rank):
        assert "send_counts" in said
        assert "add up to" in said


def test_clipping_by_each_rank_s_own_experts_is_caught(worlds):
    class OwnNorm(ep.ExpertSync):
        def clip(self, max_norm):
            return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    _, first, _ = serial(steps=1, max_norm=0.1)
    norm = float(torch.stack([g.norm() for g in first.values()]).norm())
    results = worlds(4).run(lambda: parallel(4, even(4), steps=1, max_norm=0.1, sync=OwnNorm))
    clipped = [{name: g * (0.1 / norm) for name, g in first.items() if name in result[1]}
               for result in results]  # fmt: skip
    factors = [projection(r[1], want) for r, want in zip(results, clipped, strict=True)]
    assert min(factors) > 1.001, "the norm of a part is smaller, so all are clipped too little"
    assert max(factors) - min(factors) > 1e-4, "and each rank by another factor"
