"""Which part of a parameter a rank holds, and what follows for gradients and their norm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from course_lib import comm
from course_lib.comm import Held
from course_lib.mesh import Axis


def own_part(parameter: Tensor, axis: Axis, dim: int, sharers: Axis | None = None) -> nn.Parameter:
    """This rank's part of ``parameter`` cut along ``dim``, as a parameter of its own.

    ``sharers``: neighbours that hold the same part. It leaves two notes on the parameter:
    ``tp_dim``, along which it is cut (None on one rank), and ``tp_sharers`` (None where nobody
    else holds it).
    """
    holders = sharers.size if sharers else 1
    piece = parameter.detach().chunk(axis.size // holders, dim)[axis.rank // holders]
    part = nn.Parameter(piece.clone(memory_format=torch.contiguous_format))
    part.requires_grad_(parameter.requires_grad)
    part.tp_dim = dim if axis.size > 1 else None  # type: ignore[attr-defined]
    part.tp_sharers = sharers if holders > 1 else None  # type: ignore[attr-defined]
    return part


def is_cut(parameter: Tensor) -> bool:
    """Whether the ranks hold different parts of it; a parameter without notes is replicated."""
    return getattr(parameter, "tp_dim", None) is not None


def copies(parameter: Tensor, axis: Axis) -> int:
    """How many ranks of the axis hold these very values."""
    if not is_cut(parameter):
        return axis.size
    sharers: Axis | None = getattr(parameter, "tp_sharers", None)
    return 1 if sharers is None else sharers.size


def sum_shared_gradients(held: Iterable[Held]) -> None:
    """Add up the gradients of key and value weights over the ranks that share a head.

    Each of them used the head for its own queries only. Call it once a step, after the last
    backward and what sums or shards over data parallelism. Without such ranks it does nothing.
    """
    by_axis: dict[Axis, list[Held]] = {}
    for one in held:
        sharers: Axis | None = getattr(one.parameter, "tp_sharers", None)
        if sharers is not None:
            by_axis.setdefault(sharers, []).append(one)
    for sharers, shared in by_axis.items():
        comm.sum_gradients(shared, sharers)


def squared_norm(held: Sequence[Held], axis: Axis, over: Sequence[Axis] = ()) -> Tensor:
    """Squared norm of the whole model's gradient: every element counts once, wherever it is held.

    The square of what r ranks of the axis hold alike counts 1/r on each. ``over`` are further axes
    whose ranks hold other gradients: dp under ZeRO, pp. One number on each, as control.
    """
    return comm.squared_norm(held, [axis, *over], partial(copies, axis=axis))


def clip_gradients(
    held: Sequence[Held], axis: Axis, max_norm: float, over: Sequence[Axis] = ()
) -> Tensor:
    """Scale all gradients down together to a global norm of at most ``max_norm``.

    Returns the norm before. Call it when all sums are made; ``over`` as in :func:`squared_norm`.
    """
    norm = squared_norm(held, axis, over).sqrt()
    comm.clip_gradients(held, norm, max_norm)
    return norm
