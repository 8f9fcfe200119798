"""Count a rank's calls of torch's network layer, below course_lib.comm.

A dispatch mode sees every ``c10d`` operation, including send and recv_. Answers in raw torch are
therefore counted like answers that use course_lib.comm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib.ledger import wire

# torch's operation -> (its name here, the index of the argument with the caller's input)
OPERATIONS = {
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "allgather_": ("all_gather", 1),
    "_allgather_base_": ("all_gather", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "all_gather_into_tensor": ("all_gather", 0),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "all_to_all_single": ("all_to_all", 0),
}
SILENT = {"barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd"}


@dataclass(frozen=True, slots=True)
class WireCall:
    """One operation: its name, the bytes of its input, the peer of a message in its group."""

    op: str
    payload: int
    peer: int | None = None

    def wire(self, n: int) -> Fraction:
        """Return the bytes that one of ``n`` ranks sends; the payload for an unknown operation."""
        known = {op for op, _ in OPERATIONS.values()}
        return wire(self.op, self.payload, n) if self.op in known else Fraction(self.payload)


class WireCalls(TorchDispatchMode):
    """Record every network operation of the body in ``calls``, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[WireCall] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        space, name = func.namespace, func._schema.name.split("::")[-1]
        if space in ("c10d", "_c10d_functional") and name not in SILENT:
            op, place = OPERATIONS.get(name, (name.strip("_"), 0))
            payload = sum(
                tensor.numel() * tensor.element_size() for tensor in _tensors(args[place])
            )
            peer = int(args[2]) if name in ("send", "recv_") else None
            self.calls.append(WireCall(op, payload, peer))
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
