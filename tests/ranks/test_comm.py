"""Every collective against its definition, on real ranks: values, purity, ledger, gradients."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections import Counter
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from ledgers import backend_calls, unmatched_sends
from torch.distributed.tensor.debug import CommDebugMode

from course_lib import comm
from course_lib.bench import comm as bench
from course_lib.comm import instruments
from course_lib.mesh import Link, Links, make_mesh

WORLDS = (1, 2, 3, 4, 8)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)


def tensor(rank, shape, dtype, strided=False):
    """Small whole numbers, so that sums are exact in every dtype and order; other by rank."""
    generator = torch.Generator().manual_seed(1000 + rank)
    back = shape[::-1] if strided else shape
    x = torch.randint(-4, 5, back, generator=generator).to(dtype)
    x = x.permute(*range(x.dim())[::-1]) if strided else x
    return x.requires_grad_(dtype.is_floating_point)


def joined(tensors, dim):
    return torch.cat([x.detach() for x in tensors], dim)


def total(tensors):
    return torch.stack([x.detach() for x in tensors]).sum(0)


def uneven_counts(n):
    """What each rank sends to each: zeros included, rank 0 sends nothing to anyone else."""
    return [[(sender * receiver) % 3 for receiver in range(n)] for sender in range(n)]


def same(got, want):
    return got.dtype == want.dtype and torch.equal(got, want) and not got.requires_grad


# --- values and purity -------------------------------------------------------------------------


@st.composite
def requests(draw):
    sizes = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(sizes) - 1))
    other = draw(st.integers(0, len(sizes) - 1))
    signed = draw(st.sampled_from([dim, dim - len(sizes)]))
    return sizes, signed, other, draw(st.sampled_from(DTYPES)), draw(st.booleans())


def every_collective(sizes, dim, other, dtype, strided):
    """All of them once, on tensors whose dim ``dim`` is n times ``sizes[dim]``."""
    mesh = make_mesh()
    axis, n = mesh.dp, mesh.dp.size
    shape = list(sizes)
    shape[dim] *= n
    x = tensor(axis.rank, shape, dtype, strided)
    before, version = x.detach().clone(), x._version
    counts = uneven_counts(n)
    rows = tensor(axis.rank, [sum(counts[axis.rank]), 2], dtype)
    incoming = [counts[sender][axis.rank] for sender in range(n)]
    got = {
        "all_reduce": comm.all_reduce(x, axis),
        "all_reduce_max": comm.all_reduce_max(x, axis),
        "all_gather": comm.all_gather(x, axis, dim),
        "reduce_scatter": comm.reduce_scatter(x, axis, dim),
        "all_to_all": comm.all_to_all(x.detach(), axis, dim, other),
        "all_to_all_v": comm.all_to_all_v(rows.detach(), axis, counts[axis.rank], incoming),
        "own_shard": comm.own_shard(x, axis, dim),
    }
    got |= {f"broadcast {source}": comm.broadcast(x, axis, source) for source in range(n)}
    pure = torch.equal(x.detach(), before) and x._version == version
    return got, pure


def definition(sizes, dim, other, dtype, strided, n, rank):
    shape = list(sizes)
    shape[dim] *= n
    inputs = [tensor(r, shape, dtype, strided) for r in range(n)]
    counts = uneven_counts(n)
    rows = [tensor(r, [sum(counts[r]), 2], dtype).split(counts[r]) for r in range(n)]
    want = {
        "all_reduce": total(inputs),
        "all_reduce_max": torch.stack([x.detach() for x in inputs]).amax(0),
        "all_gather": joined(inputs, dim),
        "reduce_scatter": total(inputs).chunk(n, dim)[rank],
        "all_to_all": joined([x.chunk(n, dim)[rank] for x in inputs], other),
        "all_to_all_v": joined([pieces[rank] for pieces in rows], 0),
        "own_shard": inputs[rank].detach().chunk(n, dim)[rank],
    }
    return want | {f"broadcast {source}": inputs[source].detach() for source in range(n)}


@pytest.mark.parametrize("n", WORLDS)
@given(asked=requests())
@example(asked=([2, 3], 0, 1, torch.float64, False))
@example(asked=([2, 1, 3], -2, 0, torch.bfloat16, True))
def test_every_collective_is_its_definition(worlds, n, asked):
    for rank, (got, pure) in enumerate(worlds(n).run(every_collective, *asked)):
        want = definition(*asked, n, rank)
        assert got.keys() == want.keys()
        for op in want:
            assert same(got[op], want[op]), f"{op} on rank {rank} of {n}: {got[op]} for {want[op]}"
        assert pure, "the caller's tensor was written"


@pytest.mark.parametrize("n", [2, 4])
def test_started_collectives_may_be_waited_for_in_any_order(worlds, n):
    def start_three():
        axis = make_mesh().dp
        x = tensor(axis.rank, [2 * axis.size], torch.float64)
        handles = [
            comm.start_all_reduce(x, axis),
            comm.start_all_gather(x, axis),
            comm.start_reduce_scatter(x, axis),
        ]
        return [handle.wait() for handle in handles[::-1]][::-1]

    inputs = [tensor(rank, [2 * n], torch.float64) for rank in range(n)]
    for rank, (summed, gathered, piece) in enumerate(worlds(n).run(start_three)):
        assert same(summed, total(inputs))
        assert same(gathered, joined(inputs, 0))
        assert same(piece, total(inputs).chunk(n)[rank])


def test_sums_are_added_in_rank_order(worlds):
    """0.1 + 0.2 + ... rounds differently in another order: ours is the same in every run."""

    def scatter():
        axis = make_mesh().dp
        return comm.reduce_scatter(torch.full([8], 0.1 * (axis.rank + 1)), axis)

    by_hand = torch.tensor(0.1)
    for rank in range(1, 8):
        by_hand = by_hand + torch.tensor(0.1 * (rank + 1))
    assert worlds(8).run(scatter) == [by_hand] * 8


# --- built from send and recv ------------------------------------------------------------------


def every_built_collective(shape, dtype):
    axis = make_mesh().dp
    x = tensor(axis.rank, shape, dtype)
    before = x.detach().clone()
    ledger, sent = axis.ledger, {}

    def counted(name, result):
        sent[name] = ledger.wire_bytes("dp"), backend_calls(ledger)
        ledger.clear()
        return result

    got = {
        "ring": counted("ring", comm.ring_all_reduce(x, axis)),
        "tree": counted("tree", comm.tree_all_reduce(x, axis)),
        "scattered": counted("scattered", comm.ring_reduce_scatter(x, axis)),
        "gathered": counted("gathered", comm.ring_all_gather(x, axis)),
        "from root": counted("from root", comm.tree_broadcast(x, axis)),
    }
    return got, sent, torch.equal(x.detach(), before), comm.all_reduce(x, axis)


@pytest.mark.parametrize("n", WORLDS)
@given(shape=st.lists(st.integers(0, 5), min_size=1, max_size=2), dtype=st.sampled_from(DTYPES))
@example(shape=[1], dtype=torch.float64)  # fewer elements than ranks
@example(shape=[24], dtype=torch.float64)  # every n divides it
@example(shape=[23], dtype=torch.int64)
def test_built_from_messages_equals_the_collective(worlds, n, shape, dtype):
    results = worlds(n).run(every_built_collective, shape, dtype)
    inputs = [tensor(rank, shape, dtype) for rank in range(n)]
    payload = inputs[0].numel() * dtype.itemsize
    pieces = total(inputs).flatten().tensor_split(n)
    for rank, (got, sent, pure, collective) in enumerate(results):
        assert pure
        assert same(got["ring"], collective)
        assert same(got["tree"], collective)
        assert same(got["scattered"], pieces[rank])
        assert same(got["from root"], inputs[0].detach())
        assert all(map(same, got["gathered"], [x.detach() for x in inputs]))
        assert sent["gathered"][0] == (n - 1) * payload
        assert not any(backend for _, backend in sent.values()), "torch's collectives were used"
    sums = {name: sum(sent[name][0] for _, sent, *_ in results) for name in results[0][1]}
    assert sums["ring"] == sums["tree"] == 2 * (n - 1) * payload
    assert sums["scattered"] == sums["from root"] == (n - 1) * payload
    if payload % (n * dtype.itemsize) == 0:
        each = {sent["ring"][0] for _, sent, *_ in results}
        assert each == {Fraction(2 * (n - 1) * payload, n)}, "the load of a ring is even"


def test_a_wrong_piece_index_would_be_seen(worlds):
    """The classic slip: send the piece that arrives next instead of the one just added to."""

    def slipped(x, axis):
        pieces = list(x.tensor_split(axis.size))
        for turn in range(axis.size - 1):
            leaving, arriving = (axis.rank - turn) % axis.size, (axis.rank - turn - 1) % axis.size
            received = comm.exchange(pieces[leaving], axis, axis.next, axis.previous)
            pieces[arriving] = pieces[arriving] + received
        return comm.all_gather(pieces[axis.rank], axis)  # but rank r has summed piece r + 1

    def both():
        axis = make_mesh().dp
        x = tensor(axis.rank, [24], torch.float64)
        return torch.equal(slipped(x, axis), comm.all_reduce(x, axis))

    assert worlds(4).run(both) == [False] * 4


# --- the ledger --------------------------------------------------------------------------------


def spend(numel):
    """Each collective once, of ``numel`` float64; its own ledger lines as (op, payload, wire)."""
    mesh = make_mesh()
    axis, n = mesh.dp, mesh.dp.size
    x = torch.ones(numel, dtype=torch.float64)
    counts = uneven_counts(n)
    with CommDebugMode() as torchs_own:
        comm.all_reduce(x, axis)
        comm.all_reduce_max(x, axis)
        comm.all_gather(x, axis)
        comm.reduce_scatter(x, axis)
        comm.all_to_all(x, axis)
        comm.broadcast(x, axis, n - 1)
        rows = torch.ones(sum(counts[axis.rank]), 3)
        incoming = [counts[sender][axis.rank] for sender in range(n)]
        comm.all_to_all_v(rows, axis, counts[axis.rank], incoming)
        comm.all_reduce(x, axis, control=True)
        comm.all_gather(x, axis, control=True)
        comm.barrier(axis)
        comm.exchange(x, axis, axis.next, axis.previous)
    counted = {str(op).removeprefix("c10d."): c for op, c in torchs_own.get_comm_counts().items()}
    return counted, backend_calls(axis.ledger)


@pytest.mark.parametrize("n", WORLDS)
def test_ledger_is_exact_and_agrees_with_torchs_own_count(worlds, n):
    results = worlds(n).run(spend, 24)
    size = 24 * 8
    for rank, (torchs_own, ours) in enumerate(results):
        ledger = results.ledgers[rank]
        assert torchs_own == ours
        if n == 1:
            assert ledger.records == []
            continue
        leaving = sum(uneven_counts(n)[rank]) - uneven_counts(n)[rank][rank]
        assert [(one.op, one.payload, one.wire) for one in ledger.select("dp")] == [
            ("all_reduce", size, Fraction(2 * (n - 1) * size, n)),
            ("all_reduce", size, Fraction(2 * (n - 1) * size, n)),
            ("all_gather", size, Fraction((n - 1) * size)),
            ("reduce_scatter", size, Fraction((n - 1) * size, n)),
            ("all_to_all", size, Fraction((n - 1) * size, n)),
            ("broadcast", size, Fraction((n - 1) * size, n)),
            ("all_to_all", sum(uneven_counts(n)[rank]) * 12, Fraction(leaving * 12)),
            ("send", size, Fraction(size)),
            ("recv", size, Fraction(0)),
        ]
        control = [(one.op, one.payload) for one in ledger.records if one.control]
        assert control == [("all_reduce", size), ("all_gather", size), ("all_reduce", 4)]
        assert ours["alltoall_base_"] == 3, "gloo's own reduce-scatter would cost twice the bytes"
    assert unmatched_sends(results.ledgers) == {}


@pytest.mark.parametrize("n", [2, 4])
def test_spans_say_what_was_asked_and_when(worlds, n):
    results = worlds(n).run(spend, 8)
    for ledger, trace in zip(results.ledgers, results.traces, strict=True):
        asked = Counter((one.op, one.axis, one.payload, one.control) for one in ledger.records)
        spans = trace.spans
        assert Counter((s.op, s.axis, s.payload, s.label == "control") for s in spans) == asked
        assert all(span.rank == trace.rank and span.start <= span.end for span in spans)


# --- bad input, before anything is sent --------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x, axis: comm.all_gather(x[0, 0], axis), r"axis dp: dim 0 of shape \[\]"),
        (lambda x, axis: comm.all_gather(x, axis, 2), r"dim 2 of shape \[7, 6\]"),
        (lambda x, axis: comm.all_to_all(x, axis, 1, 5), r"dim 5 of shape \[7, 6\]"),
        (lambda x, axis: comm.broadcast(x, axis, axis.size), r"source=\d is no coordinate of"),
        (lambda x, axis: comm.all_to_all_v(x, axis, [7], [1, 2]), "one count of 0 or more"),
        (
            lambda x, axis: comm.all_to_all_v(x, axis, [9] * axis.size, [9] * axis.size),
            "add up to",
        ),
        (
            lambda x, axis: comm.all_to_all_v(
                x[: axis.size], axis, [1] * axis.size, [2] * axis.size
            ),
            "expects 2 from itself",
        ),
    ],
)
def test_bad_input_is_named(worlds, n, call, says):
    def refused():
        mesh = make_mesh()
        try:
            call(torch.ones(7, 6), mesh.dp)
        except ValueError as error:
            return str(error), mesh.ledger.calls()
        return "nothing", 0

    for message, calls in worlds(n).run(refused):
        assert re.search(says, message), message
        assert calls == 0


@pytest.mark.parametrize(
    "op", ["reduce_scatter", "all_to_all", "own_shard", "scatter_to", "reduce_scatter_to"]
)
def test_what_cannot_be_cut_is_named(worlds, op):
    def refused():
        try:
            getattr(comm, op)(torch.ones(7, 6), make_mesh().dp, 0)
        except ValueError as error:
            return str(error)

    for message in worlds(3).run(refused):
        assert "axis dp: dim 0 of shape [7, 6] does not split into 3 equal shards" in message


# --- flat buckets ------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 4])
def test_flat_bucket_sums_each_tensor(worlds, n):
    shapes = ([3, 2], [], [5], [0])

    def bucket():
        axis = make_mesh().dp
        tensors = [tensor(axis.rank, shape, torch.float64) for shape in shapes]
        flat = comm.start_all_reduce_flat(tensors, axis).wait()
        return comm.unflatten(flat, tensors), axis.ledger.calls()

    for got, calls in worlds(n).run(bucket):
        assert calls == (n > 1)
        for shape, summed in zip(shapes, got, strict=True):
            assert same(summed, total([tensor(r, shape, torch.float64) for r in range(n)]))


# --- pairs of collectives against a single-process reference ------------------------------------


def weight(rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64) / rows**0.5


def serial_mlp(x, up, down):
    return torch.nn.functional.gelu(x @ up) @ down


def mlp_on_ranks(enter, leave, sharded):
    """A two-layer MLP, its hidden units cut over the axis, between the pair (enter, leave).

    x is replicated, or cut by rows with ``sharded``. Returns output and gradients of the loss
    sum(y * c): of x and of this rank's pieces of the two weights.
    """
    axis = make_mesh().dp
    x, up, down, c = weight(8, 6, 1), weight(6, 16, 2), weight(16, 6, 3), weight(8, 6, 4)
    if sharded:
        x, c = comm.own_shard(x, axis), comm.own_shard(c, axis)
    pieces = [x.clone(), comm.own_shard(up, axis, 1), comm.own_shard(down, axis, 0)]
    inputs = [piece.clone().requires_grad_() for piece in pieces]
    y = leave(serial_mlp(enter(inputs[0], axis), *inputs[1:]), axis)
    (y * c).sum().backward()
    return y.detach(), [one.grad for one in inputs]


def serial_gradients():
    inputs = [weight(8, 6, 1), weight(6, 16, 2), weight(16, 6, 3)]
    for one in inputs:
        one.requires_grad_()
    y = serial_mlp(*inputs)
    (y * weight(8, 6, 4)).sum().backward()
    return y.detach(), [one.grad for one in inputs]


def close(got, want):
    return float((got - want).abs().max()) <= 1e-12 * float(want.abs().max())


def cut(whole, n, rank, dim):
    return whole.chunk(n, dim)[rank]


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("pair", "sharded"),
    [
        ((comm.copy_to, comm.reduce_from), False),
        ((comm.gather_from_sequence, comm.reduce_scatter_to), True),
    ],
)
def test_pairs_equal_one_process(worlds, n, pair, sharded):
    y, (gx, gup, gdown) = serial_gradients()
    for rank, (got_y, got) in enumerate(worlds(n).run(mlp_on_ranks, *pair, sharded)):
        if sharded:
            want_y, want_x = cut(y, n, rank, 0), cut(gx, n, rank, 0)
        else:
            want_y, want_x = y, gx
        assert close(got_y, want_y)
        assert close(got[0], want_x)
        assert close(got[1], cut(gup, n, rank, 1))
        assert close(got[2], cut(gdown, n, rank, 0))


def test_the_wrong_gather_has_right_outputs_and_wrong_gradients(worlds):
    y, (gx, *_) = serial_gradients()

    def gather_rows(x, axis):
        return comm.gather_from(x, axis, 0)

    results = worlds(4).run(mlp_on_ranks, gather_rows, comm.reduce_scatter_to, True)
    for rank, (got_y, got) in enumerate(results):
        assert close(got_y, cut(y, 4, rank, 0))
        assert not close(got[0], cut(gx, 4, rank, 0))


def rows_on_ranks(join):
    """Each rank works on its rows of a replicated tensor; ``join`` makes them whole again."""
    axis = make_mesh().dp
    x = weight(8, 6, 1).requires_grad_()
    y = join(torch.tanh(comm.scatter_to(x, axis, 0)), axis, 0)
    (y * y * weight(8, 6, 4)).sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("n", [1, 2, 4])
def test_scatter_and_gather_equal_one_process(worlds, n):
    x = weight(8, 6, 1).requires_grad_()
    y = torch.tanh(x)
    (y * y * weight(8, 6, 4)).sum().backward()
    for got_y, got_x in worlds(n).run(rows_on_ranks, comm.gather_from):
        assert torch.equal(got_y, y.detach())
        assert close(got_x, x.grad)
    for got_y, got_x in worlds(n).run(rows_on_ranks, comm.gather_from_sequence):
        assert torch.equal(got_y, y.detach())
        assert close(got_x, n * x.grad), (
            "gather_from_sequence counts every rank's equal use: n times"
        )


def softmax_over_shards():
    """Softmax along a dim that is cut over the axis: all_to_all to the other dim and back."""
    axis = make_mesh().dp
    x = comm.own_shard(weight(8, 16, 5), axis, 0).requires_grad_()
    whole = comm.all_to_all(x, axis, split_dim=1, join_dim=0)
    y = comm.all_to_all(torch.softmax(whole, 0), axis, split_dim=0, join_dim=1)
    (y * comm.own_shard(weight(8, 16, 6), axis, 0)).sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_all_to_all_equals_one_process(worlds, n):
    x = weight(8, 16, 5).requires_grad_()
    y = torch.softmax(x, 0)
    (y * weight(8, 16, 6)).sum().backward()
    for rank, (got_y, got_x) in enumerate(worlds(n).run(softmax_over_shards)):
        assert close(got_y, cut(y.detach(), n, rank, 0))
        assert close(got_x, cut(x.grad, n, rank, 0))


def lopsided_counts(n):
    """As uneven_counts, but what goes there is not what comes back."""
    return [[(sender + 2 * receiver) % 3 for receiver in range(n)] for sender in range(n)]


def rows_there_and_back():
    """Every row is squared where it arrives, weighted by where that is, and returned."""
    axis = make_mesh().dp
    n, rank = axis.size, axis.rank
    counts = lopsided_counts(n)
    incoming = [counts[sender][rank] for sender in range(n)]
    x = weight(40, 3, 20 + rank)[: sum(counts[rank])].requires_grad_()
    arrived = comm.all_to_all_v(x, axis, counts[rank], incoming)
    returned = comm.all_to_all_v((rank + 1) * arrived**2, axis, incoming, counts[rank])
    (returned * weight(40, 3, 40 + rank)[: len(x)]).sum().backward()
    return x.detach(), arrived.detach(), returned.detach(), x.grad


@pytest.mark.parametrize("n", WORLDS)
def test_rows_come_back_to_where_they_were(worlds, n):
    counts = lopsided_counts(n)
    results = worlds(n).run(rows_there_and_back)
    sent = [torch.split(x, counts[rank]) for rank, (x, *_) in enumerate(results)]
    for rank, (x, arrived, returned, grad) in enumerate(results):
        assert torch.equal(arrived, joined([pieces[rank] for pieces in sent], 0))
        factor = torch.arange(1.0, n + 1).repeat_interleave(torch.tensor(counts[rank]))[:, None]
        assert torch.equal(returned, factor * x**2)
        torch.testing.assert_close(grad, 2 * factor * x * weight(40, 3, 40 + rank)[: len(x)])


def test_gradients_agree_with_finite_differences(worlds):
    """No autograd in the reference: the loss of all ranks, with one number of one shard moved."""

    def differences():
        axis = make_mesh().dp
        up = weight(6, 3, axis.rank)  # other weights on every rank: the full x is used differently
        start = comm.own_shard(weight(8, 6, 1), axis)

        def loss(x):
            return torch.tanh(
                comm.reduce_scatter_to(comm.gather_from_sequence(x, axis) @ up, axis)
            ).sum()

        x = start.clone().requires_grad_()
        loss(x).backward()
        worst = 0.0
        for owner in range(axis.size):
            for row, column in ((0, 0), (1, 4)):
                step = torch.zeros_like(start)
                step[row, column] = 1e-6 * (owner == axis.rank)
                change = comm.all_reduce(loss(start + step) - loss(start - step), axis)
                if owner == axis.rank:
                    worst = max(worst, abs(float(change) / 2e-6 - float(x.grad[row, column])))
        return worst

    assert max(worlds(4).run(differences)) < 1e-8


def test_a_second_derivative_is_refused_and_not_wrong(worlds):
    def twice():
        x = torch.ones(3, requires_grad=True)
        y = comm.copy_to(x, make_mesh().dp).pow(2).sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        try:
            first.sum().backward()
        except RuntimeError as error:
            return str(error)

    assert all("once_differentiable" in message for message in worlds(2).run(twice))


def test_results_carry_no_gradient_on_one_rank_either(worlds):
    """Else a learner's layer would train with n = 1 and stop training with n = 2."""

    def through():
        axis = make_mesh().dp
        x = torch.ones(4, 4, requires_grad=True)
        plain = [comm.all_reduce, comm.all_reduce_max, comm.all_gather, comm.reduce_scatter]
        plain += [comm.broadcast, comm.ring_all_reduce, comm.tree_all_reduce]
        return [op.__name__ for op in plain if op(x, axis).requires_grad]

    assert worlds(1).run(through) == [[]]
    assert worlds(2).run(through) == [[], []]


def test_all_to_all_carries_gradients_where_its_input_requires_them_and_only_there(worlds):
    def through():
        axis, x = make_mesh().dp, torch.ones(4, 4, requires_grad=True)
        rows = [4 // axis.size] * axis.size
        moves = [comm.all_to_all, lambda x, axis: comm.all_to_all_v(x, axis, rows, rows)]
        carried = [move(x, axis).requires_grad for move in moves]
        carried += [move(x.detach(), axis).requires_grad for move in moves]
        with torch.no_grad():
            carried += [move(x, axis).requires_grad for move in moves]
        return carried

    for n in (1, 2):
        assert list(worlds(n).run(through)) == [[True, True, False, False, False, False]] * n


def functions_of_instruments(run_it):
    """Names of the functions in comm/instruments that run inside ``run_it()``."""
    found, folder = set(), os.path.dirname(instruments.__file__)

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            found.add(frame.f_code.co_name)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run_it()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def every_way():
    axis = make_mesh().dp
    x = torch.ones(4, requires_grad=True)

    def calls():
        comm.all_reduce(x, axis)
        comm.start_all_reduce(x, axis).wait()
        comm.all_to_all(x, axis).sum().backward()
        comm.exchange(x, axis, axis.next, axis.previous)

    return functions_of_instruments(lambda: (make_mesh(), calls()))


def test_without_instruments_nothing_of_theirs_runs(worlds):
    assert worlds(2).run(every_way) == [set()] * 2
    for name, function in (("checked", "_compare_calls"), ("links", "occupy")):
        conditions = {"checked": True, "links": Links(Link(0.0, 1e12), Link(0.0, 1e12))}
        for found in worlds(2).run(every_way, **{name: conditions[name]}):
            assert function in found, "the profile would see them"


def test_a_shard_is_a_copy_so_that_the_whole_can_be_freed(worlds):
    def storage():
        axis = make_mesh().dp
        return comm.own_shard(torch.ones(8), axis).untyped_storage().nbytes()

    assert worlds(4).run(storage) == [2 * 4] * 4


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_flat_gather_fills_what_the_caller_has(worlds, n):
    """From a shard of its own, and from the very piece of the full tensor that is this rank's."""

    def gathered():
        mesh = make_mesh()
        full = torch.zeros(2 * n, dtype=torch.bfloat16)
        view, mine = full.view(2, n), full.chunk(n)[mesh.rank]
        comm.start_all_gather_flat(full, torch.full_like(mine, mesh.rank), mesh.dp).wait()
        first = view.clone()
        mine.add_(10)
        handle = comm.start_all_gather_flat(full, mine, mesh.dp, label="again")
        assert handle.wait() is full
        return first, view, mesh.ledger.wire_bytes("dp"), mesh.trace.spans[-1].label

    want = torch.arange(n).repeat_interleave(2).view(2, n).bfloat16()
    for first, second, sent, label in worlds(n).run(gathered):
        assert torch.equal(first, want)
        assert torch.equal(second, want + 10)
        assert sent == 2 * (n - 1) * 4
        assert label == "again"


# --- beside bare torch.distributed -------------------------------------------------------------


def contestants_agree():
    axis = make_mesh().dp
    x = torch.arange(6.0) + axis.rank
    return [torch.equal(ours(x, axis), bare(x, axis)) for ours, bare in bench.PAIRS.values()]


def test_the_bench_compares_calls_that_give_the_same(worlds):
    assert worlds(2).run(contestants_agree) == [[True] * 3] * 2


def test_the_table_of_the_bench():
    row = {
        "op": "all_reduce",
        "bytes": 1000,
        "microseconds": {"ours": 181.0, "bare": 160.5, "bare again": 160.0},
        "ratio": 1.128,
        "noise": 1.0,
    }
    head, columns, line = bench.text({"ranks": 2, "rounds": 20, "calls": [row]}).splitlines()
    assert head.endswith("2 ranks, median of 20 rounds")
    assert columns.split() == "bytes ours, us bare, us ours/bare noise aim".split()
    assert line.split() == ["all_reduce", "1,000", "181.0", "160.5", "1.13", "1.00", "1.25"]
