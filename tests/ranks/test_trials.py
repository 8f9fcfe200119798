"""The engine of exercises on ranks closes whole classes of wrong answers, for every exercise."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_lib import comm
from course_lib.grading.compare import agrees
from course_lib.grading.placed import PARTIAL, Placed, bytes_of, sharded
from course_lib.grading.ranked import OnRanks
from course_lib.grading.trials import Look, Mistake, Trial
from course_lib.mesh import make_mesh

SUM = Placed(
    id="99-1",
    title="a sum over the ranks",
    names=("total",),
    whole=lambda trial, draw: {"x": draw.tensor(*draw.shape())},
    inputs={"x": PARTIAL},
    reference=lambda x: x,
    mistakes=(
        Mistake("only the own part", {"outputs": lambda given: given["x"]}),
        Mistake("never", {"outputs": lambda given: given["no such input"]}),
    ),
    calls=lambda given, rank: [("all_reduce", bytes_of(given["x"][0]))],
    calls_why="One all-reduce is enough",
)


def right(x, axis):
    return comm.all_reduce(x, axis)


def raw(x, axis):
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=axis.group)
    return total


def asynchronous(x, axis):
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=axis.group, async_op=True).wait()
    return total


@pytest.mark.parametrize("answer", [right, raw, asynchronous])
@pytest.mark.parametrize("seed", range(3))
def test_right_answers_pass(answer, seed):
    verdict = SUM.judge([answer], seed)
    assert verdict.line == f"99-1: {SUM.total} of {SUM.total} passed."


def on_the_world(x, axis):
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def in_place(x, axis):
    x.copy_(comm.all_reduce(x, axis))
    return x


def never_waited(x, axis):
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=axis.group, async_op=True)
    time.sleep(0.05)
    return total


def asks_and_sleeps(x, axis):
    total = x.clone(memory_format=torch.contiguous_format)
    work = dist.all_reduce(total, group=axis.group, async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    return total


def used_early(x, axis):
    total = x.clone(memory_format=torch.contiguous_format)
    work = dist.all_reduce(total, group=axis.group, async_op=True)
    time.sleep(0.05)
    found = total * 1
    work.wait()
    return found


CACHE: dict[Any, Any] = {}


def cached(x, axis):
    if "first" not in CACHE:
        CACHE["first"] = comm.all_reduce(x, axis)
    return CACHE["first"]


def cached_by_shape(x, axis):
    if x.shape not in CACHE:
        CACHE[x.shape] = comm.all_reduce(x, axis)
    return CACHE[x.shape]


def cached_by_tensor(x, axis):
    if CACHE.get("tensor") is not x:
        CACHE["tensor"], CACHE["total"] = x, comm.all_reduce(x, axis)
    return CACHE["total"]


def with_a_barrier(x, axis):
    dist.barrier(axis.group)
    return comm.all_reduce(x, axis)


def squeezed(x, axis):
    return comm.all_reduce(x, axis).squeeze()


def one_buffer(x, axis):
    """Returns the same memory in both calls of a launch."""
    total = comm.all_reduce(x, axis)
    buffer = CACHE.setdefault("buffer", torch.empty(1000, dtype=x.dtype))
    place = buffer[: total.numel()].view(total.shape)
    return place.copy_(total)


def gathers(x, axis):
    return comm.all_gather(x[None], axis).sum(0)


def float_only(x, axis):
    return comm.all_reduce(x.float(), axis)


def contiguous_only(x, axis):
    return comm.all_reduce(x.view(-1), axis).view(x.shape)


def two_ranks_only(x, axis):
    other = comm.exchange(x, axis, axis.next, axis.previous)
    return x + other if axis.size > 1 else x


def waits_twice(x, axis):
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    peers = axis.ranks[axis.next], axis.ranks[axis.previous]
    if axis.size == 1:
        return x
    works = [dist.isend(x.contiguous(), peers[0], group=axis.group)]
    works.append(dist.irecv(received, peers[1], group=axis.group))
    for work in [*works, works[1]]:
        work.wait()
    return x + received


def twice(x, axis):
    comm.all_reduce(x, axis)
    return comm.all_reduce(x, axis)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda x, axis: x, "only the own part"),
        (lambda x, axis: None, "to be a tensor, got None"),
        (lambda x, axis: comm.all_reduce(x, axis) / axis.size, "times too small"),
        (on_the_world, "the axis has the ranks [0, 2]"),
        (in_place, "expected the input x to be unchanged on rank 0"),
        (never_waited, "never waited for it"),
        (asks_and_sleeps, "never waited for it"),
        (used_early, "in mul before wait() had returned"),
        (cached, "in the second call of this launch"),
        (cached_by_shape, "in a third call, which gets the tensors of the second"),
        (cached_by_tensor, "in a third call, which gets the tensors of the second"),
        (with_a_barrier, "got barrier, all_reduce of"),
        (squeezed, "expected outputs of shape"),
        (one_buffer, "wrong"),
        (gathers, "expected all_reduce of"),
        (float_only, "expected outputs of torch.float64"),
        (contiguous_only, "view size is not compatible"),
        (two_ranks_only, "wrong on every rank"),
        (waits_twice, "wait() was called twice for the recv with rank"),
        (twice, "One all-reduce is enough"),
    ],
)
def test_a_class_of_wrong_answers_is_rejected(answer, words):
    for seed in range(2):
        verdict = SUM.judge([answer], seed)
        assert not verdict.ok
        assert words in verdict.message


def sends(answers, given, axis, mesh):
    x = given["x"]
    if axis.rank == 0 and axis.size > 1:
        handle = dist.isend(x, axis.ranks[1], group=axis.group)
        if answers[0] == "writes":
            x.zero_()
        handle.wait()
    elif axis.rank == 1:
        dist.recv(torch.empty_like(x), axis.ranks[0], group=axis.group)
    return {"outputs": 0}


MESSAGE = OnRanks(
    id="99-2",
    title="a message",
    names=("way",),
    act=sends,
    draw=lambda trial, draw: [{"x": draw.normal(3)} for _ in range(trial.n)],
    expected=lambda given: {"outputs": 0},
    in_place=("x",),
    trials=(Trial(2), Trial(1)),
    calls=lambda given, rank: [("recv", 12, 0)] if rank else [("send", 12, 1)] * (given.n > 1),
)


class AnyAnswer(OnRanks):
    def usable(self, name, answer):
        pass


def test_a_tensor_that_travels_is_left_alone_until_wait():
    exercise = AnyAnswer(
        **{name: getattr(MESSAGE, name) for name in vars(MESSAGE) if name[0] != "_"}
    )
    assert exercise.judge(["waits"], 0).ok
    verdict = exercise.judge(["writes"], 0)
    assert "rank 0 used a tensor of send to 1 of 12 bytes in zero_" in verdict.message


SHARD = Placed(
    id="99-3",
    title="an all-gather with gradients",
    names=("gathered",),
    axes=("outputs", "gradients"),
    whole=lambda trial, draw: {"x": draw.normal(trial.n * draw.size(1, 3), draw.size(2, 4))},
    inputs={"x": sharded(0)},
    reference=lambda x: x,
    looks=(Look("peak", "nothing else", lambda given, ranks: ""),),
)


def neighbor_first(x, axis):
    full = comm.gather_from(x, axis, dim=0)
    return full.roll(len(x), 0)


def test_gradients_follow_from_the_placement():
    assert SHARD.judge([lambda x, axis: comm.gather_from(x, axis, dim=0)], 0).ok
    reduced = SHARD.judge([lambda x, axis: comm.gather_from_sequence(x, axis, dim=0)], 0)
    assert "gradient of x: exactly 2 times too large" in reduced.message
    detached = SHARD.judge([lambda x, axis: comm.all_gather(x.detach(), axis)], 0)
    assert "expected a result with a gradient" in detached.message
    assert not SHARD.judge([neighbor_first], 0).ok


def test_the_exercise_needs_no_rank_to_know_its_cases():
    titles = [title for _, title in SHARD.cases]
    assert titles[:4] == [
        "outputs, two ranks",
        "gradients, two ranks",
        "outputs, groups 0, 2 and 1, 3",
        "gradients, groups 0, 2 and 1, 3",
    ]
    assert SHARD.total == len(titles) == len(set(titles))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_tolerance_follows_from_dtype_and_terms(dtype):
    x = torch.randn(1000).to(dtype)
    step = torch.finfo(dtype).eps
    assert agrees(x * (1 + step), x, 1)
    assert not agrees(x * (1 + 40 * step), x, 1)
    assert not agrees(x.double(), x.float(), 1)
    assert not agrees(torch.full_like(x, float("nan")), x, 1)


def test_a_mesh_of_several_axes():
    def act(answers, given, axis, mesh):
        return {"outputs": (mesh.tp.size, mesh.dp.size, axis.name)}

    exercise = OnRanks(
        id="99-4",
        title="a mesh",
        names=("nothing",),
        act=act,
        draw=lambda trial, draw: [{} for _ in range(trial.world)],
        expected=lambda given: {"outputs": (2, 2, "dp")},
        trials=(Trial(4, order="tp-dp", sizes={"tp": 2, "dp": 2}, axis="dp", name="tp 2, dp 2"),),
    )
    assert exercise.judge([make_mesh], 0).ok
