"""Answers to exercise 03-4: two right ones, and the mistakes that people make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import comm, dp
from course_lib.grading.lessons.lesson_03.towers import Bucket
from course_lib.mesh import Axis


class Overlapped:
    """Right; the wrong ones differ from it in a method."""

    def __init__(self, buckets: Sequence[Bucket], axis: Axis) -> None:
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


class InRawTorch:
    """Right: counts down, one flat buffer for each bucket, torch.distributed alone."""

    def __init__(self, buckets: Sequence[Bucket], axis: Axis) -> None:
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


class DoesNothing(Overlapped):
    def ready(self, parameter: nn.Parameter) -> None:
        pass

    def finish(self) -> None:
        pass


class AllInFinish(Overlapped):
    def ready(self, parameter: nn.Parameter) -> None:
        pass


class NeverWaits(Overlapped):
    def adopt(self) -> None:
        pass


class Averages(Overlapped):
    def of_sum(self, total: Tensor) -> Tensor:
        return total / self.axis.size


class FiringOrder(Overlapped):
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


class OneAtATime(Overlapped):
    def send_full(self) -> None:
        if len(self.sent) < len(self.buckets) and not self.missing[len(self.sent)]:
            self.send(len(self.sent))


class AnyFull(Overlapped):
    """Any full bucket sends the next one in order."""

    def ready(self, parameter: nn.Parameter) -> None:
        self.missing[self.bucket_of[parameter]].discard(parameter)
        if not self.missing[self.bucket_of[parameter]] and not self.accumulating:
            self.send(len(self.sent))


class AtFirstGradient(Overlapped):
    def ready(self, parameter: nn.Parameter) -> None:
        if self.bucket_of[parameter] not in self.sent:
            self.send(self.bucket_of[parameter])


class ForgetsUnused(Overlapped):
    def finish(self) -> None:
        self.adopt()
        self.begin()


class EachMicroBatch(Overlapped):
    """Begins anew with each backward and sends all of it again."""

    def ready(self, parameter: nn.Parameter) -> None:
        if len(self.sent) == len(self.buckets):
            self.begin()
        self.missing[self.bucket_of[parameter]].discard(parameter)
        self.send_full()


class CountsEachMicroBatch(Overlapped):
    def ready(self, parameter: nn.Parameter) -> None:
        self.missing[self.bucket_of[parameter]].discard(parameter)
        self.send_full()


class CompletesInside(Overlapped):
    """Sends nothing inside accumulate(), but strikes the parameters off."""

    def ready(self, parameter: nn.Parameter) -> None:
        self.missing[self.bucket_of[parameter]].discard(parameter)
        if not self.accumulating:
            self.send_full()


class AddsToOwn(Overlapped):
    def adopt(self) -> None:
        own = {p: p.grad for p in self.bucket_of if p.grad is not None}
        super().adopt()
        for parameter, gradient in own.items():
            assert parameter.grad is not None
            parameter.grad = gradient + parameter.grad


class WaitsInHook(Overlapped):
    """The right sums, but backward stands still until each bucket is back."""

    def send(self, k: int) -> None:
        super().send(k)
        self.sent[k].wait()


class NoReset(Overlapped):
    def finish(self) -> None:
        super().finish()
        self.missing = [set() for _ in self.buckets]


class NeverEmpties(Overlapped):
    """Keeps the handles of the first step: later ones send nothing."""

    def finish(self) -> None:
        for k in range(len(self.sent), len(self.buckets)):
            self.send(k)
        self.adopt()


class ResetsWhatHooksSent(InRawTorch):
    """Counts down anew only where a hook sent: a bucket that finish sent is never full again."""

    def count_down(self, k: int) -> None:
        if self.sending:
            self.left[k] -= 1
            while len(self.works) < len(self.left) and self.left[len(self.works)] == 0:
                self.left[len(self.works)] = len(self.buckets[len(self.works)])
                self.launch(len(self.works))

    def finish(self) -> None:
        left = list(self.left)
        super().finish()
        self.left = left


class KeepsOldContent(InRawTorch):
    """Writes into its buffer what this rank has, and sends what an earlier step left beside it."""

    def launch(self, k: int) -> None:
        views = comm.unflatten(self.flats[k], self.buckets[k])
        for view, parameter in zip(views, self.buckets[k], strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
        self.works.append(dist.all_reduce(self.flats[k], async_op=True))


class Twice(Overlapped):
    def finish(self) -> None:
        super().finish()
        super().finish()


class OneByOne(Overlapped):
    def finish(self) -> None:
        for parameter in self.bucket_of:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = comm.all_reduce(own, self.axis)

    def ready(self, parameter: nn.Parameter) -> None:
        pass


class Gathers(Overlapped):
    def send(self, k: int) -> None:
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.buckets[k]]
        self.sent[k] = comm.start_all_gather(comm.flatten(parts).unsqueeze(0), self.axis)

    def adopt(self) -> None:
        for k, handle in self.sent.items():
            bucket = self.buckets[k]
            parts = comm.unflatten(handle.wait().sum(0), bucket)
            for parameter, total in zip(bucket, parts, strict=True):
                parameter.grad = total


class Unwritten(Overlapped):
    def ready(self, parameter: nn.Parameter) -> None:
        raise NotImplementedError("exercise 03-4: yours to write")


def library(buckets: Sequence[Bucket], axis: Axis) -> dp.Overlapped:
    parameters = [p for bucket in buckets[::-1] for p in bucket]
    return dp.Overlapped(parameters, axis, sum(p.nbytes for p in buckets[0]))
