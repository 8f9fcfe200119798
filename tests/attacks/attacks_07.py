"""Lesson 07: wrong and right answers."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.distributed as dist
from attack import Attacks
from torch import Tensor, nn

from course_lib import comm
from course_lib.grading import registry
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.graders.judge.lesson_07 import Cells, cells, three_parts
from course_lib.grading.graders.runner.lesson_07 import flat
from course_lib.mesh import Axis
from course_lib.schedule import one_f_one_b, predicted_bubble

REFUSAL = "this is what you are asked to write"
Row = list[tuple[str, int]]
Batches = list[tuple[Tensor, Tensor]]


def _table(**entries: Any) -> dict[str, Any]:
    wanted = registry.find("07-1").wanted  # type: ignore[attr-defined]
    return {**wanted, **{key.replace("_", " "): value for key, value in entries.items()}}


# --- 07-2
def _by_search(p: int, percent: int) -> int:
    m = 1
    while 100 * (p - 1) > percent * (m + p - 1):
        m += 1
    return m


def _by_library(p: int, percent: int) -> int:
    m = 1
    while predicted_bubble("gpipe", p, m) > percent / 100:
        m += 1
    return m


# --- 07-3
def _without_the_end(p: int, m: int) -> Cells:
    return [row[: 2 * m - min(p - 1 - rank, m)] for rank, row in enumerate(three_parts(p, m))]


def _one_stage(p: int, m: int) -> Cells:
    return [["0" + cell.lstrip("0123456789") for cell in row] for row in three_parts(p, m)]


def _one_digit(p: int, m: int) -> Cells:
    """The stage from the first character only."""
    return [[cell[:1] + cell.lstrip("0123456789") for cell in row] for row in three_parts(p, m)]


def _at_most_ten(p: int, m: int) -> Cells:
    return [[cell for cell in row if int(cell[2:] or 0) < 10] for row in three_parts(p, m)]


def _by_room(p: int, m: int) -> list[str]:
    """A forward while there is room for one more, else a backward; rows as texts."""
    rows = []
    for rank in range(p):
        done = {"F": 0, "B": 0}
        row = ""
        while done["B"] < m:
            op = "F" if done["F"] < min(m, done["B"] + p - rank) else "B"
            row += f" {rank}{op}{done[op]}"
            done[op] += 1
        rows.append(row)
    return rows


# --- 07-4
def _both_send(mine: Tensor, like: Tensor, peer: int) -> Tensor:
    got = torch.empty_like(like)
    dist.send(mine, peer)
    dist.recv(got, peer)
    return got


def _both_receive(mine: Tensor, like: Tensor, peer: int) -> Tensor:
    got = torch.empty_like(like)
    dist.recv(got, peer)
    dist.send(mine, peer)
    return got


def _batch(mine: Tensor, into: Tensor, peer: int) -> list[Any]:
    ops = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, into, peer)]
    return dist.batch_isend_irecv(ops)


def _into(make: Any) -> Answer:
    """Right, but for the tensor that it receives into or returns."""

    def swap(mine: Tensor, like: Tensor, peer: int) -> Tensor:
        got = make(like)
        for work in _batch(mine, got, peer):
            work.wait()
        return got

    return swap


def _without_waiting(mine: Tensor, like: Tensor, peer: int) -> Tensor:
    got = torch.zeros_like(like)
    _batch(mine, got, peer)
    return got


class _WaitsForTheReceive:
    """What arrives is right; it holds the handle of isend and does not wait for it."""

    def __init__(self, ask: bool = False) -> None:
        self.begun: list[Any] = []
        self.ask = ask

    def __call__(self, mine: Tensor, like: Tensor, peer: int) -> Tensor:
        work = dist.isend(mine, peer)
        self.begun.append(work)
        got = torch.empty_like(like)
        dist.recv(got, peer)
        time.sleep(0.1)  # by now it has left
        if self.ask:
            work.is_completed()  # type: ignore[union-attr]
        return got


def _drops_the_handle(mine: Tensor, like: Tensor, peer: int) -> Tensor:
    dist.isend(mine, peer)
    got = torch.empty_like(like)
    dist.recv(got, peer)
    return got


class _OneBuffer:
    """Receives into one tensor for each shape, which a later exchange overwrites."""

    def __init__(self) -> None:
        self.buffers: dict[Any, Tensor] = {}

    def __call__(self, like: Tensor) -> Tensor:
        return self.buffers.setdefault((like.shape, like.dtype), torch.empty_like(like))


def _like_mine(mine: Tensor, like: Tensor, peer: int) -> Tensor:
    """Takes the dtype of mine for that of like."""
    return _into(lambda like: torch.zeros(like.shape, dtype=mine.dtype))(mine, like, peer)


def _own(mine: Tensor, like: Tensor, peer: int) -> Tensor:
    for work in _batch(mine, torch.empty_like(like), peer):
        work.wait()
    return mine


def _twice(mine: Tensor, like: Tensor, peer: int) -> Tensor:
    for _ in range(2):
        got = torch.empty_like(like)
        for work in _batch(mine, got, peer):
            work.wait()
    return got


def _next_rank(mine: Tensor, like: Tensor, peer: int) -> Tensor:
    """As in a ring: right for two ranks, for four the wrong peer."""
    got = torch.empty_like(like)
    n, rank = dist.get_world_size(), dist.get_rank()
    to, source = (rank + 1) % n, (rank - 1) % n
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, to), dist.P2POp(dist.irecv, got, source)]
    ):
        work.wait()
    return got


def _gathers(mine: Tensor, like: Tensor, peer: int) -> Tensor:
    """A collective in the place of two messages."""
    most = max(mine.numel(), like.numel())
    padded = mine.new_zeros(most)
    padded[: mine.numel()] = mine.flatten()
    every = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(every, padded)
    return every[peer][: like.numel()].view(like.shape).clone()


def _ordered(first: Any) -> Answer:
    """One side sends first, the other one receives first."""

    def swap(mine: Tensor, like: Tensor, peer: int) -> Tensor:
        got = torch.empty_like(like)
        moves = [lambda: dist.send(mine, peer), lambda: dist.recv(got, peer)]
        for move in moves if first(dist.get_rank(), peer) else reversed(moves):
            move()
        return got

    return swap


def _send_in_background(mine: Tensor, like: Tensor, peer: int) -> Tensor:
    sending = dist.isend(mine, peer)
    got = like.new_empty(like.shape)
    dist.recv(got, peer)
    if sending is not None:
        sending.wait()
    return got


def _changes_mine(mine: Tensor, like: Tensor, peer: int) -> Tensor:
    got = _send_in_background(mine, like, peer)
    mine.zero_()
    return got


# --- 07-5
class Step:
    """A right answer whose parts may be overridden; raw torch on the group of the axis."""

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
        got = torch.empty(like.shape, dtype=like.dtype)
        dist.recv(got, self.axis.ranks[source], group=self.axis.group)
        return got

    def send(self, x: Tensor, to: int) -> None:
        message = x.detach().contiguous()
        self.messages.append(message)
        self.sent.append(dist.isend(message, self.axis.ranks[to], group=self.axis.group))


class OfTheWorld(Step):
    """Ranks of the default group, whatever the axis."""

    def __call__(self, row: Row, stage: nn.Module, batches: Batches, loss: Any, axis: Axis) -> Any:
        rank, n = dist.get_rank(), dist.get_world_size()
        world = Axis(axis.name, rank, n, tuple(range(n)), dist.group.WORLD, context=axis.context)
        return super().__call__(row, stage, batches, loss, world)


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


class ClearsAtFirst(Step):
    """Throws away the gradients from before the step."""

    def order(self, row: Row) -> Row:
        self.stage.zero_grad()
        return row


class NewestFirst(Step):
    def take(self, mb: int) -> tuple[Tensor, Tensor]:
        return self.kept.popitem()[1]


class InputBack(Step):
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
        comm.send(x.detach(), self.axis, to)


class InHalves(Step):
    """Right in all but the number of messages."""

    def receive(self, like: Tensor, source: int) -> Tensor:
        return torch.cat([super(InHalves, self).receive(half, source) for half in like.chunk(2)])

    def send(self, x: Tensor, to: int) -> None:
        for half in x.chunk(2):
            super().send(half, to)


class ForgetsItsSends(Step):
    """Right in all but that it does not wait for what it sends."""

    def send(self, x: Tensor, to: int) -> None:
        message = x.detach().contiguous()
        message.begun = dist.isend(  # type: ignore[attr-defined]
            message, self.axis.ranks[to], group=self.axis.group
        )
        self.messages.append(message)


class FedWithTheBatch(Step):
    def receive(self, like: Tensor, source: int) -> Tensor:
        got = super().receive(like, source)
        return like.detach().clone() if source < self.rank else got


class TellsAllTheLoss(Step):
    def __call__(self, *args: Any) -> float:
        total = torch.tensor(super().__call__(*args))
        dist.all_reduce(total, group=self.axis.group)
        return total.item() if self.last else 0.0


class LossEverywhere(Step):
    def __call__(self, *args: Any) -> float:
        return comm.all_reduce(torch.tensor(super().__call__(*args)), self.axis).item()


class NothingElsewhere(Step):
    def __call__(self, *args: Any) -> Any:
        total = super().__call__(*args)
        return total if self.last else None


class AddsInSingle(Step):
    def __call__(self, *args: Any) -> Any:
        return torch.zeros(()).add_(super().__call__(*args))


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


class OwnLoss(Step):
    """Computes the mean square, whatever loss it gets."""

    def __call__(self, row: Row, stage: nn.Module, batches: Batches, loss: Any, axis: Axis) -> Any:
        return super().__call__(row, stage, batches, nn.functional.mse_loss, axis)


class Always1F1B(Step):
    """The right gradients, but never a look at the row."""

    def order(self, row: Row) -> Row:
        p, m = self.axis.size, self.m
        return [(a.op, a.mb) for a in one_f_one_b(p, m).rows[self.rank]]


class MovesWeights:
    """Every rank gathers all weights and trains the whole model alone."""

    def __call__(self, row: Row, stage: nn.Module, batches: Batches, loss: Any, axis: Axis) -> Any:
        width, inner = stage[0].in_features, stage[0].out_features  # type: ignore[index]
        whole = []
        for piece in comm.all_gather(flat(stage.parameters()), axis).chunk(axis.size):
            copy = nn.Sequential(nn.Linear(width, inner), nn.Tanh(), nn.Linear(inner, width))
            nn.utils.vector_to_parameters(piece, copy.to(piece.dtype).parameters())
            whole.append(copy)
        losses = [loss(nn.Sequential(*whole)(x), t) for x, t in batches]
        total = torch.stack(losses).mean()
        total.backward()
        for mine, theirs in zip(stage.parameters(), whole[axis.rank].parameters(), strict=True):
            mine.grad = theirs.grad if mine.grad is None else mine.grad + theirs.grad
        return total.item() if axis.rank == axis.size - 1 else 0.0


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


ATTACKS = {
    "07-1": Attacks(
        wrong=(
            Wrong(_table(step=20), words="'step': 20 is not right"),
            Wrong(_table(row_1="1F0 1F1 1B0"), words="expected 10 values, got 3 values"),
        ),
        right=(_table(start_of_0B0=7.0, step=21.0, bubble_of_ideal=0.4),),
    ),
    "07-2": Attacks(
        wrong=(
            Wrong(
                lambda p, percent: (p - 1) * (100 - percent) / percent,
                words="expected a whole number of micro-batches",
            ),
            Wrong(_by_library, words=REFUSAL),
            Wrong(lambda p, percent: 4 * p, words=": expected "),
            Wrong(lambda p, percent: min(_by_search(p, percent), 1000), words=": expected "),
        ),
        right=(_by_search, lambda p, percent: math.ceil((p - 1) / (percent / 100) - (p - 1))),
    ),
    "07-3": Attacks(
        wrong=(
            Wrong(_without_the_end, words="has no backward"),
            Wrong(_one_stage, words="a stage's weights are on one rank"),
            Wrong(_one_digit, words="these rows cannot be run"),
            Wrong(_at_most_ten, words="expected "),
            Wrong(lambda p, m: cells(one_f_one_b(p, m)), words=REFUSAL),
            Wrong(
                lambda p, m: [[(0, "F", 0)]],
                words="expected a row to be a list of cells such as '0F3'",
            ),
            Wrong(lambda p, m: None, words="expected a list of rows, one per rank"),
        ),
        right=(three_parts, _by_room),
    ),
    "07-4": Attacks(
        wrong=(
            Wrong(_both_send, words="every rank waits in send"),
            Wrong(_both_receive, words="either no rank has sent one"),
            Wrong(_drops_the_handle, words="handle"),
            Wrong(_without_waiting, words="never waited for it"),
            Wrong(_WaitsForTheReceive(), words="never waited for it"),
            Wrong(_WaitsForTheReceive(ask=True), words="never waited for it"),
            Wrong(_into(lambda like: like), words="the input like 0 to be unchanged"),
            Wrong(
                _into(lambda like: torch.empty(like.shape)),
                words="compare calls, peers and shapes by rank",
            ),
            Wrong(_into(_OneBuffer()), words="received"),
            Wrong(_like_mine, words="the shape and dtype of like, not of mine"),
            Wrong(_own, words="got mine"),
            Wrong(_twice, words="2 sends"),
            Wrong(_next_rank, words="compare calls, peers and shapes by rank"),
            Wrong(_gathers, words="Only the two ranks of an exchange call `swap`"),
            Wrong(_ordered(lambda rank, peer: rank % 2 == 0), words="rank 0 was at: send"),
            Wrong(_changes_mine, words="the input mine 0 to be unchanged"),
            Wrong(lambda mine, like, peer: mine, words="got mine"),
            Wrong(lambda mine, like, peer: like, words="got like"),
            Wrong(lambda mine, like, peer: None, words="to be a tensor, got None"),
            Wrong(lambda mine, like, peer: dist.send(mine, peer), words="every rank waits in send"),
        ),
        right=(_ordered(lambda rank, peer: rank < peer), _send_in_background),
    ),
    "07-5": Attacks(
        wrong=(
            Wrong(lambda *_: 0.0, words="loss: every rank has the result of rank 0"),
            Wrong(lambda *_: None, words="expected rank 0 to return 0.0, got a NoneType"),
            Wrong(NoLeaf(), words="expected a tensor, got None"),
            Wrong(WholeMean(), words="counts 1/m"),
            Wrong(OnlyTheReportIsMean(), words="the gradients of the micro-batches are summed"),
            Wrong(
                WithoutGradient(), words="grad can be implicitly created only for scalar outputs"
            ),
            Wrong(Ones(), words="as if from y.sum()"),
            Wrong(NewestFirst(), words="uses the newest micro-batch"),
            Wrong(InputBack(), words="got the input itself"),
            Wrong(ForwardOnly(), words="no gradient reached the stage on rank 0"),
            Wrong(Overwrites(), words="only the gradients of the last micro-batch are left"),
            Wrong(ClearsAtFirst(), words="the gradients that were in .grad before the step"),
            Wrong(LastMicroBatch(), words="only the last micro-batch is in the loss"),
            Wrong(OwnLoss(), words="loss: wrong on rank 1 only"),
            Wrong(FedWithTheBatch(), words="every stage got the micro-batch as its input"),
            Wrong(AllForwardsFirst(), words="do the expected actions in their order"),
            Wrong(KeepsGraphs(), words="the activations of 2 micro-batches at most, got 5"),
            Wrong(PlainSend(), words="every rank waits in send"),
            Wrong(TellsAllTheLoss(), words="all_reduce"),
            Wrong(LossEverywhere(), words="every rank returned the loss"),
            Wrong(NothingElsewhere(), words="expected rank 0 to return 0.0"),
            Wrong(ForgetsItsSends(), words="never waited for"),
            Wrong(InHalves(), words="from rank 0, got"),
            Wrong(MovesWeights(), words="nothing with its stage"),
            Wrong(Always1F1B(), words="do the expected actions in their order"),
            Wrong(StepsItself(), words="weights before the optimizer's step"),
            Wrong(OfTheWorld(), words="the axis has the ranks [0, 2]"),
        ),
        right=(Step(), AddsInSingle(), with_exchanges),
    ),
}
