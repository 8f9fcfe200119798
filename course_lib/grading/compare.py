"""Describe a wrong tensor in words: its shape, its dtype, a wrong factor, the wrong ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

RELATIVE, ABSOLUTE = 1e-4, 1e-5  # for float32 sums in another order; a mistake is much larger


def agrees(got: Any, wanted: Tensor) -> bool:
    """Return whether ``got`` is a tensor equal to ``wanted`` up to rounding, with its shape."""
    return (
        isinstance(got, Tensor)
        and got.shape == wanted.shape
        and got.dtype == wanted.dtype
        and got.layout == wanted.layout
        and got.device == wanted.device
        and torch.allclose(got.double(), wanted.double(), RELATIVE, ABSOLUTE)
    )


def factor(got: Tensor, wanted: Tensor) -> float | None:
    """Return k if ``got`` is k times ``wanted`` and k is neither 0 nor 1; else None."""
    got, wanted = got.double().flatten(), wanted.double().flatten()
    norm = float(wanted @ wanted)
    if norm == 0 or got.shape != wanted.shape:
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


def difference(what: str, got: Sequence[Any], wanted: Sequence[Tensor]) -> str:
    """Describe what is wrong with the tensors ``got`` by rank; return "" if all are right.

    ``what`` names the tensors in the plural: "outputs", "gradients".
    """
    bad = [rank for rank, value in enumerate(got) if not agrees(value, wanted[rank])]
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
        return f"your {what} are {times(k)}"
    where = "every rank" if len(bad) == len(got) else f"ranks {', '.join(map(str, bad))} only"
    return f"{what} are wrong on {where}: {_worst(value, right, rank)}"


def _common_factor(got: Sequence[Any], wanted: Sequence[Tensor]) -> float | None:
    """Return k if the result on every rank is k times the right value; else None."""
    found: set[float] = set()
    for value, right in zip(got, wanted, strict=True):
        k = factor(value, right) if isinstance(value, Tensor) else None
        if k is None:
            return None
        found.add(round(k, 3))
    return found.pop() if len(found) == 1 else None


def _worst(value: Tensor, right: Tensor, rank: int) -> str:
    """Return the number of wrong elements on a rank, and the first of them."""
    bad = ~torch.isclose(value.double(), right.double(), RELATIVE, ABSOLUTE)
    place = bad.nonzero()[0].tolist()
    got, wanted = value[tuple(place)].item(), right[tuple(place)].item()
    count = f"{int(bad.sum())} of {value.numel()} elements"
    return f"on rank {rank}, {count}; first at {place}: expected {wanted:.4g}, got {got:.4g}"
