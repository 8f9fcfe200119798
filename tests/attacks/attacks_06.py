"""Lesson 06: wrong and right answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from attack import Attacks
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from course_lib import comm, sp, tp
from course_lib.aliases import PARAMETER_DIM
from course_lib.grading import registry
from course_lib.grading.exercise import Answer, Wrong
from course_lib.mesh import Axis, make_mesh

REFUSAL = "this is what you are asked to write"
Parameters = Sequence[nn.Parameter]


def _table(**entries: Any) -> dict[str, Any]:
    return {**registry.find("06-1").wanted, **entries}  # type: ignore[attr-defined]


# --- 06-2
def _column(x: Tensor, weight: Tensor, axis: Axis) -> Tensor:
    return F.linear(comm.gather_from_sequence(x, axis, 1), weight)


class _Enter(torch.autograd.Function):
    """The same in raw torch: positions first, as the flat collectives want them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        if axis.size == 1:
            return x.clone()
        parts = [torch.empty_like(x) for _ in range(axis.size)]
        dist.all_gather(parts, x.contiguous(), group=axis.group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.axis.size == 1:
            return gradient, None
        parts = [part.contiguous() for part in gradient.chunk(ctx.axis.size, 1)]
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts, group=ctx.axis.group)
        return mine, None


def _column_raw(x: Tensor, weight: Tensor, axis: Axis) -> Tensor:
    return _Enter.apply(x, axis) @ weight.mT


class _World(torch.autograd.Function):
    """Gathers and scatters over the world instead of the axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        parts = [part.contiguous() for part in gradient.chunk(dist.get_world_size(), 1)]
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts)
        return mine


def _by_sequence(x: Tensor, weight: Tensor, axis: Axis) -> Tensor:
    """Takes the number of sequences for 3."""
    y = comm.gather_from_sequence(x, axis, 1)
    return torch.stack([F.linear(y[number], weight) for number in range(3)])


# --- 06-3
def _sum(parameters: Parameters, axis: Axis, *, cut_too: bool = False, scale: float = 1.0) -> None:
    whole = [p for p in parameters if cut_too or comm.shard_spec(p) is None]
    flat = torch.cat([_grad(p).flatten() for p in whole])
    total = comm.all_reduce(flat, axis) * scale
    for p, part in zip(whole, total.split([p.numel() for p in whole]), strict=True):
        p.grad = part.view_as(p)


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _whole(parameters: Parameters, axis: Axis) -> None:
    _sum(parameters, axis)


def _whole_raw(parameters: Parameters, axis: Axis) -> None:
    """In raw torch, written back in place; reads the attribute of the first edition."""
    gradients = [_grad(p) for p in parameters if getattr(p, PARAMETER_DIM) is None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    if axis.size > 1:
        dist.all_reduce(flat, group=axis.group)
    done = 0
    for gradient in gradients:
        gradient.copy_(flat[done : done + gradient.numel()].view_as(gradient))
        done += gradient.numel()


def _one_by_one(parameters: Parameters, axis: Axis) -> None:
    for p in parameters:
        if comm.shard_spec(p) is None:
            p.grad = comm.all_reduce(_grad(p), axis)


def _vectors_only(parameters: Parameters, axis: Axis) -> None:
    """By shape instead of by what is cut: forgets the matrix of positions."""
    _sum([p for p in parameters if p.dim() == 1], axis)


def _sum_lost(parameters: Parameters, axis: Axis) -> None:
    """The sum is made, and nobody keeps it."""
    flat = torch.cat([_grad(p).flatten() for p in parameters if comm.shard_spec(p) is None])
    comm.all_reduce(flat, axis)


def _from_first(parameters: Parameters, axis: Axis) -> None:
    """Replicas agree, on rank 0's part."""
    for p in parameters:
        if comm.shard_spec(p) is None:
            p.grad = comm.broadcast(_grad(p), axis)


def _truth_of_dim(parameters: Parameters, axis: Axis) -> None:
    """Takes dim 0 for no dim."""
    specs = {p: comm.shard_spec(p) for p in parameters}
    _sum([p for p, spec in specs.items() if not (spec and spec.dim)], axis, cut_too=True)


def _experts_too(parameters: Parameters, axis: Axis) -> None:
    """Takes a spec without a dim for no spec."""
    dims = [getattr(comm.shard_spec(p), "dim", None) for p in parameters]
    whole = [p for p, dim in zip(parameters, dims, strict=True) if dim is None]
    _sum(whole, axis, cut_too=True)


def _weights_instead(parameters: Parameters, axis: Axis) -> None:
    _sum(parameters, axis)
    with torch.no_grad():
        for p in parameters:
            p.add_(1.0)


def _twice(parameters: Parameters, axis: Axis) -> None:
    """As after each of two micro-batches: the second sum adds up sums."""
    _sum(parameters, axis)
    _sum(parameters, axis)


def _by_library(parameters: Parameters, axis: Axis) -> None:
    sp.sum_gradients(comm.held_gradients(parameters), axis)


def _by_shape(parameters: Parameters, axis: Axis) -> None:
    """Takes vectors for replicated and matrices by what is said of them."""
    _sum([p for p in parameters if p.dim() == 1 or comm.shard_spec(p) is None], axis, cut_too=True)


def _only_contiguous(parameters: Parameters, axis: Axis) -> None:
    whole = [p for p in parameters if comm.shard_spec(p) is None]
    total = comm.all_reduce(torch.cat([_grad(p).view(-1) for p in whole]), axis)
    for p, part in zip(whole, total.split([p.numel() for p in whole]), strict=True):
        p.grad = part.view_as(p)


def _over_the_world(parameters: Parameters, axis: Axis) -> None:
    whole = [p for p in parameters if comm.shard_spec(p) is None]
    flat = torch.cat([_grad(p).flatten() for p in whole])
    dist.all_reduce(flat)
    for p, part in zip(whole, flat.split([p.numel() for p in whole]), strict=True):
        p.grad = part.view_as(p)


def _in_background(parameters: Parameters, axis: Axis) -> None:
    """Never waits for the sum."""
    whole = [p for p in parameters if comm.shard_spec(p) is None]
    flat = torch.cat([_grad(p).flatten() for p in whole])
    dist.all_reduce(flat, group=axis.group, async_op=True)
    for p, part in zip(whole, flat.split([p.numel() for p in whole]), strict=True):
        p.grad = part.view_as(p)


# --- 06-4
def _loss(forward: Any, backward: Any) -> Any:
    """An autograd function of two moves; forward returns the losses and what is to be kept."""

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z: Tensor, targets: Tensor, axis: Axis) -> Any:
            loss, softmax, rows, mine = forward(z, targets, axis)
            ctx.save_for_backward(softmax, rows, mine)
            ctx.axis = axis
            return loss

        @staticmethod
        def backward(ctx: Any, dloss: Tensor) -> Any:  # type: ignore[override]
            return backward(*ctx.saved_tensors, dloss, ctx.axis), None, None

    return Made


def _forward(
    z: Tensor,
    targets: Tensor,
    axis: Axis,
    *,
    maximum: str = "all",
    sum_all: bool = True,
    shift: bool = True,
    masked: bool | str = True,
    target_all: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Right, or with a mistake."""
    top = z.amax(1)
    if maximum == "all":
        top = comm.all_reduce_max(top, axis)
    if maximum == "none":
        top = torch.zeros_like(top)
    exp = (z - top[:, None]).exp()
    total = comm.all_reduce(exp.sum(1), axis) if sum_all else exp.sum(1)
    local = targets - axis.rank * z.shape[1] if shift else targets
    mine = (local >= 0) & (local < z.shape[1])
    rows = local.masked_fill(~mine, 0)
    own = z.gather(1, rows[:, None])[:, 0]
    if masked == "times":
        own = z.gather(1, local.clamp(0, z.shape[1] - 1)[:, None])[:, 0] * mine
    elif masked:
        own = own.masked_fill(~mine, 0.0)
    target = comm.all_reduce(own, axis) if target_all else own
    return total.log() + top - target, exp / total[:, None], rows, mine


def _backward(
    softmax: Tensor,
    rows: Tensor,
    mine: Tensor,
    dloss: Tensor,
    axis: Axis,
    *,
    onehot: bool = True,
    masked: bool = True,
    weighted: bool = True,
    summed: bool = False,
) -> Tensor:
    dz = softmax.clone()
    if onehot:
        ones = mine.to(dz.dtype) if masked else torch.ones_like(dz[:, 0])
        dz.scatter_add_(1, rows[:, None], -ones[:, None])
    if weighted:
        dz = dz * dloss[:, None]
    return comm.all_reduce(dz, axis) if summed else dz


def _loss_but(**mistake: Any) -> Any:
    return _loss(lambda z, targets, axis: _forward(z, targets, axis, **mistake), _backward)


def _but_back(**mistake: Any) -> Any:
    return _loss(_forward, lambda *given: _backward(*given, **mistake))


def _all_logits(z: Tensor, targets: Tensor, axis: Axis) -> tuple[Tensor, ...]:
    """All logits on every rank: right numbers, and what the lesson forbids."""
    whole = comm.all_gather(z, axis, 1)
    loss = F.cross_entropy(whole, targets, reduction="none")
    _, _, rows, mine = _forward(z[:, :], targets, axis)
    return loss, whole.softmax(1).chunk(axis.size, 1)[axis.rank].clone(), rows, mine


def _equal_logits(z: Tensor, targets: Tensor, axis: Axis) -> tuple[Tensor, ...]:
    """Takes every word with the logit of the target for the target."""
    losses, softmax, rows, mine = _forward(z, targets, axis)
    own = z.gather(1, rows[:, None])[:, 0].masked_fill(~mine, 0.0)
    return losses, softmax - (z == comm.all_reduce(own, axis)[:, None]).to(z.dtype), rows, mine


class _ByLibrary:
    @staticmethod
    def apply(z: Tensor, targets: Tensor, axis: Axis) -> Tensor:
        loss, _ = tp.loss_sum(z, targets, axis, z.shape[1] * axis.size)
        return loss


class _RightInTwo(torch.autograd.Function):
    """Raw torch; the sum and the target's logit travel together; one-hot by comparing."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, targets: Tensor, axis: Axis) -> Tensor:
        words = torch.arange(z.shape[1]) + axis.rank * z.shape[1]
        ctx.onehot = words[None] == targets[:, None]
        top = z.max(1).values
        if axis.size > 1:
            dist.all_reduce(top, dist.ReduceOp.MAX, group=axis.group)
        shifted = z - top[:, None]
        both = torch.stack([shifted.exp().sum(1), shifted.where(ctx.onehot, 0.0).sum(1)])
        if axis.size > 1:
            dist.all_reduce(both, group=axis.group)
        ctx.softmax = shifted.exp() / both[0][:, None]
        return both[0].log() - both[1]

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:  # type: ignore[override]
        return (ctx.softmax - ctx.onehot.float()) * dloss[:, None], None, None


class _Kept:
    """What forward saved in the last call, used by every backward."""

    saved: tuple[Tensor, ...] = ()


def _saving(z: Tensor, targets: Tensor, axis: Axis) -> tuple[Tensor, ...]:
    found = _forward(z, targets, axis)
    _Kept.saved = found[1:]
    return found


def _in_float32(z: Tensor, targets: Tensor, axis: Axis) -> tuple[Tensor, ...]:
    return _forward(z.float(), targets, axis)


def _writes_logits(z: Tensor, targets: Tensor, axis: Axis) -> tuple[Tensor, ...]:
    found = _forward(z, targets, axis)
    z.sub_(comm.all_reduce_max(z.amax(1), axis)[:, None])
    return found


def _writes_targets(z: Tensor, targets: Tensor, axis: Axis) -> tuple[Tensor, ...]:
    found = _forward(z, targets, axis)
    targets.sub_(axis.rank * z.shape[1])
    return found


def _near(height: float) -> Any:
    """Subtracts a constant instead of the maximum."""

    def forward(z: Tensor, targets: Tensor, axis: Axis) -> tuple[Tensor, ...]:
        losses, *rest = _forward(z - height, targets, axis, maximum="none")
        return losses, *rest

    return forward


class _Once(torch.autograd.Function):
    """With backward decorated as in torch's manual."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, targets: Tensor, axis: Axis) -> Tensor:
        losses, *saved = _forward(z, targets, axis)
        ctx.save_for_backward(*saved)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> Any:  # type: ignore[override]
        return _backward(*ctx.saved_tensors, dloss, None), None, None


# --- 06-5
def _gather(rows: Tensor) -> Tensor:
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.contiguous())
    return torch.cat(parts)


def _scatter(part: Tensor) -> Tensor:
    pieces = [piece.contiguous() for piece in part.chunk(dist.get_world_size())]
    rows = torch.empty_like(pieces[0])
    dist.reduce_scatter(rows, pieces)
    return rows


def _own(part: Tensor) -> Tensor:
    return part.chunk(dist.get_world_size())[dist.get_rank()].clone()


def _all_reduced(part: Tensor) -> Tensor:
    total = part.clone()
    dist.all_reduce(total)
    return _own(total)


def _whole_sum(part: Tensor) -> Tensor:
    total = part.clone()
    dist.all_reduce(total)
    return total


def _mean(part: Tensor) -> Tensor:
    return _scatter(part) / dist.get_world_size()


def _all_summed(gradient: Tensor) -> Tensor:
    dist.all_reduce(gradient)
    return gradient


def _own_dy(rows: Tensor) -> Tensor:
    """Zeros where another rank has dy."""
    whole = torch.zeros(len(rows) * dist.get_world_size(), rows.shape[1])
    whole.chunk(dist.get_world_size())[dist.get_rank()].copy_(rows)
    return whole


def _step(
    x: Tensor,
    weight_in: Tensor,
    weight_out: Tensor,
    dy: Tensor,
    *,
    gather: Answer = _gather,
    gather_dy: Answer = _gather,
    leave: Answer = _scatter,
    back: Answer = _scatter,
    relu: bool | str = True,
    weights: Answer = lambda gradient: gradient,
) -> Any:
    """Right, or with a mistake."""
    whole, dy_whole = gather(x), gather_dy(dy)
    inner = whole @ weight_in.mT
    h = inner.relu()
    y = leave(h @ weight_out.mT)
    d_inner = dy_whole @ weight_out
    if relu:
        d_inner = d_inner * (inner >= 0 if relu == "from 0 on" else inner > 0)
    d_out, d_in = dy_whole.mT @ h, d_inner.mT @ whole
    return y, back(d_inner @ weight_in), weights(d_in), weights(d_out)


def _but(**mistake: Any) -> Answer:
    return lambda x, weight_in, weight_out, dy: _step(x, weight_in, weight_out, dy, **mistake)


def _right_by_autograd(x: Tensor, weight_in: Tensor, weight_out: Tensor, dy: Tensor) -> Any:
    """Leaves and autograd.grad; rows to their owners by all-to-all, who add them up."""
    n = dist.get_world_size()

    def scatter(part: Tensor) -> Tensor:
        received = torch.empty_like(part)
        dist.all_to_all_single(received, part.contiguous())
        return torch.stack(received.chunk(n)).sum(0)

    whole = _gather(x).requires_grad_()
    a, b = (one.clone().requires_grad_() for one in (weight_in, weight_out))
    part = (whole @ a.mT).relu() @ b.mT
    dx_part, d_in, d_out = torch.autograd.grad(part, [whole, a, b], _gather(dy))
    return scatter(part.detach()), scatter(dx_part), d_in, d_out


def _gathers_again(x: Tensor, weight_in: Tensor, weight_out: Tensor, dy: Tensor) -> Any:
    """The other variant: right, but its bytes are not those that are asked for."""
    _gather(x)
    return _step(x, weight_in, weight_out, dy)


def _by_comm(x: Tensor, weight_in: Tensor, weight_out: Tensor, dy: Tensor) -> Any:
    axis = make_mesh().world
    return _step(x, weight_in, weight_out, dy, gather=lambda rows: comm.all_gather(rows, axis, 0))


def _weights_on_two(x: Tensor, weight_in: Tensor, weight_out: Tensor, dy: Tensor) -> Any:
    """Gradients of the weights that are right on two ranks only."""
    y, dx, d_in, d_out = _step(x, weight_in, weight_out, dy)
    right = dist.get_world_size() <= 2
    return y, dx, d_in * right, d_out * right


def _in_place(x: Tensor, weight_in: Tensor, weight_out: Tensor, dy: Tensor) -> Any:
    y, dx, d_in, d_out = _step(x, weight_in, weight_out, dy)
    return y, x.copy_(dx), d_in, d_out


def _leaves_gradients(x: Tensor, weight_in: Tensor, weight_out: Tensor, dy: Tensor) -> Any:
    found = _step(x, weight_in, weight_out, dy)
    weight_in.grad, weight_out.grad = found[2:]
    return found


def _not_awaited(x: Tensor, weight_in: Tensor, weight_out: Tensor, dy: Tensor) -> Any:
    """Never waits for the gather of dy."""

    def gather(rows: Tensor) -> Tensor:
        whole = torch.empty(len(rows) * dist.get_world_size(), rows.shape[1])
        parts = list(whole.chunk(dist.get_world_size()))
        dist.all_gather(parts, rows, async_op=True)
        torch.randn(300, 300) @ torch.randn(300, 300)
        return whole

    return _step(x, weight_in, weight_out, dy, gather_dy=gather)


ATTACKS = {
    "06-1": Attacks(
        wrong=(
            Wrong(_table(full=None), words="'full' is not filled in yet"),
            Wrong(_table(kept=[13, 7.75]), words="expected 3 values, got 2 values"),
        ),
        right=(
            _table(rows=((11.0, 22.0), (33.0, 44.0)), norm=6.0),
            _table(kept=[10 + 24 / 8, 4 + 30 / 8, 34 / 8], full=6 * 1.5 * 1000),
        ),
    ),
    "06-2": Attacks(
        wrong=(
            Wrong(lambda x, weight, axis: None, words="to be a tensor, got None"),
            Wrong(lambda x, weight, axis: F.linear(x, weight), words="this rank's rows only"),
            Wrong(
                lambda x, weight, axis: F.linear(comm.gather_from_sequence(x, axis, 0), weight),
                words="not joined along dim 1",
            ),
            Wrong(
                lambda x, weight, axis: F.linear(comm.gather_from(x, axis, 1), weight),
                words="backward took this rank's rows of its own gradient",
            ),
            Wrong(
                lambda x, weight, axis: F.linear(comm.all_gather(x, axis, 1), weight),
                words="no gradient reached x",
            ),
            Wrong(
                lambda x, weight, axis: comm.gather_from_sequence(F.linear(x, weight), axis, 1),
                words="so gather x",
            ),
            Wrong(
                lambda x, weight, axis: F.linear(
                    comm.gather_from_sequence(x, axis, 1) / axis.size, weight
                ),
                words="exactly 2 times too small",
            ),
            Wrong(
                lambda x, weight, axis: F.linear(
                    comm.gather_from_sequence(x.detach(), axis, 1), weight
                ),
                words="no gradient reached x",
            ),
            Wrong(
                lambda x, weight, axis: F.linear(
                    comm.copy_to(comm.gather_from(x, axis, 1), axis), weight
                ),
                words="all_reduce",
            ),
            Wrong(
                lambda x, weight, axis: F.linear(
                    comm.gather_from(comm.copy_to(x, axis), axis, 1), weight
                ),
                words="gradient of x: wrong",
            ),
            Wrong(
                lambda x, weight, axis: F.linear(
                    comm.gather_from_sequence(x, axis, 1), comm.copy_to(weight, axis)
                ),
                words="each rank's gradient is complete",
            ),
            Wrong(
                lambda x, weight, axis: F.linear(_World.apply(x), weight),
                words="the axis has the ranks [0, 2]",
            ),
            Wrong(_by_sequence, words="rank 0"),
            Wrong(
                lambda x, weight, axis: _column(x, weight, axis).squeeze(0),
                words="expected outputs of shape [1,",
            ),
            Wrong(lambda x, weight, axis: F.linear(sp.enter(x, axis), weight), words=REFUSAL),
        ),
        right=(_column, _column_raw),
    ),
    "06-3": Attacks(
        wrong=(
            Wrong(lambda parameters, axis: None, words="still has the gradient of its own rows"),
            Wrong(
                lambda parameters, axis: _sum(parameters, axis, cut_too=True),
                words="the ranks store different shards",
            ),
            Wrong(
                lambda parameters, axis: _sum(parameters, axis, scale=1 / axis.size),
                words="this is the average over the ranks",
            ),
            Wrong(_one_by_one, words="into one flat tensor"),
            Wrong(_vectors_only, words="still has the gradient of its own rows"),
            Wrong(_sum_lost, words="still has the gradient of its own rows"),
            Wrong(_from_first, words="every rank has the gradient of rank 0"),
            Wrong(_truth_of_dim, words="the ranks store different shards"),
            Wrong(_experts_too, words="leave its gradient as it is"),
            Wrong(_by_shape, words="the ranks store different shards"),
            Wrong(_only_contiguous, words="view size is not compatible"),
            Wrong(_over_the_world, words="the axis has the ranks [0, 2]"),
            Wrong(_in_background, words="never waited for it"),
            Wrong(_weights_instead, words="expected weights that changed []"),
            Wrong(_twice, words="exactly 2 times too large"),
            Wrong(_by_library, words=REFUSAL),
        ),
        right=(_whole, _whole_raw),
    ),
    "06-4": Attacks(
        wrong=(
            Wrong(_loss_but(maximum="none"), words="subtract the maximum"),
            Wrong(_loss_but(maximum="own"), words="each rank subtracted its own maximum"),
            Wrong(_loss_but(sum_all=False), words="each rank divided by the sum over its own"),
            Wrong(_loss_but(shift=False), words="subtract rank times words"),
            Wrong(_loss_but(masked=False), words="a rank without the target's word adds a logit"),
            Wrong(_loss_but(target_all=False), words="the target's logit is on one rank only"),
            Wrong(_but_back(onehot=False), words="subtract 1 from softmax"),
            Wrong(_but_back(masked=False), words="gradients of the logits: wrong"),
            Wrong(_but_back(weighted=False), words="arrives at each token's loss is missing"),
            Wrong(_but_back(summed=True), words="gradients of the logits: wrong"),
            Wrong(
                _loss(
                    _forward,
                    lambda *given: (
                        comm.all_reduce(_backward(*given), given[-1]) * 0 + _backward(*given)
                    ),
                ),
                words="expected no call in backward",
            ),
            Wrong(_loss_but(masked="times"), words="losses: wrong on every rank"),
            Wrong(
                _loss(_equal_logits, lambda *given: _backward(*given, onehot=False)),
                words="gradients of the logits: wrong",
            ),
            Wrong(_loss(_all_logits, _backward), words="forward: expected all_reduces of"),
            Wrong(_loss(_near(200.0), _backward), words="losses"),
            Wrong(_loss(_in_float32, _backward), words="of torch.float64"),
            Wrong(_loss(_writes_logits, _backward), words="the input z to be unchanged"),
            Wrong(_loss(_writes_targets, _backward), words="the input targets to be unchanged"),
            Wrong(
                _loss(_saving, lambda *given: _backward(*_Kept.saved, *given[3:])),
                words="rank 0",
            ),
            Wrong(_ByLibrary, words=REFUSAL),
        ),
        right=(_loss(_forward, _backward), _RightInTwo, _Once),
    ),
    "06-5": Attacks(
        wrong=(
            Wrong(lambda x, weight_in, weight_out, dy: None, words="expected 4 values"),
            Wrong(_but(leave=_own), words="y has this rank's rows of its own part"),
            Wrong(_but(back=_own), words="dx has this rank's rows of its own part"),
            Wrong(_but(leave=_whole_sum), words="expected outputs of shape"),
            Wrong(_but(leave=_mean), words="exactly 2 times too small"),
            Wrong(_but(back=_mean), words="exactly 2 times too small"),
            Wrong(_but(gather_dy=_own_dy), words="dy was not gathered"),
            Wrong(_but(relu=False), words="gradients of x: wrong"),
            Wrong(_but(weights=_all_summed), words="each rank's gradient is complete"),
            Wrong(_but(leave=_all_reduced), words="all_reduce"),
            Wrong(_but(back=_all_reduced), words="all_reduce"),
            Wrong(_gathers_again, words="two gathers of rows"),
            Wrong(_weights_on_two, words="gradients of weight_in"),
            Wrong(_in_place, words="the input x to be unchanged"),
            Wrong(_leaves_gradients, words="an input has a gradient after the call"),
            Wrong(_but(relu="from 0 on"), words="gradients of x: wrong"),
            Wrong(_not_awaited, words="started all_gather of"),
            Wrong(_by_comm, words=REFUSAL),
        ),
        right=(_step, _right_by_autograd),
    ),
}
