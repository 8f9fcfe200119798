"""Lesson 03: wrong and right answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from attack import Attacks
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel

from course_lib import comm, dp
from course_lib.grading import registry
from course_lib.grading.exercise import Answer, Wrong
from course_lib.mesh import Axis, make_mesh

Batches = Sequence[tuple[Tensor, Tensor]]
Bucket = Parameters = Sequence[nn.Parameter]
Optimizer = torch.optim.Optimizer
REFUSAL = "this is what you are asked to write"


def _table(**entries: Any) -> dict[str, Any]:
    return {**registry.find("03-1").wanted, **entries}  # type: ignore[attr-defined]


# --- 03-2
def _as_if_in_place(total: Tensor, count: Tensor, axis: Axis) -> Tensor:
    comm.all_reduce(count, axis)
    return total / count


def _in_raw_torch(total: Tensor, count: Tensor, axis: Axis) -> Tensor:
    count = count.clone()
    dist.all_reduce(count, group=axis.group)
    return total * (1 / count)


def _in_place(total: Tensor, count: Tensor, axis: Axis) -> Tensor:
    dist.all_reduce(count, group=axis.group)
    return total / count


def _with_loss(total: Tensor, count: Tensor, axis: Axis) -> Tensor:
    """Sends the loss as well, which nobody needs for the gradient."""
    comm.all_reduce(total, axis)
    return total / comm.all_reduce(count, axis)


def _one_hot(total: Tensor, count: Tensor, axis: Axis) -> Tensor:
    """Every rank's count in its own place of a long tensor."""
    counts = torch.zeros(64, dtype=torch.int64)
    counts[axis.rank] = count
    return total / comm.all_reduce(counts, axis).sum()


def _of_the_world(total: Tensor, count: Tensor, axis: Axis) -> Tensor:
    tokens = count.clone()
    dist.all_reduce(tokens)
    return total / tokens


def _remembers(total: Tensor, count: Tensor, axis: Axis) -> Tensor:
    """Sends the count in the first call only."""
    if "tokens" not in _remembered:
        _remembered["tokens"] = comm.all_reduce(count, axis)
    return total / _remembered["tokens"]


_remembered: dict[Any, Tensor] = {}


def _by_own_count(total: Tensor, count: Tensor, axis: Axis) -> Tensor:
    """Sends the count only if this rank has not had as many tokens before."""
    if (key := (axis, int(count))) not in _remembered:
        _remembered[key] = comm.all_reduce(count, axis)
    return total / _remembered[key]


def _right_gradient_only(total: Tensor, count: Tensor, axis: Axis) -> Tensor:
    """The value of the loss is the summed loss."""
    loss = total / comm.all_reduce(count, axis)
    return loss + (total - loss).detach()


def _drops_the_handle(total: Tensor, count: Tensor, axis: Axis) -> Tensor:
    tokens = count.clone()
    if axis.size > 1:
        work = dist.all_reduce(tokens, group=axis.group, async_op=True)
        while not work.is_completed():
            pass
    return total / tokens


def _with_doubles(total: Tensor, count: Tensor, axis: Axis) -> Tensor:
    return total / comm.all_reduce(count.double(), axis)


# --- 03-3
def _gradients(parameters: Parameters) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]


def _set(parameters: Parameters, flat: Tensor) -> None:
    parts = flat.split([p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)


def _flat(parameters: Parameters) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in _gradients(parameters)])


def _sums_bucket(parameters: Parameters, axis: Axis) -> None:
    _set(parameters, comm.all_reduce(_flat(parameters), axis))


def _right_in_raw_torch(parameters: Parameters, axis: Axis) -> None:
    gradients = _gradients(parameters)
    flat = _flatten_dense_tensors(gradients)
    dist.all_reduce(flat, group=axis.group)
    for parameter, total in zip(parameters, _unflatten_dense_tensors(flat, gradients), strict=True):
        if parameter.grad is None:
            parameter.grad = total
        else:
            parameter.grad.copy_(total)


def _averages(parameters: Parameters, axis: Axis) -> None:
    _set(parameters, comm.all_reduce(_flat(parameters), axis) / axis.size)


def _twice(parameters: Parameters, axis: Axis) -> None:
    _sums_bucket(parameters, axis)
    _sums_bucket(parameters, axis)


def _adds(parameters: Parameters, axis: Axis) -> None:
    own = _flat(parameters)
    _set(parameters, own + comm.all_reduce(own, axis))


def _one_by_one(parameters: Parameters, axis: Axis) -> None:
    for parameter, gradient in zip(parameters, _gradients(parameters), strict=True):
        parameter.grad = comm.all_reduce(gradient, axis)


def _loses_the_sum(parameters: Parameters, axis: Axis) -> None:
    comm.all_reduce(_flat(parameters), axis)


def _sums_weights(parameters: Parameters, axis: Axis) -> None:
    flat = comm.all_reduce(torch.cat([p.detach().flatten() for p in parameters]), axis)
    with torch.no_grad():
        for parameter, part in zip(
            parameters, flat.split([p.numel() for p in parameters]), strict=True
        ):
            parameter.copy_(part.view_as(parameter))


def _skips_unused(parameters: Parameters, axis: Axis) -> None:
    _sums_bucket([p for p in parameters if p.grad is not None], axis)


def _keeps_none(parameters: Parameters, axis: Axis) -> None:
    """Sends zeros for an unused parameter, and gives the sum only to the others."""
    unused = [p for p in parameters if p.grad is None]
    _sums_bucket(parameters, axis)
    for parameter in unused:
        parameter.grad = None


def _gathers_bucket(parameters: Parameters, axis: Axis) -> None:
    gathered = comm.all_gather(_flat(parameters).unsqueeze(0), axis)
    _set(parameters, gathered.sum(0))


def _mixes_up(parameters: Parameters, axis: Axis) -> None:
    """Flattens from the last to the first, and splits from the first to the last."""
    _set(parameters, comm.all_reduce(_flat(parameters[::-1]), axis))


def _world_bucket(parameters: Parameters, axis: Axis) -> None:
    flat = _flat(parameters)
    dist.all_reduce(flat)
    _set(parameters, flat)


def _four(parameters: Parameters, axis: Axis) -> None:
    """Only the first two parameters."""
    _sums_bucket(list(parameters)[:2], axis)


def _in_double(parameters: Parameters, axis: Axis) -> None:
    """Twice the bytes."""
    _set(parameters, comm.all_reduce(_flat(parameters).double(), axis).float())


def _by_strides(parameters: Parameters, axis: Axis) -> None:
    """Takes every gradient for contiguous."""
    parts = [g.as_strided((g.numel(),), (1,)) for g in _gradients(parameters)]
    _set(parameters, comm.all_reduce(torch.cat(parts), axis))


def _alone_does_nothing(parameters: Parameters, axis: Axis) -> None:
    if axis.size > 1:
        _sums_bucket(parameters, axis)


def _used_by_some(parameters: Parameters, axis: Axis) -> None:
    """A bucket in which no rank has a gradient for a parameter leaves it out."""
    used = comm.all_reduce(torch.tensor([float(p.grad is not None) for p in parameters]), axis)
    _sums_bucket([p for p, many in zip(parameters, used, strict=True) if many], axis)


def _into_one_buffer(parameters: Parameters, axis: Axis) -> None:
    """All buckets of a size share the memory of their sums."""
    total = comm.all_reduce(_flat(parameters), axis)
    _set(parameters, _remembered.setdefault(len(total), total).copy_(total))


def _not_waited(parameters: Parameters, axis: Axis) -> None:
    flat = _flat(parameters)
    if axis.size > 1:
        dist.all_reduce(flat, group=axis.group, async_op=True)
    _set(parameters, flat)


# --- 03-4
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
        self.buckets, self.axis = buckets, axis
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
        self.works.append(dist.all_reduce(self.flats[k], group=self.axis.group, async_op=True))

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


class OneBuffer(Overlapped):
    """All instances share the memory of the sums of one shape at one place."""

    sums: ClassVar[dict[Any, Tensor]] = {}

    def adopt(self) -> None:
        super().adopt()
        for k, bucket in enumerate(self.buckets):
            for place, p in enumerate(bucket):
                assert p.grad is not None
                p.grad = self.sums.setdefault((k, place, p.shape), p.grad).copy_(p.grad)


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
        if self.accumulating:
            return
        self.missing[self.bucket_of[parameter]].discard(parameter)
        if not self.missing[self.bucket_of[parameter]]:
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
        self.works.append(dist.all_reduce(self.flats[k], group=self.axis.group, async_op=True))


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


class OfTheWorld(Overlapped):
    """Sums over the default group."""

    def send(self, k: int) -> None:
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.buckets[k]]
        self.sent[k] = comm.start_all_reduce_flat(parts, make_mesh().world)


class SharedSets(Overlapped):
    """All instances share the sets of missing gradients and the handles."""

    state: ClassVar[dict[str, Any]] = {}

    def begin(self) -> None:
        self.state["missing"] = [set(bucket) for bucket in self.buckets]
        self.sent = {}

    @property
    def missing(self) -> Any:
        return self.state["missing"]


class WaitsInRawHook(InRawTorch):
    def launch(self, k: int) -> None:
        super().launch(k)
        self.works[-1].wait()


# --- 03-5
def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements in one tensor."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def set_gradients(model: nn.Module, total: Tensor) -> None:
    """Give every parameter its piece of the flat gradient ``total``."""
    parameters = list(model.parameters())
    for parameter, part in zip(
        parameters, total.split([p.numel() for p in parameters]), strict=True
    ):
        parameter.grad = part.view_as(parameter).clone()


def gradient_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Of the summed loss, flat."""
    return flat(torch.autograd.grad(((model(x) - y) ** 2).sum(), list(model.parameters())))


def clipped(gradient: Tensor, limit: float) -> Tensor:
    """As torch's clip_grad_norm_ does it."""
    return gradient * min(1.0, limit / (gradient.norm().item() + 1e-6))


def _train(
    model: nn.Module,
    batches: Batches,
    optimizer: Optimizer,
    max_norm: float,
    *,
    equal: bool = True,
    divide: str = "all",
    clip: str = "after",
    summed: bool = True,
    zeroed: bool = True,
    logs: bool = False,
) -> None:
    """Right, or with a mistake."""
    n = dist.get_world_size()
    parameters = list(model.parameters())
    for parameter in parameters if equal else []:
        dist.broadcast(parameter.data, 0)
    for x, y in batches:
        rows = torch.tensor(len(x))
        if divide in ("all", "all and ranks"):
            dist.all_reduce(rows)
        rows = rows.clamp(min=1) * (n if divide in ("all and ranks", "own and ranks") else 1)
        if zeroed:
            optimizer.zero_grad()
        (((model(x) - y) ** 2).sum() / rows).backward()
        if clip == "before":
            nn.utils.clip_grad_norm_(parameters, max_norm)
        for parameter in parameters if summed else []:
            dist.all_reduce(parameter.grad)
        if logs:
            dist.all_reduce(torch.stack([p.grad.norm() for p in parameters]).amax())
        if clip == "after":
            nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()


def _but(**mistake: Any) -> Answer:
    return lambda model, batches, optimizer, max_norm: _train(
        model, batches, optimizer, max_norm, **mistake
    )


def _right_flat(model: nn.Module, batches: Batches, optimizer: Optimizer, max_norm: float) -> None:
    """One flat gradient, into which the row count goes along; divided after the sum."""
    start = flat(list(model.parameters()))
    dist.broadcast(start, 0)
    nn.utils.vector_to_parameters(start, model.parameters())
    for x, y in batches:
        sent = torch.cat([gradient_of(model, x, y), torch.tensor([float(len(x))])])
        dist.all_reduce(sent)
        set_gradients(model, clipped(sent[:-1] / sent[-1], max_norm))
        optimizer.step()


def _returned(model: nn.Module, batches: Batches, optimizer: Optimizer, max_norm: float) -> None:
    """Takes the result of dist.all_reduce, which is None, for the gradient."""
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    for x, y in batches:
        optimizer.zero_grad()
        ((model(x) - y) ** 2).sum().backward()
        for parameter in model.parameters():
            parameter.grad = dist.all_reduce(parameter.grad)
        optimizer.step()


def _averages_weights(
    model: nn.Module, batches: Batches, optimizer: Optimizer, max_norm: float
) -> None:
    """Each rank trains by itself; the weights are averaged after each step."""
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    for batch in batches:
        _train(model, [batch], optimizer, max_norm, equal=False, summed=False)
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()


def _skips(model: nn.Module, batches: Batches, optimizer: Optimizer, max_norm: float) -> None:
    """A rank without rows leaves the step out."""
    some = [(x, y) for x, y in batches if len(x)]
    _train(model, some, optimizer, max_norm)


def _skips_the_count(
    model: nn.Module, batches: Batches, optimizer: Optimizer, max_norm: float
) -> None:
    """A rank without rows has nothing to add to their number, and leaves that call out."""
    start = flat(list(model.parameters()))
    dist.broadcast(start, 0)
    nn.utils.vector_to_parameters(start, model.parameters())
    for x, y in batches:
        rows = torch.tensor(len(x))
        if len(x):
            dist.all_reduce(rows)
        own = gradient_of(model, x, y) / rows.clamp(min=1)
        dist.all_reduce(own)
        set_gradients(model, clipped(own, max_norm))
        optimizer.step()


def _broadcasts_each_step(
    model: nn.Module, batches: Batches, optimizer: Optimizer, max_norm: float
) -> None:
    for batch in batches:
        _train(model, [batch], optimizer, max_norm)


def _gathers(model: nn.Module, batches: Batches, optimizer: Optimizer, max_norm: float) -> None:
    """Every rank sends its whole gradient to every other, and adds them up itself."""
    start = flat(list(model.parameters()))
    dist.broadcast(start, 0)
    nn.utils.vector_to_parameters(start, model.parameters())
    for x, y in batches:
        rows = torch.tensor(len(x))
        dist.all_reduce(rows)
        own = gradient_of(model, x, y) / rows
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, own)
        set_gradients(model, clipped(torch.stack(gathered).sum(0), max_norm))
        optimizer.step()


def _by_ddp(model: nn.Module, batches: Batches, optimizer: Optimizer, max_norm: float) -> None:
    _train(DistributedDataParallel(model), batches, optimizer, max_norm, summed=False)


def _by_library(model: nn.Module, batches: Batches, optimizer: Optimizer, max_norm: float) -> None:
    dp.start_equal(model, make_mesh().dp)


def _by_comm(model: nn.Module, batches: Batches, optimizer: Optimizer, max_norm: float) -> None:
    axis = make_mesh().dp
    for parameter in model.parameters():
        parameter.data.copy_(comm.broadcast(parameter.data, axis))


def _averages_at_the_end(
    model: nn.Module, batches: Batches, optimizer: Optimizer, max_norm: float
) -> None:
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    _train(model, batches, optimizer, max_norm, equal=False, summed=False, divide="own")
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


def _own_optimizer(
    model: nn.Module, batches: Batches, optimizer: Optimizer, max_norm: float
) -> None:
    """SGD with momentum of its own, in place of the optimizer that is given."""
    own = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    _train(model, batches, own, max_norm)


def _does_not_wait(
    model: nn.Module, batches: Batches, optimizer: Optimizer, max_norm: float
) -> None:
    """Starts the all-reduces of the gradients and waits for the last one only."""
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    for x, y in batches:
        rows = torch.tensor(len(x))
        dist.all_reduce(rows)
        optimizer.zero_grad()
        (((model(x) - y) ** 2).sum() / rows).backward()
        works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
        works[-1].wait()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()


ATTACKS = {
    "03-1": Attacks(
        wrong=(Wrong(_table(own=None), words="'own' is not filled in yet"),),
        right=(
            _table(own=(10.0, 32.0, 6.0), buckets=" edc  b a "),
            _table(law=48 / 6, **{"mean of means": (5 + 32 + 2) / 3}, bytes=2 * 3 / 4 * 5000),
        ),
    ),
    "03-2": Attacks(
        wrong=(
            Wrong(lambda total, count, axis: total, words="nothing is divided"),
            Wrong(lambda total, count, axis: total / count, words="divides by its own tokens"),
            Wrong(_as_if_in_place, words="comm.all_reduce returns the sum"),
            Wrong(
                lambda total, count, axis: total / (count * axis.size),
                words="mean of the ranks' means: every rank weighs the same",
            ),
            Wrong(
                lambda total, count, axis: total / axis.size,
                words="divides by the number of ranks; the mean is over tokens",
            ),
            Wrong(
                lambda total, count, axis: total / comm.all_reduce(count, axis) / axis.size,
                words="exactly 2 times too small",
            ),
            Wrong(
                lambda total, count, axis: (
                    comm.all_reduce(total, axis) / comm.all_reduce(count, axis)
                ),
                words="with a gradient, got one without",
            ),
            Wrong(
                lambda total, count, axis: total.item() / comm.all_reduce(count, axis).item(),
                words="with a gradient, got one without",
            ),
            Wrong(lambda total, count, axis: None, words="to be a tensor, got None"),
            Wrong(
                lambda total, count, axis: (
                    total / dp.global_tokens([torch.zeros(int(count))], axis)  # type: ignore[call-overload]
                ),
                words="this is what you are asked to write",
            ),
            Wrong(_in_place, words="the input count to be unchanged"),
            Wrong(_with_loss, words="got 2 with 12 bytes"),
            Wrong(_one_hot, words="got 1 with 512 bytes"),
            Wrong(_of_the_world, words="the axis has the ranks [0, 2]"),
            Wrong(_remembers, words="call"),
            Wrong(_by_own_count, words="every rank that still runs waits"),
            Wrong(_right_gradient_only, words="nothing is divided"),
            Wrong(_drops_the_handle, words="never waited for it"),
        ),
        right=(
            lambda total, count, axis: total / comm.all_reduce(count, axis),
            _in_raw_torch,
            _with_doubles,
        ),
    ),
    "03-3": Attacks(
        wrong=(
            Wrong(lambda parameters, axis: None, words="no sum was written to p.grad"),
            Wrong(_loses_the_sum, words="no sum was written to p.grad"),
            Wrong(_averages, words="this is the average over the ranks"),
            Wrong(_twice, words="exactly 2 times too large"),
            Wrong(_adds, words="replace the gradient by the sum"),
            Wrong(_sums_weights, words="the input weights to be unchanged"),
            Wrong(_mixes_up, words="gradients: wrong on every rank"),
            Wrong(_keeps_none, words="counts as zeros"),
            Wrong(_skips_unused, words="counts as zeros"),
            Wrong(_one_by_one, words="One all-reduce of one flat tensor"),
            Wrong(_gathers_bucket, words="got all_gather of"),
            Wrong(lambda parameters, axis: dp.Bucketed(parameters, axis).finish(), words=REFUSAL),
            Wrong(lambda parameters, axis: dp.Naive(parameters, axis).finish(), words=REFUSAL),
            Wrong(
                lambda parameters, axis: comm.start_all_reduce_flat(_gradients(parameters), axis),
                words=REFUSAL,
            ),
            Wrong(
                lambda parameters, axis: _set(
                    parameters, comm.all_reduce(comm.flatten(_gradients(parameters)), axis)
                ),
                words=REFUSAL,
            ),
            Wrong(_world_bucket, words="the axis has the ranks [0, 2]"),
            Wrong(_four, words="gradients: wrong on every rank"),
            Wrong(_in_double, words="One all-reduce of one flat tensor"),
            Wrong(_not_waited, words="never waited for it"),
            Wrong(_by_strides, words="gradients: wrong on every rank"),
            Wrong(_alone_does_nothing, words="counts as zeros"),
            Wrong(_used_by_some, words="counts as zeros"),
            Wrong(_into_one_buffer, words="to have memory of its own"),
        ),
        right=(_sums_bucket, _right_in_raw_torch),
    ),
    "03-4": Attacks(
        wrong=(
            Wrong(DoesNothing, words="no sum was written to p.grad"),
            Wrong(NeverWaits, words="never waited for it"),
            Wrong(Averages, words="exactly 2 times too small"),
            Wrong(Twice, words="exactly 2 times too large"),
            Wrong(AtFirstGradient, words="before all of its gradients were computed"),
            Wrong(FiringOrder, words="different buckets were added together"),
            Wrong(AnyFull, words="a full bucket made an earlier one leave in its place"),
            Wrong(ForgetsUnused, words="finish must send what is left"),
            Wrong(CountsEachMicroBatch, words="only the first micro-batch was sent"),
            Wrong(CompletesInside, words="counted as complete inside accumulate()"),
            Wrong(AddsToOwn, words="replace the gradient by the sum"),
            Wrong(NoReset, words="is everything reset in finish?"),
            Wrong(NeverEmpties, words="is everything reset in finish?"),
            Wrong(ResetsWhatHooksSent, words="also one that no hook sent"),
            Wrong(KeepsOldContent, words="send zeros for a parameter"),
            Wrong(EachMicroBatch, words="Each bucket is sent in one all-reduce per step"),
            Wrong(AllInFinish, words="got 0: send every bucket that is full"),
            Wrong(WaitsInHook, words="only finish may wait"),
            Wrong(OneAtATime, words="several at once if need be"),
            Wrong(OneByOne, words="Each bucket is sent in one all-reduce"),
            Wrong(Gathers, words="Each bucket is sent in one all-reduce"),
            Wrong(library, words=REFUSAL),
            Wrong(Unwritten, words="Overlapped is not written yet"),
            Wrong(lambda buckets, axis: None, words="AttributeError"),
            Wrong(OfTheWorld, words="the axis has the ranks [0, 2]"),
            Wrong(SharedSets, words="raised"),
            Wrong(OneBuffer, words="to have memory of its own"),
            Wrong(WaitsInRawHook, words="only finish may wait"),
        ),
        right=(Overlapped, InRawTorch),
    ),
    "03-5": Attacks(
        wrong=(
            Wrong(lambda model, batches, optimizer, max_norm: None, words="nothing was trained"),
            Wrong(_returned, words="no step changed them"),
            Wrong(_but(summed=False), words="sum the gradients over the ranks"),
            Wrong(_but(equal=False), words="broadcast rank 0's weights"),
            Wrong(
                _but(equal=False, divide="own and ranks"),
                words="the ranks end with different weights",
            ),
            Wrong(_but(divide="own"), words="each rank divides by its own rows"),
            Wrong(_but(divide="own and ranks"), words="averages the ranks' means"),
            Wrong(_but(divide="all and ranks"), words="the rows are enough"),
            Wrong(_but(clip="before"), words="clip after the sum"),
            Wrong(_but(clip="never"), words="nothing is clipped"),
            Wrong(_but(zeroed=False), words="zero_grad() is missing"),
            Wrong(_averages_weights, words="averaged where the gradients should be summed"),
            Wrong(_skips, words="it must make all calls of that step too"),
            Wrong(_skips_the_count, words="it must make all calls of that step too"),
            Wrong(_broadcasts_each_step, words="send the weights once"),
            Wrong(_gathers, words="once per step, by all-reduce"),
            Wrong(_by_ddp, words=REFUSAL),
            Wrong(_by_library, words=REFUSAL),
            Wrong(_by_comm, words=REFUSAL),
            Wrong(_averages_at_the_end, words="averaged where the gradients should be summed"),
            Wrong(_own_optimizer, words="weights: wrong on every rank"),
            Wrong(_does_not_wait, words="never waited for it"),
            Wrong(_but(logs=True), words="one row count once per step"),
        ),
        right=(_train, _right_flat),
    ),
}
