"""Bytes that ZeRO sends and stores, from shapes only.

``elements`` counts the trained parameters of each flat parameter, before padding: one number per
bucket in stages 1 and 2, per unit in stage 3, the root first (0 where all of it is frozen).
``frozen`` counts the frozen ones likewise; stages 1 and 2 do not shard them. n is the number of
ranks, F the padded elements, b the bytes per parameter, a the bytes per element of its gradient
and of its master weight (4 at least).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fractions import Fraction
from itertools import pairwise, zip_longest

from course_lib.formulas.moves import of_data, wire_of
from course_lib.formulas.parameters import FLOAT32, Dtype, accumulation_itemsize


def padded(elements: int, n: int) -> int:
    """Return F, the smallest multiple of ``n`` that is not less than ``elements``."""
    return -(-elements // n) * n


def _sizes(stage: int, elements: Sequence[int], n: int, dtype: Dtype) -> tuple[list[int], int, int]:
    """Return F of each flat parameter, b and a."""
    if stage not in (1, 2, 3):
        raise ValueError(f"stage={stage}: ZeRO has stages 1, 2 and 3")
    return [padded(one, n) for one in elements], dtype.itemsize, accumulation_itemsize(dtype)


def wire_bytes(
    stage: int,
    elements: Sequence[int],
    n: int,
    *,
    dtype: Dtype = FLOAT32,
    micro_batches: int = 1,
    gathered_once: Collection[int] = (),
    frozen: Sequence[int] = (),
) -> Fraction:
    """Return the bytes that a rank sends per optimizer step of M micro-batches.

    ========  =============================================================
    stage 1   (n-1)/n sum F (a + b)                  as data parallelism
    stage 2   (n-1)/n sum F (M a + b)
    stage 3   (n-1)/n sum F (a + 2b) M               b for a unit gathered once
    ========  =============================================================

    ``gathered_once`` numbers the units that are gathered once per micro-batch: units that are not
    resharded after forward (in Zero3 by default 0 and the last one), and units without a backward
    (frozen, and nothing trained before them). Frozen parameters are gathered and never reduced.
    Prefetch does not change the bytes.
    """
    full, b, a = _sizes(stage, elements, n, dtype)
    fixed = [padded(one, n) for one in frozen] if stage == 3 else []
    return wire_of(
        move
        for units, width in ((full, a), (fixed, 0))
        for move in of_data(
            stage,
            units,
            n,
            itemsize=b,
            gradient_itemsize=width,
            micro_batches=micro_batches,
            gathered_once=gathered_once,
        ).moves
    )


def state_bytes(
    stage: int,
    elements: Sequence[int],
    n: int,
    *,
    dtype: Dtype = FLOAT32,
    frozen: Sequence[int] = (),
) -> int:
    """Return the bytes that a rank stores between steps: parameters, master weights, two moments.

    ========  ==================================================================
    stage 1   sum F b + sum F/n a (2, or 3 where b is not a) + frozen b
    stage 2   the same
    stage 3   sum F/n 3 a + frozen/n b
    ========  ==================================================================

    In the paper's mixed precision with Adam that is 2 + 12/n and 12/n bytes per parameter. The
    count leaves out gradients (sum F/n a from the last reduce-scatter to ``zero_grad()``, see
    :func:`peak_bytes`) and two small tensors per flat parameter: the optimizer's step counter (4
    bytes in torch's Adam), and in stage 3 the one element that freed parameters read (b).
    """
    full, b, a = _sizes(stage, elements, n, dtype)
    copies = 2 + (stage == 3 or a != b)
    frozen_here = sum(padded(F, n) // n for F in frozen) if stage == 3 else sum(frozen)
    return sum(F * b * (stage < 3) + F // n * a * copies for F in full) + frozen_here * b


def peak_bytes(
    stage: int,
    elements: Sequence[int],
    n: int,
    *,
    dtype: Dtype = FLOAT32,
    micro_batches: int = 1,
    frozen: Sequence[int] = (),
) -> int:
    """Return the peak bytes of gradients and gathered parameters in a step, on gloo.

    A rank also needs :func:`state_bytes`, activations, the gradient of the one parameter that is
    being collected, the optimizer's temporaries and stage 3's cast of one shard. The peak is
    reached while flat parameter k, in backward's order, is reduced: gloo's reduce-scatter needs
    memory for the elements that it sends and for those that it receives.

    ========  =======================================================================
    stage 1   a (shards; F from k on; F of k, received)
    stage 2   a (shards; F of k, sent and received; F of the next one, being filled)
    stage 2   a (shards) + b (shards, cast)            in step(), where b is not a
    stage 3   a (shards; F of k, sent and received; the root's gradient)
              + b (the root; the next unit and the one after it, gathered)
    stage 3   a (shards; F of the root, sent and received)              k is the root
              + b (the root; two units)      in the forward of the next micro-batch
    ========  =======================================================================

    ``shards`` is F/n of every sum received so far; F/n of k counts twice while it is added to the
    sum of earlier micro-batches. Stage 1 has one reduce-scatter for all micro-batches. The lines of
    stage 3 describe Zero3's defaults: root and last unit not resharded, with prefetch. n must be
    above 1. nccl needs no separate memory to receive: one F less.
    """
    full, b, a = _sizes(stage, elements, n, dtype)
    rounds = min(micro_batches, 3)  # the first, one in the middle, and the last
    if stage == 1:
        return max(a * (sum(full[: k + 1]) // n + sum(full[k:]) + F) for k, F in enumerate(full))
    if stage == 2:
        reduced = _while_reduced(full * rounds, len(full), n)
        following = [*full * rounds, 0][1:]
        in_step = sum(full) // n * (a + b * (a != b))
        return max(in_step, *(a * (at + F) for at, F in zip(reduced, following, strict=True)))
    gathered = [
        F + padded(fixed, n) for F, fixed in zip_longest(full, frozen[: len(full)], fillvalue=0)
    ]
    return _peak_of_stage_3(full, gathered, rounds, n, a, b)


def _while_reduced(sent: Sequence[int], flats: int, n: int) -> list[int]:
    """Count the elements of shards and of the gradient in flight, while each flat is reduced."""
    return [
        sum(sent[: min(number + 1, flats)]) // n + (number >= flats) * F // n + 2 * F
        for number, F in enumerate(sent)
    ]


def _peak_of_stage_3(
    full: Sequence[int], gathered: Sequence[int], rounds: int, n: int, a: int, b: int
) -> int:
    """Return the peak of stage 3: backward runs the units from the last to the first.

    The root comes before and after all of them.
    """
    (root, *units), (root_b, *units_b) = full, gathered
    order = [*units[::-1], root]
    after = [*units_b[::-1], 0, 0]  # gathered while a unit is reduced: the two that follow
    while_reduced = _while_reduced(order * rounds, len(order), n)
    pair = max((one + other for one, other in pairwise([*units_b, 0])), default=0)
    peaks = []
    for number, elements in enumerate(while_reduced):
        this_round, k = divmod(number, len(order))
        if k < len(units):
            peaks.append(a * (elements + root) + b * (root_b + after[k + 1] + after[k + 2]))
        elif this_round + 1 < rounds:  # the root's shard is received with the reduced sum
            forward = elements - root // n
            peaks.append(a * forward + b * (root_b + pair))
            peaks.append(a * elements + b * (root_b + after[0]))
        else:
            peaks.append(a * elements)
    return max(peaks)
