"""Held gradients: which part of a parameter's gradient this rank holds.

After the last backward and the sums over data parallelism a rank holds all of a plain parameter's
gradient; under ZeRO it holds runs of it, its shard. Sums and norms over the other axes need not
know which: they take a list of :class:`Held`, and write to the tensors in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from course_lib.comm.collectives import all_reduce
from course_lib.comm.flat import by_dtype_and_size, start_all_reduce_flat, unflatten
from course_lib.mesh import Axis


class Held(NamedTuple):
    """``gradient`` is a view of what this rank holds of ``parameter``'s: all of it, or a run."""

    parameter: nn.Parameter
    gradient: Tensor


def held_gradients(parameters: Iterable[nn.Parameter]) -> list[Held]:
    """All of each trained parameter's gradient, each parameter once, in order.

    Raises ValueError where one has no gradient: it was not used, or is held elsewhere.
    """
    trained = [p for p in dict.fromkeys(parameters) if p.requires_grad]
    missing = [tuple(p.shape) for p in trained if p.grad is None]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(trained)} trained parameters have no gradient (the first is "
            f"of shape {missing[0]}): ask after the last backward; under ZeRO ask "
            "z.held_gradients(); freeze what no rank uses"
        )
    return [Held(p, p.grad) for p in trained if p.grad is not None]


def sum_gradients(held: Sequence[Held], axis: Axis) -> None:
    """Add up gradients of which every rank of the axis has a part, in place.

    One flat all-reduce for each dtype. The ranks must hold the same runs of the same parameters.
    """
    gradients = [one.gradient for one in held]
    if axis.size == 1 or not gradients:
        return
    for bucket in by_dtype_and_size(gradients, sum(gradient.nbytes for gradient in gradients)):
        total = start_all_reduce_flat(bucket, axis, label="partial gradients").wait()
        for gradient, summed in zip(bucket, unflatten(total, bucket), strict=True):
            gradient.copy_(summed)


def squared_norm(
    held: Sequence[Held], axes: Iterable[Axis] = (), copies: Callable[[Tensor], int] = lambda _: 1
) -> Tensor:
    """Squared norm of the gradients that the ranks of ``axes`` hold, every element counted once.

    ``axes`` are those whose ranks hold different gradients: tp, pp, and dp under ZeRO (experts:
    ep, and edp under ZeRO). What ``copies(parameter)`` of their ranks hold alike counts 1/copies
    on each. One number travels on each axis, as control; in float64 whatever the gradients are,
    so that a rank that holds none agrees with the others.
    """
    total = torch.zeros((), dtype=torch.float64)
    for parameter, gradient in held:
        wide = torch.promote_types(gradient.dtype, torch.float32)
        own = torch.linalg.vector_norm(gradient, dtype=wide)
        total = total.to(own.device) + own.double() ** 2 / copies(parameter)
    for axis in axes:
        total = all_reduce(total.to(axis.context.device), axis, control=True)
    return total


def clip_gradients(held: Iterable[Held], norm: Tensor, max_norm: float) -> None:
    """Scale all held gradients down together: from the global ``norm`` to at most ``max_norm``."""
    if max_norm <= 0:
        raise ValueError(f"max_norm={max_norm}: a norm above 0 is wanted")
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    for _, gradient in held:
        gradient.mul_(factor.to(gradient.dtype))


def refuse_cut(parameters: Iterable[Tensor]) -> None:
    """Raise ValueError if one is cut over tp: the norm of these parts is not the model's."""
    cut = next((p for p in parameters if getattr(p, "tp_dim", None) is not None), None)
    if cut is not None:
        raise ValueError(
            f"a parameter of shape {tuple(cut.shape)} is this rank's part of one that is cut over "
            "tp, so that the norm of what this rank holds is not the model's, and ranks would "
            "scale differently: use tp.clip_gradients with the held gradients"
        )
