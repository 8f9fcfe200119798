"""The bytes that the kernel counted in a row's last step, beside those that are expected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from course_lib.ledger import Ledger
from course_lib.trace import Matrix, header_bytes


@dataclass(frozen=True)
class Counted:
    """Bytes that each rank sent, by the kernel's count, and the expected sum over the ranks.

    ``expected`` is the formula of every call, control traffic included. ``headers`` are the bytes
    that gloo adds.
    """

    by_rank: list[int]
    expected: Fraction = Fraction(0)
    headers: Fraction = Fraction(0)

    @property
    def bytes(self) -> int:
        """Bytes of all ranks together."""
        return sum(self.by_rank)

    @property
    def extra(self) -> Fraction:
        """Bytes above the formula, of all ranks together."""
        return self.bytes - self.expected

    def as_json(self) -> dict[str, int | float]:
        """Return the numbers of all ranks together, and of the rank that sends most."""
        return {
            "bytes": self.bytes,
            "expected": number(self.expected),
            "headers": number(self.headers),
            "bytes_max_rank": max(self.by_rank, default=0),
        }


def counted_by_axis(
    kernel: Mapping[str, Matrix] | None, ledgers: Iterable[Ledger]
) -> dict[str, Counted] | None:
    """Return the kernel's count of each axis with traffic; None where the kernel has no count."""
    if kernel is None:
        return None
    books = list(ledgers)
    records = [record for book in books for record in book.records]
    found = {}
    for axis in sorted(kernel.keys() | {record.axis for record in records}):
        here = [record for record in records if record.axis == axis]
        wire = sum((record.wire for record in here), Fraction(0))
        headers = sum(map(header_bytes, here), Fraction(0))
        sent = [sum(row) for row in kernel.get(axis, [[0]] * len(books))]
        if here or any(sent):
            found[axis] = Counted(sent, wire, headers)
    return found


def kernel_json(by_axis: Mapping[str, Counted] | None) -> dict[str, Any]:
    """Return the entries of tour.json: of all axes, and of each; null where there is no count."""
    if by_axis is None:
        return {f"kernel_{key}": None for key in (*Counted([0]).as_json(), "by_axis")}
    whole = Counted(
        [sum(ranks) for ranks in zip(*(one.by_rank for one in by_axis.values()), strict=True)],
        sum((one.expected for one in by_axis.values()), Fraction(0)),
        sum((one.headers for one in by_axis.values()), Fraction(0)),
    ).as_json()
    axes = {axis: one.as_json() for axis, one in by_axis.items()}
    return {f"kernel_{key}": value for key, value in whole.items()} | {"kernel_by_axis": axes}


def number(value: Fraction) -> int | float:
    """Return a whole number as int, for JSON."""
    return int(value) if value.denominator == 1 else float(value)
