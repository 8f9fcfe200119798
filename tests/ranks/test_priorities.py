"""Groups of their own overlap, one for everything does not; buckets give way on a shared link.

Asserted on the order of calls and spans, never on a stop-watch: an emulated link does not start a
transfer before the one ahead of it is through.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from course_lib import comm, compose, dp, sp, tp, view
from course_lib.bench import groups as bench
from course_lib.comm.instruments.links import EmulatedLinks
from course_lib.comm.transfer import Call
from course_lib.data import batch
from course_lib.launch.faults import RankError
from course_lib.mesh import Axis, Conditions, Link, Links, RankContext, make_mesh, sub_axis
from course_lib.model import ModelConfig, build_model

BUCKET, SMALL = torch.ones(2000), torch.ones(10)  # 8,000 and 40 bytes
SLOW = Link(alpha=0.001, beta=1e4)  # a bucket takes 800 ms between two ranks
CONFIG = ModelConfig(layers=2, hidden=16, heads=4, kv_heads=4, ffn=32, max_seq_len=8)


def calls(results):
    """The axes of each rank's calls, in the order in which they were made."""
    return [[record.axis for record in ledger.records] for ledger in results.ledgers]


def spans_of(trace, axis):
    return [span for span in trace.spans if span.axis == axis]


# --- groups of their own ------------------------------------------------------------------------


def bucket_and_activations(separate):
    """Gradients and activations of the same ranks, on one group or on two."""
    everyone = make_mesh().dp
    gradients = sub_axis(everyone, everyone.size, "gradients") if separate else everyone
    bucket = comm.start_all_reduce(BUCKET, gradients)
    for _ in range(2):
        comm.all_reduce(SMALL, everyone)
    bucket.wait()


def test_on_one_group_small_calls_stand_behind_the_bucket(worlds):
    """What torchrec #4708 measures on cards: one group is one queue."""
    for trace in worlds(2).run(bucket_and_activations, False, links=Links(SLOW, SLOW)).traces:
        (bucket,) = (span for span in trace.spans if span.payload == BUCKET.nbytes)
        small = [span for span in trace.spans if span.payload == SMALL.nbytes]
        assert all(span.start >= bucket.end for span in small)


def test_on_groups_of_their_own_they_pass_it(worlds):
    for trace in worlds(2).run(bucket_and_activations, True, links=Links(SLOW, SLOW)).traces:
        (bucket,), small = spans_of(trace, "gradients"), spans_of(trace, "dp")
        assert len(small) == 2
        assert all(bucket.start < span.start and span.end < bucket.end for span in small)


def backward(mesh, *, layers=3):
    """Paced layers from last to first: compute, all-reduce over tp; then a bucket for dp."""
    buckets = []
    for layer in range(layers):
        for half in ("attention", "mlp"):
            with mesh.compute("B", label=half):
                pass
            comm.all_reduce(SMALL, mesh.tp)
        buckets.append(comm.start_all_reduce_flat([BUCKET], mesh.dp, label=f"bucket {layer}"))
    return [bucket.wait() for bucket in buckets]


def two_axes():
    backward(make_mesh(tp=2))


def test_a_timeline_has_a_lane_for_each_axis_and_rank_and_shows_the_overlap(worlds, tmp_path):
    conditions = Conditions(pace={"B": 0.03}, links=Links(SLOW, SLOW))
    results = worlds(4).run(two_axes, pace=conditions.pace, links=conditions.links)
    for trace in results.traces:
        bucket, *_ = spans_of(trace, "dp")
        inside = [s for s in spans_of(trace, "tp") if bucket.start < s.start and s.end < bucket.end]
        assert inside, "all-reduces of tp while a bucket of dp travels"
    picture = view.timeline(results.traces, conditions=conditions)
    names = [text.get_text() for text in picture.findobj() if text.get_gid() == "lane"]
    assert names == [name for r in range(4) for name in (f"rank {r}", "dp", "tp")]
    picture.savefig(tmp_path / "axes.png")


# --- a link for all axes ------------------------------------------------------------------------


def axis_of(name, ranks, links, rank=0):
    context = RankContext(rank)
    if links is not None:
        context.instruments = (EmulatedLinks(links),)
    return Axis(name, ranks.index(rank), len(ranks), tuple(ranks), None, context)


def on(context, axis):
    return Axis(axis.name, axis.rank, axis.size, axis.ranks, None, context)


def all_reduce_of(nbytes):
    return Call("all_reduce", "allreduce_", torch.zeros(nbytes, dtype=torch.uint8), lambda _: None)


def occupy(axis, call, issued, arrived):
    (links,) = axis.context.instruments
    return links.occupy(axis, call, issued, arrived)


@pytest.mark.parametrize("shared", [True, False])
def test_transfers_of_two_axes_queue_on_a_shared_link_only(shared):
    links = Links(Link(0.5, 100.0), Link(0.5, 100.0), ranks_per_node=2, shared=shared)
    dp_axis = axis_of("dp", [0, 1], links)
    tp_axis = on(dp_axis.context, axis_of("tp", [0, 1], links))
    call = all_reduce_of(100)  # 2 s
    assert occupy(dp_axis, call, 0.0, 0.0) == (0.0, 2.0)
    assert occupy(tp_axis, call, 1.0, 1.0) == ((2.0, 4.0) if shared else (1.0, 3.0))
    assert occupy(tp_axis, call, 9.0, 9.0) == (9.0, 11.0), "an idle link starts at once"


def test_the_links_inside_a_node_and_out_of_it_are_two():
    links = Links(Link(0.5, 100.0), Link(0.5, 100.0), ranks_per_node=2, shared=True)
    inside = axis_of("tp", [0, 1], links)
    out = on(inside.context, axis_of("dp", [0, 2], links))
    pp = on(inside.context, axis_of("pp", [0, 4], links))
    call = all_reduce_of(100)
    assert occupy(inside, call, 0.0, 0.0) == (0.0, 2.0)
    assert occupy(out, call, 0.0, 0.0) == (0.0, 2.0)
    hundred = torch.zeros(100, dtype=torch.uint8)
    message = Call("recv", "recv_", hundred, lambda _: None, peer=1)
    assert occupy(pp, message, 0.0, 1.0) == (2.0, 3.5), "another axis, the same way out"
    send = Call("send", "send", hundred, lambda _: None, peer=1)
    assert occupy(pp, send, 1.0, 2.0)[1] == 2.0, "a message costs its receiver"
    assert occupy(out, call, 2.0, 2.0) == (3.5, 5.5), "and the sender's link is not set back"


# --- priorities ---------------------------------------------------------------------------------


def held_back(piece_bytes):
    mesh = make_mesh(tp=2)
    with comm.Priorities(mesh.tp, mesh.dp, piece_bytes=piece_bytes):
        return [bucket.sum().item() for bucket in backward(mesh)]


def in_the_way():
    mesh = make_mesh(tp=2)
    bucket = comm.start_all_reduce(BUCKET, mesh.dp)
    comm.barrier(mesh.world)  # now all have handed their bucket over
    comm.all_reduce(SMALL, mesh.tp)
    bucket.wait()


def test_a_shared_link_makes_small_calls_wait_for_buckets(worlds):
    for trace in worlds(4).run(in_the_way, links=Links(SLOW, SLOW, shared=True)).traces:
        (bucket,), (small,) = spans_of(trace, "dp"), spans_of(trace, "tp")
        assert small.start >= bucket.end


def test_pieces_let_small_calls_pass(worlds):
    """One transfer at a time, and each piece behind another call on tp."""
    links = Links(SLOW, SLOW, shared=True)
    results = worlds(4).run(held_back, 2000, pace={"B": 0.03}, links=links)
    assert list(results) == [[4000.0] * 3] * 4
    for trace in results.traces:
        by_start = sorted(trace.spans, key=lambda span: (span.start, span.end))
        link = [span for span in by_start if span.is_comm]
        assert all(one.end <= two.start for one, two in pairwise(link)), "one transfer at a time"
        pieces, small = spans_of(trace, "dp"), spans_of(trace, "tp")
        names = [piece.label for piece in pieces]
        assert names == [f"bucket {bucket}" for bucket in range(3) for _ in range(4)]
        # Bucket 0 was handed over before the third call on tp, and gives way to all that follow.
        assert all(one.start >= two.end for one, two in zip(pieces[:4], small[2:], strict=True))


def test_one_call_leaves_in_each_gap_and_the_rest_when_it_is_waited_for(worlds):
    results = worlds(4).run(held_back, 4000)  # two pieces a bucket
    order = ["tp"] * 3 + ["dp", "tp", "dp", "tp", "dp", "tp", "dp", "dp", "dp"]
    assert calls(results) == [order] * 4


def test_sums_and_bytes_are_those_without(worlds):
    def both():
        mesh = make_mesh(tp=2)
        buckets = [torch.randn(97), torch.randn(50, 3, dtype=torch.float64), torch.empty(0)]

        def sums():
            mesh.ledger.clear()
            handles = [comm.start_all_reduce(one * (mesh.rank + 1), mesh.dp) for one in buckets]
            handles.append(comm.start_reduce_scatter(buckets[1], mesh.dp))
            comm.all_reduce(SMALL, mesh.tp)
            return [handle.wait() for handle in handles], mesh.ledger.wire_bytes("dp")

        plain, plain_bytes = sums()
        with comm.Priorities(mesh.tp, mesh.dp, piece_bytes=64):
            held, held_bytes = sums()
        again = [handle.shape for handle in held]
        return all(map(torch.equal, plain, held)), plain_bytes == held_bytes, again

    shapes = [torch.Size([97]), torch.Size([50, 3]), torch.Size([0]), torch.Size([25, 3])]
    assert worlds(4).run(both) == [(True, True, shapes)] * 4


def train(held):
    """Five steps of tp with dp.Overlapped; the weights."""
    mesh = make_mesh(tp=2)
    model = tp.parallelize(build_model(CONFIG, seed=0).double(), mesh.tp)
    sync = dp.Overlapped(model.parameters(), mesh.dp, bucket_bytes=4096)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        rows = batch(step, seed=0, batch_size=4, seq_len=8, dp_rank=mesh.dp.rank, dp_size=2)
        priorities = comm.Priorities(mesh.tp, mesh.dp, piece_bytes=1024)
        with priorities if held else nullcontext():
            dp.train_step(model.loss_sum, [rows], sync, optimizer)
    return [parameter.detach() for parameter in model.parameters()], mesh.ledger.calls("dp")


@pytest.mark.parametrize("checked", [False, True])
def test_training_is_the_same_bit_for_bit(worlds, checked):
    plain, held = worlds(4).run(train, False), worlds(4).run(train, True, checked=checked)
    for (weights, few), (same, many) in zip(plain, held, strict=True):
        assert all(map(torch.equal, weights, same))
        assert many > few, "buckets travelled in pieces"


def three_axes(held):
    """Three steps of a pipeline of two stages whose replicas' buckets overlap with it."""
    mesh = make_mesh(tp=2, pp=2)
    plan = compose.Plan(
        region=sp.REGION, schedule="1f1b", micro_batches=4, overlap=True, bucket_bytes=4096
    )
    model = build_model(replace(CONFIG, layers=4), seed=0).double()
    trainer = compose.parallelize(model, mesh, plan, partial(torch.optim.AdamW, lr=1e-2))
    for step in range(3):
        rows = batch(step, seed=0, batch_size=8, seq_len=8, dp_rank=mesh.dp.rank, dp_size=2)
        priorities = comm.Priorities(mesh.tp, mesh.pp, mesh.dp, piece_bytes=1024)
        with priorities if held else nullcontext():
            trainer.step(*rows)
    weights = [weight for stage in trainer.stages.values() for weight in stage.parameters()]
    return [weight.detach() for weight in weights], mesh.ledger.calls("dp")


@pytest.mark.parametrize("checked", [False, True])
def test_a_pipeline_of_replicas_trains_the_same_bit_for_bit(worlds, checked):
    plain = worlds(8).run(three_axes, False)
    held = worlds(8).run(three_axes, True, checked=checked)
    for (weights, few), (same, many) in zip(plain, held, strict=True):
        assert all(map(torch.equal, weights, same))
        assert many > few, "buckets travelled in pieces"


def test_three_levels_leave_in_their_order(worlds):
    def levels():
        mesh = make_mesh(tp=2, cp=2)
        with comm.Priorities(mesh.tp, mesh.cp, mesh.dp, piece_bytes=10**6):
            last = [comm.start_all_reduce(SMALL, mesh.dp) for _ in range(3)]
            middle = [comm.start_all_reduce(SMALL, mesh.cp) for _ in range(2)]
            comm.all_reduce(SMALL, mesh.tp)  # a gap for the first on cp
            middle[0].wait()  # a gap below cp: for the first on dp
            last[1].wait()  # now: all that is held above it, then dp to its end
            middle[1].wait()
            last[0].wait()

    order = ["tp", "cp", "dp", "cp", "dp", "dp"]
    assert calls(worlds(8).run(levels)) == [order] * 8


def test_messages_are_never_held_and_one_received_makes_a_gap(worlds):
    def pipeline():
        mesh = make_mesh(pp=2)
        with comm.Priorities(mesh.pp, mesh.dp, piece_bytes=10**6):
            handles = [comm.start_all_reduce(SMALL, mesh.dp) for _ in range(2)]
            if mesh.pp.rank == 0:
                comm.send(SMALL, mesh.pp, to=1)  # its end says nothing about what comes next
            else:
                comm.recv(SMALL, mesh.pp, source=0)
            before = mesh.ledger.calls("dp")
            for handle in handles:
                handle.wait()
        return before

    results = worlds(4).run(pipeline)
    assert list(results) == [0, 0, 1, 1]
    assert calls(results) == [["pp", "dp", "dp"]] * 4


def test_without_ranks_above_nothing_is_held(worlds):
    def alone():
        mesh = make_mesh()
        with comm.Priorities(mesh.tp, mesh.pp, mesh.dp, piece_bytes=8):
            handle = comm.start_all_reduce(SMALL, mesh.dp)
            made = mesh.ledger.calls()
            handle.wait()
        return made

    assert worlds(2).run(alone) == [1, 1], "and nothing is cut"


def test_what_is_held_leaves_at_the_end_and_not_after_an_error(worlds):
    def ends():
        mesh = make_mesh(tp=2)
        with comm.Priorities(mesh.tp, mesh.dp, piece_bytes=10**6):
            handle = comm.start_all_reduce(SMALL, mesh.dp)
        made = mesh.ledger.calls("dp")
        total = handle.wait()[0].item()
        with suppress(KeyError), comm.Priorities(mesh.tp, mesh.dp, piece_bytes=10**6):
            comm.start_all_reduce(SMALL, mesh.dp)
            raise KeyError
        comm.all_reduce(SMALL, mesh.dp)  # nothing is held any more
        return made, total, mesh.ledger.calls("dp")

    assert worlds(4).run(ends) == [(1, 2.0, 2)] * 4


@given(
    st.lists(st.sampled_from(["tp", "dp", "cp", "wait dp", "wait cp"]), max_size=12),
    st.integers(1, 120),
)
def check_random(worlds, program, piece_bytes):
    def perform():
        mesh = make_mesh(tp=2, cp=2)
        started: dict[str, list] = {"dp": [], "cp": []}
        sums = []
        with comm.Priorities(mesh.tp, mesh.cp, mesh.dp, piece_bytes=piece_bytes):
            for step in program:
                if step == "tp":
                    sums.append(comm.all_reduce(SMALL, mesh.tp))
                elif step in started:
                    started[step].append(comm.start_all_reduce(SMALL, getattr(mesh, step)))
                elif waiting := started[step.split()[1]]:
                    sums.append(waiting.pop(0).wait())
        sums += [handle.wait() for handles in started.values() for handle in handles]
        return all(torch.equal(total, 2 * SMALL) for total in sums)

    results = worlds(8).run(perform, checked=True)
    assert list(results) == [True] * 8
    orders = calls(results)
    assert orders[1:] == orders[:-1], "all ranks make their calls in one order"
    assert len(orders[0]) >= sum(step in ("tp", "dp", "cp") for step in program)


def test_random_programs_come_to_an_end_in_one_order_on_all_ranks(worlds):
    check_random(worlds)


class ByTheClock(comm.Priorities):
    """The mistake that the rule forbids: on some ranks the link *seems* free."""

    def hold(self, axis, start):
        held = super().hold(axis, start)
        if axis.context.rank in (0, 3):
            self._held[-1].popleft().leave()
        return held


def test_sending_when_the_link_seems_free_is_found_in_checked_mode(worlds):
    def by_the_clock():
        mesh = make_mesh(tp=2)
        with ByTheClock(mesh.tp, mesh.dp, piece_bytes=10**6):
            handle = comm.start_all_reduce(SMALL, mesh.dp)
            comm.all_reduce(SMALL, mesh.tp)
            handle.wait()

    with pytest.raises(RankError) as caught:
        worlds(4).run(by_the_clock, checked=True)
    assert "ranks 0, 1, 2 and 3 wait for each other for ever" in str(caught.value)


def test_a_held_call_that_does_not_fit_names_the_line_that_started_it(worlds):
    def mismatched():
        mesh = make_mesh(tp=2)
        with comm.Priorities(mesh.tp, mesh.dp, piece_bytes=10**6):
            comm.start_all_reduce(SMALL[: 1 + mesh.dp.rank], mesh.dp)
            with pytest.raises(ValueError, match="do not agree") as caught:
                comm.all_reduce(SMALL, mesh.tp)
        return str(caught.value)

    lines, first = inspect.getsourcelines(mismatched)
    at = first + next(i for i, line in enumerate(lines) if "start_all_reduce" in line)
    for said in worlds(4).run(mismatched, checked=True):
        assert f"test_priorities.py line {at}" in said


def test_a_held_call_that_failed_in_a_gap_says_so_again_where_it_is_waited_for(worlds):
    def waited_for():
        mesh = make_mesh(tp=2)
        with comm.Priorities(mesh.tp, mesh.dp, piece_bytes=10**6):
            wrong = comm.start_all_reduce(SMALL[: 1 + mesh.dp.rank], mesh.dp)
            right = comm.start_all_reduce(SMALL, mesh.dp)
            with suppress(ValueError):
                comm.all_reduce(SMALL, mesh.tp)
            for _ in range(2):
                with pytest.raises(ValueError, match="do not agree") as caught:
                    wrong.wait()
        return caught.value.__notes__, right.wait()[0].item()

    said = ["It was raised when a call left that priorities had held back."]
    assert worlds(4).run(waited_for, checked=True) == [(said, 2.0)] * 4


def test_what_was_waited_for_is_there_though_a_held_call_failed_in_its_gap(worlds):
    """A second wait for a message of gloo would never end."""

    def received():
        mesh = make_mesh(pp=2)
        if mesh.pp.rank == 0:
            comm.send(SMALL, mesh.pp, to=1)
            return 10.0
        priorities = comm.Priorities(mesh.pp, mesh.dp, piece_bytes=10**6)
        with suppress(ZeroDivisionError), priorities:
            message = comm.start_recv(SMALL, mesh.pp, source=0)
            priorities.hold(mesh.dp, lambda: 1 / 0)
            message.wait()
        return message.wait().sum().item()

    assert worlds(4).run(received, timeout=20) == [10.0] * 4


@pytest.mark.parametrize(
    ("names", "piece_bytes", "said"),
    [
        (["tp"], 1, r"priorities of axes \['tp'\]: give two or more"),
        (["tp", "tp"], 1, "each once"),
        (["tp", "dp"], 0, "expected pieces of at least 1 byte, got piece_bytes=0"),
    ],
)
def test_bad_priorities_are_refused(names, piece_bytes, said):
    axes = [axis_of(name, [0, 1], None) for name in names]
    with pytest.raises(ValueError, match=said):
        comm.Priorities(*axes, piece_bytes=piece_bytes)


def test_priorities_do_not_nest():
    first, second = (axis_of(name, [0, 1], None) for name in ("tp", "dp"))
    with (
        comm.Priorities(first, second, piece_bytes=1),
        pytest.raises(RuntimeError, match="have priorities already"),
        comm.Priorities(first, second, piece_bytes=1),
    ):
        pass
    assert first.context.instruments == ()


@pytest.mark.parametrize(("name", "calls_a_step"), [("at once", 4), ("in pieces", 13)])
def test_the_bench_sends_its_buckets_as_it_says(worlds, name, calls_a_step):
    """Three buckets of two layers, and what is left: the embeddings of positions and the like."""
    for trace in worlds(4).run(bench.one_step, name).traces:
        labels = [span.label for span in spans_of(trace, "dp") if span.label.startswith("bucket")]
        assert len(labels) == calls_a_step
        assert len(set(labels)) == 4


def test_the_table_of_the_bench():
    result = {
        "ranks": 4,
        "rounds": 20,
        "bucket_bytes": 786_432,
        "piece_bytes": 240_000,
        "milliseconds": {"at once": 840.5, "in pieces": 694.5},
        "ratio_to_at_once": {"in pieces": 0.83},
        "overshoot": 0.2,
    }
    said = bench.text(result)
    assert "buckets of 786 kB, pieces of 240 kB, 20 rounds" in said
    assert "694.5        0.83" in said
    assert "too busy" in said
    assert "too busy" not in bench.text({**result, "overshoot": 0.05})
