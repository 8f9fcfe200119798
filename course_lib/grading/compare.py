"""Describe a wrong tensor in words: its shape, its dtype, a wrong factor, the wrong ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

RELATIVE, ABSOLUTE = 1e-4, 1e-5  # for float32 sums in another order; a mistake is much larger
SHORT = 16  # terms of a sum that was rounded to float32


def agrees(got: Any, wanted: Tensor, terms: int | None = None) -> bool:
    """Return whether ``got`` is a tensor equal to ``wanted`` up to rounding, with its shape.

    ``terms`` is the length of the sums in it: the bound of an element is so many rounding errors
    of its dtype, relative to the element and to the root mean square of all.
    """
    return (
        isinstance(got, Tensor)
        and got.shape == wanted.shape
        and got.dtype == wanted.dtype
        and got.layout == wanted.layout
        and got.device == wanted.device
        and not bool(_wrong(got, wanted, terms).any())
    )


def _wrong(got: Tensor, wanted: Tensor, terms: int | None) -> Tensor:
    """Return which elements are wrong."""
    a, b = got.detach().double(), wanted.detach().double()
    if not wanted.is_floating_point() and not wanted.is_complex():
        return got.detach() != wanted.detach()
    if terms is None:
        return ~torch.isclose(a, b, RELATIVE, ABSOLUTE, equal_nan=True)
    finite = torch.where(b.isfinite(), b, 0.0)
    typical = finite.square().mean().sqrt() if b.numel() else 0.0
    bound = torch.finfo(wanted.dtype).eps * (2 + terms) * (finite.abs() + typical)
    same = (a == b) | (a.isnan() & b.isnan())
    return ~(same | ((a - b).abs() <= bound))


def factor(got: Tensor, wanted: Tensor, terms: int | None = None) -> float | None:
    """Return k if ``got`` is k times ``wanted`` and k is neither 0 nor 1; else None."""
    got, wanted = got.detach().double().flatten(), wanted.detach().double().flatten()
    norm = float(wanted @ wanted) if got.shape == wanted.shape else 0.0
    if norm == 0:
        return None
    k = float(got @ wanted) / norm
    if abs(k) < 1e-6 or abs(k - 1) < 1e-3 or not agrees(got, k * wanted):
        return None
    return k


def times(k: float) -> str:
    """Return ``exactly 4 times too large``, ``... too small`` or ``-2 times the right value``."""
    for size, word in ((k, "large"), (1 / k, "small")):
        if size > 1:
            return f"exactly {round(size, 3):g} times too {word}"
    return f"{round(k, 3):g} times the right value"


def difference(
    what: str, got: Sequence[Any], wanted: Sequence[Tensor], terms: int | None = None
) -> str:
    """Describe what is wrong with the tensors ``got`` by rank; return "" if all are right.

    ``what`` names the tensors in the plural: "outputs", "gradients". ``terms`` as in
    :func:`agrees`.
    """
    bad = [rank for rank, value in enumerate(got) if not agrees(value, wanted[rank], terms)]
    if not bad:
        return ""
    rank = bad[0]
    value, right = got[rank], wanted[rank]
    if not isinstance(value, Tensor):
        return f"expected a tensor from rank {rank}, got a {type(value).__name__}"
    if value.shape != right.shape:
        expected = f"expected {what} of shape {list(right.shape)} on rank {rank}"
        return f"{expected}, got shape {list(value.shape)}"
    if value.dtype != right.dtype:
        return f"expected {what} of {right.dtype} on rank {rank}, got {value.dtype}"
    if (k := _common_factor(got, wanted)) is not None:
        return f"your {what} are {times(k)}" if terms is None else f"{what}: {times(k)}"
    if terms is not None and right.dtype == torch.float64 and _as_float32(got, wanted):
        return (
            f"{what}: right only to the precision of float32; compute and send in float64, "
            "the dtype of the inputs"
        )
    if terms is not None:
        return f"{what}: {_pattern(got, wanted, terms) or _place(bad, len(got))}: " + _worst(
            value, right, rank, terms
        )
    numbers = f"rank{'s' * (len(bad) > 1)} {', '.join(map(str, bad))} only"
    where = "every rank" if len(bad) == len(got) else numbers
    return f"{what} are wrong on {where}: {_worst(value, right, rank, terms)}"


def _as_float32(got: Sequence[Any], wanted: Sequence[Tensor]) -> bool:
    """Return whether float64 results are wrong only by rounding to float32."""
    return all(
        isinstance(value, Tensor) and agrees(value.float(), right.float(), SHORT)
        for value, right in zip(got, wanted, strict=True)
    )


def _place(bad: list[int], n: int) -> str:
    """Return on which ranks a result is wrong."""
    if len(bad) == n:
        return "wrong on every rank" if n > 1 else "wrong"
    return f"wrong on rank{'s' * (len(bad) > 1)} {', '.join(map(str, bad))} only"


def _pattern(got: Sequence[Any], wanted: Sequence[Tensor], terms: int) -> str:
    """Return how the results were exchanged between the ranks, or ""."""
    n = len(got)
    if n == 1 or all(agrees(each, wanted[0], terms) for each in wanted):
        return ""
    for shift in range(1, n):
        if all(agrees(got[rank], wanted[(rank + shift) % n], terms) for rank in range(n)):
            return f"rank r has the result of rank (r + {shift}) mod {n}"
    for rank, right in enumerate(wanted):
        if all(agrees(each, right, terms) for each in got):
            return f"every rank has the result of rank {rank}"
    return ""


def _common_factor(got: Sequence[Any], wanted: Sequence[Tensor]) -> float | None:
    """Return k if the result on every rank is k times the right value; else None."""
    found: set[float] = set()
    for value, right in zip(got, wanted, strict=True):
        if value is right and not right.any():  # a rank without this result
            continue
        k = factor(value, right) if isinstance(value, Tensor) else None
        if k is None:
            return None
        found.add(round(k, 3))
    return found.pop() if len(found) == 1 else None


def _worst(value: Tensor, right: Tensor, rank: int, terms: int | None) -> str:
    """Return the number of wrong elements on a rank, and the first of them."""
    bad = _wrong(value, right, terms)
    place = bad.nonzero()[0].tolist()
    got, wanted = value[tuple(place)].item(), right[tuple(place)].item()
    digits = next((d for d in range(4, 17) if f"{got:.{d}g}" != f"{wanted:.{d}g}"), 17)
    count = f"{int(bad.sum())} of {value.numel()} elements"
    numbers = f"expected {wanted:.{digits}g}, got {got:.{digits}g}"
    return f"on rank {rank}, {count}; first at {place}: {numbers}"
