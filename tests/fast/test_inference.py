"""Inference on one process: the cache equals full recomputation, whatever the batching."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inference_twin import GPT, make_model, recompute, requests_of, sizes, twin

from course_lib import cp, inference
from course_lib.inference import Cache, Replica, Request, Sampling, Scheduler, StaticScheduler, Work
from course_lib.inference.context import attend_part, join_parts
from course_lib.inference.pipeline import Iterations
from course_lib.inference.sampling import choose, gumbel, threshold
from course_lib.mesh import make_mesh
from course_lib.model import causal_attention

CONFIGS = {
    "llama": sizes(2),
    "llama-ungrouped": sizes(2, kv_heads=24),
    "gpt-tied": sizes(2, **GPT),
}


def watched(model, sampling=None):
    """A chooser that keeps the logits of every request, in the order of its tokens."""
    seen, plain = {}, inference.chooser(model, sampling)

    def choose_and_keep(logits_BV, work):
        for number, row in zip(work.requests, logits_BV, strict=True):
            seen.setdefault(number, []).append(row)
        return plain(logits_BV, work)

    return choose_and_keep, seen


def run(config, scheduler, slots, **changes):
    """Serve ``scheduler`` on this process."""
    model = make_model(config)
    return inference.serve(Replica(model, make_mesh(), slots, **changes), scheduler)


# --- cache ----------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("slots", [1, 3, 5])
def test_logits_equal_full_recomputation(config, slots):
    model = make_model(config)
    choose_and_keep, seen = watched(model)
    served = inference.serve(
        Replica(model, make_mesh(), slots, choose_and_keep), Scheduler(requests_of(), slots)
    )
    for request in requests_of():
        tokens, logits = recompute(make_model(config), request)
        assert served.tokens[request.number] == tokens
        error = (torch.stack(seen[request.number]) - logits).abs().max() / logits.abs().max()
        assert float(error) < 1e-12


def test_float32_and_bfloat16_run():
    for dtype in (torch.float32, torch.bfloat16):
        served = run(sizes(2, dtype=dtype), Scheduler(requests_of(), 2), 2)
        assert [len(served.tokens[r.number]) for r in requests_of()] == [6, 9, 3, 12, 1]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_cache_bytes_are_the_formula(config):
    cache = Cache(make_model(config), 3, 20)
    assert cache.nbytes == inference.cache_bytes(config, 3, 20)
    assert Cache(make_model(config), 3).nbytes == inference.cache_bytes(config, 3, 48)
    head = 2 if config.kv_heads == 24 else 48 // 24
    assert inference.cache_bytes(config, 1, 1) == 2 * 2 * config.kv_heads * head * 8


def test_a_position_that_starts_again_at_0_is_seen():
    """The classic: RoPE and learned positions of a decoded token counted from 0."""

    class Restarted(Work):
        def positions_BS(self, device="cpu"):
            return super().positions_BS(device) if self.is_prefill else torch.zeros(1, 1).long()

    for config in CONFIGS.values():
        model, request = make_model(config), requests_of()[1]
        cache, tokens = Cache(model, 1), twin(config)[1]
        text = [*request.prompt, *tokens]
        for kind, equal in ((Work, True), (Restarted, False)):
            with torch.no_grad():
                model(*cache.open(Work((0,), (1,), (request.prompt,), (0,))))
                work = kind((0,), (1,), ((tokens[0],),), (len(request.prompt),))
                logits = model(*cache.open(work))[0, -1]
                want = make_model(config)(torch.tensor([text[: len(request.prompt) + 1]]))[0, -1]
            assert torch.allclose(logits, want, rtol=1e-10, atol=1e-10) == equal


def test_what_the_last_request_left_in_a_slot_is_seen_by_nobody():
    """It is, where the mask is only the length of the batch: the test can fail."""
    config = CONFIGS["llama"]
    long, short = requests_of()[2], Request(7, (5,), 4)
    fresh = run(config, Scheduler([short], 1), 1).tokens[7]
    assert run(config, Scheduler([long, short], 1), 1).tokens[7] == fresh

    model = make_model(config)
    replica = Replica(model, make_mesh(), 2)
    for layer in replica.cache.layers:
        layer.keys_NTGK.normal_()
        layer.values_NTGK.normal_()
    assert inference.serve(replica, Scheduler([short], 1)).tokens[7] == fresh

    opened = replica.cache.open

    def sees_all(work):  # every row up to the end of the slot
        tokens, positions = opened(work)
        replica.cache.end = replica.cache.capacity
        replica.cache.positions_BS = torch.full_like(positions, replica.cache.capacity - 1)
        return tokens, positions

    replica.cache.open = sees_all
    assert inference.serve(replica, Scheduler([short], 1)).tokens[7] != fresh


def test_a_model_has_several_caches_and_is_what_it_was_when_they_are_left():
    config, longer = CONFIGS["llama"], Request(8, tuple(range(9)), 5)
    model = make_model(config)
    first, second = Replica(model, make_mesh(), 2), Replica(model, make_mesh(), 5)
    inference.serve(second, Scheduler([longer], 5))
    assert inference.serve(first, Scheduler(requests_of(), 2)).tokens == twin(config)
    tokens_BS = torch.randint(config.vocab, (2, 7))
    assert torch.equal(model(tokens_BS), make_model(config)(tokens_BS))
    assert {block.attn.core for block in model.blocks} == {causal_attention}
    first.cache.open(Work((0,), (0,), ((1,),), (0,)))
    third = Replica(model, make_mesh(), 5)  # made while another one is in the model
    assert inference.serve(third, Scheduler(requests_of(), 5)).tokens == twin(config)
    assert {block.attn.core for block in model.blocks} == {causal_attention}


# --- batching -------------------------------------------------------------------------------


@given(
    order=st.permutations(range(5)),
    slots=st.integers(1, 6),
    kind=st.sampled_from([Scheduler, StaticScheduler]),
)
def test_any_batching_gives_the_same_tokens(order, slots, kind):
    config = CONFIGS["llama"]
    requests = [requests_of()[number] for number in order]
    assert run(config, kind(requests, slots), slots).tokens == twin(config)


def test_continuous_batching_needs_fewer_steps():
    requests = inference.make_requests([[1]] * 8, [2, 9] * 4)
    steps = {
        kind: run(CONFIGS["llama"], kind(requests, 2), 2).steps
        for kind in (Scheduler, StaticScheduler)
    }
    # Static: four pairs, two prefills and eight decodes each. Continuous: 4 x (1 + 8) tokens are
    # decoded in two slots, of which one is empty in the last two steps.
    assert steps == {Scheduler: 8 + (4 * (1 + 8) + 2) // 2, StaticScheduler: 4 * (2 + 8)}


def test_a_stop_token_ends_a_request():
    config = CONFIGS["llama"]
    stop = twin(config)[3][4]
    tokens = run(config, Scheduler(requests_of(), 2, stop=stop), 2).tokens
    for number, full in twin(config).items():
        end = full.index(stop) + 1 if stop in full else len(full)
        assert tokens[number] == full[:end]


def test_a_book_hands_out_prefills_and_decodes():
    scheduler = Scheduler([Request(4, (7, 8), 2), Request(6, (9,), 1)], 2)
    first = scheduler.next_work()
    assert first == Work((0,), (4,), ((7, 8),), (0,))
    assert first.is_prefill
    assert first.end == 2
    scheduler.record(first, [11])
    scheduler.record(scheduler.next_work(), [12])  # request 6 is over at once
    last = scheduler.next_work()
    assert last == Work((0,), (4,), ((11,),), (2,))
    assert not last.is_prefill
    scheduler.record(last, [13])
    assert scheduler.done
    assert scheduler.tokens == {4: [11, 13], 6: [12]}
    assert not scheduler.next_work()


def test_a_request_that_comes_later_joins_those_that_run():
    """By iteration: no request, the first comes, decodes, the second joins it."""
    scheduler, works = (
        Scheduler([Request(0, (7,), 4, arrives=3), Request(1, (8, 9), 2, arrives=1)], 2),
        [],
    )
    while not scheduler.done:
        works.append(scheduler.next_work())
        scheduler.record(works[-1], [5] * len(works[-1].slots))
    assert [work.requests for work in works] == [(), (1,), (1,), (0,), (0,), (0,), (0,)]
    assert [work.is_prefill for work in works] == [False, True, False, True] + [False] * 3


@pytest.mark.parametrize("arrivals", [[0, 0, 0, 0, 0], [0, 2, 2, 5, 9], [8, 0, 1, 4, 9]])
def test_continuous_batching_takes_late_requests_in_while_others_run(arrivals):
    config = CONFIGS["llama"]
    coming = [replace(r, arrives=at) for r, at in zip(requests_of(), arrivals, strict=True)]
    served = {kind: run(config, kind(coming, 3), 3) for kind in (Scheduler, StaticScheduler)}
    assert served[Scheduler].tokens == served[StaticScheduler].tokens == twin(config)
    assert served[Scheduler].steps < served[StaticScheduler].steps


def test_latency_and_throughput():
    served = inference.Served({}, start=0.0, times={0: [1.0, 2.0, 4.0], 1: [3.0]})
    assert served.latency == 1.5
    assert served.throughput == 1.0
    assert inference.Served({}).latency == inference.Served({}).throughput == 0.0


@given(groups=st.integers(1, 6), stages=st.integers(1, 5), rounds=st.integers(1, 4))
def test_turns_keep_the_stages_as_busy_as_promised(groups, stages, rounds):
    scheduler = Scheduler(inference.make_requests([[1]] * groups, rounds), groups, groups=groups)
    iterations, busy, tick = Iterations(scheduler, stages), 0, 0
    while not scheduler.done:
        busy += bool(iterations.work(tick))
        over = iterations.over(tick)
        scheduler.record(over, [0] * len(over.slots))
        tick += 1
    assert busy == groups * rounds
    assert tick == (rounds - 1) * max(groups, stages) + groups + stages - 1
    assert inference.busy_share(groups, stages) * max(groups, stages) == groups


# --- choosing -------------------------------------------------------------------------------


def rows(count, vocab=40, seed=0):
    return torch.randn(count, vocab, dtype=torch.float64, generator=torch.manual_seed(seed))


def works(count):
    return Work(tuple(range(count)), tuple(range(count)), ((0,),) * count, tuple(range(count)))


def kept(row, sampling):
    """Tokens that top-k and then top-p leave, by sorting: the definition."""
    order = row.argsort(descending=True)[: sampling.top_k or len(row)]
    shares = row[order].softmax(0)
    total, chosen = 0.0, set()
    for token, share in zip(order.tolist(), shares.tolist(), strict=True):
        if total >= sampling.top_p:
            break
        chosen.add(token)
        total += share
    return chosen


@given(
    seed=st.integers(0, 1000),
    top_k=st.sampled_from([None, 1, 3, 40, 100]),
    top_p=st.sampled_from([0.01, 0.3, 0.9, 1.0]),
)
def test_the_threshold_is_that_of_sorting(seed, top_k, top_p):
    sampling, z = Sampling(top_k=top_k, top_p=top_p), rows(3, seed=seed)
    limits = threshold(z, sampling)
    for row, limit in zip(z, limits, strict=True):
        assert set((row >= limit).nonzero().flatten().tolist()) == kept(row, sampling)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(0.5), Sampling(2.0, top_k=5), Sampling(1.0, top_p=0.7)],
    ids=str,
)
def test_draws_have_the_distribution_of_the_softmax(sampling):
    row, count = 1.5 * rows(1, 12)[0], 20_000
    z = row / sampling.temperature
    allowed = torch.tensor([token in kept(z, sampling) for token in range(12)])
    share = z.masked_fill(~allowed, -torch.inf).softmax(0)
    drawn = choose(row.expand(count, -1), works(count), sampling)
    frequency = torch.bincount(drawn, minlength=12) / count
    assert not frequency[~allowed].any()
    sigma = (share * (1 - share) / count).sqrt()
    assert ((frequency - share).abs() <= 4.5 * sigma + 1e-12).all()


def test_noise_follows_from_seed_request_and_position_alone():
    one = gumbel(Work((0,), (3,), ((7,),), (5,)), 1, 20)
    assert torch.equal(one, gumbel(Work((4,), (3,), ((1, 2),), (4,)), 1, 20))  # same place
    others = [((0,), (2,), ((7,),), (5,)), ((0,), (3,), ((7,),), (6,))]
    assert all(not torch.equal(one, gumbel(Work(*other), 1, 20)) for other in others)
    assert not torch.equal(one, gumbel(Work((0,), (3,), ((7,),), (5,)), 2, 20))
    before = torch.random.get_rng_state()
    gumbel(works(2), 0, 20)
    assert torch.equal(before, torch.random.get_rng_state())


def test_limits_of_sampling_are_greedy():
    z = rows(50)
    for sampling in (Sampling(1e-9), Sampling(top_k=1), Sampling(top_p=1e-9)):
        assert torch.equal(choose(z, works(50), sampling), z.argmax(1))


def test_sampled_text_does_not_depend_on_the_batching():
    config, sampling = CONFIGS["llama"], Sampling(0.8, top_k=20, top_p=0.9, seed=4)
    texts = []
    for slots in (1, 2, 5):
        model = make_model(config)
        choose_drawn = inference.chooser(model, sampling)
        replica = Replica(model, make_mesh(), slots, choose_drawn)
        texts.append(inference.serve(replica, Scheduler(requests_of(), slots)).tokens)
    assert texts[0] == texts[1] == texts[2] != twin(config)


# --- joining parts of attention -------------------------------------------------------------


@given(
    cuts=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    groups=st.sampled_from([1, 2, 4]),
    large=st.sampled_from([1.0, 1e3]),
)
def test_parts_join_to_the_whole(cuts, groups, large):
    torch.manual_seed(sum(cuts))
    whole = sum(cuts) + 1
    q, k, v = (torch.randn(2, whole, h, 6, dtype=torch.float64) for h in (4, groups, groups))
    q = q * large
    want = causal_attention(q, k, v)[:, -1:]
    parts, first = [], 0
    for size in [*cuts, 1]:  # empty parts too
        here = slice(first, first + size)
        seen = torch.ones(2, size, dtype=torch.bool)
        parts.append(attend_part(q[:, -1:], k[:, here], v[:, here], seen))
        first += size
    assert torch.allclose(join_parts(torch.stack(parts)), want, rtol=1e-11, atol=1e-11)
    averaged = torch.stack([part[..., :-1] for part in parts]).mean(0)
    assert len(parts) == 1 or not torch.allclose(averaged, want), "a mean of parts is caught"


# --- errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Request(3, (), 1), "request 3 has an empty prompt"),
        (lambda: Request(3, (1,), 0), "request 3: expected max_new_tokens of 1 or more, got 0"),
        (
            lambda: Request(3, (1,), 1, -1),
            "request 3: expected arrives of 0 or more, got -1; iterations count from 0",
        ),
        (lambda: inference.make_requests([[1], [2]], [1]), "1 values of max_new_tokens for 2"),
        (
            lambda: run(sizes(2), Scheduler([Request(0, (1,) * 49, 1)], 1), 1),
            "max_seq_len=48; shorten",
        ),
        (lambda: run(sizes(2), Scheduler([Request(0, (1,) * 40, 10)], 1), 1), "take 49 positions"),
        (lambda: run(sizes(2), Scheduler([Request(0, (259,), 1)], 1), 1), "token 259 is outside"),
        (lambda: Scheduler([], 5, groups=2), "slots=5 in groups=2.*choose a divisor"),
        (lambda: Scheduler([Request(0, (1,), 1)] * 2, 2), "two requests have the same number"),
        (
            lambda: run(sizes(2), Scheduler(requests_of(), 2), 1),
            "scheduler of 2 slots, but the cache has 1",
        ),
        (
            lambda: run(sizes(2), Scheduler(requests_of(), 2, groups=2), 2),
            "expected a scheduler of 1 group, got 2",
        ),
        (lambda: Sampling(0.0), "expected a temperature from 1e-30 to 1e30, got 0.0.*greedy"),
        (lambda: Sampling(float("nan")), "a temperature .* got nan"),
        (
            lambda: Sampling(1e-39),
            "a temperature .* got 1e-39",
        ),  # all logits above 0 would be infinite
        (
            lambda: Sampling(float("inf")),
            "a temperature .* got inf",
        ),  # padding would be NaN, and win
        (lambda: Sampling(top_k=0), "top_k of 1 or more, .* got 0"),
        (lambda: Sampling(top_p=0.0), "top_p above 0 .* got 0.0"),
        (lambda: Sampling(top_p=1.1), "top_p .* at most 1, got 1.1"),
        (lambda: Cache(make_model(sizes(2)), 0), "slots=0 and capacity=48"),
        (
            lambda: Cache(make_model(sizes(2)), 1, 49),
            "capacity of 1 to max_seq_len=48, got slots=1 and capacity=49",
        ),
        (lambda: Cache(make_model(sizes(2, dropout=0.1)).train(), 1), "call model.eval"),
        (lambda: Replica(make_model(sizes(2)).stage(0, 1), make_mesh(), 1), "this is a stage"),
        (
            lambda: Cache(make_model(sizes(2)), 1, 2).open(Work((0,), (5,), ((1, 2, 3),), (0,))),
            r"requests \[5\] need 3 positions, and a slot has capacity=2",
        ),
    ],
)
def test_bad_input_is_named(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_nothing_to_do_is_done():
    assert run(sizes(2), Scheduler([], 1), 1).tokens == {}


def test_rows_are_shared_out_evenly():
    counts = Counter()
    for request in requests_of():
        length = inference.context.padded(len(request.prompt), 3, cp.ZIGZAG)
        assert length % 6 == 0
        assert length - len(request.prompt) < 6
        counts[length] += 1
    assert counts == {6: 3, 12: 1, 24: 1}
