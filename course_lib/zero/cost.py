"""What ZeRO sends and keeps, from shapes alone.

``elements`` are the trained parameters of each flat, before padding: one number for each bucket
in stages 1 and 2, for each unit in stage 3, the root first. n ranks, F = padded elements, b bytes
of a parameter, a bytes of its gradient and of its master weight (4 at least).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fractions import Fraction

import torch

from course_lib.zero.flat import padded, reduce_dtype


def _shapes(
    stage: int, elements: Sequence[int], n: int, dtype: torch.dtype
) -> tuple[list[int], int, int]:
    """F of each flat, b and a."""
    if stage not in (1, 2, 3):
        raise ValueError(f"stage={stage}: ZeRO has stages 1, 2 and 3")
    return [padded(one, n) for one in elements], dtype.itemsize, reduce_dtype(dtype).itemsize


def wire_bytes(
    stage: int,
    elements: Sequence[int],
    n: int,
    *,
    dtype: torch.dtype = torch.float32,
    micro_batches: int = 1,
    kept: Collection[int] = (),
    frozen: Sequence[int] = (),
) -> Fraction:
    """Bytes that a rank sends per optimizer step of M micro-batches.

    ========  =============================================================
    stage 1   (n-1)/n sum F (a + b)                  as data parallelism
    stage 2   (n-1)/n sum F (M a + b)
    stage 3   (n-1)/n sum F (a + 2b) M               b for a unit that is kept
    ========  =============================================================

    ``kept`` numbers the units that stay gathered between forward and backward; ``frozen`` are the
    frozen elements of each unit, which stage 3 gathers and never reduces.
    """
    full, b, a = _shapes(stage, elements, n, dtype)
    if stage < 3:
        total = sum(full) * (b + a * (micro_batches if stage == 2 else 1))
    else:
        gathers = [1 if unit in kept else 2 for unit in range(len(full))]
        total = sum(F * (a + b * times) for F, times in zip(full, gathers, strict=True))
        total += sum(padded(F, n) * b * times for F, times in zip(frozen, gathers, strict=False))
        total *= micro_batches
    return Fraction(n - 1, n) * total


def state_bytes(
    stage: int,
    elements: Sequence[int],
    n: int,
    *,
    dtype: torch.dtype = torch.float32,
    moments: int = 2,
) -> int:
    """Bytes that a rank keeps between steps: parameters, masters, ``moments`` of the optimizer.

    Stages 1 and 2: sum F b, then a (moments + 1 where a master is no piece of the parameters) for
    each of F/n. Stage 3: a (moments + 1) for each of F/n, and no parameters at all. In the paper's
    mixed precision with Adam that is 2 + 12/n and 12/n bytes a parameter.
    """
    full, b, a = _shapes(stage, elements, n, dtype)
    copies = moments + (stage == 3 or a != b)
    return sum(F * b * (stage < 3) + F // n * a * copies for F in full)


def peak_bytes(
    stage: int, elements: Sequence[int], n: int, *, dtype: torch.dtype = torch.float32
) -> int:
    """Bytes of gradients and gathered parameters at the fullest moment of a step, on gloo.

    Beyond :func:`state_bytes`, activations, and the one parameter's gradient that is just being
    handed over. It is reached when flat k of backward's order lands and the next one is on:

    ========  =================================================================
    stage 1   a (F/n up to k; F from k on; what k's reduce-scatter received)
    stage 2   a (F/n up to k; F of k, sent and received; F of k+1, filling)
    stage 3   a (F/n up to k; F of k, sent and received; the root's gradient)
              + b (the root; units k+1 and k+2, gathered)
    ========  =================================================================

    On nccl nothing is received aside: one F of k less. n must be above 1.
    """
    full, b, a = _shapes(stage, elements, n, dtype)
    root, flats = (full[0], full[:0:-1]) if stage == 3 else (0, full)  # as backward meets them
    flats, count = [*flats, 0, 0], len(flats)

    def at(k: int) -> int:
        landed = sum(flats[: k + 1]) // n
        if stage == 1:
            return a * (landed + sum(flats[k:]) + flats[k])
        if stage == 2:
            return a * (landed + 2 * flats[k] + flats[k + 1])
        return a * (landed + 2 * flats[k] + root) + b * (root + flats[k + 1] + flats[k + 2])

    return max(at(k) for k in range(count)) if count else a * (2 * root + root // n)
