"""Lesson 08: wrong and right answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from attack import Attacks
from torch import Tensor

from course_lib import comm
from course_lib.grading import registry
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.graders.judge.lesson_08 import Cells, delayed
from course_lib.mesh import make_mesh
from course_lib.schedule import interleaved, one_f_one_b, zb_h1, zb_h2

REFUSAL = "this is what you are asked to write"


def _table(**entries: Any) -> dict[str, Any]:
    wanted = registry.find("08-1").wanted  # type: ignore[attr-defined]
    return {**wanted, **{key.replace("_", " "): value for key, value in entries.items()}}


# --- 08-2
def _by_adding(p: int, v: int, m: int, rank: int) -> int:
    count = 0
    for _ in range(v - 1):
        count += p
    for _ in range(rank + 1, p):
        count += 2
    return count if count < m * v else m * v


def _by_numpy(p: int, v: int, m: int, rank: int) -> Any:
    return torch.tensor(_by_adding(p, v, m, rank)).numpy()[()]


def _from_the_rows(p: int, v: int, m: int, rank: int) -> int:
    row = interleaved(p, m, v).rows[rank]
    return next(place for place, action in enumerate(row) if action.op == "B") - 1


# --- 08-3
def _made(
    dx: Callable[..., Any] = lambda x, w, dy: dy @ w,
    dweight: Callable[..., Any] = lambda x, dy: dy.flatten(0, -2).T @ x.flatten(0, -2),
    dbias: Callable[..., Any] = lambda dy: dy.flatten(0, -2).sum(0),
) -> Answer:
    """An answer of three products."""
    return lambda x, weight, dy: (dx(x, weight, dy), lambda: (dweight(x, dy), dbias(dy)))


def _by_autograd(x: Tensor, weight: Tensor, dy: Tensor) -> Any:
    leaf, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
    b = torch.zeros(weight.shape[0], dtype=weight.dtype, requires_grad=True)
    y = torch.nn.functional.linear(leaf, w, b)
    (dx,) = torch.autograd.grad(y, [leaf], dy, retain_graph=True)
    return dx, lambda: torch.autograd.grad(y, [w, b], dy)


def _by_einsum(x: Tensor, weight: Tensor, dy: Tensor) -> Any:
    dx = torch.einsum("...f,fd->...d", dy, weight)
    return dx, lambda: [torch.einsum("...f,...d->fd", dy, x), torch.einsum("...f->f", dy)]


def _eager(x: Tensor, weight: Tensor, dy: Tensor) -> Any:
    found = dy.flatten(0, -2).T @ x.flatten(0, -2), dy.flatten(0, -2).sum(0)
    return dy @ weight, lambda: found


def _eager_bias(x: Tensor, weight: Tensor, dy: Tensor) -> Any:
    dbias = dy.flatten(0, -2).sum(0)
    return dy @ weight, lambda: (dy.flatten(0, -2).T @ x.flatten(0, -2), dbias)


def _in_single(x: Tensor, weight: Tensor, dy: Tensor) -> Any:
    """Computes in float32, whatever the inputs have."""
    dx, later = _by_einsum(x.float(), weight.float(), dy.float())
    return dx, later


def _writes_into_dy(x: Tensor, weight: Tensor, dy: Tensor) -> Any:
    dx = dy @ weight

    def later() -> Any:
        found = dy.flatten(0, -2).T @ x.flatten(0, -2), dy.flatten(0, -2).sum(0)
        dy.mul_(0)
        return found

    return dx, later


class _LastCall:
    """Stores the tensors of the last call, so that later() of an earlier call is wrong."""

    def __call__(self, x: Tensor, weight: Tensor, dy: Tensor) -> Any:
        self.x, self.dy = x.flatten(0, -2), dy.flatten(0, -2)
        return dy @ weight, lambda: (self.dy.T @ self.x, self.dy.sum(0))


def _adds_up(x: Tensor, weight: Tensor, dy: Tensor) -> Any:
    """later() adds to its own result every time."""
    total = torch.zeros_like(weight), weight.new_zeros(len(weight))

    def later() -> Any:
        total[0].add_(dy.flatten(0, -2).T @ x.flatten(0, -2))
        total[1].add_(dy.flatten(0, -2).sum(0))
        return total

    return dy @ weight, later


# --- 08-4
def _right(p: int, m: int) -> Cells:
    return delayed(p, m, lambda rank: rank)


def _by_turns(p: int, m: int) -> list[str]:
    """In turns of I, W and F, each where there is one; rows as texts."""
    rows = []
    for rank in range(p):
        row = " ".join(f"{rank}F{mb}" for mb in range(p - rank))
        for turn in range(m + rank):
            for op, mb in (("I", turn), ("W", turn - rank), ("F", turn + p - rank)):
                if 0 <= mb < m:
                    row += f" {rank}{op}{mb}"
        rows.append(row)
    return rows


def _from_library(make: Callable[..., Any]) -> Callable[[int, int], Cells]:
    return lambda p, m: [[str(action) for action in row] for row in make(p, m).rows]


def _w_first(p: int, m: int) -> Cells:
    swap = {"I": "W", "W": "I"}
    return [[c[0] + swap.get(c[1], c[1]) + c[2:] for c in row] for row in _right(p, m)]


def _one_stage(p: int, m: int) -> Cells:
    return [["0" + cell.lstrip("0123456789") for cell in row] for row in _right(p, m)]


def _one_digit(p: int, m: int) -> Cells:
    return [[cell[:3] for cell in row] for row in _right(p, m)]


def _at_most(limit: int) -> Callable[[int, int], Cells]:
    """Right for a delay up to ``limit`` only."""
    return lambda p, m: delayed(p, m, lambda rank: min(rank, limit))


# --- 08-5
def _grad(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad


def _receive(y: Tensor, dy: Tensor | None) -> Tensor:
    if dy is None:
        dy = torch.empty(y.shape)
        dist.recv(dy, dist.get_rank() + 1)
    return dy


def _ones(y: Tensor, dy: Tensor | None) -> Tensor:
    """Receives, and goes on as if from y.sum()."""
    got = _receive(y, dy)
    return got if dy is not None else torch.ones_like(got)


def _add(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient if p.grad is None else p.grad + gradient


def _nothing_added(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    pass


def _overwritten(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient


def _isend(message: Tensor, peer: int) -> Callable[[], Any]:
    return dist.isend(message, peer).wait  # type: ignore[union-attr]


def _asks(message: Tensor, peer: int) -> Callable[[], Any]:
    """Asks whether the message has left; this is no wait."""
    work = dist.isend(message, peer)

    def asks() -> None:
        time.sleep(0.05)
        work.is_completed()  # type: ignore[union-attr]

    return asks


class _Forgets:
    """Holds the handles, and never waits for them."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __call__(self, message: Tensor, peer: int) -> Callable[[], Any]:
        self.kept.append((message, dist.isend(message, peer)))
        return lambda: time.sleep(0.05)


class _OneBuffer:
    """Sends from one tensor that the next call may overwrite."""

    def __init__(self) -> None:
        self.buffer = torch.zeros(10_000)

    def __call__(self, message: Tensor, peer: int) -> Callable[[], Any]:
        self.buffer[: message.numel()] = message.flatten()
        work = dist.isend(self.buffer[: message.numel()], peer)
        self.buffer.zero_()
        return work.wait  # type: ignore[union-attr]


def _halves(
    x: Tensor,
    y: Tensor,
    parameters: Sequence[Tensor],
    dy: Tensor | None,
    *,
    receive: Callable[..., Tensor] = _receive,
    add: Callable[..., None] = _add,
    handed: Callable[..., Tensor] = lambda dx, dy, y: dx,
    send: Callable[..., Any] = _isend,
    retain: bool = True,
) -> None:
    """Right, or with a mistake."""
    rank, dy = dist.get_rank(), receive(y, dy)
    leaves: Callable[[], Any] = list
    if rank > 0:
        (dx,) = torch.autograd.grad(y, [x], dy, retain_graph=retain)
        leaves = send(handed(dx, dy, y).detach().contiguous(), rank - 1)
    add(parameters, torch.autograd.grad(y, list(parameters), dy))
    leaves()


def _but(**mistake: Any) -> Answer:
    return lambda x, y, parameters, dy: _halves(x, y, parameters, dy, **mistake)


def _by_backward(x: Tensor, y: Tensor, parameters: Sequence[Tensor], dy: Tensor | None) -> None:
    """With torch.autograd.backward and a send that waits."""
    dy = _receive(y, dy)
    if x.requires_grad:
        torch.autograd.backward(y, dy, inputs=[x], retain_graph=True)
        assert x.grad is not None
        dist.send(x.grad, dist.get_rank() - 1)
    torch.autograd.backward(y, dy, inputs=list(parameters))


def _whole(x: Tensor, y: Tensor, parameters: Sequence[Tensor], dy: Tensor | None) -> None:
    """An ordinary backward, and then the message."""
    y.backward(_receive(y, dy))
    if x.requires_grad:
        dist.send(_grad(x), dist.get_rank() - 1)


def _first(number: slice) -> Answer:
    """Computes the gradients of some parameters before the message."""

    def answer(x: Tensor, y: Tensor, parameters: Sequence[Tensor], dy: Tensor | None) -> None:
        dy = _receive(y, dy)
        early = list(parameters)[number]
        _add(early, torch.autograd.grad(y, early, dy, retain_graph=True))
        if x.requires_grad:
            (dx,) = torch.autograd.grad(y, [x], dy, retain_graph=True)
            dist.send(dx, dist.get_rank() - 1)
        rest = [p for p in parameters if all(p is not each for each in early)]
        if rest:
            _add(rest, torch.autograd.grad(y, rest, dy))

    return answer


def _twice(x: Tensor, y: Tensor, parameters: Sequence[Tensor], dy: Tensor | None) -> None:
    """Sends early, and then a whole backward beside the gradients of the weights."""
    dy = _receive(y, dy)
    if x.requires_grad:
        (dx,) = torch.autograd.grad(y, [x], dy, retain_graph=True)
        dist.send(dx, dist.get_rank() - 1)
    torch.autograd.grad(y, list(parameters), dy, retain_graph=True)
    y.backward(dy)


def _scales_dy(x: Tensor, y: Tensor, parameters: Sequence[Tensor], dy: Tensor | None) -> None:
    """Right, and clears the gradient that it was given."""
    last, dy = dy is not None, _receive(y, dy)
    _halves(x, y, parameters, dy)
    if last:
        dy.set_(torch.zeros_like(dy))  # type: ignore[call-overload]


def _by_comm(x: Tensor, y: Tensor, parameters: Sequence[Tensor], dy: Tensor | None) -> None:
    axis = make_mesh().world
    if dy is None:
        dy = comm.recv(y.detach(), axis, source=axis.rank + 1)
    if x.requires_grad:
        (dx,) = torch.autograd.grad(y, [x], dy, retain_graph=True)
        comm.send(dx, axis, to=axis.rank - 1)
    _add(parameters, torch.autograd.grad(y, list(parameters), dy))


def _broadcasts(x: Tensor, y: Tensor, parameters: Sequence[Tensor], dy: Tensor | None) -> None:
    """Every rank sends to all: right on two ranks, and too much."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for source in reversed(range(1, n)):
        if rank == source:
            (dx,) = torch.autograd.grad(y, [x], dy, retain_graph=True)
            dist.broadcast(dx, source)
        else:
            got = torch.empty(y.shape)
            dist.broadcast(got, source)
            if source == rank + 1:
                dy = got
    _add(parameters, torch.autograd.grad(y, list(parameters), dy))


ATTACKS = {
    "08-1": Attacks(
        wrong=(
            Wrong(
                _table(row_0="0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0W3 0I3"), words="'row 0': "
            ),
            Wrong(_table(row_2="2F0 2I0"), words="expected 12 values, got 2 values"),
            Wrong(_table(bubble_of_total=0.143), words="type it as a fraction"),
        ),
        right=(_table(step=14.0, bubble_of_total=2 / 14, start_of_0I0=5),),
    ),
    "08-2": Attacks(
        wrong=(
            Wrong(lambda p, v, m, rank: None, words="expected a whole number of forwards"),
            Wrong(
                lambda p, v, m, rank: float(_by_adding(p, v, m, rank)),
                words="expected a whole number of forwards",
            ),
            Wrong(
                lambda p, v, m, rank: min(p + 2 * (p - 1 - rank), m * 2),
                words="expected ",
            ),
            Wrong(_from_the_rows, words=REFUSAL),
        ),
        right=(_by_adding, _by_numpy),
    ),
    "08-3": Attacks(
        wrong=(
            Wrong(
                _made(dweight=lambda x, dy: x.flatten(0, -2).T @ dy.flatten(0, -2)),
                words="dweight is transposed",
            ),
            Wrong(
                _made(dbias=lambda dy: dy.flatten(0, -2).mean(0)),
                words="dbias is averaged over the positions",
            ),
            Wrong(
                _made(
                    dweight=lambda x, dy: (
                        dy.flatten(0, -2).T @ x.flatten(0, -2) / dy.flatten(0, -2).shape[0]
                    )
                ),
                words="dweight is averaged over the positions",
            ),
            Wrong(_made(dbias=lambda dy: dy.sum(0)), words="dbias is summed over the first dim"),
            Wrong(_made(dweight=lambda x, dy: dy.mT @ x), words="dweight has one matrix per"),
            Wrong(_made(dx=lambda x, w, dy: x), words="dx is x"),
            Wrong(_made(dx=lambda x, w, dy: torch.ones_like(dy) @ w), words="dx does not use dy"),
            Wrong(_made(dx=lambda x, w, dy: dy @ w.T), words="raised RuntimeError"),
            Wrong(
                lambda x, weight, dy: (dy @ weight, (dy, x)),
                words="expected later to be a function without arguments",
            ),
            Wrong(
                lambda x, weight, dy: (dy @ weight, lambda: dy.flatten(0, -2).T @ x.flatten(0, -2)),
                words="expected later() to return a pair (dweight, dbias)",
            ),
            Wrong(lambda x, weight, dy: dy @ weight, words="expected 2 values (dx, later)"),
            Wrong(_made(dbias=lambda dy: None), words="expected dbias to be a tensor, got None"),
            Wrong(_eager, words="dweight was computed before"),
            Wrong(_eager_bias, words="dbias was computed before"),
            Wrong(_in_single, words="torch.float64"),
            Wrong(_writes_into_dy, words="the input dy to be unchanged"),
            Wrong(_LastCall(), words="dweight"),
            Wrong(_adds_up, words="expected a second later()"),
        ),
        right=(_by_autograd, _by_einsum, _made()),
    ),
    "08-4": Attacks(
        wrong=(
            Wrong(_from_library(one_f_one_b), words="got unsplit ones (B)"),
            Wrong(_w_first, words="which it needs"),
            Wrong(lambda p, m: [row[:-1] for row in _right(p, m)], words="half a backward"),
            Wrong(_one_stage, words="a stage's weights are on one rank"),
            Wrong(_from_library(zb_h1), words=REFUSAL),
            Wrong(_from_library(zb_h2), words=REFUSAL),
            Wrong(
                lambda p, m: [[(0, "F", 0)]],
                words="expected a row to be a list of cells such as '0F3'",
            ),
            Wrong(lambda p, m: None, words="expected a list of rows, one per rank"),
            Wrong(_one_digit, words="these rows cannot be run"),
            Wrong(_at_most(1), words="expected "),
        ),
        right=(_right, _by_turns),
    ),
    "08-5": Attacks(
        wrong=(
            Wrong(lambda x, y, parameters, dy: None, words="have no gradient"),
            Wrong(_but(add=_nothing_added), words="leaves .grad alone"),
            Wrong(_but(add=_overwritten), words="add to .grad"),
            Wrong(_but(retain=False), words="backward through the graph a second time"),
            Wrong(_but(handed=lambda dx, dy, y: dy), words="here it sends dy"),
            Wrong(_but(handed=lambda dx, dy, y: y), words="here it sends its output"),
            Wrong(_but(receive=_ones), words="as if from y.sum()"),
            Wrong(_but(handed=lambda dx, dy, y: 2 * dx), words="wrong on rank 0 only"),
            Wrong(_whole, words="before it sent the gradient of its input"),
            Wrong(_first(slice(None)), words="before it sent the gradient of its input"),
            Wrong(_first(slice(3, None)), words="computed the gradient of bias 2 before it sent"),
            Wrong(_twice, words="twice for one micro-batch"),
            Wrong(_broadcasts, words="the calls of the ranks do not match"),
            Wrong(_by_comm, words=REFUSAL),
            Wrong(_but(send=_Forgets()), words="never waited for"),
            Wrong(_but(send=_asks), words="never waited for it"),
            Wrong(_but(send=_OneBuffer()), words="before wait() had returned"),
            Wrong(_scales_dy, words="to be unchanged on rank 1"),
        ),
        right=(_halves, _by_backward),
    ),
}
