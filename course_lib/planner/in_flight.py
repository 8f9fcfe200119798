"""How many micro-batches a pipeline rank has in flight at its peak, without making the schedule."""

from __future__ import annotations

from dataclasses import dataclass

from course_lib.schedule import placement


@dataclass(frozen=True)
class InFlight:
    """Micro-batches in flight by chunk of the rank, in the order of its stages.

    ``whole`` ones wait for their backward. ``weight`` ones wait for W: their input gradient is
    done, and inputs and output gradients of the linears are stored.
    """

    whole: tuple[int, ...]
    weight: tuple[int, ...]

    @property
    def total(self) -> int:
        """All pairs of a stage and a micro-batch, as ``Schedule.peak_in_flight`` counts them."""
        return sum(self.whole) + sum(self.weight)


def in_flight(
    name: str, ranks: int, micro_batches: int, rank: int, chunks: int | None = None
) -> InFlight:
    """Return what ``rank`` has in flight when the schedule ``name`` has most there.

    Closed forms of the rows that :mod:`course_lib.schedule` makes, at F = I = W for those with a
    split backward. With p ranks, m micro-batches and v chunks the first rank has

    ===========  =================================================
    naive, gpipe  1; m                     per chunk
    1f1b          p
    interleaved   p v + p - 1 of v chunks   = p (1 + (p-1)/(p v)) whole micro-batches
    zb-h1; zb-h2  p; 2p - 1                 on all ranks
    zb-v          2p half stages            on all ranks
    dualpipe-v    2p + 1 half stages        on all ranks
    ===========  =================================================

    and never more than m per chunk. Raises ValueError for an unknown schedule.
    """
    v = len(placement(name, ranks, chunks)) // ranks
    p, m, r = ranks, micro_batches, rank
    later: tuple[int, ...] = (0,) * v
    if name == "naive":
        whole: tuple[int, ...] = (1,) * v
    elif name == "gpipe":
        whole = (m,) * v
    elif name == "1f1b":
        whole = (min(p - r, m),)
    elif name == "interleaved":
        whole = _interleaved(p, m, r, v)
    elif name in ("zb-h1", "zb-h2"):
        most, waiting = (p, p - r) if name == "zb-h1" else (2 * p - 1, 2 * (p - 1 - r) + 1)
        whole = (min(waiting, m),)
        later = (min(most, m) - whole[0],)
    else:  # a V: the rank's early stage and its late one
        more = name == "dualpipe-v"
        early = min(2 * p - 1 - r + more, m)
        whole = (early, min(2 * p + more - early, m))
    return InFlight(whole, later)


def _interleaved(p: int, m: int, r: int, v: int) -> tuple[int, ...]:
    """Count the forwards by chunk up to the first backward: rounds of p or a few more, by chunk."""
    rounds = max(1, m // p)
    least, more = divmod(m, rounds)
    left = (v - 1) * (least + (more > 0)) + (1 + (v > 1)) * (p - 1 - r) + 1
    counts = [0] * v
    for number in range(rounds):
        if not left:
            break
        for chunk in range(v):
            taken = min(left, least + (number < more))
            counts[chunk] += taken
            left -= taken
    return tuple(counts)
