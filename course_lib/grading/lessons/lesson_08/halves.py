"""08-3: the backward of a linear in two halves."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from course_lib.grading.answers import NotRight, described, shown
from course_lib.grading.exercise import Case, Function, Instance, Wrong


def _split(x: Tensor, weight: Tensor, dy: Tensor) -> Any:
    def later() -> tuple[Tensor, Tensor]:
        flat_x, flat_dy = x.flatten(0, -2), dy.flatten(0, -2)
        return flat_dy.T @ flat_x, flat_dy.sum(0)

    return dy @ weight, later


def _draw(*dims: tuple[int, int]) -> Callable[..., list[Instance]]:
    """Two calls; ``dims`` are the least and most of each dim before the features.

    Whole numbers in float64: products are exact in any order. D and F differ.
    """

    def draw(rng: random.Random) -> list[Instance]:
        found: list[Instance] = []
        for _ in range(2):
            lead = [rng.randint(*ends) for ends in dims]
            d, f = rng.sample(range(2, 6), 2)
            generator = torch.Generator().manual_seed(rng.randrange(2**31))

            def whole(*shape: int, generator: torch.Generator = generator) -> Tensor:
                numbers = torch.randint(1, 10, shape, generator=generator)
                return numbers.double() * (-1) ** torch.randint(0, 2, shape, generator=generator)

            found.append({"x": whole(*lead, d), "weight": whole(f, d), "dy": whole(*lead, f)})
        return found

    return draw


def _facts(value: Any) -> dict[str, Any]:
    """What both halves give, as lists."""
    if not (isinstance(value, tuple | list) and len(value) == 2):
        raise NotRight(f"a pair (dx, later) is wanted, not {shown(value, 80)}")
    dx, later = value
    if not callable(later) or isinstance(later, Tensor):
        raise NotRight("later is a function without arguments, which is called when W is done")
    try:
        rest = later()
    except Exception as error:
        raise NotRight(f"later() raised {described(error)}") from None
    if not (isinstance(rest, tuple | list) and len(rest) == 2):
        raise NotRight(f"later() gives a pair (dweight, dbias), not {shown(rest, 80)}")
    tensors = {"dx": dx, "dweight": rest[0], "dbias": rest[1]}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise NotRight(f"{name} is {shown(tensor, 80)}; a tensor is wanted")
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def _made(
    dx: Callable[..., Any] = lambda x, w, dy: dy @ w,
    dweight: Callable[..., Any] = lambda x, dy: dy.flatten(0, -2).T @ x.flatten(0, -2),
    dbias: Callable[..., Any] = lambda dy: dy.flatten(0, -2).sum(0),
) -> Callable[..., Any]:
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
    return dx, lambda: (torch.einsum("...f,...d->fd", dy, x), torch.einsum("...f->f", dy))


HALVES = Function(
    id="08-3",
    title="a linear's backward in two halves",
    names=("split_backward",),
    hints=(
        "Write y_tf = sum over d of x_td W_fd + b_f for one number of y. What does x_td count in, "
        "what W_fd, what b_f? Sum over everything that it counts in.",
        "dx sums over features of y: dy times the weight, not transposed. dweight sums over all "
        "positions: flatten x and dy to two dims first.",
        "dx = dy @ weight; later: dy_TF.T @ x_TD and dy_TF.sum(0), where x_TD = "
        "x.reshape(-1, x.shape[-1]). Return dx and the function, not its result.",
    ),
    wrong=(
        Wrong(
            _made(dweight=lambda x, dy: x.flatten(0, -2).T @ dy.flatten(0, -2)),
            "dweight is transposed: (F, D) is wanted, as weight has it.",
        ),
        Wrong(
            _made(dbias=lambda dy: dy.flatten(0, -2).mean(0)),
            "dbias is averaged over the positions; it is their sum.",
        ),
        Wrong(
            _made(
                dweight=lambda x, dy: (
                    dy.flatten(0, -2).T @ x.flatten(0, -2) / dy.flatten(0, -2).shape[0]
                )
            ),
            "dweight is averaged over the positions; it is their sum.",
        ),
        Wrong(
            _made(dbias=lambda dy: dy.sum(0)),
            "dbias sums over the first dim only: with (B, S, F) both B and S go.",
        ),
        Wrong(
            _made(dweight=lambda x, dy: dy.mT @ x),
            "dweight has one matrix for each sequence: sum over all positions, sequences too.",
        ),
        Wrong(
            _made(dx=lambda x, w, dy: x),
            "dx is x: the gradient of the input is dy times the weight.",
        ),
        Wrong(
            _made(dx=lambda x, w, dy: torch.ones_like(dy) @ w),
            "dx does not use dy: the gradient that arrives is passed on through the weight.",
        ),
        Wrong(_made(dx=lambda x, w, dy: dy @ w.T), words="raised RuntimeError"),
        Wrong(
            lambda x, weight, dy: (dy @ weight, (dy, x)),
            words="later is a function without arguments",
        ),
        Wrong(
            lambda x, weight, dy: (dy @ weight, lambda: dy.flatten(0, -2).T @ x.flatten(0, -2)),
            words="later() gives a pair (dweight, dbias)",
        ),
        Wrong(lambda x, weight, dy: dy @ weight, words="a pair (dx, later) is wanted"),
        Wrong(_made(dbias=lambda dy: None), words="dbias is None"),
    ),
    right=(_by_autograd, _by_einsum),
    stub=lambda x, weight, dy: None,
    reference=_split,
    normal=_facts,
    drawn=(
        Case("rows of tokens", _draw((3, 5))),
        Case("sequences", _draw((2, 3), (2, 4))),
        Case("one token", _draw((1, 1))),
    ),
)
