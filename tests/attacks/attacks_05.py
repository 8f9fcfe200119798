"""Lesson 05: wrong and right answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from attack import Attacks
from torch import Tensor, nn

from course_lib import comm, tp
from course_lib.grading import registry
from course_lib.grading.exercise import Answer, Wrong
from course_lib.mesh import Axis, make_mesh
from course_lib.model.layers import MLP


def _right(h: Tensor, weight: Tensor, bias: Tensor, axis: Axis) -> Tensor:
    return comm.reduce_from(F.linear(h, weight), axis) + bias


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        total = x.clone()
        if axis.size > 1:
            dist.all_reduce(total, group=axis.group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def _right_by_hand(h: Tensor, weight: Tensor, bias: Tensor, axis: Axis) -> Tensor:
    return torch.add(bias, _Sum.apply(h.matmul(weight.mT), axis))


def _on_one_rank(h: Tensor, weight: Tensor, bias: Tensor, axis: Axis) -> Tensor:
    own = bias if axis.rank == 0 else torch.zeros_like(bias)
    return comm.reduce_from(F.linear(h, weight, own), axis)


def _gathers(h: Tensor, weight: Tensor, bias: Tensor, axis: Axis) -> Tensor:
    parts = comm.gather_from_sequence(F.linear(h, weight).unsqueeze(0), axis)
    return parts.sum(0) + bias / 1


def _by_library(h: Tensor, weight: Tensor, bias: Tensor, axis: Axis) -> Tensor:
    linear = nn.Linear(weight.shape[1] * axis.size, weight.shape[0])
    return tp.RowLinear(linear, axis)(h)


def _one_row_is_a_vector(h: Tensor, weight: Tensor, bias: Tensor, axis: Axis) -> Tensor:
    y = comm.reduce_from(F.linear(h, weight), axis) + bias
    return y[0] if len(y) == 1 else y


REFUSAL = "this is what you are asked to write"


def _table(**entries: Any) -> dict[str, Any]:
    return {**registry.find("05-1").wanted, **entries}  # type: ignore[attr-defined]


# --- 05-3
def _pair(forward: Any, backward: Any) -> Any:
    """An autograd function made of two moves."""

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, axis: Axis) -> Any:
            ctx.axis = axis
            return forward(x, axis)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
            return backward(gradient, ctx.axis), None

    return Made


def _same(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, axis: Axis) -> Tensor:
    return comm.all_reduce(x, axis)


def _raw_sum(x: Tensor, axis: Axis) -> Tensor:
    total = x.clone()
    dist.all_reduce(total, group=axis.group)
    return total


def _in_place(x: Tensor, axis: Axis) -> Tensor:
    dist.all_reduce(x, group=axis.group)
    return x.view_as(x)


def _gathered(x: Tensor, axis: Axis) -> Tensor:
    return comm.all_gather(x.unsqueeze(0), axis).sum(0)


def _mean(x: Tensor, axis: Axis) -> Tensor:
    return comm.all_reduce(x, axis) / axis.size


def _none(x: Tensor, axis: Axis) -> None:
    return None


class _AxisOfTheClass:
    """Stores the axis where every call finds the last one."""

    axis: Axis

    @staticmethod
    def apply(x: Tensor, axis: Axis) -> Tensor:
        _AxisOfTheClass.axis = axis
        return _pair(
            _same, lambda gradient, _: comm.all_reduce(gradient, _AxisOfTheClass.axis)
        ).apply(x, axis)


class _ByLibrary:
    @staticmethod
    def apply(x: Tensor, axis: Axis) -> Tensor:
        return comm.copy_to(x, axis)


_COPY, _REDUCE = _pair(_same, _sum), _pair(_sum, _same)


# --- 05-4
def share(mlp: MLP, n: int, rank: int) -> dict[str, Tensor]:
    """What ``rank`` is to hold."""
    return {
        "weight_in": mlp.fc_in.weight.chunk(n, 0)[rank],
        "bias_in": mlp.fc_in.bias.chunk(n, 0)[rank],
        "weight_out": mlp.fc_out.weight.chunk(n, 1)[rank],
        "bias_out": mlp.fc_out.bias,
    }


class Right(nn.Module):
    """Right, and what wrong answers change."""

    weight_in: Tensor
    bias_in: Tensor
    weight_out: Tensor
    bias_out: Tensor

    enter = staticmethod(comm.copy_to)
    leave = staticmethod(comm.reduce_from)

    def __init__(self, mlp: MLP, axis: Axis) -> None:
        super().__init__()
        self.axis = axis
        for name, part in self.cut(mlp).items():
            setattr(self, name, nn.Parameter(self.taken(part.detach())))

    def cut(self, mlp: MLP) -> dict[str, Tensor]:
        return share(mlp, self.axis.size, self.axis.rank)

    def taken(self, part: Tensor) -> Tensor:
        return part.clone(memory_format=torch.contiguous_format)

    def inner(self, x: Tensor) -> Tensor:
        return F.gelu(F.linear(self.enter(x, self.axis), self.weight_in, self.bias_in))

    def forward(self, x: Tensor) -> Tensor:
        part = F.linear(self.inner(x), self.weight_out)
        return self.leave(part, self.axis) + self.bias_out


class RightOtherwise(nn.Module):
    """With modules inside, whose parameters bear the wanted names as well."""

    def __init__(self, mlp: MLP, axis: Axis) -> None:
        super().__init__()
        inner = mlp.fc_in.out_features // axis.size
        mine = slice(axis.rank * inner, (axis.rank + 1) * inner)
        self.axis = axis
        with torch.no_grad():
            self.weight_in = nn.Parameter(mlp.fc_in.weight[mine] * 1)
            self.bias_in = nn.Parameter(mlp.fc_in.bias[mine] * 1)
            self.weight_out = nn.Parameter(mlp.fc_out.weight[:, mine] * 1)
            self.bias_out = nn.Parameter(mlp.fc_out.bias * 1)

    def forward(self, x: Tensor) -> Tensor:
        h = comm.copy_to(x, self.axis) @ self.weight_in.t() + self.bias_in
        return self.bias_out + comm.reduce_from(F.gelu(h) @ self.weight_out.t(), self.axis)


def passed(x: Tensor, axis: Axis) -> Tensor:
    return x


class NoCopy(Right):
    enter = staticmethod(passed)


class NoReduce(Right):
    leave = staticmethod(passed)


class Numbers(Right):
    enter = staticmethod(passed)
    leave = staticmethod(comm.all_reduce)


class SumsTwice(Right):
    """An all-reduce whose backward is one too, as torch.distributed.nn's."""

    leave = staticmethod(lambda x, axis: comm.copy_to(comm.reduce_from(x, axis), axis))


class BiasEarly(Right):
    def forward(self, x: Tensor) -> Tensor:
        return self.leave(F.linear(self.inner(x), self.weight_out, self.bias_out), self.axis)


class NoBias(Right):
    def forward(self, x: Tensor) -> Tensor:
        return self.leave(F.linear(self.inner(x), self.weight_out), self.axis)


class Squeezes(Right):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.squeeze(0))


class NoGelu(Right):
    def inner(self, x: Tensor) -> Tensor:
        return F.linear(self.enter(x, self.axis), self.weight_in, self.bias_in)


class Views(Right):
    def taken(self, part: Tensor) -> Tensor:
        return part


class Strided(Right):
    """Every n-th feature of the first matrix, neighbours of the second."""

    def cut(self, mlp: MLP) -> dict[str, Tensor]:
        own = slice(self.axis.rank, None, self.axis.size)
        theirs = {"weight_in": mlp.fc_in.weight[own], "bias_in": mlp.fc_in.bias[own]}
        return super().cut(mlp) | theirs


class FirstShard(Right):
    def cut(self, mlp: MLP) -> dict[str, Tensor]:
        return share(mlp, self.axis.size, 0)


class Whole(Right):
    """Everybody computes everything."""

    enter = leave = staticmethod(passed)

    def cut(self, mlp: MLP) -> dict[str, Tensor]:
        return share(mlp, 1, 0)


class RowsFirst(Right):
    """The first matrix by input features, the second by output features."""

    def cut(self, mlp: MLP) -> dict[str, Tensor]:
        n, rank = self.axis.size, self.axis.rank
        first = mlp.fc_in.weight.chunk(n, 1)[rank]
        return {
            "weight_in": first,
            "bias_in": mlp.fc_in.bias,
            "weight_out": mlp.fc_out.weight.chunk(n, 0)[rank],
            "bias_out": mlp.fc_out.bias.chunk(n, 0)[rank],
        }

    def forward(self, x: Tensor) -> Tensor:
        mine = comm.scatter_to(x, self.axis)
        h = F.gelu(comm.reduce_from(F.linear(mine, self.weight_in), self.axis) + self.bias_in)
        return comm.gather_from(
            F.linear(comm.copy_to(h, self.axis), self.weight_out, self.bias_out), self.axis
        )


class Gathers(Right):
    """Gathers the inner features, and cuts them again for the second matrix."""

    def forward(self, x: Tensor) -> Tensor:
        h = comm.scatter_to(comm.gather_from(self.inner(x), self.axis), self.axis)
        return self.leave(F.linear(h, self.weight_out), self.axis) + self.bias_out


class TwoCopies(Right):
    """Enters a second time behind the first matrix, and so sums what is not partial."""

    def inner(self, x: Tensor) -> Tensor:
        return comm.copy_to(super().inner(x), self.axis)


class ByLibrary(nn.Module):
    def __init__(self, mlp: MLP, axis: Axis) -> None:
        super().__init__()
        self.first = tp.ColumnLinear(mlp.fc_in, axis, comm.copy_to)
        self.second = tp.RowLinear(mlp.fc_out, axis)
        self.weight_in, self.bias_in = self.first.weight, self.first.bias
        self.weight_out, self.bias_out = self.second.weight, self.second.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x)))


class Stub(nn.Module):
    def __init__(self, mlp: MLP, axis: Axis) -> None:
        raise NotImplementedError("write __init__")


# --- 05-5
def _attend(x: Tensor, weights: Sequence[Tensor], head_dim: int) -> Tensor:
    """The heads whose rows of q, k and v are ``weights``: (B, S, their features)."""
    q_BHSK, k_BHSK, v_BHSK = (
        F.linear(x, w).unflatten(-1, (-1, head_dim)).transpose(1, 2) for w in weights
    )
    y_BHSK = F.scaled_dot_product_attention(q_BHSK, k_BHSK, v_BHSK, is_causal=True)
    return y_BHSK.transpose(1, 2).flatten(-2)


def _grad(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def _step(
    x: Tensor,
    weights: dict[str, Tensor],
    head_dim: int,
    dy: Tensor,
    *,
    strided: bool = False,
    features: bool = False,
    sums: Sequence[str] = ("y", "dx"),
    scale: float = 1.0,
    causal: bool = True,
) -> Any:
    """Right, or with a mistake."""
    n, rank = dist.get_world_size(), dist.get_rank()
    cut = {name: w.chunk(n, 1 if name == "o" else 0)[rank] for name, w in weights.items()}
    if strided:
        cut |= {name: weights[name][rank::n] for name in "qkv"}
    own = {name: w.detach().clone().requires_grad_() for name, w in cut.items()}
    leaf = x.detach().clone().requires_grad_()
    if features:  # one head as wide as the rank's share
        head_dim = own["q"].shape[0]
    q, k, v = (
        F.linear(leaf, own[name]).unflatten(-1, (-1, head_dim)).transpose(1, 2) for name in "qkv"
    )
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(-2)
    part = F.linear(mixed, own["o"])
    part.backward(dy * scale)
    y, dx = part.detach().clone(), _grad(leaf)
    for name, tensor in (("y", y), ("dx", dx)):
        if name in sums:
            dist.all_reduce(tensor)
    gradients = {name: _grad(w) for name, w in own.items()}
    if "weights" in sums:
        for gradient in gradients.values():
            dist.all_reduce(gradient)
    return y, dx, gradients


def _attention(**mistake: Any) -> Answer:
    return lambda x, weights, head_dim, dy: _step(x, weights, head_dim, dy, **mistake)


def _right_by_grad(x: Tensor, weights: dict[str, Tensor], head_dim: int, dy: Tensor) -> Any:
    """With autograd.grad, slices, and the sum of y made before backward."""
    n, rank = dist.get_world_size(), dist.get_rank()
    wide = x.shape[-1] // n
    mine = slice(rank * wide, (rank + 1) * wide)
    own = [(weights[name][mine] * 1).requires_grad_() for name in "qkv"]
    out = (weights["o"][:, mine] * 1).requires_grad_()
    leaf = (x * 1).requires_grad_()
    part = _attend(leaf, own, head_dim) @ out.mT
    y = part.detach().clone()
    dist.all_reduce(y)
    dx, *rest = torch.autograd.grad(part, [leaf, *own, out], dy)
    dx = dx.contiguous()
    dist.all_reduce(dx)
    return y, dx, dict(zip("qkvo", rest, strict=True))


def _three_sums(x: Tensor, weights: dict[str, Tensor], head_dim: int, dy: Tensor) -> Any:
    """x enters once for each of q, k and v: three all-reduces where one will do."""
    n, rank = dist.get_world_size(), dist.get_rank()
    own = {
        name: w.chunk(n, 1 if name == "o" else 0)[rank].clone().requires_grad_()
        for name, w in weights.items()
    }
    leaves = [x.clone().requires_grad_() for _ in range(3)]
    q, k, v = (
        F.linear(leaf, own[name]).unflatten(-1, (-1, head_dim)).transpose(1, 2)
        for name, leaf in zip("qkv", leaves, strict=True)
    )
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
    part = F.linear(mixed, own["o"])
    part.backward(dy)
    y = part.detach().clone()
    dist.all_reduce(y)
    for leaf in leaves:
        dist.all_reduce(leaf.grad)
    return y, sum(_grad(leaf) for leaf in leaves), {name: _grad(w) for name, w in own.items()}


def _attention_gathers(x: Tensor, weights: dict[str, Tensor], head_dim: int, dy: Tensor) -> Any:
    """Gathers the parts and adds them up itself."""
    y, dx, gradients = _step(x, weights, head_dim, dy, sums=())
    totals = []
    for part in (y, dx):
        every = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(every, part.contiguous())
        totals.append(torch.stack(every).sum(0))
    return *totals, gradients


def _attention_alone(x: Tensor, weights: dict[str, Tensor], head_dim: int, dy: Tensor) -> Any:
    """Every rank computes all heads, and cuts the gradients only."""
    n, rank = dist.get_world_size(), dist.get_rank()
    w = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    leaf = x.clone().requires_grad_()
    y = F.linear(_attend(leaf, [w[name] for name in "qkv"], head_dim), w["o"])
    y.backward(dy)
    cut = {name: _grad(p).chunk(n, 1 if name == "o" else 0)[rank] for name, p in w.items()}
    return y.detach(), _grad(leaf), cut


def _attention_in_place(x: Tensor, weights: dict[str, Tensor], head_dim: int, dy: Tensor) -> Any:
    y, dx, gradients = _step(x, weights, head_dim, dy)
    return y, x.copy_(dx), gradients


def _attention_leaf(x: Tensor, weights: dict[str, Tensor], head_dim: int, dy: Tensor) -> Any:
    """Leaves its result where the next backward adds to it."""
    y, dx, gradients = _right_by_grad(x, weights, head_dim, dy)
    weights["q"].grad = torch.zeros_like(weights["q"])
    return y, dx, gradients


def _by_comm(x: Tensor, weights: dict[str, Tensor], head_dim: int, dy: Tensor) -> Any:
    y, dx, gradients = _step(x, weights, head_dim, dy, sums=())
    axis = make_mesh().world
    return comm.all_reduce(y, axis), comm.all_reduce(dx, axis), gradients


ATTACKS = {
    "05-1": Attacks(
        wrong=(Wrong(_table(y=None), words="'y' is not filled in yet"),),
        right=(
            _table(y=(9.0, 6.0), dx=(5.0, 4.0)),
            _table(bytes=4 * 2 * (2 * 3 / 4) * 320),
        ),
    ),
    "05-2": Attacks(
        wrong=(
            Wrong(
                lambda h, weight, bias, axis: None,
                words="to be a tensor, got None",
            ),
            Wrong(
                lambda h, weight, bias, axis: comm.reduce_from(F.linear(h, weight, bias), axis),
                words="every rank added the bias",
            ),
            Wrong(
                lambda h, weight, bias, axis: comm.reduce_from(
                    F.linear(h, weight, bias / axis.size), axis
                ),
                words="every rank stores the whole bias",
            ),
            Wrong(_on_one_rank, words="no gradient reached bias_D on rank 1"),
            Wrong(
                lambda h, weight, bias, axis: comm.reduce_from(F.linear(h, weight), axis),
                words="the bias is missing",
            ),
            Wrong(
                lambda h, weight, bias, axis: F.linear(h, weight) + bias,
                words="the ranks' parts are not summed",
            ),
            Wrong(
                lambda h, weight, bias, axis: comm.copy_to(F.linear(h, weight), axis) + bias,
                words="the ranks' parts are not summed",
            ),
            Wrong(
                lambda h, weight, bias, axis: comm.all_reduce(F.linear(h, weight), axis) + bias,
                words="no gradient reached h_TFt",
            ),
            Wrong(
                lambda h, weight, bias, axis: comm.reduce_from(
                    comm.reduce_from(F.linear(h, weight), axis) + bias, axis
                ),
                words="summed twice",
            ),
            Wrong(
                lambda h, weight, bias, axis: (
                    comm.reduce_from(comm.copy_to(F.linear(h, weight), axis), axis) + bias
                ),
                words="times too large",
            ),
            Wrong(_gathers, words="times too large"),
            Wrong(_one_row_is_a_vector, words="on rank 0, got shape"),
            Wrong(
                lambda h, weight, bias, axis: (
                    comm.reduce_from((h[:, None] * weight).sum(-1).squeeze(), axis) + bias
                ),
                words="on rank 0, got shape",
            ),
            Wrong(_by_library, words=REFUSAL),
        ),
        right=(_right, _right_by_hand),
    ),
    "05-3": Attacks(
        wrong=(
            Wrong((_pair(_same, _same), _pair(_same, _same)), words="still has its own part"),
            Wrong((_pair(_same, _same), _REDUCE), words="still has its own part"),
            Wrong((_COPY, _pair(_same, _same)), words="still has its own part"),
            Wrong((_REDUCE, _COPY), words="every rank still has its own part"),
            Wrong(
                (_pair(_sum, _sum), _REDUCE),
                words="all have the same values",
            ),
            Wrong((_COPY, _pair(_sum, _sum)), words="all have the same values"),
            Wrong(
                (_COPY, _pair(_raw_sum, _raw_sum)),
                words="all have the same values",
            ),
            Wrong((_pair(_same, _mean), _REDUCE), words="this is the average"),
            Wrong((_COPY, _pair(_mean, _same)), words="this is the average"),
            Wrong((_COPY, _pair(_sum, _none)), words="to be a tensor, got None"),
            Wrong((_COPY, _pair(_in_place, _same)), words="but the answer wrote into it"),
            Wrong((_pair(_same, _in_place), _REDUCE), words="but the answer wrote into it"),
            Wrong((_pair(_same, _gathered), _REDUCE), words="all_gather of"),
            Wrong((_COPY, _pair(_gathered, _same)), words="all_gather of"),
            Wrong((_AxisOfTheClass, _REDUCE), words="store the axis in ctx"),
            Wrong((_ByLibrary, _REDUCE), words=REFUSAL),
            Wrong((_COPY, _pair(_none, _same)), words="expected g's forward to return a tensor"),
        ),
        right=(
            (_COPY, _REDUCE),
            (_pair(_same, _raw_sum), _pair(_raw_sum, lambda gradient, axis: gradient)),
        ),
    ),
    "05-4": Attacks(
        wrong=(
            Wrong(NoCopy, words="only the part of dx that went through its own features"),
            Wrong(NoReduce, words="the ranks' parts are not summed"),
            Wrong(Numbers, words="no gradient reached x"),
            Wrong(SumsTwice, words="times too large"),
            Wrong(BiasEarly, words="every rank added the outer bias"),
            Wrong(NoBias, words="the outer bias is missing"),
            Wrong(NoGelu, words="there is no GELU"),
            Wrong(Squeezes, words="expected outputs of shape [1, 1,"),
            Wrong(Views, words="a chunk is a view"),
            Wrong(Strided, words="outputs: wrong on every rank"),
            Wrong(FirstShard, words="outputs: wrong on every rank"),
            Wrong(Whole, words="of shape"),
            Wrong(RowsFirst, words="of shape"),
            Wrong(Gathers, words="all_gather of"),
            Wrong(TwoCopies, words="gradient of x: wrong on every rank"),
            Wrong(ByLibrary, words="shares memory with the mlp"),
            Wrong(lambda mlp, axis: mlp, words="weight_in is missing"),
            Wrong(lambda mlp, axis: None, words="weight_in is missing"),
        ),
        right=(Right, RightOtherwise),
    ),
    "05-5": Attacks(
        wrong=(
            Wrong(lambda x, weights, head_dim, dy: None, words="expected 3 values"),
            Wrong(
                lambda x, weights, head_dim, dy: (x, dy, {}),
                words="a dict of the gradients",
            ),
            Wrong(_attention(sums=()), words="only what its own heads add to y"),
            Wrong(_attention(sums=("y",)), words="through its own heads alone"),
            Wrong(_attention(sums=("dx",)), words="only what its own heads add to y"),
            Wrong(
                _attention(sums=("y", "dx", "weights")), words="each rank's gradient is complete"
            ),
            Wrong(_attention(strided=True), words="every n-th row"),
            Wrong(_attention(features=True), words="a head has head_dim features"),
            Wrong(_attention(causal=False), words="not causal"),
            Wrong(_attention(scale=0.5), words="exactly 2 times too small"),
            Wrong(_three_sums, words="dx once for q, k and v together"),
            Wrong(_attention_gathers, words="all_gather of"),
            Wrong(_attention_alone, words="got no network operation"),
            Wrong(_attention_leaf, words="an input has a gradient after the call"),
            Wrong(_attention_in_place, words="the answer wrote into it"),
            Wrong(_by_comm, words=REFUSAL),
        ),
        right=(_step, _right_by_grad),
    ),
}
