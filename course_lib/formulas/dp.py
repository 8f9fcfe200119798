"""Bytes that data parallelism sends, from shapes alone."""

from __future__ import annotations

from fractions import Fraction

from course_lib.ledger import wire


def wire_bytes(parameter_bytes: int, n: int) -> Fraction:
    """Return the bytes that a rank sends per step: 2(n-1)/n times those of trainable parameters.

    The same for all three ways and for any number of micro-batches. A tied weight counts once.
    """
    return wire("all_reduce", parameter_bytes, n)
