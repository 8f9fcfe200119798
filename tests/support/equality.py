"""How two sets of gradients or weights are compared: the largest error, and the projection."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]


def worst_error(got: Tensors, want: Tensors) -> tuple[float, str]:
    """(max|g - ref| / max|ref|, name) of the parameter where that is largest.

    A key bias has gradient 0 in theory: its error is taken relative to the largest of all.
    """
    assert got.keys() == want.keys(), f"names differ: {got.keys() ^ want.keys()}"
    largest = max(float(tensor.abs().max()) for tensor in want.values())
    worst = (0.0, "")
    for name, reference in want.items():
        scale = largest if name.endswith("attn.k.bias") else float(reference.abs().max())
        error = float((got[name] - reference).abs().max()) / (scale or 1.0)
        worst = max(worst, (error, name))
    return worst


def projection(got: Tensors, want: Tensors) -> float:
    """(g . ref) / (ref . ref) over all parameters: names a wrong factor, which Adam hides."""
    dot = sum(float((got[name] * want[name]).sum()) for name in want)
    return dot / sum(float((reference * reference).sum()) for reference in want.values())


def assert_equal(got: Tensors, want: Tensors, tolerance: float, what: str) -> None:
    """Within ``tolerance``, and of the right size."""
    factor = projection(got, want)
    assert abs(factor - 1) < max(10 * tolerance, 1e-12), f"{what} are {factor:.6g} times too large"
    error, name = worst_error(got, want)
    assert error <= tolerance, f"{what}: {name} is off by {error:.3g}, {tolerance:.0e} allowed"


def assert_bitwise(got: Tensors, want: Tensors, what: str) -> None:
    """Not one bit differs."""
    for name, reference in want.items():
        assert torch.equal(got[name], reference), f"{what}: {name} differs"
