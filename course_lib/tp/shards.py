"""Which part of a parameter a rank holds, and what follows for gradients and their norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from course_lib import comm
from course_lib.mesh import Axis


def own_part(parameter: Tensor, axis: Axis, dim: int, sharers: Axis | None = None) -> nn.Parameter:
    """This rank's part of ``parameter`` cut along ``dim``, as a parameter of its own.

    ``sharers``: neighbours that hold the same part. It leaves two notes on the parameter:
    ``tp_dim``, along which it is cut, and ``tp_sharers`` (None where nobody else holds it).
    """
    holders = sharers.size if sharers else 1
    piece = parameter.detach().chunk(axis.size // holders, dim)[axis.rank // holders]
    part = nn.Parameter(piece.clone(memory_format=torch.contiguous_format))
    part.requires_grad_(parameter.requires_grad)
    part.tp_dim = dim  # type: ignore[attr-defined]
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


def sum_shared_gradients(parameters: Iterable[Tensor]) -> None:
    """Add up the gradients of key and value weights over the ranks that share a head.

    Each of them used the head for its own queries only. Call it once a step, after the last
    backward. Without such ranks it does nothing.
    """
    by_axis: dict[Axis, list[Tensor]] = {}
    for parameter in dict.fromkeys(parameters):
        sharers: Axis | None = getattr(parameter, "tp_sharers", None)
        if sharers is not None:
            by_axis.setdefault(sharers, []).append(parameter)
    for sharers, shared in by_axis.items():
        comm.sum_gradients(shared, sharers)


def gradient_norm(parameters: Iterable[Tensor], axis: Axis) -> Tensor:
    """Norm of the gradient of the whole model: every element counts once, wherever it is held.

    The square of what r ranks hold alike counts 1/r on each. One number travels, as control.
    """
    square = torch.zeros((), device=axis.context.device)
    for parameter in dict.fromkeys(parameters):
        if parameter.grad is not None:
            own = torch.linalg.vector_norm(parameter.grad, dtype=_accumulation(parameter.grad))
            square = square + own**2 / copies(parameter, axis)
    return comm.all_reduce(square, axis, control=True).sqrt()


def clip_gradients(parameters: Iterable[Tensor], axis: Axis, max_norm: float) -> Tensor:
    """Scale all gradients down together to a global norm of at most ``max_norm``.

    Returns the norm before.
    """
    if max_norm <= 0:
        raise ValueError(f"max_norm={max_norm}: a norm above 0 is wanted")
    parameters = list(dict.fromkeys(parameters))
    norm = gradient_norm(parameters, axis)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # 1e-6 as torch.nn.utils.clip_grad_norm_
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.dtype))
    return norm


def _accumulation(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
