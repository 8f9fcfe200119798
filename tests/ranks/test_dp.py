"""Data parallelism equals one process, in every way it is done, and its bytes equal its formula."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest
import torch
from equality import assert_bitwise, assert_equal, projection, worst_error
from hypothesis import given
from hypothesis import strategies as st

from course_lib import comm, dp
from course_lib.data import batch
from course_lib.mesh import Link, Links, make_mesh
from course_lib.model import ModelConfig, build_model
from course_lib.trace.blocks import MeasuredBlocks

WORLDS = (1, 2, 3, 4, 8)
SYNCS = (dp.Naive, dp.Bucketed, dp.Overlapped)
BATCH, SEQ, STEPS = 24, 12, 5
SMALL = {"layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "max_seq_len": SEQ}
F64 = ModelConfig(**SMALL, dtype=torch.float64)
GPT = ModelConfig(**(SMALL | {"kv_heads": 4}), family="gpt", tied=True, dtype=torch.float64)


def grads(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def prepare(config, frozen=()):
    model = build_model(config, seed=3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(frozen)) if frozen else True)
    adam = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return model, adam


def rows(step, rank=0, size=1, shortest=None):
    return batch(
        step,
        seed=7,
        batch_size=BATCH,
        seq_len=SEQ,
        dp_rank=rank,
        dp_size=size,
        shortest=shortest,
    )


def serial(config, *, max_norm=None, shortest=None, frozen=(), steps=STEPS):
    """Return (losses, first gradients, weights) of the single-process reference, a plain loop."""
    model, adam = prepare(config, frozen)
    losses, first = [], {}
    for step in range(steps):
        adam.zero_grad()
        total, count = model.loss_sum(*rows(step, shortest=shortest))
        (total / count).backward()
        first = first or grads(model)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        adam.step()
        losses.append(float(total.detach() / count))
    return losses, first, weights(model)


def accumulated(config, size):
    """Gradients of one process that backs the ranks' shards through one after the other."""
    model, _ = prepare(config)
    count = rows(0)[1].numel()
    for rank in range(size):
        (model.loss_sum(*rows(0, rank, size))[0] / count).backward()
    return grads(model)


def parallel(
    config,
    make_sync,
    *,
    micro=1,
    max_norm=None,
    shortest=None,
    frozen=(),
    steps=STEPS,
    step=dp.train_step,
):
    """What one rank does; the same return value as :func:`serial`, and the ledger's sums."""
    mesh = make_mesh()
    model, adam = prepare(config, frozen)
    sync = make_sync(model.parameters(), mesh.dp)
    losses, first, sent = [], {}, []
    for number in range(steps):
        mine = rows(number, mesh.dp.rank, mesh.dp.size, shortest)
        cut = list(zip(*(part.chunk(micro) for part in mine), strict=True))
        mesh.ledger.clear()
        losses.append(float(step(model.loss_sum, cut, sync, adam, max_norm)))
        first = first or (grads(model) if max_norm is None else {"": torch.ones(1)})
        sent.append((mesh.ledger.wire_bytes("dp"), mesh.ledger.calls("dp", "all_reduce")))
    return losses, first, weights(model), sent


def check(results, twin, tolerance=1e-12):
    """Compare every rank with the reference, and the ranks with each other."""
    losses, first, final = twin
    for rank, (got_losses, got_first, got_final, _) in enumerate(results):
        assert max(abs(a - b) for a, b in zip(got_losses, losses, strict=True)) < tolerance * 10
        assert_equal(got_first, first, tolerance, f"gradients of rank {rank}")
        assert_equal(got_final, final, 1e-8, f"weights of rank {rank} after {STEPS} AdamW steps")
        assert_bitwise(got_final, results[0][2], f"replica {rank} against replica 0")


@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize("make_sync", SYNCS)
@pytest.mark.parametrize("config", [F64, GPT], ids=["llama", "gpt-tied"])
def test_equals_serial(worlds, n, make_sync, config):
    results = worlds(n).run(parallel, config, make_sync)
    check(results, serial(config))


@pytest.mark.parametrize("make_sync", SYNCS)
def test_two_ranks_equal_their_shards_accumulated_bit_for_bit(worlds, make_sync):
    results = worlds(2).run(lambda: parallel(F64, make_sync, steps=1))
    for result in results:
        assert_bitwise(result[1], accumulated(F64, 2), "gradients")


def test_four_ranks_equal_their_shards_accumulated(worlds):
    results = worlds(4).run(lambda: parallel(F64, dp.Overlapped, steps=1))
    for result in results:
        assert_equal(result[1], accumulated(F64, 4), 1e-14, "gradients")


@pytest.mark.parametrize("make_sync", SYNCS)
@pytest.mark.parametrize("n", [2, 4])
def test_uneven_token_counts(worlds, n, make_sync):
    results = worlds(n).run(lambda: parallel(F64, make_sync, shortest=2))
    check(results, serial(F64, shortest=2))


@pytest.mark.parametrize("make_sync", SYNCS)
def test_clipping_by_the_global_norm(worlds, make_sync):
    results = worlds(4).run(lambda: parallel(F64, make_sync, max_norm=0.1))
    _, _, final = serial(F64, max_norm=0.1)
    for result in results:
        assert_equal(result[2], final, 1e-8, "weights")


@pytest.mark.parametrize("make_sync", SYNCS)
def test_frozen_parameters_stay_and_send_nothing(worlds, make_sync):
    frozen = ("embedding.", "blocks.0.attn")
    results = worlds(3).run(lambda: parallel(F64, make_sync, frozen=frozen))
    check(results, serial(F64, frozen=frozen))
    model, _ = prepare(F64, frozen)
    unfrozen = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert results[0][3][0][0] == dp.wire_bytes(unfrozen, 3)


@pytest.mark.parametrize("make_sync", SYNCS)
@pytest.mark.parametrize("micro", [1, 2, 6])
def test_accumulation_sends_once_a_step(worlds, make_sync, micro):
    results = worlds(4).run(lambda: parallel(F64, make_sync, micro=micro))
    check(results, serial(F64))
    model = build_model(F64)
    parameter_bytes = sum(p.nbytes for p in model.parameters())
    calls = len(list(model.parameters())) if make_sync is dp.Naive else 1
    for *_, sent in results:
        assert sent == [(dp.wire_bytes(parameter_bytes, 4), calls)] * STEPS


def test_bucket_size_decides_the_number_of_calls(worlds):
    def calls(bucket_bytes):
        def rank():
            sync = lambda parameters, axis: dp.Overlapped(parameters, axis, bucket_bytes)  # noqa: E731
            return parallel(F64, sync, steps=1)[3][0][1]

        return worlds(2).run(rank)[0]

    parameters = list(build_model(F64).parameters())
    assert calls(1) == len(parameters)
    assert calls(10**9) == 1
    halfway = sum(p.nbytes for p in parameters) // 2
    assert 2 <= calls(halfway) <= 3


shapes = st.fixed_dictionaries(
    {
        "layers": st.integers(1, 3),
        "heads": st.sampled_from([2, 4]),
        "ffn": st.integers(3, 20),
        "tied": st.booleans(),
        "family": st.sampled_from(["llama", "gpt"]),
    }
)


@given(shape=shapes, bucket_bytes=st.integers(1, 40_000), micro=st.sampled_from([1, 2, 3]))
def test_any_shape_and_bucket_size(worlds, shape, bucket_bytes, micro):
    config = ModelConfig(**shape, hidden=16, kv_heads=2, max_seq_len=SEQ, dtype=torch.float64)

    def rank():
        sync = lambda parameters, axis: dp.Overlapped(parameters, axis, bucket_bytes)  # noqa: E731
        return parallel(config, sync, micro=micro, steps=2)

    _, first, _ = serial(config, steps=2)
    for result in worlds(2).run(rank):
        assert_equal(result[1], first, 1e-12, "gradients")


# --- beside torch's own ---------------------------------------------------------------------


def test_equals_torch_ddp(worlds):
    def rank():
        from torch.nn.parallel import DistributedDataParallel

        mesh = make_mesh()
        model, adam = prepare(F64)
        parallel_model = DistributedDataParallel(model)
        first = {}
        for step in range(STEPS):
            tokens, targets = rows(step, mesh.dp.rank, mesh.dp.size)
            adam.zero_grad()
            logits = parallel_model(tokens)
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
            first = first or grads(model)
            adam.step()
        return first, weights(model), parallel(F64, dp.Overlapped)

    for first, final, ours in worlds(4).run(rank):
        assert_equal(ours[1], first, 1e-12, "gradients against DDP")
        assert_equal(ours[2], final, 1e-8, "weights against DDP")


# --- the machinery --------------------------------------------------------------------------


def test_unused_parameters_count_as_zeros(worlds):
    def rank(make_sync):
        mesh = make_mesh()
        torch.manual_seed(0)
        first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        both = torch.nn.ModuleList([first, second])
        sync = make_sync(both.parameters(), mesh.dp)
        used = first if mesh.dp.rank == 0 else second  # each rank leaves another one out
        used(torch.ones(1, 3)).sum().backward()
        sync.finish()
        return grads(both)

    for make_sync in SYNCS:
        results = worlds(2).run(rank, make_sync)
        assert all(torch.equal(g, torch.ones_like(g)) for g in results[0].values())
        assert_bitwise(results[1], results[0], "gradients")


def test_a_parameter_that_no_rank_uses_gets_zeros(worlds):
    """As the docstring says; serial would leave None, so such a parameter should be frozen."""

    def rank(make_sync):
        mesh = make_mesh()
        used, unused = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        sync = make_sync([*used.parameters(), *unused.parameters()], mesh.dp)
        used(torch.ones(1, 2)).sum().backward()
        sync.finish()
        return [float(p.grad.abs().max()) for p in unused.parameters()]

    for make_sync in SYNCS:
        assert list(worlds(2).run(rank, make_sync)) == [[0.0, 0.0]] * 2


def test_broadcast_parameters_makes_replicas_of_rank_0(worlds):
    def rank():
        mesh = make_mesh()
        model = build_model(F64, seed=mesh.rank)
        before = weights(model)
        dp.broadcast_parameters(model, mesh.dp)
        return before, weights(model)

    results = worlds(3).run(rank)
    assert worst_error(results[1][0], results[0][0])[0] > 0.1, "they must differ before"
    for _, after in results:
        assert_bitwise(after, results[0][0], "replica")


def test_a_second_backward_without_accumulate_is_refused(worlds):
    def rank():
        mesh = make_mesh()
        model = build_model(F64)
        sync = dp.Overlapped(model.parameters(), mesh.dp)
        try:
            for _ in range(2):
                model.loss_sum(*rows(0))[0].backward()
        except RuntimeError as error:
            return str(error)
        finally:
            sync.finish()

    assert all("sync.accumulate()" in said for said in worlds(2).run(rank))


def test_close_takes_the_hooks_off(worlds):
    def rank():
        mesh = make_mesh()
        model = build_model(F64)
        dp.Overlapped(model.parameters(), mesh.dp).close()
        model.loss_sum(*rows(0))[0].backward()
        return mesh.ledger.calls()

    assert list(worlds(2).run(rank)) == [0, 0]


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        dp.trainable([torch.nn.Parameter(torch.ones(1), requires_grad=False)])
    mesh = make_mesh()
    sync = dp.Naive(build_model(F64).parameters(), mesh.dp)
    with pytest.raises(ValueError, match="have no gradient .*under ZeRO ask"):
        sync.clip(1.0)
    sync.finish()
    with pytest.raises(ValueError, match="max_norm=0"):
        sync.clip(0)
    with pytest.raises(ValueError, match="bucket of 0 bytes"):
        dp.Bucketed(build_model(F64).parameters(), mesh.dp, 0)
    with pytest.raises(ValueError, match="every target on axis dp is -100"):
        dp.global_tokens([torch.full((2, 2), -100)], mesh.dp)
    with pytest.raises(ValueError, match="micro-batch"):
        dp.train_step(
            build_model(F64).loss_sum,
            [],
            dp.Naive([torch.nn.Parameter(torch.ones(1))], mesh.dp),
            None,
        )  # type: ignore[arg-type]


# --- the overlap, on paced ranks with an emulated link --------------------------------------


def measured_step(make_sync):
    """One step whose backward takes 20 ms a block, on a link that takes about 15 ms a bucket."""
    mesh = make_mesh()
    model, adam = prepare(F64)
    sync = make_sync(model.parameters(), mesh.dp, 8_000)
    with MeasuredBlocks(model.blocks, mesh.trace, mesh.conditions.pace):
        for step in range(2):
            mesh.trace.clear()
            dp.train_step(model.loss_sum, [rows(step, mesh.dp.rank, mesh.dp.size)], sync, adam)
    return mesh.rank


@pytest.mark.parametrize("make_sync", [dp.Bucketed, dp.Overlapped])
def test_where_buckets_leave_is_visible_in_the_trace(worlds, make_sync):
    link = Link(alpha=0.005, beta=1e9)
    results = worlds(2).run(
        measured_step, make_sync, pace={"F": 0.01, "B": 0.02}, links=Links(link, link)
    )
    for trace in results.traces:
        backward_end = max(span.end for span in trace.spans if span.op == "B")
        buckets = [s for s in trace.spans if s.op == "all_reduce" and s.label != "control"]
        assert len(buckets) >= 3
        early = [span for span in buckets if span.end < backward_end]
        assert bool(early) == (make_sync is dp.Overlapped)
        # gloo's threads may finish neighbours in either order; an emulated link keeps theirs
        assert [span.label for span in buckets] == [f"bucket {i}" for i in range(len(buckets))]
        for before, after in pairwise(buckets):
            assert after.start >= before.end - 1e-4, "one axis carries one bucket at a time"
            assert after.end - after.start >= 2 * link.alpha * 0.99


# --- the classic bugs, each of which must be caught by the comparison above ------------------


def mean_over_ranks(loss_sum, micro_batches, sync, optimizer, max_norm):
    """Every rank averages over its own tokens, then the ranks average."""
    optimizer.zero_grad()
    total, count = loss_sum(*micro_batches[0])
    (total / count / sync.axis.size).backward()
    sync.finish()
    optimizer.step()
    return comm.all_reduce((total / count).detach(), sync.axis) / sync.axis.size


def summed_not_averaged(loss_sum, micro_batches, sync, optimizer, max_norm):
    """Forgets that the other ranks' tokens count too: gradients n times too large."""
    optimizer.zero_grad()
    total, count = loss_sum(*micro_batches[0])
    (total / count).backward()
    sync.finish()
    optimizer.step()
    return comm.all_reduce((total / count).detach(), sync.axis) / sync.axis.size


def never_synced(loss_sum, micro_batches, sync, optimizer, max_norm):
    """The all-reduce is missing: replicas drift apart."""
    with sync.accumulate():
        total, count = loss_sum(*micro_batches[0])
        (total / (count * sync.axis.size)).backward()
    optimizer.step()
    return comm.all_reduce((total / count).detach(), sync.axis) / sync.axis.size


def clipped_before_the_sum(loss_sum, micro_batches, sync, optimizer, max_norm):
    """Each rank clips its own part: the norm of a part is not the norm of the sum."""
    tokens = dp.global_tokens([targets for _, targets in micro_batches], sync.axis)
    optimizer.zero_grad()
    with sync.accumulate():
        (loss_sum(*micro_batches[0])[0] / tokens).backward()
    sync.clip(max_norm)
    sync.finish()
    optimizer.step()
    return torch.zeros(())


@pytest.mark.parametrize(
    ("bug", "shortest"),
    [(mean_over_ranks, 2), (summed_not_averaged, None), (never_synced, None)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_classic_bugs_are_caught(worlds, bug, shortest):
    results = worlds(4).run(lambda: parallel(F64, dp.Overlapped, shortest=shortest, step=bug))
    with pytest.raises(AssertionError):
        check(results, serial(F64, shortest=shortest))


def test_the_projection_names_the_wrong_factor(worlds):
    results = worlds(4).run(lambda: parallel(F64, dp.Overlapped, step=summed_not_averaged, steps=1))
    assert projection(results[0][1], serial(F64, steps=1)[1]) == pytest.approx(4, rel=1e-9)


def test_clipping_before_the_sum_is_caught(worlds):
    results = worlds(4).run(
        lambda: parallel(F64, dp.Overlapped, max_norm=0.1, step=clipped_before_the_sum)
    )
    _, _, final = serial(F64, max_norm=0.1)
    assert worst_error(results[0][2], final)[0] > 1e-3


def test_syncing_every_micro_batch_costs_bytes_and_is_seen(worlds):
    """A sync at the first micro-batch gives the right sum of nothing but more bytes."""

    def eager(loss_sum, micro_batches, sync, optimizer, max_norm):
        tokens = dp.global_tokens([targets for _, targets in micro_batches], sync.axis)
        optimizer.zero_grad()
        for inputs, targets in micro_batches:
            (loss_sum(inputs, targets)[0] / tokens).backward()
            sync.finish()
        optimizer.step()
        return torch.zeros(())

    results = worlds(2).run(lambda: parallel(F64, dp.Bucketed, micro=2, steps=1, step=eager))
    sent = results[0][3][0][0]
    formula = dp.wire_bytes(sum(p.nbytes for p in build_model(F64).parameters()), 2)
    assert sent == 2 * formula
    assert projection(results[0][1], serial(F64, steps=1)[1]) > 1.2, (
        "the first part is summed twice"
    )


def threads_after_training(sync_kind: type[dp.GradientSync]) -> int:
    mesh = make_mesh(tp=2)  # groups of its own, a thread of the backend each
    model = build_model(F64, seed=0)
    sync = sync_kind(model.parameters(), mesh.dp)
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    sync.finish()
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs /proc")
@pytest.mark.parametrize("sync_kind", SYNCS)
def test_what_is_dropped_is_freed_with_its_groups(worlds, sync_kind):
    counts = [worlds(4).run(threads_after_training, sync_kind)[0] for _ in range(3)]
    assert counts[0] == counts[1] == counts[2]
