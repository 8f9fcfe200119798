"""Answers to 05-4: right ones, and what people get wrong."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib import comm, tp
from course_lib.mesh import Axis
from course_lib.model.layers import MLP


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
