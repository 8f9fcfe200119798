"""Exercises on ranks under attack: each wrong answer is rejected with its message."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from attack import DEADLINE, assert_stands, ranked, written

from course_lib import comm
from course_lib.grading import check, registry
from course_lib.grading.compare import difference
from course_lib.grading.wire import WireCall, WireCalls
from course_lib.launch import run

RING = "02-4"


# Lessons from 07 on are in a file of their own, because make test gives each worker whole files.
EARLY = {lesson for lesson in registry.lesson_numbers() if lesson < "07"}


@pytest.mark.parametrize("exercise", ranked(EARLY), ids=lambda exercise: exercise.id)
def test_an_exercise_stands_its_attack(exercise):
    assert_stands(exercise)


def does_nothing(x, axis):
    return x


def leaves(x, axis):
    import os

    os._exit(3)


def unwritten(x, axis):
    raise NotImplementedError("exercise 02-4: yours to write")


@pytest.mark.parametrize(
    ("answer", "words", "judged"),
    [
        (does_nothing, "nothing was added", 5),
        (leaves, "left the process with exit code 3", 1),
        (unwritten, "ring_all_reduce is not written yet", 1),
    ],
)
def test_an_answer_that_does_nothing_or_dies_scores_nothing(answer, words, judged):
    verdict = check("02-4", answer, seed=4, deadline=DEADLINE)
    assert (verdict.passed, verdict.total) == (0, 10)
    assert words in verdict.message
    assert sum(result.judged for result in verdict.results) == judged


def raw_ring(x, axis):
    """In raw torch: the same messages, counted although comm saw none of them."""
    n, rank = axis.size, axis.rank
    if n == 1:
        return x
    pieces = [piece.clone() for piece in x.tensor_split(n)]
    for turn in range(2 * (n - 1)):
        out, into = (rank - turn) % n, (rank - turn - 1) % n
        got = torch.empty_like(pieces[into])
        send = dist.P2POp(dist.isend, pieces[out], axis.ranks[axis.next], axis.group)
        receive = dist.P2POp(dist.irecv, got, axis.ranks[axis.previous], axis.group)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        pieces[into] = pieces[into] + got if turn < n - 1 else got
    return torch.cat(pieces)


def raw_all_reduce(x, axis):
    total = x.clone()
    dist.all_reduce(total)
    return total


def test_raw_torch_is_counted_and_cannot_slip_past():
    assert check("02-4", raw_ring, seed=4).ok
    verdict = check("02-4", raw_all_reduce, seed=4)
    assert verdict.passed == 0, "results that a collective made do not count"
    assert "called all_reduce: expected send and recv only" in verdict.message


def count_calls():
    x, rank = torch.zeros(8), dist.get_rank()
    with WireCalls() as wire:
        dist.all_reduce(x)
        dist.all_gather_into_tensor(torch.zeros(16), x)
        dist.reduce_scatter_tensor(torch.zeros(4), x)
        dist.all_to_all_single(torch.zeros(8), x)
        dist.broadcast(x, 0)
        dist.barrier()
        dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    return wire.calls


def test_what_is_counted_of_each_operation():
    first, second = run(count_calls, n=2)
    ops = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
    calls = [*(WireCall(op, 32) for op in ops), WireCall("barrier", 0)]
    assert first[:-1] == second[:-1] == calls
    assert (first[-1], second[-1]) == (WireCall("send", 32, 1), WireCall("recv", 32, 0))
    assert [int(call.wire(2)) for call in first] == [32, 32, 16, 16, 16, 0, 32]


def count_waits():
    x, peer = torch.zeros(8), 1 - dist.get_rank()
    with WireCalls() as wire:
        sending = dist.isend(x, peer)
        dist.irecv(torch.empty(8), peer).wait()
        before = [call.waited for call in wire.calls]
        sending.is_completed()
        asked = [call.waited for call in wire.calls]
        sending.wait()
        dist.send(x, peer) if peer else dist.recv(x, peer)
    dist.barrier()
    return before, asked, [call.waited for call in wire.calls]


def test_a_message_that_no_rank_waits_for_is_seen():
    seen = ([False, True], [False, True], [True, True, True])
    assert list(run(count_waits, n=2)) == [seen, seen]


RIGHT = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])]


@pytest.mark.parametrize(
    ("got", "words"),
    [
        ([x + 1e-7 for x in RIGHT], ""),
        ([4 * x for x in RIGHT], "your gradients are exactly 4 times too large"),
        ([x / 2 for x in RIGHT], "your gradients are exactly 2 times too small"),
        ([-x for x in RIGHT], "your gradients are -1 times the right value"),
        ([RIGHT[0], 2 * RIGHT[1]], "wrong on rank 1 only"),
        ([x[:2] for x in RIGHT], "expected gradients of shape [3] on rank 0, got shape [2]"),
        ([RIGHT[0], None], "expected a tensor from rank 1, got a NoneType"),
        ([x * float("nan") for x in RIGHT], "3 of 3 elements; first at [0]: expected 1, got nan"),
    ],
)
def test_differences_in_words(got, words):
    says = difference("gradients", got, RIGHT)
    assert words in says
    assert bool(says) == bool(words)


def half_ring(x, axis):
    """A ring over the pieces of chunk, which may be fewer than the ranks."""
    pieces = [piece.clone() for piece in x.chunk(axis.size)]
    for turn in range(2 * (axis.size - 1)):
        out, into = (axis.rank - turn) % axis.size, (axis.rank - turn - 1) % axis.size
        got = comm.exchange(pieces[out], axis, axis.next, axis.previous, like=pieces[into])
        pieces[into] = pieces[into] + got if turn < axis.size - 1 else got
    return torch.cat(pieces)


def test_pieces_that_may_be_missing_are_not_enough():
    assert "IndexError" in check(RING, half_ring, seed=4).message


@pytest.mark.parametrize("odd", [torch.Tensor.to_sparse, lambda x: x > 0, lambda x: x.to("meta")])
def test_values_that_cannot_be_compared_are_a_verdict(odd):
    verdict = check(RING, lambda x, axis: odd(raw_ring(x, axis)), seed=4)
    assert not verdict.ok
    assert verdict.message


def test_what_a_notebook_has_set_in_torch_spoils_no_right_answer():
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            assert check(RING, raw_ring, seed=4).ok
            step = registry.find("07-5")
            assert step.judge(written(step, "solutions"), 4).ok
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
