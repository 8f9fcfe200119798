"""The calls of the techniques: the operation, the payload and the number of each.

A technique's ``wire_bytes`` is the sum over these calls; the planner also asks how long each takes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

from course_lib.ledger import wire

Bytes = int | Fraction


class Move(NamedTuple):
    """Equal ``calls`` of one rank: ``payload`` bytes each, in a group of ``n`` ranks."""

    op: str
    payload: Bytes
    n: int
    calls: int = 1

    @property
    def wire(self) -> Fraction:
        """Bytes that the rank sends in all of these calls."""
        return self.calls * wire(self.op, self.payload, self.n)

    def times(self, factor: int) -> Move:
        """Return ``factor`` times as many calls."""
        return self._replace(calls=self.calls * factor)

    def cut(self, pieces: int) -> Move:
        """Return the calls, each split into ``pieces`` equal calls."""
        return self._replace(payload=Fraction(self.payload, pieces), calls=self.calls * pieces)


class Passes(NamedTuple):
    """The calls of one forward pass and of one backward pass.

    ``again``: what backward gathers a second time, beside a product that does not need it.
    """

    forward: tuple[Move, ...] = ()
    backward: tuple[Move, ...] = ()
    again: tuple[Move, ...] = ()

    def wire(self, forwards: int = 1) -> Fraction:
        """Bytes of ``forwards`` forward passes and a backward pass."""
        return forwards * wire_of(self.forward) + wire_of(self.backward + self.again)


def wire_of(moves: Iterable[Move]) -> Fraction:
    """Return the bytes that a rank sends in all ``moves``."""
    return sum((move.wire for move in moves), Fraction(0))


def entering(x_bytes: int, n: int, *, rows: bool = False, again: bool = False) -> Passes:
    """Return the calls where x_BSD of ``x_bytes`` enters a region of tensor parallelism.

    Backward sums the gradient. With ``rows`` (sequence parallelism) forward gathers the rows of all
    ranks, and with ``again`` backward does so a second time.
    """
    if not rows:
        return Passes(backward=(Move("all_reduce", x_bytes, n),))
    gather = (Move("all_gather", Fraction(x_bytes, n), n),)
    return Passes(gather, (Move("reduce_scatter", x_bytes, n),), gather if again else ())


def leaving(x_bytes: int, n: int, *, rows: bool = False) -> Passes:
    """Return the calls at the end of a region: forward sums x_BSD, with ``rows`` to its shards."""
    if not rows:
        return Passes(forward=(Move("all_reduce", x_bytes, n),))
    forward = (Move("reduce_scatter", x_bytes, n),)
    return Passes(forward, (Move("all_gather", Fraction(x_bytes, n), n),))


def loss(tokens: int, itemsize: int, n: int) -> tuple[Move, ...]:
    """Return the calls of the vocabulary-parallel loss: maximum, own target and sum per token."""
    return (Move("all_reduce", tokens * itemsize, n, 3),)


def ring(kv_bytes: Bytes, sums_bytes: Bytes, n: int) -> Passes:
    """Return the calls of ring attention in a layer: a rank's K and V, and their gradients' sums.

    Backward sends both; the term of the rank itself stays at home.
    """
    keys_values = Move("send", kv_bytes, n, n - 1)
    return Passes((keys_values,), (keys_values, Move("send", sums_bytes, n, n - 1)))


def dispatch(pair_bytes: Bytes, n: int) -> Passes:
    """Return the calls of experts in a layer: there and back, for ``pair_bytes`` of even routes."""
    both = (Move("all_to_all", pair_bytes, n, 2),)
    return Passes(both, both)


class DataMoves(NamedTuple):
    """The calls of data parallelism in a step: sums of gradients, and gathers of parameters.

    ``rounds`` is how often per step: 1, or the number of micro-batches.
    """

    sums: tuple[Move, ...]
    gathers: tuple[Move, ...]
    sum_rounds: int = 1
    gather_rounds: int = 1

    @property
    def moves(self) -> tuple[Move, ...]:
        """The calls of a whole step."""
        return (
            *(move.times(self.sum_rounds) for move in self.sums),
            *(move.times(self.gather_rounds) for move in self.gathers),
        )


def of_data(
    stage: int,
    elements: Sequence[int],
    n: int,
    *,
    itemsize: int,
    gradient_itemsize: int,
    micro_batches: int = 1,
    gathered_once: Collection[int] = (),
) -> DataMoves:
    """Return the calls for flat parameters of ``elements``, padding included, by ZeRO's stage.

    Stage 0 sums whole gradients. ``gathered_once``: the units of stage 3 that are gathered once per
    micro-batch and not again in backward.
    """
    if stage == 0:
        return DataMoves(
            tuple(Move("all_reduce", one * gradient_itemsize, n) for one in elements), ()
        )
    sums = tuple(Move("reduce_scatter", one * gradient_itemsize, n) for one in elements)
    gathers = tuple(
        Move(
            "all_gather",
            Fraction(one * itemsize, n),
            n,
            1 if stage < 3 or unit in gathered_once else 2,
        )
        for unit, one in enumerate(elements)
    )
    return DataMoves(
        sums,
        gathers,
        micro_batches if stage > 1 else 1,
        micro_batches if stage > 2 else 1,
    )
