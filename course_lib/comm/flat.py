"""Flat buckets: many tensors travel as one.

One call for a bucket of gradients costs one alpha instead of one for each tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from course_lib.comm.collectives import start_all_gather_into, start_in_place_all_reduce
from course_lib.comm.transfer import Completed, Handle
from course_lib.mesh import Axis

T = TypeVar("T", bound=Tensor)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """All elements of ``tensors`` (one dtype) in order, as a fresh 1-D tensor."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) != 1:
        raise ValueError(
            f"a flat bucket holds one dtype, got {sorted(map(str, dtypes))}: make one bucket each"
        )
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, like: Iterable[Tensor]) -> list[Tensor]:
    """Views into ``flat`` with the shapes of ``like``, in order."""
    shapes = [tensor.shape for tensor in like]
    pieces = flat.split([shape.numel() for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def start_all_reduce_flat(tensors: Sequence[Tensor], axis: Axis, label: str = "") -> Handle:
    """Begin the all-reduce of ``tensors`` as one bucket; wait gives the flat sum.

    The flattening is the only copy that is made. ``label`` names the bucket in pictures.
    """
    flat = flatten(tensors)
    if axis.size == 1:
        return Completed(flat)
    return start_in_place_all_reduce(flat, axis, label=label)


def start_all_gather_flat(full: Tensor, shard: Tensor, axis: Axis, label: str = "") -> Handle:
    """Begin to fill ``full`` [n*d] with every rank's ``shard`` [d]; wait gives ``full``.

    Unlike :func:`~course_lib.comm.all_gather` it writes memory that the caller has: parameters
    that are views into ``full`` stay so. ``shard`` may be this rank's own piece of ``full``.
    """
    if full.dim() != 1 or shard.shape != (len(full) // axis.size,) or len(full) % axis.size:
        raise ValueError(
            f"flat all_gather on axis {axis.name} of {axis.size} ranks: full of shape "
            f"{list(full.shape)} is wanted to be {axis.size} times the shard {list(shard.shape)}"
        )
    if axis.size == 1:
        return Completed(full.copy_(shard))
    return start_all_gather_into(full, shard, axis, label=label)


def by_dtype_and_size(tensors: Iterable[T], limit: int) -> list[list[T]]:
    """Cut ``tensors`` (order kept within a dtype) into buckets of about ``limit`` bytes.

    A bucket is closed by the tensor that fills it, so that a tensor above the limit has its own.
    """
    if limit < 1:
        raise ValueError(f"a bucket of {limit} bytes: at least 1 is wanted")
    open_buckets: dict[torch.dtype, list[T]] = {}
    buckets: list[list[T]] = []
    for tensor in tensors:
        bucket = open_buckets.setdefault(tensor.dtype, [])
        if not bucket:
            buckets.append(bucket)
        bucket.append(tensor)
        if sum(member.nbytes for member in bucket) >= limit:
            del open_buckets[tensor.dtype]
    return buckets
