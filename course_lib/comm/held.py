"""Held gradients: the shard of each gradient that this rank holds; their sums and global norm.

After the last backward and the sums over data parallelism a rank holds all of a parameter's
gradient; under ZeRO it holds a shard. Sums and norms over the other axes treat both alike: they
take a list of :class:`Held`, and write to the tensors in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from course_lib.comm.collectives import all_reduce
from course_lib.comm.flat import by_dtype_and_size, start_all_reduce_flat, unflatten
from course_lib.comm.sharding import ShardSpec, shard_spec
from course_lib.mesh import Axis


class Held(NamedTuple):
    """``gradient`` is a view of this rank's gradient of ``parameter``: all of it, or a shard.

    ``axes`` lists further axes on which ranks hold different gradients, besides the axis of the
    ShardSpec: the data axis under ZeRO, and pp.
    """

    parameter: nn.Parameter
    gradient: Tensor
    axes: tuple[Axis, ...] = ()


def held_gradients(parameters: Iterable[nn.Parameter]) -> list[Held]:
    """Return the ``.grad`` of each trained parameter, each parameter once, in order.

    Raises ValueError where one has no gradient: it was not used, or is held elsewhere.
    """
    trained = [p for p in dict.fromkeys(parameters) if p.requires_grad]
    missing = [tuple(p.shape) for p in trained if p.grad is None]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(trained)} trained parameters have no gradient (the first is "
            f"of shape {missing[0]}): call it after the last backward; under ZeRO ask "
            "z.held_gradients(); freeze what no rank uses"
        )
    return [Held(p, p.grad) for p in trained if p.grad is not None]


def sum_gradients(held: Sequence[Held], axis: Axis) -> None:
    """Add up gradients over the axis, in place.

    One flat all-reduce per dtype. The ranks must hold the same shards of the same parameters.
    """
    gradients = [one.gradient for one in held]
    if axis.size == 1 or not gradients:
        return
    for bucket in by_dtype_and_size(gradients, sum(gradient.nbytes for gradient in gradients)):
        total = start_all_reduce_flat(bucket, axis, label="partial gradients").wait()
        for gradient, summed in zip(bucket, unflatten(total, bucket), strict=True):
            gradient.copy_(summed)


def copies(one: Held, axes: Iterable[Axis]) -> int:
    """Return how many ranks of ``axes`` hold the same gradient as this rank.

    ``axes`` must not overlap. Raises ValueError where the gradient is sharded over ranks that are
    not among ``axes``: its norm there would be the norm of a part.
    """
    axes = list(axes)
    spec = shard_spec(one.parameter)
    specs = [*(ShardSpec(axis) for axis in one.axes), *([] if spec is None else [spec])]
    for divided in specs:
        if prod(divided.shards_on(axis) for axis in axes) != divided.shards:
            given = ", ".join(axis.name for axis in axes) or "none"
            raise ValueError(
                f"a gradient of a parameter of shape {tuple(one.parameter.shape)} is sharded over "
                f"axis {divided.axis.name}, and the norm was asked for over axes: {given}; call "
                "comm.clip_grad_norm(held, axes, max_norm) with this axis too"
            )
    shards = prod(divided.shards_on(axis) for divided in specs for axis in axes)
    return prod(axis.size for axis in axes) // shards


def grad_norm(held: Iterable[Held], axes: Sequence[Axis] = ()) -> Tensor:
    """Return the norm of the whole model's gradient, in which every element counts once.

    ``axes`` lists the axes on which ranks hold different gradients: tp, pp, ep, and the data axis
    under ZeRO; or the world alone. A gradient that several of their ranks hold counts once
    (:func:`copies`). One float64 number is sent per axis as control traffic, so that a rank without
    gradients sends the same dtype as the others. Raises ValueError where an axis is missing.
    """
    total = torch.zeros((), dtype=torch.float64)
    for one in held:
        wide = torch.promote_types(one.gradient.dtype, torch.float32)
        own = torch.linalg.vector_norm(one.gradient, dtype=wide)
        total = total.to(own.device) + own.double() ** 2 / copies(one, axes)
    for axis in axes:
        total = all_reduce(total.to(axis.context.device), axis, control=True)
    return total.sqrt()


def clip_grad_norm(
    held: Sequence[Held], axes: Sequence[Axis], max_norm: float, norm: Tensor | None = None
) -> Tensor:
    """Scale all gradients to a global norm of at most ``max_norm``; return the norm before.

    Call it when all sums are made: then all ranks scale by one factor. ``axes`` as in
    :func:`grad_norm`, which computes ``norm`` if it is not given.
    """
    if max_norm <= 0:
        raise ValueError(f"expected max_norm above 0, got max_norm={max_norm}")
    norm = grad_norm(held, axes) if norm is None else norm
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    for one in held:
        one.gradient.mul_(factor.to(one.gradient.dtype))
    return norm
