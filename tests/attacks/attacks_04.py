"""Lesson 04: wrong and right answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from attack import Attacks
from torch import Tensor, nn

from course_lib import comm
from course_lib.grading import registry
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.graders.runner.lesson_04 import Momentum
from course_lib.mesh import Axis, make_mesh

REFUSAL = "this is what you are asked to write"
WRITTEN = "the answer wrote into it"
Rule = Callable[[Tensor, Tensor], Tensor]


def _table(**entries: Any) -> dict[str, Any]:
    wanted = registry.find("04-1").wanted  # type: ignore[attr-defined]
    return {**wanted, **{key.replace("_", " "): value for key, value in entries.items()}}


class _OfTheFirst:
    """Right once: calls with equal arguments at ``places`` return the result of the first."""

    def __init__(self, *places: int) -> None:
        self.places, self.known = places, {}  # type: Any, dict[Any, Any]

    def __call__(self, *given: int) -> tuple[int, int]:
        key = tuple(given[place] for place in self.places)
        return self.known.setdefault(key, _exact(*given))


def _exact(elements: int, n: int, rank: int) -> tuple[int, int]:
    shard = -(-elements // n)
    return min(rank * shard, elements), min((rank + 1) * shard, elements)


def _by_floats(elements: int, n: int, rank: int) -> tuple[int, int]:
    shard = ceil(elements / n)
    return min(rank * shard, elements), min((rank + 1) * shard, elements)


# --- 04-3
def _cut(flat: Tensor, n: int) -> list[Tensor]:
    return list(F.pad(flat, (0, -len(flat) % n)).chunk(n))


def _step(
    weights: Tensor,
    gradients: Tensor,
    update: Rule,
    axis: Axis,
    *,
    reduce: str = "scatter",
    gather: str = "after",
    scale: float = 1.0,
    shift: int = 0,
    reverse: bool = False,
    twice: bool = False,
    cut: bool = True,
) -> Tensor:
    """Right, or with a mistake."""
    n, own = axis.size, _cut(weights, axis.size)
    if axis.size == 1:
        return update(weights, gradients)
    parts = _cut(gradients / axis.size if scale != 1 else gradients, n)
    parts = [*parts[shift:], *parts[:shift]]
    if reduce == "scatter":
        mine = comm.reduce_scatter(torch.cat(parts), axis)
    elif reduce == "all":
        mine = _cut(comm.all_reduce(gradients, axis), n)[axis.rank]
    else:
        mine = parts[axis.rank]
    full = comm.all_gather(own[axis.rank], axis) if gather == "before" else torch.cat(own)
    new = update(own[axis.rank], mine)
    if twice:
        new = Momentum(0.1)(new, mine)
    if gather == "after":
        full = comm.all_gather(new, axis)
        full = torch.cat(full.chunk(n)[::-1]) if reverse else full
    else:
        full.chunk(n)[axis.rank].copy_(new)
    return full[: len(weights)] if cut else full


def _sharded(**mistake: Any) -> Answer:
    return lambda weights, gradients, update, axis: _step(
        weights, gradients, update, axis, **mistake
    )


def _in_raw_torch(
    weights: Tensor, gradients: Tensor, update: Rule, axis: Axis, *, world: bool = False,
    waits: bool = True,
) -> Tensor:  # fmt: skip
    """Shards by all-to-all, added by the owner; gathered into a list."""
    n, rank = (dist.get_world_size(), dist.get_rank()) if world else (axis.size, axis.rank)
    group = None if world else axis.group
    pieces = torch.stack(_cut(gradients, n))
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=group)
    new = update(_cut(weights, n)[rank], received.sum(0))
    gathered = [torch.empty_like(new) for _ in range(n)]
    work = dist.all_gather(gathered, new, group=group, async_op=True)
    if waits:
        work.wait()  # type: ignore[union-attr]
    return torch.cat(gathered)[: len(weights)]


def _all_weights(weights: Tensor, gradients: Tensor, update: Rule, axis: Axis) -> Tensor:
    """Data parallelism: every rank updates everything."""
    return update(weights, comm.all_reduce(gradients, axis))


def _all_padded(weights: Tensor, gradients: Tensor, update: Rule, axis: Axis) -> Tensor:
    total = comm.all_gather(comm.reduce_scatter(torch.cat(_cut(gradients, axis.size)), axis), axis)
    return update(torch.cat(_cut(weights, axis.size)), total)[: len(weights)]


def _every_shard(weights: Tensor, gradients: Tensor, update: Rule, axis: Axis) -> Tensor:
    """One update for each shard, on every rank."""
    total = _cut(comm.all_reduce(gradients, axis), axis.size)
    pairs = zip(_cut(weights, axis.size), total, strict=True)
    return torch.cat([update(w, g) for w, g in pairs])[: len(weights)]


def _no_padding(weights: Tensor, gradients: Tensor, update: Rule, axis: Axis) -> Tensor:
    mine = comm.reduce_scatter(gradients, axis)
    return comm.all_gather(update(weights.chunk(axis.size)[axis.rank], mine), axis)


def _own_shard_only(weights: Tensor, gradients: Tensor, update: Rule, axis: Axis) -> Tensor:
    mine = comm.reduce_scatter(torch.cat(_cut(gradients, axis.size)), axis)
    return update(_cut(weights, axis.size)[axis.rank], mine)


def _only_if_needed(weights: Tensor, gradients: Tensor, update: Rule, axis: Axis) -> Tensor:
    """Leaves out the update of a shard whose gradients are all zero."""

    def lazy(shard: Tensor, gradient: Tensor) -> Tensor:
        return update(shard, gradient) if gradient.count_nonzero() else shard

    return _step(weights, gradients, lazy, axis)


def _one_reduce_more(weights: Tensor, gradients: Tensor, update: Rule, axis: Axis) -> Tensor:
    comm.all_reduce(gradients, make_mesh().world)
    return _step(weights, gradients, update, axis)


# --- 04-4
Bucket = list[nn.Parameter]


class _Given:
    """The part of the class that the exercise gives."""

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
        return F.pad(flat, (0, -len(flat) % self.axis.size))

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
    """In raw torch; a bucket is waited for when the next one is full, and counted, not a set."""

    def __init__(self, *given: Any) -> None:
        self.counted: dict[int, int] = {}
        self.pending: tuple[int, Tensor, Any] | None = None
        super().__init__(*given)

    def ready(self, parameter: nn.Parameter) -> None:
        k = self.bucket_of[parameter]
        self.counted[k] = self.counted.get(k, 0) + 1
        if self.counted[k] < len(self.buckets[k]):
            return
        self.finish()
        self.counted[k] = 0
        pieces = self.padded([self.grad(p) for p in self.buckets[k]])
        received = torch.empty_like(pieces)
        self.free(k)
        work = dist.all_to_all_single(received, pieces, group=self.axis.group, async_op=True)
        self.pending = k, received, work
        if k == len(self.buckets) - 1:
            self.finish()

    def wait(self, work: Any) -> None:
        work.wait()

    def finish(self) -> None:
        if self.pending is not None:
            k, received, work = self.pending
            self.wait(work)
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


class _NeverWaits(_RightLater):
    def wait(self, work: Any) -> None:
        while not work.is_completed():
            pass


class _DoesNothing(_Given):
    def ready(self, parameter: nn.Parameter) -> None:
        pass

    def step(self) -> None:
        pass


class _Replaces(_Right):
    def arrives(self, k: int, piece: Tensor) -> None:
        self.shards[k].grad = piece


class _StoresGradients(_Right):
    def free(self, k: int) -> None:
        pass


class _NeverAgain(_Right):
    """Nothing is missing again, so that the next micro-batch sends nothing."""

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


class _OnTheWorld(_Right):
    def reduced(self, k: int, flat: Tensor) -> Tensor:
        dist.all_reduce(flat)
        return flat.chunk(self.axis.size)[self.axis.rank].clone()


class _Neighbor(_Right):
    def reduced(self, k: int, flat: Tensor) -> Tensor:
        pieces = flat.chunk(self.axis.size)
        return comm.reduce_scatter(torch.cat([*pieces[1:], pieces[0]]), self.axis)


class _TwoHalves(_Right):
    """Two calls per bucket."""

    def reduced(self, k: int, flat: Tensor) -> Tensor:
        half = comm.reduce_scatter(flat / 2, self.axis)
        return half + comm.reduce_scatter(flat / 2, self.axis)


class _Late(_Right):
    """All buckets are sent with the last one: their gradients are all alive until then."""

    def ready(self, parameter: nn.Parameter) -> None:
        self.missing[self.bucket_of[parameter]].discard(parameter)
        if not any(self.missing):
            for k in range(len(self.buckets)):
                self.leave(k)


class _InStep(_Right):
    """Stage 1: one reduce-scatter per step."""

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


class _OnTheClass(_Right):
    """Stores the sums on the class: two instances mix them."""

    sums: dict[int, Tensor] = {}  # noqa: RUF012

    def arrives(self, k: int, piece: Tensor) -> None:
        before = self.sums.get(k)
        fits = before is not None and before.shape == piece.shape
        self.sums[k] = before + piece if fits else piece  # type: ignore[operator]
        self.shards[k].grad = self.sums[k]

    def step(self) -> None:
        self.sums.clear()
        super().step()


class _StoresBuffers(_Right):
    """Frees the gradients, and stores what it sends in a list of its own."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.sent = [self.padded(bucket) for bucket in self.buckets]

    def reduced(self, k: int, flat: Tensor) -> Tensor:
        return super().reduced(k, self.sent[k].copy_(flat)).clone()


class _OneBuffer(_Right):
    """The sums of all instances are in one buffer for each length and place."""

    sums: dict[Any, Tensor] = {}  # noqa: RUF012

    def arrives(self, k: int, piece: Tensor) -> None:
        shard, before = self.shards[k], self.sums.setdefault((k, len(piece)), piece.clone())
        before.copy_(piece if shard.grad is None else shard.grad + piece)
        shard.grad = before


# --- 04-5
Shards = Sequence[Tensor]
Result = tuple[Tensor, list[Tensor]]


def _forward(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x @ weight)


def _backward(x: Tensor, y: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    dz = dy * (1 - y * y)
    return dz @ weight.T, x.T @ dz


def _gathered(shard: Tensor, width: int, *, order: int = 1, waits: bool = True) -> Tensor:
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    work = dist.all_gather(parts, shard, async_op=True)
    if waits:
        work.wait()  # type: ignore[union-attr]
    return torch.cat(parts[::order])[: width * width].view(width, width)


def _padded(gradient: Tensor, shard: Tensor) -> Tensor:
    size = len(shard) * dist.get_world_size()
    return F.pad(gradient.flatten(), (0, size - gradient.numel()))


def _scattered(gradient: Tensor, shard: Tensor) -> Tensor:
    """Shards by all-to-all, added by their owner."""
    pieces = _padded(gradient, shard)
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces)
    return received.view(-1, len(shard)).sum(0)


def _native(gradient: Tensor, shard: Tensor) -> Tensor:
    mine = torch.empty_like(shard)
    dist.reduce_scatter(mine, list(_padded(gradient, shard).chunk(dist.get_world_size())))
    return mine


def _run(
    shards: Shards,
    x: Tensor,
    dy: Tensor,
    *,
    gather: Answer = _gathered,
    scatter: Answer = _native,
    order: int = -1,
) -> Result:
    """Right, or with another way to gather or to scatter."""
    width, passed = x.shape[1], [x]
    for shard in shards:
        passed.append(_forward(passed[-1], gather(shard, width)))
    found = []
    for layer in reversed(range(len(shards))):
        weight = gather(shards[layer], width)
        dy, dw = _backward(passed[layer], passed[layer + 1], weight, dy)
        found.append(scatter(dw, shards[layer]))
        del weight, dw
    return passed[-1], found[::order]


def _last_stays(shards: Shards, x: Tensor, dy: Tensor) -> Result:
    """The last layer stays gathered; gradients by all-to-all and a local sum."""
    width, passed, weight = x.shape[1], [x], x
    for shard in shards:
        weight = _gathered(shard, width)
        passed.append(_forward(passed[-1], weight))
    found: list[Tensor] = []
    for layer in range(len(shards) - 1, -1, -1):
        if layer < len(shards) - 1:
            weight = _gathered(shards[layer], width)
        dy, dw = _backward(passed[layer], passed[layer + 1], weight, dy)
        found.insert(0, _scattered(dw, shards[layer]))
    return passed[-1], found


def _but(**mistake: Any) -> Answer:
    return lambda shards, x, dy: _run(shards, x, dy, **mistake)


def _all_stay(shards: Shards, x: Tensor, dy: Tensor, *, again: bool = False) -> Result:
    """All weights are gathered at once: for the whole step, or again for backward."""
    width, passed = x.shape[1], [x]
    weights = [_gathered(shard, width) for shard in shards]
    for weight in weights:
        passed.append(_forward(passed[-1], weight))
    if again:
        del weights
        weights = [_gathered(shard, width) for shard in shards]
    found = []
    for layer in reversed(range(len(shards))):
        dy, dw = _backward(passed[layer], passed[layer + 1], weights[layer], dy)
        found.append(_native(dw, shards[layer]))
    return passed[-1], found[::-1]


def _scatters_last(shards: Shards, x: Tensor, dy: Tensor) -> Result:
    """Full gradients of all layers wait for the end."""
    y, whole = _run(shards, x, dy, scatter=lambda dw, shard: dw)
    return y, [_native(dw, shard) for dw, shard in zip(whole, shards, strict=True)]


def _forward_only(shards: Shards, x: Tensor, dy: Tensor) -> Result:
    y, _ = _run(shards, x, dy)
    return y, [torch.zeros_like(shard) for shard in shards]


def _piece(dw: Tensor, shard: Tensor) -> Tensor:
    return _padded(dw, shard).chunk(dist.get_world_size())[dist.get_rank()].clone()


def _all_reduced(dw: Tensor, shard: Tensor) -> Tensor:
    dist.all_reduce(dw)
    return _piece(dw, shard)


def _whole_sum(dw: Tensor, shard: Tensor) -> Tensor:
    dist.all_reduce(dw)
    return dw


def _of_next(dw: Tensor, shard: Tensor) -> Tensor:
    pieces = _padded(dw, shard).chunk(dist.get_world_size())
    return _native(torch.cat([*pieces[1:], pieces[0]]), shard)


def _own_weights(shard: Tensor, width: int) -> Tensor:
    """Nothing is gathered: the rest of the layer is zeros."""
    full = shard.new_zeros(dist.get_world_size(), len(shard))
    full[dist.get_rank()] = shard
    return full.flatten()[: width * width].view(width, width)


def _by_comm(shard: Tensor, width: int) -> Tensor:
    return comm.all_gather(shard, make_mesh().dp)[: width * width].view(width, width)


def _writes(name: str) -> Answer:
    def answer(shards: Shards, x: Tensor, dy: Tensor) -> Result:
        y, gradients = _run(shards, x, dy)
        {"x": x, "dy": dy, "shards": shards[0]}[name].add_(1)
        return y, gradients

    return answer


class _StoresLayers:
    """Gathers each layer in the first call only."""

    def __init__(self) -> None:
        self.layers: dict[Any, Tensor] = {}

    def __call__(self, shards: Shards, x: Tensor, dy: Tensor) -> Result:
        def gather(shard: Tensor, width: int) -> Tensor:
            layer = next(number for number, each in enumerate(shards) if each is shard)
            full = _gathered(shard, width)
            return self.layers.setdefault((layer, width), full)

        return _run(shards, x, dy, gather=gather)


ATTACKS = {
    "04-1": Attacks(
        wrong=(Wrong(_table(flat=None), words="'flat' is not filled in yet"),),
        right=(
            _table(owners="a, ab, bc, c", padding=(0, 0, 0, 2.0)),
            {**_table(), "kept, GB": (32.0, 11, 7.5, 4.0), "sent, GB": [7, 7, 7, 21 / 2]},
        ),
    ),
    "04-2": Attacks(
        wrong=(
            Wrong(lambda elements, n, rank: rank, words="expected a pair (begin, end), got 0"),
            Wrong(
                lambda elements, n, rank: (rank * elements / n, (rank + 1) * elements / n),
                words="expected begin and end to be whole numbers",
            ),
            Wrong(lambda elements, n, rank: _exact(elements, n, n - 1 - rank), words="expected"),
            Wrong(
                lambda elements, n, rank: _exact(elements, n, rank) if elements > n else (0, 0),
                words="expected",
            ),
            *(Wrong(_OfTheFirst(*places), words="expected") for places in ((0, 1), (0, 2), (1, 2))),
            Wrong(_by_floats, words="expected"),
        ),
        right=(_exact, lambda *given: list(_exact(*given))),
    ),
    "04-3": Attacks(
        wrong=(
            Wrong(
                lambda weights, gradients, update, axis: weights,
                words="the weights have not changed",
            ),
            Wrong(
                lambda weights, gradients, update, axis: None,
                words="expected the new weights, got a NoneType",
            ),
            Wrong(
                lambda weights, gradients, update, axis: update(weights, gradients),
                words="updates all weights with its own gradient",
            ),
            Wrong(_all_weights, words="expected update to get the own shard"),
            Wrong(_all_padded, words="expected update to get the own shard"),
            Wrong(_sharded(reduce="all"), words="as much as one all-reduce"),
            Wrong(_every_shard, words="expected one call of update per step"),
            Wrong(_sharded(gather="never"), words="only its own shard is new"),
            Wrong(_sharded(gather="before"), words="only its own shard is new"),
            Wrong(_sharded(reduce="none"), words="reduce-scatter the gradients first"),
            Wrong(_sharded(scale=0.5), words="averaged over the ranks"),
            Wrong(_sharded(shift=1), words="rank r owns shard r"),
            Wrong(_sharded(reverse=True), words="joined in another order"),
            Wrong(_sharded(twice=True), words="weights after step 1"),
            Wrong(_sharded(cut=False), words="without the padding"),
            Wrong(_own_shard_only, words="return all ranks' shards"),
            Wrong(_no_padding, words="does not split into 2 equal shards"),
            Wrong(lambda *given: _in_raw_torch(*given, world=True), words="the axis has the ranks"),
            Wrong(lambda *given: _in_raw_torch(*given, waits=False), words="wait()"),
            Wrong(
                lambda weights, gradients, update, axis: weights.copy_(
                    _step(weights, gradients, update, axis)
                ),
                words=WRITTEN,
            ),
            Wrong(_one_reduce_more, words="as much as one all-reduce"),
            Wrong(_only_if_needed, words="expected one call of update per step, got 2 in 3"),
        ),
        right=(_step, _in_raw_torch),
    ),
    "04-4": Attacks(
        wrong=(
            Wrong(_Given, words="Zero2 is not written yet"),
            Wrong(_DoesNothing, words="a shard has no gradient"),
            Wrong(_InStep, words="a shard has no gradient"),
            Wrong(_Replaces, words="add what arrives to shard.grad"),
            Wrong(_NeverAgain, words="all its gradients are missing again"),
            Wrong(_StoresGradients, words="count several times"),
            Wrong(_TooSoon, words="gradients of the shards: wrong on"),
            Wrong(_Averages, words="so sum them"),
            Wrong(_OwnGradient, words="sum over the ranks with a reduce-scatter"),
            Wrong(_Neighbor, words="rank r has the result of rank (r + 1) mod 2"),
            Wrong(_NoGather, words="no parameter has changed"),
            Wrong(_OwnOnly, words="in its own shards only"),
            Wrong(_GathersBefore, words="step updates the shards first"),
            Wrong(_NotForgotten, words="set shard.grad to None in step"),
            Wrong(_AllReduces, words="(M+1)(n-1)/n"),
            Wrong(_TwoHalves, words="one for each of"),
            Wrong(_Late, words="as soon as it is full"),
            Wrong(_OnTheWorld, words="the axis has the ranks"),
            Wrong(_NeverWaits, words="never waited for it"),
            Wrong(_OnTheClass, words="gradients of the shards"),
            Wrong(_OneBuffer, words="gradients of the shards"),
            Wrong(_StoresBuffers, words="store no buffer for each"),
        ),
        right=(_Right, _RightLater),
    ),
    "04-5": Attacks(
        wrong=(
            Wrong(lambda shards, x, dy: None, words="expected 2 values"),
            Wrong(lambda shards, x, dy: (x, list(shards)), words="y is x: no layer was run"),
            Wrong(_but(gather=_own_weights), words="with its own shard and zeros"),
            Wrong(_but(gather=lambda s, d: _gathered(s, d, order=-1)), words="in another order"),
            Wrong(_forward_only, words="gradients: wrong on every rank"),
            Wrong(_but(scatter=_piece), words="of each rank's own gradient"),
            Wrong(
                _but(scatter=lambda dw, shard: _native(dw, shard) / dist.get_world_size()),
                words="not the average",
            ),
            Wrong(_but(scatter=lambda dw, shard: _native(dw.T, shard)), words="dW is transposed"),
            Wrong(_but(scatter=_whole_sum), words="that of a shard with its padding"),
            Wrong(_but(scatter=_of_next), words="shards of another rank"),
            Wrong(_but(order=1), words="gradients[l] belongs to layer l"),
            Wrong(_but(scatter=_all_reduced), words="one reduce-scatter per layer"),
            Wrong(_all_stay, words="one reduce-scatter per layer"),
            Wrong(
                lambda shards, x, dy: _all_stay(shards, x, dy, again=True),
                words="free a layer's weights",
            ),
            Wrong(_scatters_last, words="free a layer's weights"),
            Wrong(_but(gather=_by_comm), words=REFUSAL),
            Wrong(_but(gather=lambda s, d: _gathered(s, d, waits=False)), words="wait()"),
            Wrong(_writes("x"), words=WRITTEN),
            Wrong(_writes("dy"), words=WRITTEN),
            Wrong(_writes("shards"), words=WRITTEN),
            Wrong(_StoresLayers(), words="call"),
        ),
        right=(_run, _last_stays),
    ),
}
