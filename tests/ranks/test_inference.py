"""Inference on ranks: tokens of the single-process model, and bytes as by formula."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import cache, partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inference_twin import (
    CHOICES,
    EXPERTS,
    GPT,
    expert_counts,
    make_model,
    recompute,
    requests_of,
    sizes,
    twin,
)

from course_lib import comm, cp, ep, inference, sp, tp
from course_lib.bench import inference as bench
from course_lib.inference import (
    ContextReplica,
    Replica,
    Sampling,
    Scheduler,
    Stage,
    context,
    counts,
)
from course_lib.launch import RankError
from course_lib.mesh import Link, Links, make_mesh

WORLDS = (1, 2, 3, 4, 8)
FAMILIES = {"llama": {}, "gpt-tied": GPT}
families = pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES)
worlds_of = pytest.mark.parametrize("n", WORLDS)
DRAWN = Sampling(0.8, top_k=30, top_p=0.95, seed=2)
SAMPLINGS = [
    None,
    Sampling(1.5, seed=1),
    DRAWN,
    Sampling(top_p=0.9, seed=3),
    Sampling(3.0, top_k=4, seed=4),
    Sampling(9.0, top_k=200, seed=6),  # more than a rank has
]
HOT = Sampling(1000.0, seed=5)  # all tokens alike: padding too, if it were let in


@cache
def drawn_twin(config, sampling):
    """Return tokens of the single-process model; decoding with a cache equals recomputation."""
    model = make_model(config)
    replica = Replica(model, make_mesh(), 5, inference.chooser(model, sampling))
    return inference.serve(replica, Scheduler(requests_of(), 5)).tokens


def cut_model(config, mesh, experts=False):
    """This rank's part of the model: its stage, its share of the matrices, its experts."""
    model = make_model(config, experts)
    if mesh.pp.size > 1:
        model = inference.cut(model, mesh)
    if mesh.tp.size > 1:
        tp.parallelize(model, mesh.tp)
    if experts:
        ep.parallelize(model, mesh.ep, mesh.dp_cp)
    return model


def answer(
    config,
    *,
    slots=2,
    groups=1,
    sampling=None,
    make=None,
    experts=False,
    count=5,
    arrivals=(),
    **mesh_sizes,
):
    """What one rank does: (tokens, bytes it sent by axis, calls, bytes of its cache, steps)."""
    mesh = make_mesh(**mesh_sizes)
    model = cut_model(config, mesh, experts)
    choose = None if sampling is None else inference.chooser(model, sampling)
    coming = dict(enumerate(arrivals))
    known = [replace(r, arrives=coming.get(r.number, 0)) for r in requests_of(count)]
    mine = inference.share(known, mesh.dp)
    if mesh.pp.size > 1:
        server = Stage(model, mesh, slots, choose)
        served = inference.serve_pipeline(server, Scheduler(mine, slots, groups=groups))
    else:
        kind = make or (ContextReplica if mesh.cp.size > 1 else Replica)
        server = kind(model, mesh, slots, choose)
        served = inference.serve(server, Scheduler(mine, slots))
    axes = ("dp", "tp", "pp", "cp", "ep", "dp_cp")
    sent = {axis: mesh.ledger.wire_bytes(axis) for axis in axes}
    return served.tokens, sent, mesh.ledger.calls(), server.cache.nbytes, served.steps


def check(results, want, replicas=1):
    """Every rank has the reference's tokens of its requests, and together they have all."""
    found = {}
    for tokens, *_ in results:
        assert tokens == {number: want[number] for number in tokens}
        assert len(tokens) in (len(want) // replicas, -(-len(want) // replicas))
        found |= tokens
    assert found == want


# --- one technique --------------------------------------------------------------------------


@families
@worlds_of
def test_data_parallel_replicas_send_nothing(worlds, n, changes):
    config = sizes(2, **changes)
    results = worlds(n).run(partial(answer, config, dp=n))
    check(results, twin(config), n)
    for _, sent, calls, cache_bytes, _ in results:
        assert calls == sum(sent.values()) == 0
        assert cache_bytes == inference.cache_bytes(config, 2, 48)


@families
@worlds_of
def test_tensor_parallel(worlds, n, changes):
    config = sizes(n, **changes)
    results = worlds(n).run(partial(answer, config, tp=n))
    check(results, twin(config))
    formula = inference.tp_wire_bytes(config, *counts(requests_of()), n)
    for _, sent, calls, cache_bytes, steps in results:
        assert sent["tp"] == formula
        assert calls == (0 if n == 1 else steps * (2 * config.layers + 2))
        assert cache_bytes == inference.cache_bytes(config, 2, 48, tp=n)


@families
@pytest.mark.parametrize(("n", "groups"), [(2, 1), (2, 2), (3, 2), (3, 5), (4, 4), (8, 8)])
def test_pipeline(worlds, n, groups, changes):
    config = sizes(2, layers=8, **changes)
    results = worlds(n).run(partial(answer, config, pp=n, slots=2 * groups, groups=groups))
    check(results, twin(config))
    total = sum(sent["pp"] for _, sent, *_ in results)
    assert total == inference.pp_wire_bytes(config, *counts(requests_of()), n)
    layers = [8 // n + (rank < 8 % n) for rank in range(n)]
    for own, (*_, cache_bytes, _) in zip(layers, results, strict=True):
        assert cache_bytes == inference.cache_bytes(config, 2 * groups, 48, layers=own)


def test_groups_in_flight_keep_the_stages_busy(worlds):
    """Four requests of four tokens on four stages: 4 x 4 iterations of 4 ticks, or 4 at a time."""

    def ticks(groups):
        mesh = make_mesh(pp=4)
        stage = Stage(inference.cut(make_model(sizes(2, layers=4)), mesh), mesh, 4)
        scheduler = Scheduler(inference.make_requests([[7]] * 4, 4), 4, groups=groups)
        served = inference.serve_pipeline(stage, scheduler)
        busy = sum(span.op == "F" for span in mesh.trace.spans)
        return served.steps, busy

    # One group: four prefills and three decodes of all. Four groups: a prefill, three decodes each.
    assert list(worlds(4).run(ticks, 1)) == [(7 * 4, 7)] * 4
    assert list(worlds(4).run(ticks, 4)) == [(4 * 4 + 3, 16)] * 4


LATE = [3, 0, 40, 1, 7]  # request 2 when all others are over: iterations without any work
WAYS = {
    "dp": (4, {"dp": 4}),
    "tp": (2, {"tp": 2}),
    "pp": (2, {"pp": 2, "groups": 3, "slots": 3}),
    "cp": (2, {"cp": 2}),
    "ep": (2, {"dp": 2, "ep": 2, "experts": True}),
    "dp-pp": (4, {"dp": 2, "pp": 2, "groups": 2, "slots": 4}),
}


@pytest.mark.parametrize("way", WAYS)
def test_requests_that_come_later(worlds, way):
    n, how = WAYS[way]
    config = sizes(2)
    results = worlds(n).run(partial(answer, config, arrivals=LATE, **how))
    check(results, twin(config, how.get("experts", False)), how.get("dp", 1))


@given(st.lists(st.integers(0, 25), min_size=5, max_size=5), st.sampled_from(["tp", "pp"]))
def check_arrivals(worlds, arrivals, way):
    n, how = WAYS[way]
    check(worlds(n).run(partial(answer, sizes(2), arrivals=arrivals, **how)), twin(sizes(2)))


def test_random_arrivals(worlds):
    check_arrivals(worlds)


CONTEXTS = {
    "ring": ContextReplica,
    "gather": partial(ContextReplica, prefill=cp.gather_attention),
    "contiguous": partial(ContextReplica, layout=cp.CONTIGUOUS),
}


@families
@pytest.mark.parametrize(
    ("way", "n"), [*(("ring", n) for n in WORLDS), ("gather", 3), ("contiguous", 4)]
)
def test_context_parallel(worlds, n, way, changes):
    make = CONTEXTS[way]
    config = sizes(2, **changes)
    layout = cp.CONTIGUOUS if way == "contiguous" else cp.ZIGZAG
    results = worlds(n).run(partial(answer, config, make=make, cp=n))
    check(results, twin(config))
    formula = inference.decode_wire_bytes(
        config, sum(r.max_new_tokens - 1 for r in requests_of()), n
    )
    for request in requests_of():
        formula += inference.prefill_wire_bytes(config, len(request.prompt), n, layout)
    for _, sent, _, cache_bytes, _ in results:
        assert sent["cp"] == formula
        assert cache_bytes == inference.cache_bytes(config, 2, 48, cp=n)


def test_rows_of_the_cache_are_shared_out_evenly(worlds):
    def rows():
        mesh = make_mesh(cp=4)
        replica = ContextReplica(make_model(sizes(2)), mesh, 1)
        inference.serve(
            replica, Scheduler([requests_of()[3]], 1)
        )  # 1 + 12 tokens, of which 12 are kept
        return int((replica.cache.positions_NT < context.NOWHERE).sum())

    assert sorted(worlds(4).run(rows)) == [3, 3, 3, 3]


@families
@worlds_of
def test_expert_parallel(worlds, n, changes):
    config = sizes(2, **changes)
    results = worlds(n).run(partial(answer, config, experts=True, dp=n, ep=n))
    check(results, twin(config, True), n)
    shares = [requests_of()[rank::n] for rank in range(n)]
    by_rank = [expert_counts(config, share) for share in shares]
    loads = [
        ep.Load((), tuple(tuple(one[layer]) for one in by_rank)) for layer in range(config.layers)
    ]
    row = config.hidden * config.dtype.itemsize
    for rank, (_, sent, *_) in enumerate(results):
        assert sent["ep"] == sum(ep.wire_bytes(load, rank, row) for load in loads) / 2
        assert sent["dp"] == sent["dp_cp"] == 0
    steps = {steps for *_, steps in results}
    assert len(steps) == 1, "replicas that share experts take every step together"


def test_even_routing_is_the_mean_of_uneven_routing():
    config, tokens = sizes(2), 1000
    even = EXPERTS // 4
    load = ep.Load((), ((tokens * CHOICES // EXPERTS,) * EXPERTS,) * 4)
    assert even * 4 == EXPERTS
    pairs = tokens * CHOICES // EXPERTS * EXPERTS
    want = config.layers * ep.wire_bytes(load, 0, config.hidden * 8) / 2
    assert want == inference.even_ep_wire_bytes(config, Fraction(pairs, CHOICES), CHOICES, 4)


# --- several at once ------------------------------------------------------------------------

TOGETHER = {
    "tp+pp": {"tp": 2, "pp": 2, "slots": 4, "groups": 2},
    "tp4+pp2": {"tp": 4, "pp": 2, "slots": 4, "groups": 2},
    "dp+tp": {"dp": 2, "tp": 2},
    "dp+tp+pp": {"dp": 2, "tp": 2, "pp": 2},
    "tp+cp": {"tp": 2, "cp": 2},
    "dp+cp": {"dp": 2, "cp": 2},
    "dp+pp": {"dp": 2, "pp": 2},
}


@families
@pytest.mark.parametrize("together", TOGETHER.values(), ids=TOGETHER)
def test_techniques_together(worlds, together, changes):
    axes = {name: size for name, size in together.items() if name in ("dp", "tp", "pp", "cp")}
    n = 1
    for size in axes.values():
        n *= size
    config = sizes(axes.get("tp", 2), **changes)
    results = worlds(n).run(partial(answer, config, **together))
    check(results, twin(config), axes.get("dp", 1))
    assert all(sent["dp"] == 0 for _, sent, *_ in results)
    if axes == {"tp": 2, "pp": 2}:
        tokens, chosen = counts(requests_of())
        pp_bytes = sum(sent["pp"] for _, sent, *_ in results)
        assert pp_bytes == 2 * inference.pp_wire_bytes(config, tokens, chosen, 2)
        row = config.hidden * 8
        ends = (tokens * row, inference.sampling_wire_bytes(config, chosen, 2))  # embedding; choice
        for rank, (_, sent, *_) in enumerate(results):
            assert sent["tp"] == config.layers * tokens * row + ends[rank // 2]


@pytest.mark.parametrize("axes", [{"tp": 2, "dp": 2, "ep": 2}, {"cp": 2, "ep": 2}], ids=str)
def test_experts_with_other_axes(worlds, axes):
    config = sizes(2)
    n = axes.get("tp", 1) * axes.get("dp", 1) * axes.get("cp", 1)

    def rank():
        mesh = make_mesh(**axes)
        model = make_model(config, experts=True)
        if mesh.tp.size > 1:  # attention, embedding and LM head are sharded; experts are replicated
            plan = {k: e for k, e in tp.plan_for(model).items() if ".ffn" not in k}
            tp.parallelize(model, mesh.tp, plan=plan)
        ep.parallelize(model, mesh.ep, mesh.dp_cp)
        kind = ContextReplica if mesh.cp.size > 1 else Replica
        mine = inference.share(requests_of(), mesh.dp)
        return (inference.serve(kind(model, mesh, 2), Scheduler(mine, 2)).tokens,)

    check(worlds(n).run(rank), twin(config, True), axes.get("dp", 1))


# --- logits, draws and batchings ------------------------------------------------------------


def test_logits_of_cut_models_equal_full_recomputation(worlds):
    config, request = sizes(3), requests_of()[1]

    def rank(**axes):
        mesh = make_mesh(**axes)
        model, rows = cut_model(config, mesh), []
        plain = inference.chooser(model)

        def keep(logits_BV, work):
            whole = comm.all_gather(logits_BV, mesh.tp, dim=1)[:, : config.vocab]
            rows.append(whole[0])
            return plain(logits_BV, work)

        kind = ContextReplica if mesh.cp.size > 1 else Replica
        inference.serve(kind(model, mesh, 1, keep), Scheduler([request], 1))
        return torch.stack(rows)

    _, want = recompute(make_model(config), request)
    for axes in ({"tp": 3}, {"cp": 3}):
        results = worlds(3).run(partial(rank, **axes))
        for got in results:
            # Under cp only the rank of the last position has the logits that follow the prompt.
            rows = slice(0 if "tp" in axes else 1, None)
            assert float((got[rows] - want[rows]).abs().max() / want.abs().max()) < 1e-12


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_drawn_tokens_are_the_serial_ones(worlds, n, sampling):
    config = sizes(n)
    results = worlds(n).run(partial(answer, config, tp=n, sampling=sampling))
    check(results, drawn_twin(config, sampling))
    formula = inference.tp_wire_bytes(config, *counts(requests_of()), n, sampling)
    assert [sent["tp"] for _, sent, *_ in results] == [formula] * n


@pytest.mark.parametrize("axes", [{"dp": 2}, {"cp": 2}, {"pp": 2}], ids=str)
def test_drawn_tokens_under_other_axes(worlds, axes):
    results = worlds(2).run(partial(answer, sizes(2), sampling=DRAWN, **axes))
    check(results, drawn_twin(sizes(2), DRAWN), axes.get("dp", 1))


def test_padding_of_the_vocabulary_is_never_drawn(worlds):
    config = sizes(4)
    for tokens, *_ in worlds(4).run(partial(answer, config, tp=4, sampling=HOT, count=8)):
        drawn = [token for own in tokens.values() for token in own]
        assert max(drawn) < config.vocab
        assert len(set(drawn)) > len(drawn) // 2


@given(
    order=st.permutations(range(5)),
    slots=st.integers(1, 3),
    groups=st.integers(1, 3),
    axis=st.sampled_from(["tp", "pp", "cp", "dp"]),
)
def test_any_batching_on_two_ranks(worlds, order, slots, groups, axis):
    config = sizes(2)
    requests = [requests_of()[number] for number in order]

    def rank():
        mesh = make_mesh(**{axis: 2})
        model = cut_model(config, mesh)
        mine = inference.share(requests, mesh.dp)
        if axis == "pp":
            scheduler = Scheduler(mine, slots * groups, groups=groups)
            return (inference.serve_pipeline(Stage(model, mesh, slots * groups), scheduler).tokens,)
        kind = ContextReplica if axis == "cp" else Replica
        return (inference.serve(kind(model, mesh, slots), Scheduler(mine, slots)).tokens,)

    check(worlds(2).run(rank), twin(config), 2 if axis == "dp" else 1)


# --- the bench, scaled down -----------------------------------------------------------------


@pytest.mark.parametrize("layout", [bench.Layout(dp=4), bench.Layout(tp=2, pp=2)], ids=str)
def test_layouts_compared_on_paced_ranks(worlds, layout):
    """Counts and bytes are exact; no rank can be faster than its sleeps."""
    links = Links(Link(1e-4, 1e8), Link(1e-3, 1e7), ranks_per_node=2)
    row = bench.compare(worlds(4), layout, links, batch=8, tokens=2)
    assert row["bytes_per_token"] == row["bytes_per_token_formula"]
    assert (row["bytes_per_token"] == 0) == (layout.dp == 4)
    own = 8 / layout.dp / layout.pp
    least = (bench.PACE["F"] + own * bench.PACE["token"]) / (layout.tp * layout.pp) * layout.pp
    assert row["latency_ms"] >= 1e3 * least
    assert row["latency_ms_formula"] >= 1e3 * least
    assert row["tokens_per_second"] <= 8 / least


# --- the classic bugs, and that they are caught ---------------------------------------------


def broken(config, choose_of):
    """Tokens of a tensor-parallel rank whose chooser is made by ``choose_of(mesh, model)``."""
    mesh = make_mesh()
    mesh = make_mesh(tp=mesh.world.size)
    model = cut_model(config, mesh)
    replica = Replica(model, mesh, 5, choose_of(mesh, model))
    return inference.serve(replica, Scheduler(requests_of(), 5)).tokens


def test_ranks_that_draw_by_states_of_their_own_are_caught(worlds):
    """sglang #33549: all logits on every rank, and each rank draws for itself."""
    config = sizes(2)

    def choose_of(mesh, model, apart):
        torch.manual_seed(7 + apart * mesh.rank)

        def choose(logits_BVt, work):
            whole_BV = comm.all_gather(logits_BVt, mesh.tp, dim=1)[:, : config.vocab]
            return torch.multinomial(whole_BV.softmax(-1), 1)[:, 0]

        return choose

    first, second = worlds(2).run(broken, config, partial(choose_of, apart=0))
    assert first == second
    first, second = worlds(2).run(broken, config, partial(choose_of, apart=1))
    assert first != second


def test_noise_by_rank_is_another_text(worlds):
    """Right in distribution, and all ranks agree; but it is not the single-process model's."""
    config, sampling = sizes(2), Sampling(1.5, seed=1)

    def choose_of(mesh, model):
        own = Sampling(1.5, seed=1 + mesh.tp.rank)
        return inference.chooser(model, own)

    first, second = worlds(2).run(broken, config, choose_of)
    assert first == second != drawn_twin(config, sampling)


def test_tokens_numbered_within_the_shard_are_caught(worlds):
    config = sizes(2)

    def choose_of(mesh, model):
        return lambda logits_BVt, work: inference.choose(logits_BVt, work, None, mesh.tp)

    assert all(tokens != twin(config) for tokens in worlds(2).run(broken, config, choose_of))


def test_top_k_of_each_shard_is_caught(worlds):
    config, sampling = sizes(2), Sampling(top_k=2, seed=2)

    def choose_of(mesh, model):
        rows = len(model.head.weight)

        def choose(logits_BVt, work):
            limit_B1 = logits_BVt.topk(2).values[:, -1:]  # of this shard alone
            cut_BVt = logits_BVt.masked_fill(logits_BVt < limit_B1, -torch.inf)
            first = mesh.tp.rank * rows
            return inference.choose(cut_BVt, work, Sampling(seed=2), mesh.tp, first, config.vocab)

        return choose

    want = drawn_twin(config, sampling)
    assert all(tokens != want for tokens in worlds(2).run(broken, config, choose_of))


@pytest.mark.parametrize("bug", ["mean of parts", "kept by all", "contiguous positions"])
def test_mistakes_of_context_parallel_are_caught(worlds, bug):
    config = sizes(2)

    def rank():
        mesh = make_mesh(cp=2)
        replica = ContextReplica(make_model(config), mesh, 2)
        if bug == "mean of parts":
            context.join_parts = lambda parts: parts[..., :-1].mean(0)
        elif bug == "kept by all":  # the new token's K and V on every rank: it counts n times

            def opened(work, plain=replica.cache.open):
                if not work.is_prefill:
                    for slot in work.slots:  # each rank takes itself for the emptiest
                        held = replica.cache.held[slot]
                        held[:] = [held[mesh.cp.rank] + (r != mesh.cp.rank) for r in range(2)]
                return plain(work)

            replica.cache.open = opened
        else:  # a chunk's positions as if the ranks held one after the other

            def opened(work, plain=replica.cache.open):
                tokens, positions = plain(work)
                if work.is_prefill:
                    positions = len(positions) * mesh.cp.rank + torch.arange(len(positions))
                return tokens, positions

            replica.cache.open = opened
            replica.cache.owner = lambda position: 0
            replica.step = partial(wrong_last_row, replica)
        return inference.serve(replica, Scheduler(requests_of(), 2)).tokens

    plain = context.join_parts
    try:
        results = worlds(2).run(rank)
    finally:
        worlds(2).run(lambda: setattr(context, "join_parts", plain))
    assert all(tokens != twin(config) for tokens in results)


def wrong_last_row(replica, work):
    """As ContextReplica.step, reading the row where the last position really is."""
    if not work.is_prefill:
        return Replica.step(replica, work)
    tokens, positions = replica.cache.open(work)
    logits = replica.model(tokens, positions)
    real = replica.cache.positions_NT[work.slots[0]]
    last = (real == work.width - 1).nonzero().flatten().tolist()
    owner = comm.all_reduce(torch.tensor(replica.mesh.cp.rank * bool(last)), replica.mesh.cp)
    row = last[0] if last else 0
    return comm.broadcast(replica.choose(logits[:, row], work), replica.mesh.cp, int(owner))


# --- what does not go together --------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "experts", "said"),
    [
        ({"cp": 2}, False, "take ContextReplica"),
        ({"cp": 2, "pp": 2}, False, "not cut over cp in a pipeline"),
        ({"dp": 2, "pp": 2, "ep": 2}, True, "every tick of one pipeline would wait"),
    ],
)
def test_combinations_that_do_not_work_say_why(worlds, axes, experts, said):
    def rank():
        mesh = make_mesh(**axes)
        model = cut_model(sizes(2), mesh, experts)
        kind = Stage if mesh.pp.size > 1 else Replica
        try:
            kind(model, mesh, 2)
        except ValueError as error:
            return str(error)

    n = 2 if len(axes) == 1 else 4
    assert all(said in text for text in worlds(n).run(rank))


def test_sequence_parallelism_is_refused(worlds):
    def rank():
        mesh = make_mesh(tp=2)
        model = tp.parallelize(make_model(sizes(2)), mesh.tp, sp.REGION)
        try:
            Replica(model, mesh, 1)
        except ValueError as error:
            return str(error)

    assert all("parallelize with tp.REGION" in said for said in worlds(2).run(rank))


def test_a_sequence_that_cannot_be_cut_is_named(worlds):
    def rank():
        mesh = make_mesh(cp=2)
        try:
            ContextReplica(make_model(sizes(2, max_seq_len=46)), mesh, 2)
        except ValueError as error:
            return str(error)

    assert all("max_seq_len=46 cannot be cut into the 4 chunks" in s for s in worlds(2).run(rank))


def test_ranks_with_other_requests_fail_with_a_report(worlds):
    """Ranks of one model must be given the same requests; checked mode says who was not."""

    def rank():
        mesh = make_mesh(tp=2)
        requests = requests_of()[mesh.rank :]
        model = cut_model(sizes(2), mesh)
        return inference.serve(Replica(model, mesh, 5), Scheduler(requests, 5)).tokens

    with pytest.raises(RankError, match="shape"):
        worlds(2).run(rank, checked=True)
