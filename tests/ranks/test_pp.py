"""A pipeline equals one process, whatever the schedule, and its bytes equal the formula."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from equality import assert_bitwise, assert_equal, projection, worst_error
from hypothesis import given
from hypothesis import strategies as st
from pipelines import (
    F64,
    GPT,
    SEQ,
    SMALL,
    TIED,
    WORLDS,
    batches,
    check,
    check_bytes,
    own,
    parallel,
    parallel_twice,
    random_schedule,
    serial,
    tokens_of,
)

from course_lib import comm, pp
from course_lib.data import batch
from course_lib.launch import RankDeadline, RankError
from course_lib.mesh import make_mesh
from course_lib.model import ModelConfig, build_model, loss_sum
from course_lib.schedule import (
    Action,
    ScheduleError,
    from_rows,
    gpipe,
    looped,
    make,
    naive,
    one_f_one_b,
    v_shape,
)
from course_lib.trace import PeakLiveBytes, SavedActivations

NAMES = ("naive", "gpipe", "1f1b")
V_BY_HAND = from_rows(
    [
        "0F0 0F1 3F0 3B0 0F2 3F1 3B1 0B0 3F2 3B2 0B1 0B2".split(),
        "1F0 2F0 1F1 2F1 2B0 1B0 1F2 2F2 2B1 1B1 2B2 1B2".split(),
    ],
    "V by hand",
)
LAST_FIRST = from_rows(  # backwards in reverse order, as the GPipe paper draws it
    [
        "0F0 0F1 0F2 0B2 0B1 0B0".split(),
        "1F0 1F1 1F2 1B2 1B1 1B0".split(),
    ],
    "last first",
)
# Rank 0 sends all it has before it takes a gradient, rank 1 takes one input at a time: on a
# network where a send blocks the next messages this hangs unless receives are posted in time.
UNEVEN = from_rows(
    [
        "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3".split(),
        "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3".split(),
    ],
    "uneven",
)


# --- equal to one process -------------------------------------------------------------------


@pytest.mark.parametrize("p", WORLDS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("config", "tolerance"), [(F64, 0), (GPT, 1e-14)], ids=["llama", "gpt"])
def test_equals_serial(worlds, name, p, config, tolerance):
    schedule = make(name, p, 4)
    results = worlds(p).run(parallel, schedule, config)
    check(results, serial(config, 4), tolerance)
    check_bytes(results, schedule, config)
    if config.tied:
        assert_bitwise({TIED: results[0][2][TIED]}, {TIED: results[-1][2][TIED]}, "tied copies")


@pytest.mark.parametrize("m", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_micro_batches(worlds, name, m):
    schedule = make(name, 4, m)
    results = worlds(4).run(lambda: parallel(schedule, F64, steps=1))
    check(results, serial(F64, m, steps=1))
    check_bytes(results, schedule, F64)


CUSTOM = [
    (gpipe(2, 3, chunks=2), 0),
    (gpipe(4, 5, chunks=2), 0),
    (naive(2, 3, chunks=3), 0),
    (V_BY_HAND, 0),
    (UNEVEN, 0),
    (LAST_FIRST, 1e-13),  # gradients are added in another order
]


@pytest.mark.parametrize(
    ("schedule", "tolerance"), CUSTOM, ids=lambda case: getattr(case, "name", "")
)
def test_chunks_and_rows_of_ones_own(worlds, schedule, tolerance):
    m = schedule.microbatches
    for config in (F64, GPT):
        results = worlds(schedule.ranks).run(parallel_twice, schedule, config)
        check(results, serial(config, m, steps=2), tolerance or (1e-14 if config.tied else 0))
        check_bytes(results, schedule, config)


def test_uneven_layers(worlds):
    schedule = one_f_one_b(3, 4)
    results = worlds(3).run(lambda: parallel(schedule, F64, layers=[1, 5, 2]))
    check(results, serial(F64, 4))
    assert sum("attn.q" in name for name in results[1][2]) == 5


def test_in_checked_mode(worlds):
    schedule = one_f_one_b(4, 5)
    results = worlds(4).run(lambda: parallel(schedule, GPT, steps=2), checked=True)
    check(results, serial(GPT, 5, steps=2), 1e-14)


@pytest.mark.parametrize(
    "frozen", [("embedding.",), ("embedding.", "blocks.0", "blocks.1", "blocks.2")]
)
def test_frozen_parameters(worlds, frozen):
    """In the second case nothing of the first stage is trained, and half of the next one."""
    for config in (F64, GPT):
        results = worlds(4).run(parallel_twice, one_f_one_b(4, 3), config, frozen)
        check(results, serial(config, 3, steps=2, frozen=frozen), 1e-13)
        assert TIED not in results[0][1]


def test_gradients_are_added_to_those_that_are_there(worlds):
    def rank():
        mesh = make_mesh(pp=4)
        schedule, model = one_f_one_b(4, 2), build_model(GPT, seed=3)
        stages = pp.make_stages(model, schedule, mesh.pp.rank)
        tokens = tokens_of(batches(2))
        for _ in range(2):
            pp.run(schedule, stages, mesh, batches(2), lambda y, t: loss_sum(y, t)[0] / tokens)
        return {name: p.grad / 2 for name, p in own(model, stages).items()}

    first = serial(GPT, 2, steps=1)[1]
    for got in worlds(4).run(rank):
        assert_equal(got, {name: first[name] for name in got}, 1e-13, "half of two gradients")


placements = st.sampled_from(
    [
        *(looped(2), looped(3), looped(4), looped(2, 2), looped(3, 2), v_shape(2), v_shape(3)),
        *((0, 0, 1), (0, 1, 1, 0, 2), (1, 0, 1)),
    ]
)
shapes = st.fixed_dictionaries(
    {
        "heads": st.sampled_from([2, 4]),
        "ffn": st.integers(3, 20),
        "tied": st.booleans(),
        "family": st.sampled_from(["llama", "gpt"]),
    }
)


@given(
    shape=shapes,
    placement=placements,
    m=st.integers(1, 6),
    seed=st.integers(0, 2**20),
    extra=st.lists(st.integers(0, 5), max_size=3),
)
def test_any_legal_schedule_shape_and_split(worlds, shape, placement, m, seed, extra):
    schedule = random_schedule(seed, placement, m)
    layers = [1] * len(placement)
    for stage in extra:
        layers[stage % len(placement)] += 1
    config = ModelConfig(
        **shape, layers=sum(layers), hidden=16, kv_heads=2, max_seq_len=SEQ, dtype=torch.float64
    )
    results = worlds(schedule.ranks).run(lambda: parallel(schedule, config, steps=2, layers=layers))
    check(results, serial(config, m, steps=2), 1e-12)
    check_bytes(results, schedule, config)


# --- messages -------------------------------------------------------------------------------


def test_bytes_of_a_placement():
    assert pp.wire_bytes(one_f_one_b(4, 8), 100, 7) == 2 * 3 * 100 + 2 * 7
    assert pp.wire_bytes(gpipe(4, 8, chunks=2), 100, 7) == 2 * 7 * 100 + 2 * 7
    assert pp.wire_bytes(V_BY_HAND, 100, 7) == 2 * 2 * 100  # the two ends share a rank
    assert pp.wire_bytes(gpipe(1, 8, chunks=2), 100, 7) == 0


def in_order(exchange, axis, sends, receives):
    """A batch is over before anything else goes on, as in the stream of a group on nccl."""
    flight = exchange(axis, sends, receives)
    flight.wait()
    return flight


def received_first(exchange, axis, sends, receives):
    """Swapped: what is received is waited for before the result is sent."""
    received = exchange(axis, [], receives)
    received.wait()
    return comm.Exchange(exchange(axis, sends, []).sends, received.receives)


HALVED = [make(name, 2, 4) for name in ("zb-h1", "zb-v", "dualpipe-v")]
ON_TWO = [one_f_one_b(2, 4), gpipe(2, 3), V_BY_HAND, UNEVEN, gpipe(2, 3, chunks=2), *HALVED]


def with_exchange(replacement, schedules):
    """Run ``schedules`` with messages exchanged in another way."""
    original = comm.start_exchange
    comm.start_exchange = lambda *batch: replacement(original, *batch)
    try:
        return [parallel(schedule, F64, steps=1) for schedule in schedules]
    finally:
        comm.start_exchange = original


def test_messages_that_block_their_rank_do_not_hang(worlds):
    """gloo lets later messages pass earlier ones, nccl does not: here nothing passes."""
    results = worlds(2).run(with_exchange, in_order, ON_TWO, timeout=30)
    for schedule, *ranks in zip(ON_TWO, *results, strict=True):
        check(ranks, serial(F64, schedule.microbatches, steps=1))


@pytest.mark.parametrize("seed", range(3))
def test_nor_does_any_legal_schedule(worlds, seed):
    """Some of their backwards are split."""
    schedule = random_schedule(seed, v_shape(4), 5)
    results = worlds(4).run(with_exchange, in_order, [schedule], timeout=30)
    check([ranks[0] for ranks in results], serial(F64, 5, steps=1), 1e-13)


def test_a_swapped_send_and_recv_is_reported_as_a_deadlock(worlds):
    with pytest.raises(RankDeadline, match="2 of 2 ranks had not returned"):
        worlds(2).run(with_exchange, received_first, ON_TWO[:1], timeout=3)


@pytest.mark.parametrize("name", ["gpipe", "zb-v"])
def test_a_step_ends_when_all_its_messages_are_received(worlds, name):
    """A wait writes the span of its message."""
    schedule = make(name, 2, 3)

    def rank():
        mesh = make_mesh(pp=2)
        stages = pp.make_stages(build_model(F64), schedule, mesh.pp.rank)
        pp.run(schedule, stages, mesh, batches(3), lambda y, t: loss_sum(y, t)[0])
        waited = [span.op for span in mesh.trace.spans if span.op in ("send", "recv")]
        return sorted(waited), sorted(record.op for record in mesh.ledger.records)

    for waited, posted in worlds(2).run(rank):
        assert waited == posted
        assert posted.count("send") >= 3


def test_the_next_input_is_asked_for_before_this_one_is_computed(worlds):
    """So that it can arrive meanwhile: rank 1 is one receive ahead at each forward but the last."""
    schedule = gpipe(2, 3)

    def rank():
        mesh, asked, at_forward = make_mesh(pp=2), [], []
        stages = pp.make_stages(build_model(F64), schedule, mesh.pp.rank)
        stages[mesh.pp.rank].register_forward_pre_hook(lambda *_: at_forward.append(len(asked)))
        start = comm.start_exchange

        def noted(axis, sends, receives):
            asked.extend(receives)
            return start(axis, sends, receives)

        with mock.patch.object(comm, "start_exchange", noted):
            pp.train_step(
                schedule, stages, mesh, batches(3), torch.optim.SGD(pp.parameters(stages))
            )
        return at_forward

    assert list(worlds(2).run(rank)) == [[0, 0, 0], [2, 3, 3]]


# --- memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule", [naive(4, 6), gpipe(4, 6), one_f_one_b(4, 6), gpipe(4, 3, chunks=2)]
)
def test_no_stage_keeps_more_than_the_schedule_says(worlds, schedule):
    config = ModelConfig(**(SMALL | {"layers": 8}))

    def rank():
        mesh = make_mesh(pp=4)

        def meters(schedule):
            stages = pp.make_stages(build_model(config), schedule, mesh.pp.rank)
            equal = [
                batch(mb, seed=1, batch_size=2, seq_len=SEQ) for mb in range(schedule.microbatches)
            ]
            tokens = [tensor for pair in equal for tensor in pair]
            with SavedActivations(*stages.values(), tokens) as saved:
                outcome = pp.run(schedule, stages, mesh, equal, lambda y, t: loss_sum(y, t)[0])
            assert saved.now == 0
            return outcome.peak_in_flight, saved.peak

        kept, peak = meters(schedule)
        chunks = len(schedule.stages_of(0))
        return kept, peak, meters(naive(4, 1, chunks))[1] / chunks

    for number, (kept, peak, one) in enumerate(worlds(4).run(rank)):
        assert kept == schedule.peak_in_flight()[number]
        if schedule.stages == 4:
            assert peak == kept * one
        else:  # first and last chunk keep other things than those in the middle
            assert peak <= kept * one * 1.5


def test_memory_does_not_grow_with_the_number_of_micro_batches(worlds):
    def rank():
        mesh = make_mesh(pp=4)

        def peak(m):
            schedule = one_f_one_b(4, m)
            stages = pp.make_stages(build_model(F64), schedule, mesh.pp.rank)
            equal = [batch(mb, seed=1, batch_size=2, seq_len=SEQ) for mb in range(m)]
            with PeakLiveBytes() as live:
                pp.run(schedule, stages, mesh, equal, lambda y, t: loss_sum(y, t)[0])
            return live.peak

        return peak(8), peak(24)

    activation = 2 * SEQ * F64.hidden * 8
    for few, many in worlds(4).run(rank):
        assert many - few < activation, "an activation or gradient more for 16 micro-batches more"


# --- what was done, and when ----------------------------------------------------------------


def test_the_trace_has_the_rows(worlds):
    schedule = V_BY_HAND
    results = worlds(2).run(lambda: parallel(schedule, F64, steps=1))
    rows = pp.measured_rows(results.traces)
    done = [tuple(Action(s.op, s.stage, s.mb) for s in row) for row in rows]
    assert tuple(done) == schedule.rows
    assert min(span.start for row in rows for span in row) == 0
    assert all(trace.spans for trace in pp.stage_traces(results.traces))
    assert any(span.is_comm for trace in results.traces for span in trace.spans)
    assert not any(span.is_comm for t in pp.stage_traces(results.traces) for span in t.spans)


# --- beside torch's own ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("m", [4, 6])
def test_equals_torch(worlds, name, m):
    def rank():
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        def mean(logits, targets):
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

        mesh = make_mesh(pp=4)
        tokens, targets = batch(0, seed=7, batch_size=2 * m, seq_len=SEQ)
        schedule = make(name, 4, m)
        ours, theirs = build_model(F64, seed=3), build_model(F64, seed=3)
        stages = pp.make_stages(ours, schedule, mesh.pp.rank)
        cut = list(zip(tokens.chunk(m), targets.chunk(m), strict=True))
        outcome = pp.run(schedule, stages, mesh, cut, lambda y, t: mean(y, t) / m)
        module = pp.make_stages(theirs, schedule, mesh.pp.rank)[mesh.pp.rank]
        stage = PipelineStage(module, mesh.pp.rank, 4, mesh.device)
        kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[name]
        losses = []
        kind(stage, m, loss_fn=mean).step(
            *([tokens] if mesh.pp.rank == 0 else []),
            target=targets if mesh.pp.rank == 3 else None,
            losses=losses,
        )
        if losses:
            assert float(outcome.loss) == pytest.approx(float(torch.stack(losses).mean()), 1e-12)
        their_stages = {mesh.pp.rank: module}
        return (
            {name: p.grad for name, p in own(ours, stages).items()},
            {name: p.grad for name, p in own(theirs, their_stages).items()},
        )

    for got, want in worlds(4).run(rank):
        assert_equal(got, want, 1e-12, "gradients against torch")


# --- bad input ------------------------------------------------------------------------------


def test_layers_that_do_not_add_up():
    model, schedule = build_model(F64), one_f_one_b(3, 2)
    assert pp.partition(8, 3) == [3, 3, 2]
    for stages in (0, 9):
        with pytest.raises(ValueError, match=f"8 layers cannot be split into {stages} stages"):
            pp.partition(8, stages)
    for wrong in ([2, 2, 2], [4, 4], [8, 0, 0]):  # the first: floor division drops two layers
        with pytest.raises(
            ValueError, match=r"expected 3 stages of at least one layer.*8 layers.*got layers="
        ):
            pp.make_stages(model, schedule, 0, wrong)


def test_what_does_not_fit_is_named():
    mesh, model = make_mesh(), build_model(F64)

    def run(schedule, stages=None, m=None):
        stages = pp.make_stages(model, schedule, 0) if stages is None else stages
        m = schedule.microbatches if m is None else m
        return pp.run(schedule, stages, mesh, batches(m), lambda y, t: loss_sum(y, t)[0])

    with pytest.raises(ValueError, match="for 2 ranks, axis pp has 1"):
        run(one_f_one_b(2, 2))
    with pytest.raises(ValueError, match="for 2 micro-batches, got 3"):
        run(gpipe(1, 2), m=3)
    with pytest.raises(ValueError, match=r"holds stages \[0, 1\].*got \[0\].*make_stages\(\)"):
        run(gpipe(1, 2, chunks=2), stages={0: model})
    with pytest.raises(ScheduleError, match="0B0 comes before 0F0"):
        run(from_rows([["0B0", "0F0"]]))
    stages, sgd = pp.make_stages(model, gpipe(1, 1), 0), torch.optim.SGD(model.parameters())
    nothing = [(torch.zeros(1, 2).long(), torch.full((1, 2), -100))]
    with pytest.raises(ValueError, match="every target is -100"):
        pp.train_step(gpipe(1, 1), stages, mesh, nothing, sgd)


def test_a_failing_rank_is_named_and_nobody_hangs(worlds):
    def rank():
        def fails(logits, targets):
            raise ArithmeticError("the loss is no number")

        mesh, schedule = make_mesh(pp=4), one_f_one_b(4, 4)
        pp.run(
            schedule,
            pp.make_stages(build_model(F64), schedule, mesh.pp.rank),
            mesh,
            batches(4),
            fails,
        )

    with pytest.raises(
        RankError, match="rank 3 raised ArithmeticError: the loss is no number"
    ) as caught:
        worlds(4).run(rank, timeout=30)
    assert caught.value.kind == "raised"
    assert sorted(caught.value.standing) == [0, 1, 2]


# --- classic mistakes are caught ------------------------------------------------------------


def one_over_m_dropped(schedule, stages, mesh, micro_batches, optimizer):
    """Every micro-batch's mean, not its share of the step's: m times too large."""
    optimizer.zero_grad()
    mean = lambda y, t: torch.nn.functional.cross_entropy(y.flatten(0, 1), t.flatten())  # noqa: E731
    outcome = pp.run(schedule, stages, mesh, micro_batches, mean)
    optimizer.step()
    return comm.all_reduce(outcome.loss, mesh.pp) / len(micro_batches)


def test_one_over_m_dropped_shows_in_the_projection(worlds):
    results = worlds(2).run(lambda: parallel(gpipe(2, 4), F64, step=one_over_m_dropped, steps=1))
    with pytest.raises(AssertionError):
        check(results, serial(F64, 4, steps=1), 1e-12)
    first = serial(F64, 4, steps=1)[1]
    got = results[0][1]
    assert projection(got, {name: first[name] for name in got}) == pytest.approx(4, rel=0.2)


def test_a_skipped_tied_sum_is_caught(worlds):
    def rank():
        from course_lib.pp import tied

        original = tied._sum_of_both
        tied._sum_of_both = lambda gradient, *_, **__: gradient
        try:
            return parallel(one_f_one_b(4, 4), GPT)
        finally:
            tied._sum_of_both = original

    results = worlds(4).run(rank)
    with pytest.raises(AssertionError):
        check(results, serial(GPT, 4), 1e-14)
    with pytest.raises(AssertionError):
        check_bytes(results, one_f_one_b(4, 4), GPT)
    first, last = ({TIED: result[2][TIED]} for result in (results[0], results[-1]))
    assert worst_error(first, last)[0] > 1e-3, "the copies drift apart"


def test_layers_dropped_by_floor_division_are_caught(worlds):
    def rank():
        original = pp.make_stages

        def floored(model, schedule, rank, layers=None):
            each = len(model.blocks) // schedule.ranks
            stage = model.stage(rank * each, (rank + 1) * each)
            if rank + 1 == schedule.ranks:
                stage.norm, stage.head = model.norm, model.head
            return {rank: stage}

        pp.make_stages = floored
        try:
            return parallel(one_f_one_b(3, 4), F64, steps=1)
        finally:
            pp.make_stages = original

    with pytest.raises(AssertionError):
        check(worlds(3).run(rank), serial(F64, 4, steps=1))
