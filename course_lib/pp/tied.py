"""A tied embedding: its copies in the first stage and, as LM head, in the last one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from course_lib import comm
from course_lib.mesh import Axis
from course_lib.model import Decoder
from course_lib.schedule import Schedule


@contextmanager
def summed_gradient(
    schedule: Schedule, stages: Mapping[int, Decoder], pp: Axis, sum_tied: bool = True
) -> Iterator[list[int]]:
    """Run a step inside; at its end add the gradients of the two copies up, on both ranks.

    Yields this rank's stages whose gradients are complete only then. In a V-shaped placement these
    are the two that share one embedding, and nothing is sent; otherwise the one with a copy. With
    ``sum_tied=False`` the caller sums copies on two ranks.
    """
    first, last = schedule.placement[0], schedule.placement[-1]
    outer = [stage for stage in stages if stage in (0, schedule.stages - 1)]
    weight = tied_weight(stages)
    if weight is None or not weight.requires_grad or (first != last and not sum_tied):
        yield []
        return
    if first == last:
        yield outer
        return
    before, weight.grad = weight.grad, None  # only what this step adds is summed
    yield outer
    step = _sum_of_both(weight.grad, pp, other=first + last - pp.rank)
    weight.grad = step if before is None else before.add_(step)


def tied_weight(stages: Mapping[int, Decoder]) -> nn.Parameter | None:
    """Return the weight of a tied embedding and LM head, if this rank has either of them."""
    for stage in stages.values():
        module: Any = stage.head if stage.embedding is None else stage.embedding.token
        if stage.config.tied and module is not None:
            return module.weight
    return None


def _sum_of_both(gradient: Tensor | None, pp: Axis, other: int) -> Tensor:
    """Do an all-reduce over two ranks, in place: each sends its gradient to the other.

    Without it the copies would differ after the first step.
    """
    assert gradient is not None, "backward has reached both copies"
    return gradient.add_(comm.exchange(gradient, pp, to=other, source=other))
