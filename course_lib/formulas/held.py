"""Bytes that a rank holds in a step, as the meters of :mod:`course_lib.trace` count them.

State: parameters, gradients, two moments of Adam for each, and Adam's counter of steps for each
tensor that it updates. Saved activations: what autograd saves from a forward to its backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from course_lib.formulas.parameters import FLOAT32, Dtype, accumulation_itemsize
from course_lib.formulas.zero import padded, state_bytes
from course_lib.schedule import Action

COUNTER_BYTES = 4  # Adam's number of steps
COUNT_BYTES = 8  # the number of tokens by which a loss is divided: backward keeps it


def adam_state_bytes(sizes: Sequence[int], width: int) -> int:
    """Return the bytes of parameters of ``sizes`` elements with gradients, moments and counters."""
    return 4 * sum(sizes) * width + COUNTER_BYTES * len(sizes)


def sharded_state_bytes(stage: int, elements: Sequence[int], n: int, dtype: Dtype = FLOAT32) -> int:
    """Return the state bytes of a rank under ZeRO, with the gradients of its shards.

    ``elements`` as in :mod:`course_lib.formulas.zero`. In stage 3, each flat parameter also stores
    the one element to which its parameters point while they are not gathered.
    """
    width = accumulation_itemsize(dtype)
    gradients = sum(padded(size, n) // n * width for size in elements)
    numbers = len(elements) * (COUNTER_BYTES + (dtype.itemsize if stage == 3 else 0))
    return state_bytes(stage, elements, n, dtype=dtype) + gradients + numbers


def buckets(sizes: Iterable[int], limit: int) -> list[int]:
    """Return the elements of buckets; a bucket is closed when it reaches ``limit`` elements.

    ``sizes`` are those of the tensors, in the order in which backward computes their gradients.
    """
    found: list[int] = []
    for size in sizes:
        if not found or found[-1] >= limit:
            found.append(0)
        found[-1] += size
    return found


def peak_saved_bytes(
    row: Iterable[Action],
    whole: Callable[[int, int], int],
    waiting: Callable[[int], int] | None = None,
    once: Mapping[int, int] | None = None,
) -> int:
    """Return the peak bytes of saved activations of the rank that performs ``row``.

    ``whole(stage, mb)`` are saved from F to the end of B or I, ``waiting(stage)`` from the end of I
    to W. ``once[stage]`` are saved while any micro-batch is whole on the stage.
    """
    kept: dict[tuple[int, int], int] = {}
    at: Counter[int] = Counter()  # micro-batches by stage, before B or I
    later = peak = 0
    for op, stage, mb in row:
        if op == "F":
            kept[stage, mb] = whole(stage, mb)
            at[stage] += 1
        shared = sum(size for own, size in (once or {}).items() if at[own])
        peak = max(peak, sum(kept.values()) + later + shared)
        if op in "BI":
            del kept[stage, mb]
            at[stage] -= 1
        if op in "IW":
            assert waiting is not None
            later += waiting(stage) if op == "I" else -waiting(stage)
    return peak
