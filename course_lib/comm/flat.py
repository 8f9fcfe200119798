"""Flat buckets: many gradients or parameters in one call, and the hook that tells when to send.

One call for a bucket of gradients costs one alpha instead of one per tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from course_lib.comm.collectives import start_all_gather_into, start_all_reduce_into
from course_lib.comm.transfer import Completed, Handle
from course_lib.mesh import Axis

T = TypeVar("T", bound=Tensor)
BUCKET_BYTES = 12 * 2**20  # of gradients; `course bench dp` times smaller and larger ones beside it


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Copy all elements of ``tensors`` (one dtype), in order, into a new 1-D tensor."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) != 1:
        raise ValueError(
            f"expected tensors of one dtype in a flat bucket, got {sorted(map(str, dtypes))}: "
            "make one bucket per dtype"
        )
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, like: Iterable[Tensor]) -> list[Tensor]:
    """Return views into ``flat`` with the shapes of ``like``, in order."""
    shapes = [tensor.shape for tensor in like]
    slices = flat.split([shape.numel() for shape in shapes])
    return [values.view(shape) for values, shape in zip(slices, shapes, strict=True)]


def start_all_reduce_flat(tensors: Sequence[Tensor], axis: Axis, label: str = "") -> Handle:
    """Start the all-reduce of ``tensors`` as one bucket; wait returns the flat sum.

    Flattening makes the only copy. ``label`` names the bucket in pictures.
    """
    flat = flatten(tensors)
    if axis.size == 1:
        return Completed(flat)
    return start_all_reduce_into(flat, axis, label=label, overlaps=True)


def start_all_gather_flat(full: Tensor, shard: Tensor, axis: Axis, label: str = "") -> Handle:
    """Start to fill ``full`` [n*d] with every rank's ``shard`` [d]; wait returns ``full``.

    Unlike :func:`~course_lib.comm.all_gather` it writes into the caller's memory, so parameters
    that are views into ``full`` stay views. ``shard`` may be this rank's own slice of ``full``.
    """
    if full.dim() != 1 or shard.shape != (len(full) // axis.size,) or len(full) % axis.size:
        raise ValueError(
            f"flat all_gather on axis {axis.name} of {axis.size} ranks: expected full to have "
            f"{axis.size} times the elements of the shard, got shapes {list(full.shape)} and "
            f"{list(shard.shape)}"
        )
    if axis.size == 1:
        return Completed(full.copy_(shard))
    return start_all_gather_into(
        full, shard, axis, result=lambda: full, how="dim 0", label=label, overlaps=True
    )


def by_dtype_and_size(tensors: Iterable[T], limit: int) -> list[list[T]]:
    """Group ``tensors`` (order kept within a dtype) into buckets of about ``limit`` bytes.

    The tensor that reaches the limit closes its bucket, so a tensor above the limit may share a
    bucket with earlier ones but not with later ones.
    """
    if limit < 1:
        raise ValueError(f"expected buckets of at least 1 byte, got a bucket of {limit} bytes")
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


def on_gradient(
    parameters: Iterable[nn.Parameter], ready: Callable[[nn.Parameter], None]
) -> list[RemovableHandle]:
    """Make autograd call the method ``ready`` when a parameter's gradient is complete.

    The hook stores only a weak reference to the method's object. An object that refers to its
    parameters, whose hooks refer to the object, is a cycle through autograd's own memory. Python's
    garbage collector cannot see it: model, gradients and process groups would never be freed.
    """
    method = weakref.WeakMethod(ready)

    def call(parameter: nn.Parameter) -> None:
        if alive := method():
            alive(parameter)

    return [each.register_post_accumulate_grad_hook(call) for each in parameters]
