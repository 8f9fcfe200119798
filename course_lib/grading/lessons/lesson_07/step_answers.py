"""Answers to 07-5: right ones, and what people get wrong."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import comm
from course_lib.grading.lessons.lesson_07.toy import Batches, Row, flat, new_stage
from course_lib.mesh import Axis
from course_lib.schedule import one_f_one_b


class Step:
    """A right answer whose parts may be overridden; raw torch, to be another than the solution."""

    def __call__(
        self, row: Row, stage: nn.Module, batches: Batches, loss: Any, axis: Axis
    ) -> float:
        self.stage, self.loss, self.m, self.axis = stage, loss, len(batches), axis
        self.rank, self.first, self.last = axis.rank, axis.rank == 0, axis.rank == axis.size - 1
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.sent: list[Any] = []
        self.messages: list[Tensor] = []  # alive until they have left
        self.total = 0.0
        for op, mb in self.order(row):
            (self.forward if op == "F" else self.backward)(mb, *batches[mb])
        for work in self.sent:
            work.wait()
        return self.total

    def order(self, row: Row) -> Row:
        return row

    def forward(self, mb: int, x: Tensor, target: Tensor) -> None:
        if not self.first:
            x = self.leaf(self.receive(x, self.rank - 1))
        y = self.stage(x)
        if self.last:
            y = self.share(self.loss(y, target))
            self.total += y.item()
        else:
            self.send(y, self.rank + 1)
        self.kept[mb] = x, y

    def backward(self, mb: int, x: Tensor, target: Tensor) -> None:
        x, y = self.take(mb)
        self.back(y, None if self.last else self.receive(y, self.rank + 1))
        if not self.first:
            self.send(self.handed_on(x, y), self.rank - 1)

    def leaf(self, x: Tensor) -> Tensor:
        return x.requires_grad_()

    def share(self, loss: Tensor) -> Tensor:
        return loss / self.m

    def take(self, mb: int) -> tuple[Tensor, Tensor]:
        return self.kept.pop(mb)

    def back(self, y: Tensor, gradient: Tensor | None) -> None:
        y.backward(gradient)

    def handed_on(self, x: Tensor, y: Tensor) -> Tensor:
        return x.grad  # type: ignore[return-value]

    def receive(self, like: Tensor, source: int) -> Tensor:
        got = torch.empty(like.shape)
        dist.recv(got, source)
        return got

    def send(self, x: Tensor, to: int) -> None:
        message = x.detach().contiguous()
        self.messages.append(message)
        self.sent.append(dist.isend(message, to))


class NoLeaf(Step):
    def send(self, x: Tensor, to: int) -> None:
        comm.send(x, self.axis, to)

    def leaf(self, x: Tensor) -> Tensor:
        return x


class WholeMean(Step):
    def share(self, loss: Tensor) -> Tensor:
        return loss


class OnlyTheReportIsMean(WholeMean):
    """Divides what it returns by m, and not what backward starts from."""

    def __call__(self, *args: Any) -> float:
        return super().__call__(*args) / self.m


class WithoutGradient(Step):
    def back(self, y: Tensor, gradient: Tensor | None) -> None:
        y.backward()


class Ones(Step):
    def back(self, y: Tensor, gradient: Tensor | None) -> None:
        y.sum().backward()


class ForwardOnly(Step):
    def backward(self, mb: int, x: Tensor, target: Tensor) -> None:
        pass


class Overwrites(Step):
    def back(self, y: Tensor, gradient: Tensor | None) -> None:
        self.stage.zero_grad()
        super().back(y, gradient)


class NewestFirst(Step):
    def take(self, mb: int) -> tuple[Tensor, Tensor]:
        return self.kept.popitem()[1]


class OutputBack(Step):
    def handed_on(self, x: Tensor, y: Tensor) -> Tensor:
        return x.detach()


class AllForwardsFirst(Step):
    def order(self, row: Row) -> Row:
        return sorted(row, key=lambda action: action[0] == "B")


class KeepsGraphs(Step):
    def take(self, mb: int) -> tuple[Tensor, Tensor]:
        return self.kept[mb]

    def back(self, y: Tensor, gradient: Tensor | None) -> None:
        y.backward(gradient, retain_graph=True)


class PlainSend(Step):
    def send(self, x: Tensor, to: int) -> None:
        dist.send(x.detach(), to)


class InHalves(Step):
    """Right in all but the number of messages."""

    def receive(self, like: Tensor, source: int) -> Tensor:
        return torch.cat([super(InHalves, self).receive(half, source) for half in like.chunk(2)])

    def send(self, x: Tensor, to: int) -> None:
        for half in x.chunk(2):
            super().send(half, to)


class ForgetsItsSends(Step):
    """Right in all but that nobody waits for what is sent."""

    def send(self, x: Tensor, to: int) -> None:
        message = x.detach().contiguous()
        message.begun = dist.isend(message, to)  # type: ignore[attr-defined]
        self.messages.append(message)


class FedWithTheBatch(Step):
    def receive(self, like: Tensor, source: int) -> Tensor:
        got = super().receive(like, source)
        return like.detach().clone() if source < self.rank else got


class TellsAllTheLoss(Step):
    def __call__(self, *args: Any) -> float:
        total = torch.tensor(super().__call__(*args))
        dist.all_reduce(total)
        return total.item()


class StepsItself(Step):
    def __call__(self, *args: Any) -> float:
        total = super().__call__(*args)
        with torch.no_grad():
            for p in self.stage.parameters():
                p.mul_(0.9)  # weight decay, say
        return total


class LastMicroBatch(Step):
    def forward(self, mb: int, x: Tensor, target: Tensor) -> None:
        self.total = 0.0
        super().forward(mb, x, target)


class Always1F1B(Step):
    """The right gradients, but never a look at the row."""

    def order(self, row: Row) -> Row:
        p, m = self.axis.size, self.m
        return [(a.op, a.mb) for a in one_f_one_b(p, m).rows[self.rank]]


def moves_weights(row: Row, stage: nn.Module, batches: Batches, loss: Any, axis: Axis) -> float:
    """A cheat: every rank fetches all weights and trains the whole model alone."""
    own = flat(p.detach() for p in stage.parameters())
    whole = []
    for piece in comm.all_gather(own, axis).chunk(axis.size):
        copy = new_stage()
        nn.utils.vector_to_parameters(piece, copy.parameters())
        whole.append(copy)
    total = sum((loss(nn.Sequential(*whole)(x), t) for x, t in batches), torch.zeros(()))
    (total / len(batches)).backward()
    for mine, theirs in zip(stage.parameters(), whole[axis.rank].parameters(), strict=True):
        mine.grad = theirs.grad
    return total.item() / len(batches)


def with_exchanges(row: Row, stage: nn.Module, batches: Batches, loss: Any, axis: Axis) -> Tensor:
    """Right, and written otherwise: between two actions one exchange, torch.autograd.backward."""
    before, behind = axis.rank - 1, axis.rank + 1
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    losses = []
    pending: list[tuple[Tensor, int]] = []
    posted = []
    for op, mb in row:
        x, target = batches[mb]
        source = before if op == "F" else behind
        wanted = [(x, source)] if 0 <= source < axis.size else []
        exchange = comm.start_exchange(axis, pending, wanted)
        posted.append(exchange)
        arrived = exchange.receives[0].wait() if wanted else None
        if op == "F":
            x = x if arrived is None else arrived.requires_grad_()
            y = stage(x)
            if behind == axis.size:
                y = loss(y, target).div(len(batches))
                losses.append(y)
            kept[mb] = x, y
            pending = [(y, behind)] if behind < axis.size else []
        else:
            x, y = kept.pop(mb)
            torch.autograd.backward([y], None if arrived is None else [arrived])
            pending = [(x.grad, before)] if x.grad is not None and before >= 0 else []
    posted.append(comm.start_exchange(axis, pending, []))
    for exchange in posted:
        for handle in exchange.sends:
            handle.wait()
    return torch.stack(losses).sum() if losses else torch.zeros(())
