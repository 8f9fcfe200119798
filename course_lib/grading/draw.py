"""Draw the inputs of an exercise from a seed."""

from __future__ import annotations

import random

import torch
from torch import Tensor


class Draw:
    """Values for one call of an answer.

    ``sizes`` is the seed of the sizes, ``values`` that of the values: two calls of a launch may
    have the same sizes and have never the same values. ``call`` is 0 or 1. ``dims`` is the
    smallest number of dimensions of a shape.
    """

    def __init__(
        self,
        sizes: int,
        values: int,
        dtype: torch.dtype = torch.float32,
        call: int = 0,
        dims: int = 1,
    ) -> None:
        self.dtype, self.call, self._dims = dtype, call, dims
        self.random = random.Random(sizes)
        self._torch = torch.Generator().manual_seed(values)

    def size(self, low: int, high: int) -> int:
        """Return a whole number from ``low`` to ``high``, both included."""
        return self.random.randint(low, high)

    def shape(self, *, low: int = 2, high: int = 5) -> tuple[int, ...]:
        """Return a shape of up to three dimensions, each from ``low`` to ``high``; one of
        several is 1 in call 1, unless both calls have the same sizes."""
        sizes = [self.size(low, high) for _ in range(self.size(self._dims, 3))]
        if self.call and self._dims == 1 and len(sizes) > 1:
            sizes[self.random.randrange(len(sizes))] = 1
        return tuple(sizes)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Return normally distributed values, for exercises that compute with them."""
        return (torch.randn(shape, generator=self._torch) * scale).to(self.dtype)

    def upstream(self, *shape: int) -> Tensor:
        """Return a gradient that arrives at an output. In call 1 it is expanded along the
        first dimension, as the backward of a sum gives it."""
        return self.normal(*shape[1:]).expand(shape) if self.call else self.normal(*shape)

    def tensor(self, *shape: int) -> Tensor:
        """Return values with zeros, duplicates and magnitudes up to several hundred."""
        x = torch.randn(shape, generator=self._torch)
        kind = torch.rand(shape, generator=self._torch)
        x = torch.where(kind < 0.15, 0.0, x)
        x = torch.where((kind > 0.15) & (kind < 0.3), -1.5, x)
        return torch.where(kind > 0.9, 300 * x, x).to(self.dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Return whole numbers (int64) from ``low`` to ``high``, both included."""
        return torch.randint(low, high + 1, shape, generator=self._torch)

    def split(self, whole: Tensor, n: int) -> list[Tensor]:
        """Return ``n`` tensors that are different from each other and whose sum is ``whole``."""
        parts = [self.normal(*whole.shape) for _ in range(n - 1)]
        return [*parts, whole - sum(parts, torch.zeros_like(whole))]
