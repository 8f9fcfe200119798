"""03-4: buckets leave from autograd's hooks, while backward goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import comm, dp
from course_lib.grading.exercise import Wrong
from course_lib.grading.lessons.lesson_03 import towers
from course_lib.grading.ranked import RankCase, Ranked, Trial
from course_lib.mesh import Axis

TWO, FOUR, UNUSED, STEPS, ONE = range(5)
HANG = (
    "Rank 1 did not use the parameters of bucket 1, so no hook of it fired there: finish must send "
    "what is left"
)
TRIALS = (Trial(2, 1), Trial(4, 1), Trial(3, 1, HANG), Trial(2, 2), Trial(1, 1))
REFUSAL = "this is what you are asked to write"


class _Overlapped:
    """Right; the wrong ones differ from it in a method."""

    def __init__(self, buckets: Sequence[towers.Bucket], axis: Axis) -> None:
        self.buckets, self.axis = buckets, axis
        self.bucket_of = {p: k for k, bucket in enumerate(buckets) for p in bucket}
        self.accumulating = False
        self.begin()
        for parameter in self.bucket_of:
            parameter.register_post_accumulate_grad_hook(self.ready)

    def begin(self) -> None:
        self.sent: dict[int, comm.Handle] = {}
        self.missing = [set(bucket) for bucket in self.buckets]

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        self.accumulating = True
        yield
        self.accumulating = False

    def send(self, k: int) -> None:
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.buckets[k]]
        self.sent[k] = comm.start_all_reduce_flat(parts, self.axis)

    def ready(self, parameter: nn.Parameter) -> None:
        if not self.accumulating:
            self.missing[self.bucket_of[parameter]].discard(parameter)
            self.send_full()

    def send_full(self) -> None:
        while len(self.sent) < len(self.buckets) and not self.missing[len(self.sent)]:
            self.send(len(self.sent))

    def finish(self) -> None:
        for k in range(len(self.sent), len(self.buckets)):
            self.send(k)
        self.adopt()
        self.begin()

    def adopt(self) -> None:
        for k, handle in self.sent.items():
            bucket = self.buckets[k]
            for parameter, total in zip(bucket, comm.unflatten(handle.wait(), bucket), strict=True):
                parameter.grad = self.of_sum(total)

    def of_sum(self, total: Tensor) -> Tensor:
        return total


class _InRawTorch:
    """Right: counts down, one flat buffer for each bucket, torch.distributed alone."""

    def __init__(self, buckets: Sequence[towers.Bucket], axis: Axis) -> None:
        self.buckets = buckets
        self.flats = [torch.zeros(sum(p.numel() for p in bucket)) for bucket in buckets]
        self.left = [len(bucket) for bucket in buckets]
        self.works: list[dist.Work] = []
        self.sending = True
        for k, bucket in enumerate(buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda _, k=k: self.count_down(k))

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        self.sending = False
        yield
        self.sending = True

    def count_down(self, k: int) -> None:
        if self.sending:
            self.left[k] -= 1
            while len(self.works) < len(self.left) and self.left[len(self.works)] == 0:
                self.launch(len(self.works))

    def launch(self, k: int) -> None:
        torch.cat(
            [
                (torch.zeros_like(p) if p.grad is None else p.grad).flatten()
                for p in self.buckets[k]
            ],
            out=self.flats[k],
        )
        self.works.append(dist.all_reduce(self.flats[k], async_op=True))

    def finish(self) -> None:
        while len(self.works) < len(self.left):
            self.launch(len(self.works))
        for work, flat, bucket in zip(self.works, self.flats, self.buckets, strict=True):
            work.wait()
            for parameter, part in zip(
                bucket, flat.split([p.numel() for p in bucket]), strict=True
            ):
                parameter.grad = part.view_as(parameter).clone()
        self.works.clear()
        self.left = [len(bucket) for bucket in self.buckets]


class _DoesNothing(_Overlapped):
    def ready(self, parameter: nn.Parameter) -> None:
        pass

    def finish(self) -> None:
        pass


class _AllInFinish(_Overlapped):
    def ready(self, parameter: nn.Parameter) -> None:
        pass


class _NeverWaits(_Overlapped):
    def adopt(self) -> None:
        pass


class _Averages(_Overlapped):
    def of_sum(self, total: Tensor) -> Tensor:
        return total / self.axis.size


class _FiringOrder(_Overlapped):
    def send_full(self) -> None:
        for k, missing in enumerate(self.missing):
            if not missing and k not in self.sent:
                self.send(k)

    def finish(self) -> None:
        for k in range(len(self.buckets)):
            if k not in self.sent:
                self.send(k)
        self.adopt()
        self.begin()


class _OneAtATime(_Overlapped):
    def send_full(self) -> None:
        if len(self.sent) < len(self.buckets) and not self.missing[len(self.sent)]:
            self.send(len(self.sent))


class _AnyFull(_Overlapped):
    """Any full bucket sends the next one in order."""

    def ready(self, parameter: nn.Parameter) -> None:
        self.missing[self.bucket_of[parameter]].discard(parameter)
        if not self.missing[self.bucket_of[parameter]] and not self.accumulating:
            self.send(len(self.sent))


class _AtFirstGradient(_Overlapped):
    def ready(self, parameter: nn.Parameter) -> None:
        if self.bucket_of[parameter] not in self.sent:
            self.send(self.bucket_of[parameter])


class _ForgetsUnused(_Overlapped):
    def finish(self) -> None:
        self.adopt()
        self.begin()


class _EachMicroBatch(_Overlapped):
    """Begins anew with each backward and sends all of it again."""

    def ready(self, parameter: nn.Parameter) -> None:
        if len(self.sent) == len(self.buckets):
            self.begin()
        self.missing[self.bucket_of[parameter]].discard(parameter)
        self.send_full()


class _CountsEachMicroBatch(_Overlapped):
    def ready(self, parameter: nn.Parameter) -> None:
        self.missing[self.bucket_of[parameter]].discard(parameter)
        self.send_full()


class _NoReset(_Overlapped):
    def finish(self) -> None:
        super().finish()
        self.missing = [set() for _ in self.buckets]


class _NeverEmpties(_Overlapped):
    """Keeps the handles of the first step: later ones send nothing."""

    def finish(self) -> None:
        for k in range(len(self.sent), len(self.buckets)):
            self.send(k)
        self.adopt()


class _Twice(_Overlapped):
    def finish(self) -> None:
        super().finish()
        super().finish()


class _OneByOne(_Overlapped):
    def finish(self) -> None:
        for parameter in self.bucket_of:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = comm.all_reduce(own, self.axis)

    def ready(self, parameter: nn.Parameter) -> None:
        pass


class _Gathers(_Overlapped):
    def send(self, k: int) -> None:
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.buckets[k]]
        self.sent[k] = comm.start_all_gather(comm.flatten(parts).unsqueeze(0), self.axis)

    def adopt(self) -> None:
        for k, handle in self.sent.items():
            bucket = self.buckets[k]
            parts = comm.unflatten(handle.wait().sum(0), bucket)
            for parameter, total in zip(bucket, parts, strict=True):
                parameter.grad = total


class _Unwritten(_Overlapped):
    def ready(self, parameter: nn.Parameter) -> None:
        raise NotImplementedError("exercise 03-4: yours to write")


def _library(buckets: Sequence[towers.Bucket], axis: Axis) -> dp.Overlapped:
    parameters = [p for bucket in buckets[::-1] for p in bucket]
    return dp.Overlapped(parameters, axis, sum(p.nbytes for p in buckets[0]))


OVERLAP = Ranked(
    id="03-4",
    title="buckets that leave while backward runs",
    names=("Overlapped",),
    hints=(
        "ready is called once for each parameter, in an order that may differ from rank to rank. "
        "What must it write down, and when may bucket k leave?",
        "Take the parameter out of what its bucket still misses. Then send buckets as long as the "
        "next one in order misses nothing: none, one or several. finish sends the rest in the "
        "same order, waits for all, puts the sums into p.grad and begins anew.",
        "ready: if self.accumulating: return; self.missing[self.bucket_of[p]].discard(p); while "
        "len(self.handles) < len(self.buckets) and not self.missing[len(self.handles)]: "
        "self.send_next(). finish: the same loop without the second condition; then for bucket, "
        "handle: zip(bucket, comm.unflatten(handle.wait(), bucket)); self.begin_step().",
    ),
    wrong=(
        Wrong(_DoesNothing, words="nothing arrived in p.grad"),
        Wrong(_NeverWaits, words="nothing arrived in p.grad"),
        Wrong(_Averages, words="your gradients are exactly 2 times too small"),
        Wrong(_Twice, words="your gradients are exactly 2 times too large"),
        Wrong(_AtFirstGradient, words="a bucket left before all of its gradients were complete"),
        Wrong(_FiringOrder, words="different buckets were added together"),
        Wrong(_AnyFull, words="bucket 0 left in its stead"),
        Wrong(_ForgetsUnused, words="finish must send what is left"),
        Wrong(_CountsEachMicroBatch, words="only the first micro-batch was sent"),
        Wrong(_NoReset, words="is all reset in finish?"),
        Wrong(_NeverEmpties, words="is all reset in finish?"),
        Wrong(_EachMicroBatch, words="calls in steps of 2 micro-batches"),
        Wrong(_AllInFinish, words="0 of 3 buckets had left"),
        Wrong(_OneAtATime, words="those that waited for it may leave too"),
        Wrong(_OneByOne, words="made 6 calls for 3 buckets"),
        Wrong(_Gathers, words="an all-reduce sends 2(n-1)/n"),
        Wrong(_library, words=REFUSAL),
        Wrong(_Unwritten, words="Overlapped is not written yet"),
        Wrong(lambda buckets, axis: None, words="AttributeError"),
    ),
    right=(_Overlapped, _InRawTorch),
    stub=_Unwritten,
    trials=TRIALS,
    inputs=lambda trial, rank, seed: (towers.task(trial, rank, seed),),
    act=towers.act,
    looks=(
        RankCase("gradients", "two ranks", TWO, towers.gradients),
        RankCase("gradients", "hooks in another order on some ranks", FOUR, towers.gradients),
        RankCase("gradients", "a bucket that a rank did not use", UNUSED, towers.gradients),
        RankCase("gradients", "two micro-batches", STEPS, towers.gradients),
        RankCase("gradients", "one rank", ONE, towers.gradients),
        RankCase("weights", "after three steps", STEPS, towers.weights),
        RankCase("wire", "calls and bytes", FOUR, towers.calls),
        RankCase("wire", "once a step", STEPS, towers.once_a_step),
        RankCase("wire", "while backward goes on", TWO, towers.while_backward_runs),
        RankCase("wire", "several at once", FOUR, towers.none_waits_in_vain),
    ),
    refused=(
        "course_lib.dp:Overlapped._ready",
        "course_lib.dp:Overlapped.finish",
        "course_lib.dp:Bucketed.finish",
        "course_lib.dp:Naive.finish",
    ),
)
