"""What a rank asks of an axis, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, log2

from torch import Tensor

from course_lib.ledger import wire

# Messages one after another in the best known algorithm: the alpha of alpha-beta.
STEPS: dict[str, Callable[[int], int]] = {
    "all_reduce": lambda n: 2 * (n - 1),
    "reduce_scatter": lambda n: n - 1,
    "all_gather": lambda n: n - 1,
    "all_to_all": lambda n: n - 1,
    "broadcast": lambda n: ceil(log2(n)),
    "send": lambda n: 0,
    "recv": lambda n: 1,
}


@dataclass(frozen=True)
class Call:
    """What a rank asks of an axis. ``peer`` is a coordinate on it, for send and recv."""

    op: str
    backend_op: str
    tensor: Tensor
    peer: int | None = None
    control: bool = False
    leaving: int | None = None  # bytes that leave the rank, where no formula knows (uneven)

    @property
    def payload(self) -> int:
        """Bytes handed to the call."""
        return self.tensor.numel() * self.tensor.element_size()

    def wire(self, n: int) -> Fraction:
        """Bytes this rank sends for it."""
        return wire(self.op, self.payload, n) if self.leaving is None else Fraction(self.leaving)
