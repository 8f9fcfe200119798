"""The ledger: every call that goes through the network, and the one formula for wire bytes.

*Payload* is the caller's input in bytes, which is counted. *Wire* is a formula: the bytes that a
rank sends for the payload with the cheapest known algorithm (a ring). :func:`wire` is the only
place that has it. :mod:`course_lib.trace.traffic` counts the bytes that were really sent. Control
traffic (token counts, norms, split sizes) is tagged and has a line of its own.

Each technique has closed forms in :mod:`course_lib.formulas`: ``wire_bytes`` per optimizer step,
``saved_bytes`` per forward, ``state_bytes`` between steps, ``peak_bytes``. Their arguments are what
is trained (such as config, sequences, seq_len), then n, then options by keyword.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

WIRE_FACTORS = {
    "all_reduce": lambda n: Fraction(2 * (n - 1), n),
    "reduce_scatter": lambda n: Fraction(n - 1, n),
    "all_to_all": lambda n: Fraction(n - 1, n),
    "all_gather": lambda n: Fraction(n - 1),
    "broadcast": lambda n: Fraction(n - 1, n),
    "send": lambda n: Fraction(1),
    "recv": lambda n: Fraction(0),
}


def wire(op: str, payload: int | Fraction, n: int) -> Fraction:
    """Bytes that one of ``n`` ranks sends for ``op`` on ``payload`` bytes, exact as a fraction.

    ``payload`` is the caller's input: for all_gather one shard, for the others the whole tensor.
    A broadcast is given as the average over the ranks. One rank sends nothing.
    Source: the bus factors of nccl-tests (PERFORMANCE.md), per rank instead of per bus.
    """
    if op not in WIRE_FACTORS:
        raise ValueError(
            f"no wire formula for operation {op!r}; known operations: {', '.join(WIRE_FACTORS)}"
        )
    if n < 1 or payload < 0:
        raise ValueError(
            f"wire({op!r}, payload={payload}, n={n}): payload must be at least 0 and n at least 1"
        )
    return Fraction(0) if n == 1 else WIRE_FACTORS[op](n) * payload


@dataclass(slots=True)
class Record:
    """One call of one rank: ``op`` is what was asked for, ``backend_op`` what torch was told.

    ``backend_op`` is the name of a ``torch.ops.c10d`` operation, which is what torch's own
    counters see. ``peer`` is the other global rank of a message. ``sent`` are the bytes that left
    the rank where no formula gives them (all_to_all_v). ``itemsize`` is in bytes per element.
    """

    axis: str
    op: str
    backend_op: str
    payload: int
    n: int
    control: bool = False
    peer: int | None = None
    sent: int | None = None
    itemsize: int = 4

    @property
    def wire(self) -> Fraction:
        """Bytes that the rank sent, by the formula."""
        return wire(self.op, self.payload, self.n) if self.sent is None else Fraction(self.sent)


class Ledger:
    """The calls of one rank, in order."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.records: list[Record] = []
        self.groups: dict[str, tuple[int, ...]] = {}  # axis -> global ranks of this rank's group

    def add(self, record: Record) -> None:
        """Write down one call."""
        self.records.append(record)

    def clear(self) -> None:
        """Forget all calls: what follows is counted from zero."""
        self.records.clear()

    def select(self, axis: str | None = None, op: str | None = None) -> Iterator[Record]:
        """The calls on ``axis`` (any if None) of ``op`` (any if None), control traffic left out."""
        for record in self.records:
            if axis in (None, record.axis) and op in (None, record.op) and not record.control:
                yield record

    def wire_bytes(self, axis: str | None = None, op: str | None = None) -> Fraction:
        """Bytes this rank sent, control traffic left out."""
        return sum((record.wire for record in self.select(axis, op)), Fraction(0))

    def calls(self, axis: str | None = None, op: str | None = None) -> int:
        """How many calls this rank made, control traffic left out."""
        return sum(1 for _ in self.select(axis, op))


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a ledger summed up: all calls of one op on one axis."""

    axis: str
    op: str
    backend_op: str
    control: bool
    calls: int
    payload: int
    wire: Fraction


def summarize(ledgers: Iterable[Ledger]) -> list[Line]:
    """Sum calls, payload and wire bytes over all ``ledgers``, a line per axis and op."""
    sums: dict[tuple[str, str, str, bool], list] = defaultdict(lambda: [0, 0, Fraction(0)])
    for ledger in ledgers:
        for record in ledger.records:
            total = sums[record.axis, record.op, record.backend_op, record.control]
            total[0] += 1
            total[1] += record.payload
            total[2] += record.wire
    ordered = sorted(sums.items(), key=lambda item: (item[0][3], item[0][:3]))
    return [Line(*key, *total) for key, total in ordered]


def wire_bytes_by_axis(ledgers: Iterable[Ledger]) -> dict[str, Fraction]:
    """Bytes that all ranks together sent on each axis, control traffic left out."""
    sums: dict[str, Fraction] = defaultdict(Fraction)
    for line in summarize(ledgers):
        if not line.control:
            sums[line.axis] += line.wire
    return dict(sums)


def formula_matrices(ledgers: Iterable[Ledger]) -> dict[str, list[list[Fraction]]]:
    """Return the wire bytes, control traffic included, by sender and receiver.

    The result is axis -> [sender][receiver], global ranks. An all_to_all sends the same to each
    peer, other collectives send all to the next rank of the ring. ``ledgers`` has those of all
    ranks, in order, from a run with :func:`course_lib.mesh.make_mesh`.
    """
    books = list(ledgers)
    matrices: dict[str, list[list[Fraction]]] = {}
    for rank, book in enumerate(books):
        for record in book.records:
            if record.axis not in matrices:
                matrices[record.axis] = [[Fraction(0)] * len(books) for _ in books]
            group = book.groups[record.axis]
            following = group[(group.index(rank) + 1) % len(group)]
            peers = [following] if record.peer is None else [record.peer]
            if record.backend_op == "alltoall_base_":
                peers = [peer for peer in group if peer != rank]
            for peer in peers:
                matrices[record.axis][rank][peer] += record.wire / len(peers)
    return matrices


def table(ledgers: Iterable[Ledger]) -> str:
    """Return the ledger as text: axis, op, torch's own op, calls, payload bytes, wire bytes."""
    head = ("axis", "op", "backend op", "calls", "payload bytes", "wire bytes (formula)")
    rows = [head]
    for line in summarize(ledgers):
        op = f"{line.op} (control)" if line.control else line.op
        sent = f"{float(line.wire):,.0f}"
        rows.append((line.axis, op, line.backend_op, f"{line.calls:,}", f"{line.payload:,}", sent))
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = []
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
        lines.append("  ".join(left + right).rstrip())
    return "\n".join(lines)
