"""Answers to katas 16b-1 to 16b-3 that must be rejected or accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from attack import Attacks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from course_lib import comm
from course_lib.grading.exercise import Wrong
from course_lib.mesh import make_mesh

REFUSAL = "this is what you are asked to write"
ELSEWHERE = "expected its calls to use the group"


# --- 16b-1
def _ring(
    x: Tensor,
    group: Any,
    *,
    halves: int = 2,
    world: bool = False,
    local: bool = False,
    waits: bool = True,
    in_place: bool = False,
    equal: bool = False,
    ranks: int | None = None,
    scale: bool = False,
    rest: bool = False,
    unnamed: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A ring in the other direction, with isend and irecv; right, or with a mistake."""
    group = dist.group.WORLD if world else group
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    flat = x.contiguous().view(-1).to(dtype or x.dtype)
    shards = list(flat.view(n, -1) if equal else flat.tensor_split(n))
    if rest:  # the last shard takes the remainder
        size = len(flat) // n
        shards = list(flat.split([size] * (n - 1) + [len(flat) - (n - 1) * size]))
    turns = (ranks or n) - 1
    works = []
    for turn in range(halves * turns):
        leaving, arriving = (rank + turn) % n, (rank + turn + 1) % n
        got = torch.empty_like(shards[arriving])
        peers = (rank - 1) % n, (rank + 1) % n
        if unnamed:  # messages in the group of all ranks
            to, source = (dist.get_global_rank(group, peer) for peer in peers)
            works += [dist.isend(shards[leaving], to)]
            dist.irecv(got, source).wait()
        elif local:  # ranks of the group, where torch expects global ones
            works += [dist.isend(shards[leaving], peers[0], group)]
            dist.irecv(got, peers[1], group).wait()
        else:
            works += [dist.isend(shards[leaving], group=group, group_dst=peers[0])]
            dist.irecv(got, group=group, group_src=peers[1]).wait()
        if turn >= turns:
            shards[arriving] = got
        elif in_place:
            shards[arriving] += got
        else:
            shards[arriving] = shards[arriving] + got
    for work in works if waits else ():
        work.wait()
    total = torch.cat(list(shards)).view(x.shape)
    return (total / n if scale else total).to(x.dtype)


def _rings(**mistake: Any) -> Callable[[Tensor, Any], Tensor]:
    return lambda x, group: _ring(x, group, **mistake)


def _whole_x_around(x: Tensor, group: Any) -> Tensor:
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    total = passed = x.contiguous()
    for _ in range(n - 1):
        got = torch.empty_like(passed)
        send = dist.isend(passed, group=group, group_dst=(rank + 1) % n)
        dist.irecv(got, group=group, group_src=(rank - 1) % n).wait()
        send.wait()
        passed, total = got, total + got
    return total


def _gathers_and_sums(x: Tensor, group: Any) -> Tensor:
    every = [torch.empty_like(x.contiguous()) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, x.contiguous(), group=group)
    return torch.stack(every).sum(0)


def _first_result(x: Tensor, group: Any, seen: list[Tensor] = []) -> Tensor:  # noqa: B006
    if not seen:
        seen.append(_ring(x, group))
    return seen[0]


def _two_halves(x: Tensor, group: Any) -> Tensor:
    """Two loops over rows of one buffer, blocking calls, odd ranks receive first."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    ranks = dist.get_process_group_ranks(group)
    total, bounds = x.detach().clone(memory_format=torch.contiguous_format).view(-1), [0]
    for shard in total.tensor_split(n):
        bounds.append(bounds[-1] + shard.numel())

    def turn(leaving: int) -> tuple[Tensor, Tensor]:
        arriving = (leaving - 1) % n
        mine = total[bounds[arriving] : bounds[arriving + 1]]
        got = torch.empty_like(mine)
        sends = (dist.isend, total[bounds[leaving] : bounds[leaving + 1]], ranks[(rank + 1) % n])
        receives = (dist.irecv, got, ranks[rank - 1])
        works = [start(t, peer, group) for start, t, peer in (receives, sends)]
        for work in works:
            work.wait()
        return mine, got

    for step in range(n - 1):
        mine, got = turn((rank - step - 1) % n)
        mine += got
    for step in range(n - 1):
        mine, got = turn((rank - step) % n)
        mine.copy_(got)
    return total.view(x.shape)


def _by_parity(x: Tensor, group: Any) -> Tensor:
    """Blocking calls: even ranks send first. No message for an empty shard."""
    n, rank = group.size(), group.rank()
    total = x.clone(memory_format=torch.contiguous_format)
    shards = total.view(-1).tensor_split(n)
    for turn in range(2 * (n - 1)):
        leaving, arriving = shards[(rank - turn) % n], shards[(rank - turn - 1) % n]
        got = torch.empty_like(arriving)
        for sends in (True, False) if rank % 2 == 0 else (False, True):
            if sends and leaving.numel():
                dist.send(leaving, group=group, group_dst=(rank + 1) % n)
            elif not sends and got.numel():
                dist.recv(got, group=group, group_src=(rank - 1) % n)
        arriving.copy_(arriving + got if turn < n - 1 else got)
    return total


# --- 16b-2
class Right:
    """Closures as hooks, a count per bucket, and an average before the sum; or with a mistake."""

    waits, hooks, ordered, resets, every_backward = True, True, True, True, False
    waits_in_hook, skips_unused, world, divides = False, False, False, True
    exclusive = 0  # bytes
    limit: ClassVar[int | None] = None

    def __init__(self, parameters: list[nn.Parameter], bucket_bytes: int, group: Any) -> None:
        self.group = dist.group.WORLD if self.world else group
        self.n = self.ranks() if self.divides else 1
        self.on, self.sent, limit = True, [], self.limit or bucket_bytes
        self.buckets: list[list[nn.Parameter]] = [[]]
        for p in parameters[::-1]:
            used = sum(q.nbytes for q in self.buckets[-1]) + self.exclusive
            if self.buckets[-1] and used + p.nbytes > limit:
                self.buckets.append([])
            self.buckets[-1].append(p)
        self.left = [len(bucket) for bucket in self.buckets]
        for number, bucket in enumerate(self.buckets if self.hooks else ()):
            for p in bucket:
                p.register_post_accumulate_grad_hook(lambda p, number=number: self.hook(number))

    def ranks(self) -> int:
        return dist.get_world_size(self.group)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        self.on = self.every_backward
        yield
        self.on = True

    def hook(self, number: int) -> None:
        self.left[number] -= self.on
        while len(self.sent) < len(self.buckets) and self.left[len(self.sent)] == 0:
            self.send()

    def send(self) -> None:
        bucket = self.buckets[len(self.sent)]
        flat = torch.cat([
            (torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket
        ])  # fmt: skip
        self.sent.append((flat.div_(self.n), self.start(flat)))
        if self.waits_in_hook:
            self.sent[-1][1].wait()

    def start(self, flat: Tensor) -> Any:
        return dist.all_reduce(flat, group=self.group, async_op=True)

    def finish(self) -> None:
        while len(self.sent) < len(self.buckets):
            self.send()
        for bucket, (flat, work) in zip(self.buckets, self.sent, strict=True):
            if self.waits and not self.waits_in_hook and work:
                work.wait()
            place = 0
            for p in bucket:
                if not (self.skips_unused and p.grad is None):
                    p.grad = flat[place : place + p.numel()].reshape(p.shape)
                place += p.numel()
        if self.resets:
            self.sent, self.left = [], [len(bucket) for bucket in self.buckets]


class Alone(Right):
    def finish(self) -> None:
        pass

    def hook(self, number: int) -> None:
        pass


class Sums(Right):
    divides = False


class OfTheWorld(Right):
    def ranks(self) -> int:
        return dist.get_world_size()


class InTheWorld(Right):
    world = True


class NeverWaits(Right):
    waits = False


class WaitsInHook(Right):
    waits_in_hook = True


class NoHooks(Right):
    hooks = False


class NeverResets(Right):
    resets = False


class EveryBackward(Right):
    every_backward = True


class SkipsUnused(Right):
    skips_unused = True


class OneBucket(Right):
    limit = 10**9


class NeverQuiteFull(Right):
    """A bucket has fewer than bucket_bytes."""

    exclusive = 1


class LosesEarlier(Right):
    """Sends zeros for a parameter whose hook did not fire in the last backward."""

    def hook(self, number: int) -> None:
        self.fired = [*getattr(self, "fired", []), number] if self.on else []
        super().hook(number)

    def finish(self) -> None:
        for number in range(len(self.sent), len(self.buckets)):
            if number not in self.fired:
                for p in self.buckets[number]:
                    p.grad = None
        super().finish()


class AsTheyFill(Right):
    """Sends a bucket as soon as it is full, in whatever order."""

    def hook(self, number: int) -> None:
        self.left[number] -= self.on
        if self.left[number] == 0:
            sent, full = len(self.sent), self.mine[number]
            rest = [bucket for bucket in self.buckets[sent:] if bucket is not full]
            self.buckets = [*self.buckets[:sent], full, *rest]
            self.send()

    def __init__(self, parameters: list[nn.Parameter], bucket_bytes: int, group: Any) -> None:
        super().__init__(parameters, bucket_bytes, group)
        self.mine = list(self.buckets)


class LeavesTheRest(Right):
    """finish waits only for what the hooks have sent."""

    def finish(self) -> None:
        buckets, self.buckets = self.buckets, self.buckets[: len(self.sent)]
        super().finish()
        self.buckets, self.left = buckets, [len(bucket) for bucket in buckets]


class Gathers(Right):
    def start(self, flat: Tensor) -> Any:
        every = [torch.empty_like(flat) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(every, flat, group=self.group)
        flat.copy_(torch.stack(every).sum(0))


class ByTorch(Right):
    def finish(self) -> None:
        model = nn.Linear(1, 1)
        DistributedDataParallel(model, process_group=self.group)(torch.ones(1))


class InOneBuffer(Right):
    """All gradients in one flat tensor that is made once; buckets are its slices."""

    def __init__(self, parameters: list[nn.Parameter], bucket_bytes: int, group: Any) -> None:
        super().__init__(parameters, bucket_bytes, group)
        many = [sum(p.numel() for p in bucket) for bucket in self.buckets]
        self.slices = parameters[0].detach().new_empty(sum(many)).split(many)

    def send(self) -> None:
        flat, place = self.slices[len(self.sent)], 0
        for p in self.buckets[len(self.sent)]:
            flat[place : place + p.numel()] = 0.0 if p.grad is None else p.grad.flatten()
            place += p.numel()
        self.sent.append((flat, self.start(flat)))

    def finish(self) -> None:
        super().finish()
        for p in (p for bucket in self.buckets for p in bucket):
            p.grad = p.grad / self.n  # type: ignore[operator]


# --- 16b-3
def _sum(x: Tensor, group: Any) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _same(x: Tensor, group: Any) -> Tensor:
    return x.view_as(x)


def _mean(x: Tensor, group: Any) -> Tensor:
    return _sum(x, group) / dist.get_world_size(group)


def _world(x: Tensor, group: Any) -> Tensor:
    return _sum(x, dist.group.WORLD)


def _unwaited(x: Tensor, group: Any) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group, async_op=True)
    return total


def _gathered_sum(x: Tensor, group: Any) -> Tensor:
    every = [torch.empty_like(x.contiguous()) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, x.contiguous(), group=group)
    return torch.stack(every).sum(0)


class _Operator(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, there: Any, back: Any) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return ctx.back(gradient, ctx.group), None, None, None


def _column(there: Any = _same, back: Any = _sum) -> Any:
    return lambda x, weight, bias, group: F.linear(
        _Operator.apply(x, group, there, back), weight, bias
    )


def _row(there: Any = _sum, back: Any = _same) -> Any:
    return lambda h, weight, bias, group: (
        _Operator.apply(F.linear(h, weight), group, there, back) + bias
    )


def _row_with_bias_first(share: Callable[[Any], float]) -> Any:
    return lambda h, weight, bias, group: _Operator.apply(
        F.linear(h, weight, bias * share(group)), group, _sum, _same
    )


def _column_of_first_weights(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    group: Any,
    seen: dict[Any, Any] = {},  # noqa: B006
) -> Tensor:
    seen.setdefault(id(weight), weight.detach().clone())
    return _column()(x, weight + (seen[id(weight)] - weight.detach()), bias, group)


def _column_in_place(x: Tensor, weight: Tensor, bias: Tensor, group: Any) -> Tensor:
    y = _column()(x.clone(), weight, bias, group)
    x.detach().zero_()
    return y


def _column_gathers(x: Tensor, weight: Tensor, bias: Tensor, group: Any) -> Tensor:
    y = _column()(x, weight, bias, group)
    every = [torch.empty_like(y) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, y.detach(), group=group)
    return torch.cat(every, -1)


def _row_without_graph(h: Tensor, weight: Tensor, bias: Tensor, group: Any) -> Tensor:
    return _sum(F.linear(h, weight).detach(), group) + bias


def _column_by_hook(x: Tensor, weight: Tensor, bias: Tensor, group: Any) -> Tensor:
    x = x.view_as(x)
    x.register_hook(lambda gradient: _sum(gradient, group))
    return x @ weight.mT + bias


def _row_straight_through(h: Tensor, weight: Tensor, bias: Tensor, group: Any) -> Tensor:
    part = h @ weight.mT
    total = part.detach().clone()
    dist.all_reduce(total, group=group, async_op=True).wait()
    return (part - part.detach()) + total + bias


def _row_sums_bias(h: Tensor, weight: Tensor, bias: Tensor, group: Any) -> Tensor:
    return _row()(h, weight, _Operator.apply(bias, group, _same, _sum), group)


def _column_without_bias(x: Tensor, weight: Tensor, bias: Tensor, group: Any) -> Tensor:
    return _column()(x, weight, None, group)


def _row_of_three_dims(h: Tensor, weight: Tensor, bias: Tensor, group: Any) -> Tensor:
    return _row()(h.flatten(0, -2), weight, bias, group).view(len(h), -1, len(bias))


class _ColumnAtOnce(torch.autograd.Function):
    """The all-reduce runs while the gradient of the weight is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return x @ weight.mT + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        dx = (gradient @ weight).contiguous()
        work = dist.all_reduce(dx, group=ctx.group, async_op=True)
        flat = gradient.flatten(0, -2)
        dw = flat.mT @ x.flatten(0, -2)
        work.wait()
        return dx, dw, flat.sum(0), None


def _row_by_comm(h: Tensor, weight: Tensor, bias: Tensor, group: Any) -> Tensor:
    return comm.reduce_from(F.linear(h, weight), make_mesh().world) + bias


ATTACKS = {
    "16b-1": Attacks(
        wrong=(
            Wrong(lambda x, group: x, words="nothing was added"),
            Wrong(_rings(world=True), words=ELSEWHERE),
            Wrong(_rings(local=True), words="is not part of group"),
            Wrong(_rings(waits=False), words="never waited for it"),
            Wrong(_rings(in_place=True), words="expected x to be unchanged"),
            Wrong(_rings(equal=True), words="is invalid for input of size"),
            Wrong(_rings(ranks=2), words="outputs: wrong on every rank"),
            Wrong(_rings(scale=True), words="this is the average"),
            Wrong(_rings(rest=True), words="shards may differ by one element"),
            Wrong(_rings(unnamed=True), words=ELSEWHERE),
            Wrong(_rings(dtype=torch.float32), words="the precision of float32"),
            Wrong(_rings(halves=1), words="the second half, n-1 turns"),
            Wrong(_first_result, words="in the second call of this launch"),
            Wrong(_whole_x_around, words="messages from rank 0, got 1"),
            Wrong(_gathers_and_sums, words="called all_gather: expected send and recv only"),
            Wrong(lambda x, group: comm.ring_all_reduce(x, make_mesh().world), words=REFUSAL),
        ),
        right=(_two_halves, _by_parity),
    ),
    "16b-2": Attacks(
        wrong=(
            Wrong(Alone, words="each rank still has its own gradients"),
            Wrong(Sums, words="exactly 2 times too large"),
            Wrong(OfTheWorld, words="exactly 2 times too small"),
            Wrong(InTheWorld, words=ELSEWHERE),
            Wrong(NeverWaits, words="never waited for it"),
            Wrong(WaitsInHook, words="expected no wait before backward returns"),
            Wrong(NoHooks, words="a hook sends every bucket that is full"),
            Wrong(NeverResets, words="step 1 is right and a later one is not"),
            Wrong(EveryBackward, words="only the first micro-batch"),
            Wrong(SkipsUnused, words="got None for one that this rank did not use"),
            Wrong(NeverQuiteFull, words="Fill the buckets from the last parameter to the first"),
            Wrong(LosesEarlier, words="that only the backwards inside accumulate() used"),
            Wrong(AsTheyFill, words="in the same order"),
            Wrong(LeavesTheRest, words="finish sends what is left"),
            Wrong(OneBucket, words="Fill the buckets from the last parameter to the first"),
            Wrong(Gathers, words="all_gather of"),
            Wrong(ByTorch, words=REFUSAL),
        ),
        right=(InOneBuffer,),
    ),
    "16b-3": Attacks(
        wrong=(
            Wrong((_column(back=_same), _row()), words="only the part of dx"),
            Wrong((_column(), _row(there=_same)), words="the ranks' parts are not summed"),
            Wrong(
                (_column(), _row_with_bias_first(lambda group: 1)),
                words="every rank added the outer bias",
            ),
            Wrong(
                (_column(), _row_with_bias_first(lambda group: 1 / dist.get_world_size(group))),
                words="each rank added 1/n of the outer bias",
            ),
            Wrong((_column(), _row(back=_sum)), words="the backward of row_linear sums"),
            Wrong((_column(back=_mean), _row()), words="averages the gradient of x"),
            Wrong((_column(), _row_sums_bias), words="the gradient of the outer bias is summed"),
            Wrong((_column_without_bias, _row()), words="the inner bias is missing"),
            Wrong((_column(), _row_of_three_dims), words="outputs of shape"),
            Wrong((_column(), _row(there=_world)), words=ELSEWHERE),
            Wrong((_column(), _row(there=_unwaited)), words="never waited for it"),
            Wrong((_column(), _row(there=_gathered_sum)), words="all_gather of"),
            Wrong((_column(), _row_without_graph), words="no gradient reached x"),
            Wrong((_column_gathers, _row()), words="expected column_linear to return this rank's"),
            Wrong((_column_in_place, _row()), words="the answer wrote into it"),
            Wrong((_column_of_first_weights, _row()), words="weight "),
            Wrong((_column(), _row_by_comm), words=REFUSAL),
        ),
        right=((_column_by_hook, _row_straight_through), (_ColumnAtOnce.apply, _row())),
    ),
}
