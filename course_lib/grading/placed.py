"""Exercises whose inputs are placed on an axis and whose reference is a single process.

The exercise says how each input and the output are placed: sharded along a dimension, replicated
or partial (a sum over the ranks). Expected results, gradients and the gradient that arrives at
the output all follow from the reference and these placements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from course_lib.grading.draw import Draw
from course_lib.grading.ranked import OnRanks
from course_lib.grading.runner import Act
from course_lib.grading.runner_placed import OUTPUT, UPSTREAM, call_forward, call_with_gradients
from course_lib.grading.trials import Given, Trial


@dataclass(frozen=True)
class Place:
    """How a tensor lies on the axis: ``dim`` for a shard, or ``partial`` for a term of a sum."""

    dim: int | None = None
    partial: bool = False

    def put(self, whole: Any, n: int, draw: Draw) -> list[Any]:
        """Return what each of ``n`` ranks has of ``whole``."""
        if self.partial:
            return draw.split(whole, n)
        return self.expected(whole, n)

    def expected(self, whole: Any, n: int) -> list[Any]:
        """Return the result of each of ``n`` ranks; a partial result is the sum on each."""
        if self.dim is None:
            return [whole] * n
        return [shard.contiguous() for shard in whole.chunk(n, self.dim)]


REPLICATED, PARTIAL = Place(), Place(partial=True)


def sharded(dim: int) -> Place:
    """Return the placement of a tensor that is split along ``dim`` into equal shards."""
    return Place(dim)


@dataclass(frozen=True)
class Placed(OnRanks):
    """An exercise of this form: the answer is called with the inputs in order, then the axis.

    ``whole(trial, draw)`` returns the inputs of a single process by name; ``inputs`` says how each
    is placed, and ``output`` how the result is. ``reference(*inputs)`` is the single process. With
    "gradients" among ``axes``, backward is called too: the gradient that arrives is drawn, and
    the expected gradient of an input has the placement of the input, or the one in ``gradients``.
    A gradient placed None is not looked at.
    """

    act: Act = field(default=call_forward, repr=False, kw_only=True)
    draw: Callable[[Trial, Draw], Any] = field(init=False, repr=False, kw_only=True)
    expected: Callable[[Given], Mapping[str, Any]] = field(init=False, repr=False, kw_only=True)
    whole: Callable[[Trial, Draw], Mapping[str, Any]] = field(repr=False, kw_only=True)
    inputs: Mapping[str, Place] = field(repr=False, kw_only=True)
    output: Place = field(default=REPLICATED, kw_only=True)
    reference: Callable[..., Tensor] = field(repr=False, kw_only=True)
    gradients: Mapping[str, Place | None] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "draw", self._draw)
        set_field(self, "expected", self._expected)
        if "gradients" in self.axes and self.act is call_forward:
            set_field(self, "act", call_with_gradients)

    def _draw(self, trial: Trial, draw: Draw) -> Any:
        whole = dict(self.whole(trial, draw))
        placed = {
            name: place.put(whole[name], trial.n, draw) for name, place in self.inputs.items()
        }
        if "gradients" in self.axes:
            like = self.reference(*(whole[name] for name in self.inputs))
            whole[UPSTREAM] = draw.upstream(*like.shape).to(like.dtype)
            placed[UPSTREAM] = self.output.expected(whole[UPSTREAM], trial.n)
        return [{name: placed[name][rank] for name in placed} for rank in range(trial.n)], whole

    def _expected(self, given: Given) -> dict[str, Any]:
        whole = {name: _leaf(value) for name, value in given.whole.items()}
        y = self.reference(*(whole[name] for name in self.inputs))
        found: dict[str, Any] = {OUTPUT: self.output.expected(y.detach(), given.n)}
        if "gradients" not in self.axes:
            return found
        y.backward(given.whole[UPSTREAM])
        for name, place in self.inputs.items():
            where = self.gradients.get(name, place)
            if where is not None and getattr(whole[name], "grad", None) is not None:
                found[f"gradient of {name}"] = where.expected(whole[name].grad, given.n)
        return found


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().clone().requires_grad_()
    return value


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the payload of a call with this tensor."""
    return tensor.numel() * tensor.element_size()
