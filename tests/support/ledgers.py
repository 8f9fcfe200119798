"""What tests read from ledgers, beside what the library does."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from course_lib.ledger import Ledger


def backend_calls(ledger: Ledger) -> dict[str, int]:
    """Collectives by what torch was told, control traffic included.

    This is what torch's CommDebugMode counts; it counts no messages, and neither does this.
    """
    return dict(Counter(record.backend_op for record in ledger.records if record.peer is None))


def unmatched_sends(ledgers: Iterable[Ledger]) -> dict[tuple[int, int], int]:
    """Bytes sent minus bytes received for each (sender, receiver) pair where they differ.

    Ranks are global ranks. Empty when every message that was sent was received.
    """
    balance: dict[tuple[int, int], int] = defaultdict(int)
    for ledger in ledgers:
        for record in ledger.records:
            if record.op == "send" and record.peer is not None:
                balance[ledger.rank, record.peer] += record.payload
            elif record.op == "recv" and record.peer is not None:
                balance[record.peer, ledger.rank] -= record.payload
    return {pair: difference for pair, difference in balance.items() if difference}
