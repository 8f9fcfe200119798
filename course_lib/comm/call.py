"""What a rank asks of an axis, before anything is sent; and the checks of its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from torch import Tensor

from course_lib.ledger import wire
from course_lib.mesh import Axis

Counts = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Call:
    """What a rank asks of an axis.

    ``backend_op`` is the ``torch.ops.c10d`` operation that torch is told. ``tensor`` is the
    caller's input (for recv, what is wanted). ``how`` is what else all ranks must agree on, such
    as "max" or "dim 1". ``peer`` is a coordinate, for send and recv. ``counts`` are the rows
    that an uneven all_to_all sends to, and receives from, each coordinate. ``label`` is what the
    call is for, as a picture should say it.
    """

    op: str
    backend_op: str
    tensor: Tensor
    how: str = ""
    peer: int | None = None
    control: bool = False
    label: str = ""
    counts: Counts | None = None

    @property
    def payload(self) -> int:
        """Bytes handed to the call."""
        return self.tensor.numel() * self.tensor.element_size()

    def wire(self, axis: Axis) -> Fraction:
        """Bytes this rank sends for it: by the formula, or the rows that leave the rank."""
        if self.counts is None:
            return wire(self.op, self.payload, axis.size)
        return Fraction(self._bytes_with_others(self.counts[0], axis))

    def carried(self, axis: Axis) -> Fraction:
        """Bytes on this rank's link, in its busier direction. A message counts where it ends."""
        if self.counts is not None:
            return Fraction(max(self._bytes_with_others(rows, axis) for rows in self.counts))
        if self.peer is not None:
            return Fraction(self.payload if self.op == "recv" else 0)
        return self.wire(axis)

    def _bytes_with_others(self, rows: tuple[int, ...], axis: Axis) -> int:
        row_bytes = self.tensor.shape[1:].numel() * self.tensor.element_size()
        return (sum(rows) - rows[axis.rank]) * row_bytes


def checked_coordinate(coordinate: int, axis: Axis, what: str) -> int:
    """``coordinate``, if the axis has it; else ValueError."""
    if not 0 <= coordinate < axis.size:
        raise ValueError(
            f"{what}={coordinate} is no coordinate of axis {axis.name}, which has {axis.size} "
            f"ranks: give one of 0..{axis.size - 1}"
        )
    return coordinate


def checked_dim(x: Tensor, dim: int, op: str, axis: Axis) -> int:
    """``dim`` counted from 0, if ``x`` has it; else ValueError."""
    if not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"{op} on axis {axis.name}: dim {dim} of shape {list(x.shape)} does not exist"
            + ("; reshape the scalar to [1]" if x.dim() == 0 else "")
        )
    return dim % x.dim()


def checked_piece(x: Tensor, dim: int, op: str, axis: Axis) -> int:
    """``dim`` counted from 0, if it can be cut into equal pieces for all ranks; else ValueError."""
    dim = checked_dim(x, dim, op, axis)
    if x.shape[dim] % axis.size:
        raise ValueError(
            f"{op} on axis {axis.name}: dim {dim} of shape {list(x.shape)} cannot be cut into "
            f"{axis.size} equal pieces; pad that dim, or choose another dim or number of ranks"
        )
    return dim
