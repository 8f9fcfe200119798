"""04-4: stage 2, a bucket's gradients leave as soon as backward has filled it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import comm
from course_lib.grading.exercise import Wrong
from course_lib.grading.lessons.lesson_04.towers import (
    Bucket,
    act,
    calls,
    freed,
    gradients,
    inputs,
    weights,
)
from course_lib.grading.ranked import RankCase, Ranked, Trial
from course_lib.mesh import Axis

TWO, FOUR, THREE, ONE = range(4)
TRIALS = (Trial(2, 1), Trial(4, 2), Trial(3, 1), Trial(1, 2))  # size: micro-batches
REFUSAL = "this is what you are asked to write"


class _Given:
    """The part of the exercise that stands there for everybody."""

    def __init__(
        self,
        buckets: list[Bucket],
        axis: Axis,
        make_optimizer: Callable[[Sequence[Tensor]], torch.optim.Optimizer],
    ) -> None:
        self.buckets, self.axis = buckets, axis
        self.bucket_of = {p: k for k, bucket in enumerate(buckets) for p in bucket}
        self.missing = [set(bucket) for bucket in buckets]
        self.shards = [
            nn.Parameter(self.padded(bucket).chunk(axis.size)[axis.rank].clone())
            for bucket in buckets
        ]
        self.optimizer = make_optimizer(self.shards)
        for p in self.bucket_of:
            p.register_post_accumulate_grad_hook(self.ready)

    def padded(self, tensors: Sequence[Tensor]) -> Tensor:
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        return nn.functional.pad(flat, (0, -len(flat) % self.axis.size))

    def ready(self, parameter: nn.Parameter) -> None:
        raise NotImplementedError

    def step(self) -> None:
        raise NotImplementedError


class _Right(_Given):
    """With places where the mistakes below differ."""

    def ready(self, parameter: nn.Parameter) -> None:
        k = self.bucket_of[parameter]
        self.missing[k].discard(parameter)
        if not self.missing[k]:
            self.leave(k)

    def leave(self, k: int) -> None:
        self.arrives(k, self.reduced(k, self.padded([self.grad(p) for p in self.buckets[k]])))
        self.free(k)
        self.missing[k] = set(self.buckets[k])

    def grad(self, parameter: nn.Parameter) -> Tensor:
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    def reduced(self, k: int, flat: Tensor) -> Tensor:
        return comm.reduce_scatter(flat, self.axis)

    def arrives(self, k: int, piece: Tensor) -> None:
        shard = self.shards[k]
        shard.grad = piece if shard.grad is None else shard.grad + piece

    def free(self, k: int) -> None:
        for p in self.buckets[k]:
            p.grad = None

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.gather()

    def gather(self) -> None:
        for bucket, shard in zip(self.buckets, self.shards, strict=True):
            self.show(bucket, comm.all_gather(shard, self.axis))

    def show(self, bucket: Bucket, full: Tensor) -> None:
        for p in bucket:
            p.data = full[: p.numel()].view_as(p)
            full = full[p.numel() :]


class _RightLater(_Right):
    """In raw torch; a bucket lands when the next one is full, and is counted, not a set."""

    def __init__(self, *given) -> None:  # type: ignore[no-untyped-def]
        self.counted: dict[int, int] = {}
        self.pending: tuple[int, Tensor, object] | None = None
        super().__init__(*given)

    def ready(self, parameter: nn.Parameter) -> None:
        k = self.bucket_of[parameter]
        self.counted[k] = self.counted.get(k, 0) + 1
        if self.counted[k] < len(self.buckets[k]):
            return
        self.land()
        self.counted[k] = 0
        pieces = self.padded([self.grad(p) for p in self.buckets[k]])
        received = torch.empty_like(pieces)
        self.free(k)
        work = dist.all_to_all_single(received, pieces, group=self.axis.group, async_op=True)
        self.pending = k, received, work
        if k == len(self.buckets) - 1:
            self.land()

    def land(self) -> None:
        if self.pending is not None:
            k, received, work = self.pending
            work.wait()  # type: ignore[attr-defined]
            self.arrives(k, received.view(self.axis.size, -1).sum(0))
            self.pending = None

    def gather(self) -> None:
        for bucket, shard in zip(self.buckets, self.shards, strict=True):
            parts = [torch.empty_like(shard.data) for _ in range(self.axis.size)]
            dist.all_gather(parts, shard.data, group=self.axis.group)
            with torch.no_grad():
                full = torch.cat(parts)
                for p in bucket:
                    p.copy_(full[: p.numel()].view_as(p))
                    full = full[p.numel() :]


class _DoesNothing(_Given):
    def ready(self, parameter: nn.Parameter) -> None:
        pass

    def step(self) -> None:
        pass


class _Replaces(_Right):
    def arrives(self, k: int, piece: Tensor) -> None:
        self.shards[k].grad = piece


class _KeepsGradients(_Right):
    def free(self, k: int) -> None:
        pass


class _NeverAgain(_Right):
    """Waits for nothing anew, so that the next micro-batch sends nothing."""

    def ready(self, parameter: nn.Parameter) -> None:
        k = self.bucket_of[parameter]
        if parameter in self.missing[k]:
            self.missing[k].discard(parameter)
            if not self.missing[k]:
                self.leave(k)
        else:
            parameter.grad = None

    def leave(self, k: int) -> None:
        super().leave(k)
        self.missing[k] = set()

    def step(self) -> None:
        super().step()
        self.missing = [set(bucket) for bucket in self.buckets]


class _TooSoon(_Right):
    """Sends a bucket at its first gradient."""

    def ready(self, parameter: nn.Parameter) -> None:
        k = self.bucket_of[parameter]
        if len(self.missing[k]) == len(self.buckets[k]):
            self.arrives(k, self.reduced(k, self.padded([self.grad(p) for p in self.buckets[k]])))
        self.missing[k].discard(parameter)
        parameter.grad = None
        if not self.missing[k]:
            self.missing[k] = set(self.buckets[k])


class _Averages(_Right):
    def reduced(self, k: int, flat: Tensor) -> Tensor:
        return comm.reduce_scatter(flat, self.axis) / self.axis.size


class _OwnGradient(_Right):
    def reduced(self, k: int, flat: Tensor) -> Tensor:
        return flat.chunk(self.axis.size)[self.axis.rank].clone()


class _AllReduces(_Right):
    def reduced(self, k: int, flat: Tensor) -> Tensor:
        return comm.all_reduce(flat, self.axis).chunk(self.axis.size)[self.axis.rank].clone()


class _Neighbour(_Right):
    def reduced(self, k: int, flat: Tensor) -> Tensor:
        pieces = flat.chunk(self.axis.size)
        return comm.reduce_scatter(torch.cat([*pieces[1:], pieces[0]]), self.axis)


class _OneByOne(_Right):
    """A reduce-scatter for each parameter would cut other pieces; this sends the flat in two."""

    def reduced(self, k: int, flat: Tensor) -> Tensor:
        half = comm.reduce_scatter(flat / 2, self.axis)
        return half + comm.reduce_scatter(flat / 2, self.axis)


class _Late(_Right):
    """All buckets leave with the last one: their gradients are all alive till then."""

    def ready(self, parameter: nn.Parameter) -> None:
        self.missing[self.bucket_of[parameter]].discard(parameter)
        if not any(self.missing):
            for k in range(len(self.buckets)):
                self.leave(k)


class _InStep(_Right):
    """Stage 1: one reduce-scatter a step."""

    def ready(self, parameter: nn.Parameter) -> None:
        pass

    def step(self) -> None:
        for k in range(len(self.buckets)):
            self.leave(k)
        super().step()


class _NoGather(_Right):
    def gather(self) -> None:
        pass


class _OwnOnly(_Right):
    """Puts the own shard into the parameters, and gathers nothing."""

    def gather(self) -> None:
        for bucket, shard in zip(self.buckets, self.shards, strict=True):
            pieces = list(self.padded(bucket).chunk(self.axis.size))
            pieces[self.axis.rank] = shard.data
            self.show(bucket, torch.cat(pieces))


class _GathersBefore(_Right):
    def step(self) -> None:
        self.gather()
        self.optimizer.step()
        self.optimizer.zero_grad()


class _NotForgotten(_Right):
    """The gradients of the step before stay in the shards."""

    def step(self) -> None:
        self.optimizer.step()
        self.gather()


BUCKETS = Ranked(
    id="04-4",
    title="gradients leave while backward runs",
    names=("Zero2",),
    hints=(
        "A bucket is full when nothing of it is missing. What leaves then, what arrives, what may "
        "be freed, and what does the next micro-batch expect?",
        "ready: take the parameter off what is missing; if the bucket is full, reduce-scatter its "
        "flat gradient, add the piece to shard.grad, set every p.grad to None, and let all be "
        "missing again. step: optimizer, forget the gradients, gather every bucket's shards and "
        "give the parameters their values.",
        "g = comm.reduce_scatter(self.padded([p.grad for p in bucket]), self.axis); shard.grad = g "
        "if shard.grad is None else shard.grad + g. In step: full = comm.all_gather(shard, "
        "self.axis); pieces = full[: sum of numel].split([p.numel() for p in bucket]); p.data = "
        "piece.view_as(p).",
    ),
    wrong=(
        Wrong(_Given, words="Zero2 is not written yet"),
        Wrong(_DoesNothing, words="a shard has no gradient"),
        Wrong(_InStep, words="a shard has no gradient"),
        Wrong(_Replaces, words="add what arrives to shard.grad"),
        Wrong(_NeverAgain, words="it waits for its gradients anew"),
        Wrong(_KeepsGradients, words="count several times"),
        Wrong(_TooSoon, words="gradients are wrong on every rank"),
        Wrong(_Averages, words="sum them"),
        Wrong(_OwnGradient, words="nothing was summed over the ranks"),
        Wrong(_Neighbour, words="those of another rank"),
        Wrong(_NoGather, words="no parameter has changed"),
        Wrong(_OwnOnly, words="ranks end with different weights"),
        Wrong(_GathersBefore, words="the parameters follow the shards"),
        Wrong(_NotForgotten, words="are shard.grad and what is missing reset"),
        Wrong(_AllReduces, words="(M+1)(n-1)/n"),
        Wrong(_OneByOne, words="one for each is wanted"),
        Wrong(_Late, words="as soon as it is full"),
    ),
    right=(_Right, _RightLater),
    stub=_Given,
    trials=TRIALS,
    inputs=inputs,
    act=act,
    looks=(
        RankCase("gradients", "two ranks, one micro-batch", TWO, gradients),
        RankCase("gradients", "four ranks, two micro-batches", FOUR, gradients),
        RankCase("weights", "four ranks, after two steps", FOUR, weights),
        RankCase("weights", "three ranks", THREE, weights),
        RankCase("weights", "one rank", ONE, weights),
        RankCase("wire", "calls and bytes", FOUR, calls),
        RankCase("peak", "gradients are freed", FOUR, freed),
    ),
    refused=(
        "course_lib.zero.flat:FlatParameter.start_gather",
        "course_lib.zero.flat:FlatParameter.start_reduce",
        "course_lib.zero.sharded:Sharded.step",
        "course_lib.zero.stages:Zero2._ready",
    ),
)
